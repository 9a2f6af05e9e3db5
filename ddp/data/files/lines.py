"""Samples in lines of text: JSON lines, and CSV with a header. One line is one sample.

    {"x": 0.5, "y": [1, 2], "label": 3}        x,y,label
    {"x": 0.1, "y": [0, 4], "label": 1}        0.5,1,3

    no columns chosen                 {"x": 0.5, "y": [1, 2], "label": 3}        {"x": "0.5", "y": "1", "label": "3"}
    inputs=["x", "y"], target="label" (tensor([0.5, 1, 2]), tensor(3))           (tensor([0.5, 1]), tensor(3))

Blank lines are no samples, nor are lines of spaces among JSON; line ends may be \\n or \\r\\n; text is UTF-8, with or
without a byte order mark.

A field of CSV may have line breaks and separators within double quotes, and "" is a quote there (RFC 4180). So a line
break ends a sample if an even number of quotes stands before it. A quote in a field that is not quoted breaks this
count, and most often ends in a row with a wrong number of fields: write such a field in quotes.

NumPy looks for line ends in blocks of 4 MiB, at 300 MB/s to 3 GB/s. Each file's first line is decoded at once, so that
a file of another format is noticed before training. Whenever the files are opened, the names of the chosen columns are
compared with theirs: with every header of CSV, and with the first line of the first file of JSON.
"""

from __future__ import annotations

import csv
import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp.data.files.file_index import Format, IndexedFile, Layout, Spans
from ddp.data.files.readers import Reader, check_not_compressed
from ddp.errors import ConfigError, one_line

_BLOCK_BYTES = 4 << 20
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
_SPACES = b" \t\r"
_IS_SPACE = np.isin(np.arange(256), list(_SPACES))
_MARK = b"\xef\xbb\xbf"


