"""Circulant graph: in every round each rank sends to the rank d places ahead, for d = 1, 2, 4, …; any number of ranks.

    all-gather, 5 ranks, what rank 0 has      round 1, from rank 1: 0 1      round 2, from rank 2: 0 1 2 3
                                              round 3, from rank 4: 0 1 2 3 4

After round k every rank has 2^(k+1) consecutive chunks, beginning with its own; the last round brings the rest.
Backwards, with additions, it is a reduce-scatter; the two in sequence make an all-reduce.

                       chunks   rounds      bytes sent per rank   time
    all-gather         p        ⌈log₂ p⌉    (p−1)/p·N             ⌈log₂ p⌉α + (p−1)/p·Nβ
    reduce-scatter     p        ⌈log₂ p⌉    (p−1)/p·N             ⌈log₂ p⌉α + (p−1)/p·N(β + γ)
    all-reduce         p        2⌈log₂ p⌉   2(p−1)/p·N            2⌈log₂ p⌉α + 2(p−1)/p·Nβ + (p−1)/p·Nγ

So rounds and bytes are those of the butterfly at *every* p; the butterfly needs two more rounds and N more bytes if p
is not a power of two. A run of chunks that passes the end of the buffer takes two messages, which are in flight
together. The order of additions differs from chunk to chunk: not canonical.

Source: Bruck, Ho, Kipnis, Upfal & Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems", 1997 (the concatenation operation; its final rotation is not needed here, since chunks are
sent from where they belong); Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024,
arXiv 2410.14234 (which halves p, rounding up, where we double 1). With chunks of one element the all-gather is the
dissemination barrier.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.schedule import Recv, Round, Send, around
from ddp.collectives.tree import distances


def reduce_scatter(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r ends with the sum of chunk r."""
    for distance in reversed(distances(num_ranks)):
        ahead, behind = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        count = min(distance, num_ranks - distance)
        yield (
            *(Send(ahead, run) for run in around(ahead, count, num_ranks)),
            *(Recv(behind, run, add=True) for run in around(rank, count, num_ranks)),
        )


def all_gather(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r starts with chunk r; every rank ends with all."""
    for distance in distances(num_ranks):
        ahead, behind = (rank + distance) % num_ranks, (rank - distance) % num_ranks
        count = min(distance, num_ranks - distance)
        yield (
            *(Send(behind, run) for run in around(rank, count, num_ranks)),
            *(Recv(ahead, run, add=False) for run in around(ahead, count, num_ranks)),
        )


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk."""
    yield from reduce_scatter(rank, num_ranks)
    yield from all_gather(rank, num_ranks)
