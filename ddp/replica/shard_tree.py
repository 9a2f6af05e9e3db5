"""A rank's part of the tree over the shards of a batch: sums on a stack, of which siblings become one.

The tree is that of `collectives/shards.py`, whatever the world size is. A rank computes one shard after another, so its
part of the tree is a binary counter. For shards 0 to 3:

    shard      0         1             2              3
    stack      0         (0,1)         (0,1)  2       (0,1) (2,3)  →  ((0,1),(2,3))
    p.grad     new       added to 0    new            added to 2

An odd shard takes no memory: `p.grad` is the gradient of its even sibling, and autograd adds to it. So the stack has at
most log₂ n sums of n shards. A shard of several parts (`no_sync` inside of it) is a sum itself, which must be complete
before its sibling is added; so it has a place of its own on the stack, one higher.

What is left at the end are this rank's nodes, one on each level from the bottom. They lie in the rows of the buckets,
where the ranks add them up. Sums above them are the tensors in which autograd has put them.

A shard without samples, or without a gradient of a parameter, counts as zeros. They are not added: x + 0 is x, but for
the sign of a zero, and the last sum loses that (`Communicator.all_reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ddp.collectives.shards import is_node
from ddp.gradients.bucket import Bucket, Slot, copy_gradient, move

Node = TypeVar("Node")

Prepare = Callable[[Slot, Tensor], Tensor]


class Place(NamedTuple):
    """The place of a shard's sum on the stack.

    Attributes:
        level: counted from the bottom.
        num_merges: how often the two sums on top become one then.
        has_sibling: the sum below it is the shard's sibling, and nothing else.
    """

    level: int
    num_merges: int
    has_sibling: bool = False

    @property
    def joined(self) -> Place:
        """Returns the place if autograd adds the shard to its sibling."""
        return Place(self.level - 1, self.num_merges - 1)


def places(shards: range, num_shards: int) -> dict[int, Place]:
    """Returns the places of a rank's shards, in their order."""
    found, stack = dict[int, Place](), list[range]()
    for shard in shards:
        has_sibling = stack[-1:] == [range(shard - 1, shard)] and is_node(range(shard - 1, shard + 1), num_shards)
        stack.append(range(shard, shard + 1))
        level = len(stack) - 1
        while len(stack) > 1 and is_node(parent := range(stack[-2].start, stack[-1].stop), num_shards):
            stack[-2:] = [parent]
        found[shard] = Place(level, level + 1 - len(stack), has_sibling)
    return found


class Stack(Generic[Node]):
    """Sums of what each shard has: vectors of totals and of measured squares; buffers.

    Args:
        add: adds the second to the first, and returns that.

    Attributes:
        nodes: from the bottom.
    """

    def __init__(self, add: Callable[[Node, Node], Node]) -> None:
        self.nodes: list[Node] = []
        self._add = add

    def push(self, node: Node, place: Place) -> None:
        """Adds what a shard has, which must not be used any more."""
        self.nodes.append(node)
        for _ in range(min(place.num_merges, len(self.nodes) - 1)):  # fewer in a step that is refused
            above = self.nodes.pop()
            self.nodes[-1] = self._add(self.nodes[-1], above)


class GradientSums:
    """The stack of the gradients of one step.

    A slot is taken once in each shard, by itself or together with others.
    """

    def __init__(self) -> None:
        self._levels: list[dict[Slot, Tensor]] = []
        self._given: dict[Slot, tuple[Tensor, int]] = {}  # what autograd is to add to, and its version

    def begin(self, slots: Iterable[Slot], place: Place, *, joins: bool) -> None:
        """Begins a shard: gives autograd the gradients to which it is to add, or none.

        Args:
            place: of the shard's sum; if it joins, that of its sibling.
        """
        while len(self._levels) <= place.level:
            self._levels.append({})
        sums = self._levels[place.level] if joins else {}
        self._given.clear()
        for slot in slots:
            slot.parameter.grad = None
            if (gradient := sums.get(slot)) is not None:
                slot.parameter.grad = given = gradient.data  # with a version of its own, in a bucket that others change
                self._given[slot] = given, given._version

    @torch.no_grad()
    def take(self, slots: Sequence[Slot], place: Place, prepare: Prepare | None = None) -> None:
        """Takes complete gradients of the shard: `p.grad` is None then.

        Args:
            prepare: returns what is added up in the place of each of them.

        Raises:
            RuntimeError: one that had been given to autograd was replaced, or has changed otherwise.
        """
        level, sums = place.level, self._levels[place.level]
        for slot in slots:
            gradient = slot.parameter.grad
            if (given := self._given.pop(slot, None)) is not None:
                self._check(slot, *given)
                gradient = sums[slot]
            if gradient is not None:
                sums[slot] = gradient if prepare is None else prepare(slot, gradient)
                slot.parameter.grad = None
        for _ in range(place.num_merges):
            level, above, sums = level - 1, sums, self._levels[level - 1]
            both = [slot for slot in slots if slot in above and slot in sums]
            if both:
                torch._foreach_add_([sums[slot] for slot in both], [above[slot] for slot in both])
            for slot in slots:
                if slot in above:
                    sums.setdefault(slot, above.pop(slot))
        self._move_in(slots, level)

    @staticmethod
    def _check(slot: Slot, given: Tensor, version: int) -> None:
        if slot.parameter.grad is not given or given._version > version + 1:  # autograd adds once, in place
            raise RuntimeError(
                f"the gradient of {slot.name} was changed inside of the block of a shard, where it begins as that of "
                "the shard before: call zero_grad() before the first block, and clip after the last"
            )

    @torch.no_grad()
    def fill(self, bucket: Bucket, num_nodes: int) -> list[Slot]:
        """Leaves this rank's nodes in the rows of a bucket, all of which were taken.

        Returns:
            The slots of which no shard had a gradient.
        """
        for level in range(num_nodes):
            self._move_in(bucket.slots, level)
            for slot in bucket.slots:
                if slot not in self._levels[level]:
                    slot.rows[level].zero_()
        return [slot for slot in bucket.slots if not any(slot in sums for sums in self._levels[:num_nodes])]

    def _move_in(self, slots: Sequence[Slot], level: int) -> None:
        """Copies sums that have a row in their buckets to it."""
        sums = self._levels[level]
        here = [slot for slot in slots if slot in sums and level < len(slot.rows)]
        moving = [slot for slot in here if sums[slot] is not slot.rows[level]]
        if len(moving) == 1:  # a large one, by itself
            copy_gradient(moving[0], moving[0].rows[level], sums[moving[0]])
        elif moving:
            move(moving, [slot.rows[level] for slot in moving], [sums[slot] for slot in moving])
        sums.update({slot: slot.rows[level] for slot in moving})
