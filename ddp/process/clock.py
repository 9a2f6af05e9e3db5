"""Time and deadlines, in one place: every duration of this package is monotonic and in seconds.

A call that may never return is made by another thread (`within`), so that the caller need not wait for it for ever.
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
LONGEST_S = 1e9  # of a deadline; operating systems count it in whole numbers
PAUSED_S = 3.0  # a process that looks at the clock this much later than intended was not running in between


class Patience:
    """A deadline for a wait that looks at the clock every second or so, and that may be paused itself.

    A process that is stopped (Ctrl-Z, a frozen container, a suspended laptop) does not look at the clock. Its peers
    were most often paused with it and go on when it does. So the deadline begins anew then.

    Args:
        limit_s: how long the wait may take, in seconds of running.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start_s = self._last_s = time.monotonic()

    def left_s(self) -> float:
        """Looks at the clock; returns the seconds that are left, 0 once the deadline has passed."""
        now = time.monotonic()
        if now - self._last_s > PAUSED_S:
            self._start_s = now
        self._last_s = now
        return max(0.0, self._start_s + self.limit_s - now)


class Stopwatch:
    """Adds up the time spent inside `with watch.running():` blocks. It is not re-entrant, and for one thread."""

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
        """Returns the total so far, and starts again from zero."""
        total_s, self.total_s = self.total_s, 0.0
        return total_s


# --- Calls with a deadline -------------------------------------------------------------------------------------------


class HelperThread:
    """A thread that makes one call after the other.

    A `ThreadPoolExecutor` would do, but the interpreter joins its threads when it ends: a read that hangs would keep
    the process alive. This one is a daemon.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        Thread(target=_make, args=(self._calls,), name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Returns the future of a call, which is made once those before it are over, unless it is cancelled."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        """Ends the thread, without waiting, once the calls that it has been given are over."""
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
os.register_at_fork(after_in_child=_idle.clear)  # threads do not exist in a forked child


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Returns the result of a call that another thread makes, or raises its error. After the deadline it is left alone.

    Raises:
        TimeoutError: it has not ended within `limit_s` seconds of running.
    """
    try:
        helper = _idle.pop()
    except IndexError:
        helper = HelperThread("ddp-within")
    future, patience = helper.submit(call), Patience(limit_s)
    try:
        while not future.done() and (left_s := patience.left_s()):
            wait([future], timeout=min(left_s, PAUSED_S / 3))
    finally:
        if future.done() and not _idle:  # one is kept, however many have worked at once
            _idle.append(helper)
        else:
            helper.end()
    if not future.done():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return future.result()
