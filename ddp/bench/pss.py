"""Samples how much memory a process uses: its private memory in full, and its share of shared memory.

    heap, large tensors                     count in full                         Pss_Anon of /proc/PID/smaps_rollup
    memory that k processes have mapped     counts 1/k, so that all shares        Pss_Shmem
                                            together are what the host has given
    pages of programs and libraries         do not count: they are shared with    Pss_File
                                            strangers, and come and go with them

RSS counts a page in full wherever it is mapped: a worker that maps its neighbours' gradients would look as if it owned
them.

The sampler is a process of its own, because a thread would wait for the interpreter lock just when an allocation is
being filled. It reads, rests for a millisecond, and reads again. One read walks the process's page tables: some
milliseconds for half a gigabyte. A shorter peak can hide between two samples.

This file is also the sampler's program, and is run as a file: it imports the standard library alone, and starts in
hundredths of a second.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

REST_S = 0.001


@contextlib.contextmanager
def sampling(pid: int) -> Iterator[Callable[[], int]]:
    """Samples a process of this host while the block runs.

    Yields:
        a function that returns the most bytes that a sample found since its last call, that moment included.

    Raises:
        OSError: there is no such process, or it may not be read.
    """
    path = f"/proc/{pid}/smaps_rollup"
    Path(path).read_bytes()
    # -I -S: neither this folder's modules nor installed ones, which it does not need, are to be found.
    command = [sys.executable, "-I", "-S", __file__, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def take() -> int:
            asked.write(b"\n")
            asked.flush()
            return int(answers.readline())

        yield take  # afterwards, the end of its input ends the process


# ---------------------------------------------------------------------------------------------- the sampler's process


def _sample_until_end(path: str) -> None:
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # where workers outnumber cores it would miss a peak otherwise; nobody times these workers
    file = os.open(path, os.O_RDONLY)
    peak = 0
    while True:
        is_asked = bool(select.select([0], [], [], REST_S)[0])
        if is_asked and not os.read(0, 1):
            return
        peak = max(peak, _read(file))
        if is_asked:
            print(peak, flush=True)
            peak = 0


def _read(file: int) -> int:
    """Returns 0 for a process that has ended."""
    with contextlib.suppress(ProcessLookupError):
        pairs = (line.split() for line in os.pread(file, 4096, 0).decode().splitlines()[1:])
        return sum(1024 * int(size) for name, size, *_ in pairs if name in ("Pss_Anon:", "Pss_Shmem:"))
    return 0


if __name__ == "__main__":
    _sample_until_end(sys.argv[1])
