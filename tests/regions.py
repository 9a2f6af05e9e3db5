"""Regions for tests: names that no other test run has, and memory to be published."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ddp.comm.transport.shared_memory import SharedMemory


@contextmanager
def new_name() -> Iterator[str]:
    """Yields a new name; nothing is left of its regions then."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    assert not list(Path("/dev/shm").glob(f"ddp-region-*{name}"))


def shared(tensors: Mapping[str, Tensor]) -> tuple[SharedMemory, dict[str, Tensor]]:
    """Copies tensors side by side into memory that can be shared, each to a multiple of 64 bytes."""
    memory = SharedMemory.create("memfd", sum(-(-each.nbytes // 64) * 64 for each in tensors.values()))
    found: dict[str, Tensor] = {}
    start = 0
    for key, each in tensors.items():
        inside = memory.bytes[start : start + each.nbytes].view(each.dtype)
        found[key] = inside.as_strided(each.shape, each.stride()).copy_(each.detach())
        start += -(-each.nbytes // 64) * 64
    return memory, found
