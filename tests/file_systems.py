"""File systems that fail as networks do, for fsspec: their files are those of memory:// or of a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem


def after_protocol(path: str) -> str:
    return "/" + path.split("://")[-1].strip("/")


class EveryFifthFails(MemoryFileSystem):
    """Every fifth read fails, and every seventh is too short."""

    protocol = "fifth"
    num_reads: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return after_protocol(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        type(self).num_reads += 1
        if self.num_reads % 5 == 0:
            raise OSError("connection reset")
        data = super().cat_file(path, start, end)
        return data[:-1] if self.num_reads % 7 == 0 else data


class Hangs(MemoryFileSystem):
    """The first `num_hanging` reads do not return before `released`."""

    protocol = "hangs"
    num_hanging: ClassVar[int] = 10**9
    released: ClassVar[threading.Event] = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return after_protocol(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if type(self).num_hanging > 0:
            type(self).num_hanging -= 1
            self.released.wait(30)
        return super().cat_file(path, start, end)


class Counted(LocalFileSystem):
    """Writes a line into the folder's file `reads` whenever part of a file is read, by any process."""

    protocol = "counted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return after_protocol(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        file = Path(path)
        with (file.parent / "reads").open("a") as log:
            log.write(f"{file.name} {start}\n")
        return super().cat_file(path, start, end)


class Odd(MemoryFileSystem):
    """Hands out what `answer` makes of the bytes that are read."""

    protocol = "odd"
    answer: ClassVar[Callable[[bytes], Any]] = staticmethod(bytes)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return after_protocol(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> Any:
        return type(self).answer(super().cat_file(path, start, end))


for _system in (EveryFifthFails, Hangs, Counted, Odd):
    fsspec.register_implementation(_system.protocol, _system, clobber=True)
