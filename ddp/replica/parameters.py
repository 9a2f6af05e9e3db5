"""The parameters that a replica keeps equal, a check that they are still the same ones, and their layouts.

A layer that is added after the replica was made would be trained on this rank's samples alone, without an error. So
every forward checks that modules and parameters are still the original ones, by comparing two lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto
from itertools import chain, compress
from operator import attrgetter, is_not, or_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp.comm import checks
from ddp.errors import CollectiveMismatch, ConfigError, ReplicaMismatch
from ddp.gradients.layout import Grouping, Layout
from ddp.replica.broadcast import check_same_layout
from ddp.setting import Setup, WireName, refuse

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator
    from ddp.gradients.reducer import Reducer

_REQUIRES_GRAD, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")
_END = object()  # after the last value, so that lists of different lengths differ
_HAS_DEVICES = torch.accelerator.is_available()  # else parameters cannot move


def managed(module: nn.Module, *, inner: type[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Returns names and parameters that a replica keeps equal, in registration order; shared ones once.

    Args:
        inner: parameters inside a module of this class are left out, because that module keeps them equal.
    """
    others = {id(p) for child in module.modules() if isinstance(child, inner) for p in child.parameters()}
    return [(name, p) for name, p in module.named_parameters() if id(p) not in others]


def check_wire(named: Iterable[tuple[str, Tensor]], wire: WireName | None, hook: object | None = None) -> None:
    """Raises ConfigError unless all gradients can travel in this format."""
    refuse(Setup(wire=wire, hook=hook))
    for dtype in {parameter.dtype for _, parameter in named if parameter.requires_grad}:
        checks.wire(wire, "mean", dtype)


