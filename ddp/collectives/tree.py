"""Binomial tree: the number of ranks that have the data doubles in every round.

    broadcast from rank 0, 8 ranks      round 1: 0→4      round 2: 0→2 4→6      round 3: 0→1 2→3 4→5 6→7

             0                          Reduce is the same picture backwards: the leaves send first, every inner rank
      ┌──────┼───┐                      adds what its children send, nearest neighbour first. So the sum is the
      4      2   1                      canonical binary tree over the ranks, for any number of them.
    ┌─┴─┐    │
    6   5    3                          Scatter and gather carry, instead of the whole buffer, the chunks of the
    │                                   subtree behind the edge: half of the buffer first, single chunks at the leaves.
    7

A buffer of N bytes, p ranks, α per message, β per byte sent, γ per byte added:

    schedule     chunks  rounds       sent by the busiest rank   time
    broadcast    1       ⌈log₂ p⌉     ⌈log₂ p⌉·N   (the root)    ⌈log₂ p⌉(α + Nβ)
    reduce       1       ⌈log₂ p⌉     N                          ⌈log₂ p⌉(α + Nβ + Nγ)
    all-reduce   1       2⌈log₂ p⌉    ⌈log₂ p⌉·N   (the root)    2⌈log₂ p⌉(α + Nβ) + ⌈log₂ p⌉·Nγ
    scatter      p       ⌈log₂ p⌉     (p−1)/p·N    (the root)    ⌈log₂ p⌉α + (p−1)/p·Nβ
    gather       p       ⌈log₂ p⌉     N/2, or less               ⌈log₂ p⌉α + (p−1)/p·Nβ, what the root takes in

The tree has p−1 edges, each used once: every schedule but the all-reduce is p−1 messages.

Source: Chan, Heimlich, Purkayastha & van de Geijn, "Collective communication: theory, practice, and experience",
2007, minimum spanning tree (MST) algorithms. A tree suits small messages, and transfers that happen only once. Where
the root's ⌈log₂ p⌉·N is too much, `double_tree.py` sends less; `butterfly.py` and `ring.py` send least.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp.collectives.schedule import Recv, Round, Send

WHOLE = range(1)


def broadcast(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with rank 0's buffer."""
    for distance in reversed(distances(num_ranks)):
        if rank % (2 * distance) == distance:
            yield (Recv(rank - distance, WHOLE, add=False),)
        elif rank % (2 * distance) == 0 and rank + distance < num_ranks:
            yield (Send(rank + distance, WHOLE),)
        else:
            yield ()


def reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank 0 ends with the sum; inner ranks end with the sum of their subtree."""
    for distance in distances(num_ranks):
        if rank % (2 * distance) == distance:
            yield (Send(rank - distance, WHOLE),)
        elif rank % (2 * distance) == 0 and rank + distance < num_ranks:
            yield (Recv(rank + distance, WHOLE, add=True),)
        else:
            yield ()


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum."""
    yield from reduce(rank, num_ranks)
    yield from broadcast(rank, num_ranks)


def scatter(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank r ends with chunk r of rank 0."""
    for distance in reversed(distances(num_ranks)):
        if rank % (2 * distance) == distance:
            yield (Recv(rank - distance, subtree(rank, distance, num_ranks), add=False),)
        elif rank % (2 * distance) == 0 and rank + distance < num_ranks:
            yield (Send(rank + distance, subtree(rank + distance, distance, num_ranks)),)
        else:
            yield ()


def gather(rank: int, num_ranks: int) -> Iterator[Round]:
    """Rank 0 ends with chunk r of every rank r."""
    for distance in distances(num_ranks):
        if rank % (2 * distance) == distance:
            yield (Send(rank - distance, subtree(rank, distance, num_ranks)),)
        elif rank % (2 * distance) == 0 and rank + distance < num_ranks:
            yield (Recv(rank + distance, subtree(rank + distance, distance, num_ranks), add=False),)
        else:
            yield ()


def distances(num_ranks: int) -> list[int]:
    """Returns 1, 2, 4, … below `num_ranks`: the distance of a message, round by round, from the leaves to the root."""
    return [1 << level for level in range((num_ranks - 1).bit_length())]


def subtree(rank: int, distance: int, num_ranks: int) -> range:
    """Returns the chunks of `rank` and of the ranks below it in the tree, if its parent is `distance` away."""
    return range(rank, min(rank + distance, num_ranks))
