"""The model as parameter servers hold it: gradients come from workers, and never from a backward of its own."""

from __future__ import annotations

from collections.abc import Collection

from ddp.errors import ConfigError
from ddp.gradients.totals import Totals
from ddp.replica.parameters import Change
from ddp.replica.sharded import ShardedDataParallel


class ServedDataParallel(ShardedDataParallel):
    """Takes gradients that others have written into the buckets of its slices."""

    def prepare(self) -> None:
        if self._watch.check() is not Change.NONE:
            raise ConfigError(
                "parameters were frozen, unfrozen or converted while workers compute with the others: freeze them "
                "before the training begins, or take strategy=auto"
            )

    def take(self, totals: Totals, *, without: Collection[str]) -> None:
        """Ends a step whose gradients are in the buckets.

        Args:
            totals: of the step.
            without: names of the parameters that got no gradient from anybody.

        Raises:
            ConfigError: parameters were frozen, unfrozen or converted since the training began.
        """
        self.prepare()
        for slot in self.layout.slots:
            slot.parameter.grad = None if slot.name in without else slot.view
        self._end_step(totals)
