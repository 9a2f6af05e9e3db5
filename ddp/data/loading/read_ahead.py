"""Reads ahead: a thread fetches the next batches while this one trains.

    without     read ░░░░ compute ▓▓▓▓▓ read ░░░░ compute ▓▓▓▓▓ read ░░░░ …
    with        read ░░░░ compute ▓▓▓▓▓ compute ▓▓▓▓▓ compute ▓▓▓▓▓ …
                          read ░░░░     read ░░░░     read ░░░░            in the thread, two batches ahead at most

Batches, their order and their random numbers are the same with and without the thread. `loader.py` says which data it
may read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from ddp.data.helper_thread import HelperThread

THREAD = "ddp-read-ahead"  # its name
AHEAD = 2  # batches
_GRACE_S = 60.0  # for the last read of an abandoned epoch
_END: Any = object()


class ReadAhead:
    """Yields batches that a thread fetches."""

    def __init__(self) -> None:
        self._pending: deque[Future[Any]] = deque()  # of the running thread

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an iterator, which fetches one at each step. An earlier one must have ended."""
        fetch = partial(next, batches, _END)
        # Not in the thread, because loader processes, which it may start, are ended with the thread that starts them.
        first = fetch()
        if first is _END:
            return
        thread = HelperThread(THREAD)
        pending = self._pending = deque(thread.submit(fetch) for _ in range(AHEAD))
        try:
            yield first
            while (batch := pending[0].result()) is not _END:
                pending.append(thread.submit(fetch))
                pending.popleft()
                yield batch
        finally:
            _cancel(pending)
            thread.end()

    def end(self, *, wait_s: float = _GRACE_S) -> None:
        """Ends what is read ahead, and waits for the read that has begun, but not for ever."""
        wait(_cancel(self._pending), timeout=wait_s)


def _cancel(pending: deque[Future[Any]]) -> list[Future[Any]]:
    """Cancels reads that have not begun; returns the others."""
    return [each for each in pending if not each.cancel()]
