"""One way to read a file, wherever it lies, and a check that it is the version that is meant.

    address                          without cache_dir         with cache_dir
    /data/a.tar, file:///data/a.tar  LocalReader               LocalReader
    s3://bucket/a.tar                RemoteReader: streamed    LocalReader of a copy, downloaded once per host
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ddp.data.files.readers import (
    BLOCK_BYTES,
    FileVersion,
    LocalReader,
    Reader,
    RemoteReader,
    Retries,
    check_unchanged,
    is_remote,
    local_facts,
    remote_facts,
    remote_range,
)
from ddp.errors import ConfigError
from ddp.process.files import at_home, make_folder, opened, to_read, whole_file
from ddp.process.owners import why_shared

# --- Local copies of remote files ------------------------------------------------------------------------------------
#
# Local copies of remote files: each file is downloaded once per host, whole or not at all.
#
#     cache/3f9c…-train-000.tar          the copy; 3f9c… is a hash of address, size and version
#     cache/.part-3f9c…-train-000.tar    a download in progress
#     cache/.lock-3f9c…-train-000.tar    empty; locked by the process that downloads
#
# The first of several processes takes the lock, downloads the part, and renames it. The others wait for the lock and
# then find the copy. The kernel releases the lock of a process that is killed; the next one begins the same part
# again. A process whose download fails removes the part. A remote file that has changed has another name here. No copy
# is ever deleted: the folder needs room for all files.
#
# fsspec's own `filecache::` takes no lock, and writes under the copy's final name: of two processes that began 0.8 s
# apart, the first was handed a file of the right size with half of its bytes (fsspec 2026.9). Its one call for a whole
# file could have no deadline that suits all sizes, either.
#
# A folder that others may write is refused, because a user who may write a copy decides what the samples are.
#
# The folder is a disk of this host: on a disk that hosts share, two hosts may wait for each other's locks.


def local_copy(address: str, facts: FileVersion, *, cache_dir: Path, retries: Retries) -> Path:
    """Returns the path of a whole copy of a remote file, after downloading it if no process of this host has.

    Raises:
        ConfigError: the file cannot be read, or the folder cannot be written, or others may write it, too.
    """
    if cache_dir.is_dir() and os.access(cache_dir, os.W_OK) and (why := why_shared(cache_dir, cache_dir.stat())):
        raise ConfigError(
            f"{why}, and could put other samples in the place of copies: take a cache_dir that is yours alone"
        )
    digest = hashlib.sha256(f"{address} {facts.size} {facts.version}".encode()).hexdigest()[:16]
    copy = cache_dir / f"{digest}-{_base_name(address)}"
    try:
        make_folder(cache_dir)
        if not copy.exists():
            with _locked(copy.with_name(f".lock-{copy.name}")):
                if not copy.exists():
                    _download(address, facts, copy, retries)
        to_read(copy).close()  # refuses a link
    except OSError as error:
        raise ConfigError(
            f"{address} cannot be copied to {cache_dir} ({error.strerror}): take a cache_dir that can be written and "
            f"has room for {facts.size} bytes"
        ) from error
    return copy


def _base_name(address: str) -> str:
    name = address.rstrip("/").rpartition("/")[2].partition("?")[0]
    return name[-100:]  # the suffix matters, and file systems limit the length


def _download(address: str, facts: FileVersion, copy: Path, retries: Retries) -> None:
    with whole_file(copy, temporary=f".part-{copy.name}") as file:  # in the place of what a killed process has left
        for start in range(0, facts.size, BLOCK_BYTES):
            file.write(remote_range(address, start, min(start + BLOCK_BYTES, facts.size), retries=retries))
        check_unchanged(address, facts, remote_facts(address, retries=retries))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes of this host out of the block."""
    descriptor = opened(path, os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # releases the lock


_NUM_THREADS = 16  # they wait for answers


class Storage(NamedTuple):
    """Reads local and remote files."""

    retries: Retries = Retries()  # of remote calls
    cache_dir: str | Path | None = None  # where remote files are copied to; None streams them

    def facts(self, addresses: Sequence[str]) -> list[FileVersion]:
        """Returns size and version of each file.

        Raises:
            ConfigError: one of them is missing.
        """
        if not any(map(is_remote, addresses)):
            return list(map(local_facts, addresses))
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            return list(threads.map(self._facts, addresses))

    def reader(self, address: str, facts: FileVersion) -> Reader:
        """Opens a file.

        Raises:
            ConfigError: it is missing, or another version than `facts` say.
        """
        if is_remote(address) and self.cache_dir is not None:
            return self._copy(address, facts, at_home(Path(self.cache_dir)))
        reader: Reader
        reader = RemoteReader(address, retries=self.retries) if is_remote(address) else LocalReader(address)
        check_unchanged(address, facts, reader.facts)
        return reader

    def _facts(self, address: str) -> FileVersion:
        return remote_facts(address, retries=self.retries) if is_remote(address) else local_facts(address)

    def _copy(self, address: str, facts: FileVersion, cache_dir: Path) -> Reader:
        copy = local_copy(address, facts, cache_dir=cache_dir, retries=self.retries)
        size = copy.stat().st_size
        if size != facts.size:
            raise ConfigError(f"{copy} has {size} bytes, and {address} has {facts.size}: delete the copy")
        return LocalReader(str(copy), address=address, facts=facts)


DIRECT = Storage()
"""Streams remote files."""
