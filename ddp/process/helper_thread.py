"""A thread that makes calls in the place of another one, which need not wait for them for ever.

A `ThreadPoolExecutor` would do, but the interpreter joins its threads when it ends: a read that hangs would keep the
process alive. This one is a daemon.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from ddp.process.clock import PAUSED_S, Patience

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
