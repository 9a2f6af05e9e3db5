"""The output of a process: its standard streams, and its log.

A failed write never ends a run, whether its reader left, the disk is full, the terminal closed, or a character cannot
be encoded. After the first failed write, a stream goes to /dev/null. A character that its encoding lacks becomes "?".
Only processes that belong to this package use these streams: the launcher's command and its workers.

`say` prints every text of this package, and `console` the layouts of rich; both remove control characters, which a file
may contain. The output of a user's own code is unchanged.

Ctrl-C is a KeyboardInterrupt in Python. During the import of compiled modules it is lost, or becomes another error,
such as "module 'numpy' has no attribute 'minimum'". `ended_by_ctrl_c` is for imports.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TextIO

from ddp.errors import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console

FULL_S = 5.0
"""A non-blocking stream counts as broken once it has refused bytes for this long."""


def say(text: object, *, to: TextIO | None = None) -> None:
    """Prints a text, `printable`. `to`: a stream; None: standard output."""
    print(printable(str(text)), file=to, flush=True)  # no other module prints


def console(*, wide: int | None = None, **options: Any) -> Console:
    """Returns a console of rich that ignores markup and prints only `printable` text.

    Args:
        wide: columns if the output is a file or a pipe, which has no width.
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
    """Makes standard output and error survive every failed write. A replaced stream stays unchanged."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # closed (`>&-`): otherwise the next file or socket would get this number, and the output
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is sys.__stdout__:
        sys.stdout = tolerant(1, like=sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = tolerant(2, like=sys.stderr)


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Lets Ctrl-C end this process at once during the block, instead of raising; for imports (see above)."""
    is_main = threading.current_thread() is threading.main_thread()  # only this thread may set a handler
    if raises := is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if raises and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # else a module has set its own handler
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
    """A file whose descriptor becomes /dev/null after a failed write, also for C++ and child processes."""

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


# --- The log ---------------------------------------------------------------------------------------------------------
# One logger for the package: every line has its rank; only rank 0 reaches the terminal.
# `log` is an ordinary `logging.Logger` named "ddp", so applications can redirect it. `follow_rank` sets the prefix, and
# the rank of lightning-utilities' `rank_zero_*` helpers; call it at every change of membership.
# An engine, or `logging.basicConfig`, may have given the root logger of every rank a handler that writes to the
# terminal. It gets only the warnings of rank 0, because all other output for users is printed, once, unless
# `progress=False`. All other handlers get every line, and so does one that is attached to "ddp". Every line is
# `printable`, because it may quote a foreign file.


log = logging.getLogger("ddp")


class _RankFilter(logging.Filter):
    """Adds `rank` and `world_size` to every record, and filters what reaches a terminal."""

    rank, world_size, role = 0, 1, ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = printable(str(record.msg))
        if isinstance(record.args, tuple):
            record.args = tuple(map(_in_line, record.args))
        record.rank, record.world_size, record.role = self.rank, self.world_size, self.role
        above = log.parent.handlers if log.parent and log.propagate else []
        is_for_all = self.rank == 0 and record.levelno >= logging.WARNING
        if is_for_all or not any(map(_is_terminal, above)):
            return True
        for handler in [*log.handlers, *(each for each in above if not _is_terminal(each))]:
            if record.levelno >= handler.level:
                handler.handle(record)
        return False  # the handlers that should get it have got it


def _in_line(value: object) -> object:
    """Returns a value for a message, in one line, because it may come from a foreign file."""
    return printable(str(value), is_line=True) if isinstance(value, (str, PurePath, Exception)) else value


def _is_terminal(handler: logging.Handler) -> bool:
    """Returns True if a handler writes to this process's output."""
    stream = getattr(handler, "stream", None)
    return stream is not None and stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


_rank_filter = _RankFilter()
log.addFilter(_rank_filter)


_show: Callable[[bool], object] = bool  # does nothing, because rank 0 stays rank 0


def terminal_follows(show: Callable[[bool], None]) -> None:
    """Calls `show` whenever this process becomes rank 0, with True, or ceases to be it."""
    global _show
    _show = show


def follow_rank(rank: int, world_size: int, role: str = "") -> None:
    """Adds this rank, and its task in a cluster, such as worker:1, to every later log line."""
    if (rank == 0) != (_rank_filter.rank == 0):
        _show(rank == 0)
    _rank_filter.rank, _rank_filter.world_size, _rank_filter.role = rank, world_size, f" {role}" if role else ""
    from lightning_utilities.core.rank_zero import rank_zero_only  # imported here, because it is slow

    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def add_handler(handler: logging.Handler, level: int = logging.INFO) -> None:
    """Formats `handler` with time and rank and attaches it to the package's logger."""
    who = "%(asctime)s rank %(rank)s/%(world_size)s%(role)s"
    handler.setFormatter(logging.Formatter(f"{who} %(levelname)s  %(message)s"))
    handler.setLevel(level)
    log.addHandler(handler)
    log.setLevel(min(level, log.level or level))
