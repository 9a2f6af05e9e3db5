"""Reads ahead: a thread fetches the next batches while this one trains.

    without     read ░░░░ compute ▓▓▓▓▓ read ░░░░ compute ▓▓▓▓▓ read ░░░░ …
    with        read ░░░░ compute ▓▓▓▓▓ compute ▓▓▓▓▓ compute ▓▓▓▓▓ …
                          read ░░░░     read ░░░░     read ░░░░            in the thread, two batches ahead at most

Batches, their order and their random numbers are the same with and without the thread. `loader.py` says which data it
may read.

Beside it, `DeviceCopies` copies batches to the GPU while the step before them computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ddp.process import gpu
from ddp.process.clock import HelperThread

Result = TypeVar("Result")

THREAD = "ddp-read-ahead"  # its name
AHEAD = 2  # batches
_GRACE_S = 60.0  # for the last read of an abandoned epoch
_END: Any = object()


class ReadAhead:
    """Yields batches that a thread fetches."""

    def __init__(self) -> None:
        self._pending: deque[Future[Any]] = deque()  # of the running thread
        self._thread: HelperThread | None = None  # while it runs

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of an iterator, which fetches one at each step. An earlier one must have ended."""
        fetch = partial(next, batches, _END)
        # Not in the thread, because loader processes, which it may start, are ended with the thread that starts them.
        first = fetch()
        if first is _END:
            return
        thread = self._thread = HelperThread(THREAD)
        pending = self._pending = deque(thread.submit(fetch) for _ in range(AHEAD))
        try:
            yield first
            while (batch := pending[0].result()) is not _END:
                pending.append(thread.submit(fetch))
                pending.popleft()
                yield batch
        finally:
            self._thread = None
            _cancel(pending)
            thread.end()

    def between(self, read: Callable[[], Result]) -> Result:
        """Reads something else between two batches, because data need not bear two readers."""
        return read() if self._thread is None else self._thread.submit(read).result()

    def end(self, *, wait_s: float = _GRACE_S) -> None:
        """Ends what is read ahead, and waits for the read that has begun, but not for ever."""
        wait(_cancel(self._pending), timeout=wait_s)


def _cancel(pending: deque[Future[Any]]) -> list[Future[Any]]:
    """Cancels reads that have not begun; returns the others."""
    return [each for each in pending if not each.cancel()]


# --- Copies to the GPU, while the step before them computes ----------------------------------------------------------
#
#     copying stream     copy 1 ░░   copy 2 ░░   copy 3 ░░
#     step's stream      step 0 ▓▓▓▓▓▓▓▓▓▓▓▓▓ │ step 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓ │ step 2 ▓▓▓
#                                             └ waits for copy 1      └ waits for copy 2
#
# A copy on the step's own stream would begin once the kernels of the step before have ended. Two rules of CUDA follow
# from the second stream:
#
# - Streams run in no order. So each copy records an event, and the step's stream waits for it.
# - The allocator gives freed memory to the next copy at once, because both are on the copying stream. `record_stream`
#   makes it wait until the step's stream has read the batch.
#
# The host's memory must be page-locked; a copy from other memory keeps the processor waiting.
#
# Tensors are copied, at any depth of tuples, lists and dicts. All other objects are left as they are: what has a method
# `to` moves itself when the step asks for it.


class Copy(NamedTuple):
    """A batch whose tensors are on the device, or will be once the event has happened."""

    batch: Any
    event: torch.cuda.Event


class DeviceCopies:
    """Copies to one GPU. `begin` and `finish` may be called by two threads.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = gpu.cuda.Stream(device)
        self._device = self._stream.device  # with its number, because another thread may have another current device

    def begin(self, batch: Any) -> Copy:
        """Starts the copies of a batch's tensors, without waiting for them."""
        with gpu.cuda.stream(self._stream):  # also makes the device this thread's
            moved = _with_tensors(batch, lambda each: each.to(self._device, non_blocking=True))
            return Copy(moved, self._stream.record_event())

    def finish(self, copy: Copy) -> Any:
        """Returns the batch, for use on the current stream of the caller."""
        current = gpu.cuda.current_stream(self._device)
        current.wait_event(copy.event)
        _with_tensors(copy.batch, lambda each: each.record_stream(current))
        return copy.batch


def _with_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Returns a batch with each tensor replaced by a function of it."""
    return tree_map_only(Tensor, function, batch, is_leaf=lambda each: hasattr(each, "to"))
