"""A thread that makes calls in the place of another one, which need not wait for them for ever.

A `ThreadPoolExecutor` would do, but the interpreter joins its threads when it ends: a read that hangs would keep the
process alive. This one is a daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class HelperThread:
    """Makes one call after the other.

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
