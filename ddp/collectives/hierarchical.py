"""Hierarchical: first inside every host, then among the hosts' leaders, then inside every host again.

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
the leader is the bottleneck; `grid.py` lets every rank of a host carry its own slice to the other hosts instead.

Hosts may differ in size: a short host waits, in empty rounds, for the longest. Source: Jia et al., "Highly scalable
deep learning training system with mixed-precision: training ImageNet in four minutes", 2018.
"""

from __future__ import annotations

from collections.abc import Iterator

import ddp.collectives.tree as tree
from ddp.collectives.chunks import whole
from ddp.collectives.placed import Hosts, placed, side_by_side
from ddp.collectives.schedule import Goal, Round, Schedule

REDUCE = Schedule(tree.reduce, Goal.REDUCE, whole)
BROADCAST = Schedule(tree.broadcast, Goal.BROADCAST, whole)


def all_reduce(rank: int, num_ranks: int, *, hosts: Hosts, between: Schedule) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk; the leader is the first rank of its host."""
    everything = range(between.num_chunks(len(hosts)))
    yield from side_by_side(REDUCE, rank, groups=hosts, chunks=everything)
    yield from placed(between, rank, ranks=[host[0] for host in hosts], chunks=everything)
    yield from side_by_side(BROADCAST, rank, groups=hosts, chunks=everything)
