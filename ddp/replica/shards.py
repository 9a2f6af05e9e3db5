"""The slices of buckets that each rank has to itself.

Slices begin at tensors, or at blocks of large ones (`optim/norms.py`). So every norm has the same bits as without
sharding, and every rank the same parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import accumulate

from ddp.gradients.bucket import Bucket, span
from ddp.gradients.layout import Layout
from ddp.optim.norms import BLOCK_NUMEL


class ShardedLayout(Layout):
    """A layout whose buckets are reduce-scattered."""

    @cached_property
    def bounds(self) -> list[list[int]]:
        """By bucket, where its slices begin, and where the last one ends."""
        return [slice_bounds(bucket, self._comm.world_size) for bucket in self.buckets]


def slice_bounds(bucket: Bucket, num_slices: int) -> list[int]:
    """Returns where the slices of a bucket begin, about equally long, and where the last one ends."""
    starts = [0, *accumulate(span(slot.parameter) for slot in bucket.slots)]
    blocks = [
        begin
        for slot, start in zip(bucket.slots, starts, strict=False)
        for begin in range(start, start + slot.parameter.numel(), BLOCK_NUMEL)
    ]
    borders, bounds = [*blocks, starts[-1]], [0]
    for number in range(1, num_slices):
        wanted = starts[-1] * number / num_slices
        right = bisect_left(borders, wanted)
        bounds.append(min(borders[right - 1], borders[right], key=lambda border: abs(border - wanted)))
    return [*bounds, starts[-1]]
