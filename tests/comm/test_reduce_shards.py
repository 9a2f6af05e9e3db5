"""Sums over the shards of a batch: the bits of the tree over the shards, on any number of ranks, by every route."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, reduce
from itertools import accumulate, chain
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import ddp
from ddp.collectives.shards import most_nodes, nodes_by_rank
from ddp.comm import host_reduce
from ddp.errors import CollectiveMismatch, ConfigError

WORLD_SIZES = (1, 2, 3, 4, 5)
ROUTES: dict[str, dict[str, Any]] = {  # how the ranks meet, and where the rows lie
    "zero copy": {"shared_memory": True},
    "not allocated": {"shared_memory": True},
    "links": {"shared_memory": False, "algorithm": "tree"},  # which "auto" would find by a trial of each
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
LONG, SMALL_BLOCK_BYTES = 1237, 4096  # so that some hundred elements are several blocks


def numbers_of_shards(world_size: int) -> list[int]:
    return sorted({each for each in (world_size, 5, 6, 8) if each >= world_size})


def lengths(world_size: int) -> list[int]:
    return sorted({0, 1, world_size - 1, world_size, world_size + 1, LONG})


def of_shard(shard: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns what a shard brings: of different sizes, so that additions in another order have other bits."""
    generator = torch.Generator().manual_seed(1000 * shard + numel)
    numbers = torch.randn(numel, generator=generator, dtype=torch.float64)
    numbers *= 10 ** (3 * torch.rand(numel, generator=generator, dtype=torch.float64))
    numbers[3::7] = -0.0 if numel else 0.0
    numbers[4::7] = 0.0 if shard % 2 else -0.0
    return numbers.to(dtype)


def tree(terms: Sequence[Tensor]) -> Tensor:
    """Adds up as the tree over the shards does, by torch's own additions."""
    if len(terms) == 1:
        return terms[0]
    middle = 1 << (len(terms) - 1).bit_length() - 1
    return torch.add(tree(terms[:middle]), tree(terms[middle:]))


def expected(num_shards: int, numel: int, dtype: torch.dtype, divide_by: int) -> Tensor:
    total = tree([of_shard(shard, numel, dtype) for shard in range(num_shards)]) + 0
    return total if divide_by == 1 else total / divide_by


