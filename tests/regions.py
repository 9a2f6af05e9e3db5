"""Regions for tests: names that no other test run has, and a run that only makes steps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp.strategies.region import Region


@contextmanager
def new_name() -> Iterator[str]:
    """Yields a new name; nothing is left of its regions then."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    assert not list(Path("/dev/shm").glob(f"ddp-region-*{name}"))


@contextmanager
def showing(kept: Region, step: int) -> Iterator[None]:
    """Ends this step again and again in a thread, so that lookers of the block get its snapshot; closes the region."""
    is_over = threading.Event()

    def end_steps() -> None:
        while not is_over.wait(0.001):
            kept.step_ended(step)

    thread = threading.Thread(target=end_steps)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        kept.close()
