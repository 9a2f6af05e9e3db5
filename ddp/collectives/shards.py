"""The tree over the shards of a batch: the sums inside a worker, and those between workers.

A batch is cut into V shards, and worker r of W computes shards ⌊rV/W⌋ … ⌊(r+1)V/W⌋−1. Their gradients are added up in
the order of the canonical tree over the *shards* (`schedule.py`, note "canonical") for any W, so W does not change the
bits. A *node* is a run of shards whose sum is a part of the tree. A worker adds up its own shards as far as the tree
allows, and keeps the largest nodes:

    V = 8                    0   1   2   3   4   5   6   7            W = 3     worker 0   worker 1   worker 2
                             └─┬─┘   └─┬─┘   └─┬─┘   └─┬─┘            shards    0 1        2 3 4      5 6 7
                               └───┬───┘       └───┬───┘              nodes     (0,1)      (2,3) 4    5 (6,7)
                                   └───────┬───────┘

The workers add up those nodes: here ((0,1) + (2,3)) + ((4 + 5) + (6,7)). If each worker has one node, and the rest of
the tree is the canonical tree over the *workers*, any canonical schedule can do that. Otherwise `all_to_all.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

Node = range  # of shards
Addition = tuple[int, int]  # numbers of two sums: the second is added to the first
Sum = TypeVar("Sum")


def shards_of_rank(rank: int, num_ranks: int, num_shards: int) -> range:
    """Returns the shards of a worker; possibly none."""
    return range(rank * num_shards // num_ranks, (rank + 1) * num_shards // num_ranks)


def halves(node: Node) -> tuple[Node, Node]:
    """Returns the two children of a node of several shards, split at the largest power of two."""
    middle = node.start + (1 << (len(node) - 1).bit_length() - 1)
    return range(node.start, middle), range(middle, node.stop)


def largest_nodes(shards: range, num_shards: int) -> list[Node]:
    """Returns the largest nodes of the tree within a run of shards, in order; they cover the run."""

    def within(node: Node) -> Iterator[Node]:
        if shards.start <= node.start and node.stop <= shards.stop:
            yield node
        elif node.start < shards.stop and shards.start < node.stop:
            for half in halves(node):
                yield from within(half)

    return list(within(range(num_shards)))


def is_node(shards: range, num_shards: int) -> bool:
    """Returns True if the sum of these shards is a part of the tree."""
    return shards.stop <= num_shards and largest_nodes(shards, num_shards) == [shards]


def additions(nodes: Sequence[Node], root: Node) -> list[Addition]:
    """Returns the additions, in order, that sum the nodes of `root` into the first one."""
    given = frozenset(nodes)
    number = {node.start: index for index, node in enumerate(nodes)}  # also for the sum that begins at this shard

    def of(node: Node) -> Iterator[Addition]:
        if node not in given:
            left, right = halves(node)
            yield from of(left)
            yield from of(right)
            yield number[left.start], number[right.start]

    return list(of(root))


@lru_cache(maxsize=256)
def nodes_by_rank(num_ranks: int, num_shards: int) -> tuple[tuple[Node, ...], ...]:
    """Returns, by worker, the nodes that it keeps."""
    shards = [shards_of_rank(rank, num_ranks, num_shards) for rank in range(num_ranks)]
    return tuple(tuple(largest_nodes(each, num_shards)) for each in shards)


def most_nodes(num_ranks: int, num_shards: int) -> int:
    """Returns the largest number of nodes that a worker keeps."""
    return max(map(len, nodes_by_rank(num_ranks, num_shards)))


@lru_cache(maxsize=256)
def additions_between(num_ranks: int, num_shards: int) -> tuple[Addition, ...]:
    """Returns the additions of all workers' nodes, numbered in the order of workers.

    With one shard per worker, they form the canonical tree over the workers.
    """
    nodes = [node for mine in nodes_by_rank(num_ranks, num_shards) for node in mine]
    return tuple(additions(nodes, range(num_shards)))


@lru_cache(maxsize=256)
def is_canonical_over_ranks(num_ranks: int, num_shards: int) -> bool:
    """Returns True if each worker has one node, and their sum is the canonical tree over the workers."""
    has_one_each = most_nodes(num_ranks, num_shards) == 1
    return has_one_each and additions_between(num_ranks, num_shards) == additions_between(num_ranks, num_ranks)


# --- A rank's part of the tree: a stack of sums, on which siblings are merged ----------------------------------------
#
# A rank computes one shard after another, so its part of the tree is a binary counter. For shards 0 to 3:
#
#     shard      0         1            2            3
#     stack      0      →  (0,1)        (0,1)  2  →  (0,1) (2,3)  →  ((0,1),(2,3))
#
# So the stack has at most 1 + log₂ n sums of n shards. At the end it holds the rank's nodes, one on each level.


class TreeSlot(NamedTuple):
    """Slot of a shard's sum on the stack.

    Attributes:
        level: counted from the bottom.
        num_merges: how often the two sums on top are then merged.
    """

    level: int
    num_merges: int


def places(shards: range, num_shards: int) -> dict[int, TreeSlot]:
    """Returns the slots of a rank's shards, in their order."""
    found, stack = dict[int, TreeSlot](), list[range]()
    for shard in shards:
        stack.append(range(shard, shard + 1))
        level = len(stack) - 1
        while len(stack) > 1 and is_node(parent := range(stack[-2].start, stack[-1].stop), num_shards):
            stack[-2:] = [parent]
        found[shard] = TreeSlot(level, level + 1 - len(stack))
    return found


class Stack(Generic[Sum]):
    """A stack of sums over shards: of vectors of totals or measured squares, or of buffers.

    Args:
        add: adds the second argument to the first, and returns the first.

    Attributes:
        nodes: the sums, from the bottom.
    """

    def __init__(self, add: Callable[[Sum, Sum], Sum]) -> None:
        self.nodes: list[Sum] = []
        self._add = add

    def push(self, node: Sum, place: TreeSlot) -> None:
        """Pushes a shard's value, which the caller must not use any more."""
        self.nodes.append(node)
        for _ in range(min(place.num_merges, len(self.nodes) - 1)):  # fewer in a refused step
            above = self.nodes.pop()
            self.nodes[-1] = self._add(self.nodes[-1], above)
