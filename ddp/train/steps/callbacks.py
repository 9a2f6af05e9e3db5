"""Callbacks watch a run, and may change it: `Callback`, and two of them, `EarlyStopping` and `EMA`.

They get the run's state (`state.py`) at each of eleven moments:

    fit_start   step_start   step_end   evaluated   logged   checkpoint_saved   exception   fit_end   finished
    with a guard: step_left_out   went_back

Every rank runs its callbacks at the same moments. So a callback may run collectives, if it does so on all ranks. What
it returns from `state_dict` is saved with the run (`checkpoints/extra_state.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ddp.errors import ConfigError
from ddp.process.terminal import log
from ddp.replica.broadcast import check_untied
from ddp.replica.units import Units
from ddp.setting import Below1, FromZero, Natural, checked
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.steps.task import Task


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

    @checked
    def __init__(self, patience: Natural, *, min_delta: FromZero = 0.0) -> None:
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
            If no rank has a whole model, it is None, and each rank averages its slices.

    Raises:
        ConfigError: that is no such share.
    """

    @checked
    def __init__(self, decay: Below1 = 0.999) -> None:
        self._average = get_ema_multi_avg_fn(decay)
        self._averages: WholeAverages | SliceAverages | None = None

    @property
    def averaged(self) -> AveragedModel | None:
        return None if self._averages is None else self._averages.model

    def fit_start(self, state: TrainState) -> None:
        units = state.model.units
        self._averages = WholeAverages(state, self._average) if units is None else SliceAverages(units, self._average)

    @torch.no_grad()
    def step_end(self, state: TrainState, report: StepReport) -> None:
        assert self._averages is not None
        self._averages.update(state)

    def evaluating(self, state: TrainState) -> AbstractContextManager[None]:
        assert self._averages is not None
        return self._averages.replacing(state)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._averages is None else self._averages.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self._averages is not None
        self._averages.load_state_dict(state)


class WholeAverages:
    """The averages of a model that every rank has.

    Attributes:
        model: has the averages as its weights.

    Raises:
        ConfigError: the model cannot be copied.
    """

    def __init__(self, state: TrainState, average: Callable[..., None]) -> None:
        check_untied(state.model.module, "EMA", instead="no EMA", buffers_alone=True)
        self._average = average
        try:
            self.model = AveragedModel(state.model.module, multi_avg_fn=average)
        except (RuntimeError, TypeError) as error:  # of copy.deepcopy
            reason = str(error).partition(". ")[0]
            raise ConfigError(
                f"EMA needs a copy of the model {type(state.model.module).__name__}, which copy.deepcopy cannot make "
                f"({reason}): let it hold no lock, file or computed tensor, and for weight norm take "
                "torch.nn.utils.parametrizations.weight_norm"
            ) from error
        for mean, weights in zip(self.model.module.parameters(), _weights(state), strict=True):
            mean.data = weights.detach().clone()

    def update(self, state: TrainState) -> None:
        """Averages the weights of one more step."""
        # as `update_parameters` of AveragedModel, which keeps the host waiting for a GPU
        averages, weights = list(self.model.parameters()), list(_weights(state))
        if self.model.n_averaged:
            for (into, now), _ in _group_tensors_by_device_and_dtype([averages, weights]).values():  # type: ignore
                self._average(into, now, self.model.n_averaged)
        else:
            _copy(averages, weights)
        _copy(list(self.model.module.buffers()), list(state.model.module.buffers()))
        self.model.n_averaged += 1

    @contextmanager
    def replacing(self, state: TrainState) -> Iterator[None]:
        """Computes with the averages for a block."""
        if not self.model.n_averaged:
            yield
            return
        # Their memory is exchanged, and not written to: with central storage other ranks have it, too.
        parameters = list(state.model.module.parameters())
        before = [parameter.data for parameter in parameters]
        for parameter, average in zip(parameters, self.model.module.parameters(), strict=True):
            parameter.data = average.detach().to(parameter)
        try:
            yield
        finally:
            for parameter, data in zip(parameters, before, strict=True):
                parameter.data = data

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages."""
        return dict(self.model.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from such a state."""
        self.model.load_state_dict(state)


class SliceAverages:
    """The averages of a model that no rank has whole: each rank has those of its slices. Every method is collective.

    Attributes:
        num_averaged: number of steps.
    """

    model = None

    def __init__(self, units: Units, average: Callable[..., None]) -> None:
        self._units, self._average, self.num_averaged = units, average, 0
        self._means = [each.clone() for each in units.slices()]

    def update(self, _: TrainState) -> None:
        """Averages the weights of one more step.

        Raises:
            ConfigError: other parameters need a gradient now, so that slices are other ones.
        """
        now = self._units.slices()
        if list(map(len, now)) != list(map(len, self._means)):
            raise ConfigError(
                "EMA with strategy='fully_sharded': parameters were frozen or unfrozen, so that ranks keep other "
                "slices now; do so before the training, or leave EMA out"
            )
        if self.num_averaged:
            self._average(self._means, now, self.num_averaged)
        else:
            _copy(self._means, now)
        self.num_averaged += 1

    def replacing(self, _: TrainState) -> AbstractContextManager[None]:
        """Computes with the averages for a block."""
        return self._units.replaced(self._means) if self.num_averaged else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns what `AveragedModel` has as its state; on ranks other than 0, only the number of steps."""
        with self._units.replaced(self._means):
            whole = self._units.state(keep=self._units.comm.rank == 0)
        named = {f"module.{name}": value for name, value in whole.items()}
        return {"n_averaged": torch.tensor(self.num_averaged), **named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from such a state, which rank 0 has whole."""
        values = {name.removeprefix("module."): value for name, value in state.items()}
        self._means = [torch.empty_like(each) for each in self._units.slices()]
        self.num_averaged = int(state["n_averaged"])
        self._units.load_slices(values, self._means)


def _weights(state: TrainState) -> Iterator[Tensor]:
    """Yields the parameters, or their masters."""
    return (state.masters.get(parameter, parameter) for parameter in state.model.module.parameters())


@torch.no_grad()
def _copy(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if into:
        torch._foreach_copy_(list(into), list(values))
