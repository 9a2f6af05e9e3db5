"""Samples in files, by index: a map-style data set over tar files, rows or tokens, here or at any fsspec address.

    index                 0 … 99        100 … 349       350 …
    file                  a.tar         b.tar           c.tar        in the order of their addresses
    span in the file      [start, end)  …                            from the index, mapped into memory
    sample                format.decode(the bytes from start to end)

    samples = FileSet("/data/train-{000..099}.tar", TarSamples(decode=ImageAndClass()), index_dir="/data/index")

`file_sizes` says how many samples each file has; a sampler that keeps to a few files at a time needs it.

A process keeps the few files open that were used last, because samples are read in runs. A forked loader process also
reads from its parent's, because reading needs no shared position. A pickled copy has none open.

A sample that cannot be decoded, or whose bytes a disk or a network does not return, is an `UnreadableSample`. A file
that is missing, or has changed since it was indexed, ends the run.

An index says where samples begin and end, and a `Format` what their bytes become; both follow below.

Cost: opening maps one index, however many samples it has; a sample costs one read, 3 us besides decoding it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import uuid
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp.data.files.readers import FileVersion, LocalReader, Reader, ReadFailed, is_remote
from ddp.data.files.storage import DIRECT, Addresses, Storage, as_given, index_place, listed, write_index, writing
from ddp.errors import ConfigError, UnreadableSample, one_line
from ddp.process.files import at_home, to_read, whole_file
from ddp.process.terminal import log

_NUM_OPEN, _NUM_OPEN_REMOTE = 64, 4  # files of a process; remote ones have buffers


class FileSet:
    """The samples of a list of files of one format.

    Args:
        addresses: files, patterns with * or {000..099}, folders, or a list of them; local or of any fsspec file system.
        format: `TarSamples`, `Csv`, `JsonLines`, `Parquet`, `Arrow`, `TokenFiles`, or an own `Format`.
        index_dir: folder with the index.
        build: read new and changed files if the index lacks them. Workers take False, after the parent's `index_files`.
        storage: how files are read, and whether remote ones are copied to this host.

    Raises:
        ConfigError: as `index_files`; without `build`, there is no index; or the files lack columns that `format`
            needs.

    Attributes:
        addresses: of all files, in the order of their samples.
        file_sizes: samples in each file.
        opened: returns an open file by its number; a function with `functools.lru_cache`.
        may_read_ahead: another thread may fetch samples while this one trains, because reading them draws nothing at
            random.
    """

    def __init__(
        self,
        addresses: Addresses,
        format: AnyFormat,
        *,
        index_dir: str | Path,
        build: bool = True,
        storage: Storage = DIRECT,
    ) -> None:
        self.storage = storage
        self.format, self.may_read_ahead = format, format.draws_nothing
        if build:
            self._index = index_files(addresses, format, index_dir=index_dir, storage=storage)
        else:
            self._index = open_index(addresses, format, index_dir=index_dir)
        self.addresses = [file.address for file in self._index.files]
        self.opened = _open_files(self._index, storage)
        self.file_sizes: NDArray[np.int64] = np.array([file.num_samples for file in self._index.files], dtype=np.int64)
        self._first_samples = self._index.first_samples()
        format.check(self._index.files, lambda: (self.opened(0), *self._span(0, 0)))

    @cached_property
    def lengths(self) -> NDArray[np.int64] | None:
        """Returns tokens of each sample [len(self)]; None if the format does not say."""
        return self.format.lengths(self._index.table[:, 1] - self._index.table[:, 0])

    def __len__(self) -> int:
        return self._first_samples[-1]

    def __getitem__(self, index: int) -> Any:
        data, notes = self.raw(index)
        try:
            return self.format.decode(data, notes)
        except Exception as error:  # of the user's format, or of a library
            raise self._unreadable(index, error) from error

    def raw(self, index: int) -> tuple[bytes, dict[str, Any]]:
        """Returns the bytes of a sample, and the index's notes on its file.

        Raises:
            UnreadableSample: a disk or a network does not return them.
            ConfigError: the file is missing, or has changed since it was indexed.
        """
        file, number = self._where(index)
        start, end = self._span(file, number)
        try:
            notes, reader = self._index.files[file].notes, self.opened(file)
            return self.format.completed(reader.read(start, end - start), notes, reader.read), notes
        except ReadFailed as error:
            raise UnreadableSample(f"sample {number} of {error}") from error

    def _unreadable(self, index: int, error: Exception) -> UnreadableSample:
        file, number = self._where(index)
        try:
            place = self.format.place(self.opened(file), number, self._span(file, number)[0])
        except ReadFailed:
            place = f"sample {number}"
        return UnreadableSample(
            f"{self.addresses[file]}, {place} cannot be decoded ({one_line(error)}): repair or remove it, or check the "
            "format"
        )

    def _where(self, index: int) -> tuple[int, int]:
        """Returns the file of a sample, and its number there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        file = bisect_right(self._first_samples, index) - 1
        return file, index - self._first_samples[file]

    def _span(self, file: int, number: int) -> tuple[int, int]:
        """Returns first byte and end of a sample."""
        start, end = self._index.table[self._first_samples[file] + number].tolist()
        return start, end

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("lengths", "opened")}
        return {**state, "_index": self._index._replace(table=self._index.table[:0])}  # mapped again, not copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._index = mapped_again(self._index)
        self.opened = _open_files(self._index, self.storage)


