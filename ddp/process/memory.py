"""A process's memory and cores, the signal when its parent dies, and variables of its environment.

This module is imported before torch.

    what the host has        cores and available bytes; if a tensor fills its memory without gaps
    garbage collection       ignores the permanent objects of importing torch
    the C library            keeps large blocks in the process
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # because this module is imported before torch
    from torch import Tensor

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def processors() -> list[int]:
    """Returns the numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def available_cores() -> int:
    """Returns the number of cores that this process may keep busy, within its affinity and quota."""
    return max(1, int(min(len(processors()), core_quota())))


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Returns the bytes that the kernel counts as available; infinity if it does not say.

    The kernel promises more than it has, and kills a process that touches more. In a container the limit of the control
    group counts, too, and those of its parent groups. A group's page cache is not counted as used, because the kernel
    reclaims it first.
    """
    meminfo = _fields(proc / "meminfo")
    left = [meminfo["MemAvailable:"] << 10] if "MemAvailable:" in meminfo else []
    for version, folder in _groups("memory", proc, cgroups):
        limit, usage, files = _MEMORY[version]
        maximum, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if maximum.isdigit() and used.isdigit():  # "max": no limit
            left.append(max(0, int(maximum) - int(used) + _fields(folder / "memory.stat").get(files, 0)))
    return min(left, default=float("inf"))


def resident_bytes(proc: Path = PROC) -> int:
    """Returns the resident bytes of this process, including shared ones; 0 if the kernel does not say."""
    pages = _text(proc / "self" / "statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def core_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Returns the number of cores whose time the control groups allow this process; infinity without a limit.

    `docker run --cpus` and Kubernetes set such a limit, while all cores stay visible.
    """
    limits = [
        [word for name in _QUOTA[version] for word in _text(folder / name).split()]
        for version, folder in _groups("cpu", proc, cgroups)
    ]
    set_ones = (each for each in limits if len(each) == 2 and all(map(str.isdigit, each)))  # "max" and "-1": no limit
    return min((int(share) / int(period) for share, period in set_ones), default=math.inf)


# Files of a control group, by version: limit, usage and its reclaimable part; and quota.
_MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_QUOTA = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[tuple[int, Path]]:
    """Yields version and folder of each control group of this process, and of its parents."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        version = 2 if path and not controllers else 1 if controller in controllers.split(",") else None
        if version is not None:
            root = cgroups if version == 2 else cgroups / controller
            inner = root / path.lstrip("/")  # a container may see its own group as the root
            folders = (inner, *inner.parents)
            yield from ((version, folder) for folder in folders if folder == root or root in folder.parents)


def _fields(path: Path) -> dict[str, int]:
    """Returns the numbers in lines of a name and a number."""
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


# --- Garbage collection ----------------------------------------------------------------------------------------------
# Python's garbage collector ignores the 450,000 objects that importing torch creates permanently.
# The collector would traverse them repeatedly during the import, at every full collection of training, and once more
# when the interpreter ends: more than a second of each process in all. So it is stopped during the import, and then
# excludes them (`gc.freeze`).


def collect_later() -> None:
    """Stops the collector until `collect_from_now_on`, and shortens the end of the process."""
    gc.disable()
    skip_at_exit()


def collect_from_now_on() -> None:
    """Starts the collector, which ignores all present objects."""
    gc.freeze()
    gc.enable()


@contextmanager
def leave_out() -> Iterator[None]:
    """Stops the collector during a block of imports, and excludes their objects."""
    gc.collect()  # else garbage would be excluded, too, and keep its memory
    gc.disable()
    try:
        yield
    finally:
        collect_from_now_on()


def skip_at_exit() -> None:
    """Lets the process end without a last collection, because its memory is freed anyway."""
    atexit.register(_freeze_or_search)


def _freeze_or_search() -> None:
    """Excludes everything; collects if triton is loaded, whose bindings would report leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


# --- The C library's allocator ---------------------------------------------------------------------------------------
#
# Keeps large blocks of memory in a worker: settings of the C library's allocator, and of torch's.
# By default the C library returns each large block to the kernel as soon as it is free, and a step that allocates it
# again pays for every page again. With these settings an MLP of 25M parameters trains a fifth faster. The cost: a
# worker keeps all memory that it has ever taken.
#
#     variable                  set by `ddp.launch` and the recipes   set by `ddp.init` in a program that runs already
#     MALLOC_MMAP_THRESHOLD_    yes                                   yes (`mallopt`)
#     MALLOC_TRIM_THRESHOLD_    yes                                   yes (`mallopt`)
#     THP_MEM_ALLOC_ENABLE      yes: torch asks for huge pages        yes, unless torch has made a tensor before
#     GLIBC_TUNABLES            yes: copies past the caches           no: the C library reads it when the program begins
#
# A variable that the user has set stays as it is.


BLOCK_BYTES = 1 << 30
COPY_BYTES = 16 << 20  # copies of this size bypass the caches: `gradients/bucket.py` makes them
VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(BLOCK_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(BLOCK_BYTES),
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={COPY_BYTES:#x}",
}
_MALLOPT = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}  # the same as parameters of `mallopt`


def variables() -> dict[str, str]:
    """Returns the environment variables that a worker must have before it begins."""
    return {name: value for name, value in VARIABLES.items() if name not in os.environ}


def keep_large_blocks() -> None:
    """Applies the settings that can still be changed in a running process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # the GNU C library's
    for name in variables():
        if name in _MALLOPT and mallopt is not None:
            mallopt(_MALLOPT[name], BLOCK_BYTES)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", VARIABLES["THP_MEM_ALLOC_ENABLE"])


def give_back_free_blocks() -> None:
    """Returns freed memory to the system."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # the GNU C library's
        trim(0)


def give_back_large_blocks() -> None:
    """Returns freed memory to the system, and from now on each block of a MiB or more as soon as it is free."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MALLOPT["MALLOC_MMAP_THRESHOLD_"], 1 << 20)
    give_back_free_blocks()


# --- A signal when the parent dies -----------------------------------------------------------------------------------
# Workers request SIGTERM, after which they can still agree to stop (`run/launch/worker.py`). Loader processes request
# SIGKILL: they may be waiting in a read that never returns, and have nothing to save (`data/loading/loader.py`).
# Linux only. The parent is the *thread* that forked this process.


def ask_for_signal(number: int) -> bool:
    """Returns True if the kernel will send this signal when the parent dies; it may have died already."""
    if sys.platform != "linux":
        return False
    PR_SET_PDEATHSIG = 1
    failed: int = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    return not failed


# --- The environment -------------------------------------------------------------------------------------------------


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable during the block, for a library that has no other switch."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
