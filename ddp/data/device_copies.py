"""Copies batches to the GPU before they are needed, while the step before them computes.

    copying stream     copy 1 ░░   copy 2 ░░   copy 3 ░░
    step's stream      step 0 ▓▓▓▓▓▓▓▓▓▓▓▓▓ │ step 1 ▓▓▓▓▓▓▓▓▓▓▓▓▓ │ step 2 ▓▓▓
                                            └ waits for copy 1      └ waits for copy 2

A copy on the step's own stream would begin once the kernels of the step before have ended. Two rules of CUDA follow
from the second stream:

- Streams run in no order. So each copy records an event, and the step's stream waits for it.
- The allocator gives freed memory to the next copy at once, because both are on the copying stream. `record_stream`
  makes it wait until the step's stream has read the batch.

The host's memory must be page-locked; a copy from other memory keeps the processor waiting.

Tensors are copied, at any depth of the batch. What else has a method `to` moves when the step asks for it.

Read before: `cache.py`. Read next: `prefetch.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


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
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self, batch: Any) -> Copy:
        """Starts the copies of a batch's tensors, without waiting for them."""
        with torch.cuda.stream(self._stream):  # also makes the device this thread's
            moved = apply_to_collection(batch, Tensor, lambda each: each.to(self._device, non_blocking=True))
            return Copy(moved, self._stream.record_event())

    def finish(self, copy: Copy) -> Any:
        """Returns the batch, for use on the current stream of the caller."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copy.event)
        apply_to_collection(copy.batch, Tensor, lambda each: each.record_stream(current) if each.is_cuda else None)
        return copy.batch
