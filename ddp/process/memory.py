"""Says what the host has for this process: cores, and memory; and whether a tensor fills its own without gaps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Returns the bytes that the kernel counts as available; infinity where it does not say.

    The kernel promises more than it has, and ends the process that touches the rest. In a container the limit of the
    control group counts, too, and those of the groups around it. What a group holds of files it has read is not counted
    as used, since the kernel takes that back first.
    """
    meminfo = _fields(proc / "meminfo")
    left = [meminfo["MemAvailable:"] << 10] if "MemAvailable:" in meminfo else []
    for line in _text(proc / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if path and not controllers:  # version 2
            left += _left_in(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            left += _left_in(cgroups / "memory", path, *names)
    return min(left, default=float("inf"))


def _left_in(root: Path, path: str, limit: str, usage: str, files: str) -> list[int]:
    """Returns the bytes left in each control group, from that at `path` on. A container may see its own as root."""
    inner = root / path.lstrip("/")
    groups = [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]
    left = []
    for folder in groups:
        maximum, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if maximum.isdigit() and used.isdigit():  # "max": no limit
            left.append(max(0, int(maximum) - int(used) + _fields(folder / "memory.stat").get(files, 0)))
    return left


def _fields(path: Path) -> dict[str, int]:
    """Reads lines of a name and a number."""
    words = (line.split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) >= 2 and line[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def is_dense(tensor: Tensor) -> bool:
    """Returns True if the elements fill their memory without gaps or overlap, in any order."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True
