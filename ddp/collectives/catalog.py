"""Every schedule by name: what it promises, and into how many chunks it cuts the buffer.

    python -m ddp draw NAME N        python -m ddp check NAME N
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ddp.collectives import ring, tree
from ddp.collectives.schedule import Algorithm, Goal


class Schedule(NamedTuple):
    """A schedule that can be asked for by name."""

    algorithm: Algorithm
    goal: Goal
    num_chunks: Callable[[int], int]  # by number of ranks


def one_per_rank(num_ranks: int) -> int:
    """Every rank has a chunk of its own."""
    return num_ranks


def whole(num_ranks: int) -> int:
    """The buffer is one chunk."""
    return 1


ALL_REDUCE = {
    "ring": Schedule(ring.all_reduce, Goal.ALL_REDUCE, one_per_rank),
}
SCHEDULES = {
    **ALL_REDUCE,
    "ring_reduce_scatter": Schedule(ring.reduce_scatter, Goal.REDUCE_SCATTER, one_per_rank),
    "ring_all_gather": Schedule(ring.all_gather, Goal.ALL_GATHER, one_per_rank),
    "tree_broadcast": Schedule(tree.broadcast, Goal.BROADCAST, whole),
}
