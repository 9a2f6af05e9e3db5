"""`ddp.Guard`: what becomes of a run whose loss is not finite, or jumps: it stops, leaves the step out, or goes back.

    stop        the run ends with an error that names module and samples (`replay.py`); so does one without a guard
    skip        the samples of the step are left out, as by `skip_steps`, and the run continues
    go_back     the run resumes from its last checkpoint, at half the learning rate

A spike is a loss that lies this many standard deviations above the mean of the steps before it, of which the last
hundred or so count. It is found before the update, on all ranks, and taken back like any other bad step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from ddp.errors import ConfigError
from ddp.optim.schedules import Rates
from ddp.policies import GuardAction
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState

DECAY = 0.98  # of the weight of a step, per step
FEWEST = 20  # steps before a loss can be a spike
RATE_FACTOR = 0.5  # on the learning rate, each time that a run goes back


class Guard(Callback):
    """Says what becomes of a step whose loss or gradient is not finite, or whose loss is a spike.

    Args:
        action: "stop", "skip" or "go_back" (see above).
        spike: standard deviations above the mean of the last losses from which a loss is a spike; None: none is.
        most: how often the run leaves a step out or goes back, before the next one ends it.

    Attributes:
        num_acted: how often it has.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(self, action: GuardAction = "stop", *, spike: float | None = None, most: int = 3) -> None:
        if action not in get_args(GuardAction):
            raise ConfigError(f"action={action!r:.60}: take one of {', '.join(get_args(GuardAction))}")
        if spike is not None and (not isinstance(spike, (int, float)) or spike is True or not 0 < spike < math.inf):
            raise ConfigError(f"spike={spike!r:.60}: must be a number of standard deviations above 0, or None")
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise ConfigError(f"most={most!r:.60}: must be a whole number from 1 up")
        self.action, self.spike, self.most, self.num_acted = action, spike, most, 0
        self._num, self._weight, self._sum, self._squares = 0, 0.0, 0.0, 0.0
        self._went_back_to: list[int] = []

    def is_spike(self, loss: float) -> str:
        """Returns by how much a loss is too high, as text; "" if it is not."""
        if self.spike is None or self._num < FEWEST:
            return ""
        mean = self._sum / self._weight
        deviation = math.sqrt(max(0.0, self._squares / self._weight - mean * mean))
        if loss <= mean + self.spike * deviation or deviation == 0.0:
            return ""
        above = (loss - mean) / deviation
        return f"{loss:.6g}, {above:.1f} standard deviations above the mean of the last losses, {mean:.6g}"

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self._num += 1
        self._weight, self._sum = DECAY * self._weight + 1, DECAY * self._sum + report.loss
        self._squares = DECAY * self._squares + report.loss**2

    def go_back(self, state: TrainState, load: Callable[[], None]) -> None:
        """Goes back to the last checkpoint, and lowers the learning rate; each time there once more. Collective.

        Args:
            load: makes the state that of the checkpoint, also this guard's, which knows more.
        """
        num_acted, went_back_to = self.num_acted, self._went_back_to
        load()
        self.num_acted, self._went_back_to = num_acted, [*went_back_to, state.step]
        factor = RATE_FACTOR ** self._went_back_to.count(state.step)
        state.rates = Rates(state.optimizer, [rate * factor for rate in state.rates.base])

    def state_dict(self) -> dict[str, Any]:
        losses = [self._num, self._weight, self._sum, self._squares]
        return {"acted": self.num_acted, "losses": losses, "went_back_to": list(self._went_back_to)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_acted = int(state["acted"])
        self._num, self._weight, self._sum, self._squares = state["losses"]
        self._went_back_to = [*state["went_back_to"]]
