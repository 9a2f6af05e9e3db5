"""Turns addresses into a list of files: patterns, brace lists, folders.

    /data/train-{000..099}.tar     braces: a range, with as many digits as its first number has; 100 files
    /data/{train,extra}.jsonl      braces: alternatives
    /data/**/*.tar                 a pattern, as in a shell; ** is any depth
    /data/train                    a folder: the files in it that have the format's suffix
    s3://bucket/train/             a remote folder ends with /
    [one, another]                 the files of each, in this order

Files of a pattern or a folder are in the order of their addresses. Local addresses become absolute, because a worker
may run in another folder. A file that exists under the very name that was given is that file, whatever signs it has.
A local file that is found under two names, by a link of either kind or by `..`, is refused like one that is listed
twice.
"""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp.data.files.readers import file_system, is_remote, patiently, unopened
from ddp.data.files.storage import Storage
from ddp.errors import ConfigError
from ddp.process.files import at_home, is_hidden

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
