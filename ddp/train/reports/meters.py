"""Measures a run while it trains: metrics.jsonl, and the figures in its lines.

    Throughput      samples per second, and shares of a step's time
    NoiseScale      the gradient noise scale, from the squared norms of gradients of parts of a batch
    Usage           processor, memory and device of each rank, and samples per second of its own time
    EpochCheck      the samples of an epoch, compared with its order
    MetricsFile     a line of all of these every few steps, and one for each evaluation

All ranks measure, and rank 0 writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.data.orders.order import Checksum
from ddp.process import gpu
from ddp.process.clock import now_s
from ddp.process.files import lines_of, to_append, write_whole
from ddp.process.memory import resident_bytes
from ddp.process.records import json_object, to_json
from ddp.process.terminal import log
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import StepReport, TrainState


class Throughput(Callback):
    """Adds up the samples of all ranks, and this rank's times: of a step, waiting for data, waiting for other ranks."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.step_s = self.data_s = self.wait_s = 0.0

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self.num_samples += report.num_samples
        self.step_s += report.step_s
        self.data_s += report.data_s
        self.wait_s += report.wait_s

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s if self.step_s else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Returns the shares of a step's time, in [0, 1]: all time but waiting is computing."""
        total = self.step_s or 1.0
        compute_s = max(0.0, self.step_s - self.wait_s - self.data_s)
        seconds = {"compute_fraction": compute_s, "wait_fraction": self.wait_s, "data_fraction": self.data_s}
        return {name: each / total for name, each in seconds.items()}


# --- The gradient noise scale: how large a batch is worth its samples (McCandlish et al., arXiv 1812.06162) -----------
#
# The gradient of n samples is the true gradient G and noise, whose variance is S ÷ n. So squared norms of gradients of
# parts of a batch and of all of it tell both apart (the paper's appendix A.1, for parts of any size). For the gradients
# gⱼ of P parts of nⱼ samples, and g of all n samples:
#
#     E ‖g‖²          =   ‖G‖²      +  S ÷ n
#     E Σ nⱼ ‖gⱼ‖²    =   ‖G‖² Σ nⱼ +  S P
#
# The noise scale is S ÷ ‖G‖². With a batch of this size, training to the same loss takes twice as many steps as with
# an endless one, and twice as many samples as with a tiny one: larger batches, and so more workers, buy less and less.
#
# One measurement of ‖G‖² is mostly noise, so means of both are taken over the last measurements, and then divided. Both
# fall by orders of magnitude in a run, while their quotient changes slowly. So each measurement is divided by the noise
# that the ones before it have shown; otherwise the first ones would outweigh all others.


DECAY = 0.98  # of the weight of a measurement, per measurement: the last 50 count
DECAY_OF_UNIT = 0.8
FEWEST = 10  # measurements before there is an estimate


class Estimate(NamedTuple):
    """A noise scale in samples.

    Attributes:
        scale, error: the noise scale, and its standard error; None where ‖G‖² does not stand out of the noise.
        above: there, a lower bound of the noise scale.
    """

    scale: float | None
    error: float | None
    above: float | None

    def in_words(self) -> str:
        """Returns the hint, with as many digits as mean something."""
        if self.scale is None or self.error is None:
            least = self.above or 0.0
            return f"critical batch above {_rounded(least, to=least):,}: up to there more workers pay"
        scale, error = _rounded(self.scale, to=self.error), _rounded(self.error, to=self.error)
        return f"critical batch ≈ {scale:,} ± {error:,}: beyond it workers buy less"


def _rounded(value: float, *, to: float) -> int:
    """Returns a value without the digits beyond the first one of `to`."""
    unit = int(10 ** math.floor(math.log10(max(to, 1.0))))
    return max(1, round(value / unit)) * unit


