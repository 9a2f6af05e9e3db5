"""The layouts of one replica: one for each set of parameters that have needed a gradient together.

Most programs have one. A program that freezes or unfreezes parameters gets another layout at the next forward, and must
freeze the same ones on every rank. The last two layouts are kept, because a GAN alternates between two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ddp.comm.communicator import Communicator
from ddp.errors import CollectiveMismatch, ConfigError, ReplicaMismatch
from ddp.gradients.layout import Layout
from ddp.replica.broadcast import check_same_layout
from ddp.replica.parameters import ParameterWatch

NUM_KEPT = 2


class Layouts:
    """Finds the layout for the parameters that need a gradient.

    Args:
        watch: knows which parameters need a gradient.
        first: the layout of those that do now.

    Attributes:
        current: the layout for the parameters that needed a gradient when `choose` was called last.
    """

    def __init__(self, comm: Communicator, watch: ParameterWatch, first: Layout) -> None:
        self._comm, self._watch, self.current = comm, watch, first
        self._by_needed = {watch.needed: first}

    @property
    def is_current(self) -> bool:
        """Returns True if the parameters that need a gradient now are those of the last call of `choose`."""
        return self._by_needed.get(self._watch.needed) is self.current

    def choose(self, make: Callable[[], Layout], *, early: Collection[int]) -> None:
        """Switches to the layout for the parameters that need a gradient now. Collective if that layout is new.

        Args:
            make: returns a new layout of these parameters.
            early: ids of parameters that have accumulated gradients which no backward has reduced yet.

        Raises:
            ConfigError: a parameter in `early` was frozen.
            ReplicaMismatch: parameters were frozen or converted on this rank, and not on another one.
        """
        needed = self._watch.needed
        layout = self._by_needed.pop(needed, None)
        if layout is None:
            layout = make()
            self._check_same_on_every_rank(layout)
            while len(self._by_needed) >= NUM_KEPT:
                self._by_needed.pop(next(iter(self._by_needed)))
        self._by_needed[needed] = self.current = layout  # put last, because the first ones are dropped first
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
            self.current.in_order(names)
            self.drop_succeeded()

    def prepare_for_hook(self) -> None:
        """Lets a communication hook reduce the buckets from now on."""
        for layout in self._by_needed.values():
            layout.latest.for_hooks()
        self.drop_succeeded()

    def drop_succeeded(self) -> None:
        """Drops the layouts that have a successor, and their memory with them."""
        self.current = self.current.latest
        self._by_needed = {needed: layout.latest for needed, layout in self._by_needed.items()}

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
