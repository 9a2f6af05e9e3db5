"""Two-dimensional: ranks stand in rows and columns. Along rows, down columns, and along rows again.

    2 rows of 3     0  1  2       reduce-scatter along rows     every rank has its row's sum of one third
                    3  4  5       all-reduce along columns      … the sum over all rows of that third
                                  all-gather along rows         every rank has all three thirds

For R rows of C ranks, rings both ways, a buffer of N bytes (p = R·C):

    chunks C·R  ·  rounds 2(C−1) + 2(R−1)  ·  bytes sent per rank 2(C−1)/C·N + 2(R−1)/R·N/C = 2(p−1)/p·N
    time (2(C−1) + 2(R−1))α + 2(p−1)/p·Nβ + (p−1)/p·Nγ

The ring's bytes with the square root of its rounds. And when the rows are hosts, every rank of a host carries its own
1/C of the buffer to the other hosts, all at once: all network cards of a host are busy, not only the leader's
(`hierarchical.py`), and between hosts there are R−1 rounds each way. Source: Ying et al., "Image classification at
supercomputer scale", 2018 (2-D torus); Cho, Finkler & Kung, "BlueConnect", 2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

from ddp.collectives import ring
from ddp.collectives.chunks import one_per_rank
from ddp.collectives.placed import Hosts, placed
from ddp.collectives.schedule import Goal, Round, Schedule


class Along(NamedTuple):
    """What a row does before and after its columns are summed."""

    reduce_scatter: Schedule
    all_gather: Schedule


RING = Along(
    Schedule(ring.reduce_scatter, Goal.REDUCE_SCATTER, one_per_rank),
    Schedule(ring.all_gather, Goal.ALL_GATHER, one_per_rank),
)


def all_reduce(rank: int, num_ranks: int, *, rows: Hosts, along: Along, columns: Schedule) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk; all rows are equally long."""
    row = next(row for row in rows if rank in row)
    place = row.index(rank)
    column = [row[place] for row in rows]
    each = columns.num_chunks(len(rows))
    everything, mine = range(len(row) * each), range(place * each, (place + 1) * each)
    yield from placed(along.reduce_scatter, rank, ranks=row, chunks=everything)
    yield from placed(columns, rank, ranks=column, chunks=mine)
    yield from placed(along.all_gather, rank, ranks=row, chunks=everything)


def rows_of(hosts: Hosts) -> Hosts:
    """The hosts, where they are several and equally large; else rows as near to a square as the number allows."""
    length = len(hosts[0])
    if length > 1 and len(hosts) > 1 and all(len(host) == length for host in hosts):
        return hosts
    ranks = [rank for host in hosts for rank in host]
    num_rows = next(rows for rows in range(isqrt(len(ranks)), 0, -1) if len(ranks) % rows == 0)
    length = len(ranks) // num_rows
    return tuple(tuple(ranks[start : start + length]) for start in range(0, len(ranks), length))