def _open_files(index: FileIndex, storage: Storage) -> Any:
    """Returns a function from a file's number to its reader, which keeps those that were used last."""
    limit = _NUM_OPEN_REMOTE if any(is_remote(file.address) for file in index.files) else _NUM_OPEN

    @lru_cache(limit)  # a reader closes its file once it is unreferenced
    def reader(file: int) -> Reader:
        return index.reader(index.files[file], storage)

    return reader


# --- The index: the parent makes it once, and every process maps it ---------------------------------------------------
#
#     INDEX_DIR/tar-4f1d….index      one line of JSON, filled with spaces to a multiple of 64 bytes, then a table
#         {"format": {"kind": "tar"}, "files": [{"address": …, "facts": [size, version, …], "num_samples": 3, …}, …]}
#         int64 [num_samples of all files, 2]: first byte and end of each sample in its file
#
# The file's name has a hash of the given addresses and of the format's settings, so that two sets, or two formats of
# one set, have an index each. It is written under another name and renamed: a reader finds the old index or the new
# one, and two processes that write the same one do no harm.
#
# Making an index reads every file once. If there is one, only files of another size or version are read again; that
# costs one stat(2) for each file, or one request for a remote one. Opening it in a worker reads the line of JSON and
# nothing else, because the parent has just compared all files. `FileSet` compares a file once more when it opens it.
#
# Samples of most formats are read where they lie. Of a `CopiedFormat`, making the index also writes a copy of each file
# next to it (INDEX_DIR/csv-4f1d…-9b02….rows), and the table is about that. A file that has changed gets another copy.
# Runs that have the old index open keep theirs: an index is locked while it is mapped (flock(2)), and the old one is
# called INDEX_DIR/csv-4f1d…-77ae….old until indexing finds it unlocked. Copies that no index names are removed.
#
# A format (`Format`) says where samples are and what their bytes become.


_ALIGNMENT = 64
_NUM_THREADS = 8  # that read remote files
_ABANDONED_S = 3600.0  # a file that is being written is touched more often
_COPY = "copy"  # a note: name and size of the copy in which samples are read
_ROWS, _OLD = ".rows", ".old"  # no format's suffix, so that no folder's copies are taken for its files

Spans = NDArray[np.int64]
"""First byte and end of each sample in its file, [num_samples, 2]."""


class Layout(NamedTuple):
    """Locates the samples of one file, with notes that its format needs to decode them."""

    spans: Spans
    notes: dict[str, Any]  # for JSON


