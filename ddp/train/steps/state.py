"""The state of a run, and the callbacks that watch it: `TrainState`, `Callback`, `EarlyStopping` and `EMA`.

`TrainState` holds everything that a step changes, so that the loop itself holds nothing. Callbacks get it at each of
eleven moments:

    fit_start   step_start   step_end   evaluated   logged   checkpoint_saved   exception   fit_end   finished
    with a guard: step_left_out   went_back

Every rank runs its callbacks at the same moments. So a callback may run collectives, if it does so on all ranks. What
it returns from `state_dict` is saved with the run (`checkpoints/extra_state.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.role import current_role
from ddp.comm.objects import all_gather_object
from ddp.data.loading.processes import Limits
from ddp.data.loading.source import Source
from ddp.data.orders.sampler import Micro, TrainSampler
from ddp.errors import ConfigError
from ddp.gradients.totals import Parts
from ddp.optim.schedules import Rates, TorchSchedule
from ddp.process.terminal import log
from ddp.replica.broadcast import check_untied
from ddp.replica.replica import Replica
from ddp.replica.sync_batchnorm import waits
from ddp.strategies.strategy import Replicated, Strategy
from ddp.train.steps.stopping import StopFlag, is_signal
from ddp.train.steps.task import Task

NOTHING: AbstractContextManager[None] = nullcontext()


def unmeasured(name: str) -> AbstractContextManager[None]:
    """Returns a block that does nothing, for a phase that is not measured of a step that it is around."""
    return NOTHING


@dataclass(eq=False)
class TrainState:
    """The state of a run after its last committed step.

    Attributes:
        strategy: holds parameters and optimizer state, and makes the update.
        optimizer: the user's, whose groups and state hold in every step as they are then.
        step: committed optimizer steps.
        run_dir: the run's folder, as rank 0 names it from the root on; None: nothing is written.
        settings: values that the bits of the result depend on, by name: a checkpoint's identity of the run.
        stopped_by: why the run ends before its time ("SIGTERM", say), agreed on by all ranks; "" while it runs.
        stop_flag: this rank's wish to stop, which signals and `stop` set.
        train_loss: of the last step; None before the first.
        evaluation: the latest metrics by name; evaluated_at: the step that they belong to.
        history: of each evaluation before the run's end, also before a resume: step, epochs, train_loss, and metrics.
        main_metric: the one of them by which checkpoints, callbacks and schedulers choose (`held_out.py`);
            higher_is_better: in which direction.
        schedule: torch's scheduler, if there is one: the schedules of ours hold no state.
        unreadable: numbers of the samples that were left out because they could not be read, as far as this rank knows.
        phase: returns the block that is around a phase of a step: "step", and in it "data", "forward", "backward" and
            "update". A profiler replaces it.
        rates: of the groups, with and without the schedule.
        first_frozen: names of the parameters that needed no gradient when the run began.
        first_settings: the optimizer's groups as the run has begun with them, as text; some change in training.
        waits: a layer or the loss waits in each forward for other ranks.
    """

    comm: Communicator
    strategy: Strategy
    optimizer: Optimizer
    sampler: TrainSampler
    step: int = 0
    run_dir: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    stopped_by: str = ""
    stop_flag: StopFlag = field(default_factory=StopFlag)
    train_loss: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluated_at: int = -1
    history: list[dict[str, Any]] = field(default_factory=list)
    main_metric: str = "test_loss"
    higher_is_better: bool = False
    schedule: TorchSchedule | None = None
    unreadable: set[int] = field(default_factory=set)
    phase: Callable[[str], AbstractContextManager[None]] = unmeasured
    rates: Rates = field(init=False)
    first_frozen: set[str] = field(init=False)
    first_settings: list[dict[str, str]] = field(init=False)
    waits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rates, self.first_frozen, self.waits = Rates(self.optimizer), self.frozen(), waits(self.model)
        self.first_settings = [
            {key: repr(value) for key, value in group.items() if key not in ("params", "initial_lr")}
            for group in self.optimizer.param_groups
        ]

    def stop(self, reason: str) -> None:
        """Ends the run on all ranks after the next step that begins, with a checkpoint; `stopped_by` is `reason` then.

        One rank is enough: its wish travels with the totals of that step. The first reason stands, and of several
        ranks' that of the lowest rank. No evaluation is made afterwards. A wish after the last step changes nothing,
        because the run is complete.

        Raises:
            ConfigError: the reason is no text, or an empty one.
        """
        if not isinstance(reason, str) or not reason:
            raise ConfigError(f"state.stop({reason!r}): say why the run ends, such as state.stop('pruned')")
        self.stop_flag.request(reason)

    @property
    def model(self) -> Replica:
        """Returns the replica that is trained."""
        return self.strategy.model

    @property
    def num_workers(self) -> int:
        """Returns the number of processes that compute gradients: the ranks, unless those are servers."""
        part = current_role()
        return self.comm.world_size if part is None else part.num_workers

    @property
    def masters(self) -> Mapping[Tensor, nn.Parameter]:
        """Returns the master weights, by parameter, of those that have one."""
        return self.strategy.masters.of if isinstance(self.strategy, Replicated) else {}

    @property
    def reported(self) -> dict[str, float]:
        """Returns the metrics of the latest evaluation that are for the report alone, because others choose."""
        others = self.main_metric.partition("_")[0], "training"
        return {name: value for name, value in self.evaluation.items() if name.partition("_")[0] not in others}

    @property
    def epochs_done(self) -> float:
        """Returns the number of epochs trained so far, as a fraction."""
        position = self.sampler.state
        return position.epoch + position.consumed / self.sampler.length

    @property
    def epoch(self) -> int:
        """Returns the epoch that the next step belongs to."""
        return self.sampler.state.epoch

    def frozen(self) -> set[str]:
        """Returns the names of the parameters that need no gradient now."""
        return {name for name, parameter in self.model.module.named_parameters() if not parameter.requires_grad}

    def position(self) -> dict[str, Any]:
        """Returns step, sampler position and latest metrics, valid at any world size."""
        return {
            "step": self.step,
            "sampler": self.sampler.state_dict(),
            "train_loss": self.train_loss,
            "base_rates": self.rates.adopted(),
            "evaluation": dict(self.evaluation),
            "evaluated_at": self.evaluated_at,
            "history": list(self.history),
        }

    def load_position(self, position: Mapping[str, Any]) -> None:
        """Continues from a result of `position`."""
        self.sampler.load_state_dict(position["sampler"])  # first, because it may refuse
        self.step, self.train_loss = int(position["step"]), position["train_loss"]
        # Checkpoints of the first version have no metrics, and those of later ones no history.
        self.history = list(position.get("history", ()))
        self.evaluation, self.evaluated_at = dict(position.get("evaluation", {})), position.get("evaluated_at", -1)


@dataclass(frozen=True)
class StepReport:
    """Figures of one step: global numbers, and this rank's times.

    Attributes:
        step: its number, from 1.
        loss: mean over all samples (or tokens) of the global batch.
        num_items: number of samples (or tokens) in that mean, or the sum of their weights.
        num_samples: samples of the global batch.
        parts: squared norms of gradients of parts of the batch, if they were measured.
        gradient_norm: of the global mean gradient, before clipping.
        rate: learning rate of the first parameter group.
        num_stopping: number of ranks that want to stop after this step.
        num_ending: number of ranks whose stream ends with this step.
        micros: this rank's samples.
        step_s: whole step; data_s: waiting for data during it; wait_s: waiting for other ranks during it.
    """

    step: int
    epoch: int
    loss: float
    num_items: float
    num_samples: int
    parts: Parts | None
    gradient_norm: float
    rate: float
    step_s: float
    data_s: float
    wait_s: float
    num_ending: int = 0
    micros: Sequence[Micro] = ()
    num_stopping: int = 0


def loading(source: Source, comm: Communicator, stop: StopFlag | None) -> dict[str, Any]:
    """Returns the arguments of every loader of these samples on this rank.

    It waits for its loader processes as long as for other ranks, and less if it is to stop.
    """
    limits = Limits(comm.rank, comm.warn_s, comm.abort_s, lambda: "" if stop is None else stop.signal_name)
    given = {"collate": source.collate, "num_workers": source.num_workers, "processes": source.processes}
    return {**given, "device": comm.device, "limits": limits}


def agreed_reason(state: TrainState) -> str:
    """Returns, on every rank, the reason of the lowest rank that wants to stop; "" if none does. Collective.

    A signal on any rank comes before the wish of a callback, because it asks the program to stop, too.
    """
    reasons = filter(None, all_gather_object(state.comm, state.stop_flag.reason))
    return min(reasons, key=lambda reason: not is_signal(reason), default="")  # the first one of the least


# --- Callbacks --------------------------------------------------------------------------------------------------------


class Callback:
    """Base class, a no-op at each of the eleven moments; override those that you need.

    A callback may change weights, optimizer and learning rate, identically on all ranks; the change holds from the next
    step on. A schedule continues in proportion from a rate that a callback has set; torch's schedulers continue as
    in torch. One that wants to end the run calls `state.stop`, on any rank.
    """

    def fit_start(self, state: TrainState) -> None:
        """Runs before the first step, also of a resumed run, whose `state.step` is not 0.

        The optimizer of a resumed run has the parameter groups that callbacks had added to it.
        """

    def step_start(self, state: TrainState) -> None:
        """Runs before each step."""

    def step_end(self, state: TrainState, report: StepReport) -> None:
        """Runs after a step was committed."""

    def step_left_out(self, state: TrainState, epoch: int) -> None:
        """Runs in the place of `step_end` after a step that `ddp.Guard` has left out; its samples count as seen."""

    def went_back(self, state: TrainState) -> None:
        """Runs once `ddp.Guard` has made the state that of an earlier checkpoint; `load_state_dict` runs afterwards."""

    def evaluated(self, state: TrainState) -> None:
        """Runs after an evaluation; its metrics are in `state.evaluation`."""

    def logged(self, state: TrainState, entry: Mapping[str, Any]) -> None:
        """Runs with each object of metrics.jsonl, also where none is written: of some steps, and of each evaluation.

        Its `kind` is "step", "evaluation" or "report", its `step` the number of steps made; all else are numbers.
        """

    def checkpoint_saved(self, state: TrainState, path: Path) -> None:
        """Runs after a checkpoint was written to the folder `path`, as rank 0 names it from the root on.

        The run keeps a few checkpoints, so that a later one may replace this one: copy it if it has to stay. One
        that was saved without a metric may be written once more with it.
        """

    def exception(self, state: TrainState, error: BaseException) -> None:
        """Runs before an error ends the run. It must not run collectives, because the ranks may no longer agree."""

    def fit_end(self, state: TrainState) -> None:
        """Runs after the last step and its checkpoint, also when the run stops early."""

    def finished(self, state: TrainState, summary: Mapping[str, Any]) -> None:
        """Runs last of all, once summary.json and curves.png are written; `summary` is the content of the former.

        Those of trackers run after all others, so that they see an error in another one.
        """

    def evaluating(self, state: TrainState) -> AbstractContextManager[None]:
        """Returns a context for each evaluation, such as one with other weights; it leaves all as it was."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run: tensors and plain values in any nested form. Rank 0's is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` has returned. Runs once `fit_start` of all callbacks has run."""


