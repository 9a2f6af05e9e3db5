"""Binomial tree: the number of ranks that have the data doubles in every round.

    broadcast from rank 0, 8 ranks      round 1: 0→4      round 2: 0→2 4→6      round 3: 0→1 2→3 4→5 6→7

             0                          Reduce is the same backwards: the leaves send first, and every inner rank
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
2007, minimum spanning tree (MST) algorithms. A tree suits small messages, and transfers that happen only once. If the
root's ⌈log₂ p⌉·N is too much, the double tree sends less; `butterfly.py` and `ring.py` send least.

Note "double tree". Two binary trees work at once, each for one half of the buffer, and an inner node of one is a leaf
of the other.

A leaf of a tree sends N and then only waits, so half of the ranks, and half of the network, are idle. The remedy is two
trees in which every rank is an inner node of at most one. Each carries half of the buffer:

    tree 0, 8 ranks     0              tree 1: every rank       7
                        │              one to the left          │
                        4                                       3         inner nodes
                    ┌───┴───┐                               ┌───┴───┐     of tree 0: 0 2 4 6
                    2       6                               1       5     of tree 1: 1 3 5 7
                  ┌─┴─┐   ┌─┴─┐                           ┌─┴─┐   ┌─┴─┐
                  1   3   5   7                           0   2   4   6

Both are binary trees in the order of the ranks: positions with an odd number are leaves, and a position whose lowest
bit is 2^h has height h. For an odd number of ranks there is no position 0: the root is at the largest power of two.

    chunks 2  ·  rounds 2⌈log₂ p⌉ (p odd: 2⌊log₂ p⌋)  ·  sent per rank: at most 4 halves, 2N
    time 2⌈log₂ p⌉(α + Nβ) + ⌈log₂ p⌉Nγ for one message. The executor cuts a long message into segments, which follow
    each other through the trees; then the time tends to 2⌈log₂ p⌉α + 2Nβ + Nγ

So it has the α term of a tree and, for long messages, a β term near the ring's. Source: Sanders, Speck & Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; in NCCL since 2.4. The order of
additions is not canonical, because an inner node is between its children.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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


# --- the double tree -------------------------------------------------------------------------------------------------


def double_all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
    """Every rank ends with the sum of both chunks; chunk t travels through tree t."""
    nodes = [node(rank, num_ranks, tree=0), node(rank, num_ranks, tree=1)]
    height_of_root = (num_ranks - 1).bit_length() if num_ranks % 2 == 0 else num_ranks.bit_length() - 1
    for height in range(height_of_root):
        yield tuple(op for tree in (0, 1) for op in _up(nodes[tree], height, range(tree, tree + 1)))
    for height in reversed(range(height_of_root)):
        yield tuple(op for tree in (0, 1) for op in _down(nodes[tree], height, range(tree, tree + 1)))


def halves(num_ranks: int) -> int:
    """Returns 2: the buffer is two chunks, one for each tree."""
    return 2


def _up(place: Node, height: int, chunk: range) -> Iterator[Send | Recv]:
    """Yields the transfers of a node when the nodes of `height` send to their parents."""
    if place.height == height:
        yield Send(place.parent, chunk)
    for child in place.children:
        if child.height == height:
            yield Recv(child.rank, chunk, add=True)


def _down(place: Node, height: int, chunk: range) -> Iterator[Send | Recv]:
    """Yields the transfers of a node when the nodes of `height` receive from their parents."""
    if place.height == height:
        yield Recv(place.parent, chunk, add=False)
    for child in place.children:
        if child.height == height:
            yield Send(child.rank, chunk)


class Child(NamedTuple):
    """The lower end of an edge."""

    rank: int
    height: int


class Node(NamedTuple):
    """A rank's place in a tree."""

    height: int
    parent: int  # its rank; meaningless for the root, which never uses it
    children: list[Child]


def node(rank: int, num_ranks: int, *, tree: int) -> Node:
    """Returns the place of `rank`.

    In tree 1 each rank is one position further than in tree 0, so that leaves become inner nodes.
    """
    first, last = (0, num_ranks - 1) if num_ranks % 2 == 0 else (1, num_ranks)
    position = (rank + tree - first) % num_ranks + first
    bit = position & -position or 1 << last.bit_length()  # the lowest one; position 0 is above all others
    # In a full tree the children are half a `bit` away, left and right, and the parent is a `bit` away, on the side
    # where the next higher bit is set. At the right edge positions are missing; nodes below a missing one move up.
    parent = (position ^ bit) | 2 * bit
    parent = parent if parent <= last else position ^ bit
    room = 1 << (last - position).bit_length() >> 1  # the largest power of two that fits between here and the end
    children = [child for child in (position - bit // 2, position + min(bit // 2, room)) if 0 < child != position]
    return Node(
        height=bit.bit_length() - 1,
        parent=(parent - tree) % num_ranks,
        children=[Child((child - tree) % num_ranks, (child & -child).bit_length() - 1) for child in children],
    )
