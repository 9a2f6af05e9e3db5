"""`ddp.Profiler` finds out where the time of a step goes, and leaves it in the run's folder.

    step 1 … 5           warm-up: buckets are planned, links are measured, caches fill
    step 6 … 5 + n       each rank notes phases, calls and waits             → profile.json
    the n after those    torch's profiler records each operation             → traces/rank-R.json

Steps count from where the run begins or resumes. The traces are of steps of their own, because recording each operation
takes time, which would be counted. The other steps are as without a profiler.

With `seconds` the run is there to be measured, and ends after them. The steps that are noted are spread evenly over
that time: as soon as there are 2 n, every other one is dropped, and from then on half as many are noted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ddp.comm.calibrate import Curve
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.errors import ConfigError
from ddp.process.clock import now_s
from ddp.process.files import if_possible
from ddp.process.log import log
from ddp.process.memory import available_cores
from ddp.train.monitor.clock import between, compare_clocks
from ddp.train.monitor.parts import RawStep, last_begun, spans_of
from ddp.train.monitor.profile import (
    FILE,
    PARTS,
    VERSION,
    BucketTimes,
    ClockOffset,
    NetworkFigures,
    Profile,
    RankStep,
)
from ddp.train.monitor.recording import Recording, later
from ddp.train.monitor.traces import FOLDER, Trace
from ddp.train.steps.callbacks import MEASURED, Callback
from ddp.train.steps.state import StepReport, TrainState, unmeasured

WARM_UP = 5
LEAST = 3
"""Steps that are measured, however long they take."""


class Profiler(Callback):
    """Profiles some steps: `profile.json` says where their time goes, `traces/` has each operation of as many others.

    Args:
        steps: number of steps, from 1 up, after five that warm up.
        seconds: after the warm-up, with which the run ends, without a checkpoint and without traces; the steps are
            spread over them. None: the run continues.

    Raises:
        ConfigError: an argument is out of its range; the run has no folder.
    """

    def __init__(self, steps: int = 5, *, seconds: float | None = None) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ConfigError(f"steps={steps!r}: must be a whole number of steps from 1 up")
        if seconds is not None and (not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf):
            raise ConfigError(f"seconds={seconds!r}: must be a number above 0, or None")
        self._num_steps, self._seconds = steps, seconds
        self._forget()

    def _forget(self) -> None:
        self._num_made, self._every, self._is_over = 0, 1, False
        self._mine: list[dict[str, Any]] = []
        self._clocks: list[ClockOffset] = []
        self._trace: Trace | None = None

    def fit_start(self, state: TrainState) -> None:
        if state.run_dir is None:
            raise ConfigError("ddp.Profiler writes into the run's folder, and folder=None has none: name one")
        self._forget()  # it may have served another fit
        self._recording = Recording(state.comm)

    def step_start(self, state: TrainState) -> None:
        number = self._num_made - WARM_UP
        if number == 0:
            self._clocks = compare_clocks(state.comm)  # before, and once more after the last step
            self._began_s = now_s()
        if self._is_noted(number):
            state.phase = self._recording.phase
            self._recording.begin(state.step + 1)
        if number == self._num_steps and self._seconds is None:
            self._trace = Trace()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        number, self._num_made = self._num_made - WARM_UP, self._num_made + 1
        if self._seconds is not None and number >= LEAST and now_s() - self._began_s >= self._seconds:
            state.stop(MEASURED)
        if state.phase == unmeasured:
            return
        state.phase = unmeasured
        raw = self._recording.end()
        if raw is not None and self._trace is None:
            self._mine.append(_noted(state, report, raw))
        if self._seconds is None and number == 2 * self._num_steps - 1:
            self._leave(state)
        elif self._seconds is not None and len(self._mine) == 2 * self._num_steps:
            self._mine, self._every = self._mine[::2], 2 * self._every

    def _is_noted(self, number: int) -> bool:
        """Returns True for a step after the warm-up that is measured or traced."""
        if self._seconds is None:
            return 0 <= number < 2 * self._num_steps
        return number >= 0 and number % self._every == 0

    def fit_end(self, state: TrainState) -> None:
        if self._mine and not self._is_over:
            self._leave(state)
        elif not self._is_over and state.comm.rank == 0:
            log.warning("no profile: the run has ended within the %d steps of its warm-up", WARM_UP)

    def exception(self, state: TrainState, error: BaseException) -> None:
        state.phase, state.comm.history.recorder = unmeasured, None
        if self._trace is not None:
            self._trace.stop()

    def _leave(self, state: TrainState) -> None:
        """Writes what was found out. Collective."""
        self._is_over, comm, run_dir = True, state.comm, state.run_dir
        assert run_dir is not None
        if self._trace is not None:
            self._trace.stop()
        clocks = list(map(between, self._clocks, compare_clocks(comm)))
        if self._trace is not None:
            self._trace.write(run_dir / FOLDER / f"rank-{comm.rank}.json", clocks[comm.rank], comm.world_size)
        network = _network(state)
        everyone, cores = all_gather_object(comm, self._mine), all_gather_object(comm, available_cores())

        def write() -> None:
            steps = [_step(list(ranks), clocks) for ranks in zip(*everyone, strict=True)]
            with if_possible(run_dir / FILE):
                _profile(state, steps, clocks, network, [cores[host[0]] for host in comm.hosts]).write(run_dir)

        on_rank_zero(comm, write, label="writing the profile")


def _noted(state: TrainState, report: StepReport, raw: RawStep) -> dict[str, Any]:
    """Returns this rank's record of a step, in plain values."""
    model = state.model
    last = model.logging_data()
    return {
        "raw": raw,
        "step": report.step,
        "num_samples": sum(len(micro.indices) for micro in report.micros),
        "backward_began_s": last.get("began_s"),
        "buckets": last["buckets"],
    }


