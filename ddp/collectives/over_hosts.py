"""Two all-reduces that know on which hosts the ranks are.

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

Only leaders send to other hosts: a host's wire carries 2(H−1)/H·N whatever the number of its ranks, and slow rounds
(α') count hosts, not ranks. A flat ring in an unlucky order of ranks pays both for every rank. Inside the host
the leader is the bottleneck; the two-dimensional all-reduce lets every rank of a host carry its own slice to the other
hosts instead.

Hosts may differ in size: a short host waits, in empty rounds, for the longest. Source: Jia et al., "Highly scalable
deep learning training system with mixed-precision: training ImageNet in four minutes", 2018.

Two-dimensional: ranks stand in rows and columns. Along rows, down columns, and along rows again.

    2 rows of 3     0  1  2       reduce-scatter along rows     every rank has its row's sum of one third
                    3  4  5       all-reduce along columns      … the sum over all rows of that third
                                  all-gather along rows         every rank has all three thirds

For R rows of C ranks, rings both ways, a buffer of N bytes (p = R·C):

    chunks C·R  ·  rounds 2(C−1) + 2(R−1)  ·  bytes sent per rank 2(C−1)/C·N + 2(R−1)/R·N/C = 2(p−1)/p·N
    time (2(C−1) + 2(R−1))α + 2(p−1)/p·Nβ + (p−1)/p·Nγ

That is the ring's bytes with the square root of its rounds. And when the rows are hosts, every rank of a host carries
its own 1/C of the buffer to the other hosts, all at once. So all network cards of a host are busy, not only that of the
leader, and between hosts there are R−1 rounds each way. Source: Ying et al., "Image classification at supercomputer
scale", 2018 (2-D torus); Cho, Finkler & Kung, "BlueConnect", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import ddp.collectives.ring as ring
import ddp.collectives.tree as tree
from ddp.collectives.placed import Hosts, placed, side_by_side
from ddp.collectives.schedule import Goal, Round, Schedule, one_per_rank, whole

TREE_REDUCE = Schedule(tree.reduce, Goal.REDUCE, whole)
TREE_BROADCAST = Schedule(tree.broadcast, Goal.BROADCAST, whole)
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
    """Every rank ends with the sum of every chunk, a chunk per rank; all rows are equally long."""
    row = next(row for row in rows if rank in row)
    place, num_rows = row.index(rank), len(rows)
    everything, mine = range(num_ranks), range(place * num_rows, (place + 1) * num_rows)
    yield from placed(RING_REDUCE_SCATTER, rank, ranks=row, chunks=everything)
    yield from placed(RING, rank, ranks=[row[place] for row in rows], chunks=mine)
    yield from placed(RING_ALL_GATHER, rank, ranks=row, chunks=everything)


def rows_of(hosts: Hosts) -> Hosts:
    """Returns the hosts, if they are several and equally large; else rows as near to a square as the number allows."""
    length = len(hosts[0])
    if length > 1 and len(hosts) > 1 and all(len(host) == length for host in hosts):
        return hosts
    ranks = [rank for host in hosts for rank in host]
    num_rows = next(rows for rows in range(isqrt(len(ranks)), 0, -1) if len(ranks) % rows == 0)
    length = len(ranks) // num_rows
    return tuple(tuple(ranks[start : start + length]) for start in range(0, len(ranks), length))
