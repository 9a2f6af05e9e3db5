"""Schedules inside schedules: other ranks play what was written for ranks 0 … k−1, on a part of the buffer.

A schedule knows its ranks and chunks by number only. So "a ring among the leaders of the hosts", "a tree from root
3", "a column of the grid, on its own block of the buffer" need no new algorithm, only other numbers:

    written for        ring of 3       rank 0 → 1 → 2      chunk 0        chunk 1        chunk 2
    played by          ranks 1, 4, 7   rank 1 → 4 → 7      chunks 6-7     chunks 8-9     chunks 10-11

Ranks that do not play yield as many empty rounds, so that round k stays the same moment on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

from ddp.collectives.schedule import Add, Recv, Round, Schedule, Send, around

Hosts = tuple[tuple[int, ...], ...]  # the ranks of every host; hosts may differ in size


def placed(schedule: Schedule, rank: int, *, ranks: Sequence[int], chunks: range) -> Iterator[Round]:
    """Yields the rounds of `rank` while `ranks` play `schedule` on the part `chunks` of the buffer.

    Args:
        ranks: the ranks that play rank 0, 1, … of the schedule.
        chunks: as many as the schedule has, or a multiple; then each of its chunks stands for several of these.
    """
    if rank not in ranks:
        yield from (() for _ in schedule.algorithm(0, len(ranks)))
        return
    each, rest = divmod(len(chunks), schedule.num_chunks(len(ranks)))
    assert rest == 0, f"{len(chunks)} chunks cannot stand for the {schedule.num_chunks(len(ranks))} of the schedule"
    for ops in schedule.algorithm(ranks.index(rank), len(ranks)):
        yield tuple(_renamed(op, ranks, _part(chunks, op.chunks, each)) for op in ops)


def side_by_side(schedule: Schedule, rank: int, *, groups: Hosts, chunks: range) -> Iterator[Round]:
    """Yields the rounds of `rank` while every group plays `schedule` by itself; short ones wait for the longest."""
    longest = max(num_rounds(schedule, size) for size in {len(group) for group in groups})
    mine = next(group for group in groups if rank in group)
    yield from placed(schedule, rank, ranks=mine, chunks=chunks)
    yield from [()] * (longest - num_rounds(schedule, len(mine)))


@cache  # one object per root, because others cache what they derive from a schedule under the schedule itself
def rooted(schedule: Schedule, root: int) -> Schedule:
    """Returns the schedule with `root` in the place of rank 0; ranks, and chunks that belong to ranks, move by it."""
    return schedule._replace(algorithm=partial(_rotated, schedule, root))


def num_rounds(schedule: Schedule, num_ranks: int) -> int:
    """Returns the number of rounds of a schedule, counted on rank 0, because it is the same on every rank."""
    return sum(1 for _ in schedule.algorithm(0, num_ranks))


def _rotated(schedule: Schedule, root: int, rank: int, num_ranks: int) -> Iterator[Round]:
    num_chunks, ranks = schedule.num_chunks(num_ranks), [*range(root, num_ranks), *range(root)]
    for ops in schedule.algorithm((rank - root) % num_ranks, num_ranks):
        yield tuple(
            _renamed(op, ranks, run)
            for op in ops
            for run in around(op.chunks.start + root, len(op.chunks), num_chunks)
        )


def _part(chunks: range, of: range, each: int) -> range:
    return range(chunks.start + of.start * each, chunks.start + of.stop * each)


def _renamed(op: Send | Recv | Add, ranks: Sequence[int], chunks: range) -> Send | Recv | Add:
    """Returns the same operation on other chunks, with that one of `ranks` as its peer."""
    if isinstance(op, Add):
        return Add(op.into, op.other, chunks)
    if isinstance(op, Send):
        return Send(ranks[op.peer], chunks, op.buffer)
    return Recv(ranks[op.peer], chunks, op.add, op.buffer, op.before)
