"""All-to-all: everyone talks to everyone at once, in one round.

    reduce-scatter   everyone sends chunk r to its owner r; the owner adds the p−1 copies to its own
    all-gather       everyone sends the chunk it owns to everyone
    exchange         rank s has a chunk for every rank d: the transpose of the matrix "chunk d of rank s"

    exchange of 3 ranks      rank 0: 00 01 02  →  00 10 20        chunk d of rank s leaves slot 0 of rank s and
                             rank 1: 10 11 12  →  01 11 21        arrives in slot 1 of rank d, as its chunk s
                             rank 2: 20 21 22  →  02 12 22

                       chunks   rounds   messages and bytes sent per rank   time, on one port
    reduce-scatter     p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·N(β + γ)
    all-gather         p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·Nβ
    all-reduce         p        2        2(p−1),  2(p−1)/p·N                2(p−1)α + 2(p−1)/p·Nβ + (p−1)/p·Nγ
    exchange           p        1        p−1,     (p−1)/p·N                 (p−1)α + (p−1)/p·Nβ

That is N/p·(p−1) bytes per half, the ring's bytes, in two rounds instead of 2(p−1). Where all p−1 messages of a round
travel at the same time (a full crossbar, shared memory, few ranks) the α term is 2α. With many ranks the network
sees p² flows at once, and switches begin to drop: that is when a ring wins.

Every rank begins with its right neighbour, not with rank 0: else all would send to rank 0 first. Chunk r is added
up on rank r, from there to the right: the same bits everywhere, but not canonical beyond two ranks.
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


def exchange(rank: int, num_ranks: int) -> Iterator[Round]:
    """Chunk d of rank s, in slot 0, ends as chunk s of rank d, in slot 1; what a rank keeps is there already."""
    others = _others(rank, num_ranks)
    yield (
        *(Send(peer, _one(peer)) for peer in others),
        *(Recv(peer, _one(peer), add=False, slot=1) for peer in others),
    )


def _others(rank: int, num_ranks: int) -> list[int]:
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def _one(chunk: int) -> range:
    return range(chunk, chunk + 1)
