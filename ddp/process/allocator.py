"""Keeps large blocks of memory in a worker: settings of the C library's allocator, and of torch's.

By default the C library gives each large block back to the kernel as soon as it is free, and a step that takes it anew
pays for every page of it again. With these settings an MLP of 25M parameters trains a fifth faster. The cost: a worker
keeps what it has once taken.

    variable                  set by `ddp.launch` and the recipes   set by `ddp.init` in a program that runs already
    MALLOC_MMAP_THRESHOLD_    yes                                   yes (`mallopt`)
    MALLOC_TRIM_THRESHOLD_    yes                                   yes (`mallopt`)
    THP_MEM_ALLOC_ENABLE      yes: torch asks for huge pages        yes, unless torch has made a tensor before
    GLIBC_TUNABLES            yes: copies past the caches           no: the C library reads it when the program begins

A variable that the user has set stays as it is.
"""

from __future__ import annotations

import ctypes
import os

BLOCK_BYTES = 1 << 30
COPY_BYTES = 16 << 20  # copies of this size go past the caches: `gradients/bucket.py` makes them
VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(BLOCK_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(BLOCK_BYTES),
    "THP_MEM_ALLOC_ENABLE": "1",
    "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={COPY_BYTES:#x}",
}
_MALLOPT = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}  # the same in the terms of malloc.h


def variables() -> dict[str, str]:
    """Returns the environment variables that a worker must have before it begins."""
    return {name: value for name, value in VARIABLES.items() if name not in os.environ}


def keep_large_blocks() -> None:
    """Sets, in this process, what can still be set while it runs."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # the GNU C library's
    for name in variables():
        if name in _MALLOPT and mallopt is not None:
            mallopt(_MALLOPT[name], BLOCK_BYTES)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", VARIABLES["THP_MEM_ALLOC_ENABLE"])
