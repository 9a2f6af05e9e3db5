"""Samples in files, by index: a map-style data set over tar files, rows or tokens, here or at any fsspec address.

    index                 0 … 99        100 … 349       350 …
    file                  a.tar         b.tar           c.tar        in the order of their addresses
    span in the file      [start, end)  …                            from the index, mapped into memory
    sample                format.decode(the bytes from start to end)

    samples = FileSet("/data/train-{000..099}.tar", TarSamples(decode=ImageAndClass()), index_dir="/data/index")

`file_sizes` says how many samples each file has; a sampler that keeps to a few files at a time needs it.

A process keeps the few files open that were used last, because samples are read in runs. A forked loader process also
reads from those of its parent, because reading needs no position that they would share. A pickled copy has none.

A sample that cannot be decoded, or whose bytes a disk or a network does not hand out, is an `UnreadableSample`. A file
that is missing, or has changed since it was indexed, ends the run.

Cost: opening maps one index, however many samples it has; a sample costs one read, 3 us besides decoding it.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp.data.files.file_index import AnyFormat, FileIndex, index_files, mapped_again, open_index
from ddp.data.files.listing import Addresses
from ddp.data.files.readers import Reader, ReadFailed, is_remote
from ddp.data.files.storage import DIRECT, Storage
from ddp.errors import UnreadableSample, one_line

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
        ConfigError: as `index_files`; without `build`, there is no index; or the files have not the columns that
            `format` wants.

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
        """Returns tokens of each sample [len(self)]; None if the format does not tell."""
        return self.format.lengths(self._index.table[:, 1] - self._index.table[:, 0])

    def __len__(self) -> int:
        return self._first_samples[-1]

    def __getitem__(self, index: int) -> Any:
        data, notes = self.raw(index)
        try:
            return self.format.decode(data, notes)
        except Exception as error:  # of a format's own, or of a library
            raise self._unreadable(index, error) from error

    def raw(self, index: int) -> tuple[bytes, dict[str, Any]]:
        """Returns the bytes of a sample, and what the index notes about its file.

        Raises:
            UnreadableSample: a disk or a network does not hand them out.
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
