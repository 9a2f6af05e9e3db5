"""A strategy: who holds parameters and optimizer state, and how often the workers agree. A loop calls its members.

    strategy = ddp.strategies.Replicated(net, optimizer)              # or Sharded, LocalSteps, …
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_of(strategy.model(inputs), targets).backward()           # of a mean: the gradients are averaged
        ddp.strategies.step(strategy)                                 # agree, update

A step in several micro-batches has each forward and backward in its own block:

        for number, (inputs, targets) in enumerate(parts):
            with strategy.micro_batch(is_last=number == len(parts) - 1) as scale:
                (loss_of(strategy.model(inputs), targets) / len(parts) * scale).backward()

With `LocalSteps` each such block is a step of this rank's own, so its loss is a mean, and not divided by their number.
`ddp.fit` calls the same members, and is otherwise unknown to a strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ddp.gradients.totals import Totals
from ddp.replica.replica import Replica


class Agreement(NamedTuple):
    """Holds the values of a step that are the same on all ranks, before anything changes.

    Attributes:
        totals: of all ranks; zeros unless each rank has given its own to `model.ride_along`.
        norm: of the global mean gradient, before clipping.
        length: the same, on the host.
        is_overflow: the loss scale was too large, and is smaller now; the step is to be repeated, or left out.
    """

    totals: Totals
    norm: Tensor
    length: float
    is_overflow: bool = False


class Strategy(Protocol):
    """The members of a strategy, in the order of a step."""

    @property
    def model(self) -> Replica:
        """Returns the model that the loop calls."""

    def micro_batch(self, *, is_last: bool = True, synchronous: bool = False) -> AbstractContextManager[int]:
        """Begins a block for forward and backward of one micro-batch of a step.

        Args:
            is_last: the step ends with it.
            synchronous: gradients are averaged in this step, also by a strategy that agrees seldom.

        Yields:
            The factor for the loss, which `Totals.loss_scale` takes, too.
        """

    def agree(self, step: int) -> Agreement:
        """Returns values that are the same on every rank.

        Args:
            step: its number, from 1, for messages.

        Raises:
            UnusedParameters, Diverged: the step cannot be made. On every rank; no parameter has changed. Of a round no
                buffer has, either; of other steps, buffers are as the forwards have left them.
        """

    def update(self, agreement: Agreement) -> None:
        """Clips the gradients, and makes the optimizer's step with the rates that its groups have now."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state, valid for every strategy and world size: "model", "optimizer", "loss_scale".

        "own" has by rank what differs from rank 0's, for as many ranks as now. A strategy may add "local_sgd", of which
        the others say that they cannot use it.
        Collective; what ranks other than 0 get may be incomplete.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` has returned on rank 0. Collective.

        Every rank has it now, but for "own" and "local_sgd", of which rank 0 gives each its part.

        Raises:
            CheckpointError, ValueError: it is of another model or optimizer. Nothing has changed.
        """

    def finish(self, *, alone: bool = False) -> None:
        """Leaves parameters and state whole, in the module and in the optimizer. Collective unless `alone`.

        Args:
            alone: an error has ended the training on this rank, so that others may take no part; then what other ranks
                hold stays there.
        """


def step(strategy: Strategy) -> Agreement:
    """Ends a step of a user's own loop, after backward: the ranks agree, and the optimizer steps. Collective.

    Raises:
        UnusedParameters, Diverged: as `Strategy.agree`.
    """
    agreement = strategy.agree(strategy.model.num_steps)
    if not agreement.is_overflow:
        strategy.update(agreement)
    return agreement
