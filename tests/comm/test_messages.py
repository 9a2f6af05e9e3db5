"""Messages between two ranks: they arrive, in order, beside collectives; and who is to blame if they do not.

Tests: ddp/comm/transport/edge.py, ddp/comm/transport/gloo.py.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import collect, run_ranks, start_ranks, unfailed
from torch import Tensor
from torch.distributed import HashStore

import ddp
from ddp.comm.communicator import Communicator
from ddp.comm.host_links import Settings
from ddp.comm.transport.edge import Pending, Transfer
from ddp.comm.transport.gloo import UNUSED_TAG, collective_tag, message_tag
from ddp.comm.watch import watchdog as watchdog_module
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import CommunicatorBroken, ConfigError, PeerLost
from recipes.tutorial.simulated import SimulatedNetwork, SimulatedTransport

SETTINGS = Settings(algorithm="ring", abort_s=20, shared_memory=False)
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


class Untagged(SimulatedTransport):
    """Edges that know no tags, as NCCL's. It counts the rounds that are posted."""

    has_tags = False

    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        super().__init__(network, range(network.world_size), rank, channel=0)
        self.rounds: list[tuple[int, int]] = []

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        self.rounds.append((len(sends), len(receives)))
        return super().post(sends, receives)

    def for_collective(self, kind: Hashable) -> Untagged:
        """Returns itself."""
        return self

    def for_message(self, number: int, kind: tuple[int, str]) -> Untagged:
        """Returns itself."""
        return self


def each_rank(
    world_size: int, program: Callable[[Communicator], Any], *, tags: bool = True, settings: Settings = SETTINGS
) -> list[Any]:
    """What `program` returns on each rank, each a thread with a communicator of its own."""
    network = SimulatedNetwork(world_size)

    def run(transport: SimulatedTransport) -> Any:
        edges = transport if tags else Untagged(network, transport.rank)
        comm = Communicator(edges, settings, hosts=(tuple(range(world_size)),))
        try:
            return program(comm)
        finally:
            comm.close()

    return network.run(run)


