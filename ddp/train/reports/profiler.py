"""`ddp.Profiler` measures where the time of a step goes, and writes it into the run's folder.

    step 1 … 5           warm-up: buckets are planned, links are measured, caches fill
    step 6 … 5 + n       each rank records phases, calls and waits           → profile.json
    the n after those    torch's profiler records each operation             → traces/rank-R.json

Steps count from where the run begins or resumes. The traces are of steps of their own, because recording each operation
takes time, which would be counted. The other steps are as without a profiler.

With `seconds` the run is there to be measured, and ends after them. The recorded steps are spread evenly over
that time: as soon as there are 2 n, every other one is dropped, and from then on half as many are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object, on_rank_zero
from ddp.comm.watch.call import CallRecord
from ddp.errors import ConfigError
from ddp.process import gpu
from ddp.process.clock import now_s
from ddp.process.files import if_possible
from ddp.process.memory import available_cores
from ddp.process.terminal import log
from ddp.setting import Natural, Positive, checked
from ddp.train.reports.profile import (
    FILE,
    VERSION,
    CallTimes,
    ClockOffset,
    Phase,
    Profile,
    RankStep,
    RawStep,
    bucket_times,
    last_begun,
    spans_of,
)
from ddp.train.reports.traces import FOLDER, STEP_RANGE, Trace, between, compare_clocks
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

    @checked
    def __init__(self, steps: Natural = 5, *, seconds: Positive | None = None) -> None:
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
            self._mine.append(_record(state, report, raw))
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
        """Writes profile.json and traces. Collective."""
        self._is_over, comm, run_dir = True, state.comm, state.run_dir
        assert run_dir is not None
        if self._trace is not None:
            self._trace.stop()
        clocks = list(map(between, self._clocks, compare_clocks(comm)))
        if self._trace is not None:
            self._trace.write(run_dir / FOLDER / f"rank-{comm.rank}.json", clocks[comm.rank], comm.world_size)
        everyone, cores = all_gather_object(comm, self._mine), all_gather_object(comm, available_cores())

        def write() -> None:
            steps = [_step(list(ranks), clocks) for ranks in zip(*everyone, strict=True)]
            with if_possible(run_dir / FILE):
                _profile(state, steps, clocks, [cores[host[0]] for host in comm.hosts]).write(run_dir)

        on_rank_zero(comm, write, label="writing the profile")


def _record(state: TrainState, report: StepReport, raw: RawStep) -> dict[str, Any]:
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
        found.append(
            RankStep(
                step=each["step"],
                began_s=raw.began_s,
                num_samples=each["num_samples"],
                backward_began_s=began_s - raw.began_s,
                buckets=[bucket_times(bucket) for bucket in each["buckets"]],
                spans=spans,
            )
        )
    return found


def _profile(state: TrainState, steps: list[list[RankStep]], clocks: list[ClockOffset], cores: list[int]) -> Profile:
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
        clock=clocks,
        steps=steps,
    )


# --- Phases, calls and waits of one rank in a step --------------------------------------------------------------------
#
# On the CPU each moment is a time of the process's clock. On a GPU it is an event of the current stream, which the host
# does not wait for: its time is read once the step has ended. So phases are there as long as the GPU computes them, and
# a wait as long as the stream stands still; a call has begun when its stream has reached it.


Moment = Any  # a float, or an event


class Recording:
    """Records phases, calls and waits of this rank between `begin` and `end`.

    Args:
        comm: its calls are recorded; its device says how moments are taken.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._is_on_gpu = comm, comm.device.type == gpu.KIND
        self._base: tuple[Moment, float] | None = None  # an event, and when it was
        self._clear()

    def _clear(self) -> None:
        self._phases: list[tuple[str, Moment, Moment]] = []
        self._calls: dict[CallRecord, list[Moment]] = {}  # in the order in which they begin; several threads add to it
        self._waits: list[tuple[Moment, Moment]] = []

    def begin(self, step: int) -> None:
        """Notes from now on.

        Args:
            step: its number, for the range of a trace.
        """
        self._clear()
        self._step = step
        if self._is_on_gpu and self._base is None:
            self._synchronise()
            event = self._moment()
            self._synchronise()
            self._base = event, now_s()
        self._comm.history.recorder = self

    def end(self) -> RawStep | None:
        """Ends the recording. Returns the record of the step, with times on this process's clock; None without one."""
        self._comm.history.recorder = None
        if self._is_on_gpu:
            self._synchronise()
        phases = [Phase(name, self._at_s(began), self._at_s(ended)) for name, began, ended in self._phases]
        step = next((phase for phase in phases if phase.name == "step"), None)
        if step is None:
            return None
        calls, exposed, counts = [], [(self._at_s(a), self._at_s(b)) for a, b in self._waits], dict[int, int]()
        for record, moments in self._calls.items():
            call, times = record.call, (self._at_s(moments[0]), self._at_s(moments[-1]))
            key = None
            if call.message is None:
                number = counts[call.sequence] = counts.get(call.sequence, -1) + 1
                key = None if call.operation == "chain" else (call.sequence, number)
            calls.append(CallTimes(key, *times))
            if not self._comm.runs_in_background(record.thread):
                exposed.append(times)
        return RawStep(step.began_s, step.ended_s, phases, calls, exposed)

    # --- what is recorded --------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Begins a block that is a phase of the step; in a profile of torch's it is a range."""
        began = self._moment()
        try:
            with self._range(name) if profiler._is_profiler_enabled else nullcontext():
                yield
        finally:
            self._phases.append((name, began, self._moment()))

    def _range(self, name: str) -> AbstractContextManager[object]:
        return profiler.record_function(f"{STEP_RANGE}{self._step}" if name == "step" else f"ddp: {name}")

    def began(self, record: CallRecord) -> None:
        self._calls[record] = [self._moment()]

    def ended(self, record: CallRecord) -> None:
        if (moments := self._calls.get(record)) is not None:  # else it had begun before the step
            moments.append(self._moment())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = self._moment()
        try:
            yield
        finally:
            self._waits.append((began, self._moment()))

    # --- moments -----------------------------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        if not self._is_on_gpu:
            return now_s()
        event = gpu.cuda.Event(enable_timing=True)
        event.record(gpu.cuda.current_stream(self._comm.device))
        return event

    def _at_s(self, moment: Moment) -> float:
        if self._base is None:
            return float(moment)
        event, at_s = self._base
        return at_s + float(event.elapsed_time(moment)) / 1e3

    def _synchronise(self) -> None:
        gpu.cuda.synchronize(self._comm.device)


def later(step: RawStep, by_s: float) -> RawStep:
    """Returns the same step with all times later, which is how another clock has it."""
    return RawStep(
        step.began_s + by_s,
        step.ended_s + by_s,
        [Phase(name, began_s + by_s, ended_s + by_s) for name, began_s, ended_s in step.phases],
        [CallTimes(key, began_s + by_s, ended_s + by_s) for key, began_s, ended_s in step.calls],
        [(began_s + by_s, ended_s + by_s) for began_s, ended_s in step.exposed],
    )
