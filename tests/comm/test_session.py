"""How ranks begin and end a session: whatever an earlier one left in the store, and however the program ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, collect, run_ranks, start_ranks, unfailed
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

import ddp
from ddp.comm import checks, session
from ddp.comm.meeting import rendezvous as meeting
from ddp.comm.meeting.place import RankPlace, place
from ddp.comm.meeting.rendezvous import open_store, rendezvous
from ddp.comm.session import current
from ddp.comm.watch import watchdog
from ddp.comm.watch.call import Call
from ddp.errors import ConfigError, PeerLost
from ddp.process.terminal import log

ROOT = Path(__file__).parents[2]


def come_together(store: Store, world_size: int, *, late: float = 0.0) -> list[int]:
    """Each rank counts itself in its session's part; the last one comes `late` seconds after the others."""

    def one(rank: int) -> int:
        time.sleep(late * (rank == world_size - 1))
        return rendezvous(store, rank, world_size, warn_s=10, abort_s=20).add("visits", 1)

    with ThreadPoolExecutor(world_size) as threads:
        return sorted(threads.map(one, range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_sessions_in_one_store_have_places_of_their_own(world_size: int) -> None:
    """As the attempts of torchrun, whose store outlives them; the one before may have been of another size."""
    store = HashStore()
    for size in (world_size, world_size + 1, world_size):
        for late in (0.0, 0.1):
            assert come_together(store, size, late=late) == list(range(1, size + 1))


def test_a_rank_of_an_earlier_session_does_not_stand_in_for_one_that_never_comes() -> None:
    store = HashStore()
    come_together(store, 3)
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(rendezvous, store, rank, 3, warn_s=9, abort_s=0.5) for rank in (0, 2)]
        for rank in ranks:
            with pytest.raises(PeerLost, match=r"lost rank 1.*of 3 ranks, \[1\] did not come within 0.5 s"):
                rank.result()


@pytest.mark.parametrize(("address", "why"), [("127.0.0.1", "Connection refused"), ("no-host.invalid", "Errno -")])
def test_no_client_of_torch_s_is_under_way_once_a_rank_has_given_up(
    address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would return while the interpreter exits, which aborts the process before it has said why."""
    clients: list[object] = []
    monkeypatch.setattr(meeting, "TCPStore", lambda *_, **__: clients.append(0) or time.sleep(3))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(PeerLost, match=rf"serves at {address}:\d+, is out of reach .*{why}"):
            open_store(RankPlace("a test", 1, 2, address=address, port=bound.getsockname()[1]), warn_s=0.1, abort_s=0.3)
    assert not clients


class Stopped(HashStore):
    """A store whose process is stopped: who asks waits, and nobody else can use the same client meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._client, self.goes_on = threading.Lock(), threading.Event()

    def clone(self) -> Stopped:
        return self

    def set(self, key: str, value: str) -> None:
        with self._client:
            super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        with self._client:
            return self.goes_on.wait() and super().check(keys)


def test_a_store_that_stops_to_answer_holds_nobody_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp.comm.meeting.rendezvous.LET_GO_S", 0.0)
    for name in ("INTERVAL_S", "SEARCH_S", "STORE_S"):
        monkeypatch.setattr(watchdog, name, 0.05)
    store, of_watchdog = Stopped(), Stopped()
    with pytest.raises(PeerLost, match=r"lost rank 0 .*has not responded for 0.1 s: it was stopped"):
        rendezvous(store, 1, 2, warn_s=9, abort_s=0.1)
    watches = watchdog.Watchdog(of_watchdog, 1, 2, generation=0, warn_s=9, abort_s=0.1)
    watches.begin(Call(1, "all_reduce"), 0)
    lost = watches.find_culprit(0)
    monkeypatch.setattr(watchdog, "STALE_S", 0.1)
    with pytest.raises(PeerLost, match=r"lost rank 0 .* does not respond"):
        watches.wait_for_value("passed", 0, Call(2, "wait_for_rank_zero"))
    watches.fail("as a session that ends after an error")
    watches.leave()
    assert "lost rank 0 " in str(lost)
    assert "does not respond" in lost.reason
    for each in (store, of_watchdog):
        each.goes_on.set()


def test_a_firewall_between_the_ranks_is_no_fault_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp.comm.meeting.rendezvous.LET_GO_S", 0.0)
    store, for_ever = HashStore(), threading.Event()
    monkeypatch.setattr(session, "_met", lambda *_, **__: store)
    monkeypatch.setattr(session, "place", lambda: RankPlace("", 0, 2))
    monkeypatch.setattr(session, "for_torch", lambda store: store)
    monkeypatch.setattr(session.dist, "init_process_group", lambda *_, **__: for_ever.wait())
    with pytest.raises(PeerLost, match=r"lost rank 1 .*no connection for 0\.1 s.* a firewall is between the hosts"):
        session._join(warn_s=9, abort_s=0.1)
    for_ever.set()


def test_ranks_that_torch_cannot_connect_name_the_one_that_has_gone() -> None:
    store = HashStore()
    for rank in (0, 2):
        store.set(f"joins/{rank}", "")
    lost = session._not_connected(store, 0, 3, RuntimeError("wait timeout"))
    assert "lost rank 1 " in str(lost)
    assert "it arrived, but could not be connected (wait timeout)" in lost.reason


def begin_again_and_again() -> list[tuple[float, float, float]]:
    """The application destroys its process group and begins another one, as a sweep or a test suite does."""
    base = TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=False)
    rank, found = int(os.environ["RANK"]), []
    for number in range(4):
        store = PrefixStore(str(number), base)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30 + number))
        model = ddp.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        assert isinstance(group, dist.ProcessGroup)
        beside = ddp.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=group)
        for each in (model, beside):
            each(torch.full((1, 1), 2.0 * rank)).sum().backward()
            (weight,) = each.parameters()
            assert weight.grad is not None
            assert weight.grad.item() == 1
        found.append((model.comm.abort_s, beside.comm.abort_s, model.comm.generation))
        if number % 2:
            ddp.shutdown()
        dist.destroy_process_group()
    ddp.shutdown()
    return found