class BatchCallback(Callback):
    """A callback that also reads each batch of this rank before it is used."""

    def begin(self, task: Task | None, num_steps: int) -> None:
        """Begins with a run of this length, before `fit_start`."""

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Reads a batch, before the bare model gets it."""


def notify_of(error: BaseException, state: TrainState, callbacks: Sequence[Callback]) -> None:
    """Runs `exception` of each callback, in their order, also after one that raises; the error follows."""
    with ExitStack() as pending:
        for callback in reversed(callbacks):
            pending.callback(callback.exception, state, error)


EARLY = "early stopping"
"""`stopped_by` of a run that has ended like this."""
MEASURED = "measured"
"""`stopped_by` of a run that was there to be measured (`reports/profiler.py`), of which no checkpoint is wanted."""


class EarlyStopping(Callback):
    """Ends the run after `patience` evaluations in a row without a better main metric. `stopped_by` says so.

    The metric is the one that decides which checkpoint is the best. It is the same number on all ranks, so they end
    together. A resumed run continues to count; a larger patience resumes a run that has ended early.

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


# --- An exponential moving average of the weights --------------------------------------------------------------------
#
#     average ← decay · average + (1 − decay) · weights        after each step; after the first one: the weights
#
# Averaged weights often do better than the last ones, because the noise of single steps averages out. torch's
# `AveragedModel` does the work. Its buffers, such as BatchNorm's statistics, are those of the model. With
# precision="bf16_pure" the master weights are averaged.
#
# Cost: a float32 copy of the parameters on every rank, which is read and written in each step.


