"""Gradients in slices: how micro-batches add up on a rank that keeps no whole gradient (`units.py`).

    micro-batch 0    unit 2 is ready: reduce-scatter, and this rank keeps its slice of the sum; unit 1; unit 0
    micro-batch 1    the same, added to the slices
    the last one     the same, in a step's backward (`backward.py`); then each slice is divided once

So a rank never has more than one unit's gradients whole, and sends them in each micro-batch.

Note "marks". Where a sum is in slices, `p.grad` is a mark: an absent tensor (`flat.py`). Autograd must not add to it,
so the mark is taken away just before. A sum whose mark is gone, or was filled with zeros, was dropped by the program:
by `zero_grad`, say.
"""

from __future__ import annotations

from typing import Any, SupportsInt

import torch
from torch import Tensor

from ddp.comm.reduction import divided_
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.layout import Layout
from ddp.replica.backward import Accumulation
from ddp.replica.common_order import Event
from ddp.replica.flat import absent, is_absent
from ddp.replica.step_finalizer import Share
from ddp.replica.units import Units


class InSlices(Accumulation):
    """Adds up micro-batches in this rank's slices of gradients.

    Each unit is reduced in each micro-batch, as soon as all its gradients are ready. The mean is divided once, in the
    last one. A parameter that has no gradient in a micro-batch keeps its unit's other gradients whole until the next.
    """

    def __init__(self, units: Units) -> None:
        self._units = units
        self._ready: dict[Bucket, set[int]] = {}  # of a micro-batch that is not the last
        self._summed: dict[Bucket, set[int]] = {}  # ids of parameters that have a sum in the slice
        self._marked: set[int] = set()  # of these, those whose marks were there when autograd added to them
        self._divisors: dict[Bucket, SupportsInt] = {}

    def before(self, parameter: Tensor) -> None:
        """Takes a mark away."""
        if parameter.grad is not None and is_absent(parameter.grad):
            if not parameter.grad._version:
                self._marked.add(id(parameter))
            parameter.grad = None

    def connect(self, layouts: Any) -> None:
        self._units.layouts = lambda: layouts.current

    def begin(self, layout: Layout, share: Share) -> Share:
        if layout.sparse:
            name = layout.sparse[0].name
            raise ConfigError(f"{name} has a sparse gradient, which no slice can hold: take Replicated")
        for bucket in layout.buckets:
            self._units.flat_of(bucket)
        for slot in layout.slots:
            is_summed = id(slot.parameter) in self._summed.get(layout.buckets[layout.index_of[id(slot.parameter)]], ())
            if not is_summed and (gradient := slot.parameter.grad) is not None and is_absent(gradient):
                if gradient._version:  # by zero_grad(set_to_none=False)
                    slot.parameter.grad = None
                    continue
                raise RuntimeError(
                    f"{slot.name} has the gradient of the last step, which is in slices, so that nothing can be added "
                    "to it: call zero_grad() before each backward, and put all but the last of a step into no_sync()"
                )
        self._ready.clear()
        return share

    def has_gradient(self, parameter: Tensor) -> bool:
        return parameter.grad is not None and not is_absent(parameter.grad)

    def fill(self, bucket: Bucket) -> list[Slot]:
        self._drop(bucket)
        like = bucket.slots[0].parameter
        bucket.borrow(torch.empty(bucket.numel, dtype=like.dtype, device=like.device))
        empty = bucket.copy_in()
        for slot in bucket.slots:
            slot.parameter.grad = None
        self._units.release_of(bucket)  # now, because reductions in the background end at other times on other ranks
        summed = self._summed.get(bucket, set())
        return [slot for slot in empty if id(slot.parameter) not in summed]

    def _drop(self, bucket: Bucket) -> None:
        """Drops the sum of a bucket if its marks are gone (note "marks").

        Raises:
            RuntimeError: only some of them are.
        """
        for slot in bucket.slots:
            self.before(slot.parameter)
        summed = self._summed.get(bucket, set())
        if not summed <= self._marked and not summed.isdisjoint(self._marked):
            raise RuntimeError(
                f"{bucket.label}: the program has dropped some of its gradients between two micro-batches, which are "
                "added up together: drop all of them, by zero_grad(), or none"
            )
        if summed and not summed <= self._marked:
            del self._summed[bucket]
        self._marked -= bucket.ids

    def divisor(self, bucket: Bucket, divide_by: SupportsInt) -> SupportsInt:
        self._units.order.note(Event("reduce", bucket.index))
        if bucket not in self._summed:
            return divide_by
        self._divisors[bucket] = divide_by
        return 1

    def complete(self, bucket: Bucket) -> None:
        self._take(bucket)
        if (divide_by := self._divisors.pop(bucket, None)) is not None:
            divided_(bucket.gradients, int(divide_by))
        self._summed.pop(bucket, None)
        for slot in bucket.slots:
            slot.parameter.grad = absent(slot.parameter)

    def _take(self, bucket: Bucket) -> None:
        """Adds this rank's slice of a bucket to the sum, and frees the rest."""
        flat = self._units.flat_of(bucket)
        mine = bucket.flat[flat.start : flat.stop]
        if bucket in self._summed:
            flat.gradient.add_(mine)
        else:
            flat.gradient.copy_(mine)
        bucket.give_back(flat.gradient)

    def write_parts(self, layout: Layout) -> None:
        self._units.order.end()

    def note_early(self, parameter: Tensor) -> None:
        if self._units.is_dissolved:  # the gradient is of another replica, or of the module alone
            return
        layout = self._units.layouts()
        if (index := layout.index_of.get(id(parameter))) is None:
            return
        bucket = layout.buckets[index]
        ready = self._ready.setdefault(bucket, set())
        ready.add(id(parameter))
        if ready >= bucket.ids:
            self.reduce_early(index)

    @torch.no_grad()
    def reduce_early(self, index: int) -> None:
        """Adds the gradients of a bucket in a micro-batch that is not the last to those before. Collective."""
        bucket = self._units.layouts().buckets[index]
        ready = self._ready.pop(bucket, set())
        self._units.flat_of(bucket)
        self.fill(bucket)
        self._units.order.note(Event("reduce", index))
        self._units.collective.reduce(bucket, divide_by=1, async_op=False, label=f"a micro-batch, {bucket.label}")
        self._take(bucket)
        summed = self._summed.setdefault(bucket, set())
        summed |= ready
        for slot in bucket.slots:
            if id(slot.parameter) in summed:
                slot.parameter.grad = absent(slot.parameter)
