"""Double binary tree: two trees at once, each for one half of the buffer. An inner node of one is a leaf of the other.

A leaf of a tree sends N and then only waits, so half of the ranks, and half of the network, idle. The remedy is two
trees such that every rank is an inner node of at most one of them. Each carries half of the buffer:

    tree 0, 8 ranks     0              tree 1: every rank       7
                        │              one to the left          │
                        4                                       3         inner nodes
                    ┌───┴───┐                               ┌───┴───┐     of tree 0: 0 2 4 6
                    2       6                               1       5     of tree 1: 1 3 5 7
                  ┌─┴─┐   ┌─┴─┐                           ┌─┴─┐   ┌─┴─┐
                  1   3   5   7                           0   2   4   6

Both are binary trees in the order of the ranks: positions with an odd number are leaves, and a position whose lowest
bit is 2^h has height h. For an odd number of ranks there is no position 0: the tree hangs at the largest power of two.

    chunks 2  ·  rounds 2⌈log₂ p⌉ (p odd: 2⌊log₂ p⌋)  ·  sent per rank: at most 4 halves, 2N
    time 2⌈log₂ p⌉(α + Nβ) + ⌈log₂ p⌉Nγ for one message. The executor cuts a long message into segments, which follow
    each other through the trees; then the time tends to 2⌈log₂ p⌉α + 2Nβ + Nγ

So it has the α term of a tree and, for long messages, a β term near the ring's. Source: Sanders, Speck & Träff,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; in NCCL since 2.4. The order of
additions is not canonical, because an inner node stands between its children.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ddp.collectives.schedule import Recv, Round, Send


def all_reduce(rank: int, num_ranks: int) -> Iterator[Round]:
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

    In tree 1 each rank stands one position further than in tree 0, so that leaves become inner nodes.
    """
    first, last = (0, num_ranks - 1) if num_ranks % 2 == 0 else (1, num_ranks)
    position = (rank + tree - first) % num_ranks + first
    bit = position & -position or 1 << last.bit_length()  # the lowest one; position 0 stands above all others
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
