"""Python's garbage collector, kept from the 450,000 objects that importing torch leaves for good.

The collector would walk them again and again while they come, at every full collection of training, and once more when
the interpreter ends: together more than a second of each process. So it waits until they are there, and then leaves
them out (`gc.freeze`).
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def collect_later() -> None:
    """Stops the collector until `collect_from_now_on`, and makes the end of the process short."""
    gc.disable()
    skip_at_exit()


def collect_from_now_on() -> None:
    """Starts the collector; it never looks at what stands already."""
    gc.freeze()
    gc.enable()


@contextmanager
def leave_out() -> Iterator[None]:
    """Stops the collector for a block of imports, and leaves out what they make."""
    gc.disable()
    try:
        yield
    finally:
        collect_from_now_on()


def skip_at_exit() -> None:
    """Lets the process end without a last search: its memory is given back anyway."""
    atexit.register(_freeze_or_search)


def _freeze_or_search() -> None:
    """Leaves out everything; but the bindings of triton, which comes with torch for CUDA, report that as leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()
