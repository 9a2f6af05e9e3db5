"""Files that are complete or absent, even if the process is killed or the power fails; and folders with one writer.

    write     .tmp-NAME in the same folder, flushed to the disk       killed: NAME is what it was
    rename    .tmp-NAME to NAME                                       atomic
    flush     the folder, whose entry is new                          power cut: NAME is the old file or the new one

A new folder's entry needs a flush of its parent in the same way, because otherwise a power cut may lose a whole run.

A process that keeps writing into a folder locks it (`hold`), so that a second writer is refused instead of mixing its
files with those of the first.

Note "links". A user who may write into a folder can leave a link there to another user's file. So a file of a run, an
index or a cache is either created (`new_file`), or opened by `opened`, which follows no link; and a folder behind
another user's link is not used (`make_folder`). Folders above the last one are the user's own choice.

Note "owners". Who could write or replace a file shows in owners and modes (`why_shared`; `why_in_other_hands` for a
path, with its links and the folders above, in which others could rename entries). Which users count as others:

    root, this user                                                 are trusted
    a group of this user alone, as many systems make for each       counts as this user
    everyone else who may write                                     is another user

Note "which lock". A flock(2) belongs to the open file, and the kernel releases it when the process ends in any way. A
lock of fcntl(2) would be lost as soon as any code in this process closes the file, such as a callback that copies the
folder. A forked child, such as a loader's worker, shares the open file and would keep the lock of a killed parent; so
children close it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TypeVar

from ddp.errors import ConfigError
from ddp.process.terminal import log

_OF_SYSTEMS = ("@eaDir", "#recycle", "__MACOSX", "lost+found")


def is_hidden(name: str) -> bool:
    """Returns True for files and folders of other tools, such as .ipynb_checkpoints or @eaDir."""
    return name in _OF_SYSTEMS or (name.startswith(".") and name not in (".", ".."))


AnyPath = TypeVar("AnyPath", str, Path)


def at_home(path: AnyPath) -> AnyPath:
    """Returns a path with ~ or ~NAME at its beginning expanded; unchanged if there is no such user."""
    return type(path)(os.path.expanduser(path))  # noqa: PTH111  # that of Path raises for a file ~draft


_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM)
"""Errors of some network file systems when a folder is flushed, and of all if the folder cannot be read."""

_LOCK = ".lock"
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
"""Errors of file systems without locks."""

MOST = 64 << 20
"""Largest size of a text file."""
_CHUNK = 1 << 20

# ----------------------------------------------------------------------------------------------------- owners and modes


NOTHING, WRITE, ANYTHING = 0o0, 0o2, 0o7
"""Rights of others, as bits of a mode. NOTHING: only the owner counts."""

_NOBODY = 65534  # apparent owner of root's folders in a container whose user namespace lacks root


def why_shared(path: Path, status: os.stat_result, *, rights: int = WRITE) -> str:
    """Returns the reason why users other than this one and root have rights on a file or folder; "" if they have none.

    Args:
        status: of the path, or of the file that was opened there.
        rights: the ones that others must not have.
    """
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to {user_name(status.st_uid)}"
    if status.st_mode & rights or (status.st_mode >> 3 & rights and not _is_alone_in(status.st_gid)):
        return f"others may {'write' if rights == WRITE else 'enter'} {path}"
    return ""


def why_in_other_hands(path: Path) -> str:
    """Returns the reason why other users control a path; "" if they do not.

    The current folder and those above it are not checked, because the user has chosen to be there.

    Raises:
        OSError: the path does not exist.
    """
    here = Path.cwd()
    for way in dict.fromkeys((path.absolute(), path.resolve())):
        whys = [why_shared(way, way.lstat(), rights=NOTHING), why_shared(way, way.stat())]
        whys += [_why_others_rename_in(folder) for folder in way.parents if not here.is_relative_to(folder)]
        if why := next(filter(None, whys), ""):
            return why
    return ""


def _why_others_rename_in(folder: Path) -> str:
    """Returns the reason why others may replace this user's entries in a folder; "" if they may not."""
    status, link = folder.stat(), folder.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid != _NOBODY and (why := why_shared(folder, link, rights=NOTHING)):
        return why  # its owner may retarget a link
    is_sticky = status.st_mode & stat.S_ISVTX  # as in /tmp: only owners rename their entries
    rights = NOTHING if is_sticky else WRITE
    return "" if status.st_uid == _NOBODY else why_shared(folder, status, rights=rights)


def _is_alone_in(group: int) -> bool:
    """Returns True for the group that many systems make for each user, with the user's name and no other member."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_gid == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def user_name(uid: int) -> str:
    """Returns the name of a user; the number if the host has no name for it."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


# ------------------------------------------------------------------------------- files in folders that others may write


