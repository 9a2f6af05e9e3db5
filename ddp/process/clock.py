"""Time and deadlines, in one place: every duration of this package is monotonic and in seconds.

Another thread makes a call that may never return (`within`), so that the caller need not wait for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

now_s = time.perf_counter
LONGEST_S = 1e9  # longest deadline, because operating systems count in integers
SLICE_S = 0.1  # of a long wait
PAUSED_S = 3.0  # a process that checks the clock this much later than intended was not running in between


class Patience:
    """A deadline for a wait that checks the clock every second or so, in a process that may be paused.

    A process that is stopped (Ctrl-Z, a frozen container, a suspended laptop) does not check the clock. Its peers were
    most often paused with it, and continue when it does. So the deadline then restarts.

    Args:
        limit_s: longest wait, in seconds of running.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start_s = self._last_s = time.monotonic()

    def left_s(self) -> float:
        """Checks the clock; returns the remaining seconds, 0 once the deadline has passed."""
        now = time.monotonic()
        if now - self._last_s > PAUSED_S:
            self._start_s = now
        self._last_s = now
        return max(0.0, self._start_s + self.limit_s - now)


class Stopwatch:
    """Adds up the time spent inside `with watch.running():` blocks. It is not re-entrant, nor thread-safe."""

    def __init__(self) -> None:
        self.total_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start_s = now_s()
        try:
            yield
        finally:
            self.total_s += now_s() - start_s

    def take_s(self) -> float:
        """Returns the total so far, and resets it."""
        total_s, self.total_s = self.total_s, 0.0
        return total_s


# --- Calls with a deadline -------------------------------------------------------------------------------------------


class HelperThread:
    """A thread that makes one call after another.

    A `ThreadPoolExecutor` would do, but the interpreter joins its threads when it ends: a read that hangs would keep
    the process alive. This one is a daemon.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.thread = Thread(target=_make, args=(self._calls,), name=name, daemon=True)
        self.thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Returns the future of a call, which runs after those before it, unless it is cancelled."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        """Ends the thread after the submitted calls; does not wait."""
        self._calls.put(None)


def _make(calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (job := calls.get()) is not None:
        call, future = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del job, call, future  # results may be large


_idle: list[HelperThread] = []
os.register_at_fork(after_in_child=_idle.clear)  # a forked child has no threads


def within(limit_s: float, call: Callable[[], T], *, unless: Callable[[], bool] = bool) -> T:
    """Returns the result of a call on another thread, or raises its error. After the deadline, abandons the call.

    Args:
        unless: abandons the call as soon as this returns True.

    Raises:
        TimeoutError: the call has not ended within `limit_s` seconds of running, or was abandoned.
    """
    try:
        helper = _idle.pop()
    except IndexError:
        helper = HelperThread("ddp-within")
    future, patience = helper.submit(call), Patience(limit_s)
    try:
        while not future.done() and (left_s := patience.left_s()) and not unless():
            wait([future], timeout=min(left_s, SLICE_S))
    finally:
        if future.done() and not _idle:  # keeps only one thread
            _idle.append(helper)
        else:
            helper.end()
    if not future.done():
        raise TimeoutError(f"no response within {limit_s:g} s")
    return future.result()