def sparse_weights(module: nn.Module) -> list[Tensor]:
    """Returns the parameters of a module whose gradients are sparse tensors."""
    layers = (each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    return [layer.weight for layer in layers if layer.sparse]


class Change(Enum):
    """The result of `ParameterWatch.check`."""

    NONE = auto()
    MODULES = auto()  # modules without parameters were added or removed
    REQUIRES_GRAD = auto()  # some were frozen or unfrozen
    KINDS = auto()  # some have another type or memory format, or are on another device


class ParameterWatch:
    """Remembers a module's parameters.

    Attributes:
        has_frozen: at the last check, some parameters needed no gradient.
        is_borrowed: at the last check, torch.func.functional_call had replaced the parameters by other tensors.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.is_borrowed = module, False
        self._remember()
        self._needed, self._kinds = self._presently_needed(), self._present_kinds()
        self.has_frozen = False in self._needed

    def _remember(self) -> None:
        self._named = dict(self.module.named_parameters(remove_duplicate=False))
        modules = self.module.modules()
        self._tables = [table.values() for each in modules for table in (each._parameters, each._modules)]
        self._values = [*chain.from_iterable(self._tables), _END]
        self._parameters = list(self._named.values())

    def _presently_needed(self) -> list[bool]:
        return list(map(_REQUIRES_GRAD, self._parameters))

    def _present_kinds(self) -> list[Any]:
        kinds: list[Any] = [*map(_DTYPE, self._parameters), *map(Tensor.is_contiguous, self._parameters)]
        return kinds + list(map(Tensor.get_device, self._parameters)) if _HAS_DEVICES else kinds

    @property
    def needed(self) -> tuple[bool, ...]:
        """For each parameter, True if it needed a gradient at the last check."""
        return tuple(self._needed)

    def check(self) -> Change:
        """Compares the parameters with those remembered, and remembers the changes.

        Raises:
            ConfigError: parameters were added, removed or replaced; the message names them.
        """
        self.is_borrowed = False
        if any(map(is_not, chain(chain.from_iterable(self._tables), [_END]), self._values)):
            return self._compare()
        before = self._needed, self._kinds
        self._needed, self._kinds = self._presently_needed(), self._present_kinds()
        self.has_frozen = False in self._needed
        if self._kinds != before[1]:
            return Change.KINDS
        return Change.REQUIRES_GRAD if self._needed != before[0] else Change.NONE

    def check_inside(self) -> bool:
        """Checks again, during a forward or after it. Returns True if parameters were unfrozen since `check`.

        Those count as needed from now on, and so do parameters that were frozen meanwhile, because the forward may have
        used both.
        """
        before = self._needed
        self._needed = list(map(or_, before, self._presently_needed()))
        return self._needed != before

    @property
    def needed_ids(self) -> frozenset[int]:
        """Ids of the parameters that needed a gradient at the last check."""
        return frozenset(map(id, compress(self._parameters, self._needed)))

    def names_of(self, ids: Collection[int]) -> list[str]:
        """Returns the names of parameters, by their ids, sorted."""
        return sorted(name for name, parameter in self._named.items() if id(parameter) in ids)

    def _compare(self) -> Change:
        now = dict(self.module.named_parameters(remove_duplicate=False))
        added, removed = now.keys() - self._named.keys(), self._named.keys() - now.keys()
        replaced = [name for name in now if name in self._named and now[name] is not self._named[name]]
        is_borrowed = replaced and not any(isinstance(now[name], nn.Parameter) for name in replaced)
        if is_borrowed and not (added or removed):
            self.is_borrowed = True
            return Change.NONE
        for names, what in ((added, "added"), (removed, "removed"), (replaced, "replaced")):
            if names:
                raise ConfigError(
                    f"parameters were {what} after the replica was made: {', '.join(sorted(names))}. They would not be "
                    "kept equal: change the model first, then wrap it (and give the optimizer the new parameters)"
                )
        self._remember()
        return Change.MODULES


# --- The layouts of one replica --------------------------------------------------------------------------------------
#
# Most programs have one. A program that freezes or unfreezes parameters gets another layout at the next forward, and
# must freeze the same ones on every rank. The last two layouts are kept, because a GAN alternates between two.


NUM_KEPT = 2


class Layouts:
    """Finds the layout for the parameters that need a gradient.

    Args:
        watch: tracks which parameters need a gradient.
        named: all parameters of the replica, with their names.
        reducer: of the buckets.
        grouping, num_shards: as in `Layout`.

    Attributes:
        current: the layout for the parameters that needed a gradient when `choose` was called last.
    """

    def __init__(
        self,
        comm: Communicator,
        watch: ParameterWatch,
        named: Sequence[tuple[str, nn.Parameter]],
        reducer: Reducer,
        *,
        grouping: Grouping,
        num_shards: int | None,
    ) -> None:
        self._comm, self._watch, self._named, self._reducer = comm, watch, named, reducer
        self._grouping, self._num_shards = grouping, num_shards
        self.current = self._made()
        self._by_needed = {watch.needed: self.current}

    def _made(self) -> Layout:
        """Returns a layout of the parameters that need a gradient now."""
        needed = self._watch.needed_ids
        named = [(name, parameter) for name, parameter in self._named if id(parameter) in needed]
        weights = set(map(id, sparse_weights(self._watch.module)))
        sparse = [name for name, parameter in named if id(parameter) in weights]
        how: dict[str, Any] = {"grouping": self._grouping, "num_shards": self._num_shards}
        return Layout(self._comm, named, self._reducer, sparse=sparse, **how)

    @property
    def is_current(self) -> bool:
        """Returns True if the parameters that need a gradient now are those of the last call of `choose`."""
        return self._by_needed.get(self._watch.needed) is self.current

    def choose(self, *, early: Collection[int]) -> None:
        """Switches to the layout for the parameters that need a gradient now. Collective if that layout is new.

        Args:
            early: ids of parameters that have accumulated gradients which no backward has reduced yet.

        Raises:
            ConfigError: a parameter in `early` was frozen.
            ReplicaMismatch: parameters were frozen or converted on this rank, and not on another one.
        """
        needed = self._watch.needed
        layout = self._by_needed.pop(needed, None)
        if layout is None:
            layout = self._made()
            self._check_same_on_every_rank(layout)
            while len(self._by_needed) >= NUM_KEPT:
                self._by_needed.pop(next(iter(self._by_needed)))
        self._by_needed[needed] = self.current = layout  # moved to the end, because the first ones are dropped first
        if frozen := set(early).difference(layout.slot_of):
            raise ConfigError(
                f"{', '.join(self._watch.names_of(frozen))}: frozen with a gradient from no_sync that has not been "
                "sent. Freeze parameters after a backward that synchronises"
            )

    def forget(self) -> None:
        """Drops the layouts that are kept, because parameters were converted."""
        self._by_needed.clear()

    def adopt_order(self, names: list[str]) -> None:
        """Expects gradients in this order from now on."""
        if self.current.order != names:
            self.current.plan(names, for_hook=self.current.is_for_hook)

    def change_to(self, reducer: Reducer) -> None:
        """Lets a communication hook reduce the buckets from now on."""
        self._reducer = reducer
        for layout in self._by_needed.values():
            layout.plan(layout.order, for_hook=True)

    def _check_same_on_every_rank(self, layout: Layout) -> None:
        try:
            check_same_layout(self._comm, [(slot.name, slot.parameter) for slot in layout.slots])
        except CollectiveMismatch as mismatch:
            changed = {slot.name for slot in self.current.slots} ^ {slot.name for slot in layout.slots}
            what = f"{', '.join(sorted(changed))}: frozen or unfrozen" if changed else "parameters were converted"
            raise ReplicaMismatch(
                f"{what} on rank {self._comm.rank}, and not on another one. Change requires_grad, types, devices "
                "and memory formats on every rank, between the same two steps"
            ) from mismatch