class NoiseScale(Callback):
    """Estimates the noise scale from the steps in which the parts of the batch were measured."""

    def __init__(self) -> None:
        self._weight, self._num = 0.0, 0
        self._unit = 0.0  # S, as recent measurements have shown it
        self._sums = np.zeros(2)  # of ‖G‖² and S, in units
        self._products = np.zeros((2, 2))

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if report.parts is None:
            return
        items_per_sample = (report.num_items or 1) / report.num_samples
        self.add(
            float(report.parts.squares) / items_per_sample,
            part_samples=report.parts.num_items / items_per_sample,
            num_parts=round(report.parts.num_parts),
            square=report.gradient_norm**2,
            num_samples=report.num_samples,
        )

    def add(
        self, part_squares: float, *, part_samples: float, num_parts: int, square: float, num_samples: float
    ) -> None:
        """Takes in a measurement; parts that are the whole batch tell nothing, and are left out.

        Args:
            part_squares: Σ nⱼ ‖gⱼ‖².
            part_samples: Σ nⱼ.
            square: ‖g‖².
            num_samples: n.
        """
        num_noises = num_parts - part_samples / num_samples
        if num_noises <= 0 or not math.isfinite(part_squares + square):
            return
        noise = (part_squares - part_samples * square) / num_noises
        unit, self._unit = self._unit, DECAY_OF_UNIT * (self._unit or noise) + (1 - DECAY_OF_UNIT) * noise
        if unit <= 0:
            return
        both = np.array([square - noise / num_samples, noise]) / unit
        self._sums, self._products = DECAY * self._sums + both, DECAY * self._products + np.outer(both, both)
        self._weight, self._num = DECAY * self._weight + 1.0, self._num + 1

    def figures(self) -> dict[str, float | None]:
        """Returns the figures measured so far, by name."""
        scale, error, above = self.estimate() or (None, None, None)
        return {"noise_scale": scale, "noise_scale_error": error, "noise_scale_above": above}

    def estimate(self) -> Estimate | None:
        """Returns the estimate; None before the first `FEWEST` measurements, or if all parts had equal gradients."""
        if self._num < FEWEST:
            return None
        mean = self._sums / self._weight
        covariance = (self._products / self._weight - np.outer(mean, mean)) / self._num_independent
        (signal, noise), spread = mean.tolist(), math.sqrt(max(0.0, covariance[0, 0]))
        if noise <= 0 or signal + 2 * spread <= 0:
            return None
        if signal <= 2 * spread:
            return Estimate(None, None, above=noise / (signal + 2 * spread))
        slope = np.array([-noise / signal, 1.0]) / signal  # of S ÷ ‖G‖²
        return Estimate(noise / signal, math.sqrt(max(0.0, float(slope @ covariance @ slope))), above=None)

    @property
    def _num_independent(self) -> float:
        """Returns how many measurements of equal weight would leave as much noise in the mean."""
        squares = (1 - DECAY ** (2 * self._num)) / (1 - DECAY**2)
        return max(1.0, self._weight**2 / squares - 1)


# --- Resources that each rank uses ------------------------------------------------------------------------------------
#
# logging step   10     20     30     40      …
# gathered        x                    x            once a second, counted in steps, so that all ranks do the same


EVERY_S = 1.0