class _Format(ABC):
    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]  # of the files to take from a folder
    draws_nothing: bool = False  # `decode` draws nothing at random, and may be called in any thread

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the index depends on, for JSON."""
        return {}

    def check(  # noqa: B027  most formats have nothing to check
        self, files: Sequence[IndexedFile], first: Callable[[], tuple[Reader, int, int]]
    ) -> None:
        """Checks, whenever a data set is opened, settings that the index does not depend on, such as column names.

        Args:
            files: of the index.
            first: opens the first file, and returns it with first byte and end of its first sample.

        Raises:
            ConfigError: the files do not fit the settings.
        """

    @abstractmethod
    def decode(self, data: bytes, notes: dict[str, Any]) -> Any:
        """Returns a sample. Whatever it raises becomes an `UnreadableSample`."""

    def completed(self, data: bytes, notes: dict[str, Any], read: Callable[[int, int], bytes]) -> bytes:
        """Returns the bytes of a sample with what else belongs to it, for formats in which samples share bytes.

        Args:
            read: returns bytes of the sample's file, by offset and length.
        """
        return data

    def place(self, reader: Reader, number: int, start: int) -> str:
        """Returns which sample of its file this is, as text for an error."""
        return f"sample {number}, at byte {start}"

    def lengths(self, num_bytes: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the length of each sample in tokens; None if its number of bytes does not say."""
        return None


class Format(_Format):
    """A kind of file whose samples are read where they lie. Its objects are pickled with the data set."""

    @abstractmethod
    def index(self, reader: Reader) -> Layout:
        """Finds the samples of a file that is not empty.

        Raises:
            ConfigError: the file is cut off, or of another format.
        """


class CopiedFormat(_Format):
    """A kind of file whose samples are read in a copy of it, which is made with the index."""

    @abstractmethod
    def copy(self, reader: Reader, file: IO[bytes]) -> Layout:
        """Writes the samples of a file that is not empty into another one, and finds them there.

        Raises:
            ConfigError: the file is cut off, or of another format.
            OSError: the copy cannot be written.
        """


AnyFormat = Format | CopiedFormat


class IndexedFile(NamedTuple):
    """The index's entry of one file."""

    address: str
    facts: FileVersion
    num_samples: int
    notes: dict[str, Any]


class FileIndex(NamedTuple):
    """An index that is open."""

    path: Path
    header: bytes  # its line of JSON
    files: list[IndexedFile]
    table: Spans  # of all files, mapped into memory

    def copy_of(self, file: IndexedFile) -> Path | None:
        """Returns the copy in which the samples of a file are read; None if they are read where they lie."""
        return self.path.with_name(file.notes[_COPY][0]) if _COPY in file.notes else None

    def has_copy(self, file: IndexedFile) -> bool:
        """Returns False for a file whose copy is missing or cut off."""
        if _COPY not in file.notes:
            return True
        name, size = file.notes[_COPY]
        with suppress(OSError):
            return bool(os.lstat(f"{self.path.parent}/{name}").st_size == size)
        return False

    def reader(self, file: IndexedFile, storage: Storage) -> Reader:
        """Opens a file, or the copy in which its samples are.

        Raises:
            ConfigError: it is missing, or another version than the index says.
        """
        copy = self.copy_of(file)
        if copy is None:
            return storage.reader(file.address, file.facts)
        if not self.has_copy(file):
            raise ConfigError(
                f"{copy}, the copy of {file.address}, is missing or cut off: start again, so that the parent writes it"
            )
        to_read(copy).close()  # refuses a link, and files that others have planted
        return LocalReader(str(copy))

    def first_samples(self) -> list[int]:
        """Returns the number of each file's first sample, and the number of all samples."""
        return [0, *np.cumsum([file.num_samples for file in self.files], dtype=np.int64).tolist()]


# ------------------------------------------------------------------------------------------------------- the parent


