"""Files that are whole or absent, whenever the process is killed or the power fails; and JSON that a stranger damaged.

    write     .tmp-NAME in the same folder, flushed to the disk       killed: NAME is what it was
    rename    .tmp-NAME to NAME                                       atomic
    flush     the folder, whose entry is new                          power cut: NAME is the old file or the new one

The entry of a new folder needs its parent's flush in the same way: else a power cut may take a whole run.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
"""What some network file systems say to the flush of a folder, and any to that of one that may not be read."""


def write_whole(path: Path, text: str) -> None:
    """Puts `text` in place of a file's content, so that a reader finds all of the old or all of the new."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, to stay."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Makes new and renamed entries of a folder survive a power cut, where its file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:
            raise


def json_object(text: str) -> dict[str, Any]:
    """The object that `text` holds.

    Raises:
        ValueError: it holds none; however it is damaged.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value
