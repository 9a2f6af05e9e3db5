"""Keeps strangers, processes that only compute, on the cores of a benchmark where `--beside` asks for them.

Beside a stranger both rivals show how they wait on a shared machine: a rank that spins until its neighbours are there
takes the core from the very rank that it waits for.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
