"""Asks the kernel for a signal when this process's parent dies, so that no orphan stays behind.

Workers ask for SIGTERM, on which they can still agree to stop (`worker.py`). Loader processes ask for SIGKILL: they may
be waiting in a read that never returns, and have nothing to save (`data/loading/loader.py`).

Linux only. The parent is the *thread* that has forked this process.
"""

from __future__ import annotations

import ctypes
import sys


def ask_for_signal(number: int) -> bool:
    """Returns True if the kernel will send this signal when the parent dies; it may have died already."""
    if sys.platform != "linux":
        return False
    PR_SET_PDEATHSIG = 1
    failed: int = ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    return not failed
