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
        name: the scheduler's class; every: the moment at which it steps.
        needs_metric: it reads one; mode: "min" or "max", what it wants the metric to be.

    Args:
        scheduler: made for `optimizer`.
        every: the moment that one call of `scheduler.step()` stands for: "step" or "epoch".

    Raises:
        ConfigError: `every` is missing, or does not go with the scheduler.
    """

    def __init__(self, scheduler: LRScheduler, *, every: str | None = None) -> None:
        self.name = name = type(scheduler).__name__
        self.needs_metric = needs_metric = isinstance(scheduler, ReduceLROnPlateau)
        if every is None and needs_metric:
            every = "evaluation"
        if every not in (("evaluation",) if needs_metric else ("step", "epoch")):
            say = 'say ddp.optim.TorchSchedule(scheduler, every="step") or "epoch"'
            remedy = "leave it out" if needs_metric else say
            what = f"schedule={name} with every={every!r}"
            raise ConfigError(f"{what}: torch's schedulers count calls of step(); {remedy}")
        self._scheduler, self.every = scheduler, every
        self.mode = getattr(scheduler, "mode", "")

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ConfigError if the scheduler was made for another optimizer."""
        if getattr(self._scheduler, "optimizer", None) is not optimizer:
            raise ConfigError(
                f"schedule={self.name} was made for another optimizer: make it with the one given to ddp.fit"
            )

    def stepped(self, *, is_epoch_end: bool) -> None:
        """Counts an optimizer step."""
        if self.every == "step" or (self.every == "epoch" and is_epoch_end):
            self._scheduler.step()

    def evaluated(self, metric: float) -> None:
        """Counts an evaluation."""
        if self.every == "evaluation":
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
