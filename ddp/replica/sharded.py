"""The sharded replica: each bucket is reduce-scattered, so that a rank gets the mean gradient of its slice alone.

`strategies/sharded.py` updates the slice, and gathers the new parameters.
"""

from __future__ import annotations

from typing import Any, SupportsInt
from weakref import WeakKeyDictionary

from torch import nn

from ddp.comm.communicator import Communicator
from ddp.comm.work import Work
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket
from ddp.gradients.reducer import InFlight, Reducer
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.shards import ShardedLayout, slice_bounds
from ddp.setting import WireName


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
