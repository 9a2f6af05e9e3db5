"""Bytes of a file by position: `read(offset, length)`, without a position of its own that processes could share.

    LocalReader     os.pread on a descriptor       about 2 us for a few KB that the kernel has cached
    RemoteReader    ranges through fsspec          with a deadline and retries

pread(2) is used instead of a memory map, because a file that is cut off while it is mapped ends the process with a
SIGBUS. Here it is an error that names the file.

A `FileVersion` identifies a version of a file: its size, and the time of its last change or the remote side's
replacement for that. A reader compares them after every read, because a file that is overwritten while it is open would
be read as a mixture of two versions. One fstat(2) takes 1 us of the two. A copy may keep size and time of the file that
it replaces. So local files also have the time of their last change of any kind (ctime), and their number on the disk
(inode). An index is made again if one of these differs. A running job ends only if both differ, because a new name or
new permissions change the first, and some network file systems change the second.
"""

from __future__ import annotations

import importlib
import io
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ddp.errors import ConfigError, one_line
from ddp.process.clock import within


class FileVersion(NamedTuple):
    """Identity of one version of a file."""

    size: int  # in bytes
    version: str  # local: time of the last change in ns; remote: its etag, checksum or time; "" if it has none
    ctime_ns: int = 0  # of a local file
    inode: int = 0

    def is_same_version(self, other: FileVersion) -> bool:
        """Returns False for another content, as far as a running job can tell."""
        is_same_file = self.ctime_ns == other.ctime_ns or self.inode == other.inode
        return self[:2] == other[:2] and is_same_file


class ReadFailed(ConfigError):
    """A disk or a network failed to return bytes of a file; other bytes of the same file may still be readable."""


class Reader(ABC):
    """An open file.

    Attributes:
        address: its name in errors.
        facts: of the version that is open.
    """

    address: str
    facts: FileVersion

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

    def __init__(self, path: str, *, address: str | None = None, facts: FileVersion | None = None) -> None:
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
            check_unchanged(self._path, FileVersion(self._size, str(self._mtime_ns)), _facts(self._path, now))
        return data

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


def check_not_compressed(reader: Reader) -> None:
    """Raises ConfigError for a file that begins as gzip, bzip2, xz or zstd write one."""
    if reader.read(0, min(5, reader.facts.size)).startswith(_COMPRESSED):
        raise ConfigError(f"{reader.address} is compressed, so no sample can be found in it: unpack it")


class ReaderFile(io.RawIOBase):
    """A reader as a file object, for libraries that read one from its beginning."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._position = reader, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer with the next bytes, and returns how many there were."""
        length = max(0, min(len(buffer), self._reader.facts.size - self._position))
        if length:
            buffer[:length] = self._reader.read(self._position, length)
        self._position += length
        return length

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Sets the position, and returns it."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._reader.facts.size}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        """Returns the position."""
        return self._position


def local_facts(path: str) -> FileVersion:
    """Returns the facts of a file of this host.

    Raises:
        ConfigError: there is no such file.
    """
    try:
        return _facts(path, os.stat(path))  # noqa: PTH116  pathlib takes ten times as long, and there may be thousands
    except OSError as error:
        raise unopened(path, error) from error


def check_unchanged(address: str, before: FileVersion, now: FileVersion) -> None:
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
            "indexes it (ddp.data.files.file_set.index_files)"
        )


def unopened(address: str, error: OSError) -> ConfigError:
    """Returns the error of a file that cannot be opened, in one sentence."""
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"{address} does not exist: check its name, or leave it out of the list")
    return ConfigError(f"{address} cannot be opened ({error.strerror or error}): check its permissions")


def _facts(path: str, status: os.stat_result) -> FileVersion:
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is a folder where a file is expected: give its files, or a pattern such as {path}/*")
    return FileVersion(status.st_size, str(status.st_mtime_ns), status.st_ctime_ns, status.st_ino)


# --- Remote files: every call is bounded and retried -----------------------------------------------------------------
#
#     read(offset, length)  ->  blocks of 4 MiB, the last 16 of each file kept (fsspec's `BlockCache`)
#                                  block  ->  try 0, pause 0.25 s, try 1, pause 0.5 s, try 2 … , at most 5 tries
#                                               try  ->  a helper thread calls fsspec; after 60 s it is given up
#
# Samples are read in runs from a few files. So a block serves many of them, and a file of up to 64 MiB is fetched once;
# the blocks take up to 64 MiB of memory for each file that a process keeps open. Samples in random order of larger
# files would fetch a block each: copy those to a disk of the host (`storage.py`). After each block, the reader compares
# the file's size and version with those at its opening, so that blocks of two versions are never mixed.
#
# Python cannot interrupt a call that hangs. A helper thread makes it, so that the reader can stop waiting: the thread
# is left alone, ends when its call does, and the next try has a new thread, with its own file system object and
# connection (fsspec keeps one per thread). The threads do not keep the process from ending. Nothing here runs for a
# local file.
#
# A try opens its own handle (`cat_file`), so a failed one leaves nothing behind. A file that does not exist, or
# that may not be read, is not tried again.
#
# Credentials and end points are those of fsspec: its configuration files, or the environment variables of the service.


T = TypeVar("T")

BLOCK_BYTES = 4 << 20
_NUM_BLOCKS = 16
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_VERSIONS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "modified", "created")


class Retries(NamedTuple):
    """Limits how long, and how often, a remote call is tried."""

    deadline_s: float = 60.0  # of one try
    num_retries: int = 4  # after the first try
    first_pause_s: float = 0.25  # before the first retry; it doubles from one to the next


def is_remote(address: str) -> bool:
    """Returns True if an address names a file system, such as s3://bucket/a.tar."""
    return "://" in address or "::" in address


