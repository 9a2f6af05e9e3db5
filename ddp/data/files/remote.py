"""Files of any file system that fsspec knows (s3://, gs://, https://, hdfs:// …): every call is bounded and retried.

    read(offset, length)  ->  blocks of 4 MiB, the last 16 of each file kept (fsspec's `BlockCache`)
                                 block  ->  try 0, pause 0.25 s, try 1, pause 0.5 s, try 2 … , at most 5 tries
                                              try  ->  a helper thread calls fsspec; after 60 s it is given up

Samples are read in runs from a few files. So a block serves many of them, and a file of up to 64 MiB is fetched once;
the blocks take up to 64 MiB of memory for each file that a process keeps open. Samples in random order of larger files
would fetch a block each: copy those to a disk of the host (`storage.py`). After each block, the reader compares
the file's size and version with those at its opening, so that blocks of two versions are never mixed.

Python cannot interrupt a call that hangs. A helper thread makes it, so that the reader can stop waiting: the thread is
left alone, ends when its call does, and the next try has a new thread, with a file system object and a connection of
its own (fsspec keeps one per thread). The threads do not keep the process from ending. Nothing here runs for a local
file.

A try opens its own handle (`cat_file`), so nothing is left of the one that failed. A file that does not exist, or that
may not be read, is not tried again.

Credentials and end points are those of fsspec: its configuration files, or the environment variables of the service.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, NamedTuple, TypeVar

from ddp.data.files.readers import Facts, Reader, ReadFailed, check_unchanged, unopened
from ddp.data.helper_thread import HelperThread
from ddp.errors import ConfigError

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
            return _within(retries.deadline_s, call)
        except _FINAL as error:
            status = getattr(error.__cause__, "status", None)  # fsspec calls whatever a web server answers "not found"
            if status in (401, 403):
                refusal = PermissionError(f"its server answers {status}")
                raise unopened(address, refusal) from error
            if status in (None, 404, 410):
                raise unopened(address, error if isinstance(error, OSError) else OSError(str(error))) from error
            failure = error
        except Exception as error:  # each service has errors of its own
            failure = error
    cause = " ".join(f"{type(failure).__name__}: {failure}".split())
    raise ReadFailed(
        f"{address}: {what} in {retries.num_retries + 1} tries, each with a deadline of {retries.deadline_s:g} s "
        f"({cause}): check the network and the service, or copy the files to a disk of this host"
    ) from failure


_idle: list[HelperThread] = []
os.register_at_fork(after_in_child=_idle.clear)  # threads do not exist in a forked child


def _within(deadline_s: float, call: Callable[[], T]) -> T:
    """Returns the result of a call that another thread makes, or gives it up after `deadline_s`."""
    try:
        helper = _idle.pop()
    except IndexError:
        helper = HelperThread("ddp-remote-read")
    future = helper.submit(call)
    try:
        wait([future], timeout=deadline_s)
    finally:
        if future.done():
            _idle.append(helper)
        else:
            helper.end()
    if not future.done():
        raise TimeoutError("no answer")
    return future.result()


# ------------------------------------------------------------------------------------------------- one remote file


def remote_facts(address: str, *, retries: Retries) -> Facts:
    """Returns size and version of a remote file.

    Raises:
        ConfigError: there is no such file, its size is unknown, or the service does not answer.
    """
    info = patiently(lambda: _info(address), what="its size could not be read", address=address, retries=retries)
    if info.get("type") == "directory":
        raise ConfigError(f"{address} is a folder where a file is expected: end it with / to take its files")
    if not isinstance(info.get("size"), int):
        raise ConfigError(f"{address}: its server does not say how long it is; copy the file to a disk of this host")
    return Facts(info["size"], next((str(info[key]) for key in _VERSIONS if info.get(key)), ""))


def _info(address: str) -> dict[str, Any]:
    system, path = file_system(address)
    system.invalidate_cache()  # of listings: a file may have changed since
    info: dict[str, Any] = system.info(path)
    return info


def remote_range(address: str, start: int, end: int, *, retries: Retries) -> bytes:
    """Returns the bytes from `start` to `end` of a remote file, by a handle of its own.

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
