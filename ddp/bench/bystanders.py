"""How much of the machine others use while a benchmark runs, and who they are.

    CPU time that processes had, and what a hypervisor stole (/proc/stat)  −  that of our own processes  =  others

Interrupts are left out: on a benchmark of collectives they serve its own messages.

A benchmark on two cores whose neighbour holds one of them measures the neighbour. Nothing can be done about that from
here but to say so.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from ddp.clock import now_s

WORTH_SAYING = 0.2
"""Cores. Ticks of 10 ms are counted, so a few hundredths are noise."""


class Bystanders(NamedTuple):
    """What others took, in cores, and the greediest of them as "name (pid)"; "" if none is to be seen."""

    num_cores: float
    greediest: str

    @property
    def disturb(self) -> bool:
        return self.num_cores >= WORTH_SAYING

    def __str__(self) -> str:
        return f"others took {self.num_cores:.1f} of a core{f', most of it {self.greediest}' if self.greediest else ''}"


class Watch:
    """Counts from its making on.

    Args:
        own: process ids that belong to the benchmark.
    """

    def __init__(self, own: Collection[int]) -> None:
        self._own = frozenset(own)
        self._start_s, self._busy, self._ticks = now_s(), _busy_ticks(), _ticks_by_process()

    def so_far(self) -> Bystanders:
        """Since the making. On a system without /proc nobody is ever seen."""
        seconds = max(now_s() - self._start_s, 1e-9)
        spent = {pid: ticks - self._ticks.get(pid, 0) for pid, ticks in _ticks_by_process().items()}
        ours = sum(ticks for pid, ticks in spent.items() if pid in self._own)
        others = {pid: ticks for pid, ticks in spent.items() if pid not in self._own and ticks > 0}
        num_cores = max(0.0, (_busy_ticks() - self._busy - ours) / (_ticks_per_s() * seconds))
        greediest = max(others, key=lambda pid: others[pid], default=None)
        return Bystanders(num_cores, "" if greediest is None else f"{_name(greediest)} ({greediest})")


def running(script: str) -> list[int]:
    """Processes with a word in their command line that ends with `script`."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if any(word.endswith(script.encode()) for word in words):
            found.append(int(line.parent.name))
    return found


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")


def _busy_ticks() -> int:
    try:
        with Path("/proc/stat").open() as file:
            user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return 0
    return user + nice + system + steal


def _ticks_by_process() -> dict[int, int]:
    """User and system time of every process, all its threads, in ticks."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        found[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "one that has ended"
