"""`ddp.Watch`: warns of a run that does not learn or has become slow, or ends it.

    ConstantGuess    the least loss of a model that returns the same for every sample
    Learning         the loss of the last steps is no better than that?
    Pace             samples per second stay below a share of their median?

The best constant for cross-entropy is the mean of the targets' distributions, and its loss is their entropy. For the
squared error it is the mean of the targets, and their variance.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.special import entr

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.data.loading.iterable import ENDLESS
from ddp.errors import ConfigError
from ddp.policies import WatchAction
from ddp.process.clock import now_s
from ddp.process.terminal import log
from ddp.train.steps.callbacks import BatchCallback
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.tasks.task import IGNORE, Classification, LanguageModel, LossFunction, Regression, Task

# --- Whether it learns ------------------------------------------------------------------------------------------------


ENOUGH = 50
"""Targets for each class, so that their entropy is known within a percent or so."""
Kind = Literal["classes", "bits", "numbers"]


class ConstantGuess:
    """Adds up the targets that a rank trains on, until there are enough of them.

    Args:
        kind: "classes" for cross-entropy, "bits" for that of yes or no, "numbers" for the squared error.
        smoothing: of the labels.
    """

    def __init__(self, kind: Kind, *, smoothing: float = 0.0) -> None:
        self._kind, self._smoothing = kind, smoothing
        self._sums: list[Tensor] = []  # of classes, [num_classes]; of numbers and of their squares, as one sample
        self._num = 0

    @property
    def wants_more(self) -> bool:
        """Returns True while there are too few targets."""
        return self._num < self._num_wanted

    @property
    def _num_wanted(self) -> int:
        return ENOUGH * (self._sums[0].numel() if self._sums and self._kind == "classes" else 2)

    def add(self, targets: Tensor) -> None:
        """Counts the targets of a batch: classes, or the probability of each class; or numbers, [n, ...]."""
        if self._kind == "classes" and not targets.is_floating_point():
            classes = targets.flatten().long()
            counts = torch.bincount(classes[classes >= 0])  # a negative one is none
            self._add([counts.double()], int(counts.sum()))
        else:
            numbers = targets.double()
            self._add([numbers.sum(0), numbers.square().sum(0)], len(targets))

    def _add(self, sums: Sequence[Tensor], num: int) -> None:
        """Adds sums; of samples of several shapes those of the first."""
        if not self._sums:
            self._sums, self._num = list(sums), num
            return
        if self._kind == "classes":
            size = max(len(each) for each in (*self._sums, *sums))
            self._sums, sums = ([_padded(each, size) for each in both] for both in (self._sums, sums))
        if [each.shape for each in self._sums] == [each.shape for each in sums]:
            self._sums = [one + other for one, other in zip(self._sums, sums, strict=True)]
            self._num += num

    def loss(self, comm: Communicator) -> float | None:
        """Returns the loss of the best constant for the targets of all ranks; None if they are too few. Collective."""
        counted = all_gather_object(comm, (self._num, self._num_wanted))
        if sum(num for num, _ in counted) < max(wanted for _, wanted in counted):
            return None
        total = ConstantGuess(self._kind)
        for num, sums in all_gather_object(comm, (self._num, [each.cpu() for each in self._sums])):
            total._add(sums, num)
        mean, *of_squares = (each / total._num for each in total._sums)
        if self._kind == "numbers":
            return float((of_squares[0] - mean.square()).mean())
        if self._kind == "bits":
            return float((entr(mean) + entr(1 - mean)).mean())
        shares = (1 - self._smoothing) * mean + self._smoothing / len(mean)
        return float(entr(shares).sum())


def _padded(one: Tensor, size: int) -> Tensor:
    """Returns a vector with zeros at its end."""
    return torch.cat([one, one.new_zeros(size - len(one))])


NUM_LOSSES = 20
BETTER_BY = 0.01
"""A loss that is this much better, relatively, is no guess."""


class Learning:
    """Judges the losses of a run against a constant guess."""

    def __init__(self) -> None:
        self._losses = deque[float](maxlen=NUM_LOSSES)

    def add(self, loss: float) -> None:
        """Records the loss of a step."""
        self._losses.append(loss)

    def verdict(self, guess: float) -> str:
        """Returns as text that the run does not learn; "" if it does, or if there were too few steps.

        A loss that falls is left alone: at the beginning of a short run it may be above the guess.
        """
        if len(self._losses) < NUM_LOSSES or guess <= 0:
            return ""
        losses, half, least = [*self._losses], NUM_LOSSES // 2, 1 - BETTER_BY
        loss, earlier, later = map(statistics.fmean, (losses, losses[:half], losses[half:]))
        if loss < least * guess or later < least * earlier:
            return ""
        guessed = f"no better than that of a constant guess, {guess:.4g}, and does not fall"
        return f"the loss of the last {NUM_LOSSES} steps, {loss:.4g}, is {guessed}"


# --- Whether it goes on as fast as it did ---------------------------------------------------------------------------


NUM_BEFORE, NUM_SLOW, SLOW_S = 8, 3, 10.0


class Pace:
    """Judges the samples per second of each logging step against the median of those before.

    Slow are several in a row, for some seconds, because a single one may be the garbage collector's, or a neighbour's.

    Args:
        share: of the median; 0: never slow.
    """

    def __init__(self, share: float, *, clock: Callable[[], float] = now_s) -> None:
        self._share, self._clock = share, clock
        self._rates, self._slow = list[float](), list[float]()
        self._last_s, self._slow_since_s = clock(), 0.0

    def add(self, rate: float) -> str:
        """Records samples per second; returns as text, once, that the run has become slow, or else ""."""
        began_s, self._last_s = self._last_s, self._clock()
        median = statistics.median(self._rates) if len(self._rates) >= NUM_BEFORE else 0.0
        if rate >= self._share * median:
            self._rates.append(rate)
            self._slow.clear()
            return ""
        if not self._slow:
            self._slow_since_s = began_s
        was_slow = self._is_slow(began_s)
        self._slow.append(rate)
        if was_slow or not self._is_slow(self._last_s):
            return ""
        since_s, rate = self._last_s - self._slow_since_s, statistics.mean(self._slow)
        return f"{rate:,.0f} samples/s for {since_s:.0f} s, and a median of {median:,.0f} before"

    def _is_slow(self, at_s: float) -> bool:
        return len(self._slow) >= NUM_SLOW and at_s - self._slow_since_s >= SLOW_S


# --- The callback -----------------------------------------------------------------------------------------------------


WATCH = "watch: "
"""`stopped_by` of a run that was ended begins like this."""
KINDS: dict[Kind, tuple[Any, ...]] = {
    "classes": (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss),
    "bits": (F.binary_cross_entropy_with_logits, F.binary_cross_entropy, nn.BCEWithLogitsLoss, nn.BCELoss),
    "numbers": (F.mse_loss, nn.MSELoss),
}


class Watch(BatchCallback):
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
        """Records the targets of a batch of this rank, before it is used."""
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