def test_process_groups_one_after_another_in_the_same_processes() -> None:
    """Each with a communicator of its own, and the group's timeout as its deadline."""
    expected = [(30.0 + number, 20.0, number) for number in range(4)]
    assert run_ranks(begin_again_and_again, 2) == [expected, expected]


def train_beside_gpus() -> list[float]:
    """README's "From Python" on a machine that has GPUs; `device_count` stands in for them."""
    torch.cuda.device_count = lambda: 2
    comm = ddp.init(abort_s=20)
    model = ddp.DistributedDataParallel(torch.nn.Linear(4, 1))
    assert model.comm is comm is ddp.init() is ddp.init(device="cpu")
    model(torch.full((8, 4), float(comm.rank))).sum().backward()
    elsewhere = torch.empty(3, device="meta")
    checks.dense = checks.is_flat = lambda tensor: None  # which refuse "meta" first; it stands for a GPU here
    for verb in (comm.all_reduce, comm.all_gather, comm.broadcast, comm.reduce_scatter):
        with pytest.raises(ConfigError, match=r"\[3\] on meta, and this communicator's are on cpu: pass its .to"):
            verb(elsewhere)
    total = comm.all_reduce(torch.ones(3))
    ddp.shutdown()
    return list(total.tolist())


def test_ranks_are_on_the_cpu_where_the_model_is_though_there_are_gpus() -> None:
    assert run_ranks(train_beside_gpus, 2) == [[2.0] * 3] * 2


def fail_in_the_middle(shared_memory: bool) -> None:
    comm = ddp.init(shared_memory=shared_memory, abort_s=20)
    try:
        comm.barrier()
        if comm.rank == 1:
            raise OSError("bad pixel")
        comm.all_reduce(torch.ones(300), label="gradients")
    finally:
        ddp.shutdown()


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_shutdown_on_the_way_out_of_an_error_does_not_hide_it(shared_memory: bool) -> None:
    survivor, failed = collect(start_ranks(fail_in_the_middle, 2, shared_memory), timeout_s=30)
    assert isinstance(failed, RankFailed)
    assert str(failed).rstrip().endswith("OSError: bad pixel")
    assert isinstance(survivor, RankFailed)
    assert "PeerLost: lost rank 1" in str(survivor)
    assert "it failed: OSError: bad pixel" in str(survivor)


