"""A collective in flight, and the thread that runs collectives.

One background thread per communicator runs asynchronous collectives one after another, in the order in which they
were asked for: that order is the same on every rank, and it is all the agreement that the ranks need. Waits inside
release the interpreter lock, so backward and optimizer go on meanwhile.

A synchronous call that finds nothing in flight runs in the caller's own thread: two thread switches less.

CUDA. The thread works on a stream of its own, which first waits for what the caller's stream has produced so far;
`Work.wait` makes the caller's stream wait for the result. Nothing synchronises the device.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any

import torch

from ddp.clock import now_s


class Work:
    """What an asynchronous collective returns.

    Attributes:
        done_s: when it ended.
    """

    def __init__(self) -> None:
        self._future: Future[Any] = Future()
        self._finished: torch.cuda.Event | None = None
        self.done_s = 0.0

    def wait(self, timeout_s: float | None = None) -> Any:
        """Returns the collective's result once it is there, or raises its error.

        Every collective ends by its own deadline; `timeout_s` bounds this wait more tightly (TimeoutError).
        """
        result = self._future.result(timeout_s)
        if self._finished is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._finished)
            for tensor in result if isinstance(result, list) else [result]:
                tensor.record_stream(stream)  # it may come from the other stream's pool: not free while this one reads
        return result

    def is_completed(self) -> bool:
        """True once the collective has ended, well or badly."""
        return self._future.done()


def done(result: Any = None) -> Work:
    """A work that has ended already."""
    work = Work()
    work.done_s = now_s()
    work._future.set_result(result)
    return work


class Runner:
    """Runs collectives in order, on the background thread."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._queue: queue.SimpleQueue[tuple[Work, Callable[[], Any], torch.cuda.Event | None] | None]
        self._queue = queue.SimpleQueue()
        self._last: Work | None = None
        self._thread: threading.Thread | None = None

    def is_idle(self) -> bool:
        """True if all that was submitted has ended: the caller may as well run the next one itself."""
        return self._last is None or self._last.is_completed()

    def submit(self, collective: Callable[[], Any]) -> Work:
        """Queues it behind everything submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        work = self._last = Work()
        produced = None
        if self._device.type == "cuda":
            produced = torch.cuda.current_stream(self._device).record_event()
        self._queue.put((work, collective, produced))
        return work

    def is_idle_within(self, timeout_s: float) -> bool:
        """Waits for what was submitted; False if it has not ended by then."""
        return self._last is None or not wait([self._last._future], timeout_s).not_done

    def close(self) -> None:
        """Ends the thread after what is queued."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _loop(self) -> None:
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.Stream(self._device) if on_gpu else None
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            while (item := self._queue.get()) is not None:
                work, collective, produced = item
                try:
                    if stream is not None and produced is not None:
                        stream.wait_event(produced)
                    result = collective()
                    work.done_s = now_s()
                    if stream is not None:
                        work._finished = stream.record_event()
                    work._future.set_result(result)
                except BaseException as error:
                    work._future.set_exception(error)
                del item, work, collective  # they hold tensors
