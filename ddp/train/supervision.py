"""Watches a run and acts on what it sees: `ddp.Guard` recovers from a bad step, `ddp.Watch` warns.

`Supervision` wraps the supply of steps. Each step is checked before its update is made:

    begin        a step begins: the shard to be audited, if one is; what a step that is left out must restore
    check        all ranks have computed it: the audit, and whether its loss is a spike
    explained    it was taken back: computed again without communication, it names module, rank and samples
    recover      as the guard says: leave the step out, go back to the last checkpoint, or stop

The guard is `ddp.Guard`; by default it ends the run. `Watch` is a callback, and judges steps that were made:

    ConstantGuess    the least loss of a model that returns the same for every sample
    Learning         whether the loss of the last steps is lower than that
    Pace             whether samples per second stay above a share of their median
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.special import entr

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.data.loading.iterable import ENDLESS
from ddp.data.orders.sampler import StepPlan
from ddp.errors import CheckpointError, Diverged
from ddp.optim.schedules import Rates
from ddp.policies import GuardAction, WatchAction
from ddp.process.clock import now_s
from ddp.process.terminal import log
from ddp.setting import Below1, Natural, Positive, UpTo1, checked
from ddp.strategies.strategy import ADVICE, Agreement
from ddp.train.replay import Audit, Replay, explain_divergence, explain_spike
from ddp.train.reports.history import note_start
from ddp.train.steps.callbacks import BatchCallback, Callback
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.supply import EpochSupply, Step
from ddp.train.steps.task import IGNORE, Classification, LanguageModel, LossFunction, Regression, Task
from ddp.units import counted

# --- `ddp.Guard`: the recovery from a loss that is not finite, or jumps -----------------------------------------------
#
#     stop        the run ends with an error that names module and samples (`replay.py`); so does one without a guard
#     skip        the samples of the step are left out, as by `skip_steps`, and the run continues
#     go_back     the run resumes from its last checkpoint, at half the learning rate
#
# A spike is a loss that lies this many standard deviations above the mean of the steps before it, of which the last
# hundred or so count. It is found before the update, on all ranks, and taken back like any other bad step.


DECAY = 0.98  # of the weight of a step, per step
FEWEST = 20  # steps before a loss can be a spike
RATE_FACTOR = 0.5  # on the learning rate, each time that a run goes back


class Guard(Callback):
    """The recovery from a step whose loss or gradient is not finite, or whose loss is a spike.

    Args:
        action: "stop", "skip" or "go_back" (see above).
        spike: standard deviations above the mean of the last losses from which a loss is a spike; None: none is.
        most: how often the run leaves a step out or goes back, before the next one ends it.

    Attributes:
        num_acted: how often it has.

    Raises:
        ConfigError: an argument is out of its range.
    """

    @checked
    def __init__(self, action: GuardAction = "stop", *, spike: Positive | None = None, most: Natural = 3) -> None:
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


# --- Steps that are supervised ----------------------------------------------------------------------------------------


class Supervision:
    """Supervises the steps of a run. Collective.

    Args:
        supply: of those steps; replay computes them again.
        guard: how the run recovers from a bad step.
        audit: of the shards; None: they are not audited.
        callbacks: whose `step_left_out` runs for each step that is left out.
        go_back: makes the state that of the last checkpoint, at the learning rate that a guard says.
    """

    def __init__(
        self,
        supply: EpochSupply,
        replay: Replay,
        *,
        guard: Guard,
        audit: Audit | None,
        callbacks: Sequence[Callback],
        go_back: Callable[[Guard], None],
    ) -> None:
        self._supply, self._state, self._replay, self._guard, self._audit = supply, replay.state, replay, guard, audit
        self._callbacks, self._go_back, self._is_spike = callbacks, go_back, False
        supply.check = self._check

    def __iter__(self) -> Iterator[Step]:
        for step in self._supply:
            yield Step(step.plan, partial(self._made, step))

    def close(self) -> None:
        """Ends the loader."""
        self._supply.close()

    def _made(self, step: Step) -> StepReport | None:
        self._is_spike = False
        if self._audit is not None:
            self._audit.begin(step.plan)
        try:
            return step.make()
        except Diverged as error:
            self._recover(step.plan, error)
            return None

    def _check(self, plan: StepPlan, agreement: Agreement) -> None:
        """Raises AuditFailed, or Diverged if the loss is a spike, once all ranks have computed the step."""
        if self._audit is not None:
            self._audit.check(plan)
        if spike := self._guard.is_spike(agreement.totals.mean_loss):
            self._state.model.take_back()
            self._is_spike = True
            raise Diverged(f"the loss of step {self._state.step + 1} is a spike: {spike}")

    # --- a bad step --------------------------------------------------------------------------------------------------

    def _recover(self, plan: StepPlan, error: Diverged) -> None:
        """Recovers from a step that has been taken back, as the guard says.

        Raises:
            Diverged: the run is to end.
        """
        guard, explained = self._guard, self._explained(plan, error)
        if guard.action == "stop":
            raise explained from error
        if guard.num_acted >= guard.most:
            times = counted(guard.num_acted, "time")
            raise Diverged(f"{explained}. The guard has acted {times}, which is the most (guard.most)") from error
        guard.num_acted += 1
        state = self._state
        facts: dict[str, Any] = {"step": state.step + 1, "epoch": plan.epoch}
        facts |= {"position": state.sampler.position_of(plan), "size": plan.size, "why": str(explained)}
        if guard.action == "skip":
            self._leave_out(guard, facts)
        else:
            self._resume_from_checkpoint(guard, facts)

    def _explained(self, plan: StepPlan, error: Diverged) -> Diverged:
        """Returns the error with the module, the rank and the samples that have caused it."""
        if self._is_spike:
            return Diverged(f"{error}. {explain_spike(self._replay, plan)}")
        found, are_samples_to_blame = explain_divergence(self._replay, plan)
        what = str(error).removesuffix(f". {ADVICE}")
        advice = f". {ADVICE}" if what != str(error) and not are_samples_to_blame else ""
        return Diverged(f"{what}. {found}{advice}")

    def _leave_out(self, guard: Guard, facts: Mapping[str, Any]) -> None:
        """Continues after the step, whose samples count as seen."""
        state, step, epoch, size = self._state, facts["step"], facts["epoch"], facts["size"]
        state.sampler.leave_out(step, facts["position"], size)
        which = f"step {step}, in epoch {epoch}, is left out, with its {size} samples"
        self._note({"left_out": facts}, f"{which} ({guard.num_acted} of {guard.most}): {facts['why']}")
        for callback in self._callbacks:
            callback.step_left_out(state, epoch)

    def _resume_from_checkpoint(self, guard: Guard, facts: Mapping[str, Any]) -> None:
        """Continues from the last checkpoint, at a lower learning rate."""
        state, why = self._state, facts["why"]
        try:
            self._go_back(guard)
        except CheckpointError as missing:
            raise Diverged(f"{why}. The run cannot go back: {missing}") from missing
        self._supply.moved()
        rates = ", ".join(f"{rate:g}" for rate in state.rates.base)
        self._note(
            {"went_back": {**facts, "to": state.step, "sampler": state.sampler.state_dict()}},
            f"the run goes back to step {state.step}, at the learning rate {rates}: {why}",
        )

    def _note(self, incident: dict[str, Any], words: str) -> None:
        comm, folder = self._state.comm, self._state.run_dir
        if comm.rank == 0:
            log.warning("%s", words)
        if folder is not None:
            on_rank_zero(comm, lambda: note_start(folder, incident, goes_on=True), label="recording a bad step")


def no_checkpoint(guard: Guard) -> None:
    """Raises CheckpointError: the `go_back` of a run that keeps no checkpoint."""
    raise CheckpointError("this run keeps no checkpoint")


# --- `ddp.Watch`: whether a run learns --------------------------------------------------------------------------------
#
# The best constant for cross-entropy is the mean of the targets' distributions, and its loss is their entropy. For the
# squared error it is the mean of the targets, and their variance.

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
            self._sums, sums = ([F.pad(each, (0, size - len(each))) for each in both] for both in (self._sums, sums))
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

    def problem(self, guess: float) -> str:
        """Returns a phrase if the run does not learn; "" if it does, or if there were too few steps.

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


