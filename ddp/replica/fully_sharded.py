"""The fully sharded replica: a bucketed one, whose ranks keep slices of the model's parameters and of their gradients.

    made         each unit of the model becomes rank 0's, and a rank keeps its slice
    forward      collective: `units.py` gathers what computes
    backward     collective; buckets are units, and `in_slices.py` keeps a slice of each sum; by shards, `ShardsOfUnits`
                 keeps sums whole until the last one
    between      `whole()` gathers all, for reading and writing; `state_dict()` gathers one unit after another

A rank without samples takes part in the forward and the backward of the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, SupportsInt

import torch
from torch import nn

from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.layout import Grouping, Layout
from ddp.gradients.reducer import Collective, ReduceScatter
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.by_shards import ByShards
from ddp.replica.common_order import Event
from ddp.replica.in_slices import InSlices
from ddp.replica.parameters import Layouts, managed
from ddp.replica.replica import PREFIX, Replica
from ddp.replica.units import Units
from ddp.units import binary_size


class ShardsOfUnits(ByShards):
    """Adds up gradients by shards, and keeps these sums whole, while parameters are in slices."""

    def __init__(self, units: Units, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self._units = units

    def connect(self, layouts: Layouts) -> None:
        super().connect(layouts)
        self._units.layouts = lambda: layouts.current

    def fill(self, bucket: Bucket) -> list[Slot]:
        empty = super().fill(bucket)
        self._units.release_of(bucket)
        return empty

    def divisor(self, bucket: Bucket, divide_by: SupportsInt) -> SupportsInt:
        self._units.order.note(Event("reduce", bucket.index))
        return divide_by

    def write_parts(self, layout: Layout) -> None:
        self._units.order.end()
        super().write_parts(layout)


class FullyShardedDataParallel(BucketedDataParallel):
    """Keeps a slice of the model on each rank. A forward is collective. Every method that reads parameters is, too.

    Args:
        module: as in `BucketedDataParallel`; on other ranks than 0 it may be on the meta device.
        units: a pattern of names of modules, each of which is gathered as one; None: the elements of outermost
            containers (`units.unit_modules`).
        how: further arguments of `BucketedDataParallel`.

    Raises:
        ReplicaMismatch, ConfigError: as in `BucketedDataParallel`; or units cannot be cut so.
    """

    units: Units
    in_slices = True

    def __init__(self, module: nn.Module, *, units: str | None = None, **how: Any) -> None:
        self._pattern = units
        super().__init__(module, reducer=ReduceScatter, **{**how, "direct_gradients": False})

    def _take_weights(self, comm: Communicator, module: nn.Module, collective: Collective, how: str) -> None:
        assert isinstance(collective, ReduceScatter)
        named = managed(module, inner=Replica)
        self.units = Units(comm, module, named, collective, pattern=self._pattern, sending=how)
        self.accumulation = InSlices(self.units)

    def _by_shards(self, *given: Any, **how: Any) -> ByShards:
        return ShardsOfUnits(self.units, *given, **how)

    def _grouping(self) -> Grouping:
        return self.units

    # --- a step, in the order of time --------------------------------------------------------------------------------

    def prepare(self, *, in_forward: bool = False) -> None:
        self._raise_known()
        self.units.check()
        self.units.release()  # released parameters look alike at each check
        super().prepare(in_forward=in_forward)
        for bucket in self.buckets if self.num_shards else ():
            self.units.flat_of(bucket)

    def _around_forward(self) -> AbstractContextManager[Any]:
        return self.units.forward(is_training=self.training, is_last=self.require_backward_grad_sync)

    def _around_repeated(self) -> AbstractContextManager[Any]:
        return self.units.transformed() if torch._C._are_functorch_transforms_active() else self.units.places.saving()

    def release(self) -> None:
        super().release()
        self.units.dissolve(alone=True)

    @property
    def measures_parts(self) -> bool:
        return self.num_shards is not None and super().measures_parts  # else no micro-batch's gradient is kept

    # --- a rank without samples --------------------------------------------------------------------------------------

    def most_micros(self, mine: int) -> int:
        if self.num_shards is not None:  # then the other ranks are in other shards
            return max(1, mine)
        most = torch.tensor(max(1, mine), device=self.comm.device)
        return int(self.comm.all_reduce(most, "max", label="micro-batches of this step"))

    def _begin_without_samples(self) -> None:
        self.units.follow_forward(is_training=True, records=True)
        super()._begin_without_samples()
        self.units.follow_backward(lambda _: self.backward.launch_next(), is_last=True)

    def _follow_micro_batch(self) -> None:
        if self.require_forward_param_sync and self._buffer_sync.is_active:
            self.prepare()
            self._buffer_sync.before_forward(self.inputs.root)
            self._buffer_sync.after_forward()
        self.require_forward_param_sync = False
        self.units.follow_forward(is_training=True, records=True)
        self.units.follow_backward(self._reduce_early, is_last=False)

    def _reduce_early(self, index: int) -> None:
        assert isinstance(self.accumulation, InSlices)  # by shards, a step is reduced in its last backward
        self.accumulation.reduce_early(index)

    def follow_evaluation(self) -> None:
        self.units.follow_forward(is_training=self.training, records=torch.is_grad_enabled())

    # --- all parameters ----------------------------------------------------------------------------------------------

    def whole(self) -> AbstractContextManager[None]:
        return self.units.whole()

    def state_dict(self, *args: Any, **how: Any) -> Any:
        """Returns the whole state, on the CPU. Collective."""
        prefix, found = f"{how.get('prefix', '')}{PREFIX}", how.get("destination")
        found = OrderedDict() if found is None else found
        found.update({prefix + name: value for name, value in self.units.state(keep=True).items()})
        return found

    def load_state_dict(self, *args: Any, **how: Any) -> Any:
        """Loads a state that every rank has whole. Collective."""
        with self.whole():
            return super().load_state_dict(*args, **how)

    def load_weights(self, state: Mapping[str, Any]) -> None:
        self.units.load(state)

    def __deepcopy__(self, _: Any) -> Any:
        raise ConfigError("copy model.module inside of `with model.whole():`, on all ranks; ddp.EMA averages slices")

    def in_words(self) -> list[str]:
        found = [self.units.in_words()]
        if self.num_shards is not None:
            size = binary_size(self.layout.num_rows * sum(bucket.num_bytes for bucket in self.buckets))
            found.append(f"gradients: {size}, whole on each rank, because shards are added up one by one (same_bits)")
        return found
