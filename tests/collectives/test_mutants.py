"""`check` finds out each one-line mutant of each schedule: it rejects it, or proves it dearer in rounds or messages.

Mutants that are right all the same are listed, each with the reason.
"""

from __future__ import annotations

from types import FunctionType
from typing import NamedTuple

import pytest
from mutants import mutants, mutated

from ddp.collectives import all_to_all, butterfly, circulant, master_worker, placed, ring, schedule, tree
from ddp.collectives.catalog import SCHEDULES, all_reduce_schedules
from ddp.collectives.schedule import Goal, Schedule

UNEQUAL = ((0, 1, 2), (3,), (4, 5))
EQUAL = ((0, 3), (1, 4), (2, 5))


class Witness(NamedTuple):
    """A schedule that must fail when the function is wrong, and the numbers of ranks to try it with."""

    schedule: Schedule
    sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    root: int = 0


def named(*names: str) -> list[Witness]:
    return [Witness(SCHEDULES[name]) for name in names]


def rooted(*names: str) -> list[Witness]:
    """From a root that is not rank 0."""
    return [Witness(placed.rooted(SCHEDULES[name], 2), (3, 4, 5), root=2) for name in names]


def over_shards(num_shards: int) -> list[Witness]:
    sizes = tuple(size for size in (1, 2, 3, 4, 5, 6, 8) if size <= num_shards)
    goals = Goal.ALL_REDUCE, Goal.REDUCE_SCATTER
    return [Witness(all_to_all.schedule_over_shards(num_shards, goal), sizes) for goal in goals]


def laid_out(hosts: placed.Hosts, *names: str) -> list[Witness]:
    num_ranks = sum(len(host) for host in hosts)
    return [Witness(all_reduce_schedules(hosts)[name], (num_ranks,)) for name in names]


CASES: dict[FunctionType, list[Witness]] = {
    ring.reduce_scatter: named("ring_reduce_scatter"),
    ring.all_gather: named("ring_all_gather"),
    ring.all_reduce: named("ring"),
    tree.broadcast: named("tree_broadcast"),
    tree.reduce: named("tree_reduce"),
    tree.all_reduce: named("tree"),
    tree.scatter: named("tree_scatter"),
    tree.gather: named("tree_gather"),
    tree.distances: named("tree_reduce", "tree_gather"),
    tree.subtree: named("tree_gather", "tree_scatter"),
    tree.double_all_reduce: named("double_tree"),
    tree._up: named("double_tree"),
    tree._down: named("double_tree"),
    tree.node: named("double_tree"),
    butterfly.all_reduce: named("butterfly"),
    butterfly.recursive_doubling: named("recursive_doubling"),
    butterfly.halving_doubling: named("butterfly"),
    butterfly.doubling: named("recursive_doubling"),
    butterfly.folded: named("butterfly", "recursive_doubling"),
    butterfly._between_pair: named("butterfly"),
    butterfly.largest_power_of_two: named("butterfly"),
    circulant.reduce_scatter: named("circulant_reduce_scatter"),
    circulant.all_gather: named("circulant_all_gather"),
    circulant.all_reduce: named("circulant"),
    all_to_all.reduce_scatter: named("all_to_all_reduce_scatter"),
    all_to_all.all_gather: named("all_to_all_all_gather"),
    all_to_all.all_reduce: named("all_to_all"),
    all_to_all.exchange: named("all_to_all_exchange"),
    all_to_all._others: named("all_to_all"),
    all_to_all._one: named("all_to_all"),
    master_worker.reduce: named("master_worker_reduce"),
    master_worker.broadcast: named("master_worker_broadcast"),
    master_worker.all_reduce: named("master_worker"),
    master_worker.round_robin: named("round_robin"),
    all_to_all.naive: named("naive_all_to_all"),
    all_to_all.reduce_scatter_over_shards: over_shards(8),
    all_to_all.all_reduce_over_shards: over_shards(8),
    all_to_all._buffers: over_shards(8),
    all_to_all._added: over_shards(8),
    placed.hierarchical: laid_out(UNEQUAL, "hierarchical", "hierarchical+tree"),
    placed.two_dimensional: laid_out(EQUAL, "two_dimensional"),
    placed.placed: [*laid_out(EQUAL, "hierarchical", "two_dimensional"), *named("butterfly")],
    placed.side_by_side: laid_out(UNEQUAL, "hierarchical"),
    placed.num_rounds: laid_out(UNEQUAL, "hierarchical"),
    placed._rotated: rooted("tree_broadcast", "tree_reduce", "tree_gather", "tree_scatter"),
    schedule.around: [*rooted("tree_gather"), *named("circulant")],
}


NOT_TAKEN = "a multiple of `distance` that the branch above has not taken is a multiple of twice that"
ANY_RANK = "every rank has equally many rounds"
BEGINS_LEFT = "begins with the left neighbour instead"
NEVER_ZERO = "nobody has position 0 below him, and the one on it would have himself"
SAME = {  # what a part of the line becomes, and why that is right all the same
    tree.broadcast: {"elif rank % (1 * distance) == 0": NOT_TAKEN},
    tree.reduce: {"elif rank % (1 * distance) == 0": NOT_TAKEN},
    tree.scatter: {"elif rank % (1 * distance) == 0": NOT_TAKEN},
    tree.gather: {"elif rank % (1 * distance) == 0": NOT_TAKEN},
    butterfly.halving_doubling: {
        "if rank <= peer": "never are they equal",
    },
    all_to_all._others: {"(rank - step) % num_ranks": BEGINS_LEFT},
    all_to_all.naive: {"before=peer <= rank": "never are they equal"},
    tree.node: {
        "first, last = (-1, num_ranks - 1)": "position −1 is the last one",
        "or 2 << last.bit_length()": "it only has to be above all others",
        "parent if parent < last": "a parent is even, the last position is odd",
        "if 0 <= child != position": NEVER_ZERO,
        "if -1 < child != position": NEVER_ZERO,
        "(child | -child).bit_length() - 1": "minus the lowest bit has as many digits",
    },
    placed.placed: {
        "schedule.algorithm(1, len(ranks))": ANY_RANK,
        "schedule.algorithm(-1, len(ranks))": ANY_RANK,
    },
    placed.num_rounds: {
        "schedule.algorithm(1, num_ranks)": ANY_RANK,
        "schedule.algorithm(-1, num_ranks)": ANY_RANK,
    },
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: f"{function.__module__}.{function.__name__}"[16:])
def test_every_one_line_mutant_is_found_out(function: FunctionType) -> None:
    original = [_costs(witness) for witness in CASES[function]]
    survivors, count = [], 0
    for mutant in mutants(function):
        count += 1
        with mutated(function, mutant):
            if all(_passes(witness, costs) for witness, costs in zip(CASES[function], original, strict=True)):
                survivors.append(mutant.after)
    known = SAME.get(function, {})
    assert [line for line in survivors if not any(part in line for part in known)] == []
    assert [part for part in known if not any(part in line for line in survivors)] == []
    assert count >= 2


class Costs(NamedTuple):
    """What a proof has counted."""

    num_rounds: int
    messages_sent: tuple[int, ...]
    chunks_sent: tuple[int, ...]


def _costs(witness: Witness) -> list[Costs]:
    proofs = [witness.schedule.check(num_ranks, root=witness.root) for num_ranks in witness.sizes]
    return [Costs(proof.num_rounds, proof.messages_sent, proof.chunks_sent) for proof in proofs]


def _passes(witness: Witness, costs: list[Costs]) -> bool:
    try:
        return _costs(witness) == costs
    except Exception:  # rejected; a mutant may also be wrong Python
        return False