def index_files(
    addresses: Addresses, format: AnyFormat, *, index_dir: str | Path, storage: Storage = DIRECT
) -> FileIndex:
    """Reads every new or changed file once, and returns the index of all of them.

    Args:
        addresses: files, patterns, folders, or a list of them (`storage.py`).
        format: of all files.
        index_dir: folder of indexes; it is made if it is missing.
        storage: how files are read.

    Raises:
        ConfigError: no file matches; a file is missing, empty, cut off or of another format; or the folder cannot be
            written.
    """
    found = listed(addresses, suffixes=format.suffixes, storage=storage)
    facts = storage.facts(found)
    given = index_path(addresses, format, index_dir=index_dir)
    path, current = index_place(given), list(zip(found, facts, strict=True))
    old = _found(given, path, format)
    if old is not None and [file[:2] for file in old.files] == current and all(map(old.has_copy, old.files)):
        return old
    known = {} if old is None else _layouts(old, path)
    wanted = [each for each in current if each not in known]
    log.info("indexing %d of %d files into %s", len(wanted), len(found), path)
    known.update(zip(wanted, _read_all(wanted, format, storage, path), strict=True))
    if old is not None and isinstance(format, CopiedFormat):
        with suppress(OSError), to_read(path) as index:  # without locks or hard links, running jobs lose copies
            fcntl.flock(index, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.link(path, path.with_name(f"{path.stem}-{uuid.uuid4().hex}{_OLD}"))
    _write(path, format, {each: known[each] for each in current})
    del old, known  # which keep the old index mapped
    _remove_unused(path, format)
    return open_index(addresses, format, index_dir=index_dir)


def index_path(addresses: Addresses, format: AnyFormat, *, index_dir: str | Path) -> Path:
    """Returns where the index of these addresses is, or would be."""
    named = json.dumps([as_given(addresses), format.kind, format.settings()], sort_keys=True)
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    return at_home(Path(index_dir)).absolute() / f"{format.kind}-{digest}.index"


def _layouts(index: FileIndex, path: Path) -> dict[tuple[str, FileVersion], Layout]:
    """Returns the entries of an index that can be in the new one at `path`, too."""
    mine, parts = index._replace(path=path), pairwise(index.first_samples())
    return {
        (file.address, file.facts): Layout(index.table[first:stop], file.notes)
        for file, (first, stop) in zip(index.files, parts, strict=True)
        if mine.has_copy(file)
    }


def _read_all(new: Sequence[tuple[str, FileVersion]], format: AnyFormat, storage: Storage, path: Path) -> list[Layout]:
    if not any(is_remote(address) for address, _ in new):
        return [_layout_of(each, format, storage, path) for each in new]
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return list(threads.map(lambda each: _layout_of(each, format, storage, path), new))


def _layout_of(file: tuple[str, FileVersion], format: AnyFormat, storage: Storage, path: Path) -> Layout:
    address, facts = file
    if not facts.size:
        raise ConfigError(f"{address} is empty: write it again, or leave it out of the list")
    reader = storage.reader(address, facts)
    layout = _copied(reader, format, path) if isinstance(format, CopiedFormat) else format.index(reader)
    if not len(layout.spans):
        raise ConfigError(f"{address} holds no sample: check that it is a file of format {format.kind}")
    return layout


def _copied(reader: Reader, format: CopiedFormat, path: Path) -> Layout:
    """Writes the copy of a file next to the index at `path`; a file without samples leaves none."""
    digest = hashlib.sha256(json.dumps([reader.address, reader.facts]).encode()).hexdigest()[:16]
    copy = path.with_name(f"{path.stem}-{digest}{_ROWS}")
    with writing(copy), whole_file(copy) as file:
        layout = format.copy(reader, file)
        return layout._replace(notes={**layout.notes, _COPY: [copy.name, file.tell()]})


def _write(path: Path, format: AnyFormat, layouts: dict[tuple[str, FileVersion], Layout]) -> None:
    files = [IndexedFile(*file, len(each.spans), each.notes) for file, each in layouts.items()]
    line = json.dumps({"format": _name(format), "files": [file._asdict() for file in files]}).encode()
    line += b" " * (-(len(line) + 1) % _ALIGNMENT) + b"\n"
    write_index(path, [line, *(np.ascontiguousarray(each.spans, dtype="<i8").data for each in layouts.values())])


def _remove_unused(path: Path, format: AnyFormat) -> None:
    """Removes old indexes that no process maps, copies that no index names, and files of killed processes."""
    for part in path.parent.glob(f".tmp-*-{path.stem}*"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()
    for old in path.parent.glob(f"{path.stem}-*{_OLD}"):
        with suppress(OSError), to_read(old) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            old.unlink()
    found = [_open_if_whole(each, format) for each in (path, *path.parent.glob(f"{path.stem}-*{_OLD}"))]
    kept = {file.notes[_COPY][0] for index in found if index is not None for file in index.files if _COPY in file.notes}
    for copy in path.parent.glob(f"{path.stem}-*{_ROWS}"):
        if copy.name not in kept:
            copy.unlink(missing_ok=True)


def _name(format: AnyFormat) -> dict[str, Any]:
    return {"kind": format.kind, **format.settings()}


# ------------------------------------------------------------------------------------------------------- a worker


def open_index(addresses: Addresses, format: AnyFormat, *, index_dir: str | Path) -> FileIndex:
    """Opens the index that the parent has made.

    Raises:
        ConfigError: there is none, it is damaged, or of another format.
    """
    given = index_path(addresses, format, index_dir=index_dir)
    path = index_place(given)
    index = _found(given, path, format)
    if index is None:
        raise ConfigError(
            f"{path} is missing or damaged, so the samples of {as_given(addresses)[0]} are not known: call index_files "
            "in the parent, with the same addresses, format and index_dir, before workers start"
        )
    return index


def _found(given: Path, mine: Path, format: AnyFormat) -> FileIndex | None:
    """Returns this user's index, or that of the owner of the folder that was given; None if neither is whole."""
    index = _open_if_whole(mine, format)
    if index is None and mine != given:
        with suppress(ConfigError):  # it is a link, another member's, or of another format
            return _open_if_whole(given, format)
    return index


def mapped_again(index: FileIndex) -> FileIndex:
    """Returns an index that was pickled without its table, with it.

    Raises:
        ConfigError: another index has taken its place.
    """
    with suppress(FileNotFoundError), to_read(index.path) as file:
        if file.read(len(index.header)) == index.header:
            return index._replace(table=_mapped(file, len(index.header), index.first_samples()[-1]))
    raise ConfigError(f"{index.path} was removed or written again since the data set was opened: open it again")


def _open_if_whole(path: Path, format: AnyFormat) -> FileIndex | None:
    """Returns an index; None if there is none, or only part of one.

    Raises:
        ConfigError: it was made for another format.
    """
    try:
        index = to_read(path)
    except OSError:
        return None
    with index:
        try:
            line = index.readline()
            content = json.loads(line)
            files = [_indexed_file(entry) for entry in content["files"]]
            found = content["format"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the latter: brackets within brackets …
            return None
        if found != _name(format):
            wanted = _name(format)
            raise ConfigError(f"{path} is an index of format {found}, not of {wanted}: delete it, or take another")
        num_rows = sum(file.num_samples for file in files)
        if os.fstat(index.fileno()).st_size != len(line) + 16 * num_rows:
            return None
        return FileIndex(path, line, files, _mapped(index, len(line), num_rows))


def _indexed_file(entry: dict[str, Any]) -> IndexedFile:
    """Returns an entry of the line of JSON.

    Raises:
        KeyError, TypeError, ValueError: the line is damaged.
    """
    number = entry["num_samples"]
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no number of samples")
    return IndexedFile(entry["address"], FileVersion(*entry["facts"]), number, entry["notes"])


def _mapped(index: IO[bytes], offset: int, num_rows: int) -> Spans:
    if not num_rows:
        return np.empty((0, 2), dtype=np.int64)  # a map cannot be empty
    with suppress(OSError):  # of a file system without locks
        fcntl.flock(index, fcntl.LOCK_SH)  # of the open file, which a map keeps open
    return np.asarray(np.memmap(index, dtype="<i8", mode="r", offset=offset, shape=(num_rows, 2)))
