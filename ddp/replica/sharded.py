"""The sharded replica: each bucket is reduce-scattered, so that a rank gets the mean gradient of its slice alone.

`strategies/sharded.py` updates the slice, and gathers the new parameters. Slices begin at tensors, or at blocks of
large ones (`optim/norms.py`). So every norm has the same bits as without sharding, and every rank the same parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import accumulate
from typing import Any, SupportsInt
from weakref import WeakKeyDictionary

from torch import nn

from ddp.comm.communicator import Communicator
from ddp.comm.work import Work
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, span
from ddp.gradients.layout import Layout
from ddp.gradients.reducer import InFlight, Reducer
from ddp.optim.norms import BLOCK_NUMEL
from ddp.replica.bucketed import BucketedDataParallel
from ddp.setting import WireName


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


class ShardedDataParallel(BucketedDataParallel):
    """Gives each rank the mean gradient of its slice, while backward runs; the rest of `p.grad` is undefined.

    Args:
        module: as in `BucketedDataParallel`; all on the communicator's device, none complex.

    Raises:
        ConfigError: a parameter cannot be sharded.
    """

    _LAYOUT = ShardedLayout

    def __init__(self, module: nn.Module, **how: Any) -> None:
        super().__init__(module, **how)
        for name, parameter in self._replicated_parameters():
            if parameter.is_complex() or parameter.device != self.comm.device:
                raise ConfigError(
                    f"{name} is {parameter.dtype} on {parameter.device}: a sharded update takes real numbers on "
                    f"{self.comm.device}; leave sharding out"
                )

    @property
    def all_reduced_buckets(self) -> list[list[nn.Parameter]]:
        return []

    @property
    def layout(self) -> ShardedLayout:
        """The layout of the last step."""
        layout = self._layouts.current
        assert isinstance(layout, ShardedLayout)
        return layout

    def _plain_reducer(self) -> Reducer:
        return ReduceScatter(self.comm, self.wire)


class ReduceScatter(Reducer):
    """Gives every rank the mean of its slice. Since no rank gets a whole bucket, none carries a tail.

    Args:
        wire: the format in which buckets travel between hosts.
    """

    def __init__(self, comm: Communicator, wire: WireName | None) -> None:
        self._comm, self._wire = comm, wire
        self._bounds: WeakKeyDictionary[Bucket, list[int]] = WeakKeyDictionary()

    def reduce(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> InFlight | None:
        if self._wire is not None:
            bucket.clear_padding()
        if bucket not in self._bounds:
            self._bounds[bucket] = slice_bounds(bucket, self._comm.world_size)
        bounds, wire = self._bounds[bucket], self._wire
        work = self._comm.reduce_scatter_(
            bucket.flat, bounds, divide_by=divide_by, wire=wire, async_op=async_op, label=label
        )
        return work if isinstance(work, Work) else None
