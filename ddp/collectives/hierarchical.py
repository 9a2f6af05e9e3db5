"""Hierarchical: first inside every host, then among the hosts' leaders, then inside every host again.

    hosts (0 1 2 3) (4 5 6 7)        ┌ host 0 ─────┐   ┌ host 1 ─────┐
                                     │ 1   2   3   │   │ 5   6   7   │
    reduce to the leader             │  ↘  ↓  ↙    │   │  ↘  ↓  ↙    │     `inside.reduce`
    all-reduce among leaders         │     0  ←────┼───┼───→ 4       │     `between`
    broadcast from the leader        │  ↙  ↓  ↘    │   │  ↙  ↓  ↘    │     `inside.broadcast`
                                     │ 1   2   3   │   │ 5   6   7   │
                                     └─────────────┘   └─────────────┘

For H hosts of L ranks, a ring between, trees inside, a buffer of N bytes; α', β' of the links between hosts:

    rounds 2⌈log₂ L⌉ + 2(H−1)  ·  sent by a leader to other hosts 2(H−1)/H·N, by other ranks nothing
    time 2⌈log₂ L⌉(α + Nβ) + 2(H−1)α' + 2(H−1)/H·Nβ' + (⌈log₂ L⌉ + (H−1)/H)Nγ

Only leaders speak to other hosts: a host's wire carries 2(H−1)/H·N whatever the number of its ranks, and slow rounds
(α') count hosts, not ranks. A flat ring in an unlucky order of ranks pays both for every rank. Inside the host
the leader is the bottleneck; `grid.py` lets every rank of a host carry its own slice to the other hosts instead.

Hosts may differ in size: a short host waits, in empty rounds, for the longest. Source: Jia et al., "Highly scalable
deep learning training system with mixed-precision: training ImageNet in four minutes", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ddp.collectives import master_worker, tree
from ddp.collectives.chunks import whole
from ddp.collectives.placed import Hosts, placed, side_by_side
from ddp.collectives.schedule import Goal, Round, Schedule


class Inside(NamedTuple):
    """What a host does before and after its leader talks to the others."""

    reduce: Schedule
    broadcast: Schedule


TREE = Inside(Schedule(tree.reduce, Goal.REDUCE, whole), Schedule(tree.broadcast, Goal.BROADCAST, whole))
DIRECT = Inside(
    Schedule(master_worker.reduce, Goal.REDUCE, whole), Schedule(master_worker.broadcast, Goal.BROADCAST, whole)
)


def all_reduce(rank: int, num_ranks: int, *, hosts: Hosts, inside: Inside, between: Schedule) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk; the leader is the first rank of its host."""
    everything = range(num_chunks(hosts, inside, between))
    leaders = [host[0] for host in hosts]
    yield from side_by_side(inside.reduce, rank, groups=hosts, chunks=everything)
    yield from placed(between, rank, ranks=leaders, chunks=everything)
    yield from side_by_side(inside.broadcast, rank, groups=hosts, chunks=everything)


def num_chunks(hosts: Hosts, inside: Inside, between: Schedule) -> int:
    """The fewest chunks that every part can cut its own from."""
    sizes = {len(host) for host in hosts}
    parts = [phase.num_chunks(size) for phase in inside for size in sizes]
    return math.lcm(between.num_chunks(len(hosts)), *parts)
