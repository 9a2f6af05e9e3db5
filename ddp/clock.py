"""Time, in one place: every duration of this package is monotonic and in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

now_s = time.perf_counter


class Stopwatch:
    """Adds up the time spent inside `with watch.running():` blocks. Not re-entrant, one thread."""

    def __init__(self) -> None:
        self.total_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        start_s = now_s()
        try:
            yield
        finally:
            self.total_s += now_s() - start_s

    def take_s(self) -> float:
        """The total so far; starts again from zero."""
        total_s, self.total_s = self.total_s, 0.0
        return total_s
