"""Reads ahead: a thread fetches the next batches while this one trains, if fetching waits for a disk or a network.

    without     read ░░░░ compute ▓▓▓▓▓ read ░░░░ compute ▓▓▓▓▓ read ░░░░ …
    with        read ░░░░ compute ▓▓▓▓▓ compute ▓▓▓▓▓ compute ▓▓▓▓▓ …
                          read ░░░░     read ░░░░     read ░░░░            in the thread, two batches ahead at most

The thread is for reading that *waits*, because a waiting thread leaves the interpreter lock to the training. What
computes in Python would only take turns with it. So the first batches are fetched without a thread, and their waiting
is measured: time that passed less time of the processor. Where it is short, no thread is started.

On a GPU it always pays: the training waits for the GPU then, and not for the interpreter, and the thread copies batches
there (`device_copies.py`), also those that loader processes have fetched.

A thread shares the random generators with the forward that runs beside it, and a connection to a data base may be bound
to the thread that has opened it. So only data that say so are read ahead: those with a true attribute `may_read_ahead`,
as files have whose format draws nothing, and without a `collate` of the user's own. `loader_workers=1` gives the others
a process of their own.

Batches, their order and their random numbers are the same with and without the thread.
"""

from __future__ import annotations

import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

THREAD = "ddp-read-ahead"  # its name
AHEAD = 2  # batches
_NUM_MEASURED = 3  # batches, after the first, which opens files
_WORTH_S = 0.5e-3  # of waiting for a batch; handing one over takes a tenth of that
_LOOK_S = 0.1  # how often a thread that is ahead looks whether its batches are still wanted
_GRACE_S = 60.0  # for the last read of an abandoned epoch
_END: Any = object()


class ReadAhead:
    """Yields batches, from a thread once it is known that it pays, and allowed.

    Args:
        may_begin: is asked once, after some batches, before the first thread is started.
        pays: True: it is known; None: that is to be measured.
    """

    def __init__(self, may_begin: Callable[[], bool], *, pays: bool | None = None) -> None:
        self._may_begin, self._pays = may_begin, pays
        self.uses_thread: bool | None = None  # None: that is not decided yet
        self._thread: threading.Thread | None = None
        self._is_wanted = threading.Event()  # what the running thread fetches

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an iterator, which fetches one at each step. An earlier one must have ended."""
        if self.uses_thread is None:
            yield from self._measured(batches)
        yield from self._from_thread(batches) if self.uses_thread else batches

    def end(self, *, wait_s: float = _GRACE_S) -> None:
        """Ends the thread, if there is one, and waits for its last read, but not for ever."""
        if self._thread is not None:
            self._is_wanted.clear()
            self._thread.join(wait_s)

    def _measured(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the first batches, and finds out how long fetching them waits."""
        waited_s = 0.0
        for number in range(1 + _NUM_MEASURED):
            idle_s, num_waits = _idle()
            batch = next(batches, _END)
            idle_now_s, num_waits_now = _idle()
            if number and num_waits_now > num_waits:
                waited_s += idle_now_s - idle_s
            if batch is _END:
                return
            yield batch
        self.uses_thread = (self._pays or waited_s > _NUM_MEASURED * _WORTH_S) and self._may_begin()

    def _from_thread(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches that a thread fetches, until this generator ends."""
        fetched: queue.Queue[Any] = queue.Queue(AHEAD)
        is_wanted = self._is_wanted = threading.Event()
        is_wanted.set()
        arguments = (batches, fetched, is_wanted)
        self._thread = threading.Thread(target=_fetch, args=arguments, name=THREAD, daemon=True)
        self._thread.start()
        try:
            while (batch := _taken(fetched, is_wanted)) is not _END:
                if isinstance(batch, _Failed):
                    raise batch.error
                yield batch
        finally:
            is_wanted.clear()


def _taken(fetched: queue.Queue[Any], is_wanted: threading.Event) -> Any:
    """Returns the next batch; `_END` if none will come any more."""
    while is_wanted.is_set():
        with suppress(queue.Empty):
            return fetched.get(timeout=_LOOK_S)
    return _END


def _idle() -> tuple[float, int]:
    """Returns how long this thread has not been running, up to a constant, and how often it has waited.

    A thread that a busy machine has put aside has not waited. Where waits are not counted for each thread (macOS), the
    process's are taken.
    """
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return time.perf_counter() - time.thread_time(), resource.getrusage(who).ru_nvcsw


class _Failed(NamedTuple):
    """An error on its way from the thread."""

    error: BaseException


def _fetch(batches: Iterator[Any], fetched: queue.Queue[Any], is_wanted: threading.Event) -> None:
    """Fetches batch after batch, in the thread, until the last one, an error, or until nobody wants them."""
    batch = None
    while batch is not _END and not isinstance(batch, _Failed):
        try:
            batch = next(batches, _END)
        except BaseException as error:  # it is raised where the batch is wanted
            batch = _Failed(error)
        while is_wanted.is_set():
            try:
                fetched.put(batch, timeout=_LOOK_S)
                break
            except queue.Full:
                continue
        if not is_wanted.is_set():
            return
