"""A learning-rate scheduler of torch's, stepped at the moments that its user names.

torch's schedulers count how often `step()` was called, and hold state. Whether a call means a step or an epoch is known
to the user alone: StepLR(30) is meant in epochs, OneCycleLR in steps. So it must be said. ReduceLROnPlateau reads a
metric, so it is stepped after evaluations.
"""

from __future__ import annotations

from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp.errors import CheckpointError, ConfigError

Moment = Literal["step", "epoch", "evaluation"]


class TorchSchedule:
    """Steps a scheduler after each step, epoch or evaluation.

    Attributes:
        name: the scheduler's class; needs_metric: it reads one; mode: "min" or "max", what it wants the metric to be.

    Args:
        scheduler: made for `optimizer`.
        every: the moment that one call of `scheduler.step()` stands for.
        optimizer: the one that is trained with.

    Raises:
        ConfigError: the scheduler belongs to another optimizer, or `every` is missing or does not go with it.
    """

    def __init__(self, scheduler: LRScheduler, *, every: str | None, optimizer: Optimizer) -> None:
        self.name = name = type(scheduler).__name__
        self.needs_metric = needs_metric = isinstance(scheduler, ReduceLROnPlateau)
        if getattr(scheduler, "optimizer", None) is not optimizer:
            raise ConfigError(f"schedule={name} was made for another optimizer: make it with the one given to ddp.fit")
        if every is None and needs_metric:
            every = "evaluation"
        if every not in (("evaluation",) if needs_metric else ("step", "epoch")):
            remedy = "leave schedule_every out" if needs_metric else 'say schedule_every="step" or "epoch"'
            raise ConfigError(
                f"schedule={name} with schedule_every={every!r}: torch's schedulers count calls of step(); {remedy}"
            )
        self._scheduler, self._every = scheduler, every
        self.mode = getattr(scheduler, "mode", "")

    def stepped(self, *, is_epoch_end: bool) -> None:
        """Counts an optimizer step."""
        if self._every == "step" or (self._every == "epoch" and is_epoch_end):
            self._scheduler.step()

    def evaluated(self, metric: float) -> None:
        """Counts an evaluation."""
        if self._every == "evaluation":
            self._scheduler.step(metric)  # type: ignore[arg-type]  # torch declares the epoch of other schedulers

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's class and state."""
        return {"class": self.name, "state": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a scheduler's state. The rates that it had set are in the optimizer's state.

        Raises:
            CheckpointError: it is the state of another class.
        """
        if state["class"] != self.name:
            raise CheckpointError(
                f"the checkpoint was taken with the scheduler {state['class']}, this run uses {self.name}, whose state "
                "it does not hold; take the same scheduler, or start fresh from its weights"
            )
        self._scheduler.load_state_dict(state["state"])
