"""Every way of every collective, on ranks that are threads: right for each world size, length, dtype and operation.

One table: members (the algorithms) × properties × world sizes 1 to 8. The oracle is a formula over all ranks' values.

Tests: ddp/comm/call_queue.py, ddp/comm/checks.py, ddp/comm/execute.py, ddp/comm/host_links.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from faulty import Faulty
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp.collectives.catalog import Hosts, all_reduce_schedules
from ddp.collectives.schedule import Expression, offsets
from ddp.comm import checks
from ddp.comm.call_queue import Work
from ddp.comm.communicator import Communicator
from ddp.comm.connect import Channels
from ddp.comm.host_links import Settings
from ddp.comm.transport.edge import Pending, Transfer, Transport
from ddp.comm.watch.status import Board
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import CollectiveMismatch, CommunicatorBroken, ConfigError, PeerLost
from ddp.setting import WireName
from recipes.tutorial.simulated import SimulatedNetwork, SimulatedTransport

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ALGORITHMS = sorted(all_reduce_schedules(((0, 1), (2, 3))))
WORLD_SIZES = range(1, 9)


def hosts_of(world_size: int) -> Hosts:
    """Hosts of three ranks, the last one of fewer: uneven wherever they can be."""
    return tuple(tuple(range(first, min(first + 3, world_size))) for first in range(0, world_size, 3))


def over(transport: Transport, hosts: Hosts | None = None, watchdog: Watchdog | None = None, **settings: Any) -> Any:
    """A communicator over a transport alone: by a ring, unless told otherwise."""
    chosen = Settings(**{"algorithm": "ring", "abort_s": 20, "shared_memory": False, **settings})
    return Communicator(transport, chosen, watchdog=watchdog, hosts=hosts or hosts_of(transport.world_size))


def each_rank(world_size: int, program: Callable[[Communicator], Any], **settings: Any) -> list[Any]:
    """What `program` returns on each rank, each with a communicator of its own."""

    def run(transport: SimulatedTransport) -> Any:
        comm = over(transport, **settings)
        try:
            return program(comm)
        finally:
            comm.close()

    return SimulatedNetwork(world_size).run(run)


def lengths(world_size: int) -> list[int]:
    return sorted({0, 1, 2, world_size - 1, world_size, world_size + 1, 97})


def values(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers: every order of additions gives the same, exactly."""
    generator = torch.Generator().manual_seed(rank * 10_007 + numel)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


