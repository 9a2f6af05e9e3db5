"""The Python stack of another thread of this process, and the user's own frame in a traceback.

`sys._current_frames` would return frame objects, and each `f_back` creates another one for the caller. In CPython 3.11
that may start the garbage collector. If a finalizer then lets the other thread run, that thread may return from the
very frame in question, and freed memory is written to: a crash, much later, somewhere else. Frame objects also keep
alive the objects of their frames. So `faulthandler` writes the stack here: it creates no objects, and no Python code
runs meanwhile.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sysconfig
import tempfile
import traceback
from pathlib import Path
from traceback import FrameSummary
from typing import IO

_THREAD = re.compile(rb"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(rb'^  File "(.*)", line (\d+) in (.*)$')
_ESCAPED = re.compile(r"\\(?:x(..)|u(.{4})|U(.{8}))")


def stack_of(thread: int) -> list[FrameSummary]:
    """Returns the active Python calls of a thread, the innermost last.

    Args:
        thread: its `ident`.

    Returns:
        At most the innermost 100 calls, with names of up to 500 characters. The list is empty for a thread that has
            ended, runs no Python code, or is older than a hundred others.
    """
    try:
        with _file() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            lines = file.read().splitlines()
    except OSError:  # such as no free descriptor
        return []
    frames: list[FrameSummary] = []
    is_wanted = False
    for line in lines:
        if start := _THREAD.match(line):
            is_wanted = int(start[1], 16) == thread
        elif is_wanted and (found := _FRAME.match(line)):
            path, number, name = found.groups()
            frames.append(FrameSummary(_unescaped(path), int(number), _unescaped(name), lookup_line=False))
    return frames[::-1]


_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARIES = [str(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
_NOT_THE_USERS = ("<frozen", *(f"{place}{os.sep}" for place in (Path(__file__).parents[1], *_LIBRARIES)))


def is_installed(file: str) -> bool:
    """Returns True for code of an installed library, but not of this package or Python itself."""
    path = Path(file)
    return not _INSTALLED.isdisjoint(path.parts) and not path.is_relative_to(Path(__file__).parents[1])


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame of a traceback that belongs neither to a library nor to this package."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    users = (each for each in frames if not (each.filename.startswith(_NOT_THE_USERS) or is_installed(each.filename)))
    return next(users, None)


def _unescaped(text: bytes) -> str:
    """Returns the original text of faulthandler's ASCII output."""
    return _ESCAPED.sub(lambda found: chr(int(found[found.lastindex or 0], 16)), text.decode("ascii"))


def _file() -> IO[bytes]:
    """Opens an anonymous file, in memory if the platform supports that."""
    return os.fdopen(os.memfd_create("stack"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()
