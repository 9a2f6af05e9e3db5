"""Time, in one place: every duration of this package is monotonic and in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

now_s = time.perf_counter
LONGEST_S = 1e9  # of a deadline; operating systems count it in whole numbers
PAUSED_S = 3.0  # a process that looks at the clock this much later than intended was not running in between


class Patience:
    """A deadline for a wait that looks at the clock every second or so, and that may be paused itself.

    A process that is stopped (Ctrl-Z, a frozen container, a suspended laptop) does not look at the clock. Its peers
    were most often paused with it and go on when it does. So the deadline begins anew then.

    Args:
        limit_s: how long the wait may take, in seconds of running.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start_s = self._last_s = time.monotonic()

    def left_s(self) -> float:
        """Looks at the clock; returns the seconds that are left, 0 once the deadline has passed."""
        now = time.monotonic()
        if now - self._last_s > PAUSED_S:
            self._start_s = now
        self._last_s = now
        return max(0.0, self._start_s + self.limit_s - now)


class Stopwatch:
    """Adds up the time spent inside `with watch.running():` blocks. It is not re-entrant, and for one thread."""

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
        """Returns the total so far, and starts again from zero."""
        total_s, self.total_s = self.total_s, 0.0
        return total_s