def normal(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def routes(world_size: int) -> list[str]:
    return [name for name in ALGORITHMS if name in all_reduce_schedules(hosts_of(world_size))]


# --- all-reduce: members × properties × world sizes ------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_means_that_a_type_holds_do_not_overflow_where_sums_would(world_size: int) -> None:
    """Up to the largest number of float16, 65,504, on every rank. Also where only what travels is so narrow."""
    numbers = torch.tensor([40_000.0, 65_504.0, -65_500.0, 1.0, 2e-6])

    def program(comm: Communicator) -> list[Tensor]:
        def large(dtype: torch.dtype = torch.float16) -> Tensor:
            return numbers.repeat(8).to(dtype)

        every_way = [comm.all_reduce(large(), "mean", algorithm=name) for name in routes(world_size)]
        divided = comm.all_reduce(large(), divide_by=world_size)
        later = comm.all_reduce(large(), divide_by=torch.tensor(2 * world_size))
        one, other = comm.all_reduce([large(), large(torch.float32)], "mean")
        narrow = comm.all_reduce(large(torch.float32), "mean", wire="fp16")
        scattered = torch.cat(comm.all_gather(comm.reduce_scatter(large(), "mean")))
        return [*every_way, divided, 2 * later, one, other, narrow, scattered, comm.reduce(large(), 0, "mean")]

    for results in each_rank(world_size, program):
        for result in results:
            torch.testing.assert_close(result.double(), numbers.repeat(8).double(), rtol=2e-3, atol=2e-7)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.quick(1)
def test_integers_and_bools_are_exact(world_size: int) -> None:
    kinds = [(numel, torch.int64) for numel in lengths(world_size)] + [(21, dtype) for dtype in INTEGERS]
    cases = [(name, numel, dtype) for name in routes(world_size) for numel, dtype in kinds]

    def program(comm: Communicator) -> list[Tensor]:
        exact = [comm.all_reduce(values(comm.rank, n, dtype), algorithm=name) for name, n, dtype in cases]
        flags = [comm.all_reduce(values(comm.rank, 9) > 3, algorithm=name) for name in routes(world_size)]
        return exact + flags

    results = each_rank(world_size, program, segment_bytes=64)
    for index, (_, numel, dtype) in enumerate(cases):
        expected = torch.stack([values(rank, numel, dtype) for rank in range(world_size)]).sum(0).to(dtype)
        for result in results:
            assert result[index].dtype == dtype
            assert torch.equal(result[index], expected), cases[index]
    anyone = torch.stack([values(rank, 9) > 3 for rank in range(world_size)]).any(0)
    for result in results:
        assert all(torch.equal(flags, anyone) for flags in result[len(cases) :])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.quick(1)
def test_floats_are_within_the_bound_and_bitwise_equal_on_all_ranks(world_size: int) -> None:
    """|error| ≤ 2(W−1)·eps·Σ|x| for any order of additions; and it is the one that the proof says."""
    cases = [(name, dtype) for name in routes(world_size) for dtype in FLOATS]
    schedules = all_reduce_schedules(hosts_of(world_size))
    proofs = {name: schedules[name].check(world_size) for name in routes(world_size)}

    def program(comm: Communicator) -> list[Tensor]:
        return [comm.all_reduce(normal(comm.rank, 61, dtype), algorithm=name) for name, dtype in cases]

    first, *others = each_rank(world_size, program, segment_bytes=64)
    again = each_rank(world_size, program, segment_bytes=64)[0]
    for index, (name, dtype) in enumerate(cases):
        terms = torch.stack([normal(rank, 61, dtype).double() for rank in range(world_size)])
        bound = 2 * (world_size - 1) * torch.finfo(dtype).eps * terms.abs().sum(0)
        assert ((first[index].double() - terms.sum(0)).abs() <= bound).all(), (name, dtype)
        assert all(torch.equal(first[index], other[index]) for other in others), (name, dtype)
        assert torch.equal(first[index], again[index]), (name, dtype)
        parts = [normal(rank, 61, dtype) for rank in range(world_size)]
        bounds = offsets(61, proofs[name].num_chunks)
        for expression, (start, stop) in zip(proofs[name].expressions, pairwise(bounds), strict=True):
            wanted = added_up(expression, [part[start:stop] for part in parts])
            assert torch.equal(first[index][start:stop], wanted), (name, dtype)


def added_up(expression: Expression, parts: list[Tensor]) -> Tensor:
    """Adds the ranks' tensors in the order of an expression."""
    if isinstance(expression, int):
        return parts[expression]
    first, second = expression
    return added_up(first, parts) + added_up(second, parts)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.quick(1)
def test_every_operation(world_size: int) -> None:
    reference: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda x: x.sum(0),
        "mean": lambda x: x.mean(0),
        "product": lambda x: x.prod(0),
        "min": lambda x: x.amin(0),
        "max": lambda x: x.amax(0),
    }

    def program(comm: Communicator) -> list[Tensor]:
        tensors = [normal(comm.rank, 33, torch.float64) for _ in reference for _ in routes(world_size)]
        names = [(op, name) for op in reference for name in routes(world_size)]
        return [comm.all_reduce(x, op, algorithm=name) for x, (op, name) in zip(tensors, names, strict=True)]  # type: ignore[call-overload]

    terms = torch.stack([normal(rank, 33, torch.float64) for rank in range(world_size)])
    for results in each_rank(world_size, program):
        for index, result in enumerate(results):
            expected = list(reference.values())[index // len(routes(world_size))](terms)
            torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.quick(1)
def test_every_sum_is_divided_once(world_size: int) -> None:
    """In each way, whoever completes it; in many segments."""
    cases = [(name, numel) for name in routes(world_size) for numel in (1, world_size + 1, 150)]

    def program(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for name, numel in cases:
            mine = normal(comm.rank, numel, torch.float64)
            total = comm.all_reduce(mine.clone(), algorithm=name)
            pairs.append((total, comm.all_reduce(mine, divide_by=3, algorithm=name)))
        return pairs

    for pairs in each_rank(world_size, program, segment_bytes=64):
        for case, (total, divided) in zip(cases, pairs, strict=True):
            assert torch.equal(divided, total / 3), case


EPS = {"bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps, "int8": 1 / 127}
EPS["int8_stochastic"] = 2 * EPS["int8"]


def large(rank: int, numel: int, divide_by: int) -> Tensor:
    """Numbers whose mean is about 1."""
    return normal(rank, numel, torch.float32) * divide_by


@pytest.mark.parametrize("wire", EPS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.quick(4)
def test_a_narrow_wire_keeps_replicas_equal_and_accumulates_wide(world_size: int, wire: WireName) -> None:
    """Rounded once per hop, not added in the narrow type: within one rounding per contribution and one of the sum."""
    cases = [(0, 1), (1, 3), (1023, 1), (1801, 1 << 20)]

    def program(comm: Communicator) -> list[Tensor]:
        return [
            comm.all_reduce(large(comm.rank, numel, divide_by), algorithm=name, wire=wire, divide_by=divide_by)
            for name, (numel, divide_by) in product(routes(world_size), cases)
        ]

    first, *others = each_rank(world_size, program, segment_bytes=1024)
    for index, (name, (numel, divide_by)) in enumerate(product(routes(world_size), cases)):
        terms = torch.stack([large(rank, numel, divide_by).double() for rank in range(world_size)])
        assert first[index].dtype == torch.float32
        error = (first[index].double() - terms.sum(0) / divide_by).abs() * divide_by
        size = terms.abs().sum(0)
        size = size.max() if wire.startswith("int8") and numel else size  # of a block at most
        assert (error <= (world_size + 1) * EPS[wire] * size).all(), (name, numel)
        assert all(torch.equal(first[index], other[index]) for other in others), (name, numel)


def test_a_narrow_wire_moves_fewer_bytes_and_is_better_than_adding_narrow() -> None:
    """Eight ranks add 1 and 2⁻⁹: in bfloat16 every small addend would be lost, in float32 none of those that are
    added before the sum travels on is."""

    def program(comm: Communicator) -> Tensor:
        tensor = torch.full((64,), 1.0 if comm.rank == 0 else 2.0**-9)
        return comm.all_reduce(tensor, algorithm="master_worker", wire="bf16")

    for result in each_rank(8, program):
        assert torch.equal(result, torch.full((64,), 1.015625))  # 1 + 7·2⁻⁹ = 1.01367…, rounded once at the end


def test_lists_travel_together() -> None:
    def program(comm: Communicator) -> tuple[list[Tensor], int]:
        tensors = [torch.ones(3), torch.ones(2, 2, dtype=torch.int64), torch.full((2, 3), 2.0).t(), torch.ones(0)]
        returned = comm.all_reduce(tensors)
        assert all(a is b for a, b in zip(returned, tensors, strict=True))
        works = [comm.all_reduce([torch.ones(2), torch.ones(3)], async_op=True) for _ in range(3)]
        return returned, sum(int(tensor.sum()) for work in works for tensor in work.wait())

    for tensors, total in each_rank(3, program):
        assert torch.equal(tensors[0], torch.full((3,), 3.0))
        assert torch.equal(tensors[1], torch.full((2, 2), 3))
        assert torch.equal(tensors[2], torch.full((3, 2), 6.0))
        assert total == 3 * 5 * 3


@pytest.mark.parametrize("segment_bytes", [1, 8, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_any_segment_size(dtype: torch.dtype, segment_bytes: int) -> None:
    def program(comm: Communicator) -> list[Tensor]:
        tensors = [values(comm.rank, 50).abs().to(dtype) for _ in routes(3)]
        return [comm.all_reduce(x, algorithm=name) for x, name in zip(tensors, routes(3), strict=True)]

    expected = sum(values(rank, 50).abs() for rank in range(3))
    for results in each_rank(3, program, segment_bytes=segment_bytes):
        for result in results:
            assert result.dtype == dtype
            assert torch.equal(result.double(), expected)


# --- the other verbs -------------------------------------------------------------------------------------------------


STRANGE: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "every other one": lambda: torch.arange(12.0)[::2],
    "a column": lambda: torch.arange(12.0).view(3, 4)[:, 1],
    "conjugated": lambda: torch.complex(torch.arange(4.0), torch.ones(4)).conj(),
    "a scalar": lambda: torch.tensor(3.0),
    "needs a gradient": lambda: torch.ones(3, requires_grad=True) * 1.0,
    "wide unsigned": lambda: torch.arange(5, dtype=torch.int32).view(torch.uint32),
}


@pytest.mark.parametrize("name", STRANGE)
def test_tensors_that_are_laid_out_strangely(name: str) -> None:
    """The result is right, in place, and what lies between the elements is left alone."""

    def program(comm: Communicator) -> list[Tensor]:
        tensors = [STRANGE[name]() for _ in range(4)]
        comm.all_reduce(tensors[0])
        comm.all_reduce(tensors[1:2])
        comm.broadcast(tensors[2])
        comm.reduce(tensors[3], 1)
        return [*tensors, comm.reduce_scatter(STRANGE[name]()), *comm.all_gather(STRANGE[name]())]

    one = STRANGE[name]().detach()
    wide = one.view(torch.int32) if one.dtype == torch.uint32 else one.resolve_conj()
    total = (3 * wide).view(one.dtype)
    for rank, (summed, listed, spread, reduced, _, *gathered) in enumerate(each_rank(3, program)):
        assert torch.equal(summed, total)
        assert torch.equal(listed, total)
        assert torch.equal(spread, one)
        assert torch.equal(reduced, total if rank == 1 else one)
        assert all(torch.equal(other.view(one.shape), one) for other in gathered)
    shares = [result[4] for result in each_rank(3, program)]
    assert torch.equal(torch.cat(shares), total.reshape(-1))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_reduce_scatter_and_all_gather(world_size: int) -> None:
    def program(comm: Communicator) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        mine = [comm.reduce_scatter(values(comm.rank, numel)) for numel in lengths(world_size)]
        gathered = comm.all_gather(torch.full((comm.rank % 3, 2), float(comm.rank)))
        scalars = comm.all_gather(torch.tensor(comm.rank))
        return mine, gathered, scalars

    results = each_rank(world_size, program, segment_bytes=16)
    for index, numel in enumerate(lengths(world_size)):
        total = torch.stack([values(rank, numel) for rank in range(world_size)]).sum(0)
        assert torch.equal(torch.cat([mine[index] for mine, _, _ in results]), total)
    for _, gathered, scalars in results:
        for rank in range(world_size):
            assert torch.equal(gathered[rank], torch.full((rank % 3, 2), float(rank)))
        assert torch.cat(scalars).tolist() == list(range(world_size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rooted_collectives_from_every_root(world_size: int) -> None:
    def program(comm: Communicator) -> list[tuple[Tensor, Tensor, list[Tensor], Tensor]]:
        found = []
        for root in range(world_size):
            spread = comm.broadcast(torch.full((5,), float(comm.rank)), root)
            reduced = comm.reduce(values(comm.rank, 13), root)
            gathered = comm.gather(torch.full((comm.rank % 3, 2), float(comm.rank)), root)
            pieces = [torch.full((rank, 2), float(rank + root)) for rank in range(world_size)]
            found.append((spread, reduced, gathered, comm.scatter(pieces if comm.rank == root else None, root)))
        return found

    total = torch.stack([values(rank, 13) for rank in range(world_size)]).sum(0)
    for rank, found in enumerate(each_rank(world_size, program, segment_bytes=16)):
        for root, (spread, reduced, gathered, piece) in enumerate(found):
            assert torch.equal(spread, torch.full((5,), float(root)))
            assert torch.equal(reduced, total if rank == root else values(rank, 13))  # the others' is left alone
            assert len(gathered) == (world_size if rank == root else 0)
            assert all(torch.equal(x, torch.full((r % 3, 2), float(r))) for r, x in enumerate(gathered))
            assert torch.equal(piece, torch.full((rank, 2), float(rank + root)))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all_with_uneven_pieces(world_size: int) -> None:
    """Rank s sends rank d (s + 2d) % 4 rows."""

    def program(comm: Communicator) -> list[Tensor]:
        rows = [(comm.rank + 2 * peer) % 4 for peer in range(world_size)]
        return comm.all_to_all([torch.full((n, 3), 10.0 * comm.rank + peer) for peer, n in enumerate(rows)])

    for rank, received in enumerate(each_rank(world_size, program, segment_bytes=16)):
        for peer, tensor in enumerate(received):
            assert torch.equal(tensor, torch.full(((peer + 2 * rank) % 4, 3), 10.0 * peer + rank))


def test_means_of_the_other_verbs() -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        mine = torch.full((4,), float(comm.rank))
        return comm.reduce_scatter(mine, "mean"), comm.reduce(mine.clone(), 1, "mean")

    results = each_rank(4, program)
    assert torch.equal(torch.cat([mine for mine, _ in results]), torch.full((4,), 1.5))
    assert torch.equal(results[1][1], torch.full((4,), 1.5))


# --- groups, order, several in flight --------------------------------------------------------------------------------


def test_subgroups_count_and_number_for_themselves() -> None:
    def program(comm: Communicator) -> tuple[float, float, list[int]]:
        evens, odds = comm.subgroup([0, 2, 4]), comm.subgroup([3, 1])
        mine = evens if evens is not None else odds
        assert mine is not None
        assert (evens is None) == (comm.rank % 2 == 1)
        work = mine.all_reduce(torch.tensor([10.0**comm.rank]), async_op=True)
        everyone = comm.all_reduce(torch.ones(1)).item()  # beside the group's, over the same edges
        pair = evens.subgroup([2, 0]) if evens is not None else None
        order = [int(x) for x in torch.cat(pair.all_gather(torch.tensor([comm.rank])))] if pair is not None else []
        return work.wait().item(), everyone, order

    results = each_rank(5, program)
    assert [total for total, _, _ in results] == [10101.0, 1010.0, 10101.0, 1010.0, 10101.0]
    assert all(everyone == 5 for _, everyone, _ in results)
    assert [order for _, _, order in results] == [[4, 0], [], [], [], [4, 0]]


def test_many_in_flight_end_in_order_and_sync_calls_queue_behind() -> None:
    def program(comm: Communicator) -> list[float]:
        tensors = [torch.full((100,), float(k)) for k in range(20)]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert comm.agree_any(comm.rank == 1)
        assert all(work.is_completed() for work in works)
        for work in works:
            work.wait()
        comm.close()
        return [tensor[0].item() for tensor in tensors]

    for result in each_rank(3, program):
        assert result == [3.0 * k for k in range(20)]


def test_every_verb_asynchronously() -> None:
    def program(comm: Communicator) -> list[Any]:
        works = [
            comm.reduce_scatter(torch.ones(3), async_op=True),
            comm.all_gather(torch.ones(1), async_op=True),
            comm.broadcast(torch.full((1,), float(comm.rank)), 2, async_op=True),
            comm.reduce(torch.ones(2), 1, async_op=True),
            comm.gather(torch.ones(1), 0, async_op=True),
            comm.scatter([torch.ones(1)] * 3 if comm.rank == 1 else None, 1, async_op=True),
            comm.all_to_all([torch.ones(1)] * 3, async_op=True),
        ]
        results = [work.wait(timeout_s=10) for work in works]
        comm.close()
        return results

    mine, gathered, spread, reduced, collected, piece, exchanged = each_rank(3, program)[1]
    assert (mine.tolist(), spread.tolist(), reduced.tolist(), piece.tolist()) == ([3.0], [2.0], [3.0, 3.0], [1.0])
    assert (len(gathered), len(collected), len(exchanged)) == (3, 0, 3)


def test_a_wait_has_a_deadline_of_its_own() -> None:
    def program(comm: Communicator) -> float:
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(1), async_op=True)
            with pytest.raises(TimeoutError):
                work.wait(timeout_s=0.01)  # rank 1 comes after this
            comm_0_gave_up.set()
            return float(work.wait())
        assert comm_0_gave_up.wait(20)
        return comm.all_reduce(torch.ones(1)).item()

    comm_0_gave_up = threading.Event()
    assert each_rank(2, program) == [2.0, 2.0]


def test_agree_any_and_barrier() -> None:
    def program(comm: Communicator) -> tuple[bool, bool]:
        comm.barrier()
        return comm.agree_any(False), comm.agree_any(comm.rank == 2)

    assert each_rank(3, program) == [(False, True)] * 3


# --- what goes wrong -------------------------------------------------------------------------------------------------


@cache
def busiest_rounds(name: str, world_size: int) -> int:
    """Rounds in which rank 1 has something in flight."""
    schedule = all_reduce_schedules(hosts_of(world_size))[name]
    return sum(1 for ops in schedule.algorithm(1, world_size) if ops)


def test_a_second_thread_is_refused_while_the_first_is_in_a_collective() -> None:
    """Two threads take turns in another order on every rank."""

    def program(transport: SimulatedTransport) -> str:
        comm = over(transport)
        if comm.rank == 1:
            is_refused.wait(20)
            comm.barrier()
            return ""
        first = threading.Thread(target=comm.barrier, name="first")
        first.start()
        while comm._queue._running.operation != "barrier":
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="one thread at a time: give each") as refused:
            comm.all_reduce(torch.ones(3), label="gradients")
        is_refused.set()
        first.join()  # what was running ends as if nothing had been
        with pytest.raises(CommunicatorBroken, match="one thread at a time"):
            comm.barrier()
        return str(refused.value)

    is_refused = threading.Event()
    message, _ = SimulatedNetwork(2).run(program)
    assert "collective #2 [gradients] began in thread" in message
    assert "while collective #1 [barrier] was running" in message


@pytest.mark.parametrize("how", ["raise", "silent"])
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name in routes(5)])
@pytest.mark.quick(4)
def test_a_fault_in_any_round_of_any_algorithm(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank ends: with a PeerLost that names the call, or, if it needed nothing more, with the right sum."""
    monkeypatch.setattr("ddp.comm.watch.watchdog.SEARCH_S", 0.05)  # whom it names is another test's subject
    for fail_round in range(busiest_rounds(name, 5)):

        def run(transport: SimulatedTransport, fail_round: int = fail_round) -> Tensor | str:
            faulty = Faulty(transport, fail_at={1: fail_round}, how=how)  # type: ignore[arg-type]
            comm = over(faulty, abort_s=0.05)
            try:
                total: Tensor = comm.all_reduce(values(comm.rank, 10), algorithm=name, label="gradients of fc")
                return total
            except PeerLost as lost:
                return str(lost)
            finally:
                comm.close()

        results = SimulatedNetwork(5).run(run)
        assert isinstance(results[1], str)
        for result in results:
            if isinstance(result, str):
                assert result.startswith("lost rank ")
                assert "during collective #1 [gradients of fc]" in result
            else:
                assert torch.equal(result, torch.stack([values(rank, 10) for rank in range(5)]).sum(0))


def test_after_an_error_the_communicator_refuses_further_calls() -> None:
    def program(transport: SimulatedTransport) -> str:
        comm = over(Faulty(transport, fail_at={1: 0}), abort_s=0.3)
        with pytest.raises(PeerLost):
            comm.all_reduce(torch.zeros(10), label="gradients of fc")
        with pytest.raises(CommunicatorBroken) as refused:
            comm.barrier()
        return str(refused.value)

    for message in SimulatedNetwork(3).run(program):
        assert "out of use since: lost rank" in message
        assert "#1 [gradients of fc]" in message


@pytest.mark.parametrize(
    ("odd_one", "says"),
    [
        (lambda comm: comm.all_reduce(torch.ones(4), "max"), "rank 1: #1 all_reduce max of [4] float32"),
        (lambda comm: comm.all_reduce(torch.ones(5)), "rank 1: #1 all_reduce sum of [5] float32"),
        (lambda comm: comm.all_reduce(torch.ones(4).long()), "rank 1: #1 all_reduce sum of [4] int64"),
        (lambda comm: comm.broadcast(torch.ones(4)), "rank 1: #1 broadcast from 0 of [4] float32"),
        (lambda comm: comm.barrier(), "rank 1: #1 barrier"),
        (lambda comm: comm.all_gather(torch.ones(2, 3)), "rank 1: #1 all_gather rows [3] float32"),
        (
            lambda comm: comm.all_reduce(torch.ones(4), algorithm="tree"),
            "rank 1: #1 all_reduce sum of [4] float32 tr",
        ),
        (lambda comm: comm.all_reduce([torch.ones(4)]), "rank 1: #1 all_reduce of 1 tensors sum of [4] ([4], float32"),
        (lambda comm: comm.all_reduce(torch.ones(4), label="bucket 7"), "rank 1: #1 all_reduce sum of [4] float32 [bu"),
    ],
)
def test_debug_mode_names_both_sides_of_a_mismatch(odd_one: Callable[[Communicator], Any], says: str) -> None:
    def program(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatch) as raised:
            if comm.rank == 1:
                odd_one(comm)
            else:
                comm.all_reduce(torch.ones(4))
        with pytest.raises(CommunicatorBroken):
            comm.barrier()
        return str(raised.value)

    for message in each_rank(3, program, debug=True):
        assert "  rank 0: #1 all_reduce sum of [4] float32\n" in message
        assert says in message


def test_debug_mode_compares_the_sizes_that_are_asked_about() -> None:
    def program(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatch) as raised:
            comm.plan.explain(1 << (10 + comm.rank))
        return str(raised.value)

    for message in each_rank(2, program, debug=True):
        assert "rank 0: #1 explain 1024" in message


def test_inference_mode_holds_for_its_own_calls_alone() -> None:
    def program(comm: Communicator) -> list[float]:
        with torch.inference_mode():
            first = comm.all_reduce(torch.ones(3), async_op=True).wait()
            comm.all_reduce(torch.ones(3), wire="bf16")
        second = comm.all_reduce(torch.ones(3), wire="bf16")
        return [first[0].item(), second[0].item()]

    assert each_rank(2, program) == [[2.0, 2.0]] * 2


def test_a_group_takes_auto_where_the_way_of_all_is_not_possible() -> None:
    def program(comm: Communicator) -> tuple[str, str]:
        group = comm.subgroup([0, 1])
        assert group is None or group.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        return comm.plan.algorithm, group.plan.algorithm if group is not None else ""

    asked = "hierarchical"
    assert each_rank(5, program, algorithm=asked) == [(asked, "auto")] * 2 + [(asked, "")] * 3


def test_threads_that_take_a_channel_at_once_get_different_ones() -> None:
    channels, taken = Channels(), list[int]()

    def alone(mine: bytes) -> list[bytes]:
        return [mine]

    def interrupted(mine: bytes) -> list[bytes]:
        if not taken:
            taken.append(channels.take(alone))  # the other thread's, between question and answer
        return [mine]

    assert channels.take(interrupted) not in taken


def test_wrong_arguments() -> None:
    comm = over(SimulatedNetwork(1).transport(0))
    with pytest.raises(ConfigError, match=r"algorithm='star' is not possible here\. Choose one of auto, ring, tree"):
        comm.all_reduce(torch.zeros(1), algorithm="star")
    for verb in (comm.all_reduce, comm.reduce_scatter):
        with pytest.raises(ConfigError, match=r"op='avg' is unknown; .*Did you mean mean\?"):
            verb(torch.zeros(1), "avg")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"nbytes=25000000\.0: a tensor has 0 bytes or more, a whole number"):
        comm.plan.explain(25e6)
    with pytest.raises(ConfigError, match="divide_by=0: must be from 1"):
        comm.all_reduce(torch.zeros(1), divide_by=np.int64(0))
    with pytest.raises(ConfigError, match=r"divide_by=2\.5: must be a whole number"):
        comm.all_reduce(torch.zeros(1), divide_by=2.5)
    with pytest.raises(ConfigError, match="divide_by=-4: must be from 1"):
        comm.all_reduce(torch.zeros(1), divide_by=Decimal(-4))  # has no index, so it is read when its turn has come
    with pytest.raises(ConfigError, match=r"op='mean' on torch\.int64"):
        comm.all_reduce(torch.zeros(1, dtype=torch.int64), "mean")
    with pytest.raises(ConfigError, match="use op='sum'"):
        comm.all_reduce(torch.zeros(1), "mean", divide_by=2)
    with pytest.raises(ConfigError, match="divide_by=0: must be from 1"):
        comm.all_reduce(torch.zeros(1), divide_by=0)
    with pytest.raises(ConfigError, match="use a floating point tensor"):
        comm.all_reduce(torch.zeros(1, dtype=torch.int64), divide_by=2)
    with pytest.raises(ConfigError, match=r"op='max' on torch\.complex64: complex numbers have no order"):
        comm.all_reduce(torch.zeros(1, dtype=torch.complex64), "max")
    with pytest.raises(ConfigError, match=r"wire='fp16' with torch\.int64: a wire format is for floating"):
        comm.all_reduce(torch.zeros(1, dtype=torch.int64), wire="fp16")
    with pytest.raises(ConfigError, match=r"wire='bf16' is wider than the tensor's torch\.float8_e5m2"):
        checks.wire("bf16", "sum", torch.float8_e5m2)
    with pytest.raises(ConfigError, match=r"wire='int8' with torch\.float16: takes float32 and float64"):
        comm.all_reduce(torch.zeros(1, dtype=torch.float16), wire="int8")
    with pytest.raises(ConfigError, match=r"wire='bf16' with op='max': only sums can travel in it"):
        comm.all_reduce(torch.zeros(1), "max", wire="bf16")
    with pytest.raises(ConfigError, match=r"op=\['sum'\] is unknown"):
        comm.all_reduce(torch.zeros(1), ["sum"])  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=r"wire='bfloat16': take one of bf16, fp16, int8, int8_sto"):
        comm.all_reduce(torch.zeros(1), wire="bfloat16")  # type: ignore[call-overload]
    for nonsense in ([1.0], 1.0, None):
        with pytest.raises(ConfigError, match="needs a tensor or a list of tensors, got"):
            comm.all_reduce(nonsense)  # type: ignore[call-overload]
    sparse = torch.zeros(2).to_sparse()
    for verb in (comm.all_reduce, comm.reduce_scatter, comm.all_gather, comm.gather, comm.broadcast):
        with pytest.raises(ConfigError, match=r"layout torch\.sparse_coo: collectives take dense ones"):
            verb(sparse)
    for verb in (comm.scatter, comm.all_to_all):
        with pytest.raises(ConfigError, match=r"layout torch\.sparse_coo: collectives take dense ones"):
            verb([sparse])
    for rooted in (comm.broadcast, comm.reduce, comm.gather):
        with pytest.raises(ConfigError, match="root=1 is no rank of a world of 1"):
            rooted(torch.zeros(1), root=1)
    for in_place in (comm.all_reduce, comm.broadcast, comm.reduce):
        with pytest.raises(ConfigError, match=r"a tensor \[2, 3\] with strides .* cannot hold a result, .*: pass its"):
            in_place(torch.zeros(3).expand(2, 3))
    with pytest.raises(ConfigError, match=r"op='max' on torch\.uint16: torch does not compare these"):
        comm.all_reduce(torch.zeros(1, dtype=torch.uint16), "max")
    with pytest.raises(ConfigError, match="nbytes=-1: a tensor has 0 bytes or more"):
        comm.plan.explain(-1)
    with pytest.raises(ConfigError, match="numel=-1: must be a whole number, at least 0"):
        comm.allocate(-1, torch.float32)
    with pytest.raises(ConfigError, match="algorithm='bogus' is not possible here"):
        comm.plan.check("bogus")
    with pytest.raises(ConfigError, match="needs a list of 1 tensors, one per rank; got 2"):
        comm.all_to_all([torch.zeros(1)] * 2)
    with pytest.raises(ConfigError, match="needs a list of 1 tensors, one per rank; got none"):
        comm.scatter()
    with pytest.raises(ConfigError, match=r"ranks=\[0, 1\]: a subgroup needs distinct ranks from 0 to 0"):
        comm.subgroup([0, 1])


def test_all_to_all_refuses_pieces_that_do_not_fit_together() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=r"may differ in the first dimension only: \[\[1, 2\], \[1, 3\]\]"):
            comm.all_to_all([torch.zeros(1, 2), torch.zeros(1, 3)])

    each_rank(2, program)


def test_an_error_of_any_kind_ends_the_communicator() -> None:
    """Ctrl-C in the middle of a call: the others have got further, so this rank must not go on as if nothing was."""

    class Interrupted(SimulatedTransport):
        def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
            raise KeyboardInterrupt

        def for_collective(self, kind: Hashable) -> Interrupted:
            return self

    comm = over(Interrupted(SimulatedNetwork(2), range(2), 0, channel=0))
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(torch.ones(3))
    with pytest.raises(CommunicatorBroken):
        comm.barrier()
    comm = over(SimulatedNetwork(1).transport(0))
    comm.close()
    with pytest.raises(CommunicatorBroken, match="out of use since: it was closed"):
        comm.barrier()


def test_a_run_is_pinned_to_the_choices_of_another() -> None:
    def program(comm: Communicator) -> tuple[str, str, str]:
        comm.plan.pin({"4000": "tree"})
        with pytest.raises(ConfigError, match="'abacus' is not possible here"):
            comm.plan.pin({"8": "abacus"})
        comm.all_reduce(torch.ones(1000))
        return comm.plan.choose(4000), comm.plan.choose(400), str(comm.plan.choices["4000"])

    for pinned, chosen, kept in each_rank(3, program, algorithm="auto"):
        assert pinned == kept == "tree"
        assert chosen in all_reduce_schedules(hosts_of(3))


class Listener(Watchdog):
    """Keeps what it is told, and tells nobody."""

    def __init__(self) -> None:
        self.board, self.warn_s = Board(HashStore(), 0, 1), math.inf
        self.heard: list[tuple[int, str]] = []

    def waits_for(self, peer: int) -> None:
        super().waits_for(peer)
        self.heard.append((self.board.last_wait.call.sequence, self.board.last_wait.call.label))


def test_measuring_the_links_is_part_of_the_call_that_needs_it() -> None:
    """Also in the background, while others are waiting to be begun: in what is counted, and in what is published."""

    def program(transport: SimulatedTransport) -> list[tuple[int, str]]:
        watchdog = Listener()
        comm = over(transport, watchdog=watchdog, algorithm="auto")
        works = [comm.all_reduce(torch.ones(1000), async_op=True, label=f"bucket {number}") for number in (1, 2)]
        for work in works:
            work.wait()
        return list(dict.fromkeys(watchdog.heard))

    for heard in SimulatedNetwork(3).run(program):
        assert heard == [(1, "bucket 1"), (2, "bucket 2")]


@pytest.mark.parametrize("numel", [5, 40_000])
def test_more_ranks_than_take_one_round_for_few_bytes(numel: int) -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        everyone = torch.stack(comm.all_gather(values(comm.rank, numel)))
        return everyone, comm.reduce_scatter(values(comm.rank, 9 * numel), "max")

    results = each_rank(9, program)
    for everyone, _ in results:
        assert torch.equal(everyone, torch.stack([values(rank, numel) for rank in range(9)]))
    largest = torch.stack([values(rank, 9 * numel) for rank in range(9)]).amax(0)
    assert torch.equal(torch.cat([mine for _, mine in results]), largest)


def test_every_verb_has_a_label_and_a_work() -> None:
    def program(comm: Communicator) -> list[str]:
        flat, bounds = torch.ones(6), [0, 2, 6]
        works = {
            "all_reduce": comm.all_reduce(torch.ones(3), async_op=True, label="purpose"),
            "reduce_scatter": comm.reduce_scatter(torch.ones(3), async_op=True, label="purpose"),
            "reduce_scatter_": comm.reduce_scatter_(flat.clone(), bounds, async_op=True, label="purpose"),
            "all_gather": comm.all_gather(torch.ones(3), async_op=True, label="purpose"),
            "all_gather_": comm.all_gather_(flat.clone(), bounds, async_op=True, label="purpose"),
            "broadcast": comm.broadcast(torch.ones(3), async_op=True, label="purpose"),
            "reduce": comm.reduce(torch.ones(3), async_op=True, label="purpose"),
            "gather": comm.gather(torch.ones(3), async_op=True, label="purpose"),
            "scatter": comm.scatter([flat, flat] if comm.rank == 0 else None, async_op=True, label="purpose"),
            "all_to_all": comm.all_to_all([flat, flat], async_op=True, label="purpose"),
            "chain": comm.chain(lambda: None, async_op=True, label="purpose"),
        }
        for work in works.values():
            work.wait()
        comm.barrier(label="purpose")
        comm.agree_any(True, label="purpose")
        return [name for name, work in works.items() if not isinstance(work, Work) or work._call.name != "purpose"]

    assert each_rank(2, program) == [[], []]