# Imports once; each child then is a program of its own, down to the end of its interpreter.
ENDS = """
import atexit, json, os, sys, torch, ddp
children = {}
for how, port in zip(("ends", "raises", "shuts down"), sys.argv[1:]):
    rank_0_ended, runs = os.pipe()
    for rank in range(2):
        os.environ.update(MASTER_PORT=port, RANK=str(rank))
        if not (child := os.fork()):
            break
        children[child] = f"{how} {rank}"
    else:
        os.close(rank_0_ended), os.close(runs)
        continue
    break
else:
    said = {}
    for _ in children:
        child, status = os.wait()
        said[children[child]] = os.waitstatus_to_exitcode(status)
    print(json.dumps(said))
    sys.exit()
for stream, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{how} {rank} {name}", os.O_WRONLY | os.O_CREAT), stream)

comm = ddp.init(shared_memory=False)
comm.barrier()
if how == "ends" or rank == 0:
    comm.all_reduce(torch.ones(3), label="gradients", async_op=True)  # unless all end, the other one comes too late
if how == "raises" and rank == 0:
    atexit.register(ddp.shutdown)
    raise OSError("bad pixel")
if how == "shuts down" and rank == 0:
    try:
        raise OSError("bad pixel")
    finally:
        ddp.shutdown()
if how != "ends" and rank == 1:
    os.close(runs), os.read(rank_0_ended, 1)
    try:
        comm.all_reduce(torch.ones(3), label="gradients")
    except ddp.PeerLost as lost:
        print(lost)
"""


@pytest.mark.slow
def test_a_program_may_end_without_shutdown_and_with_a_collective_in_flight(tmp_path: Path) -> None:
    """A thread inside Gloo would end the process by SIGABRT, and hide the error that ends the program."""
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(3)]
    variables = {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *(str(store.port) for store in stores)],
        cwd=tmp_path,
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout)
    assert (statuses["ends 0"], statuses["ends 1"]) == (0, 0), (tmp_path / "ends 0 err").read_text()
    for how in ("raises", "shuts down"):
        assert statuses[f"{how} 0"] == 1
        assert (tmp_path / f"{how} 0 err").read_text().rstrip().endswith("OSError: bad pixel")
        told = (tmp_path / f"{how} 1 out").read_text()
        assert "lost rank 0" in told
        assert "it failed: OSError: bad pixel" in told


def begin_and_end_while_an_error_is_handled() -> tuple[float, float]:
    """As a program that tries again, or has another way of doing it, on one rank or on all."""
    totals = []
    for _ in range(2):
        try:
            if os.environ["RANK"] == "0":
                raise OSError("no cache")
            raise MemoryError("too much")
        except OSError:
            totals.append(one_session())
        except MemoryError:
            totals.append(one_session())
    try:
        ddp.init(abort_s=20)
        if os.environ["RANK"] == "0":
            raise StopIteration
        ddp.shutdown()  # says that rank 0 stopped early, and that is all
    except StopIteration:
        ddp.shutdown()
    return totals[0], totals[1]


def one_session() -> float:
    total = ddp.init(abort_s=20).all_reduce(torch.ones(1)).item()
    ddp.shutdown()
    return total


def test_a_session_inside_an_except_block_ends_well() -> None:
    assert run_ranks(begin_and_end_while_an_error_is_handled, 2) == [(2.0, 2.0)] * 2


def test_an_interpreter_that_ends_well_is_no_error() -> None:
    for code, says in ((None, ""), (0, ""), (3, "SystemExit: 3")):
        try:
            raise SystemExit(code)
        except SystemExit:
            assert session._in_flight() == says
    assert session._in_flight() == ""
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(session._in_flight()))
    try:
        raise ValueError("here")
    except ValueError:
        thread.start()
        thread.join()
    assert seen == [""]


@pytest.mark.parametrize("abort_s", [0, -1, 1e30, float("inf"), float("nan")])
def test_a_deadline_out_of_its_range_is_refused(abort_s: float) -> None:
    with pytest.raises(ConfigError, match=r"abort_s=.*: must be seconds, above 0 and at most 1e\+09"):
        ddp.init(abort_s=abort_s)