class _Lines(Format):
    """Text with a record per line.

    Args:
        inputs: names of the columns that become a float32 tensor, one after the other; None for a dict of all.
        target: name of the column that becomes the target.
        target_dtype: of the target; float32 for regression.
        num_classes: the target is one of 0 … num_classes - 1; None: any number.
    """

    draws_nothing = True
    _is_quoted = False  # fields may stand in quotes; then a line of spaces is a row, too
    _what: str

    def __init__(
        self,
        *,
        inputs: Sequence[str] | None = None,
        target: str | None = None,
        target_dtype: torch.dtype = torch.int64,
        num_classes: int | None = None,
    ) -> None:
        if (inputs is None) != (target is None):
            raise ConfigError(
                f"inputs={inputs!r} and target={target!r}: give both for pairs, or none of them for dicts"
            )
        if isinstance(inputs, str) or (inputs is not None and not inputs):
            raise ConfigError(f"inputs={inputs!r}: give a list of at least one column name, such as ['x', 'y']")
        self.inputs, self.target, self.target_dtype, self.num_classes = inputs, target, target_dtype, num_classes

    def index(self, reader: Reader) -> Layout:
        """Finds the lines, and decodes the first and, if it has no line end, the last."""
        check_not_compressed(reader)
        spans = self._spans(reader)
        notes, spans = self._header(reader, spans)
        for number in (0, -1):
            if len(spans) and (number == 0 or reader.read(reader.facts.size - 1, 1) != b"\n"):
                start, end = spans[number].tolist()
                self._check(reader, start, end, notes)
        return Layout(spans, notes)

    def check(self, files: Sequence[IndexedFile], first: Callable[[], tuple[Reader, int, int]]) -> None:
        """Decodes the first line, if columns of it are chosen."""
        if self.inputs is not None:
            self._check(*first(), files[0].notes)

    def decode(self, data: bytes, notes: dict[str, Any]) -> Any:
        """Returns the record of a line, or the pair that is made of it."""
        sample = self._sample(data, notes)
        if self.target is None:
            return sample
        if not all(bool(each.isfinite().all()) for each in sample):
            raise ValueError(self._not_finite(data, notes))
        if self.num_classes is None:
            return sample
        if not 0 <= (target := sample[1].item()) < self.num_classes:
            what = f"num_classes={self.num_classes} has the classes 0 … {self.num_classes - 1}"
            raise ValueError(f"{self.target} is {target}, and {what}")
        return sample

    def _sample(self, data: bytes, notes: dict[str, Any]) -> Any:
        record = self._record(data, notes)
        if self.inputs is None or self.target is None:
            return record
        values = [value for name in self.inputs for value in self._numbers(record, name)]
        return torch.tensor(values, dtype=torch.float32), self._target_of(record, self.target)

    def _not_finite(self, data: bytes, notes: dict[str, Any]) -> str:
        """Returns in words which column is NaN, infinite, or too large for float32; the loss would be, too."""
        record, names = self._record(data, notes), [*(self.inputs or ()), *filter(None, [self.target])]
        numbers = {name: torch.tensor(self._numbers(record, name), dtype=torch.float32) for name in names}
        name = next(name for name, each in numbers.items() if not bool(each.isfinite().all()))
        return f"{name} is {record[name]}, no finite number"

    def place(self, reader: Reader, number: int, start: int) -> str:
        """Returns the number of a sample's line."""
        before = sum(
            reader.read(begin, min(_BLOCK_BYTES, start - begin)).count(b"\n") for begin in range(0, start, _BLOCK_BYTES)
        )
        return f"line {before + 1}"

    @abstractmethod
    def _record(self, data: bytes, notes: dict[str, Any]) -> dict[str, Any]: ...

    @abstractmethod
    def _numbers(self, record: dict[str, Any], name: str) -> list[float]: ...

    def _header(self, reader: Reader, spans: Spans) -> tuple[dict[str, Any], Spans]:
        """Returns the facts in the head of a file, and the samples after it."""
        return {}, spans

    def _target_of(self, record: dict[str, Any], name: str) -> Tensor:
        values = self._numbers(record, name)
        if len(values) != 1:
            raise ValueError(f"{name} has {len(values)} numbers, a target has one")
        if not self.target_dtype.is_floating_point and values[0] != int(values[0]):
            raise ValueError(f"{name} is {values[0]}, no whole number; give target_dtype=torch.float32")
        return torch.tensor(values[0], dtype=self.target_dtype)

    def _check(self, reader: Reader, start: int, end: int, notes: dict[str, Any]) -> None:
        data = reader.read(start, end - start)
        try:
            self._sample(data, notes)  # the index does not depend on the number of classes
        except Exception as error:
            is_last = end == reader.facts.size
            raise ConfigError(
                f"{reader.address}, {self.place(reader, 0, start)} is not {self._what} ({one_line(error)}): "
                + ("the file may be cut off; copy it again" if is_last else "check the file's format and columns")
            ) from error

    def _spans(self, reader: Reader) -> Spans:
        """Returns where each line that is not blank begins and ends, without its line end."""
        size = reader.facts.size
        first = len(_MARK) if reader.read(0, min(3, size)) == _MARK else 0
        found = list(_line_ends(reader, first, has_quotes=self._is_quoted))
        if not found:
            return np.empty((0, 2), dtype=np.int64)
        ends, after_return, after_space = (np.concatenate(each) for each in zip(*found, strict=True))
        if not len(ends) or ends[-1] != size - 1:
            ends, after_return = np.append(ends, size), np.append(after_return, False)
            after_space = np.append(after_space, True)  # it may be
        starts = np.empty_like(ends)
        starts[0], starts[1:] = first, ends[:-1] + 1
        ends = ends - after_return
        is_line = ends > starts
        for number in [] if self._is_quoted else np.flatnonzero(is_line & after_space).tolist():
            start, end = int(starts[number]), int(ends[number])
            is_line[number] = bool(reader.read(start, end - start).strip(_SPACES))
        spans: Spans = np.stack([starts, ends], axis=1)[is_line]
        return spans


def _line_ends(
    reader: Reader, first: int, *, has_quotes: bool
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]]:
    """Yields, block by block, the positions of line ends outside quotes, each with two flags.

    The first flag is set if a carriage return is before the line end, the second if the line's last byte is a space.

    Raises:
        ConfigError: a quote is not closed.
    """
    size, num_quotes, last = reader.facts.size, 0, bytes(2)
    for start in range(first, size, _BLOCK_BYTES):
        data = last + reader.read(start, min(_BLOCK_BYTES, size - start))
        last, both = data[-2:], np.frombuffer(data, dtype=np.uint8)
        block = both[2:]
        ends = np.flatnonzero(block == _NEWLINE)
        if has_quotes:
            quotes = np.flatnonzero(block == _QUOTE)
            is_outside = (np.searchsorted(quotes, ends) + num_quotes) % 2 == 0
            ends, num_quotes = ends[is_outside], num_quotes + len(quotes)
        before = both[ends + 1]
        after_return = before == _RETURN
        yield ends + start, after_return, _IS_SPACE[np.where(after_return, both[ends], before)]
    if num_quotes % 2:
        raise ConfigError(
            f"{reader.address} has {num_quotes} double quotes, so one is not closed: the file may be cut off; or write "
            'a field with a quote as "5"" pipe"'
        )


