"""Rows of tables: CSV, JSON lines, Parquet, Arrow. pyarrow reads each file once, strictly; workers read a copy of it.

    a.csv                 INDEX_DIR/csv-4f1d…-9b02….rows, an Arrow file      sample 1 is 24 bytes of it
    x,y,label             fixed_size_list<double>[3]
    0.5,1,3          →    0.5   1  3                                    →    (tensor([0.25, 7]), tensor(0))
    0.25,7,0              0.25  7  0

Columns have the types that the settings ask for, and none is guessed: inputs are float64, and a target is int64 if it
is a class, else float64. An empty cell is the empty string, null, or a key that an object of JSON lacks. In JSON,
Parquet and Arrow, an input may be a list of numbers that is equally long in every row. Other columns are not read.

The first row that does not fit ends the run before workers start, with file, line and column:

    a row of another length          1,2,3,4
    a value of another type          1,two,3    1,NA,3    1,2,0.5 where 0.5 should be a class
    an empty cell                    1,,3       unless `missing` says which number it counts as
    no finite float32                1,nan,3    1,1e39,3
    a class that there is not        1,2,4      with num_classes=4

pyarrow names the row, and Python's `csv`, or parsing line by line, finds its line. `csv` also reads files with
quotes, because pyarrow accepts a quote that is never closed, and text behind a closing quote ("2"5 would be 25).

With `text` instead of inputs and target, a sample is the text of one column, in UTF-8.

Cost: a core reads numbers at 40 MB/s; the copy takes 8 bytes a number. A sample is one read of the copy, 17 us, without
pyarrow, which workers never import. The copy is not mapped into memory, because a file that is cut off while it is
mapped ends the process with a SIGBUS.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddp.data.files.file_set import CopiedFormat, IndexedFile, Layout, Spans
from ddp.data.files.readers import Reader, ReaderFile, check_not_compressed
from ddp.errors import ConfigError, one_line

_BLOCK_BYTES = 16 << 20  # of text that pyarrow has in memory; a row must fit
_BLOCK_ROWS = 4096  # of Parquet
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_EXACT = 2**53  # the largest whole number up to which float64 has all
_WAY_OUT = "or encode it in your own data (data=MODULE:NAME) or in a Task"


class _Rows(CopiedFormat):
    """A table with a row for each sample.

    Args:
        inputs: names of the columns that become a float32 tensor, one after the other.
        target: name of the column that becomes the target.
        text: name of the column that is the sample, instead of both.
        target_dtype: of the target; float32 for regression.
        num_classes: the target is one of 0 … num_classes - 1; None: any number.
        missing: number that an empty cell among the inputs counts as; None: an empty cell is refused.
    """

    draws_nothing = True

    def __init__(
        self,
        *,
        inputs: Sequence[str] | None = None,
        target: str | None = None,
        text: str | None = None,
        target_dtype: torch.dtype = torch.int64,
        num_classes: int | None = None,
        missing: float | None = None,
    ) -> None:
        if (text is None) == (inputs is None) or (inputs is None) != (target is None):
            raise ConfigError(
                f"inputs={inputs!r}, target={target!r} and text={text!r}: give inputs and target, or text alone"
            )
        if isinstance(inputs, str) or (inputs is not None and not inputs):
            raise ConfigError(f"inputs={inputs!r}: give a list of at least one column name, such as ['x', 'y']")
        if missing is not None and not math.isfinite(missing):
            raise ConfigError(f"missing={missing}: give a finite number, because the loss would not be one either")
        self.inputs, self.target, self.target_dtype, self.num_classes = inputs, target, target_dtype, num_classes
        self.text, self.missing = text, missing

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the copies depend on."""
        if self.text is not None:
            return {"text": self.text, "version": 1}
        is_class = not self.target_dtype.is_floating_point
        return {
            "inputs": list(self.inputs or ()),
            "target": self.target,
            "classes": self.num_classes if self.num_classes is not None else is_class,
            "missing": self.missing,
            "version": 1,
        }

    def copy(self, reader: Reader, file: IO[bytes]) -> Layout:
        """Writes the rows of a file as an Arrow file, and returns where each of them is there."""
        arrow, widths, first = _arrow(self.kind), dict[str, int](), 0

        def blocks() -> Iterator[tuple[Any, NDArray[np.int64]]]:
            nonlocal first
            for batch in filter(len, self._batches(reader)):
                if self.text is not None:
                    yield _texts(arrow, self._text(reader, batch, self.text, first))
                else:
                    yield _lists(arrow, self._numbers(reader, batch, first, widths))
                first += len(batch)

        try:
            return Layout(_written(arrow, file, blocks(), ", ".join(self._types())), {"widths": widths})
        except (arrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:  # the copy cannot be written
                raise
            what = f"cannot be read as {self.kind} ({one_line(error)}): check its format, or copy it again"
            if "straddl" in str(error):
                what = f"has a row of more than {_BLOCK_BYTES >> 20} MiB: write it in parts, and close each quote"
            raise ConfigError(f"{reader.address} {what}") from error

    def check(self, files: Sequence[IndexedFile], first: Callable[[], tuple[Reader, int, int]]) -> None:
        """Checks that each input has as many numbers in every file."""
        widths: dict[str, int] = files[0].notes.get("widths", {})
        for file in files if widths else ():
            for name, width in file.notes["widths"].items():
                if width != widths[name]:
                    raise ConfigError(
                        f"{file.address} has {width} numbers in {name}, and {files[0].address} has {widths[name]}: "
                        f"samples of one shape are needed, so make them equally long, {_WAY_OUT}"
                    )

    def decode(self, data: bytes, notes: dict[str, Any]) -> Any:
        """Returns a row as a pair, or its text."""
        if self.text is not None:
            return data.decode()
        row = np.frombuffer(data, dtype="<f8")
        return torch.from_numpy(row[:-1].astype(np.float32)), torch.tensor(row[-1], dtype=self.target_dtype)

    @abstractmethod
    def _batches(self, reader: Reader) -> Iterator[Any]:
        """Yields the chosen columns of the rows, in pyarrow's record batches."""

    def _place(self, reader: Reader, row: int) -> str:
        """Returns where in a file a row is, counted from 0, for errors."""
        return f"row {row + 1}"

    # ------------------------------------------------------------------------------------------------- chosen columns

    def _target_type(self) -> str:
        return "float64" if self.target_dtype.is_floating_point else "int64"

    def _types(self) -> dict[str, str]:
        """Returns pyarrow's type of each chosen column."""
        if self.text is not None:
            return {self.text: "string"}
        inputs = dict.fromkeys(self.inputs or (), "float64")
        return {**inputs, str(self.target): inputs.get(str(self.target), self._target_type())}

    def _columns(self, reader: Reader, names: Sequence[str]) -> list[str]:
        """Returns the names of the columns to read, of all that a file has."""
        for name in self._types():
            if name not in names:
                raise ConfigError(f"{reader.address} has no column {name!r}; its columns are {names}: correct the name")
        if len(set(names)) < len(names):
            raise ConfigError(f"{reader.address}: two columns have the same name in {names}; rename one")
        return list(self._types())

    def _text(self, reader: Reader, batch: Any, name: str, first: int) -> list[bytes]:
        """Returns the texts of a column.

        Args:
            first: number of the batch's first row.

        Raises:
            ConfigError: a cell is empty or no text.
        """
        column = batch.column(name)
        if str(column.type) not in ("string", "large_string"):
            raise self._refused(reader, first, name, f"has values of type {column.type}, no text")
        texts: list[bytes] = column.cast("large_binary").to_pylist()
        for row, text in enumerate(texts, first):
            if text is None:
                raise self._refused(reader, row, name, "is empty")
            try:
                text.decode()
            except UnicodeDecodeError:
                raise self._refused(reader, row, name, "is not in UTF-8") from None
        return texts

    def _numbers(self, reader: Reader, batch: Any, first: int, widths: dict[str, int]) -> NDArray[np.float64]:
        """Returns inputs and, as the last number, target [rows, numbers].

        Args:
            first: number of the batch's first row.
            widths: receives how many numbers each input has.

        Raises:
            ConfigError: a cell is empty or no such number.
        """
        columns = [self._column(reader, batch, name, first, widths) for name in self.inputs or ()]
        return np.concatenate([*columns, self._column(reader, batch, str(self.target), first, None)], axis=1)

    def _column(
        self, reader: Reader, batch: Any, name: str, first: int, widths: dict[str, int] | None
    ) -> NDArray[np.float64]:
        """Returns the numbers of a column [rows, numbers in a row].

        Args:
            first: number of the batch's first row.
            widths: as in `_numbers`; None for the target.
        """

        def refused(where: NDArray[Any] | list[int], what: str) -> ConfigError:
            return self._refused(reader, first + int(where[0]) // width, name, what)

        column, num_rows, width = batch.column(name), len(batch), 1
        while _is_list(column.type):
            if column.null_count:
                raise refused(_nulls(column), "is empty")
            sizes = np.asarray(column.value_lengths().to_numpy(zero_copy_only=False))
            expected = int(sizes[0]) if len(sizes) else 0
            if len(other := np.flatnonzero(sizes != expected)):
                raise refused(other, f"has {sizes[other[0]]} numbers, and in the rows before {expected}")
            column, width = column.flatten(), width * expected
        known = 1 if widths is None else widths.setdefault(name, width)
        if width != known:
            raise self._refused(reader, first, name, f"has {width} numbers, and should have {known}")
        wanted = "float64" if widths is not None else self._target_type()
        if not _is_numeric(column.type):
            raise refused([0], f"has values of type {column.type}, no numbers")
        try:
            numbers = column.cast(wanted)
        except ValueError:
            first_bad = next(each for each in range(len(column)) if not _can_be(column[each : each + 1], wanted))
            raise refused([first_bad], _of_another_type(column[first_bad].as_py(), wanted)) from None
        if numbers.null_count and (self.missing is None or widths is None):
            raise refused(_nulls(numbers), "is empty")
        if numbers.null_count:
            numbers = numbers.fill_null(self.missing)
        values = numbers.to_numpy(zero_copy_only=False)
        if widths is None:
            self._check_target(values, refused)
        with np.errstate(over="ignore"):
            if len(bad := np.flatnonzero(~np.isfinite(values.astype(np.float32)))):
                raise refused(bad, f"is {values[bad[0]]}, no finite number")
        return np.asarray(values, dtype=np.float64).reshape(num_rows, width)

    def _check_target(self, values: NDArray[Any], refused: Callable[[NDArray[Any], str], ConfigError]) -> None:
        if self.num_classes is not None and len(bad := np.flatnonzero((values < 0) | (values >= self.num_classes))):
            what = f"num_classes={self.num_classes} has the classes 0 … {self.num_classes - 1}"
            raise refused(bad, f"is {values[bad[0]]}, and {what}")
        if values.dtype == np.int64 and len(bad := np.flatnonzero((values > _EXACT) | (values < -_EXACT))):
            raise refused(bad, f"is {values[bad[0]]}, which is beyond 2 ** 53 and would be rounded")

    def _refused(self, reader: Reader, row: int, name: str, what: str) -> ConfigError:
        """Returns the error of a cell."""
        if what == "is empty":
            remedy = "fill it in, leave the row out"
            if self.text is None and name != self.target:
                remedy += ", say which number an empty cell counts as (data.missing=0, or missing=0 in Python)"
        else:
            remedy = "correct the row, choose other columns"
        return ConfigError(f"{reader.address}, {self._place(reader, row)}: {name} {what}: {remedy}, {_WAY_OUT}")


def _is_list(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def _is_numeric(kind: Any) -> bool:
    return re.match(r"u?int\d+$|halffloat|float$|double$|decimal|null$", str(kind)) is not None


def _nulls(column: Any) -> NDArray[np.int64]:
    return np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))


def _can_be(cell: Any, wanted: str) -> bool:
    try:
        cell.cast(wanted)
    except ValueError:
        return False
    return True


def _of_another_type(value: Any, wanted: str) -> str:
    """Returns, as text, why a cell's value does not have the expected type."""
    if wanted == "string":
        return f"is {_short(value)}, no text"
    if wanted == "int64":
        return f"is {_short(value)}, no whole number as a class is; leave num_classes out for a number"
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return f"is {_short(value)}, {'which float64 would round' if is_whole else 'no number'}"


def _short(value: Any) -> str:
    return f"{value!r:.60}"


def _arrow(kind: str) -> Any:
    """Returns pyarrow with its modules.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        arrow = importlib.import_module("pyarrow")
        for name in ("csv", "json", "ipc", "parquet"):
            importlib.import_module(f"pyarrow.{name}")
    except ImportError as error:
        raise ConfigError(
            f"data={kind}: needs pyarrow, which is missing ({one_line(error)}): "
            f"{sys.executable} -m pip install 'pyarrow>=24'"
        ) from error
    return arrow


# ------------------------------------------------------------------------------------------------------- the copy


def _lists(arrow: Any, block: NDArray[np.float64]) -> tuple[Any, NDArray[np.int64]]:
    """Returns a block of numbers as an array of pyarrow's, with the row ends in its bytes."""
    num_rows, width = block.shape
    array = arrow.FixedSizeListArray.from_arrays(arrow.array(block.reshape(-1)), width)
    return array, 8 * width * np.arange(1, num_rows + 1, dtype=np.int64)


def _texts(arrow: Any, texts: list[bytes]) -> tuple[Any, NDArray[np.int64]]:
    """Returns texts as an array of pyarrow's, with the row ends in its bytes."""
    return arrow.array(texts, arrow.large_binary()), np.cumsum([len(each) for each in texts], dtype=np.int64)


def _written(arrow: Any, file: IO[bytes], arrays: Iterator[tuple[Any, NDArray[np.int64]]], columns: str) -> Spans:
    """Writes an Arrow file with one column of these arrays, and returns where each row is there."""
    spans, writer = [np.empty((0, 2), dtype=np.int64)], None
    for array, ends in arrays:
        batch = arrow.record_batch([array], names=["row"]).replace_schema_metadata({"columns": columns})
        if writer is None:
            writer = arrow.ipc.new_file(arrow.PythonFile(file, mode="w"), batch.schema)
        writer.write_batch(batch)
        # A message ends with its body, in which the values are the last buffer.
        message = arrow.ipc.read_message(batch.serialize())
        values = arrow.ipc.read_record_batch(message, batch.schema).column(0).buffers()[-1]
        start = file.tell() - message.body.size + (values.address - message.body.address if len(ends) else 0)
        spans.append(start + np.stack([np.concatenate([[0], ends])[:-1], ends], axis=1))
    if writer is not None:
        writer.close()
    return np.concatenate(spans)


# ------------------------------------------------------------------------------------------------------------ CSV


class Csv(_Rows):
    """CSV whose first line has the names of the columns.

    Blank lines are no rows; line ends may be \\n, \\r\\n or \\r; text is UTF-8, with or without a byte order mark. A
    field may have line ends and separators within double quotes, where "" is a quote (RFC 4180).

    Args:
        separator: one character between fields, such as "\\t".
    """

    kind = "csv"
    suffixes = (".csv", ".tsv")

    def __init__(self, *, separator: str = ",", **columns: Any) -> None:
        super().__init__(**columns)
        if not isinstance(separator, str) or len(separator) != 1 or not separator.isascii() or separator in '"\r\n':
            raise ConfigError(f"separator={separator!r}: give one ASCII character, such as ';', no quote, no line end")
        self.separator = separator

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the copies depend on."""
        return {**super().settings(), "separator": self.separator}

    def _batches(self, reader: Reader) -> Iterator[Any]:
        check_not_compressed(reader)
        names = self._names(reader)
        if not names:
            return
        arrow, types, file = _arrow(self.kind), self._types(), _Quotes(reader)
        try:
            yield from arrow.csv.open_csv(
                arrow.PythonFile(file, mode="r"),
                read_options=arrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
                parse_options=arrow.csv.ParseOptions(delimiter=self.separator, newlines_in_values=True),
                convert_options=arrow.csv.ConvertOptions(
                    include_columns=list(types),
                    column_types={name: arrow.type_for_alias(each) for name, each in types.items()},
                    null_values=[""],
                    strings_can_be_null=False,
                ),
            )
        except arrow.ArrowInvalid as error:
            raise self._located(reader, names, error) from None
        if file.has_quotes:
            for _ in self._rows(reader):
                pass

    def _names(self, reader: Reader) -> list[str]:
        """Returns the names of the columns; none if there is no row after the first line."""
        rows = self._rows(reader)
        try:
            names = next(rows, (0, []))[1]
            "".join(names).encode()  # refuses what was no UTF-8
        except (_BrokenQuote, UnicodeEncodeError) as error:
            raise ConfigError(
                f"{reader.address}: the first line has no names of columns that can be read ({one_line(error)}): write "
                'the file as UTF-8, and a name with a quote as "5"" pipe"'
            ) from error
        if not any(True for _ in rows):
            return []
        self._columns(reader, names)
        return names

    def _rows(self, reader: Reader) -> Iterator[tuple[int, list[str]]]:
        """Yields the fields of each row, with the number of its first line.

        Raises:
            _BrokenQuote: a quote is not closed, or there is text behind it.
        """
        csv.field_size_limit(sys.maxsize)
        file = io.BufferedReader(ReaderFile(reader), 1 << 20)
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        rows, line = csv.reader(text, delimiter=self.separator, strict=True), 0
        try:
            for row in rows:
                if row:
                    yield line + 1, row
                line = rows.line_num
        except csv.Error as error:
            raise _BrokenQuote(
                f"{reader.address}, line {line + 1}: it cannot be taken apart ({error}): close each quote, and write a "
                'field with a quote as "5"" pipe"; or the file is cut off, then copy it again'
            ) from error

    def _row(self, reader: Reader, number: int) -> tuple[int, list[str]]:
        """Returns line and fields of a row, of which the header is number 0."""
        return next(row for count, row in enumerate(self._rows(reader)) if count == number)

    def _place(self, reader: Reader, row: int) -> str:
        return f"line {self._row(reader, row + 1)[0]}"

    def _located(self, reader: Reader, names: Sequence[str], error: Exception) -> Exception:
        """Returns pyarrow's error with its line, if it names the row, which is counted from 1 with the header."""
        if found := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", str(error)):
            row, wanted, got = map(int, found.groups())
            line, _ = self._row(reader, row - 1)
            return ConfigError(
                f"{reader.address}, line {line}: it has {got} fields, and the first line {wanted}: correct the row; if "
                "it is the last one, the file may be cut off, then copy it again"
            )
        if found := re.search(r"column #(\d+): Row #(\d+): CSV conversion error to (\w+)", str(error)):
            column, row = int(found[1]), int(found[2]) - 1
            value = self._row(reader, row)[1][column]
            what = "is not in UTF-8" if found[3] == "string" else _of_another_type(value, found[3])
            return self._refused(reader, row - 1, names[column], what)
        return error


class _BrokenQuote(ConfigError):
    """A row of CSV that Python's `csv` refuses."""


class _Quotes(ReaderFile):
    """A file that records if it has double quotes."""

    has_quotes = False

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer."""
        length = super().readinto(buffer)
        self.has_quotes = self.has_quotes or b'"' in bytes(buffer[:length])
        return length


# ----------------------------------------------------------------------------------------------------- JSON lines


class JsonLines(_Rows):
    """JSON lines: an object in each line, in UTF-8. Chosen columns hold numbers, or lists of numbers; or text."""

    kind = "jsonl"
    suffixes = (".jsonl", ".ndjson")

    def _batches(self, reader: Reader) -> Iterator[Any]:
        check_not_compressed(reader)
        first = next(self._lines(reader), None)
        if first is None:
            return
        arrow, num_rows = _arrow(self.kind), 0
        record = self._object(reader, *first)
        types = {name: _nested(arrow, record.get(name), each) for name, each in self._types().items()}
        try:
            for batch in self._parsed(arrow, ReaderFile(reader), types):
                yield batch
                num_rows += batch.num_rows
        except arrow.ArrowInvalid as error:
            raise self._located(reader, arrow, types, num_rows, error) from None

    def _parsed(self, arrow: Any, file: Any, types: dict[str, Any]) -> Any:
        """Returns a reader of these columns alone."""
        options = arrow.json.ParseOptions(explicit_schema=arrow.schema(types), unexpected_field_behavior="ignore")
        read = arrow.json.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)
        return arrow.json.open_json(arrow.PythonFile(file, mode="r"), read_options=read, parse_options=options)

    def _lines(self, reader: Reader) -> Iterator[tuple[int, bytes]]:
        """Yields each line that is not blank, with its number."""
        for number, line in enumerate(io.BufferedReader(ReaderFile(reader), 1 << 20), start=1):
            data = line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\n") if number == 1 else line.strip(b" \t\r\n")
            if data:
                yield number, data

    def _object(self, reader: Reader, line: int, data: bytes) -> dict[str, Any]:
        try:
            record = json.loads(data.decode())  # of bytes it would guess the encoding
            if isinstance(record, dict):
                return record
            why = f"it is a {type(record).__name__}"
        except (ValueError, RecursionError) as error:
            why = one_line(error)
        raise ConfigError(
            f"{reader.address}, line {line}: it is not a JSON object in UTF-8 ({why}): correct it; if it is the last "
            "line, the file may be cut off, then copy it again"
        )

    def _place(self, reader: Reader, row: int) -> str:
        return f"line {next(line for count, (line, _) in enumerate(self._lines(reader)) if count == row)}"

    def _located(self, reader: Reader, arrow: Any, types: dict[str, Any], num_rows: int, error: Exception) -> Exception:
        """Returns pyarrow's error with line and column: the first that pyarrow also refuses alone."""
        is_final = "straddl" in str(error)  # a line is too long, also by itself
        for row, (line, data) in enumerate(() if is_final else self._lines(reader)):
            for name, kind in types.items() if row >= num_rows else ():
                try:
                    list(self._parsed(arrow, io.BytesIO(data), {name: kind}))
                except arrow.ArrowInvalid as cause:
                    value = self._object(reader, line, data).get(name)
                    if "twice" in str(cause):
                        what = "is there twice"
                    elif isinstance(value, list) != _is_list(kind):
                        what = f"is {_short(value)}, unlike in the first line"
                    else:
                        what = _of_another_type(value, str(kind))
                    return self._refused(reader, row, name, what)
        return error


def _nested(arrow: Any, value: Any, kind: str) -> Any:
    """Returns pyarrow's type of a number, or of lists of them as deep as those of a value."""
    if not isinstance(value, list):
        return arrow.type_for_alias(kind)
    return arrow.list_(_nested(arrow, value[0] if value else None, kind))


# -------------------------------------------------------------------------------------------- Parquet and Arrow


class Parquet(_Rows):
    """Parquet files. Chosen columns hold numbers, or lists of numbers; or text."""

    kind = "parquet"
    suffixes = (".parquet",)

    def _batches(self, reader: Reader) -> Iterator[Any]:
        arrow = _arrow(self.kind)
        file = arrow.parquet.ParquetFile(arrow.PythonFile(ReaderFile(reader), mode="r"))
        names = self._columns(reader, file.schema_arrow.names)
        yield from file.iter_batches(batch_size=_BLOCK_ROWS, columns=names, use_threads=False)


class Arrow(_Rows):
    """Arrow files and streams, as pyarrow, pandas (Feather) and Hugging Face's `datasets` write them."""

    kind = "arrow"
    suffixes = (".arrow", ".feather")

    def _batches(self, reader: Reader) -> Iterator[Any]:
        arrow, source = _arrow(self.kind), ReaderFile(reader)
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        size = reader.facts.size
        if not is_file and reader.read(max(0, size - 8), min(8, size)) != _END_OF_STREAM:  # pyarrow would not tell
            raise ConfigError(
                f"{reader.address} is no Arrow file, nor a stream with its end: check its format, or copy it again"
            )
        file = (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(arrow.PythonFile(source, mode="r"))
        names = self._columns(reader, file.schema.names)
        for number in range(file.num_record_batches) if is_file else iter(int, 1):
            try:
                batch = file.get_batch(number) if is_file else file.read_next_batch()
            except StopIteration:
                return
            yield batch.select(names)
