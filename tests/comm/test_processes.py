"""Real processes over Gloo and through shared memory, on one host and on several that are made up.

Hosts are made up by telling some ranks another boot id: what lies between them goes over the transport then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

import ddp
from ddp.comm import connect
from ddp.comm.communicator import Communicator
from ddp.comm.reduction import Op
from ddp.comm.watch import watchdog as watchdog_module
from ddp.comm.watch.call import Call
from ddp.errors import CollectiveMismatch, CommunicatorBroken, ConfigError, PeerLost
from ddp.replica.broadcast import BEFORE_FORWARD

LENGTHS = (0, 1, 9, 40_000)


def normal(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def sessions(world_size: int) -> None:
    """One host; several hosts; the transport alone; canonical order. One spawn for all: processes are dear."""
    comm = ddp.init(abort_s=20)
    assert comm.hosts == (tuple(range(world_size)),)
    assert world_size == 1 or "shared_memory" in comm.plan.algorithms()
    nobody_leaves_a_barrier_early(comm)
    ways_are_right(comm)
    verbs_equal_torch_s(comm)
    slices_in_place_equal_an_all_reduce(comm)
    allocated_memory_is_shared_and_freed(comm)
    groups_have_memory_of_their_own(comm)
    memory_is_freed_from_any_thread(comm)
    reductions_have_their_range_where_they_run(comm)
    torch.set_default_device("meta")  # what the program computes on is not what collectives are made of
    verbs_work_beside_another_default_device(comm)
    torch.set_default_device("cpu")
    ddp.shutdown()

    its_own, connect.boot_id = connect.boot_id, lambda: f"host {comm.rank // 3}"
    algorithm = "shared_memory+ring" if world_size > 3 else "ring"  # to choose one would measure all, which takes long
    comm = ddp.init(abort_s=20, segment_bytes=1 << 12, algorithm=algorithm)
    assert comm.hosts == tuple(tuple(range(r, min(r + 3, world_size))) for r in range(0, world_size, 3))
    assert ("shared_memory+ring" in comm.plan.algorithms()) == (world_size > 3)
    nobody_leaves_a_barrier_early(comm)
    ways_are_right(comm)
    verbs_equal_torch_s(comm)
    slices_in_place_equal_an_all_reduce(comm)
    allocated_memory_is_shared_and_freed(comm)
    ddp.shutdown()
    connect.boot_id = its_own

    comm = ddp.init(abort_s=20, shared_memory=False, order="canonical")
    assert not any(route.startswith("shared_memory") for route in comm.plan.algorithms())
    chosen = comm.all_reduce(normal(comm.rank, 999))
    in_order = canonical_sum([normal(rank, 999) for rank in range(world_size)])
    assert torch.equal(chosen, in_order)
    ddp.shutdown()


def slices_in_place_equal_an_all_reduce(comm: Communicator) -> None:
    """In one host's memory bit by bit. Slices of any length; ordinary and allocated memory; sums that are divided."""
    world_size, in_memory = comm.world_size, len(comm.hosts) == 1 < comm.world_size
    longest = 300_000 if len(comm.hosts) == 1 else 20_000
    allocated = comm.allocate(longest, torch.float32)
    for numel in (0, 37, longest):
        for cuts in ([numel * s // world_size for s in range(1, world_size)], [numel // 3] * (world_size - 1)):
            bounds = [0, *cuts, numel]
            for dtype in (torch.float32, torch.float16):
                for flat in (torch.empty(numel, dtype=dtype), allocated.view(dtype)[:numel]):
                    whole = flat.copy_(normal(comm.rank, numel, dtype)).clone()
                    comm.all_reduce(whole, divide_by=3, algorithm="shared_memory" if in_memory else "auto")
                    mine = comm.reduce_scatter_(flat, bounds, divide_by=3, label="slices")
                    first, last = (bounds[comm.slices[comm.rank] + i] for i in (0, 1))
                    assert mine.data_ptr() == flat[first:].data_ptr() or first == last
                    tolerance = {} if dtype is torch.float32 else {"rtol": 5e-3, "atol": 5e-3}
                    torch.testing.assert_close(mine, whole[first:last], **tolerance)
                    assert torch.equal(mine, whole[first:last]) or not in_memory
                    work = comm.all_gather_(flat, bounds, async_op=True)
                    assert work.wait() is flat
                    torch.testing.assert_close(flat, whole, **tolerance)
    mean = comm.reduce_scatter_(torch.full((9,), float(comm.rank)), [0, *[9] * world_size], "mean")
    assert mean.tolist() == [(world_size - 1) / 2] * (9 if comm.slices[comm.rank] == 0 else 0)
    for wrong in ([0] * world_size, [0] * (world_size + 1), [0, *[10] * world_size]):
        with pytest.raises(ConfigError, match=r"bounds=.*ascending positions from 0 to 9"):
            comm.reduce_scatter_(torch.zeros(9), wrong)
    with pytest.raises(ConfigError, match="pass it flat and contiguous"):
        comm.all_gather_(torch.zeros(3, 3), [0, *[9] * world_size])


def nobody_leaves_a_barrier_early(comm: Communicator) -> None:
    """By the clock that the processes of a machine share. Somebody else comes last each time."""
    for last in range(comm.world_size):
        time.sleep(0.02 * (comm.rank == last))
        came_s = time.monotonic()
        comm.barrier()
        left_s = time.monotonic()
        moments = comm.all_gather(torch.tensor([came_s, left_s], dtype=torch.float64))
        assert max(came.item() for came, _ in moments) <= min(left.item() for _, left in moments)


def canonical_sum(terms: list[Tensor]) -> Tensor:
    """Over the binary tree that splits at the largest power of two."""
    if len(terms) == 1:
        return terms[0]
    middle = 1 << ((len(terms) - 1).bit_length() - 1)
    return canonical_sum(terms[:middle]) + canonical_sum(terms[middle:])


class Later:
    """A divisor that is read when its turn has come."""

    def __init__(self, on_reading: Callable[[], object] = lambda: None) -> None:
        self.on_reading = on_reading

    def __int__(self) -> int:
        self.on_reading()
        return 4096


def ways_are_right(comm: Communicator) -> None:
    """Near the formula, in each length and operation; and the same bits on all ranks.

    Of the schedules some: ranks that are threads have run them all (`test_communicator.py`).
    """
    longest = 40_000 if len(comm.hosts) == 1 else 5_000  # segments are short where there are several hosts
    cases: list[tuple[Op, int]] = [("sum", 0), ("sum", 9), ("sum", longest), ("mean", 50), ("product", 1), ("max", 7)]
    reference: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda x: x.sum(0),
        "mean": lambda x: x.mean(0),
        "product": lambda x: x.prod(0),
        "max": lambda x: x.amax(0),
    }
    through_memory = [route for route in comm.plan.algorithms() if route.startswith("shared_memory")]
    for route in [
        "auto",
        "ring",
        "butterfly",
        *through_memory,
        *[w for w in comm.plan.algorithms() if w.startswith("hier")][:1],
    ]:
        results = []
        for op, numel in cases:
            terms = torch.stack([normal(rank, numel) for rank in range(comm.world_size)])
            results.append(comm.all_reduce(terms[comm.rank].clone(), op, algorithm=route))
            torch.testing.assert_close(results[-1], reference[op](terms), rtol=1e-12, atol=1e-12)
        for divisor in (3, Later()):  # known now, or when its turn has come
            for async_op in (False, True):
                terms = torch.stack([normal(rank, longest) for rank in range(comm.world_size)])
                mine = terms[comm.rank].clone()
                answer = comm.all_reduce(mine, algorithm=route, divide_by=divisor, async_op=async_op)
                results.append(answer.wait() if async_op else answer)
                torch.testing.assert_close(mine, terms.sum(0) / int(divisor), rtol=1e-12, atol=1e-12)
        wide = normal(comm.rank, 100, torch.float32)
        results.append(comm.all_reduce(wide, algorithm=route, wire="bf16").double())
        first, *others = comm.all_gather(torch.cat(results))
        assert all(torch.equal(first, other) for other in others), route
        assert comm.all_reduce(torch.tensor([comm.rank == 0, False]), algorithm=route).tolist() == [True, False]


def verbs_equal_torch_s(comm: Communicator) -> None:
    for numel in LENGTHS:
        mine = normal(comm.rank, numel)
        total = mine.clone()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(torch.cat(comm.all_gather(comm.reduce_scatter(mine))), total, rtol=1e-12, atol=1e-12)
        by_torch = mine.clone()
        torch.distributed.broadcast(by_torch, comm.world_size - 1)
        assert torch.equal(comm.broadcast(mine.clone(), comm.world_size - 1), by_torch)
        torch.testing.assert_close(
            comm.reduce(mine.clone(), 0), total if comm.rank == 0 else mine, rtol=1e-12, atol=1e-12
        )
    uneven = comm.all_gather(torch.full((comm.rank % 2, 3), comm.rank))
    assert [len(rows) for rows in uneven] == [rank % 2 for rank in range(comm.world_size)]
    exchanged = comm.all_to_all([torch.tensor([comm.rank, peer]) for peer in range(comm.world_size)])
    assert [x.tolist() for x in exchanged] == [[peer, comm.rank] for peer in range(comm.world_size)]
    comm.barrier()


def allocated_memory_is_shared_and_freed(comm: Communicator) -> None:
    for numel in (0, 1, 100_000):
        flat = comm.allocate(numel, torch.float32)
        assert flat.shape == (numel,)
        assert not flat.any()
        terms = [normal(rank, numel, torch.float32) for rank in range(comm.world_size)]
        flat.copy_(terms[comm.rank])
        ordinary = comm.all_reduce(terms[comm.rank].clone())
        assert torch.equal(comm.all_reduce(flat), ordinary)  # the bits do not depend on where a tensor lies
        half = flat[numel // 2 :]
        half.fill_(comm.rank)
        work = comm.all_reduce(half, async_op=True)  # a part of it, from the background thread
        assert (work.wait() == sum(range(comm.world_size))).all()
        comm.free(flat)


def memory_is_freed_from_any_thread(comm: Communicator) -> None:
    """Finalizers run wherever they like, also in the midst of a collective."""
    inside, others = comm.allocate(500, torch.float32), [comm.allocate(3, torch.float32) for _ in range(40)]
    divide_and_free = Later(lambda: comm.free(inside))
    finalizer = threading.Thread(target=lambda: [comm.free(each) for each in others])
    finalizer.start()
    for numel in range(3000, 3150):
        flat = torch.full((numel,), 4096.0)
        assert (comm.all_reduce(flat, divide_by=divide_and_free if numel == 3070 else 4096) == comm.world_size).all()
    finalizer.join()
    with pytest.raises(ConfigError, match="a tensor from allocate, once"):
        comm.free(inside)
        comm.barrier()


def reductions_have_their_range_where_they_run(comm: Communicator) -> None:
    """A profile shows a bucket on the thread that reduces it; all steps under one name."""
    with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiled:
        for step in range(2):
            work = comm.all_reduce(torch.ones(9), async_op=True, label=f"step {step}, bucket 1 (fc)")
            work.wait()
        with record_function("here"):
            comm.barrier()
            comm.all_reduce(torch.ones(9), algorithm="ring")
    events = profiled.events()
    assert events is not None
    threads = {event.name: event.thread for event in events}
    assert [event.name for event in events].count("ddp: bucket 1 (fc)") == 2
    assert threads["ddp: bucket 1 (fc)"] != threads["here"]
    assert threads["ddp: wait for bucket 1 (fc)"] == threads["ddp: ring"] == threads["here"]
    assert Call(1, "broadcast", name=BEFORE_FORWARD).range == "ddp: buffers before a forward"  # without its remedy


def verbs_work_beside_another_default_device(comm: Communicator) -> None:
    cpu, size = torch.device("cpu"), comm.world_size
    ones = torch.ones(5000, device=cpu)
    assert (comm.all_reduce(ones.clone()) == size).all()
    assert (comm.all_reduce(ones.clone(), "mean", algorithm="ring") == 1).all()
    assert (comm.all_reduce([ones.clone()], "max")[0] == 1).all()
    assert torch.cat(comm.all_gather(ones)).numel() == 5000 * size
    assert (torch.cat(comm.all_gather(comm.reduce_scatter(ones))) == size).all()
    assert (comm.broadcast(ones.clone()) == 1).all()
    assert comm.all_to_all([ones[:2]] * size)[0].tolist() == [1, 1]
    assert comm.scatter([ones[:3]] * size if comm.rank == 0 else None).tolist() == [1, 1, 1]
    assert len(comm.gather(ones)) == size * (comm.rank == 0)
    assert comm.agree_any(comm.rank == 0)
    comm.free(comm.allocate(300, torch.float32))
    model = ddp.DistributedDataParallel(torch.nn.Linear(3, 2, device=cpu))
    model(ones[:3]).sum().backward()
    group = comm.subgroup(range(size))
    assert group is not None
    group.barrier()
    group.close()


def groups_have_memory_of_their_own(comm: Communicator) -> None:
    evens = comm.subgroup(range(0, comm.world_size, 2))
    if evens is None:
        return
    assert evens.world_size == 1 or "shared_memory" in evens.plan.algorithms()
    assert evens.all_reduce(torch.tensor([float(comm.rank)])).item() == sum(range(0, comm.world_size, 2))
    evens.close()


def hosts_of_two() -> None:
    connect.boot_id = lambda: f"host {int(os.environ['RANK']) // 2}"
    comm = ddp.init(abort_s=20)
    assert (comm.hosts, comm.slices) == (((0, 1), (2, 3)), [0, 2, 1, 3])
    slices_in_place_equal_an_all_reduce(comm)
    ddp.shutdown()


@pytest.mark.slow
def test_counterparts_on_hosts_of_one_size_have_their_slices_side_by_side() -> None:
    run_ranks(hosts_of_two, 4)


@pytest.mark.parametrize("world_size", [2, 5])  # 5: hosts of 3 and 2
@pytest.mark.quick(1)
def test_every_way_and_verb(world_size: int) -> None:
    run_ranks(sessions, world_size, world_size, timeout_s=300)


# --- tensors of all sorts ---------------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda comm, each: comm.all_reduce(each),
    "all_reduce of a list": lambda comm, each: comm.all_reduce([each, torch.ones(2)]),
    "mean": lambda comm, each: comm.all_reduce(each, "mean"),
    "reduce_scatter": lambda comm, each: comm.reduce_scatter(each),
    "reduce_scatter_": lambda comm, each: comm.reduce_scatter_(each, [0, 1, 4]),
    "all_gather": lambda comm, each: comm.all_gather(each),
    "all_gather_": lambda comm, each: comm.all_gather_(each, [0, 1, 4]),
    "sum_in_host": lambda comm, each: comm.sum_in_host(each),
    "broadcast": lambda comm, each: comm.broadcast(each),
    "reduce": lambda comm, each: comm.reduce(each),
    "gather": lambda comm, each: comm.gather(each),
    "all_to_all": lambda comm, each: comm.all_to_all([each, each]),
    "message": lambda comm, each: comm.recv(each, 0) if comm.rank else comm.send(each, 1),
    "allocate": lambda comm, each: comm.allocate(each, torch.float32),
    "allocate of a type": lambda comm, each: comm.allocate(4, each),
}


def strange_tensors() -> Iterator[Any]:
    x = torch.arange(4.0).reshape(2, 2)
    with torch.inference_mode():
        inference = torch.ones(2, 2)
    yield from (x, x.t(), x[:, :1], x[0, 0], x[:0], x.view(-1), x > 2, x.to(torch.uint16), x.to(torch.float8_e4m3fn))
    yield from (x.clone().requires_grad_(), x.view(-1).clone().requires_grad_(), x.clone().requires_grad_() * 2)
    yield from (x.to(torch.complex64), torch.complex(x, x).conj(), inference, x.view(-1).to(torch.uint16))
    yield from (x.to_sparse(), torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), x.to("meta"))
    yield torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    yield from (None, 3, -1, 1 << 62, 1 << 45, torch.quint8, "float32")
    yield from (torch.zeros(1, 3).expand(2, 3), x.view(-1).as_strided((2, 2), (1, 1)))


