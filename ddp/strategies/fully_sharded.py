"""The fully sharded strategy: each rank keeps a slice of the parameters, of their gradients and of the optimizer's
state, so a model may be larger than what one rank can hold.

    forward     each unit of the model is gathered, computes, and is released (`replica/units.py`)
    backward    it is gathered again; its gradients are reduce-scattered, and a rank keeps the mean of its slice
    agree       each rank measures its slice; one small all-reduce
    update      each rank updates its slice; nothing is gathered, and the root unit is released

Between steps a rank holds 1 ÷ p of everything. In a step the root unit is whole, one other unit, its gradients, and the
bucket that is reduced. A step gathers each unit twice, so 3·P·(p − 1) ÷ p numbers arrive at a rank, where an all-reduce
has 2·P·(p − 1) ÷ p: ZeRO stage 3 (Rajbhandari et al., arXiv 1910.02054, section 5.3).

Training ends with the parameters in slices, because no rank may be able to hold them all; the last checkpoint has the
whole state, and `with model.whole():` makes the parameters whole for a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ddp.errors import ConfigError, Diverged
from ddp.gradients.layout import Layout
from ddp.gradients.reducer import ReduceScatter
from ddp.replica.broadcast import check_untied
from ddp.replica.flat import Flat, is_absent
from ddp.replica.fully_sharded import FullyShardedDataParallel
from ddp.replica.replica import Replica
from ddp.replica.units import Units, unit_modules
from ddp.strategies.sharded import Part, Sharded, Slices, allow_step, parts_in, share_of
from ddp.strategies.strategy import Agreement, Replicated

WHERE_NAN = (
    "Or the loss uses parameters outside of their unit's forward, where they read as NaN: compute a penalty on them in "
    "that forward; or it and its backward inside of `with model.whole():`"
)
"""Advice for a step whose loss or gradient is NaN."""


class FullySharded(Sharded):
    """Updates this rank's slices of parameters that no rank has whole. Every method is collective.

    Args:
        model, optimizer, how: as in `Sharded`.

    Raises:
        ConfigError: as `Sharded`.
    """

    word = "fully_sharded"

    @classmethod
    def replica_of(cls, module: nn.Module, **how: Any) -> FullyShardedDataParallel:
        check_untied(module, cls.__name__, instead="Replicated (strategy='auto')")
        for name, each in {**unit_modules(module, how.get("units")), "the model": module}.items():
            if isinstance(each, torch.jit.ScriptModule):
                raise ConfigError(f"{name} is a ScriptModule, which takes no hooks: give the module before torch.jit")
        return FullyShardedDataParallel(module, **how)

    @classmethod
    def takes(cls, replica: Replica) -> bool:
        return isinstance(replica, FullyShardedDataParallel)

    @property
    def units(self) -> Units:
        """Returns the units of the model."""
        assert isinstance(self.model, FullyShardedDataParallel)
        return self.model.units

    def finish(self, *, alone: bool = False) -> None:
        """Leaves parameters in slices, and the optimizer without the state of those."""
        allow_step(self.optimizer)
        if self._slices is not None:
            cut = self._slices.layout.slot_of
            whole = {each: known for each, known in self.optimizer.state.items() if id(each) not in cut}
            self.optimizer.state, self._slices = defaultdict(dict, whole), None
            self._of_parts, self._places = self.optimizer, {}  # frees the parts
        self.units.release()
        Replicated.finish(self, alone=alone)

    # --- a step ------------------------------------------------------------------------------------------------------

    def agree(self, step: int) -> Agreement:
        try:
            return super().agree(step)
        except Diverged as error:
            if " nan " not in str(error):
                raise
            raise Diverged(f"{error}. {WHERE_NAN}") from error

    def _sum(self, found: Tensor, what: str) -> None:
        order = self.units.order
        summed = torch.cat([found.flatten(), found.new_tensor(order.hashed())])
        super()._sum(summed, what)
        order.compare(*summed[-2:].tolist())
        found.copy_(summed[:-2].view_as(found))

    @torch.no_grad()
    def _step(self, norm: Tensor) -> None:
        super()._step(norm)
        torch.autograd.graph.increment_version(self.units.slices())  # which fused updates leave as it is
        self.units.release()
        assert isinstance(self._slices, UnitSlices)
        self._slices.drop_gradients()

    @torch.no_grad()
    def _take_gradient(self, part: Part) -> None:
        gradient = part.whole.grad
        if gradient is not None and not is_absent(gradient):
            super()._take_gradient(part)

    def _share_of(self, part: Part, value: Tensor) -> Tensor:
        like = torch.empty_strided(value.shape, self.units.strides_of[id(part.whole)], dtype=value.dtype, device="meta")
        return share_of(part.start, part.stop, like, value)

    def _slices_of(self, layout: Layout) -> Slices:
        return UnitSlices(layout, self._collective, self.units)

    # --- the whole state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        with self.units.unguarded():
            return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self.units.unguarded():
            super().load_state_dict(state)

    def kept(self) -> None:
        return None

    def _model_state(self) -> dict[str, Tensor]:
        return self.units.state(keep=self._comm.rank == 0)

    def _load_model(self, state: Mapping[str, Tensor]) -> None:
        self.units.load(state)

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Takes this rank's parts of rank 0's state, one kind of one unit's after another."""
        parameters = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        known = {id(parameter): state["state"].get(number, {}) for number, parameter in enumerate(parameters)}
        small = {
            number: {name: value for name, value in each.items() if not _is_of_elements(value)}
            for number, each in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": small})
        everyone, mine = self.optimizer.state, defaultdict[Tensor, dict[str, Any]](dict)
        for flat in self._flats():
            for slot, *_ in parts_in(flat.bucket, flat.start, flat.stop):
                if slot.parameter in everyone:
                    mine[slot.parameter] = everyone[slot.parameter]
            kinds = {
                (name, value.dtype)
                for slot in flat.bucket.slots
                for name, value in known.get(id(slot.parameter), {}).items()
                if _is_of_elements(value)
            }
            for name, dtype in sorted(kinds, key=str):
                values = {slot.name: known.get(id(slot.parameter), {}).get(name) for slot in flat.bucket.slots}
                here = flat.slice_of(values, dtype, what=f"loading {name}")
                for slot, _, begin, end in parts_in(flat.bucket, flat.start, flat.stop):
                    if _is_of_elements(values[slot.name]):  # a scalar's state has been loaded with the small ones
                        mine[slot.parameter][name] = here[begin - flat.start : end - flat.start].clone()
                del here  # the memory of the unit, before the next one takes some
        self.optimizer.state, self._slices = mine, None

    def _flats(self) -> list[Flat]:
        """Returns the memory of all units, for the parameters that need a gradient now. Collective."""
        self.model.prepare()
        for bucket in self.model.buckets:
            self.units.flat_of(bucket)
        return [flat for unit in self.units.all for flat in unit.flats]


def _is_of_elements(value: Any) -> bool:
    """Returns True for a state that has an element for each element of its parameter."""
    return isinstance(value, Tensor) and value.dim() > 0


class UnitSlices(Slices):
    """The slices of a layout's units that this rank updates."""

    def __init__(self, layout: Layout, collective: ReduceScatter, units: Units) -> None:
        self._flats = {bucket: units.flat_of(bucket) for bucket in layout.buckets}
        super().__init__(layout, collective, {bucket: flat.mine for bucket, flat in self._flats.items()})

    def take_in(self) -> None:
        """Finds the gradients of a step in the memory that its backward has taken for them."""
        for number, part in enumerate(self.parts):
            flat = self._flats[self.layout.buckets[self.layout.index_of[id(part.whole)]]]
            mine = flat.gradient if self.layout.lends else flat.bucket.gradients[flat.start : flat.stop]
            like = part.weights  # whose place in the slice of the unit is that of the gradient
            gradient = mine.as_strided(like.shape, like.stride(), mine.storage_offset() + like.storage_offset())
            self.parts[number] = part._replace(gradient=gradient)

    def drop_gradients(self) -> None:
        """Frees the memory of the gradients, unless a bucket has it."""
        for number, part in enumerate(self.parts):
            part.weights.grad = None
            self.parts[number] = part._replace(gradient=part.weights.detach().new_empty(0))
        for flat in self._flats.values() if self.layout.lends else ():
            flat.drop_gradient()
