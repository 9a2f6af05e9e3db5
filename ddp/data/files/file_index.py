"""The index of a set of files: where each sample begins and ends. The parent makes it once; every process maps it.

    INDEX_DIR/tar-4f1d….index      one line of JSON, filled with spaces to a multiple of 64 bytes, then a table
        {"format": {"kind": "tar"}, "files": [{"address": …, "facts": [size, version, …], "num_samples": 3, …}, …]}
        int64 [num_samples of all files, 2]: first byte and end of each sample in its file

The file's name has a hash of the given addresses and of the format's settings, so that two sets, or two formats of one
set, have an index each. It is written under another name and renamed: a reader finds the old index or the new one, and
two processes that write the same one do no harm.

Making an index reads every file once. If there is one, only files of another size or version are read again; that
costs one stat(2) for each file, or one request for a remote one. Opening it in a worker reads the line of JSON and
nothing else, because the parent has just compared all files. `FileSet` compares a file once more when it opens it.

Samples of most formats are read where they lie. Of a `CopiedFormat`, making the index also writes a copy of
each file beside it (INDEX_DIR/csv-4f1d…-9b02….rows), and the table is about that. A file that has changed gets another
copy. Runs that have the old index open keep theirs: an index is locked while it is mapped (flock(2)), and the old one
is called INDEX_DIR/csv-4f1d…-77ae….old until indexing finds it unlocked. Copies that no index names are removed.

A format (`Format`) says where samples are and what their bytes become.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp.data.files.listing import Addresses, as_given, listed
from ddp.data.files.readers import FileVersion, LocalReader, Reader, is_remote
from ddp.data.files.storage import DIRECT, Storage
from ddp.errors import ConfigError
from ddp.process.files import at_home, make_folder, to_read, whole_file
from ddp.process.owners import why_shared
from ddp.process.terminal import log

# --- The folder of indexes -------------------------------------------------------------------------------------------
#
# Says where an index is kept: in the folder that the user gives, or in a private one if others may write there.
#
#     data/index/tar-4f1d….index                 the user's own folder
#     ~/.cache/ddp/81c2…/tar-4f1d….index         in its place, if that folder is a team's, or another user's
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
    except (OSError, RuntimeError) as error:  # of a user without a home
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
    with _writing(path), whole_file(path) as file:
        file.writelines(parts)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
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


_ALIGNMENT = 64
_NUM_THREADS = 8  # that read remote files
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
        """Returns the length of each sample in tokens; None if its number of bytes does not tell."""
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
        to_read(copy).close()  # refuses a link, and what others have planted
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
        addresses: files, patterns, folders, or a list of them (`listing.py`).
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
    path, told = index_place(given), list(zip(found, facts, strict=True))
    old = _found(given, path, format)
    if old is not None and [file[:2] for file in old.files] == told and all(map(old.has_copy, old.files)):
        return old
    known = {} if old is None else _layouts(old, path)
    wanted = [each for each in told if each not in known]
    log.info("indexing %d of %d files into %s", len(wanted), len(found), path)
    known.update(zip(wanted, _read_all(wanted, format, storage, path), strict=True))
    if old is not None and isinstance(format, CopiedFormat):
        with suppress(OSError), to_read(path) as index:  # without locks or second names, runs that go on lose copies
            fcntl.flock(index, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.link(path, path.with_name(f"{path.stem}-{uuid.uuid4().hex}{_OLD}"))
    _write(path, format, {each: known[each] for each in told})
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
    """Writes the copy of a file beside the index at `path`; what is no sample leaves none."""
    digest = hashlib.sha256(json.dumps([reader.address, reader.facts]).encode()).hexdigest()[:16]
    copy = path.with_name(f"{path.stem}-{digest}{_ROWS}")
    with _writing(copy), whole_file(copy) as file:
        layout = format.copy(reader, file)
        return layout._replace(notes={**layout.notes, _COPY: [copy.name, file.tell()]})


def _write(path: Path, format: AnyFormat, layouts: dict[tuple[str, FileVersion], Layout]) -> None:
    files = [IndexedFile(*file, len(each.spans), each.notes) for file, each in layouts.items()]
    line = json.dumps({"format": _name(format), "files": [file._asdict() for file in files]}).encode()
    line += b" " * (-(len(line) + 1) % _ALIGNMENT) + b"\n"
    write_index(path, [line, *(np.ascontiguousarray(each.spans, dtype="<i8").data for each in layouts.values())])


def _remove_unused(path: Path, format: AnyFormat) -> None:
    """Removes old indexes that no process has mapped, and copies that none of the others names."""
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
