"""Stopping early, by agreement: a signal sets a flag, the flag rides with the next step, all ranks act on the sum.

If one rank simply left, the others would hang in their next collective. So the handler only sets a flag. The step's
totals tell every rank that some rank wants to stop, and all of them leave the loop after the same step and save. A
second signal ends the process at once, as it would have without the handler.

Note "echoes". One wish to stop often arrives several times: process managers signal every process of a job, the
launcher passes on what it got, and Linux sends the parent-death signal once for each thread of the parent. So signals
within `ECHO_S` of the first one are the same wish.

Note "the program". A signal asks the program to stop, and not one fit of it. So a program in which a signal has ended a
fit, such as a loop over folds, ends where it begins the next one. Input at a prompt, or a cell of a notebook, is a
program by itself: a loop there ends, and the next input runs.

Note "handlers of libraries". submitit answers SIGUSR2 by its own handler: rank 0's requeues the job and ends the
process. If it ran in the midst of a step, the other ranks would lose rank 0, and the new run the steps since the last
checkpoint. So a fit takes the place of a handler that an installed library has set, stops in agreement, saves, writes
its results, and then lets that handler have the signal: on every rank, also where it came to another one alone. A
handler of the user's own program keeps its signal, except for SIGTERM and SIGINT.

| signal           | who sends it                             | it asks to stop                         | library's |
|------------------|------------------------------------------|-----------------------------------------|-----------|
| SIGINT           | Ctrl-C                                   | unless it is ignored (`sh -c 'job &'`)  | never     |
| SIGTERM          | process managers                         | unless it is ignored                    | afterward |
| SIGHUP           | a terminal that closes                   | unless it is ignored (`nohup`) or the   | afterward |
| SIGUSR1, SIGUSR2 | Slurm, submitit: "your time is up soon"  | user's program has its own handler      | afterward |
"""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ddp.comm.meeting.membership import RESIZE
from ddp.process.clock import now_s
from ddp.process.stack import is_installed

ECHO_S = 3.0


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask this process to stop: see the table above."""
    always, if_free = (signal.SIGTERM, signal.SIGINT), (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    caught = _caught_by_anyone()
    return [number for number in always if signal.getsignal(number) is not signal.SIG_IGN] + [
        number for number in if_free if signal.getsignal(number) is signal.SIG_DFL and number not in caught
    ]


def _handled_by_libraries() -> dict[signal.Signals, Any]:
    """Returns the handlers that installed libraries have set, by signal (note "handlers of libraries")."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    return {number: handler for number in numbers if _is_of_a_library(handler := signal.getsignal(number))}


def _is_of_a_library(handler: Any) -> bool:
    code = getattr(handler, "__code__", getattr(type(handler).__call__, "__code__", None))
    return isinstance(code, CodeType) and is_installed(code.co_filename)


def hears_signals() -> bool:
    """Returns True in the main thread, the only one whose handlers Python lets a program set."""
    return threading.current_thread() is threading.main_thread()


def _caught_by_anyone() -> set[int]:
    """Returns the signals that have a handler, also one in C that Python does not know of (faulthandler.register)."""
    with suppress(OSError):  # Linux only
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                mask = int(line.split()[1], 16)
                return {number for number in range(1, mask.bit_length() + 1) if mask >> (number - 1) & 1}
    return set()


Program = CodeType | None
_obeyed: list[tuple[signal.Signals, Program]] = []  # those that have ended a fit, on any rank, and of which program


def is_signal(reason: str) -> bool:
    """Returns True if this is the name of a signal: a run that has stopped for that reason may continue."""
    return reason in signal.Signals.__members__


def has_obeyed(reason: str) -> bool:
    """Remembers that a fit has ended for this reason, and returns True, if it is a signal (note "the program")."""
    if is_signal(reason):
        _obeyed.append((signal.Signals[reason], _program()))
    return is_signal(reason)


def _program() -> Program:
    """Returns the code that the user has started, if there is any: a script, or the input at a prompt."""
    namespace, frame = vars(sys.modules["__main__"]), sys._getframe().f_back
    while frame is not None and (frame.f_globals is not namespace or frame.f_code.co_flags & inspect.CO_OPTIMIZED):
        frame = frame.f_back  # that of a function, or of a library
    return None if frame is None else frame.f_code


def flag_of_a_new_fit() -> StopFlag:
    """Returns a flag for signals to set.

    Raises:
        KeyboardInterrupt, SystemExit: a signal has ended an earlier fit, SIGINT or another one (note "the program").
    """
    number = next((number for number, program in _obeyed if program is _program()), None)
    if number is None:
        return StopFlag()
    if number is signal.SIGINT:
        raise KeyboardInterrupt("SIGINT has ended a fit of this program, or of this cell, so it begins no other one")
    raise SystemExit(128 + number)


class StopFlag:
    """A rank's wish to stop, and its reason."""

    def __init__(self) -> None:
        self.reason = ""
        self.agreed = ""  # for which all ranks have stopped
        self.leave: Callable[[str], object] | None = None  # decides what becomes of a signal, in place of `request`
        self._first_signal_s: float | None = None
        self._got: set[int] = set()
        self._of_libraries: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.reason)

    @property
    def signal_name(self) -> str:
        """Returns the signal that asks to stop; "" where none or a callback does, which can wait for its step."""
        return self.reason if is_signal(self.reason) else ""

    def request(self, reason: str) -> None:
        """Asks to stop after the running step. The first reason of the highest rank stands."""
        if weight(reason) > weight(self.reason):
            self.reason = reason

    def forget(self, reason: str) -> None:
        """Takes back a wish to stop for this reason."""
        if self.reason == reason:
            self.reason = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turns the signals that ask to stop into a request, for the duration of the block. Only in the main thread."""
        if not hears_signals():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def before_libraries(self) -> Iterator[None]:
        """Lets signals wait until the end of the block if a library handles them (note "handlers of libraries")."""
        if not hears_signals():
            yield
            return
        self._of_libraries = _handled_by_libraries()
        for number in self._of_libraries:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            handlers, self._of_libraries = self._of_libraries, {}
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for number in handlers:
                if number in self._got or number.name == self.agreed:
                    signal.raise_signal(number)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._got.add(number)
        if self._first_signal_s is None:
            self._first_signal_s = now_s()
        elif now_s() - self._first_signal_s > ECHO_S:
            signal.signal(number, self._of_libraries.pop(signal.Signals(number), signal.SIG_DFL))  # for this once
            signal.raise_signal(number)
        (self.leave or self.request)(signal.Signals(number).name)


def weight(reason: str) -> int:
    """Returns how much a reason counts: the ranks change, a callback wants to stop, a signal asks the program to."""
    return 0 if not reason else 1 if reason == RESIZE else 3 if is_signal(reason) else 2