class JsonLines(_Lines):
    """JSON lines: an object in each line. Chosen columns hold numbers, or lists of numbers."""

    kind = "jsonl"
    suffixes = (".jsonl", ".ndjson")
    _what = "a JSON object"

    def _record(self, data: bytes, notes: dict[str, Any]) -> dict[str, Any]:
        record = json.loads(data.decode())  # of bytes it would guess the encoding
        if not isinstance(record, dict):
            raise ValueError(f"it is a {type(record).__name__}")
        return record

    def _numbers(self, record: dict[str, Any], name: str) -> list[float]:
        if name not in record:
            raise ValueError(f"there is no {name!r}, only {list(record)}")
        return _flat(record[name], name)


def _flat(value: Any, name: str) -> list[float]:
    """Returns the numbers in nested lists."""
    if isinstance(value, list):
        return [number for each in value for number in _flat(each, name)]
    if not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r}, no number")
    return [value]


class Csv(_Lines):
    """CSV whose first line has the names of the columns. Fields are strings; those of chosen columns are numbers.

    Args:
        separator: one character between fields, such as "\\t".
    """

    kind = "csv"
    suffixes = (".csv", ".tsv")
    _what = "a row of this file"
    _is_quoted = True

    def __init__(self, *, separator: str = ",", **columns: Any) -> None:
        super().__init__(**columns)
        if not isinstance(separator, str) or len(separator) != 1 or separator in '"\r\n':
            raise ConfigError(f"separator={separator!r}: give one character, such as ';', but no quote and no line end")
        self.separator = separator

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the index depends on."""
        return {"separator": self.separator}

    def check(self, files: Sequence[IndexedFile], first: Callable[[], tuple[Reader, int, int]]) -> None:
        """Looks for the chosen columns in all headers."""
        for file in files:
            self._check_columns(file.address, file.notes["columns"])

    def _check_columns(self, address: str, names: Sequence[str]) -> None:
        for name in [] if self.inputs is None else [*self.inputs, self.target]:
            if name not in names:
                raise ConfigError(f"{address} has no column {name!r}; the columns of its first line are {names}")

    def _header(self, reader: Reader, spans: Spans) -> tuple[dict[str, Any], Spans]:
        start, end = spans[0].tolist() if len(spans) else (0, 0)
        data = reader.read(start, end - start)
        try:
            names = self._fields(data)
        except (ValueError, csv.Error) as error:
            raise ConfigError(
                f"{reader.address}: the first line has no names of columns that can be read ({one_line(error)}): write "
                'the file as UTF-8, with \\n or \\r\\n after each line, and a name with a quote as "5"" pipe"'
            ) from error
        self._check_columns(reader.address, names)
        if len(set(names)) < len(names):
            raise ConfigError(f"{reader.address}: two columns have the same name in {names}; rename one")
        return {"columns": names}, spans[1:]

    def _fields(self, data: bytes) -> list[str]:
        if len(data) > csv.field_size_limit():
            # The limit is the process's. Setting it back would take it from a row that another thread reads.
            csv.field_size_limit(sys.maxsize)
        return next(csv.reader([data.decode()], delimiter=self.separator, strict=True), [])

    def _record(self, data: bytes, notes: dict[str, Any]) -> dict[str, Any]:
        fields, names = self._fields(data), notes["columns"]
        if len(fields) != len(names):
            raise ValueError(f"it has {len(fields)} fields, and the first line {len(names)}")
        return dict(zip(names, fields, strict=True))

    def _numbers(self, record: dict[str, Any], name: str) -> list[float]:
        if name not in record:
            raise ValueError(f"there is no {name!r}, only {list(record)}")
        try:
            return [float(record[name])]
        except ValueError:
            raise ValueError(f"{name} is {record[name]!r}, no number") from None
