"""Schedules inside schedules: any ranks run a schedule for ranks 0 … k−1, on a part of the buffer.

A schedule knows its ranks and chunks by number only. So "a ring among the leaders of the hosts", "a tree from root
3", "a column of the grid, on its own block of the buffer" need no new algorithm, only other numbers:

    written for        ring of 3       rank 0 → 1 → 2      chunk 0        chunk 1        chunk 2
    played by          ranks 1, 4, 7   rank 1 → 4 → 7      chunks 6-7     chunks 8-9     chunks 10-11

Ranks that do not take part yield as many empty rounds, so that round k stays the same moment on every rank.

Two all-reduces that use the layout of hosts are built this way.

Hierarchical: first inside every host, then among the hosts' leaders, then inside every host again.

    hosts (0 1 2 3) (4 5 6 7)        ┌ host 0 ─────┐   ┌ host 1 ─────┐
                                     │ 1   2   3   │   │ 5   6   7   │
    reduce to the leader             │  ↘  ↓  ↙    │   │  ↘  ↓  ↙    │     a tree
    all-reduce among leaders         │     0  ←────┼───┼───→ 4       │     `between`
    broadcast from the leader        │  ↙  ↓  ↘    │   │  ↙  ↓  ↘    │     a tree
                                     │ 1   2   3   │   │ 5   6   7   │
                                     └─────────────┘   └─────────────┘

For H hosts of L ranks, a ring between, a buffer of N bytes; α', β' of the links between hosts:

    rounds 2⌈log₂ L⌉ + 2(H−1)  ·  sent by a leader to other hosts 2(H−1)/H·N, by other ranks nothing
    time 2⌈log₂ L⌉(α + Nβ) + 2(H−1)α' + 2(H−1)/H·Nβ' + (⌈log₂ L⌉ + (H−1)/H)Nγ

Only leaders send to other hosts: a host's link carries 2(H−1)/H·N for any number of ranks, and the number of slow
rounds (α') depends on hosts, not ranks. A flat ring in an unlucky order of ranks pays both for every rank. Inside the
host the leader is the bottleneck; the two-dimensional all-reduce lets every rank of a host carry its own slice to the
other hosts instead.

Hosts may differ in size: a smaller host waits for the largest in empty rounds. Source: Jia et al., "Highly scalable
deep learning training system with mixed-precision: training ImageNet in four minutes", 2018.

Two-dimensional: ranks form rows and columns. It reduces along rows, then columns, and gathers along rows.

    2 rows of 3     0  1  2       reduce-scatter along rows     every rank has its row's sum of one third
                    3  4  5       all-reduce along columns      … the sum over all rows of that third
                                  all-gather along rows         every rank has all three thirds

For R rows of C ranks, rings both ways, a buffer of N bytes (p = R·C):

    chunks C·R  ·  rounds 2(C−1) + 2(R−1)  ·  bytes sent per rank 2(C−1)/C·N + 2(R−1)/R·N/C = 2(p−1)/p·N
    time (2(C−1) + 2(R−1))α + 2(p−1)/p·Nβ + (p−1)/p·Nγ

That is the ring's bytes with the square root of its rounds. And if the rows are hosts, every rank of a host carries its
own 1/C of the buffer to the other hosts, all at once. So all network cards of a host are busy, not only that of the
leader, with R−1 rounds each way between hosts. Source: Ying et al., "Image classification at supercomputer scale", 2018
(2-D torus); Cho, Finkler & Kung, "BlueConnect", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from math import isqrt

import ddp.collectives.ring as ring
import ddp.collectives.tree as tree
from ddp.collectives.schedule import Add, Goal, Recv, Round, Schedule, Send, around, one_chunk, one_per_rank

Hosts = tuple[tuple[int, ...], ...]  # the ranks of every host; hosts may differ in size


def placed(schedule: Schedule, rank: int, *, ranks: Sequence[int], chunks: range) -> Iterator[Round]:
    """Yields the rounds of `rank` while `ranks` run `schedule` on the part `chunks` of the buffer.

    Args:
        ranks: the ranks in the places of rank 0, 1, … of the schedule.
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
    """Yields the rounds of `rank` while every group runs `schedule` separately; short ones wait for the longest."""
    longest = max(num_rounds(schedule, size) for size in {len(group) for group in groups})
    mine = next(group for group in groups if rank in group)
    yield from placed(schedule, rank, ranks=mine, chunks=chunks)
    yield from [()] * (longest - num_rounds(schedule, len(mine)))