def values(*about: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers that every rank can work out for itself."""
    generator = torch.Generator().manual_seed(hash((*about, numel)))
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


# --- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_a_ring_of_messages(world_size: int, tags: bool) -> None:
    """Everyone sends to the next rank and receives from the one before, at once."""

    def program(comm: Communicator) -> list[int]:
        seen, mine = [], torch.tensor([comm.rank])
        for _ in range(world_size):
            going = comm.send(mine, (comm.rank + 1) % world_size, async_op=True)
            mine = comm.recv(torch.empty(1, dtype=torch.int64), (comm.rank - 1) % world_size)
            assert going.wait() is None
            seen.append(int(mine))
        return seen

    for rank, seen in enumerate(each_rank(world_size, program, tags=tags)):
        assert seen == [(rank - 1 - step) % world_size for step in range(world_size)]


def exchange_many(comm: Communicator) -> None:
    """All ranks send each other messages of all sorts, and wait for them in an order of their own."""
    sorts = [(numel, dtype) for numel in (0, 1, 2, 9, 300) for dtype in (torch.float32, torch.int64, torch.bool)]
    random.Random(0).shuffle(sorts)
    works, others = [], [rank for rank in range(comm.world_size) if rank != comm.rank]
    for k, (numel, dtype) in enumerate([*sorts, *sorts]):
        for other in others:
            works.append((comm.send(values(comm.rank, other, k, numel=numel, dtype=dtype), other, async_op=True), None))
            expected = values(other, comm.rank, k, numel=numel, dtype=dtype)
            works.append((comm.recv(torch.zeros(numel, dtype=dtype), other, async_op=True), expected))
    random.Random(comm.rank).shuffle(works)
    for work, expected in works:
        received = work.wait()
        assert received is None if expected is None else torch.equal(received, expected)
        assert work.wait() is received  # a second time, too


@pytest.mark.parametrize("tags", [True, False])
def test_many_messages_in_flight_and_waited_for_in_any_order(tags: bool) -> None:
    each_rank(3, exchange_many, tags=tags)


def exchange_strange(comm: Communicator) -> None:
    """Rank 1 receives into other memory layouts than rank 0 sends from; what lies between is left alone."""
    for dtype in DTYPES:
        wide = values(1, numel=24, dtype=torch.int64).view(4, 6).to(dtype)
        for sent in (wide, wide.t(), wide[:, ::2], wide[2, 3], wide[:0]):
            if comm.rank == 0:
                comm.send(sent, 1)
            elif comm.rank == 1:
                around = torch.zeros((*sent.shape, 2), dtype=dtype)
                target = around[..., 1]
                assert comm.recv(target, 0, label="strange") is target
                assert torch.equal(around[..., 1], sent)
                assert not around[..., 0].any()
    if comm.rank == 0:
        comm.send(torch.full((3,), 2.0, requires_grad=True) * 1.0, 1)
        comm.send(torch.complex(torch.ones(3), torch.ones(3)).conj(), 1)
    elif comm.rank == 1:
        assert comm.recv(torch.zeros(3, requires_grad=True), 0).tolist() == [2.0] * 3
        assert comm.recv(torch.zeros(3, dtype=torch.complex64), 0).tolist() == [1 - 1j] * 3


def exchange_beside_collectives(comm: Communicator) -> None:
    """Messages that are called before, between and after all-reduces in flight, in another order on each rank."""
    before, number = comm.num_calls, comm.world_size
    last = number - 1
    if comm.rank == 0:
        going = comm.send(torch.full((5,), 7.0), last, async_op=True)
        reductions = [comm.all_reduce(torch.full((5,), float(k)), async_op=True) for k in range(8)]
        coming = comm.recv(torch.zeros(5), last)
        going.wait()
    elif comm.rank == last:
        coming = comm.recv(torch.zeros(5), 0)
        going = comm.send(coming + 1, 0, async_op=True)
        reductions = [comm.all_reduce(torch.full((5,), float(k)), async_op=True) for k in range(8)]
        going.wait()
    else:
        reductions = [comm.all_reduce(torch.full((5,), float(k)), async_op=True) for k in range(8)]
    assert [work.wait()[0].item() for work in reductions] == [float(k * number) for k in range(8)]
    assert comm.rank not in (0, last) or coming.tolist() == [7.0 + (comm.rank == 0)] * 5
    assert comm.num_calls == before + 8


CASES = (exchange_many, exchange_strange, exchange_beside_collectives)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_on_threads(case: Callable[[Communicator], None], world_size: int) -> None:
    each_rank(world_size, case)


def on_processes() -> None:
    comm = ddp.init(abort_s=20, debug=True)
    for case in CASES:
        case(comm)
    group = comm.subgroup([2, 0])
    if group is not None:  # the same two ranks in two communicators, where they have other numbers
        other, theirs = 2 - comm.rank, 1 - group.rank
        going = [comm.send(torch.tensor([1.0]), other, async_op=True)]
        going.append(group.send(torch.tensor([2.0]), theirs, async_op=True))
        assert group.recv(torch.zeros(1), theirs).item() == 2
        assert comm.recv(torch.zeros(1), other).item() == 1
        assert [work.wait() for work in going] == [None, None]
    beside_torch(comm)
    ddp.shutdown()


def beside_torch(comm: Communicator) -> None:
    """What torch's own messages deliver, at the same time."""
    after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    for dtype in DTYPES[:-2]:
        mine = values(comm.rank, numel=1000, dtype=dtype)
        ours, theirs = torch.zeros(1000, dtype=dtype), torch.zeros(1000, dtype=dtype)
        works = [comm.send(mine, after, async_op=True), dist.isend(mine, after), dist.irecv(theirs, before)]
        comm.recv(ours, before)
        for work in works:
            work.wait()
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, values(before, numel=1000, dtype=dtype))


def test_on_processes() -> None:
    run_ranks(on_processes, 3)


def test_without_tags_messages_are_posted_together() -> None:
    """When the first of them is waited for, or a blocking one comes: "send, then receive" on both sides goes well."""

    def program(comm: Communicator) -> list[tuple[int, int]]:
        other, edges = 1 - comm.rank, comm._collectives.links.transport
        assert isinstance(edges, Untagged)
        works = [comm.send(torch.ones(k), other, async_op=True) for k in range(3)]
        works += [comm.recv(torch.zeros(k), other, async_op=True) for k in range(3)]
        assert edges.rounds == []
        for work in reversed(works):
            work.wait()
        comm.send(torch.ones(1), other, async_op=True)
        comm.recv(torch.zeros(1), other)
        return edges.rounds

    assert each_rank(2, program, tags=False) == [[(3, 3), (1, 1)]] * 2


def test_two_threads_of_a_rank_may_post_messages() -> None:
    def run(transport: SimulatedTransport) -> int:
        comm = Communicator(transport, Settings(shared_memory=False), hosts=((0, 1),))
        post = comm.send if comm.rank == 0 else comm.recv
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(2) as pool:
                posted = list(pool.map(lambda _: post(torch.zeros(1), 1 - comm.rank, async_op=True), range(200)))
        finally:
            sys.setswitchinterval(switch_s)
        for message in posted:
            message.wait()
        comm.close()
        return len({message.envelope.number for message in posted})

    assert SimulatedNetwork(2).run(run) == [200, 200]


