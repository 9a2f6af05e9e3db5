"""Callbacks watch a run at eleven moments; this file has the base class, what measures a run, `EarlyStopping`, `EMA`.

    fit_start   step_start   step_end   evaluated   logged   checkpoint_saved   exception   fit_end   finished
    with a guard: step_left_out   went_back

Every rank runs its callbacks at the same moments. So a callback may run collectives, if it does so on all ranks. What
it returns from `state_dict` is saved with the run (`checkpoints/extra_state.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.data.orders.order import Checksum
from ddp.errors import ConfigError
from ddp.process.files import lines_of, to_append, write_whole
from ddp.process.log import log
from ddp.process.records import json_object, to_json
from ddp.replica.broadcast import check_untied
from ddp.train.monitor.noise_scale import NoiseScale
from ddp.train.monitor.usage import Usage
from ddp.train.steps.state import StepReport, TrainState
from ddp.train.tasks.task import Task


class Callback:
    """Does nothing at any of the eleven moments; override what you need.

    A callback changes what it likes of weights, optimizer and learning rate, identically on all ranks: it holds from
    the next step on. A schedule goes on in proportion from a rate that a callback has set; torch's own go on as torch's
    do. One that wants to end the run calls `state.stop`, on any rank.
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

        The run keeps a few checkpoints, so that a later one may replace this one: copy what has to stay. One that was
        saved without a metric may be written once more with it.
        """

    def exception(self, state: TrainState, error: BaseException) -> None:
        """Runs before an error ends the run. It must not run collectives, because the ranks may no longer agree."""

    def fit_end(self, state: TrainState) -> None:
        """Runs after the last step and its checkpoint, also when the run stops early."""

    def finished(self, state: TrainState, summary: Mapping[str, Any]) -> None:
        """Runs last of all, once summary.json and curves.png are written; `summary` is what the former holds.

        Those of trackers run after all others, so that an error in another one is told there.
        """

    def evaluating(self, state: TrainState) -> AbstractContextManager[None]:
        """Returns a context for each evaluation, such as one with other weights; it leaves all as it was."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run: tensors and plain values in any nested form. Rank 0's is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` has returned. Runs once `fit_start` of all callbacks has run."""


class BatchCallback(Callback):
    """A callback that also looks at each batch of this rank before it is used."""

    def begin(self, task: Task | None, num_steps: int) -> None:
        """Begins with a run of this length, before `fit_start`."""

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Looks at a batch, before the bare model gets it."""


def tell_of(error: BaseException, state: TrainState, callbacks: Sequence[Callback]) -> None:
    """Runs `exception` of each callback, in their order, also after one that raises; that is raised once all know."""
    with ExitStack() as untold:
        for callback in reversed(callbacks):
            untold.callback(callback.exception, state, error)


class Throughput:
    """Adds up the samples of all ranks, and this rank's times: of a step, waiting for data, waiting for other ranks."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.step_s = self.data_s = self.wait_s = 0.0

    def add(self, report: StepReport) -> None:
        """Counts one step."""
        self.num_samples += report.num_samples
        self.step_s += report.step_s
        self.data_s += report.data_s
        self.wait_s += report.wait_s

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s if self.step_s else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Returns the shares of a step's time, in [0, 1]: computing is what is not waiting."""
        total = self.step_s or 1.0
        compute_s = max(0.0, self.step_s - self.wait_s - self.data_s)
        seconds = {"compute_fraction": compute_s, "wait_fraction": self.wait_s, "data_fraction": self.data_s}
        return {name: each / total for name, each in seconds.items()}


class ThroughputMeter(Callback):
    """Adds up samples and times of all steps of this run, and of those since the last entry in metrics.jsonl."""

    def __init__(self) -> None:
        self.whole, self.recent = Throughput(), Throughput()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        for meter in (self.whole, self.recent):
            meter.add(report)


class NoiseMeter(Callback):
    """Estimates the gradient noise scale from the steps in which the parts of the batch were measured."""

    def __init__(self) -> None:
        self.scale = NoiseScale()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if report.parts is None:
            return
        items_per_sample = (report.num_items or 1) / report.num_samples
        self.scale.add(
            float(report.parts.squares) / items_per_sample,
            part_samples=report.parts.num_items / items_per_sample,
            num_parts=round(report.parts.num_parts),
            square=report.gradient_norm**2,
            num_samples=report.num_samples,
        )

    def figures(self) -> dict[str, float | None]:
        """Returns the figures measured so far, by name."""
        scale, error, above = self.scale.estimate() or (None, None, None)
        return {"noise_scale": scale, "noise_scale_error": error, "noise_scale_above": above}


