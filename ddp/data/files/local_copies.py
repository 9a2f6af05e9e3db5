"""Local copies of remote files: each file is downloaded once per host, whole or not at all.

    cache/3f9c…-shard-000.tar          the copy; 3f9c… is a hash of address, size and version
    cache/.part-3f9c…-shard-000.tar    a download in progress, locked by the process that makes it

The first of several processes locks the part, downloads, and renames it. The others wait for the lock and then find
the copy. The kernel releases the lock of a process that is killed; the next one begins the same part again. A process
whose download fails removes the part. A remote file that has changed has another name here. No copy is ever deleted:
the folder needs room for all files.

In a folder that others may write, such as a team's, each user has a folder of their own, because whoever may write a
copy decides what the samples are.

The folder is a disk of this host: on a disk that hosts share, two hosts may wait for each other's locks.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp.data.files.readers import Facts, check_unchanged
from ddp.data.files.remote import BLOCK_BYTES, Retries, remote_facts, remote_range
from ddp.errors import ConfigError
from ddp.process.files import make_folder, opened, to_read
from ddp.process.owners import why_shared


def local_copy(address: str, facts: Facts, *, cache_dir: Path, retries: Retries) -> Path:
    """Returns the path of a whole copy of a remote file, after downloading it if no process of this host has.

    Raises:
        ConfigError: the file cannot be read, or the folder cannot be written.
    """
    cache_dir = _own_part(cache_dir)
    digest = hashlib.sha256(f"{address} {facts.size} {facts.version}".encode()).hexdigest()[:16]
    copy = cache_dir / f"{digest}-{_base_name(address)}"
    part = copy.with_name(f".part-{copy.name}")
    if copy.exists():
        to_read(copy).close()  # refuses a link
        return copy
    try:
        make_folder(cache_dir)
        with _locked(part, until=copy) as descriptor:
            if descriptor is not None:
                try:
                    _download(address, facts.size, descriptor, retries)
                    check_unchanged(address, facts, remote_facts(address, retries=retries))
                    part.rename(copy)
                except BaseException:
                    part.unlink(missing_ok=True)  # nobody else writes to it while this process has the lock
                    raise
    except OSError as error:
        raise ConfigError(
            f"{address} cannot be copied to {cache_dir} ({error.strerror}): take a cache_dir that can be written and "
            f"has room for {facts.size} bytes"
        ) from error
    return copy


def _own_part(folder: Path) -> Path:
    """Returns a folder of copies, or, if others may write it, one in it that is this user's alone.

    Raises:
        ConfigError: it cannot be made, or another user has taken its place.
    """
    if not folder.is_dir() or not why_shared(folder, folder.stat()) or not os.access(folder, os.W_OK):
        return folder
    own = folder / f"user-{os.geteuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{own} cannot be made ({error.strerror}): take another cache_dir") from error
    if why := why_shared(own, own.lstat()):
        raise ConfigError(f"{why}, so no copy of yours can be there: remove it, or take another cache_dir")
    return own


def _base_name(address: str) -> str:
    name = address.rstrip("/").rpartition("/")[2].partition("?")[0]
    return name[-100:]  # the suffix matters, and file systems limit the length


def _download(address: str, size: int, descriptor: int, retries: Retries) -> None:
    os.truncate(descriptor, 0)  # of a process that was killed
    for start in range(0, size, BLOCK_BYTES):
        block = memoryview(remote_range(address, start, min(start + BLOCK_BYTES, size), retries=retries))
        while block:
            block = block[os.write(descriptor, block) :]
    os.fsync(descriptor)


@contextmanager
def _locked(part: Path, *, until: Path) -> Iterator[int | None]:
    """Yields the descriptor of a locked part, which is this process's to write; None once `until` exists."""
    while True:
        descriptor = opened(part, os.O_WRONLY | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for another process's download
            if until.exists():
                if _is_same(part, descriptor):  # made here, after the other one was renamed
                    part.unlink()
                yield None
                return
            if _is_same(part, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)  # releases the lock


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
