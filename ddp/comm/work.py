"""A collective in flight, and the thread that runs collectives.

One background thread per communicator runs asynchronous collectives one after another, in the order in which they
were called. That order is the same on every rank, and it is all the agreement that the ranks need. Waits inside release
the interpreter lock, so backward and optimizer go on meanwhile.

A synchronous call that finds nothing in flight runs in the caller's own thread, which saves two thread switches.

On a GPU with NCCL there is no such thread: `stream_queue.py` enqueues. Where GPU tensors travel through the host, the
thread works on its own stream, which first waits for what the caller's stream has produced so far; `Work.wait`
makes the caller's stream wait for the result. Nothing synchronises the device.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any, Generic

import torch
from torch import Tensor
from torch.autograd import profiler
from typing_extensions import TypeVar

from ddp.comm.watch.call import Call, History, recorded
from ddp.process import gpu
from ddp.process.clock import now_s

CPU = torch.device("cpu")
Result = TypeVar("Result", default=Any)


class Work(ABC, Generic[Result]):
    """An asynchronous collective: queued, running or complete.

    Attributes:
        done_s: when it ended.
    """

    done_s: float

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> Result:
        """Returns the collective's result once it is complete, or raises its error.

        On a GPU the result is complete for the current stream, which waits; the host continues, unless the collective
        still runs on a thread. Every collective ends by its own deadline; `timeout_s` bounds this wait more tightly
        (TimeoutError).
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Returns True once the collective has ended, well or badly."""


class ThreadWork(Work[Result]):
    """A collective of a `Runner`, or one that has ended."""

    def __init__(
        self,
        collective: Callable[[], Result],
        device: torch.device = CPU,
        call: Call | None = None,
        history: History | None = None,
    ) -> None:
        self._collective: Callable[[], Result] | None = collective
        self._history = history  # whose recorder measures the wait
        self._call = call  # names the wait in a profile
        self._future: Future[Result] = Future()
        self._inference = torch.is_inference_mode_enabled()  # of the caller, whose tensors it works on
        self._device = device
        self._produced = gpu.cuda.current_stream(device).record_event() if device.type == gpu.KIND else None
        self._finished: torch.cuda.Event | None = None
        self.done_s = 0.0

    def run(self, stream: torch.cuda.Stream | None = None) -> tuple[torch.cuda.Event, object] | None:
        """Runs the collective, once.

        Args:
            stream: the current one, on a GPU.

        Returns:
            On a GPU, an event, and what must be kept until then, because it holds tensors.
        """
        collective, self._collective = self._collective, None  # it holds tensors
        assert collective is not None
        try:
            if stream is not None and self._produced is not None:
                stream.wait_event(self._produced)
            with torch.inference_mode(self._inference):
                result = collective()
            self.done_s = now_s()
            if stream is not None:
                self._finished = stream.record_event()
            self._future.set_result(result)
        except BaseException as error:
            self._future.set_exception(error)
        return None if self._finished is None else (self._finished, collective)

    def wait(self, timeout_s: float | None = None) -> Result:
        recorder = None if self._history is None else self._history.recorder
        if recorder is None:
            return self._waited_for(timeout_s)
        with recorder.waiting():
            return self._waited_for(timeout_s)

    def _waited_for(self, timeout_s: float | None) -> Result:
        if profiler._is_profiler_enabled and self._call is not None:
            result = recorded(self._call.wait_range, self._future.result, timeout_s)
        else:
            result = self._future.result(timeout_s)
        if self._finished is not None:
            hold_current_stream(self._finished, result, self._device)
        return result

    def is_completed(self) -> bool:
        return self._future.done()

    def is_completed_within(self, timeout_s: float) -> bool:
        """Waits for the end of the collective, well or badly; returns False if it has not come by then."""
        return not wait([self._future], timeout_s).not_done


def hold_current_stream(finished: torch.cuda.Event, result: object, device: torch.device) -> None:
    """Makes the device's current stream wait for a collective that has been queued on another one.

    Its result may come from the other stream's memory, which is not free while this one reads.
    """
    stream = gpu.cuda.current_stream(device)
    stream.wait_event(finished)
    for each in result if isinstance(result, list) else [result]:
        if isinstance(each, Tensor):
            each.record_stream(stream)


def done(result: Result) -> ThreadWork[Result]:
    """Returns a work that has ended already."""
    work = ThreadWork(lambda: result)
    work.run()
    return work


class Runner:
    """Runs collectives in order, on the background thread.

    Args:
        history: whose recorder measures waits for them.
    """

    def __init__(self, name: str, device: torch.device, history: History | None = None) -> None:
        self._name, self._device, self._history = name, device, history
        self._queue: queue.SimpleQueue[ThreadWork[Any] | None] = queue.SimpleQueue()
        self._last: ThreadWork[Any] | None = None  # the last one submitted, if it may still be running
        self._thread: threading.Thread | None = None

    def is_idle(self) -> bool:
        """Returns True if all that was submitted has ended: the caller may as well run the next one itself.

        On CUDA, the caller's stream then comes after it, because both use the same scratch memory.
        """
        if self._last is not None and self._last.is_completed():
            if (finished := self._last._finished) is not None:
                hold_current_stream(finished, None, self._device)
            self._last = None
        return self._last is None

    def submit(self, collective: Callable[[], Result], call: Call | None = None) -> Work[Result]:
        """Queues it behind everything submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._last = work = ThreadWork(collective, self._device, call, self._history)
        self._queue.put(work)
        return work

    @property
    def thread(self) -> int | None:
        """The number of the background thread; None before there is one."""
        return None if self._thread is None else self._thread.ident

    def is_idle_within(self, timeout_s: float) -> bool:
        """Waits for what was submitted; returns False if it has not ended by then."""
        return self._last is None or self._last.is_completed_within(timeout_s)

    def close(self) -> None:
        """Ends the thread after what is queued, and waits for that."""
        if (thread := self.end()) is not None:
            thread.join()

    def end(self) -> threading.Thread | None:
        """Ends the thread after what is queued; returns it, if there was one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
        return thread

    def _loop(self) -> None:
        stream = gpu.cuda.Stream(self._device) if self._device.type == gpu.KIND else None
        with gpu.cuda.stream(stream) if stream is not None else nullcontext():
            kept: list[tuple[torch.cuda.Event, object]] = []  # what the GPU may still read, as there was no wait
            while (work := self._queue.get()) is not None:
                kept = [each for each in kept if not each[0].query()]
                if (queued := work.run(stream)) is not None:
                    kept.append(queued)
                del work, queued  # its result holds tensors


# --- numbers of a device on their way to the host ---------------------------------------------------------------------


class HostCopy:
    """The numbers of some tensors as they are now, for the host: from a GPU by one asynchronous copy.

    Args:
        tensors: of any shape and type; numbers are exact up to 2⁵³.
        refuse: raises an error if what a collective has left in them means nothing.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device, refuse: Callable[[], None]) -> None:
        self._refuse, self._is_there = refuse, None
        if device.type != gpu.KIND:  # at once, because each tensor more would cost small collectives their speed
            self._known = [each.flatten().tolist() for each in tensors]
            return
        flat = torch.cat([each.detach().reshape(-1).to(device, torch.float64) for each in tensors])
        self._sizes = [each.numel() for each in tensors]
        self._numbers = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        self._numbers.copy_(flat, non_blocking=True)
        self._is_there = gpu.cuda.current_stream(device).record_event()

    def read(self) -> list[list[float]]:
        """Returns the numbers of each tensor, as a list. Waits for the GPU, if it has not come that far.

        Raises:
            PeerLost, CommunicatorBroken: the collectives before it failed.
        """
        if self._is_there is None:
            return self._known
        if not self._is_there.query():
            self._is_there.synchronize()
        self._refuse()
        return [part.tolist() for part in self._numbers.split(self._sizes)]
