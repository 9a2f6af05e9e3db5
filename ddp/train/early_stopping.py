"""`ddp.EarlyStopping`: ends a run whose main metric no longer becomes better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddp.errors import ConfigError
from ddp.process.log import log
from ddp.train.callbacks import Callback
from ddp.train.state import TrainState

EARLY = "early stopping"
"""`stopped_by` of a run that has ended like this."""


class EarlyStopping(Callback):
    """Ends the run after `patience` evaluations in a row without a better main metric. `stopped_by` says so.

    The metric is the one that decides which checkpoint is the best. It is the same number on all ranks, so they end
    together. A resumed run goes on counting; a larger patience lets a run go on that has ended early.

    Args:
        patience: evaluations, from 1 up.
        min_delta: a metric is better if it is better by more than this, from 0 up.

    Attributes:
        best: the best metric so far; None before the first evaluation.
        num_without: evaluations since then.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(self, patience: int, *, min_delta: float = 0.0) -> None:
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ConfigError(f"patience={patience!r}: must be a whole number of evaluations from 1 up")
        if not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise ConfigError(f"min_delta={min_delta!r}: must be a number from 0 up")
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.num_without = 0
        self._run: TrainState | None = None

    def fit_start(self, state: TrainState) -> None:
        self._run, self.best, self.num_without = state, None, 0  # it may have served another fit

    def evaluated(self, state: TrainState) -> None:
        metric = state.evaluation[state.main_metric]
        sign = 1.0 if state.higher_is_better else -1.0
        if self.best is None or math.isnan(self.best) or sign * (metric - self.best) > self.min_delta:
            self.best, self.num_without = metric, 0
        else:
            self.num_without += 1
        self._stop_if_it_is_time(state)

    def fit_end(self, state: TrainState) -> None:
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_without": self.num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self._run is not None
        self.best, self.num_without = state["best"], state["num_without"]
        self._stop_if_it_is_time(self._run)

    def _stop_if_it_is_time(self, state: TrainState) -> None:
        if self.num_without >= self.patience:
            state.stopped_by = state.stopped_by or EARLY
            log.info("%s: no %s better than %s in %d", EARLY, state.main_metric, self.best, self.num_without)