def test_tags_tell_collectives_and_messages_apart() -> None:
    kinds = [(numel, dtype) for numel in range(50) for dtype in ("float32", "int64")]
    tags = {(n, kind): message_tag(3, n, kind) for n in (1, 2, 1023, 1024) for kind in kinds}
    assert len(set(tags.values())) == len(tags)
    for tag in tags.values():
        assert 1 << 30 <= tag < UNUSED_TAG
    collectives = {collective_tag(channel, kind) for channel in (0, 3, 1023) for kind in kinds}
    assert len(collectives) == 3 * len(kinds)
    assert max(collectives) < 1 << 30


# --- what does not ---------------------------------------------------------------------------------------------------


def send(dst: int, numel: int = 4) -> Callable[[Communicator], Any]:
    return lambda comm: comm.send(torch.zeros(numel), dst)


def recv(src: int, numel: int = 4) -> Callable[[Communicator], Any]:
    return lambda comm: comm.recv(torch.zeros(numel), src)


def send_early_and_recv(peer: int) -> Callable[[Communicator], Any]:
    def program(comm: Communicator) -> None:
        comm.send(torch.zeros(4), peer, async_op=True)
        comm.recv(torch.zeros(8, dtype=torch.int64), peer)

    return program


def leave(comm: Communicator) -> None:
    comm.close()
    others_have_ended.wait(20)


def compute(comm: Communicator) -> None:
    others_have_ended.wait(20)


def fail(comm: Communicator) -> None:
    comm.abandon("ValueError: bad pixel")


