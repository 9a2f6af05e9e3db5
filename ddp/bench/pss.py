"""How much memory processes use, and the most they used meanwhile, as PSS: "proportional set size".

    private pages                       count in full
    pages that k processes have mapped  count 1/k, so what a host's workers share is counted once in their sum

RSS counts a page that a neighbour has allocated in full wherever it is mapped: a worker that maps its neighbours'
gradients would look as if it owned them.

The sampler is a process of its own, since a thread would wait for the interpreter lock just when an allocation is
being filled. It reads /proc/PID/smaps_rollup of all its processes, rests for a millisecond, and reads again. One read
walks the process's page tables: some milliseconds for half a gigabyte. Between two samples a peak can hide; `Peaks`
says how many samples there were, and how far apart.

This file is also the sampler's program, and is run as a file: it imports the standard library alone, and starts in
hundredths of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

REST_S = 0.001


class Memory(NamedTuple):
    """Bytes of PSS: all, and its parts."""

    pss: int
    anonymous: int  # heap, and what a large tensor is
    file: int  # programs and libraries
    shared: int  # /dev/shm, memfd, shared anonymous mappings

    def __sub__(self, other: Memory) -> Memory:
        return Memory(*(a - b for a, b in zip(self, other, strict=True)))


class Peaks(NamedTuple):
    """What `Sampler.take` returns.

    Attributes:
        by_process: the sample with the largest PSS, for each process.
        num_samples: of each process.
        interval_s, longest_gap_s: between two of them, in the mean and at most.
    """

    by_process: list[Memory]
    num_samples: int
    interval_s: float
    longest_gap_s: float


class Sampler:
    """Watches processes of this host until its `with` block ends.

    Raises:
        OSError: no /proc/PID/smaps_rollup (Linux 4.14), or a process that may not be looked into.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        for pid in processes:
            Path(f"/proc/{pid}/smaps_rollup").read_bytes()
        # -I -S: neither this folder's modules nor installed ones, which it does not need, are to be found.
        command = [sys.executable, "-I", "-S", __file__, *map(str, processes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def take(self) -> Peaks:
        """Peaks since the last call, this moment included."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        by_process, *rest = json.loads(self._process.stdout.readline())
        return Peaks([Memory(*memory) for memory in by_process], *rest)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()  # the end of its input ends it


# ---------------------------------------------------------------------------------------------- the sampler's process


def _sample_until_end(processes: Sequence[int]) -> None:
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # where workers outnumber cores it would come late to a peak; their speed is not asked for
    files = [os.open(f"/proc/{pid}/smaps_rollup", os.O_RDONLY) for pid in processes]
    peaks = [_read(file) for file in files]
    times_s = [time.monotonic()]
    while True:
        asked = bool(select.select([0], [], [], REST_S)[0])
        if asked and not os.read(0, 1):
            return
        peaks = [max(peak, _read(file)) for peak, file in zip(peaks, files, strict=True)]
        times_s.append(time.monotonic())
        if asked:
            gaps_s = [after - before for before, after in zip(times_s, times_s[1:])]  # noqa: B905, RUF007
            print(json.dumps([peaks, len(gaps_s), sum(gaps_s) / len(gaps_s), max(gaps_s)]), flush=True)
            peaks, times_s = [_read(file) for file in files], times_s[-1:]


def _read(file: int) -> Memory:
    """Zero for a process that has ended."""
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
    _sample_until_end(list(map(int, sys.argv[1:])))
