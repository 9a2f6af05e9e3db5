"""Naive all-to-all: everyone sends everything to everyone, and each rank adds it all up for itself.

    0 ◀─▶ 1        every rank ends its one round with all p vectors
    ▲ ╲ ╱ ▲
    │  ╳  │        0 + 1 + 2 + 3 on each of them, in the order of the ranks
    ▼ ╱ ╲ ▼
    2 ◀─▶ 3

    chunks 1  ·  rounds 1  ·  sent per rank p−1 messages, (p−1)N; by all together p(p−1)N
    time (p−1)(α + Nβ + Nγ), on one port

The first row of every table of costs: no all-reduce takes fewer rounds, and none moves more bytes or adds more often,
because every rank computes the same sums. So it suits few ranks and messages of a few bytes. `all_to_all.py` lets each
rank add up one chunk for all, which takes a second round, and sends p/2 times less.

Each rank has a contribution of its own already. If it simply added the others to it, rank 0 would compute (0 + 1) + 2
and rank 2 (2 + 0) + 1, which are not the same bits. So what comes from lower ranks is added up `before` the rank's own.
The order is then that of the ranks everywhere: canonical to 3 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.schedule import Recv, Round, Send

WHOLE = range(1)


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum."""
    others = [(rank + step) % num_ranks for step in range(1, num_ranks)]
    yield (
        *(Send(peer, WHOLE) for peer in others),
        *(Recv(peer, WHOLE, add=True, before=peer < rank) for peer in range(num_ranks) if peer != rank),
    )