def opened(path: Path, flags: int, *, any_owner: bool = False) -> int:
    """Opens a file, and returns its descriptor (note "links").

    Args:
        flags: of os.open, without O_TRUNC, which would empty a file before it is checked.
        any_owner: it is only read, and its content is not written elsewhere, so its owner and other names do not
            matter.

    Raises:
        ConfigError: it is a link or a pipe; or, in a folder that others may write, it has a second name, or belongs to
            neither this user nor the folder's.
        OSError: it cannot be opened.
    """
    try:  # because without O_NONBLOCK a pipe would block
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if path.is_symlink():
            raise _planted(path, "is a link") from error
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise _planted(path, "is not a regular file") from error
        raise
    try:
        _check_ordinary(path, os.fstat(descriptor), any_owner=any_owner)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_ordinary(path: Path, file: os.stat_result, *, any_owner: bool) -> None:
    folder = path.parent.stat()
    if not stat.S_ISREG(file.st_mode):
        raise _planted(path, "is not a regular file")
    if any_owner or not why_shared(path.parent, folder):
        return
    if file.st_nlink > 1:
        raise _planted(path, "has a second name elsewhere")
    if file.st_uid != folder.st_uid and why_shared(path, file, rights=NOTHING):
        raise _planted(path, f"belongs to {user_name(file.st_uid)}")


def _planted(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{path} {what}, and is not opened, because users who may write {path.parent} could have put it there to reach "
        "a file of yours: remove it"
    )


def read_own(path: Path, *, most: int = MOST, any_owner: bool = False) -> str:
    """Returns the text of a file.

    Args:
        most: largest size in bytes.
        any_owner: as in `opened`.

    Raises:
        ConfigError, OSError: as `opened`; or the file is larger.
    """
    with to_read(path, any_owner=any_owner) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ConfigError(f"{path} is larger than this program writes it ({most:,} bytes): remove it")
        return file.read(size).decode(errors="replace")


def lines_of(path: Path) -> Iterator[str]:
    """Yields the lines of a file, without an incomplete last one; nothing if there is no file.

    Raises:
        ConfigError, OSError: as `opened`; or the file holds bytes that are not text.
    """
    if not os.path.lexists(path):
        return
    with to_read(path) as file:
        parts = []
        while part := file.readline(_CHUNK):
            if b"\0" in part:  # a hole, which may have any size
                raise ConfigError(f"{path} is damaged: it holds bytes that are not text; remove it")
            parts.append(part)
            if part.endswith(b"\n"):
                yield b"".join(parts)[:-1].decode(errors="replace")
                parts.clear()


def to_read(path: Path, *, any_owner: bool = False) -> IO[bytes]:
    """Opens a file to read it. `any_owner`: as in `opened`.

    Raises:
        ConfigError, OSError: as `opened`.
    """
    return os.fdopen(opened(path, os.O_RDONLY, any_owner=any_owner), "rb")


def to_append(path: Path) -> TextIOWrapper:
    """Opens a text file to append to it, or creates it.

    Raises:
        ConfigError, OSError: as `opened`.
    """
    descriptor = opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def new_file(path: Path, *, mode: int = 0o666) -> IO[bytes]:
    """Creates a file for writing, after removing what a killed process may have left under this name."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


# ------------------------------------------------------------------------------------------------------- whole files


def write_whole(path: Path, text: str) -> None:
    """Replaces a file's content atomically: a reader finds all of the old text or all of the new."""
    with whole_file(path, temporary=f".tmp-{path.name}") as file:
        file.write(text.encode(errors="backslashreplace"))
    flush_folder(path.parent)


@contextlib.contextmanager
def whole_file(path: Path, *, temporary: str = "") -> Iterator[IO[bytes]]:
    """Yields a file that replaces `path` if the block succeeds.

    Args:
        temporary: its name until then, for a single writer; "": several processes may write at once.
    """
    written = path.with_name(temporary or f".tmp-{uuid.uuid4().hex}-{path.name}")
    try:
        with new_file(written) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


@contextlib.contextmanager
def if_possible(path: Path) -> Iterator[None]:
    """Turns errors of writing an optional file, such as a full disk, into a warning."""
    try:
        yield
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        log.warning("%s could not be written: %s", path, reason)


def make_folder(folder: Path) -> None:
    """Creates a folder, and missing ones above it, so that they survive a power cut.

    Raises:
        ConfigError: another user's link is in its place (note "links").
    """
    refuse_others_link(folder)
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        flush_folder(path.parent)


