"""Other processes on the cores of a benchmark: strangers that `--beside` starts, and those that happen to run.

On a machine of two cores, a neighbour that holds one of them is half of what a benchmark measures. `strangers` makes
such a neighbour on purpose, so that both rivals show how they wait on a shared machine. `Others` counts the CPU time of
uninvited ones, so that a report can say that it was disturbed:

    CPU time of all processes, and what a hypervisor stole (/proc/stat)  −  CPU time of our own processes  =  others

Interrupts are left out, because they serve the messages of the benchmark itself.

Read before: ddp/bench/place.py. Read next: ddp/bench/command.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddp.clock import now_s

# A stranger computes until its standard input closes. The kernel closes it also when the parent is killed by SIGKILL.
STRANGER = """
import select
while not select.select([0], [], [], 0)[0]:
    for _ in range(100_000):
        pass
"""


@contextmanager
def strangers(number: int) -> Iterator[list[int]]:
    """Keeps `number` processes computing, free to run on any core, until the block ends. Yields their ids."""
    with ExitStack() as stack:
        processes = [
            # A session of its own, because Ctrl-C would reach it otherwise.
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", STRANGER], stdin=subprocess.PIPE, start_new_session=True
            )
            for _ in range(number)
        ]
        for process in processes:
            stack.enter_context(process)  # which closes its standard input and waits for its end
        yield [process.pid for process in processes]


class Others:
    """Counts the CPU time of processes that are not ours, from its making on.

    Ours are this process and its children, down to the last generation, once they have ended and were waited for.
    """

    def __init__(self) -> None:
        self._start = self._read_s()

    def num_cores(self) -> float:
        """Returns how many cores the others kept busy on average; 0 on a system without /proc."""
        passed_s, busy_s, own_s = (now - then for now, then in zip(self._read_s(), self._start, strict=True))
        return max(0.0, (busy_s - own_s) / max(passed_s, 1e-9))

    @staticmethod
    def _read_s() -> tuple[float, float, float]:
        busy = 0
        if Path("/proc/stat").exists():
            with Path("/proc/stat").open() as file:
                user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, file.readline().split()[1:9])
            busy = user + nice + system + steal
        return now_s(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])
