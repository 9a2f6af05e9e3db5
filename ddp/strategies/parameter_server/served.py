"""The model as parameter servers hold it: gradients come from workers, and never from a backward of its own.

    workers     pull parameters, compute, push gradients                            (`worker.py`)
    server      waits for the gradients of an update, piece by piece                (`server.py`)
    agree       the servers measure the norm of the gradient together
    update      each makes the optimizer's step for its pieces, and gives the others the new parameters

So the servers make updates as the ranks of the sharded strategy do (`strategies/sharded.py`): each has all parameters,
and a part of the optimizer's state; a worker exchanges with each server only what that one holds. The pieces are about
equally many bytes; large tensors are cut. In mode async an update is one batch of one worker (Dean et al., "Large Scale
Distributed Deep Networks", NIPS 2012, section 4.1, Downpour SGD).
"""

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