others_have_ended = threading.Event()
BOTH_SEND = (
    "ranks 0 and 1 both wait for the other one to receive: "
    "let one of them receive first, or send with async_op=True and receive before wait()"
)
WRONG: dict[str, tuple[list[Callable[[Communicator], Any]], list[str]]] = {
    "both send": (
        [send(1), send(0)],
        [f"lost rank 1 .* during message #1 to rank 1 [send of [4]]: {BOTH_SEND}", f"lost rank 0 .*: {BOTH_SEND}"],
    ),
    "both receive": (
        [recv(1), recv(0)],
        ["both wait for the other one to send: let one of them send first"] * 2,
    ),
    "all send in a circle": (
        [send(1), send(2), send(0)],
        [
            f"lost rank {(rank + 1) % 3} .*ranks 0, 1 and 2 wait in a circle, each for the next one to receive: let one"
            for rank in range(3)
        ],
    ),
    "a circle of both": (
        [send(1), recv(2), recv(0)],
        ["ranks 0, 1 and 2 wait in a circle, each for the next one to receive or send: let one of them receive"] * 3,
    ),
    "other sizes": (
        [send(1), recv(0, 8)],
        [
            "lost rank 1 .*: rank 1 receives [8] float32 where rank 0 sends [4] float32; both must",
            "lost rank 0 .* during message #1 from rank 0 [recv of [8]]: rank 0 sends [4] float32 where rank",
        ],
    ),
    "other types, and posted early": (
        [send_early_and_recv(1), send_early_and_recv(0)],
        [f"lost rank {1 - r} .*: rank {1 - r} sends [4] float32 where rank {r} receives [8] int64" for r in range(2)],
    ),
    "a collective and a message": (
        [lambda comm: comm.barrier(), recv(0)],
        ["rank 0 waits in collective #1 [barrier] and rank 1 in message #1 from rank 0, each for the other one"] * 2,
    ),
    "other types in a collective": (
        [lambda comm: comm.reduce(torch.zeros(2, 2)), lambda comm: comm.reduce(torch.zeros(2, 2, dtype=torch.int32))],
        [
            "lost rank 1 .*it calls reduce sum to 0 of 4 int32 [reduce of [2, 2]] where rank 0 calls reduce",
            "lost rank 0 .*it calls reduce sum to 0 of 4 float32",
        ],
    ),
    "other sizes in a collective": (
        [lambda comm: comm.broadcast(torch.zeros(4)), *[lambda comm: comm.broadcast(torch.zeros(2))] * 2],
        ["lost rank 1 .*it calls broadcast from 0 of 2 float32", *["lost rank 0 .*it calls broadcast from 0 of 4"] * 2],
    ),
    "another collective, in a chain": (
        [
            lambda comm: comm.chain(lambda: (comm.barrier(), comm.gather(torch.zeros(2)))),
            lambda comm: comm.chain(lambda: (comm.barrier(), comm.all_to_all([torch.zeros(2)] * 2))),
        ],
        ["lost rank 1 .*it calls all_to_all rows [] float32", "lost rank 0 .*it calls gather to 0 rows [] float32"],
    ),
    "the peer has left": ([send(1), leave], ["lost rank 1 .*it has left already; every send needs a recv", ""]),
    "somebody has failed": (
        [send(1), compute, fail],
        ["lost rank 2 .*during message #1 to rank 1 .*it failed: ValueError: bad pixel", "", ""],
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.quick(2)
def test_who_is_to_blame(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks on threads, with watchdogs of their own."""
    monkeypatch.setattr(watchdog_module, "INTERVAL_S", 0.05)
    monkeypatch.setattr(watchdog_module, "SEARCH_S", 1.0)
    others_have_ended.clear()
    programs, says = WRONG[what]
    store, world_size, ended = HashStore(), len(programs), list[int]()
    all_are_there = threading.Barrier(world_size)
    waiting = sum(1 for words in says if words)

    def run(transport: SimulatedTransport) -> str:
        rank = transport.rank
        watchdog = Watchdog(store, rank, world_size, generation=0, warn_s=100, abort_s=0.5)
        settings = Settings(algorithm="ring", abort_s=0.5, shared_memory=False)
        comm = Communicator(transport, settings, watchdog=watchdog, hosts=(tuple(range(world_size)),))
        all_are_there.wait()
        try:
            programs[rank](comm)
        except PeerLost as lost:
            assert str(pickle.loads(pickle.dumps(lost))) == str(lost)
            with pytest.raises(CommunicatorBroken, match="out of use since: lost rank"):
                comm.send(torch.zeros(1), (rank + 1) % world_size, async_op=True)
            ended.append(rank)
            if len(ended) == waiting:
                others_have_ended.set()
            return str(lost)
        finally:
            comm.abandon()
        return ""

    for told, words in zip(SimulatedNetwork(world_size).run(run), says, strict=True):
        assert re.search(".*".join(map(re.escape, words.split(".*"))), told), (told, words)


def lose(how: str) -> tuple[str, float, str]:
    """Rank 0 waits for a message; rank 1 does something else, or wrong."""
    comm = ddp.init(abort_s=3.5 if how == "stopped" else 20, warn_s=1.0)
    comm.barrier()
    if comm.rank == 1 and how in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    start_s = time.monotonic()
    try:
        comm.send(torch.ones(100), 1 - comm.rank, label="halo")
    except PeerLost as lost:
        with pytest.raises(CommunicatorBroken, match="out of use since: lost rank 1"):
            comm.barrier()
        return str(lost), time.monotonic() - start_s, lost.message
    return "", 0.0, ""


def test_survivors_name_the_peer_soon() -> None:
    """A deadlock is found long before the deadline, here of 20 s."""
    says = {"killed": "its process has ended", "stopped": "it shows no sign of life", "deadlock": BOTH_SEND}
    jobs = {how: start_ranks(lose, 2, how) for how in says}
    for how, job in jobs.items():
        try:
            ((told, took_s, message),) = unfailed(collect(job[:1], timeout_s=30))
        finally:
            job[1][0].kill()
        assert told.startswith("lost rank 1 on host ")
        assert "during message #1 to rank 1 [halo]: " in told
        assert says[how] in told
        assert message == "to rank 1"
        assert took_s < 7


def test_autograd_notices_that_a_tensor_it_has_saved_is_overwritten() -> None:
    def program(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(torch.full((2,), 100.0), 1)
            return
        y = torch.ones(2, requires_grad=True) * 2
        z = (y * y).sum()
        with torch.no_grad():
            comm.recv(y, 0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()

    each_rank(2, program)


def test_wrong_arguments() -> None:
    def program(comm: Communicator) -> None:
        one = torch.zeros(1)
        for verb, name in ((comm.send, "dst"), (comm.recv, "src")):
            with pytest.raises(ConfigError, match=f"{name}=2 is no rank of a world of 2"):
                verb(one, 2)
            with pytest.raises(ConfigError, match=f"{name}=-1 is no rank"):
                verb(one, -1)
            with pytest.raises(ConfigError, match=rf"{name}=1\.0: must be a whole number"):
                verb(one, 1.0)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=f"{name}={comm.rank} is this rank itself"):
                verb(one, comm.rank)
            with pytest.raises(ConfigError, match=r"a message is one tensor, got \[tensor"):
                verb([one], 1 - comm.rank)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"layout torch\.sparse_coo"):
                verb(torch.zeros(2).to_sparse(), 1 - comm.rank)
            with pytest.raises(ConfigError, match="on the meta device has no values"):
                verb(torch.zeros(2, device="meta"), 1 - comm.rank)
        with pytest.raises(ConfigError, match=r"cannot hold a result, because elements share"):
            comm.recv(torch.zeros(3).expand(2, 3), 1 - comm.rank)
        if comm.rank == 0:  # nothing has been sent or numbered so far
            comm.send(torch.ones(3).expand(2, 3), 1)
        else:
            assert comm.recv(torch.zeros(2, 3), 0).sum() == 6

    each_rank(2, program)
    with pytest.raises(ConfigError, match="dst=0 is this rank itself"):
        each_rank(1, lambda comm: comm.send(torch.zeros(1), 0))