class Usage:
    """Gathers the resources that each rank has used since the last time.

    The figures of all ranks travel together, about once a second and at logging steps alone: where one is to follow,
    every rank knows from what was gathered.
    """

    def __init__(self) -> None:
        self._num_lines = self._num_skipped = 0
        self._samples = self._own_s = 0.0
        self._since_s, self._cpu_s = now_s(), time.process_time()

    def figures(self, comm: Communicator, *, num_samples: int, own_s: float) -> dict[str, float]:
        """Returns figures by name and rank, as "cpu_use/rank_0"; none at most logging steps. Collective.

        Args:
            num_samples: of all ranks since the last logging step.
            own_s: in which this rank did not wait for others.
        """
        self._samples += num_samples / comm.world_size
        self._own_s += own_s
        self._num_lines += 1
        if self._num_lines <= self._num_skipped:
            return {}
        now, cpu_s = now_s(), time.process_time()
        elapsed_s = now - self._since_s or math.inf
        mine = {
            "cpu_use": (cpu_s - self._cpu_s) / elapsed_s,
            "memory_mb": resident_bytes() / 1e6,
            "samples_per_s": self._samples / self._own_s if self._own_s else 0.0,
            **_of_device(comm.device),
        }
        sent = [(elapsed_s, mine)]
        if comm.world_size > 1:
            sent = all_gather_object(comm, sent[0])
        line_s = max(seconds for seconds, _ in sent) / self._num_lines
        self._num_skipped = max(0, math.ceil(EVERY_S / line_s) - 1)
        self._num_lines, self._samples, self._own_s = 0, 0.0, 0.0
        self._since_s, self._cpu_s = now, cpu_s
        return {f"{name}/rank_{rank}": each[name] for name in mine for rank, (_, each) in enumerate(sent)}


def _of_device(device: torch.device) -> dict[str, float]:
    """Returns the memory that torch holds on a GPU, and where NVIDIA's library is installed, the share of busy time."""
    if device.type != gpu.KIND:
        return {}
    found = {"device_memory_mb": gpu.cuda.memory_reserved(device) / 1e6}
    try:
        return {**found, "device_use": gpu.cuda.utilization(device) / 100}
    except (AttributeError, ImportError, RuntimeError):
        return found


# --- Each epoch has its samples ---------------------------------------------------------------------------------------


class EpochCheck(Callback):
    """Compares each epoch with its order: number, sum and exclusive or of the numbers of its samples.

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


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


class Meters(NamedTuple):
    """Measures a run, on every rank.

    Attributes:
        last: the entries of the last step in metrics.jsonl, which rank 0 may be lost before it writes.
    """

    throughput: Throughput
    noise: NoiseScale
    epochs: EpochCheck
    last: list[dict[str, Any]]


class MetricsFile(Callback):
    """Appends to metrics.jsonl on rank 0: one object per logged step, per evaluation, and per report of the test set.

    A resumed run first drops the lines beyond its checkpoint, because those steps are about to happen again. A run that
    is complete already reports the same once more, which is not written twice.

    Args:
        path: of the file; None: nothing is written.
        callbacks: whose `logged` runs with each object.
    """

    def __init__(self, path: Path | None, meters: Meters, *, every: int, callbacks: Sequence[Callback] = ()) -> None:
        self._path, self._noise, self._every, self._recent = path, meters.noise, every, Throughput()
        self._callbacks, self._usage, self._last = callbacks, Usage(), meters.last

    def fit_start(self, state: TrainState) -> None:
        self.went_back(state)
        if state.comm.rank == 0 and self._path is not None and self._last:
            lines = map(json_object, lines_of(self._path) if self._path.exists() else ())
            held = [(line["kind"], line["step"]) for line in lines]
            for entry in self._last:  # of a step that is not repeated
                if entry["step"] <= state.step and (entry["kind"], entry["step"]) not in held:
                    self._write(entry)

    def went_back(self, state: TrainState) -> None:
        if state.comm.rank == 0 and self._path is not None:
            drop_after(state.step, self._path)

    def step_end(self, state: TrainState, report: StepReport) -> None:
        self._recent.step_end(state, report)
        if report.step % self._every:
            return
        recent, self._recent = self._recent, Throughput()
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
        self._last[:] = [each for each in self._last if each["step"] == known["step"]] + [known]
        if state.comm.rank == 0:
            self._write(known)
        for callback in self._callbacks:
            callback.logged(state, known)

    def _write(self, entry: dict[str, Any]) -> None:
        if self._path is not None:
            with to_append(self._path) as file:
                file.write(f"{to_json(entry)}\n")

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