# --- from plain RANK and WORLD_SIZE ----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for_others() -> tuple[str, list[str]]:
    warned: list[str] = []
    log.warning = lambda text, *values: warned.append(text % values)  # type: ignore[method-assign, assignment]
    try:
        ddp.init(warn_s=0.1, abort_s=0.5)
    except (PeerLost, ConfigError) as error:
        return str(error), warned
    return "nothing happened", warned


def test_whoever_waits_at_the_start_says_for_whom() -> None:
    plain = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    alone = start_ranks(wait_for_others, 1, environment={**plain, "MASTER_PORT": str(free_port())})
    port = free_port()
    without_0 = start_ranks(wait_for_others, 1, environment={**plain, "MASTER_PORT": str(port), "RANK": "1"})
    with socket.create_server(("127.0.0.1", 0)) as silent:  # another program, which takes connections and says nothing
        taken = {**plain, "MASTER_PORT": str(silent.getsockname()[1])}
        at_taken_port = [start_ranks(wait_for_others, 1, environment={**taken, "RANK": rank}) for rank in "01"]
        ((of_0, of_0_warned),), ((of_1, of_1_warned),) = (unfailed(collect(each)) for each in at_taken_port)
    ((reason, warned),), ((reason_1, warned_1),) = unfailed(collect(alone)), unfailed(collect(without_0))
    assert warned == ["start-up has waited 0 s for rank(s) [1, 2] of 3"]
    assert "lost rank 1 " in reason
    assert "of 3 ranks, [1, 2] did not come within 0.5 s: start each once" in reason
    assert warned_1 == [f"start-up has waited 0 s for rank 0, which serves the store of the ranks at 127.0.0.1:{port}"]
    assert "lost rank 0 " in reason_1
    assert of_0.startswith(f"MASTER_ADDR=127.0.0.1, MASTER_PORT={taken['MASTER_PORT']}: rank 0 cannot serve the store")
    assert of_0.endswith("and a port that is free there")
    assert of_0_warned == []
    assert "lost rank 0 " in of_1
    assert len(of_1_warned) == 1


def alone_at_a_meeting_place(port: int) -> tuple[float, list[str]]:
    """Names of torch's threads of a world of one, whose variables name a place that another program has, or none."""
    for address in ("127.0.0.1", "192.0.2.1", "no such host"):
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
        total = ddp.init(abort_s=20).all_reduce(torch.ones(1)).item()
        threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        ddp.shutdown()
    return total, [name for name in threads if "tcpstore" in name]


def test_a_world_of_one_meets_nobody_and_so_opens_no_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        served_by_itself = start_ranks(
            alone_at_a_meeting_place, 1, port, environment={"TORCHELASTIC_USE_AGENT_STORE": "False"}
        )
        assert unfailed(collect(served_by_itself)) == [(1.0, [])]


def fail_and_begin_anew() -> list[tuple[int, float]]:
    """A program that lives on after its session has failed, as a notebook does: with the others, then without."""
    rank, found, before = int(os.environ["RANK"]), [], dict(os.environ)
    for others_come in (True, False):
        comm = ddp.init(abort_s=20)
        try:
            if rank == 1:
                raise OSError("bad pixel")
            comm.all_reduce(torch.ones(1))
        except OSError:
            ddp.shutdown(failed="bad pixel")
        except PeerLost:
            assert current() is comm, "the library itself goes on with it, and is told that it is broken"
            if not others_come:
                ddp.shutdown()
        if not others_come:
            alone = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
            os.environ.update(RANK="0", WORLD_SIZE="1", **alone)  # what is left of the world
            here = place()
            assert here is not None and here.world_size == 1, "torch's group of a session that has failed is no place"
        again = ddp.init(abort_s=20)
        found.append((again.world_size, again.all_reduce(torch.ones(1)).item()))
        ddp.shutdown()
        os.environ.update(before)
    return found


@pytest.mark.slow
def test_after_a_failed_session_the_next_one_begins_anew() -> None:
    assert run_ranks(fail_and_begin_anew, 2) == [[(2, 2.0), (1, 1.0)]] * 2