def refuse_unwritable_name(folder: Path) -> None:
    """Raises ConfigError if a folder's name is not UTF-8, because torch cannot load a checkpoint from there."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{folder}: this name is not UTF-8, and torch cannot load files from such a folder; choose another one"
        ) from error


@contextlib.contextmanager
def pinned(folder: Path) -> Iterator[Path]:
    """Yields a path that refers to this folder during the block, even if another one takes its place.

    Raises:
        ConfigError: it is a link.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if folder.is_symlink():
            raise _planted(folder, "is a link") from error
        raise
    try:
        name = Path(f"/proc/self/fd/{descriptor}")
        yield name if name.exists() else folder
    finally:
        os.close(descriptor)


def refuse_others_link(folder: Path) -> None:
    """Raises ConfigError if a folder is another user's link, which could lead to a folder of this user's."""
    if folder.is_symlink() and why_shared(folder, link := folder.lstat(), rights=NOTHING):
        raise ConfigError(
            f"{folder} is a link of {user_name(link.st_uid)}, and is not followed, because it could lead to a folder "
            "of yours: remove it, or name the folder that it leads to"
        )


def flush_folder(folder: Path) -> None:
    """Makes new and renamed entries of a folder survive a power cut, if its file system supports that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:
            raise


# ------------------------------------------------------------------------------------------------------- one writer


class Hold:
    """A lock on a folder against other writers, until `close` was called as often as this process has called `hold`."""

    def __init__(self, number: tuple[int, int], lock: Path, descriptor: int | None) -> None:
        self._number, self._lock, self._descriptor, self.count = number, lock, descriptor, 0

    def close(self) -> None:
        """Releases the lock, once it was called as often as `hold`."""
        self.count -= 1
        if self.count == 0:
            _held.pop(self._number, None)
            if self._descriptor is not None:
                with contextlib.suppress(OSError):  # before the release, because afterwards the file is another's
                    self._lock.unlink()
            self.forget()

    def forget(self) -> None:
        """Closes this process's descriptor and leaves the file; an inherited lock stays with the parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


_held: dict[tuple[int, int], Hold] = {}  # by device and inode of the folder, which may be renamed


def _forget_what_the_parent_holds() -> None:
    for held in _held.values():
        held.forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_what_the_parent_holds)


def hold(folder: Path) -> Hold:
    """Locks an existing folder against other writing processes; warns if its file system has no locks.

    Raises:
        ConfigError: another process holds it; the message says which.
        OSError: the folder cannot be written.
    """
    lock, status = folder.absolute() / _LOCK, folder.stat()
    number = status.st_dev, status.st_ino
    if number not in _held:
        try:
            descriptor = _lock(lock)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
            log.warning("%s cannot be locked (%s): make sure that no other run writes there", folder, error.strerror)
            descriptor = None
        _held[number] = Hold(number, lock, descriptor)
    _held[number].count += 1
    return _held[number]


def is_held(folder: Path) -> bool:
    """Returns True if any process, including this one, holds a folder; also if its file system has no locks."""
    try:
        descriptor = opened(folder / _LOCK, os.O_RDONLY)
    except (OSError, ConfigError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for children forked meanwhile
    except OSError as error:
        return isinstance(error, BlockingIOError) or error.errno in _CANNOT_LOCK
    finally:
        os.close(descriptor)
    return False


def _lock(path: Path) -> int:
    """Locks a file and writes this process's name into it; returns its descriptor."""
    while True:
        descriptor = opened(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
            if os.fstat(descriptor).st_nlink > 0:  # otherwise its last holder has removed it since it was opened
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"{path.parent.resolve()} is being written by {holder}: wait until it has ended, or take another folder"
            ) from None
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)


# --- Scratch folders -------------------------------------------------------------------------------------------------
# A scratch folder exists while a block runs, and does not outlive a killed process for long.
# The process that creates such a folder holds it (`hold`). The kernel releases the lock when the process ends in any
# way, and the next process that creates one in the same place removes those that no process holds.


_NEW = ".new"  # of a folder that is not held yet, which other processes ignore


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields a new folder that only this user can enter, and removes it at the end of the block.

    Args:
        parent: its parent, on a file system with locks.
        prefix: of its name alone, because folders with this prefix that no process holds are removed.

    Raises:
        OSError: it cannot be created.
    """
    for other in parent.glob(f"{prefix}*"):
        _remove_if_left(other)
    folder = Path(tempfile.mkdtemp(prefix=f"{_NEW}{prefix}", dir=parent))
    held = hold(folder)
    try:
        folder = folder.rename(parent / folder.name.removeprefix(_NEW))
        yield folder
    finally:
        held.close()
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    """Removes the folder of a process that was killed."""
    with contextlib.suppress(ConfigError, OSError):  # another process holds it, or has just removed it
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            with contextlib.closing(hold(folder)) as held:
                is_free = held.count == 1  # not by this process either
            if is_free:
                shutil.rmtree(folder)
