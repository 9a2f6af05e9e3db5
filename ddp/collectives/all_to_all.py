"""All-to-all: everyone talks to everyone at once, in one round.

    reduce-scatter   everyone sends chunk r to its owner r; the owner adds the p−1 copies to its own
    all-gather       everyone sends the chunk it owns to everyone
    exchange         rank s has a chunk for every rank d: the transpose of the matrix "chunk d of rank s"

    exchange of 3 ranks      rank 0: 00 01 02  →  00 10 20        chunk d of rank s leaves buffer 0 of rank s
                             rank 1: 10 11 12  →  01 11 21        for buffer 1 of rank d, as chunk s
                             rank 2: 20 21 22  →  02 12 22

                       chunks   rounds   messages and bytes sent per rank   time, on one port
    reduce-scatter     p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·N(β + γ)
    all-gather         p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·Nβ
    all-reduce         p        2        2(p−1),  2(p−1)/p·N                2(p−1)α + 2(p−1)/p·Nβ + (p−1)/p·Nγ
    exchange           p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·Nβ

Each half sends (p−1)/p·N bytes, as a ring does, and both together take two rounds instead of 2(p−1). Where all p−1
messages of a round travel at the same time (a full crossbar, shared memory, few ranks), the α term is 2α. With many
ranks the network has p² flows at once, and switches begin to drop packets: then a ring wins.

Every rank begins with its right neighbour, because otherwise all would send to rank 0 first. Chunk r is added up on
rank r, from there to the right: the same bits everywhere, but not canonical beyond two ranks.

Note "naive". Everyone sends everything to everyone, and each rank adds it all up for itself.

    0 ◀─▶ 1        every rank ends its one round with all p vectors
    ▲ ╲ ╱ ▲
    │  ╳  │        0 + 1 + 2 + 3 on each of them, in the order of the ranks
    ▼ ╱ ╲ ▼
    2 ◀─▶ 3

    chunks 1  ·  rounds 1  ·  sent per rank p−1 messages, (p−1)N; by all together p(p−1)N
    time (p−1)(α + Nβ + Nγ), on one port

It is the first row of every table of costs: no all-reduce takes fewer rounds, and none moves more bytes or adds more
often, because every rank computes the same sums. So it suits few ranks and messages of a few bytes. The all-reduce
above lets each rank add up one chunk for all, which takes a second round, and sends p/2 times less.

Each rank has a contribution of its own already. If it simply added the others to it, rank 0 would compute (0 + 1) + 2
and rank 2 (2 + 0) + 1, which are not the same bits. So what comes from lower ranks is added up `before` the rank's own.
The order is then that of the ranks everywhere: canonical to 3 ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.schedule import Recv, Round, Send


def reduce_scatter(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r ends with the sum of chunk r."""
    others = _others(rank, num_ranks)
    yield (
        *(Send(peer, _one(peer)) for peer in others),
        *(Recv(peer, _one(rank), add=True) for peer in others),
    )


def all_gather(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r starts with chunk r; every rank ends with all."""
    others = _others(rank, num_ranks)
    yield (
        *(Send(peer, _one(rank)) for peer in others),
        *(Recv(peer, _one(peer), add=False) for peer in others),
    )


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk."""
    yield from reduce_scatter(rank, num_ranks)
    yield from all_gather(rank, num_ranks)


def naive(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum: see the note "naive"."""
    whole = range(1)
    yield (
        *(Send(peer, whole) for peer in _others(rank, num_ranks)),
        *(Recv(peer, whole, add=True, before=peer < rank) for peer in range(num_ranks) if peer != rank),
    )


def exchange(rank: int, num_ranks: int) -> Iterator[Round]:
    """Chunk d of rank s, in buffer 0, ends as chunk s of rank d, in buffer 1; a rank's own chunk is there already."""
    others = _others(rank, num_ranks)
    yield (
        *(Send(peer, _one(peer)) for peer in others),
        *(Recv(peer, _one(peer), add=False, buffer=1) for peer in others),
    )


def _others(rank: int, num_ranks: int) -> list[int]:
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def _one(chunk: int) -> range:
    return range(chunk, chunk + 1)
