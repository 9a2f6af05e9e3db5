"""Finds and opens files: which ones an address means, how each is read, and where an index of them is kept.

A file is read in one way, wherever it lies, and is checked to be the version that is meant:

    address                          without cache_dir         with cache_dir
    /data/a.tar, file:///data/a.tar  LocalReader               LocalReader
    s3://bucket/a.tar                RemoteReader: streamed    LocalReader of a copy, downloaded once per host
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ddp.data.files.readers import (
    BLOCK_BYTES,
    FileVersion,
    LocalReader,
    Reader,
    RemoteReader,
    Retries,
    check_unchanged,
    file_system,
    is_remote,
    local_facts,
    patiently,
    remote_facts,
    remote_range,
    unopened,
)
from ddp.errors import ConfigError
from ddp.process.files import at_home, is_hidden, make_folder, opened, to_read, whole_file, why_shared

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
        ConfigError: the file cannot be read, or the folder cannot be written, or others may write it, too; or the copy
            was changed.
    """
    if cache_dir.is_dir() and os.access(cache_dir, os.W_OK) and (why := why_shared(cache_dir, cache_dir.stat())):
        raise ConfigError(
            f"{why}, and could put other samples in the place of copies: take a cache_dir that is yours alone"
        )
    digest = hashlib.sha256(f"{address} {facts.size} {facts.version}".encode()).hexdigest()[:16]
    name = address.rstrip("/").rpartition("/")[2].partition("?")[0]
    copy = cache_dir / f"{digest}-{name[-100:]}"  # the suffix matters, and file systems limit the length
    try:
        make_folder(cache_dir)
        if not copy.exists():
            with _locked(copy.with_name(f".lock-{copy.name}")):
                if not copy.exists():
                    _download(address, facts, copy, retries)
        with to_read(copy) as file:  # refuses a link
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(
            f"{address} cannot be copied to {cache_dir} ({error.strerror}): take a cache_dir that can be written and "
            f"has room for {facts.size} bytes"
        ) from error
    if size != facts.size:
        raise ConfigError(f"{copy} has {size} bytes, and {address} has {facts.size}: delete the copy")
    return copy


def _download(address: str, facts: FileVersion, copy: Path, retries: Retries) -> None:
    with whole_file(copy, temporary=f".part-{copy.name}") as file:  # replaces the part of a killed process
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
            cache_dir = at_home(Path(self.cache_dir))
            copy = local_copy(address, facts, cache_dir=cache_dir, retries=self.retries)
            return LocalReader(str(copy), address=address, facts=facts)
        reader: Reader
        reader = RemoteReader(address, retries=self.retries) if is_remote(address) else LocalReader(address)
        check_unchanged(address, facts, reader.facts)
        return reader

    def _facts(self, address: str) -> FileVersion:
        return remote_facts(address, retries=self.retries) if is_remote(address) else local_facts(address)


DIRECT = Storage()
"""Streams remote files."""


# --- The folder of indexes -------------------------------------------------------------------------------------------
#
# An index is kept in the folder that the user gives, or in a private one if others may write there.
#
#     data/index/tar-4f1d….index                 the user's own folder
#     ~/.cache/ddp/81c2…/tar-4f1d….index         instead, if that folder is a team's, or another user's
#
# A user who can forge an index decides which bytes are a sample. So each member of a team makes their own index, once,
# and no member's run ends because another one was first.


def index_place(given: Path) -> Path:
    """Returns where this user's index is, or would be; the same in all of the user's processes.

    Args:
        given: where the index is in the folder that the user has given, absolute.

    Raises:
        ConfigError: others may write in the given folder, and there is no private one.
    """
    folder = given.parent
    if not (folder.is_dir() and (why := why_shared(folder, folder.stat()))):
        return given
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    try:
        private = Path.home() / ".cache" / "ddp" / digest
        if not private.is_dir():
            make_folder(private.parent)
            private.mkdir(mode=0o700, exist_ok=True)
    except (OSError, RuntimeError) as error:  # the user has no home folder
        raise ConfigError(
            f"{why}, and no index of yours can be in its place ({error}): give another index_dir"
        ) from error
    if why := why_shared(private, private.stat()):
        raise ConfigError(f"{why}, so no index can be there: make it yours alone, or give another index_dir")
    return private / given.name


