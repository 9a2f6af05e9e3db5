"""The sharded replica: each bucket is reduce-scattered, so that a rank gets the mean gradient of its slice alone.

`strategies/sharded.py` updates the slice, and gathers the new parameters.
"""

from __future__ import annotations

from typing import Any, SupportsInt

from torch import nn

from ddp.comm.work import Work
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket
from ddp.replica.backward import Backward
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.shards import ShardedLayout


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

    def _new_backward(self, former: Backward | None = None) -> Backward:
        return _ShardedBackward(self.comm, former=former, **self._how())


class _ShardedBackward(Backward):
    """A backward whose buckets are reduce-scattered."""

    def _combine(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> Work | None:
        if self._compression is not None:  # then every rank gets all of it
            return super()._combine(bucket, divide_by=divide_by, async_op=async_op, label=label)
        assert isinstance(self.layout, ShardedLayout)
        bounds = self.layout.bounds[bucket.index]
        with self._waited.running():
            found = self.comm.reduce_scatter_(
                bucket.flat, bounds, divide_by=divide_by, wire=self._wire, async_op=async_op, label=label
            )
        return found if isinstance(found, Work) else None
