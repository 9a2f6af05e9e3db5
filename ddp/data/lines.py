"""Samples in lines of text: JSON lines, and CSV with a header. One line is one sample.

    {"x": 0.5, "y": [1, 2], "label": 3}        x,y,label
    {"x": 0.1, "y": [0, 4], "label": 1}        0.5,1,3

    no columns chosen                 {"x": 0.5, "y": [1, 2], "label": 3}        {"x": "0.5", "y": "1", "label": "3"}
    inputs=["x", "y"], target="label" (tensor([0.5, 1, 2]), tensor(3))           (tensor([0.5, 1]), tensor(3))

Blank lines are no samples; line ends may be \\n or \\r\\n; text is UTF-8, with or without a byte order mark.

A field of CSV may have line breaks and separators within double quotes, and "" is a quote there (RFC 4180). So a line
break ends a sample if an even number of quotes stands before it. A quote in a field that is not quoted breaks this
count, and most often ends in a row with a wrong number of fields: write such a field in quotes.

NumPy looks for line ends in blocks of 4 MiB, at 300 MB/s to 3 GB/s. Each file's first line is decoded at once, so that
a file of another format is noticed before training.

Read before: `decoders.py`. Read next: `tokens.py`.
"""

from __future__ import annotations

import csv
import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp.data.file_index import Format, Layout, Spans
from ddp.data.readers import Reader
from ddp.errors import ConfigError

_BLOCK_BYTES = 4 << 20
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
_MARK = b"\xef\xbb\xbf"


class _Lines(Format):
    """Text with a record per line.

    Args:
        inputs: names of the columns that become a float32 tensor, one after the other; None for a dict of all.
        target: name of the column that becomes the target.
        target_dtype: of the target; float32 for regression.
    """

    _has_quotes = False
    _what: str

    def __init__(
        self,
        *,
        inputs: Sequence[str] | None = None,
        target: str | None = None,
        target_dtype: torch.dtype = torch.int64,
    ) -> None:
        if (inputs is None) != (target is None):
            raise ConfigError(
                f"inputs={inputs!r} and target={target!r}: give both for pairs, or none of them for dicts"
            )
        if isinstance(inputs, str) or (inputs is not None and not inputs):
            raise ConfigError(f"inputs={inputs!r}: give a list of at least one column name, such as ['x', 'y']")
        self.inputs, self.target, self.target_dtype = inputs, target, target_dtype

    def index(self, reader: Reader) -> Layout:
        """Finds the lines, and decodes the first and, if it has no line end, the last."""
        spans = self._spans(reader)
        notes, spans = self._header(reader, spans)
        for number in (0, -1):
            if len(spans) and (number == 0 or reader.read(reader.facts.size - 1, 1) != b"\n"):
                start, end = spans[number].tolist()
                self._check(reader, start, end, notes)
        return Layout(spans, notes)

    def decode(self, data: bytes, notes: dict[str, Any]) -> Any:
        """Returns the record of a line, or the pair that is made of it."""
        record = self._record(data, notes)
        if self.inputs is None or self.target is None:
            return record
        values = [value for name in self.inputs for value in self._numbers(record, name)]
        return torch.tensor(values, dtype=torch.float32), self._target_of(record, self.target)

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
        """Returns what the head of a file says, and the samples after it."""
        return {}, spans

    def _target_of(self, record: dict[str, Any], name: str) -> Tensor:
        values = self._numbers(record, name)
        if len(values) != 1:
            raise ValueError(f"{name} has {len(values)} numbers, a target has one")
        if not self.target_dtype.is_floating_point and values[0] != int(values[0]):
            raise ValueError(f"{name} is {values[0]}, no whole number; give target_dtype=torch.float32")
        return torch.tensor(values[0], dtype=self.target_dtype)

    def _check(self, reader: Reader, start: int, end: int, notes: dict[str, Any]) -> None:
        try:
            self.decode(reader.read(start, end - start), notes)
        except Exception as error:
            is_last = end == reader.facts.size
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"{reader.address}, {self.place(reader, 0, start)} is not {self._what} ({cause}): "
                + ("the file may be cut off; copy it again" if is_last else "check the file's format and columns")
            ) from error

    def _spans(self, reader: Reader) -> Spans:
        """Returns where each line that is not blank begins and ends, without its line end."""
        size = reader.facts.size
        first = len(_MARK) if reader.read(0, min(3, size)) == _MARK else 0
        found = list(_line_ends(reader, first, has_quotes=self._has_quotes))
        ends = np.concatenate([positions for positions, _ in found])
        after_return = np.concatenate([flags for _, flags in found])
        if not len(ends) or ends[-1] != size - 1:
            ends, after_return = np.append(ends, size), np.append(after_return, False)
        starts = np.empty_like(ends)
        starts[0], starts[1:] = first, ends[:-1] + 1
        ends = ends - after_return
        spans: Spans = np.stack([starts, ends], axis=1)
        lines: Spans = spans[ends > starts]
        return lines


def _line_ends(
    reader: Reader, first: int, *, has_quotes: bool
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Yields, block by block, the positions of line ends outside quotes, and if a carriage return is before each.

    Raises:
        ConfigError: a quote is not closed.
    """
    size, num_quotes, last = reader.facts.size, 0, 0
    for start in range(first, size, _BLOCK_BYTES):
        block = np.frombuffer(reader.read(start, min(_BLOCK_BYTES, size - start)), dtype=np.uint8)
        ends = np.flatnonzero(block == _NEWLINE)
        if has_quotes:
            quotes = np.flatnonzero(block == _QUOTE)
            is_outside = (np.searchsorted(quotes, ends) + num_quotes) % 2 == 0
            ends, num_quotes = ends[is_outside], num_quotes + len(quotes)
        before = block[ends - 1]
        if len(ends) and ends[0] == 0:
            before[0] = last
        last = block[-1]
        yield ends + start, before == _RETURN
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
        record = json.loads(data)
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
        separator: between fields, such as "\\t".
    """

    kind = "csv"
    suffixes = (".csv", ".tsv")
    _what = "a row of this file"
    _has_quotes = True

    def __init__(self, *, separator: str = ",", **columns: Any) -> None:
        super().__init__(**columns)
        self.separator = separator

    def settings(self) -> dict[str, Any]:
        """Returns whatever the index depends on."""
        return {"separator": self.separator}

    def _header(self, reader: Reader, spans: Spans) -> tuple[dict[str, Any], Spans]:
        start, end = spans[0].tolist() if len(spans) else (0, 0)
        names = self._fields(reader.read(start, end - start))
        missing = [
            name for name in [*(self.inputs or []), *([self.target] if self.target else [])] if name not in names
        ]
        if missing:
            raise ConfigError(
                f"{reader.address} has no column {missing[0]!r}; the columns of its first line are {names}"
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"{reader.address}: two columns have the same name in {names}; rename one")
        return {"columns": names}, spans[1:]

    def _fields(self, data: bytes) -> list[str]:
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
