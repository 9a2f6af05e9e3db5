"""Files that are whole or absent, whenever the process is killed or the power fails; and folders with one writer.

    write     .tmp-NAME in the same folder, flushed to the disk       killed: NAME is what it was
    rename    .tmp-NAME to NAME                                       atomic
    flush     the folder, whose entry is new                          power cut: NAME is the old file or the new one

The entry of a new folder needs its parent's flush in the same way, because otherwise a power cut may take a whole run.

A process that writes into a folder for long holds it (`hold`), so that a second writer is refused instead of mixing its
files with those of the first.

Note "which lock". flock(2) belongs to the open file, and the kernel releases it when the process ends, however it ends.
A lock of fcntl(2) would be lost as soon as anyone in this process closes the file, such as a callback that copies the
folder. A forked child, such as a loader's worker, shares the open file and would keep the lock of a parent that was
killed; so children close it.

Read before: `log.py`. Read next: `train/stored_checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ddp.errors import ConfigError
from ddp.log import log

_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
"""Errors of some network file systems when a folder is flushed, and of any if the folder cannot be read."""

_LOCK = ".lock"
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
"""Errors of file systems without locks."""

# ------------------------------------------------------------------------------------------------------- whole files


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


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file that takes the place of `path` if the block ends well. Several processes may write one at once."""
    temporary = path.with_name(f".tmp-{uuid.uuid4().hex}-{path.name}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, so that they survive a power cut."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Makes new and renamed entries of a folder survive a power cut, if its file system can."""
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
    """Returns the JSON object in `text`.

    Raises:
        ValueError: there is none, in whichever way `text` is damaged.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


# ------------------------------------------------------------------------------------------------------- one writer


class Hold:
    """A folder that no other process may write, until it was closed as often as this process has held it."""

    def __init__(self, folder: Path, descriptor: int | None) -> None:
        self._folder, self._descriptor, self.count = folder, descriptor, 0

    def close(self) -> None:
        """Lets others write, once it was called as often as the folder was held."""
        self.count -= 1
        if self.count == 0:
            _held.pop(self._folder, None)
            if self._descriptor is not None:
                with contextlib.suppress(OSError):  # before the lock is released: afterwards the file is another's
                    (self._folder / _LOCK).unlink()
            self.forget()

    def forget(self) -> None:
        """Closes this process's descriptor and leaves the file; a lock that was inherited stays the parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: dict[Path, Hold] = {}


def _forget_what_the_parent_holds() -> None:
    for held in _held.values():
        held.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_what_the_parent_holds)


def hold(folder: Path) -> Hold:
    """Keeps other processes from writing into a folder, which exists; warns if its file system has no locks.

    Raises:
        ConfigError: another process holds it; the message says which.
        OSError: the folder cannot be written.
    """
    folder = folder.resolve()
    if folder not in _held:
        try:
            descriptor = _lock(folder / _LOCK)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
            log.warning("%s cannot be locked (%s): make sure that no other run writes there", folder, error.strerror)
            descriptor = None
        _held[folder] = Hold(folder, descriptor)
    _held[folder].count += 1
    return _held[folder]


def _lock(path: Path) -> int:
    """Locks a file and writes into it which process has; returns its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
            if os.fstat(descriptor).st_nlink > 0:  # otherwise the last holder has removed it since it was opened here
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"{path.parent} is being written by {holder}: wait until it has ended, or take another folder"
            ) from None
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)
