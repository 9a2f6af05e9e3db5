"""Samples how much memory a process uses, as PSS: "proportional set size".

    private pages                       count in full
    pages that k processes have mapped  count 1/k, so what a host's workers share is counted once in their sum

RSS counts a page that a neighbour has allocated in full wherever it is mapped: a worker that maps its neighbours'
gradients would look as if it owned them.

The sampler is a process of its own, because a thread would wait for the interpreter lock just when an allocation is
being filled. It reads /proc/PID/smaps_rollup, rests for a millisecond, and reads again. One read walks the process's
page tables: some milliseconds for half a gigabyte. A shorter peak can hide between two samples.

This file is also the sampler's program, and is run as a file: it imports the standard library alone, and starts in
hundredths of a second.

Read before: ddp/bench/memory.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

REST_S = 0.001


class Memory(NamedTuple):
    """Bytes of PSS: all, and its parts."""

    pss: int
    heap: int  # private memory without a file, which large tensors are, too
    files: int  # programs and libraries
    shared: int  # /dev/shm, memfd, shared anonymous mappings

    def __sub__(self, other: Memory) -> Memory:
        return Memory(*(a - b for a, b in zip(self, other, strict=True)))


@contextlib.contextmanager
def sampling(pid: int) -> Iterator[Callable[[], Memory]]:
    """Samples a process of this host while the block runs.

    Yields:
        a function that returns the sample with the largest PSS since its last call, that moment included.

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

        def take() -> Memory:
            asked.write(b"\n")
            asked.flush()
            return Memory(*json.loads(answers.readline()))

        yield take  # afterwards, the end of its input ends the process


# ---------------------------------------------------------------------------------------------- the sampler's process


def _sample_until_end(path: str) -> None:
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # where workers outnumber cores it would miss a peak otherwise; nobody times these workers
    file = os.open(path, os.O_RDONLY)
    peak = _read(file)
    while True:
        is_asked = bool(select.select([0], [], [], REST_S)[0])
        if is_asked and not os.read(0, 1):
            return
        peak = max(peak, _read(file))
        if is_asked:
            print(json.dumps(peak), flush=True)
            peak = _read(file)


def _read(file: int) -> Memory:
    """Returns zeros for a process that has ended."""
    kilobytes = {"Pss": 0, "Pss_Anon": 0, "Pss_File": 0, "Pss_Shmem": 0}
    try:
        lines = os.pread(file, 4096, 0).decode().splitlines()[1:]
    except ProcessLookupError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name in kilobytes:
            kilobytes[name] = int(value.split()[0])
    return Memory(*(1024 * value for value in kilobytes.values()))


if __name__ == "__main__":
    _sample_until_end(sys.argv[1])