def write_index(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes an index so that it is found whole, or not at all.

    Raises:
        ConfigError: the folder cannot be written.
    """
    with writing(path), whole_file(path) as file:
        file.writelines(parts)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes the folder of a file that the block writes.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        make_folder(path.parent)
        yield
    except OSError as error:
        raise ConfigError(
            f"index_dir {path.parent} cannot be written ({error.strerror}): give a folder that can be"
        ) from error


# --- From addresses to a list of files --------------------------------------------------------------------------------
#
#     /data/train-{000..099}.tar     braces: a range, with as many digits as its first number has; 100 files
#     /data/{train,extra}.jsonl      braces: alternatives
#     /data/**/*.tar                 a pattern, as in a shell; ** is any depth
#     /data/train                    a folder: the files in it that have the format's suffix
#     s3://bucket/train/             a remote folder ends with /
#     [one, another]                 the files of each, in this order
#
# Files of a pattern or a folder are in the order of their addresses. Local addresses become absolute, because a worker
# may run in another folder. A file that exists under the very name that was given is that file, whatever signs it has.
# A local file that is found under two names, by a link of either kind or by `..`, is refused like one that is listed
# twice.


Addresses = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


def as_given(addresses: Addresses) -> list[str]:
    """Returns the addresses as a list of strings; local ones are absolute, without file://.

    Raises:
        ConfigError: one of them is no string and no path.
    """
    given: Any = [addresses] if isinstance(addresses, (str, os.PathLike)) else addresses
    given = list(given) if isinstance(given, Iterable) else [given]
    for each in given:
        if not isinstance(each, (str, os.PathLike)) or "\0" in os.fspath(each):
            raise ConfigError(f"{each!r} is no address: give a file, a pattern, a folder, or a list of them")
    return [_absolute(os.fspath(each)) for each in given]


def listed(addresses: Addresses, *, suffixes: Sequence[str], storage: Storage) -> list[str]:
    """Returns the address of every file.

    Args:
        suffixes: of the files to take from a folder.

    Raises:
        ConfigError: an address means no file, or a file is meant twice.
    """
    files = [file for each in as_given(addresses) for file in _files_of(each, tuple(suffixes), storage)]
    if not files:
        raise ConfigError("the list of addresses is empty: give at least one file, folder or pattern")
    identities, seen = [identity_of(file) for file in files], set[object]()
    for identity in identities:
        if identity in seen:
            same = [file for file, each in zip(files, identities, strict=True) if each == identity]
            one, other = sorted(same, key=len)[:2]
            how = f"{one} is listed twice" if one == other else f"{one} and {other} are the same file"
            raise ConfigError(f"{how}, so its samples would be read twice an epoch: list it once")
        seen.add(identity)
    return files


def identity_of(address: str) -> object:
    """Returns an identity that all names of a local file share, also hard links; of a remote file, the address.

    Size and time are part of it, because some network file systems give a number of theirs to several files.

    Raises:
        ConfigError: there is no such file.
    """
    if is_remote(address):
        return address
    try:
        status = os.stat(address)  # noqa: PTH116  pathlib takes ten times as long, and there may be thousands
    except OSError as error:
        raise unopened(address, error) from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _absolute(address: str) -> str:
    for prefix in ("file://", "local://"):
        address = address.removeprefix(prefix)
    return address if is_remote(address) else str(Path(at_home(address)).absolute())


def _files_of(address: str, suffixes: tuple[str, ...], storage: Storage) -> Iterator[str]:
    if is_remote(address):
        for each in _expanded(address):
            yield from _remote(each, suffixes, storage)
        return
    try:
        if Path(address).is_file():
            yield address
            return
        for each in _expanded(address):
            yield from _local(each, suffixes)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or address} cannot be looked up ({error.strerror or error}): correct its name, or the "
            "link that it is"
        ) from error


def _expanded(address: str) -> Iterator[str]:
    """Yields an address without braces, once for each of their alternatives."""
    braces = _BRACES.search(address)
    if braces is None:
        yield address
        return
    first, last, words = braces.groups()
    numbers = () if first is None else range(int(first), int(last) + 1)
    for each in words.split(",") if words else (f"{number:0{len(first)}d}" for number in numbers):
        yield from _expanded(address[: braces.start()] + each + address[braces.end() :])


def _local(address: str, suffixes: tuple[str, ...]) -> list[str]:
    if Path(address).is_dir():
        with os.scandir(address) as entries:
            named = [entry for entry in entries if entry.name.endswith(suffixes) and not is_hidden(entry.name)]
        paths = [(entry, f"{address}/{entry.name}") for entry in named]
        found = [path for entry, path in paths if entry.is_file(follow_symlinks=False) or _is_file(path)]
        return _some(found, f"{address} has no file that ends with {' or '.join(suffixes)}: give a pattern")
    if glob.has_magic(address):
        # Path.glob would also find hidden files.
        found = [path for path in glob.glob(address, recursive=True) if _is_meant(path, address) and _is_file(path)]  # noqa: PTH207
        hint = " ([ begins a choice of signs; for a name with [, write [[])" if "[" in address else ""
        return _some(found, f"{address} matches no file: check the pattern{hint}, and that the disk is mounted")
    return [address]


def _is_file(path: str) -> bool:
    """Returns True for a file, also behind a link.

    Raises:
        ConfigError: it is a link to nothing, so a file is missing.
    """
    try:
        return stat.S_ISREG(Path(path).stat().st_mode)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is a link to a file that does not exist: restore the file, or remove the link"
        ) from error


def _remote(address: str, suffixes: tuple[str, ...], storage: Storage) -> list[str]:
    magic = "*" if address.startswith("http") else "*?["  # "?" begins a query there
    if not address.endswith("/") and not any(sign in address for sign in magic):
        return [address]
    is_folder = address.endswith("/")
    pattern = f"{address}*" if is_folder else address
    found = patiently(
        lambda: _remote_glob(pattern), what="its files could not be listed", address=address, retries=storage.retries
    )
    found = [each for each in found if _is_meant(each, address) and (not is_folder or each.endswith(suffixes))]
    return _some(found, f"{address} matches no file: check the pattern, and your rights to list it")


def _remote_glob(pattern: str) -> list[str]:
    system, path = file_system(pattern)
    system.invalidate_cache()
    found = system.glob(path, detail=True)
    return [system.unstrip_protocol(path) for path, info in found.items() if info.get("type") != "directory"]


def _is_meant(path: str, pattern: str) -> bool:
    """Returns True unless a file is hidden, or in a hidden folder, where the pattern itself names none."""
    given = pattern.split("/")
    return any(map(is_hidden, given)) or not any(is_hidden(part) for part in path.split("/") if part not in given)


def _some(found: list[str], otherwise: str) -> list[str]:
    if not found:
        raise ConfigError(otherwise)
    return sorted(found)
