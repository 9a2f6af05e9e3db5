"""Ring: every rank talks to its two neighbours only, and every link is busy in every round.

All-reduce of a buffer of N bytes by p ranks, cut into p chunks, in two halves (Patarasuk & Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009):

    reduce-scatter   p−1 rounds; partial sums travel to the right, each rank adds its own part. Rank r ends with the sum
                     of chunk r.
    all-gather       p−1 rounds; the finished chunks travel on to the right until all ranks have them.

    rounds 2(p−1)  ·  bytes sent per rank 2(p−1)/p·N  ·  time 2(p−1)α + 2(p−1)/p·Nβ + (p−1)/p·Nγ

Note "two ranks". Right and left neighbour are then the same rank, and both halves merge into one exchange of whole
buffers: the same bytes in one round instead of two, although both ranks then add everything. On one busy host, where
waking a process up takes longer than moving the bytes, a message of 64 KB becomes several times faster.

The β term is the lower bound for point-to-point algorithms; the α term grows with p, so a tree is faster for small
messages. Every chunk is summed in a different rotation of the ranks: replicas agree bitwise, but the bits depend on the
chunk boundaries. `python -m ddp draw ring 4` shows the rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.schedule import Recv, Round, Send


def reduce_scatter(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r ends with the sum of chunk r."""
    # exercise 02: in p−1 rounds, pass the sum of one chunk on to the right, and add the one that comes to your own part
    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for step in range(num_ranks - 1):
        outgoing, incoming = (rank - 1 - step) % num_ranks, (rank - 2 - step) % num_ranks
        yield Send(right, range(outgoing, outgoing + 1)), Recv(left, range(incoming, incoming + 1), add=True)


def all_gather(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r starts with chunk r; every rank ends with all."""
    # exercise 02: in p−1 rounds, pass the chunk that came last on to the right, and take the next one
    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    for step in range(num_ranks - 1):
        outgoing, incoming = (rank - step) % num_ranks, (rank - 1 - step) % num_ranks
        yield Send(right, range(outgoing, outgoing + 1)), Recv(left, range(incoming, incoming + 1), add=False)


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum of every chunk."""
    if num_ranks == 2:  # note "two ranks"
        whole, peer = range(2), 1 - rank
        yield Send(peer, whole), Recv(peer, whole, add=True)
        return
    yield from reduce_scatter(rank, num_ranks)
    yield from all_gather(rank, num_ranks)
