"""The tree over the shards: closed facts about its nodes, and the expression that the workers' additions make."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ddp.collectives.schedule import Expression, canonical
from ddp.collectives.shards import (
    additions,
    additions_between,
    halves,
    is_canonical_over_ranks,
    is_node,
    largest_nodes,
    most_nodes,
    nodes_by_rank,
    shards_of_rank,
)

NUMBERS_OF_SHARDS = range(1, 33)
MOST_RANKS = 9


def blocks(num_shards: int) -> set[range]:
    """All nodes of the tree, by a closed formula: blocks of 2ʲ shards that begin at multiples of 2ʲ, cut at the end."""
    lengths = [1 << power for power in range(num_shards.bit_length() + 1)]
    return {range(a, min(a + length, num_shards)) for length in lengths for a in range(0, num_shards, length)}


def runs(num_shards: int) -> list[range]:
    return [range(a, b) for a in range(num_shards) for b in range(a + 1, num_shards + 1)]


@pytest.mark.parametrize("num_shards", NUMBERS_OF_SHARDS)
def test_nodes_are_blocks_of_powers_of_two(num_shards: int) -> None:
    nodes = blocks(num_shards)
    assert {run for run in runs(num_shards) if is_node(run, num_shards)} == nodes
    assert not is_node(range(num_shards - 1, num_shards + 1), num_shards)
    for node in nodes:
        if len(node) > 1:
            left, right = halves(node)
            assert {left, right} <= nodes
            assert [*left, *right] == [*node]
            assert len(left) & (len(left) - 1) == 0
            assert len(left) < len(node) <= 2 * len(left)


@pytest.mark.parametrize("num_shards", NUMBERS_OF_SHARDS)
def test_a_run_of_shards_consists_of_the_fewest_and_largest_nodes(num_shards: int) -> None:
    nodes = blocks(num_shards)
    for run in runs(num_shards):
        found = largest_nodes(run, num_shards)
        assert set(found) <= nodes
        assert [shard for node in found for shard in node] == [*run]
        inside = [node for node in nodes if run.start <= node.start and node.stop <= run.stop]
        for node in found:
            assert not any(set(node) < set(other) for other in inside)
        assert len(found) <= 2 * max(1, (len(run)).bit_length() - 1) + 1
    assert largest_nodes(range(3, 3), num_shards + 3) == []


@pytest.mark.parametrize("num_shards", NUMBERS_OF_SHARDS)
def test_workers_share_the_shards_evenly_in_order(num_shards: int) -> None:
    for num_ranks in range(1, MOST_RANKS + 1):
        shares = [shards_of_rank(rank, num_ranks, num_shards) for rank in range(num_ranks)]
        assert [shard for share in shares for shard in share] == list(range(num_shards))
        assert all(one.stop == other.start for one, other in pairwise(shares))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert nodes_by_rank(num_ranks, num_shards) == tuple(
            tuple(largest_nodes(share, num_shards)) for share in shares
        )
        assert most_nodes(num_ranks, num_shards) == max(map(len, nodes_by_rank(num_ranks, num_shards)))
        assert all(nodes_by_rank(num_ranks, num_shards)) == (num_ranks <= num_shards)


@pytest.mark.parametrize("num_shards", NUMBERS_OF_SHARDS)
def test_additions_between_workers_make_the_canonical_tree_over_the_shards(num_shards: int) -> None:
    for num_ranks in range(1, min(MOST_RANKS, num_shards) + 1):
        nodes = [node for mine in nodes_by_rank(num_ranks, num_shards) for node in mine]
        sums: list[Expression | None] = [canonical(len(node), node.start) for node in nodes]
        for into, other in additions_between(num_ranks, num_shards):
            assert sums[into] is not None and sums[other] is not None, "a sum that is used up is used once more"
            sums[into], sums[other] = (sums[into], sums[other]), None  # type: ignore[assignment]
        assert sums[0] == canonical(num_shards)
        assert sums[1:] == [None] * (len(nodes) - 1), "not everything was added up"


@pytest.mark.parametrize("num_shards", NUMBERS_OF_SHARDS)
def test_additions_of_single_shards_end_at_the_first(num_shards: int) -> None:
    for node in blocks(num_shards):
        alone = [range(shard, shard + 1) for shard in node]
        sums: list[Expression] = list(node)
        for into, other in additions(alone, node):
            sums[into] = sums[into], sums[other]
        assert sums[0] == canonical(len(node), node.start)


@pytest.mark.parametrize("num_shards", NUMBERS_OF_SHARDS)
def test_when_a_canonical_schedule_over_the_workers_will_do(num_shards: int) -> None:
    """It will if and only if each worker's sum is one node, and the workers' tree has the brackets of what is left."""

    def over_workers(expression: Expression, num_ranks: int) -> Expression:
        """Returns an expression of workers as one of shards."""
        if isinstance(expression, tuple):
            return tuple(over_workers(part, num_ranks) for part in expression)  # type: ignore[return-value]
        share = shards_of_rank(expression, num_ranks, num_shards)
        return canonical(len(share), share.start) if is_node(share, num_shards) else -1

    for num_ranks in range(1, min(MOST_RANKS, num_shards) + 1):
        will_do = over_workers(canonical(num_ranks), num_ranks) == canonical(num_shards)
        assert is_canonical_over_ranks(num_ranks, num_shards) == will_do
    powers = [1 << power for power in range(4) if num_shards % (1 << power) == 0]
    assert all(is_canonical_over_ranks(each, num_shards) for each in powers if num_shards & (num_shards - 1) == 0)
    assert is_canonical_over_ranks(num_shards, num_shards)