def _step(ranks: Sequence[dict[str, Any]], clocks: Sequence[ClockOffset]) -> list[RankStep]:
    """Returns a step of all ranks, on the clock of rank 0."""
    raws = [later(RawStep(*each["raw"]), clock.offset_s) for each, clock in zip(ranks, clocks, strict=True)]
    last_s, found = last_begun(raws), []
    for each, raw, clock in zip(ranks, raws, clocks, strict=True):
        spans = spans_of(raw, last_s)
        began_s = next((phase.began_s for phase in reversed(raw.phases) if phase.name == "backward"), raw.began_s)
        noted_s = each["backward_began_s"]
        if noted_s is not None and noted_s + clock.offset_s >= raw.began_s:  # else it is that of an earlier step
            began_s = noted_s + clock.offset_s
        offsets = accumulate((bucket["bytes"] for bucket in each["buckets"]), initial=0)
        parts = {f"{part}_s": sum(span.ended_s - span.began_s for span in spans if span.part == part) for part in PARTS}
        names = [name for name in BucketTimes.__dataclass_fields__ if name != "offset"]
        found.append(
            RankStep(
                step=each["step"],
                began_s=raw.began_s,
                num_samples=each["num_samples"],
                backward_began_s=began_s - raw.began_s,
                buckets=[
                    BucketTimes(offset=offset, **{name: bucket[name] for name in names})
                    for bucket, offset in zip(each["buckets"], offsets, strict=False)
                ],
                spans=spans,
                **parts,
            )
        )
    return found


def _network(state: TrainState) -> NetworkFigures | None:
    """Returns the calibrated figures of the links; None for one rank. Collective."""
    if state.comm.world_size == 1:
        return None
    measured = state.comm.plan.figures()
    links, memory, allocated = measured.network, measured.ordinary, measured.allocated
    return NetworkFigures(
        inside=links.inside,
        between=links.between,
        gamma_s=links.gamma_s,
        memory=_points(memory),
        allocated=_points(allocated),
    )


def _points(curve: Curve | None) -> list[tuple[int, float]] | None:
    return None if curve is None else list(zip(curve.nbytes, curve.seconds, strict=True))


def _profile(
    state: TrainState,
    steps: list[list[RankStep]],
    clocks: list[ClockOffset],
    network: NetworkFigures | None,
    cores: list[int],
) -> Profile:
    model, comm = state.model, state.comm
    return Profile(
        version=VERSION,
        model=type(model.module).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.module.parameters()),
        batch=sum(rank.num_samples for rank in steps[0]),
        world_size=comm.world_size,
        hosts=[list(host) for host in comm.hosts],
        threads=torch.get_num_threads(),
        cores=cores,
        device=str(comm.device),
        strategy=type(state.strategy).__name__,
        hook=None if model.compression is None else repr(model.compression.hook),
        wire=model.wire,
        algorithm=comm.plan.describe(),
        runs="in the background" if model.overlaps else "in the foreground",
        order=model.gradient_order or [],
        network=network,
        clock=clocks,
        steps=steps,
    )
