"""Notes phases, calls and waits of one rank in the steps that are profiled.

On the CPU each moment is a time of the process's clock. On a GPU it is an event of the current stream, which the host
does not wait for: its time is read once the step has ended. So phases are there as long as the GPU computes them, and
a wait as long as the stream stands still; a call has begun when its stream has reached it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd import profiler

from ddp.comm.communicator import Communicator
from ddp.comm.watch.call import Noted
from ddp.process import gpu
from ddp.process.clock import now_s
from ddp.train.monitor.parts import CallTimes, Phase, RawStep

Moment = Any  # a float, or an event
STEP_RANGE = "ProfilerStep#"  # torch's name, by which readers of traces find the steps


class Recording:
    """Notes what this rank does between `begin` and `end`.

    Args:
        comm: its calls are noted; its device says how moments are taken.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._is_on_gpu = comm, comm.device.type == gpu.KIND
        self._base: tuple[Moment, float] | None = None  # an event, and when it was
        self._clear()

    def _clear(self) -> None:
        self._phases: list[tuple[str, Moment, Moment]] = []
        self._calls: dict[Noted, list[Moment]] = {}  # in the order in which they begin; several threads add to it
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
        """Notes no more. Returns what was noted of the step, with times on this process's clock; None without one."""
        self._comm.history.recorder = None
        if self._is_on_gpu:
            self._synchronise()
        phases = [Phase(name, self._at_s(began), self._at_s(ended)) for name, began, ended in self._phases]
        step = next((phase for phase in phases if phase.name == "step"), None)
        if step is None:
            return None
        calls, exposed, counts = [], [(self._at_s(a), self._at_s(b)) for a, b in self._waits], dict[int, int]()
        for noted, moments in self._calls.items():
            call, times = noted.call, (self._at_s(moments[0]), self._at_s(moments[-1]))
            key = None
            if call.message is None:
                number = counts[call.sequence] = counts.get(call.sequence, -1) + 1
                key = None if call.operation == "chain" else (call.sequence, number)
            calls.append(CallTimes(key, *times))
            if not self._comm.runs_in_background(noted.thread):
                exposed.append(times)
        return RawStep(step.began_s, step.ended_s, phases, calls, exposed)

    # --- what is told ------------------------------------------------------------------------------------------------

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

    def began(self, noted: Noted) -> None:
        self._calls[noted] = [self._moment()]

    def ended(self, noted: Noted) -> None:
        if (moments := self._calls.get(noted)) is not None:  # else it had begun before the step
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
