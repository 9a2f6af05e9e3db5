"""How ranks begin and end a session: whatever an earlier one left in the store, and however the program ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, collect, run_ranks, start_ranks
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

import ddp
from ddp.comm import setup
from ddp.comm.meeting import meeting_place
from ddp.errors import PeerLost


def meet(store: Store, world_size: int, *, late: float = 0.0) -> list[int]:
    """Each rank counts itself where the ranks meet; the last one comes `late` seconds after the others."""

    def one(rank: int) -> int:
        time.sleep(late * (rank == world_size - 1))
        return meeting_place(store, rank, world_size, warn_s=10, abort_s=20).add("visits", 1)

    with ThreadPoolExecutor(world_size) as threads:
        return sorted(threads.map(one, range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_sessions_in_one_store_have_places_of_their_own(world_size: int) -> None:
    """As the attempts of torchrun, whose store outlives them; the one before may have been of another size."""
    store = HashStore()
    for size in (world_size, world_size + 1, world_size):
        for late in (0.0, 0.1):
            assert meet(store, size, late=late) == list(range(1, size + 1))


def test_a_rank_of_an_earlier_session_does_not_stand_in_for_one_that_never_comes() -> None:
    store = HashStore()
    meet(store, 3)
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(meeting_place, store, rank, 3, warn_s=9, abort_s=0.5) for rank in (0, 2)]
        for rank in ranks:
            with pytest.raises(PeerLost, match=r"lost rank 1.*of 3 ranks, \[1\] did not come within 0.5 s"):
                rank.result()


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


ENDS = """
import atexit, sys, torch, ddp
comm = ddp.init(shared_memory=False)
comm.barrier()
if sys.argv[1] == "ends" or comm.rank == 0:
    comm.all_reduce(torch.ones(3), async_op=True)  # unless all end, nobody else takes part
if sys.argv[1] == "raises" and comm.rank == 0:
    atexit.register(ddp.shutdown)
    raise OSError("bad pixel")
if sys.argv[1] == "shuts down" and comm.rank == 0:
    try:
        raise OSError("bad pixel")
    finally:
        ddp.shutdown()
if sys.argv[1] != "ends":
    try:
        comm.all_reduce(torch.ones(4), label="gradients")
    except ddp.PeerLost as lost:
        print(lost)
"""


def test_a_program_may_end_without_shutdown_and_with_a_collective_in_flight() -> None:
    """A thread inside Gloo would end the process by SIGABRT, and hide the error that ends the program."""
    stores, worlds = [], {}
    for how in ("ends", "raises", "shuts down"):
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        stores.append(store)
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        worlds[how] = [
            subprocess.Popen(
                [sys.executable, "-c", ENDS, how],
                env={**os.environ, **variables, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
    for how, world in worlds.items():
        (_, errors), (told, _) = (each.communicate(timeout=60) for each in world)
        if how == "ends":
            assert [each.returncode for each in world] == [0, 0], errors
        else:
            assert world[0].returncode == 1, errors
            assert errors.rstrip().endswith("OSError: bad pixel")
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
            assert setup._in_flight() == says
    assert setup._in_flight() == ""
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(setup._in_flight()))
    try:
        raise ValueError("here")
    except ValueError:
        thread.start()
        thread.join()
    assert seen == [""]