# --- `ddp.Watch`: whether it is as fast as before ---------------------------------------------------------------------


NUM_BEFORE, NUM_SLOW, SLOW_S = 8, 3, 10.0


class Pace:
    """Judges the samples per second of each logging step against the median of those before.

    The run is slow after several slow steps in a row, for some seconds: a single one may be due to the garbage
    collector, or to a neighbour.

    Args:
        share: of the median; 0: never slow.
    """

    def __init__(self, share: float, *, clock: Callable[[], float] = now_s) -> None:
        self._share, self._clock = share, clock
        self._rates, self._slow = list[float](), list[float]()
        self._last_s, self._slow_since_s = clock(), 0.0

    def add(self, rate: float) -> str:
        """Records samples per second; returns a phrase, once, if the run has become slow, or else ""."""
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


# --- `ddp.Watch` itself -----------------------------------------------------------------------------------------------


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

    @checked
    def __init__(self, action: WatchAction = "warn", *, learn_share: UpTo1 = 0.2, slow_share: Below1 = 0.5) -> None:
        self._ends, self._learn_share, self._slow_share = action == "stop", learn_share, slow_share
        self.begin(None, ENDLESS)

    def begin(self, task: Task | None, num_steps: int) -> None:
        """Begins to watch a run of this length; without a task, or an end, not whether it learns."""
        self._guess = None if task is None or num_steps >= ENDLESS else guess_of(task)
        self._task, self._first_step = task, self._learn_share * num_steps
        self._learning, self._pace = Learning(), Pace(self._slow_share)
        self._least: float | None = None
        self._has_warned = False

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
            self._report(state, f"the run has become slow: {slow}")
        if self._guess is None or state.step < self._first_step or self._has_warned:
            return
        if self._least is None:  # on all ranks
            self._least = self._guess.loss(state.comm)
        if self._least is not None and (why := self._learning.problem(self._least)):
            self._has_warned = True
            self._report(state, why)

    def _report(self, state: TrainState, why: str) -> None:
        """Warns, or ends the run, from rank 0, because only some figures are the same on all ranks."""
        if state.comm.rank == 0:
            log.warning("step %d: %s", state.step, why)
            if self._ends:
                state.stop(f"{WATCH}{why}")


def guess_of(task: Task) -> ConstantGuess | None:
    """Returns an object that finds the loss of a constant guess; None for a loss for which none is known."""
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
