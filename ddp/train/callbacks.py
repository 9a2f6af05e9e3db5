"""Callbacks watch a run at six moments; this file has the base class, two meters, and metrics.jsonl.

    fit_start   step_start   step_end   evaluated   exception   fit_end

Every rank runs its callbacks at the same moments. So a callback may run collectives, if it does so on all ranks. What
it returns from `state_dict` is saved with the run (`kept.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ddp.process.files import json_object, read_own, to_append, write_whole
from ddp.train.monitor.noise_scale import NoiseScale
from ddp.train.monitor.throughput import Throughput
from ddp.train.state import StepReport, TrainState


class Callback:
    """Does nothing at any of the six moments; override what you need.

    A callback changes what it likes of weights, optimizer and learning rate, alike on all ranks: it holds from the next
    step on. A schedule goes on in proportion from a rate that a callback has set; torch's own go on as torch's do.
    """

    def fit_start(self, state: TrainState) -> None:
        """Runs before the first step, also of a resumed run, whose `state.step` is not 0.

        The optimizer of a resumed run has the parameter groups that callbacks had added to it.
        """

    def step_start(self, state: TrainState) -> None:
        """Runs before each step."""

    def step_end(self, state: TrainState, report: StepReport) -> None:
        """Runs after a step was committed."""

    def evaluated(self, state: TrainState) -> None:
        """Runs after an evaluation; its metrics are in `state.evaluation`."""

    def exception(self, state: TrainState, error: BaseException) -> None:
        """Runs before an error ends the run. It must not run collectives, because the ranks may no longer agree."""

    def fit_end(self, state: TrainState) -> None:
        """Runs after the last step, also when the run stops early."""

    def evaluating(self, state: TrainState) -> AbstractContextManager[None]:
        """Returns a context for each evaluation, such as one with other weights; it leaves all as it was."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run: tensors and plain values in any nested form. Rank 0's is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` has returned. Runs once `fit_start` of all callbacks has run."""


class ThroughputMeter(Callback):
    """Adds up samples and times of all steps of this run, and of those since the last entry in metrics.jsonl."""

    def __init__(self) -> None:
        self.whole, self.recent = Throughput(), Throughput()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        for meter in (self.whole, self.recent):
            meter.add(report.num_samples, step_s=report.step_s, data_s=report.data_s, wait_s=report.wait_s)


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


class MetricsFile(Callback):
    """Appends to metrics.jsonl on rank 0: one object per logged step, per evaluation, and per report of the test set.

    A resumed run first drops what lies beyond its checkpoint, because those steps are about to happen again. A run that
    is complete already reports the same once more, which is not written twice.
    """

    def __init__(self, path: Path, meter: ThroughputMeter, noise: NoiseMeter, *, every: int) -> None:
        self._path, self._meter, self._noise, self._every = path, meter, noise, every

    def fit_start(self, state: TrainState) -> None:
        if state.comm.rank == 0 and self._path.exists():
            lines = read_own(self._path).splitlines()
            write_whole(self._path, "".join(f"{line}\n" for line in lines if _step_of(line) <= state.step))

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if report.step % self._every:
            return
        recent, self._meter.recent = self._meter.recent, Throughput()
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
                "wait_fraction": recent.wait_fraction,
                "data_fraction": recent.data_fraction,
            },
        )

    def evaluated(self, state: TrainState) -> None:
        self._append(state, {"kind": "evaluation", **_where(state), **state.evaluation})

    def fit_end(self, state: TrainState) -> None:
        if reported := state.reported:
            self._append(state, {"kind": "report", **_where(state), **reported})

    def _append(self, state: TrainState, entry: dict[str, Any]) -> None:
        if state.comm.rank == 0:
            line = json.dumps({key: value for key, value in entry.items() if value is not None})
            if entry["kind"] != "report" or not (self._path.exists() and line in read_own(self._path).splitlines()):
                with to_append(self._path) as file:
                    file.write(f"{line}\n")


def _where(state: TrainState) -> dict[str, int]:
    return {"step": state.step, "samples": state.sampler.position, "epoch": state.epoch}


def _step_of(line: str) -> float:
    """Returns the step of a line, or infinity for a line that a crash cut off."""
    try:
        return float(json_object(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