def rows_of(comm: ddp.Communicator, num_shards: int, numel: int, dtype: torch.dtype, *, allocated: bool) -> Tensor:
    """Returns this rank's rows; those that it has no node for are not numbers, which nobody may read."""
    num_rows = most_nodes(comm.world_size, num_shards)
    memory = comm.allocate(num_rows * numel, dtype) if allocated else torch.zeros(num_rows * numel, dtype=dtype)
    rows = memory.view(num_rows, numel).fill_(torch.nan)
    for row, node in zip(rows, nodes_by_rank(comm.world_size, num_shards)[comm.rank], strict=False):
        row.copy_(tree([of_shard(shard, numel, dtype) for shard in node]))
    return rows


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Returns True if the signs of zeros are equal, too."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def uneven(numel: int, world_size: int) -> list[int]:
    """Returns bounds of slices of different lengths, of which some are empty."""
    weights = [(3 * rank + 1) % 4 for rank in range(world_size)]
    return [numel * part // max(1, sum(weights)) for part in accumulate(weights, initial=0)]


def all_sums() -> list[tuple[Any, ...]]:
    """Returns what has other bits than expected: verb, route, shards, length, type, divisor."""
    host_reduce.BLOCK_BYTES = SMALL_BLOCK_BYTES
    wrong: list[tuple[Any, ...]] = []
    for route, how in ROUTES.items():
        comm = ddp.init(abort_s=30, **how)
        for num_shards in numbers_of_shards(comm.world_size):
            for numel in lengths(comm.world_size):
                for dtype in DTYPES if numel == LONG and num_shards == 8 else DTYPES[:1]:
                    for divide_by in (1, 7) if numel == LONG else (1,):
                        given, allocated = (num_shards, numel, dtype), route != "not allocated"
                        found = wrong_sums(comm, *given, divide_by, allocated=allocated)
                        wrong += [(what, route, *given, divide_by) for what in found]
        in_the_background(comm)
        by_tensors_of_more_dimensions(comm)
        ddp.shutdown()
    return wrong


def wrong_sums(
    comm: ddp.Communicator, num_shards: int, numel: int, dtype: torch.dtype, divide_by: int, *, allocated: bool
) -> list[str]:
    given, wrong = (num_shards, numel, dtype), list[str]()
    total, how = expected(*given, divide_by), {"num_shards": num_shards, "divide_by": divide_by}
    rows = rows_of(comm, *given, allocated=allocated)
    if comm.all_reduce(rows, **how) is not rows or not same_bits(rows[0], total):
        wrong.append("all_reduce")
    rows, bounds = rows_of(comm, *given, allocated=allocated), uneven(numel, comm.world_size)
    begin, end = bounds[comm.rank : comm.rank + 2]
    mine = comm.reduce_scatter_(rows, bounds, **how)
    if not same_bits(mine, total[begin:end]) or not same_bits(rows[0, begin:end], mine):
        wrong.append("reduce_scatter_")
    return wrong


def in_the_background(comm: ddp.Communicator) -> None:
    """Several at once, which end in any order."""
    rows = [rows_of(comm, 8, numel, torch.float32, allocated=True) for numel in (300, 20)]
    works = [comm.all_reduce(each, num_shards=8, async_op=True) for each in rows]
    for work, each in zip(works, rows, strict=True):
        work.wait()
        assert same_bits(each[0], expected(8, each.shape[1], torch.float32, 1))


def by_tensors_of_more_dimensions(comm: ddp.Communicator) -> None:
    rows = rows_of(comm, 8, 30, torch.float32, allocated=True).view(-1, 5, 6)
    comm.all_reduce(rows, num_shards=8)
    assert same_bits(rows[0], expected(8, 30, torch.float32, 1).view(5, 6))


@cache
def found_by(world_size: int) -> list[list[tuple[Any, ...]]]:
    return run_ranks(all_sums, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.quick(1)
def test_sums_have_the_bits_of_the_tree_over_the_shards(world_size: int) -> None:
    assert found_by(world_size) == [[]] * world_size


def test_the_oracle_is_a_sum_and_shows_another_order() -> None:
    for num_shards in (3, 5, 6, 8):
        shards = [of_shard(shard, LONG) for shard in range(num_shards)]
        total = expected(num_shards, LONG, torch.float32, 1)
        exact = torch.stack(shards).double().sum(0)
        assert torch.allclose(total.double(), exact, rtol=1e-5, atol=1e-2)
        assert num_shards == 3 or not torch.equal(reduce(torch.add, shards), total)
        assert not torch.equal(tree(shards[1:] + shards[:1]), total)
        assert not torch.signbit(total[total == 0]).any() and (total == 0).any()
        assert torch.signbit(tree(shards)[total == 0]).any()


# --- what is refused -------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a row too many": (lambda comm: (torch.zeros(3, 4), {"num_shards": 4}), r"num_shards=4 with \[3, 4\]: of 2 ranks"),
    "rows without elements": (lambda comm: (torch.zeros(1), {"num_shards": 4}), r"contiguous tensor \[1, …\]"),
    "not contiguous": (lambda comm: (torch.zeros(1, 8)[:, ::2], {"num_shards": 2}), "contiguous"),
    "a list": (lambda comm: ([torch.zeros(1, 4)], {"num_shards": 2}), "num_shards=2 with a list"),
    "fewer shards than ranks": (lambda comm: (torch.zeros(1, 4), {"num_shards": 1}), "at least as many shards as"),
    "no shards": (lambda comm: (torch.zeros(1, 4), {"num_shards": 0}), "num_shards=0 for 2 ranks"),
    "whole numbers": (
        lambda comm: (torch.zeros(1, 4, dtype=torch.int64), {"num_shards": 2}),
        "sums of whole numbers have no order",
    ),
    "the largest": (lambda comm: (torch.zeros(1, 4), {"num_shards": 2, "op": "max"}), "op='max', wire=None: take"),
    "the mean": (lambda comm: (torch.zeros(1, 4), {"num_shards": 2, "op": "mean"}), "with op='mean'"),
    "a wire format": (lambda comm: (torch.zeros(1, 4), {"num_shards": 2, "wire": "bf16"}), "wire='bf16': take"),
}


def refusals() -> None:
    for how in ({"shared_memory": True}, {"shared_memory": False}):
        comm = ddp.init(abort_s=30, **how)
        for what, (make, said) in BAD.items():
            given, kwargs = make(comm)
            for verb in (comm.all_reduce, comm.reduce_scatter_):
                if what in ("a list", "rows without elements") and verb == comm.reduce_scatter_:
                    continue  # there are no slices to speak of
                op = {"op": kwargs["op"]} if "op" in kwargs else {}
                others = {key: value for key, value in kwargs.items() if key != "op"}
                bounds = () if verb == comm.all_reduce else ([0, 1, given.shape[1]],)
                with pytest.raises(ConfigError, match=said):
                    verb(given, *bounds, **op, **others)
        with pytest.raises(ConfigError, match=r"bounds=\[0, 2, 8\]: must be 3 ascending positions from 0 to 4"):
            comm.reduce_scatter_(torch.zeros(1, 4), [0, 2, 8], num_shards=2)
        assert comm.all_reduce(torch.ones(1, 1), num_shards=2).item() == 2  # and the communicator goes on
        ddp.shutdown()


def test_what_is_no_sum_over_shards_is_refused_on_all_ranks() -> None:
    run_ranks(refusals, 2)


def with_different_numbers(how: dict[str, Any]) -> list[str]:
    told = []
    for scatters in (False, True):
        comm = ddp.init(abort_s=20, **how)
        num_shards = 4 if comm.rank == 0 else 8  # each rank has one node of both
        rows = comm.allocate(64, torch.float32).view(1, 64)
        with pytest.raises(CollectiveMismatch) as caught:
            if scatters:
                comm.reduce_scatter_(rows, [0, 32, 64], num_shards=num_shards)
            else:
                comm.all_reduce(rows, num_shards=num_shards)
        told.append(str(caught.value))
        ddp.shutdown()
    return told


@pytest.mark.parametrize("how", [{}, {"shared_memory": False, "debug": True}])
def test_ranks_with_other_numbers_of_shards_are_told(how: dict[str, Any]) -> None:
    for told in chain.from_iterable(run_ranks(with_different_numbers, 2, how)):
        assert re.search(r"rank 0.* 4( .*)?\n.*rank 1.* 8( |$)", told), told


def in_another_order() -> None:
    comm = ddp.init(abort_s=30, shared_memory=False, algorithm="ring")
    with pytest.raises(ConfigError, match="algorithm='ring' does not add up in the order of the tree over 3 s"):
        comm.all_reduce(torch.ones(1, 9), num_shards=3)
    assert wrong_sums(comm, 8, 30, torch.float32, 1, allocated=False) == []  # over which a ring has no say
    ddp.shutdown()


def test_an_algorithm_that_adds_up_in_another_order_is_refused() -> None:
    run_ranks(in_another_order, 3)
