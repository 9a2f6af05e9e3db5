"""Bytes of a file by position: `read(offset, length)`, without a position of its own that processes could share.

    LocalReader     os.pread on a descriptor       about 2 us for a few KB that the kernel has cached
    RemoteReader    ranges through fsspec          `remote.py`, with a deadline and retries

pread(2) is used instead of a memory map, because a file that is cut off while it is mapped ends the process with a
SIGBUS. Here it is an error that names the file.

`Facts` tell a file's versions apart: the size, and the time of the last change or what the remote side has in its
place. A reader compares them after every read, because a file that is written over while it is open would be read as a
mixture of two versions. One fstat(2) takes 1 us of the two. A copy may keep size and time of the file that it replaces.
So local files also have the time of their last change of any kind (ctime), and their number on the disk (inode). An
index is made again if one of these is another. A run that goes on ends only if both are, because a new name or new
permissions change the first, and some network file systems change the second.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from ddp.errors import ConfigError


class Facts(NamedTuple):
    """Tells one version of a file from the next."""

    size: int  # in bytes
    version: str  # local: time of the last change in ns; remote: its etag, checksum or time; "" if it has none
    ctime_ns: int = 0  # of a local file
    inode: int = 0

    def is_same_version(self, other: Facts) -> bool:
        """Returns False for another content, as far as that can be told while a run goes on."""
        is_same_file = self.ctime_ns == other.ctime_ns or self.inode == other.inode
        return self[:2] == other[:2] and is_same_file


class ReadFailed(ConfigError):
    """A disk or a network failed to hand out bytes of a file; other bytes of the same file may still be readable."""


class Reader(ABC):
    """An open file.

    Attributes:
        address: its name in errors.
        facts: of the version that is open.
    """

    address: str
    facts: Facts

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Returns exactly `length` bytes from `offset`.

        Raises:
            ReadFailed: they cannot be read.
            ConfigError: the file has changed since it was opened, or ends before.
        """


class LocalReader(Reader):
    """A file of this host. Its descriptor is closed with this object.

    Args:
        path: the file.
        address, facts: in place of the path and the file's own, for a local copy of a remote file.

    Raises:
        ConfigError: there is no such file, or it cannot be opened.
    """

    def __init__(self, path: str, *, address: str | None = None, facts: Facts | None = None) -> None:
        self._descriptor = -1  # for __del__
        self._path, self.address = path, address or path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unopened(path, error) from error
        opened = os.fstat(self._descriptor)
        self._size, self._mtime_ns = opened.st_size, opened.st_mtime_ns
        self.facts = facts or _facts(path, opened)

    def read(self, offset: int, length: int) -> bytes:
        """Returns exactly `length` bytes from `offset`."""
        try:
            data = os.pread(self._descriptor, length, offset)
            while len(data) < length:  # the kernel returns at most 2 GiB at once
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    raise ConfigError(
                        f"{self.address} ends after {os.fstat(self._descriptor).st_size} bytes, before byte "
                        f"{offset + length}: it was cut off since it was opened; restore it, then index it again"
                    )
                data += more
            now = os.fstat(self._descriptor)
        except OSError as error:
            raise ReadFailed(
                f"{self.address}: {length} bytes at offset {offset} could not be read ({error.strerror}): "
                "check the disk, or copy the file again"
            ) from error
        if now.st_mtime_ns != self._mtime_ns or now.st_size != self._size:
            check_unchanged(self._path, Facts(self._size, str(self._mtime_ns)), _facts(self._path, now))
        return data

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


def check_not_compressed(reader: Reader) -> None:
    """Raises ConfigError for a file that begins as gzip, bzip2, xz or zstd write one."""
    if reader.read(0, min(5, reader.facts.size)).startswith(_COMPRESSED):
        raise ConfigError(f"{reader.address} is compressed, so no sample can be found in it: unpack it")


class ReaderFile:
    """A reader as a file object, as far as `tarfile` needs one."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._position = reader, 0

    def read(self, length: int) -> bytes:
        """Returns the next `length` bytes, fewer at the end of the file."""
        length = max(0, min(length, self._reader.facts.size - self._position))
        data = self._reader.read(self._position, length) if length else b""
        self._position += length
        return data

    def seek(self, position: int) -> None:
        """Sets the position, from the beginning of the file."""
        self._position = position

    def tell(self) -> int:
        """Returns the position."""
        return self._position


def local_facts(path: str) -> Facts:
    """Returns the facts of a file of this host.

    Raises:
        ConfigError: there is no such file.
    """
    try:
        return _facts(path, Path(path).stat())
    except OSError as error:
        raise unopened(path, error) from error


def check_unchanged(address: str, before: Facts, now: Facts) -> None:
    """Checks that a file is the version that was indexed.

    Raises:
        ConfigError: it is another one.
    """
    if not before.is_same_version(now):
        how = "to another file of the same size and time"
        if now.version != before.version:
            how = "in time, with the same size"
        if now.size != before.size:
            how = f"from {before.size} to {now.size} bytes"
        raise ConfigError(
            f"{address} has changed {how} since it was indexed: restore the file, or start again, so that the parent "
            "indexes it (ddp.data.files.file_index.index_files)"
        )


def unopened(address: str, error: OSError) -> ConfigError:
    """Returns the error of a file that cannot be opened, in one sentence."""
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{address} does not exist: check its name, or leave it out of the list")
    return ConfigError(f"{address} cannot be opened ({error.strerror or error}): check its permissions")


def _facts(path: str, status: os.stat_result) -> Facts:
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is a folder where a file is expected: give its files, or a pattern such as {path}/*")
    return Facts(status.st_size, str(status.st_mtime_ns), status.st_ctime_ns, status.st_ino)