def file_system(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system of an address, and the path there; may connect, so call it by `patiently`."""
    system, path = _fsspec().core.url_to_fs(address)
    return system, path


def check_protocol(address: str) -> None:
    """Imports the file system of an address.

    Raises:
        ConfigError: it is unknown, or its package is not installed.
    """
    protocol = address.split("://")[0].split("::")[0]
    try:
        _fsspec().get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{address}: fsspec cannot read {protocol}:// ({' '.join(str(error).split())})") from error


def _fsspec() -> Any:
    """Returns the package, which is imported only once a remote address is used."""
    return importlib.import_module("fsspec")


# ------------------------------------------------------------------------------------------ deadlines and retries


def patiently(call: Callable[[], T], *, what: str, address: str, retries: Retries) -> T:
    """Returns the result of a call, which is made again when it fails or takes too long.

    Args:
        what: for errors, what cannot be done if it fails, such as "its size could not be read".

    Raises:
        ReadFailed: no try was successful.
        ConfigError: there is no such file, or no such file system.
    """
    check_protocol(address)
    failure: Exception
    for attempt in range(retries.num_retries + 1):
        if attempt:
            time.sleep(retries.first_pause_s * 2 ** (attempt - 1))
        try:
            return within(retries.deadline_s, call)
        except _FINAL as error:
            status = getattr(error.__cause__, "status", None)  # fsspec reports any status of a web server as not found
            if status in (401, 403):
                refusal = PermissionError(f"its server answers {status}")
                raise unopened(address, refusal) from error
            if status in (None, 404, 410):
                raise unopened(address, error if isinstance(error, OSError) else OSError(str(error))) from error
            failure = error
        except Exception as error:  # each service has its own errors
            failure = error
    raise ReadFailed(
        f"{address}: {what} in {retries.num_retries + 1} tries, each with a deadline of {retries.deadline_s:g} s "
        f"({one_line(failure)}): check the network and the service, or copy the files to a disk of this host"
    ) from failure


# ------------------------------------------------------------------------------------------------- one remote file


def remote_facts(address: str, *, retries: Retries) -> FileVersion:
    """Returns size and version of a remote file.

    Raises:
        ConfigError: there is no such file, its size is unknown, or the service does not answer.
    """
    info = patiently(lambda: _info(address), what="its size could not be read", address=address, retries=retries)
    if info.get("type") == "directory":
        raise ConfigError(f"{address} is a folder where a file is expected: end it with / to take its files")
    if not isinstance(info.get("size"), int):
        raise ConfigError(f"{address}: its server does not say how long it is; copy the file to a disk of this host")
    return FileVersion(info["size"], next((str(info[key]) for key in _VERSIONS if info.get(key)), ""))


def _info(address: str) -> dict[str, Any]:
    system, path = file_system(address)
    system.invalidate_cache()  # of listings: a file may have changed since
    info: dict[str, Any] = system.info(path)
    return info


def remote_range(address: str, start: int, end: int, *, retries: Retries) -> bytes:
    """Returns the bytes from `start` to `end` of a remote file, by its own handle.

    Raises:
        ReadFailed: no try was successful.
        ConfigError: there is no such file.
    """
    what = f"{end - start} bytes at offset {start} could not be read"
    return patiently(lambda: _range(address, start, end), what=what, address=address, retries=retries)


def _range(address: str, start: int, end: int) -> bytes:
    system, path = file_system(address)
    data: bytes = system.cat_file(path, start=start, end=end)
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"its file system returned {type(data).__name__} instead of bytes")
    if len(data) != end - start:  # a connection that was cut, or a server that cannot send parts of a file
        raise OSError(f"{len(data)} bytes received instead of {end - start}")
    return data


class RemoteReader(Reader):
    """A remote file, of which the blocks used last are in memory."""

    def __init__(self, address: str, *, retries: Retries) -> None:
        self.address, self._retries = address, retries
        self.facts = remote_facts(address, retries=retries)
        blocks = importlib.import_module("fsspec.caching").BlockCache
        self._blocks = blocks(BLOCK_BYTES, self._block, self.facts.size, maxblocks=_NUM_BLOCKS)

    def read(self, offset: int, length: int) -> bytes:
        """Returns exactly `length` bytes from `offset`."""
        end = offset + length
        if end > self.facts.size:
            raise ConfigError(f"{self.address} has {self.facts.size} bytes, none at {end}: index it again")
        found: bytes = self._blocks._fetch(offset, end)
        return found

    def _block(self, start: int, end: int) -> bytes:
        block = remote_range(self.address, start, min(end, self.facts.size), retries=self._retries)
        check_unchanged(self.address, self.facts, remote_facts(self.address, retries=self._retries))
        return block
