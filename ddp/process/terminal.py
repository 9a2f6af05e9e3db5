"""Standard streams that never end a run: their reader left, the disk is full, the terminal closed, a letter is unknown.

From the first write that fails on, such a stream goes to /dev/null. A letter that its encoding lacks becomes "?". Only
processes that belong to this package use these streams: the launcher's command and its workers.

`say` prints every text of this package, and `console` what rich lays out: both let no control character of somebody
else's file through. What a user's own code prints is left alone.

Ctrl-C is heard in Python as a KeyboardInterrupt. One that comes while compiled modules are imported is lost there, or
becomes an error of theirs, such as "module 'numpy' has no attribute 'minimum'". `ended_by_ctrl_c` is for imports.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from ddp.errors import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console

FULL_S = 5.0
"""A stream that does not block counts as broken once it has refused bytes for this long."""


def say(text: object, *, to: TextIO | None = None) -> None:
    """Prints a text, `printable`. `to`: a stream; None: standard output."""
    print(printable(str(text)), file=to, flush=True)  # no other module prints


def console(*, wide: int | None = None, **options: Any) -> Console:
    """Returns a console of rich, which takes no text for markup, and prints it `printable`.

    Args:
        wide: columns where the output is a file or a pipe, which has no edge.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, *args: Any, **more: Any) -> Iterator[Segment]:
            for each in super().render(*args, **more):
                yield each if each.control else Segment(printable(each.text), each.style)

    made = Printable(markup=False, **options)
    return Printable(markup=False, width=wide, **options) if wide and not made.is_terminal else made


def keep_writing() -> None:
    """Makes standard output and error survive every failed write. A stream that was replaced stays as it is."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # closed (`>&-`): the next file or socket would get this number, and prints would go there
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = tolerant(1, like=sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = tolerant(2, like=sys.stderr)


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Lets Ctrl-C end this process at once in the block, where it would raise; for imports (see above)."""
    is_main = threading.current_thread() is threading.main_thread()  # the only one that may set a handler
    if raises := is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if raises and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # else a module has set one of its own
            signal.signal(signal.SIGINT, signal.default_int_handler)


def tolerant(fd: int, *, like: TextIO | None) -> io.TextIOWrapper:
    """Returns a stream on `fd` that survives every failed write, and otherwise encodes and buffers as `like` does."""
    kept: dict[str, Any] = {"line_buffering": True}
    if like is not None:
        with contextlib.suppress(OSError):
            like.flush()
        kept = {name: getattr(like, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    if kept.get("errors", "strict") in ("strict", "surrogateescape"):
        kept["errors"] = "replace"
    raw = _Tolerant(fd, "w", closefd=False)
    return io.TextIOWrapper(raw if kept.get("write_through") else io.BufferedWriter(raw), **kept)


class _Tolerant(io.FileIO):
    """A file whose descriptor becomes /dev/null once it cannot be written, also for C++ and child processes."""

    def write(self, data: ReadableBuffer) -> int:
        """Writes all of `data`, or drops it."""
        rest = memoryview(data).cast("B")
        num_bytes = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None and not select.select([], [self], [], FULL_S)[1]:
                    raise BlockingIOError
                rest = rest[written or 0 :]
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        return num_bytes