class EpochCheck(Callback):
    """Compares each epoch with what its order promises: number, sum and exclusive or of the numbers of its samples.

    That costs 15 µs a step and one message an epoch. An order of this package cannot fail it; one of the user's own, or
    a sharding function, can.

    Attributes:
        num_checked, num_as_promised: epochs so far.
    """

    def __init__(self) -> None:
        self.num_checked = self.num_as_promised = 0

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self.step_left_out(state, report.epoch)

    def step_left_out(self, state: TrainState, epoch: int) -> None:
        if not state.sampler.at_epoch_end:
            return
        seen = state.sampler.take_seen()
        expected = state.sampler.expected(epoch)
        parts = all_gather_object(state.comm, seen)
        if expected is None or None in parts:
            return
        found = reduce(Checksum.with_, (Checksum(*each) for each in parts))
        self.num_checked += 1
        self.num_as_promised += found == expected
        if found != expected and state.comm.rank == 0:
            log.warning(
                "epoch %d was not what its order (%s) promises: %s in the place of %s; some samples were read twice or "
                "never. The order must return one sample for each position, the same at each call.",
                *(epoch, state.sampler.order.in_words(), found, expected),
            )


class Meters(NamedTuple):
    """Measures a run, on every rank."""

    throughput: ThroughputMeter
    noise: NoiseMeter
    epochs: EpochCheck


class MetricsFile(Callback):
    """Appends to metrics.jsonl on rank 0: one object per logged step, per evaluation, and per report of the test set.

    A resumed run first drops what lies beyond its checkpoint, because those steps are about to happen again. A run that
    is complete already reports the same once more, which is not written twice.

    Args:
        path: of the file; None: nothing is written.
        callbacks: told of each object.
    """

    def __init__(self, path: Path | None, meters: Meters, *, every: int, callbacks: Sequence[Callback] = ()) -> None:
        self._path, self._meter, self._noise, self._every = path, meters.throughput, meters.noise, every
        self._callbacks, self._usage = callbacks, Usage()

    def fit_start(self, state: TrainState) -> None:
        if state.comm.rank == 0 and self._path is not None:
            drop_after(state.step, self._path)

    went_back = fit_start

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if report.step % self._every:
            return
        recent, self._meter.recent = self._meter.recent, Throughput()
        own_s = recent.step_s - recent.wait_s
        used = self._usage.figures(state.comm, num_samples=recent.num_samples, own_s=own_s)
        self._append(
            state,
            {
                "kind": "step",
                "step": report.step,
                "samples": state.sampler.position,
                "epoch": report.epoch,
                "train_loss": report.loss,
                "lr": report.rate,
                "gradient_norm": report.gradient_norm,
                **self._noise.figures(),
                "samples_per_s": recent.samples_per_s,
                "wait_fraction": recent.shares["wait_fraction"],
                "data_fraction": recent.shares["data_fraction"],
                **used,
            },
        )

    def evaluated(self, state: TrainState) -> None:
        self._append(state, {"kind": "evaluation", **_where(state), **state.evaluation})

    def fit_end(self, state: TrainState) -> None:
        if reported := state.reported:
            entry = {"kind": "report", **_where(state), **reported}
            if on_rank_zero(state.comm, lambda: not self._holds(entry), label="a report"):
                self._append(state, entry)

    def _append(self, state: TrainState, entry: dict[str, Any]) -> None:
        known = {key: value for key, value in entry.items() if value is not None}
        if state.comm.rank == 0 and self._path is not None:
            with to_append(self._path) as file:
                file.write(f"{to_json(known)}\n")
        for callback in self._callbacks:
            callback.logged(state, known)

    def _holds(self, entry: dict[str, Any]) -> bool:
        """Returns True if this line is in the file."""
        path = self._path
        return path is not None and to_json(entry) in lines_of(path)


def _where(state: TrainState) -> dict[str, int]:
    return {"step": state.step, "samples": state.sampler.position, "epoch": state.epoch}


def drop_after(step: int, path: Path) -> None:
    """Drops the lines of a file, if there is one, that belong to later steps, and one that a crash cut off."""
    if path.exists():
        write_whole(path, "".join(f"{line}\n" for line in lines_of(path) if _step_of(line) <= step))


def _step_of(line: str) -> float:
    """Returns the step of a line, or infinity for a line that a crash cut off."""
    try:
        return float(json_object(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


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
    any other fit begins anew.

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
