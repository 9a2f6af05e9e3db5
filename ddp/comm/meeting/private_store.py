"""Stores for the ranks of one launch, in which no other user can pose as one of them.

    Folder    files in a folder that only the launch's user can enter: ranks of one host
    Sealed    a store that others reach, too, such as torchrun's. Names and values carry codes that need the secret, so
              that what others write is not found, or refused. They can still delete what is there, which ends the run

Both are stores for torch as well. But torch's `PrefixStore` does not keep a Python store alive, so `part_of` makes
their parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistStoreError, FileStore, PrefixStore, Store  # type: ignore[attr-defined]

from ddp.comm.meeting.secret import VARIABLE, code_of
from ddp.process.clock import Patience

SHORTEST_S, LONGEST_S = 0.0005, 0.005  # between two checks for a file
TIMEOUT = timedelta(seconds=300)  # as torch's stores


class _Private(Store):
    """A store that prefixes all its keys."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of several keys; waits for each."""
        return [self.get(key) for key in keys]


class Folder(_Private):
    """A store of files. Each is written under another name first, so that no reader sees a part of it."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        super().__init__(prefix)
        self._path = path

    def part(self, name: str) -> Folder:
        """Returns the part of this store whose names begin with `name`."""
        return Folder(self._path, f"{self.prefix}{name}/")

    def clone(self) -> Folder:
        return Folder(self._path, self.prefix)

    def for_torch(self) -> Store:
        """Returns torch's own store in the same place, because torch's threads may outlive Python's interpreter."""
        return FileStore(str(self._file("torch")), -1)

    def set(self, key: str, value: str | bytes) -> None:
        with _raised_as_torch_does():
            self._path.mkdir(mode=0o700, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_as_bytes(value))
            Path(name).replace(self._file(key))

    def get(self, key: str) -> bytes:
        self.wait([key])
        with _raised_as_torch_does():
            return self._file(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        patience, pause_s = Patience(timeout.total_seconds()), SHORTEST_S
        while not self.check(keys):
            if not patience.left_s():
                raise DistStoreError(f"no process has written {', '.join(keys)} within {timeout}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, and returns its new value."""
        with _raised_as_torch_does():
            self._path.mkdir(mode=0o700, exist_ok=True)
            with self._file(f"{key}/lock").open("ab") as lock:  # separate, so that a kill leaves the counter intact
                fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
                total = (int(self.get(key)) if self.check([key]) else 0) + amount
                self.set(key, str(total))
                return total

    def _file(self, key: str) -> Path:
        return self._path / hashlib.sha256(f"{self.prefix}{key}".encode()).hexdigest()


class Sealed(_Private):
    """A part of another store, in which writes without the secret are detected."""

    def __init__(self, store: Store, key: bytes, prefix: str = "") -> None:
        super().__init__(prefix)
        self._store, self._key = store, key

    def part(self, name: str) -> Sealed:
        """Returns the part of this store whose names begin with `name`."""
        return Sealed(self._store, self._key, f"{self.prefix}{name}/")

    def clone(self) -> Sealed:
        return Sealed(self._store.clone(), self._key, self.prefix)  # type: ignore[attr-defined]

    def for_torch(self) -> Store:
        """Returns torch's own store in the same place, in which nothing is sealed."""
        return PrefixStore(self._name("torch"), self._store)

    def set(self, key: str, value: str | bytes) -> None:
        name, data = self._name(key), _as_bytes(value)
        self._store.set(name, self._seal(name, data) + data)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        name = self._name(key)
        found: bytes = self._store.get(name)
        seal, data = found[:32], found[32:]
        if not hmac.compare_digest(seal, self._seal(name, data)):
            raise DistStoreError(f"{self.prefix}{key} was written by a process that does not know {VARIABLE}")
        return data

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check([self._name(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta = TIMEOUT) -> None:
        self._store.wait([self._name(key) for key in keys], timeout)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which is not sealed because the store updates it."""
        return int(self._store.add(self._name(key), amount))

    def _name(self, key: str) -> str:
        return code_of(self._key, b"name", f"{self.prefix}{key}".encode()).hex()

    def _seal(self, name: str, data: bytes) -> bytes:
        return code_of(self._key, b"value", name.encode(), data)


def part_of(store: Store, name: str) -> Store:
    """Returns the part of a store under the prefix `name`."""
    return store.part(name) if isinstance(store, (Folder, Sealed)) else PrefixStore(name, store)


def for_torch(store: Store) -> Store:
    """Returns a store for torch to keep, in which nothing is sealed."""
    return store.for_torch() if isinstance(store, (Folder, Sealed)) else store


def sealed(store: Store, key: bytes) -> Store:
    """Returns torch's store, sealed if there is a secret."""
    return Sealed(store, key) if key else store


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextlib.contextmanager
def _raised_as_torch_does() -> Iterator[None]:
    """Raises a failure of the file system as torch's error of an unreachable store."""
    try:
        yield
    except OSError as error:
        raise DistStoreError(str(error)) from error