@cache  # one object per root, because callers cache what they derive from a schedule
def rooted(schedule: Schedule, root: int) -> Schedule:
    """Returns the schedule with `root` in the place of rank 0; ranks, and the chunks of ranks, are rotated."""
    return schedule._replace(algorithm=partial(_rotated, schedule, root))


def num_rounds(schedule: Schedule, num_ranks: int) -> int:
    """Returns the number of rounds of a schedule, which is the same on every rank."""
    return sum(1 for _ in schedule.algorithm(0, num_ranks))


def _rotated(schedule: Schedule, root: int, rank: int, num_ranks: int) -> Iterator[Round]:
    num_chunks, ranks = schedule.num_chunks(num_ranks), [*range(root, num_ranks), *range(root)]
    for ops in schedule.algorithm((rank - root) % num_ranks, num_ranks):
        yield tuple(
            _renamed(op, ranks, run) for op in ops for run in around(op.chunks.start + root, len(op.chunks), num_chunks)
        )


def _part(chunks: range, of: range, each: int) -> range:
    return range(chunks.start + of.start * each, chunks.start + of.stop * each)


def _renamed(op: Send | Recv | Add, ranks: Sequence[int], chunks: range) -> Send | Recv | Add:
    """Returns the operation on other chunks, with its peer replaced by an entry of `ranks`."""
    if isinstance(op, Add):
        return Add(op.into, op.other, chunks)
    if isinstance(op, Send):
        return Send(ranks[op.peer], chunks, op.buffer)
    return Recv(ranks[op.peer], chunks, op.add, op.buffer, op.before)


# --- all-reduces by the layout of hosts ------------------------------------------------------------------------------


TREE_REDUCE = Schedule(tree.reduce, Goal.REDUCE, one_chunk)
TREE_BROADCAST = Schedule(tree.broadcast, Goal.BROADCAST, one_chunk)
RING_REDUCE_SCATTER = Schedule(ring.reduce_scatter, Goal.REDUCE_SCATTER, one_per_rank)
RING = Schedule(ring.all_reduce, Goal.ALL_REDUCE, one_per_rank)
RING_ALL_GATHER = Schedule(ring.all_gather, Goal.ALL_GATHER, one_per_rank)


def hierarchical(rank: int, num_ranks: int, *, hosts: Hosts, between: Schedule) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk; the leader is the first rank of its host."""
    everything = range(between.num_chunks(len(hosts)))
    yield from side_by_side(TREE_REDUCE, rank, groups=hosts, chunks=everything)
    yield from placed(between, rank, ranks=[host[0] for host in hosts], chunks=everything)
    yield from side_by_side(TREE_BROADCAST, rank, groups=hosts, chunks=everything)


def two_dimensional(rank: int, num_ranks: int, *, rows: Hosts) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk, a chunk per rank; all rows have equal length."""
    row = next(row for row in rows if rank in row)
    place, num_rows = row.index(rank), len(rows)
    everything, mine = range(num_ranks), range(place * num_rows, (place + 1) * num_rows)
    yield from placed(RING_REDUCE_SCATTER, rank, ranks=row, chunks=everything)
    yield from placed(RING, rank, ranks=[row[place] for row in rows], chunks=mine)
    yield from placed(RING_ALL_GATHER, rank, ranks=row, chunks=everything)


def rows_of(hosts: Hosts) -> Hosts:
    """Returns the hosts, if there are several of equal size; else rows as close to a square as possible."""
    length = len(hosts[0])
    if length > 1 and len(hosts) > 1 and all(len(host) == length for host in hosts):
        return hosts
    ranks = [rank for host in hosts for rank in host]
    num_rows = next(rows for rows in range(isqrt(len(ranks)), 0, -1) if len(ranks) % rows == 0)
    length = len(ranks) // num_rows
    return tuple(tuple(ranks[start : start + length]) for start in range(0, len(ranks), length))