def can_change(each: Tensor) -> bool:
    return each.is_contiguous() and not each.is_inference()


def refuse_or_do(shared_memory: bool) -> tuple[int, int]:
    comm, num_done, num_refused = ddp.init(abort_s=20, shared_memory=shared_memory), 0, 0
    for name, verb in VERBS.items():
        for strange in strange_tensors():
            if name == "message" and getattr(strange, "layout", None) is torch.strided and not can_change(strange):
                continue  # it can be sent, and not received into
            try:
                verb(comm, strange)
                num_done += 1
            except ConfigError:
                num_refused += 1
            comm.barrier()
    return num_done, num_refused


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.quick(1)
def test_every_verb_takes_a_tensor_or_refuses_it_and_goes_on(shared_memory: bool) -> None:
    one, other = run_ranks(refuse_or_do, 2, shared_memory)
    assert one == other
    assert min(one) > 100


# --- mismatches in memory are found without debug mode ---------------------------------------------------------------


def call_something_else(odd_one: Callable[[Communicator], Any]) -> str:
    comm = ddp.init(abort_s=10)
    with pytest.raises(CollectiveMismatch) as raised:
        if comm.rank == 1:
            odd_one(comm)
        else:
            comm.all_reduce(torch.ones(4))
    with pytest.raises(CommunicatorBroken):
        comm.barrier()
    return str(raised.value)


