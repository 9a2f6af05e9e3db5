"""A rank's part of the tree over the shards: where each sum goes, and the bits of gradients on the stack.

Tests: ddp/gradients/bucket.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ddp.collectives.schedule import Expression, canonical
from ddp.collectives.shards import Stack, nodes_by_rank, places, shards_of_rank
from ddp.gradients.bucket import Bucket, Slot
from ddp.replica.by_shards import GradientSums

SPLITS = [(size, num) for num in range(1, 33) for size in range(1, min(num, 9) + 1)]
FEW_SPLITS = [(1, 1), (1, 2), (1, 8), (1, 11), (2, 8), (3, 8), (2, 5), (3, 7), (4, 13), (5, 6)]


def tree(terms: Sequence[Tensor]) -> Tensor:
    if len(terms) == 1:
        return terms[0]
    middle = 1 << (len(terms) - 1).bit_length() - 1
    return torch.add(tree(terms[:middle]), tree(terms[middle:]))


@pytest.mark.parametrize("num_shards", range(1, 33))
def test_shards_end_as_the_nodes_of_the_rank_in_their_order(num_shards: int) -> None:
    for size in range(1, min(num_shards, 9) + 1):
        for rank in range(size):
            shards = shards_of_rank(rank, size, num_shards)
            where, stack = places(shards, num_shards), list[Expression]()
            assert list(where) == list(shards)
            for shard, place in where.items():
                assert len(stack) == place.level
                stack.append(shard)
                for _ in range(place.num_merges):
                    last = stack.pop()
                    stack[-1] = stack[-1], last
                assert len(stack) <= 2 * len(shards).bit_length()
            nodes = nodes_by_rank(size, num_shards)[rank]
            assert stack == [canonical(len(node), node.start) for node in nodes]


def test_a_binary_counter_needs_few_sums_of_its_own() -> None:
    """As the module says: 1 + log₂ n sums of n shards."""
    for num_shards in (1, 2, 4, 8, 16, 32, 64):
        levels = {place.level for place in places(range(num_shards), num_shards).values()}
        assert max(levels) + 1 == num_shards.bit_length()


def test_vectors_on_a_stack_are_added_as_the_tree() -> None:
    for size, num_shards in FEW_SPLITS:
        for rank, nodes in enumerate(nodes_by_rank(size, num_shards)):
            vectors = torch.randn(num_shards, 9, generator=torch.Generator().manual_seed(num_shards)).cumsum(1)
            stack = Stack(Tensor.add_)
            for shard, place in places(shards_of_rank(rank, size, num_shards), num_shards).items():
                stack.push(vectors[shard].clone(), place)
            assert len(stack.nodes) == len(nodes)
            assert all(torch.equal(a, tree([*vectors[b]])) for a, b in zip(stack.nodes, nodes, strict=True))


SHAPES = [(3,), (2, 5), (7, 3), ()]


def made(num_rows: int) -> tuple[list[Slot], list[Bucket]]:
    """Returns slots of two buckets, of which the second has one of another memory format."""
    slots = [Slot(index, f"p{index}", nn.Parameter(torch.zeros(shape))) for index, shape in enumerate(SHAPES)]
    slots.append(Slot(4, "conv", nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))))
    buckets = [Bucket(0, [slots[3], slots[1]], 5, is_last=False), Bucket(1, [slots[0], slots[2], slots[4]])]
    for bucket in buckets:
        bucket.allocate(torch.full((num_rows * bucket.numel,), torch.nan), num_rows=num_rows)
    return slots, buckets


def gradient_of(shard: int, slot: Slot, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * shard + 10 * slot.index + part)
    drawn = torch.randn(slot.parameter.shape, generator=generator) * 10 ** ((shard + part) % 3)
    return drawn.contiguous(memory_format=torch.channels_last) if drawn.dim() == 4 else drawn


def accumulate(slot: Slot, gradient: Tensor) -> None:
    """What autograd does with a gradient."""
    parameter = slot.parameter
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad += gradient


@pytest.mark.parametrize(("size", "num_shards"), FEW_SPLITS)
@pytest.mark.parametrize("spare_rows", [0, 2])
def test_gradients_on_the_stack_have_the_bits_of_the_tree(size: int, num_shards: int, spare_rows: int) -> None:
    """Some shards have several parts, and some lack some gradients, which count as zeros; slots are taken by threes."""
    rng = random.Random(f"{size} {num_shards}")
    for rank, nodes in enumerate(nodes_by_rank(size, num_shards)):
        shards = shards_of_rank(rank, size, num_shards)
        slots, buckets = made(len(nodes) + spare_rows)
        lacks = {(shard, slot) for shard in shards for slot in slots if rng.random() < 0.3}
        lacks |= {(shard, slots[2]) for shard in shards}  # of which nobody has a gradient
        sums, of_shard = GradientSums(), dict[tuple[int, Slot], Tensor]()
        for _ in range(2):  # the second step begins from the places of the first, and with another object
            sums = GradientSums()
            for shard, place in places(shards, num_shards).items():
                in_parts = rng.random() < 0.4
                for slot in slots:
                    of_shard[shard, slot] = torch.zeros(slot.parameter.shape)
                    if (shard, slot) not in lacks:
                        parts = [gradient_of(shard, slot, part) for part in range(1 + in_parts)]
                        for each in parts:
                            accumulate(slot, each)
                        of_shard[shard, slot] = sum(parts[1:], start=parts[0])
                if rng.random() < 0.5:
                    sums.take(slots[:1], place)  # by itself, before the others
                    sums.take(slots[1:], place)
                else:
                    sums.take(slots, place)
                assert all(slot.parameter.grad is None for slot in slots)
            for bucket in buckets:
                without = sums.fill(bucket, len(nodes))
                assert without == [slot for slot in bucket.slots if all((each, slot) in lacks for each in shards)]
        for slot in slots:
            assert slot.view is slot.rows[0]
            for row, node in zip(slot.rows, nodes, strict=False):
                assert torch.equal(row, tree([of_shard[shard, slot] for shard in node]))
            assert row.stride() == slot.strides
