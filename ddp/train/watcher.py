"""`ddp.Watch`: warns of a run that does not learn or has become slow, or ends it; `monitor/watch.py` judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from ddp.data.loading.iterable import ENDLESS
from ddp.errors import ConfigError
from ddp.policies import WatchAction
from ddp.process.log import log
from ddp.train.callbacks import BatchCheck
from ddp.train.monitor.watch import ConstantGuess, Kind, Learning, Pace
from ddp.train.state import StepReport, TrainState
from ddp.train.tasks.cross_entropy import Classification, LanguageModel
from ddp.train.tasks.task import IGNORE, LossFunction, Regression, Task

WATCH = "watch: "
"""`stopped_by` of a run that was ended begins like this."""
KINDS: dict[Kind, tuple[Any, ...]] = {
    "classes": (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss),
    "bits": (F.binary_cross_entropy_with_logits, F.binary_cross_entropy, nn.BCEWithLogitsLoss, nn.BCELoss),
    "numbers": (F.mse_loss, nn.MSELoss),
}


class Watch(BatchCheck):
    """Warns of a run that does not learn, or that has become slow, once each time; or ends it with a checkpoint.

    A run does not learn if its loss is no better than that of a constant guess and does not fall, as that of a model
    whose rate is too large. That guess is known for the losses in `KINDS`, for `ddp.Classification` and for
    `ddp.LanguageModel`. All ranks end together; `stopped_by` says why.

    Args:
        action: "warn"; "stop" ends the run.
        learn_share: of the run's steps, after which it must have learnt; above 0 and at most 1.
        slow_share: of the median of samples/s, below which the run is slow; from 0, which is never, and below 1.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(self, action: WatchAction = "warn", *, learn_share: float = 0.2, slow_share: float = 0.5) -> None:
        if action not in get_args(WatchAction):
            raise ConfigError(f"action={action!r:.60}: take one of {', '.join(get_args(WatchAction))}")
        if not isinstance(learn_share, (int, float)) or not 0 < learn_share <= 1:
            raise ConfigError(f"learn_share={learn_share!r:.60}: must be a number above 0 and at most 1")
        if not isinstance(slow_share, (int, float)) or not 0 <= slow_share < 1:
            raise ConfigError(f"slow_share={slow_share!r:.60}: must be a number from 0 up and below 1")
        self._ends, self._learn_share, self._slow_share = action == "stop", learn_share, slow_share
        self.begin(None, ENDLESS)

    def begin(self, task: Task | None, num_steps: int) -> None:
        """Begins to watch a run of this length; without a task, or an end, not whether it learns."""
        self._guess = None if task is None or num_steps >= ENDLESS else guess_of(task)
        self._task, self._first_step = task, self._learn_share * num_steps
        self._learning, self._pace = Learning(), Pace(self._slow_share)
        self._least: float | None = None
        self._has_told = False

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Takes note of the targets of a batch of this rank, before it is used."""
        if self._guess is not None and self._guess.wants_more and isinstance(batch, (tuple, list)) and len(batch) == 2:
            targets = batch[1]
            if isinstance(targets, Tensor) and targets.dim():
                is_hot = isinstance(self._task, Classification) and targets.dim() == 2
                self._guess.add(targets.float() if is_hot else targets)

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self._learning.add(report.loss)

    def logged(self, state: TrainState, entry: Mapping[str, Any]) -> None:
        if entry["kind"] != "step":
            return
        if slow := self._pace.add(entry["samples_per_s"]):
            self._tell(state, f"the run has become slow: {slow}")
        if self._guess is None or state.step < self._first_step or self._has_told:
            return
        if self._least is None:  # on all ranks
            self._least = self._guess.loss(state.comm)
        if self._least is not None and (why := self._learning.verdict(self._least)):
            self._has_told = True
            self._tell(state, why)

    def _tell(self, state: TrainState, why: str) -> None:
        """Warns, or ends the run, from rank 0, because only some figures are the same on all ranks."""
        if state.comm.rank == 0:
            log.warning("step %d: %s", state.step, why)
            if self._ends:
                state.stop(f"{WATCH}{why}")


def guess_of(task: Task) -> ConstantGuess | None:
    """Returns what finds the loss of a constant guess; None for a loss of which that is not known."""
    if isinstance(task, (Classification, LanguageModel)):
        is_own = type(task).loss not in (Classification.loss, LanguageModel.loss)
        return None if is_own else ConstantGuess("classes", smoothing=getattr(task, "label_smoothing", 0.0))
    if type(task) is Regression:
        return ConstantGuess("numbers")
    if not isinstance(task, LossFunction) or task.reduction != "mean":
        return None
    function = task.function
    weighs = any(getattr(function, name, None) is not None for name in ("weight", "pos_weight"))
    if weighs or getattr(function, "ignore_index", IGNORE) != IGNORE:
        return None
    kind = next((kind for kind, known in KINDS.items() if function in known or type(function) in known), None)
    return None if kind is None else ConstantGuess(kind, smoothing=getattr(function, "label_smoothing", 0.0))