def test_a_different_call_is_named_on_every_rank() -> None:
    for message in run_ranks(call_something_else, 3, lambda comm: comm.all_reduce(torch.ones(5))):
        assert "#1 all_reduce of 4 × float32 by sum" in message
        assert "#1 all_reduce of 5 × float32 by sum" in message


def differ_over_the_wire() -> tuple[int, str]:
    watchdog_module.INTERVAL_S, watchdog_module.STALE_S = 0.05, 0.2
    comm = ddp.init(shared_memory=False)
    with pytest.raises(PeerLost) as raised:
        comm.broadcast(torch.ones(4, dtype=torch.float64 if comm.rank == 0 else torch.float32))
    return raised.value.rank, str(raised.value)


def test_over_the_wire_a_different_call_ends_by_an_error_and_not_by_an_abort() -> None:
    (first, said), *others = run_ranks(differ_over_the_wire, 3)
    assert first in (1, 2)
    assert "it calls broadcast from 0 of 4 float32 [broadcast of [4]] where rank 0 calls broadcast from 0 of" in said
    for blamed, text in others:
        assert blamed == 0
        assert "it calls broadcast from 0 of 4 float64 [broadcast of [4]] where rank" in text


def ask_for_a_way_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"algorithm='hierarchical' is not possible here. Choose one of auto, ring"):
        ddp.init(algorithm="hierarchical")


def test_a_way_that_this_layout_has_not_is_refused_at_once() -> None:
    run_ranks(ask_for_a_way_that_is_not_there, 2)


# --- a program that never calls shutdown -----------------------------------------------------------------------------

EXITS = """
import os, sys
from torch.distributed import HashStore
from ddp.comm.watch import watchdog
watchdog.INTERVAL_S = 0  # the thread is nearly always in the store
for _ in range(3):
    if not (child := os.fork()):
        kept = watchdog.Watchdog(HashStore(), 0, 1, generation=0, warn_s=1, abort_s=2)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_program_may_end_without_shutdown() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
