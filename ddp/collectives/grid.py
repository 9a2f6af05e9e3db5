"""Two-dimensional: ranks stand in rows and columns. Along rows, down columns, and along rows again.

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
from ddp.collectives.chunks import one_per_rank
from ddp.collectives.placed import Hosts, placed
from ddp.collectives.schedule import Goal, Round, Schedule

REDUCE_SCATTER = Schedule(ring.reduce_scatter, Goal.REDUCE_SCATTER, one_per_rank)
ALL_REDUCE = Schedule(ring.all_reduce, Goal.ALL_REDUCE, one_per_rank)
ALL_GATHER = Schedule(ring.all_gather, Goal.ALL_GATHER, one_per_rank)


def all_reduce(rank: int, num_ranks: int, *, rows: Hosts) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk, a chunk per rank; all rows are equally long."""
    row = next(row for row in rows if rank in row)
    place, num_rows = row.index(rank), len(rows)
    everything, mine = range(num_ranks), range(place * num_rows, (place + 1) * num_rows)
    yield from placed(REDUCE_SCATTER, rank, ranks=row, chunks=everything)
    yield from placed(ALL_REDUCE, rank, ranks=[row[place] for row in rows], chunks=mine)
    yield from placed(ALL_GATHER, rank, ranks=row, chunks=everything)


def rows_of(hosts: Hosts) -> Hosts:
    """Returns the hosts, if they are several and equally large; else rows as near to a square as the number allows."""
    length = len(hosts[0])
    if length > 1 and len(hosts) > 1 and all(len(host) == length for host in hosts):
        return hosts
    ranks = [rank for host in hosts for rank in host]
    num_rows = next(rows for rows in range(isqrt(len(ranks)), 0, -1) if len(ranks) % rows == 0)
    length = len(ranks) // num_rows
    return tuple(tuple(ranks[start : start + length]) for start in range(0, len(ranks), length))