class EMA(Callback):
    """Averages the weights over the steps. Evaluations use the averages, and so the best checkpoint is chosen by them.

    `ddp.load(run).weights` are the averages, too; training itself never uses them. A resumed run continues them;
    any other fit starts from the weights.

    Args:
        decay: share of the average that a step keeps, from 0 up and below 1: it averages over about 1 ÷ (1 − decay)
            steps.

    Attributes:
        averaged: torch's `AveragedModel`, from the first step on; `averaged.module` is the model with averaged weights.

    Raises:
        ConfigError: that is no such share.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigError(f"decay={decay!r}: must be a number from 0 up and below 1, such as 0.999")
        self._average = get_ema_multi_avg_fn(decay)
        self.averaged: AveragedModel | None = None

    def fit_start(self, state: TrainState) -> None:
        check_untied(state.model.module, "EMA", instead="no EMA", buffers_alone=True)
        try:
            self.averaged = AveragedModel(state.model.module, multi_avg_fn=self._average)
        except (RuntimeError, TypeError) as error:  # of copy.deepcopy
            reason = str(error).partition(". ")[0]
            raise ConfigError(
                f"EMA needs a copy of the model {type(state.model.module).__name__}, which copy.deepcopy cannot make "
                f"({reason}): let it hold no lock, file or computed tensor, and for weight norm take "
                "torch.nn.utils.parametrizations.weight_norm"
            ) from error
        for average, weights in zip(self.averaged.module.parameters(), _weights(state), strict=True):
            average.data = weights.detach().clone()

    @torch.no_grad()
    def step_end(self, state: TrainState, report: StepReport) -> None:
        # as `update_parameters` of AveragedModel, which keeps the host waiting for a GPU
        assert self.averaged is not None
        averages, weights = list(self.averaged.parameters()), list(_weights(state))
        if self.averaged.n_averaged:
            for (into, now), _ in _group_tensors_by_device_and_dtype([averages, weights]).values():  # type: ignore
                self._average(into, now, self.averaged.n_averaged)
        else:
            _copy(averages, weights)
        _copy(list(self.averaged.module.buffers()), list(state.model.module.buffers()))
        self.averaged.n_averaged += 1

    @contextmanager
    def evaluating(self, state: TrainState) -> Iterator[None]:
        assert self.averaged is not None
        if not self.averaged.n_averaged:
            yield
            return
        # Their memory is exchanged, and not written to: with central storage other ranks have it, too.
        parameters = list(state.model.module.parameters())
        before = [parameter.data for parameter in parameters]
        for parameter, average in zip(parameters, self.averaged.module.parameters(), strict=True):
            parameter.data = average.detach().to(parameter)
        try:
            yield
        finally:
            for parameter, data in zip(parameters, before, strict=True):
                parameter.data = data

    def state_dict(self) -> dict[str, Any]:
        return {} if self.averaged is None else dict(self.averaged.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.averaged is not None
        self.averaged.load_state_dict(state)


def _weights(state: TrainState) -> Iterator[Tensor]:
    """Yields the parameters, or their masters."""
    return (state.masters.get(parameter, parameter) for parameter in state.model.module.parameters())


@torch.no_grad()
def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if into:
        torch._foreach_copy_(list(into), list(values))
