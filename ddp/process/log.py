"""One logger for the package: every line says which rank logs it; rank 0 alone reaches the terminal.

`log` is an ordinary `logging.Logger` named "ddp", so applications can redirect it. `follow_rank` sets the prefix, and
tells lightning-utilities' `rank_zero_*` helpers the rank; call it at every change of membership.

An engine, or `logging.basicConfig`, may have given the root logger of every rank a handler that writes to the terminal.
It gets the warnings of rank 0. Any other line is not for it, because whatever a user is to see beside warnings is
printed, once, unless `progress=False`. All other handlers get every line, and so does one that is attached to "ddp".
Every line is `printable`, because it may quote a file of somebody else's.
"""

from __future__ import annotations

import logging
import sys
from pathlib import PurePath

from lightning_utilities.core.rank_zero import rank_zero_only

from ddp.errors import printable

log = logging.getLogger("ddp")


class _RankFilter(logging.Filter):
    """Adds `rank` and `world_size` to everything that is logged, and keeps most of it from terminals."""

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
        return False  # all who are to have it, have it


def _in_line(value: object) -> object:
    """Returns a value for a message, in one line: it may be of a file that somebody else has written."""
    return printable(str(value), is_line=True) if isinstance(value, (str, PurePath, Exception)) else value


def _is_terminal(handler: logging.Handler) -> bool:
    """Returns True if a handler writes to this process's output."""
    stream = getattr(handler, "stream", None)
    return stream is not None and stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)


_rank_filter = _RankFilter()
log.addFilter(_rank_filter)


def follow_rank(rank: int, world_size: int, role: str = "") -> None:
    """Makes every later log line carry this rank, and the task of a cluster that it is, such as worker:1."""
    _rank_filter.rank, _rank_filter.world_size, _rank_filter.role = rank, world_size, f" {role}" if role else ""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def add_handler(handler: logging.Handler, level: int = logging.INFO) -> None:
    """Formats `handler` with time and rank and attaches it to the package's logger."""
    who = "%(asctime)s rank %(rank)s/%(world_size)s%(role)s"
    handler.setFormatter(logging.Formatter(f"{who} %(levelname)s  %(message)s"))
    handler.setLevel(level)
    log.addHandler(handler)
    log.setLevel(min(level, log.level or level))
