"""Rows against Python's json and csv and against pyarrow; what does not fit is named with its line and column."""

from __future__ import annotations

import csv
import errno
import gzip
import importlib
import io
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ddp.data.files import rows as module
from ddp.data.files.file_set import FileSet
from ddp.data.files.rows import Arrow, Csv, JsonLines, Parquet
from ddp.errors import ConfigError

PAIRS: Any = {"inputs": ["x", "y"], "target": "t"}
NO_NAMES = r": the first line has no names of columns that can be read \(.+\): write the file as UTF-8"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 200)
    monkeypatch.setattr(module, "_BLOCK_ROWS", 7)


def open_rows(folder: Path, content: str | bytes, format: Any, name: str = "") -> FileSet:
    path = folder / (name or f"a.{format.kind}")
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return FileSet(path, format, index_dir=folder / "index")


def pairs_of(rows: FileSet) -> list[tuple[list[float], float]]:
    return [(inputs.tolist(), target.item()) for inputs, target in rows]  # type: ignore[attr-defined]


# The same rows in every format


def as_csv(table: pa.Table) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(table.column_names)
    writer.writerows(row.values() for row in table.to_pylist())
    return file.getvalue().encode()


def as_json(table: pa.Table) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()


def as_parquet(table: pa.Table) -> bytes:
    pq.write_table(table, file := io.BytesIO())
    return file.getvalue()


def as_arrow(table: pa.Table, new: Any = pa.ipc.new_file) -> bytes:
    with new(file := io.BytesIO(), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return file.getvalue()


def as_stream(table: pa.Table) -> bytes:
    return as_arrow(table, pa.ipc.new_stream)


FORMATS: dict[str, tuple[Any, Callable[[pa.Table], bytes]]] = {
    "csv": (Csv, as_csv),
    "jsonl": (JsonLines, as_json),
    "parquet": (Parquet, as_parquet),
    "arrow": (Arrow, as_arrow),
    "stream": (Arrow, as_stream),
}


@pytest.mark.parametrize("name", FORMATS)
def test_pairs_are_those_that_were_written(name: str, tmp_path: Path, small_blocks: None) -> None:
    draw, (format, write) = random.Random(0), FORMATS[name]
    x, y, t = [draw.gauss(0, 1e6) for _ in range(40)], list(range(40)), [draw.randrange(10) for _ in range(40)]
    words = [f'a "word"\n{number}' if name != "csv" else "ü" for number in t]
    table = pa.table({"t": t, "words": words, "x": x, "y": y})
    rows = open_rows(tmp_path, write(table), format(**PAIRS, num_classes=10))
    expected = torch.tensor([x, y], dtype=torch.float32).T
    assert torch.equal(torch.stack([inputs for inputs, _ in rows]), expected)  # type: ignore[attr-defined]
    assert [target.item() for _, target in rows] == t and rows[0][1].dtype == torch.int64  # type: ignore[attr-defined]
    assert rows.file_sizes.tolist() == [40] and rows.may_read_ahead
    worker = FileSet(
        tmp_path / f"a.{format.kind}", format(**PAIRS, num_classes=10), index_dir=tmp_path / "index", build=False
    )
    loader = DataLoader(worker, batch_size=40, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type,var-annotated]
    assert torch.equal(next(iter(loader))[0], expected)
    numbers = open_rows(tmp_path, write(table), format(inputs=["y"], target="x", target_dtype=torch.float32))
    assert (numbers[3][1].dtype, numbers[3][1].item()) == (torch.float32, np.float32(x[3]))


def test_the_copy_is_an_arrow_file(tmp_path: Path) -> None:
    open_rows(tmp_path, "x,y,t\n1,2,3\n4,5,6\n", Csv(**PAIRS))
    (copy,) = (tmp_path / "index").glob("*.rows")
    table = pa.ipc.open_file(copy).read_all()
    assert table.column("row").to_pylist() == [[1, 2, 3], [4, 5, 6]]
    assert table.schema.metadata == {b"columns": b"x, y, t"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": [1.5, 2], "y": [1, None], "t": [3, 0]}, "2: y is empty: fill it in, leave the row out, say which number"),
    ({"x": [1.5, 2], "y": [1, 2], "t": [3, None]}, "2: t is empty: fill it in, leave the row out, or encode it"),
    ({"x": [1.5, 2], "y": [1, 2], "t": [3, 4]}, r"2: t is 4, and num_classes=4 has the classes 0 … 3: correct the"),
    ({"x": [1.5, 2], "y": [1, 2], "t": [-1, 2]}, r"1: t is -1, and num_classes=4 has the classes 0 … 3"),
    ({"x": [1.5, float("nan")], "y": [1, 2], "t": [1, 2]}, "2: x is nan, no finite number: correct the row, choose"),
    ({"x": [1.5, -float("inf")], "y": [1, 2], "t": [1, 2]}, "2: x is -inf, no finite number"),
    ({"x": [1.5, 1e39], "y": [1, 2], "t": [1, 2]}, r"2: x is 1e\+39, no finite number"),
    (
        {"x": [1.5, 2], "y": [1, 2], "t": [1, 1.5]},
        ".: t is '?1.[05]'?, no whole number as a class is; leave num_classes",
    ),
    ({"x": ["1", "a"], "y": [1, 2], "t": [1, 2]}, ".: x (is 'a', no number|is '1', no|has values of type string, no)"),
    ({"x": [True, False], "y": [1, 2], "t": [1, 2]}, "1: x (is '?True'?, no number|has values of type bool, no)"),
]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("columns", "what"), REFUSED)
def test_what_does_not_fit_is_named(name: str, columns: Any, what: str, tmp_path: Path) -> None:
    format, write = FORMATS[name]
    kind = "row" if name in ("parquet", "arrow", "stream") else "line"
    if name == "csv" and what[0] != ".":  # whose line 1 is the header
        what = str(int(what[0]) + 1) + what[1:]
    with pytest.raises(ConfigError, match=rf"^\S+/a\.{format.kind}, {kind} {what}") as failure:
        open_rows(tmp_path, write(pa.table(columns)), format(**PAIRS, num_classes=4))
    assert str(failure.value).endswith("in your own data (data=MODULE:NAME) or in a Task")
    assert not list((tmp_path / "index").iterdir())


@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_cell_counts_as_a_number_if_one_is_given(name: str, tmp_path: Path) -> None:
    format, write = FORMATS[name]
    table = pa.table({"x": [1.5, None], "y": [None, 2], "t": [0, 1]})
    assert pairs_of(open_rows(tmp_path, write(table), format(**PAIRS, missing=-7))) == [([1.5, -7], 0), ([-7, 2], 1)]
    with pytest.raises(ConfigError, match=r"^missing=nan: give a finite number"):
        format(**PAIRS, missing=float("nan"))


@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow"])
def test_lists_of_numbers_are_equally_long(name: str, tmp_path: Path) -> None:
    format, write = FORMATS[name]
    x, t = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]], [0, 1]

    def opened(file: str = "a", **columns: Any) -> list[tuple[list[float], float]]:
        return pairs_of(open_rows(tmp_path, write(pa.table(columns)), format(**PAIRS), f"{file}.{format.kind}"))

    assert opened(x=x, y=[9, 10], t=t) == [([1, 2, 3, 4, 9], 0), ([5, 6, 7, 8, 10], 1)]
    for bad, what in (
        ([[1, 2], [3]], "2: x has 1 numbers, and in the rows before 2"),
        ([[1, 2], None], "2: x is empty"),
        ([[1, 2], [3, None]], "2: x is empty"),
    ):
        with pytest.raises(ConfigError, match=rf"(row|line) {what}"):
            opened("b", x=bad, y=[9, 10], t=t)
    with pytest.raises(ConfigError, match=r"(row|line) 1: t has 2 numbers, and should have 1"):
        opened("b", x=[1, 2], y=[9, 10], t=[[3, 4], [5, 6]])
    for name, wide in (("a", [[1, 2], [3, 4]]), ("b", [[1, 2, 3], [3, 4, 5]])):
        (tmp_path / f"{name}.{format.kind}").write_bytes(write(pa.table({"x": wide, "y": t, "t": t})))
    with pytest.raises(
        ConfigError, match=rf"/b.{format.kind} has 3 numbers in x, and \S+/a.{format.kind} has 2: samples"
    ):
        FileSet(tmp_path, format(**PAIRS), index_dir=tmp_path / "index")


@pytest.mark.parametrize("name", ["parquet", "arrow", "stream"])
def test_columns_of_other_types_are_numbers_or_named(name: str, tmp_path: Path) -> None:
    format, write = FORMATS[name]
    y, t = [0, 1], [0, 1]
    for x in (pa.array([1, 2], pa.uint8()), np.array([1, 2], np.float16), pa.array([1, 2]).cast(pa.decimal128(22, 3))):
        assert [
            inputs[0]
            for inputs, _ in pairs_of(open_rows(tmp_path, write(pa.table({"x": x, "y": y, "t": t})), format(**PAIRS)))
        ] == [1, 2]
    for x, what in (
        (pa.array([{"a": 1}, {"a": 2}]), "row 1: x has values of type struct<a: int64>, no numbers"),
        (pa.array(["1", "2"]).dictionary_encode(), "row 1: x has values of type dictionary<.*>, no numbers"),
        (pa.array([0, 1], pa.timestamp("ms")), r"row 1: x has values of type timestamp\[ms\], no numbers"),
        (pa.array([1, 2**53 + 1]), "row 2: x is 9007199254740993, which float64 would round"),
    ):
        with pytest.raises(ConfigError, match=what):
            open_rows(tmp_path, write(pa.table({"x": x, "y": y, "t": t})), format(**PAIRS))
    for columns, names, what in (
        ([[1], [2]], ["x", "y"], r" has no column 't'; its columns are \['x', 'y'\]"),
        ([[1], [2], [3], [4]], ["x", "y", "t", "x"], ": two columns have the same name"),
    ):
        with pytest.raises(ConfigError, match=what):
            open_rows(tmp_path, write(pa.table(columns, names=names)), format(**PAIRS))
    content = write(pa.table({"x": [1.0] * 1000, "y": [1.0] * 1000, "t": [1] * 1000}))
    for damaged in (content[: len(content) // 2], content[:-8], b"no table", content[:4]):
        with pytest.raises(
            ConfigError, match=r"a\.\w+ (cannot be read as \w+ \(.+\)|is no Arrow file, .*): check its f"
        ):
            open_rows(tmp_path, damaged, format(**PAIRS))
    texts = ["", "ü\n" * 9, "a,b"]
    assert list(open_rows(tmp_path, write(pa.table({"x": texts, "n": [1, 2, 3]})), format(text="x"))) == texts  # type: ignore[call-overload]
    for x, what in (
        (pa.array(["a", None]), "row 2: x is empty: fill it in, leave the row out, or encode it"),
        (pa.array([0]), "row 1: x has values of type int64, no text"),
        (pa.array([b"a", b"\xff"]).view("string"), "row 2: x is not in UTF-8"),
    ):
        with pytest.raises(ConfigError, match=what):
            open_rows(tmp_path, write(pa.table({"x": x})), format(text="x"))


# JSON lines


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("has_last_end", [True, False])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_json_lines_are_those_of_json(
    end: str, has_last_end: bool, start: str, tmp_path: Path, small_blocks: None
) -> None:
    draw = random.Random(0)
    records = [{"i": i, "text": "ü\n" * draw.randint(0, 20), "x": [draw.random()]} for i in range(50)]
    written = [
        json.dumps(each, ensure_ascii=bool(i % 2)) + end * draw.choice([0, 0, 1, 2]) for i, each in enumerate(records)
    ]
    content = start + end + end.join(written).rstrip() + end * has_last_end
    rows = open_rows(tmp_path, content, JsonLines(text="text"))
    assert list(rows) == [each["text"] for each in records]  # type: ignore[call-overload]
    assert pairs_of(open_rows(tmp_path, content, JsonLines(inputs=["x"], target="i"))) == [
        ([float(np.float32(each["x"][0]))], each["i"]) for each in records
    ]
    assert rows.lengths is None  # bytes are no tokens


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"x": 1, "y": 2, "t": 3', r"it is not a JSON object in UTF-8 \(JSONDecodeError: .+\): correct it; if it is"),
        ("[1]", r"it is not a JSON object in UTF-8 \(it is a list\)"),
        (b'{"x": "\xff"}', r"it is not a JSON object in UTF-8 \(UnicodeDecodeError: .+\)"),
        ('{"x": 1, "t": 3}', "y is empty"),
        ('{"x": "1", "y": 2, "t": 3}', "x is '1', no number"),
        ('{"x": [1], "y": 2, "t": 3}', r"x is \[1\], unlike in the first line"),
        ('{"x": 1, "y": 2, "t": 2.0}', "t is 2.0, no whole number as a class is"),
        ('{"x": 1, "x": 1, "y": 2, "t": 2}', "x is there twice"),
        ('{"x": 1, "y": 2, "t": 9007199254740993}', r"t is 9007199254740993, which is beyond 2 \*\* 53"),
        ('{"x": 1, "y": 2, "t": 9223372036854775808}', "t is 9223372036854775808, no whole number"),
    ],
)
def test_a_line_of_json_that_does_not_fit_is_named(
    line: str | bytes, cause: str, tmp_path: Path, small_blocks: None
) -> None:
    good, line = b'{"x": 1, "y": 2, "t": 3}\n', line.encode() if isinstance(line, str) else line
    with pytest.raises(ConfigError, match=rf"^\S+/a.jsonl, line 33: {cause}") as failure:
        open_rows(tmp_path, good * 30 + b"\n\n" + line + b"\n" + good, JsonLines(**PAIRS))
    assert "\n" not in str(failure.value)
    if b'"x": "1"' not in line and b"[1]" not in line:
        with pytest.raises(ConfigError, match=rf"^\S+/a.jsonl, line 2: {cause}"):
            open_rows(tmp_path, b"\n" + line, JsonLines(**PAIRS))


def test_lines_of_json_may_be_blank_or_have_other_keys(tmp_path: Path) -> None:
    lines = ["   ", '{"x":1,"y":2,"t":3}', " \t\r", '  {"t":0,"y":1.5,"x":-2,"other":["a",{}]} ', "\t", "    "]
    for end in ("\n", "\r\n"):
        rows = open_rows(tmp_path, "\ufeff" + end.join(lines), JsonLines(**PAIRS), f"{len(end)}.jsonl")
        assert pairs_of(rows) == [([1, 2], 3), ([-2, 1.5], 0)]


# CSV


FIELDS = st.text(st.sampled_from('ab1",\n\r ü'), max_size=6)


# Python's writer leaves a lone carriage return unquoted if lines end otherwise; its own reader refuses that.
DIALECTS = [("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(FIELDS, min_size=2, max_size=2), min_size=1, max_size=6), dialect=st.sampled_from(DIALECTS)
)
def test_csv_is_that_of_csv(rows: list[list[str]], dialect: tuple[str, int], tmp_path_factory: Any) -> None:
    file = io.StringIO()
    csv.writer(file, lineterminator=dialect[0], quoting=dialect[1]).writerows([["x", "y"], *rows])  # type: ignore[arg-type]
    folder = tmp_path_factory.mktemp("csv")
    expected = list(csv.DictReader(io.StringIO(file.getvalue(), newline="")))
    assert expected == [{"x": x, "y": y} for x, y in rows]
    for name in "xy":
        found = open_rows(folder, file.getvalue(), Csv(text=name))
        assert list(found) == [each[name] for each in expected]  # type: ignore[call-overload]


def test_csv_may_have_a_mark_blank_lines_and_other_separators(tmp_path: Path) -> None:
    rows = open_rows(tmp_path, '\ufefft;ignored;y;x\r\n3;z;0.5;-1e2\r\n\r\n4;z;7;" 8"', Csv(separator=";", **PAIRS))
    assert pairs_of(rows) == [([-100, 0.5], 3), ([8, 7], 4)]
    assert pairs_of(open_rows(tmp_path, "x,y,t\r00123,+2,007\r", Csv(**PAIRS))) == [([123, 2], 7)]
    for name, texts in (("x", ["00123", ""]), ("y", ["NA", "nan"])):
        assert list(open_rows(tmp_path, "x,y\n00123,NA\n,nan\n", Csv(text=name))) == texts  # type: ignore[call-overload]


def test_files_may_have_their_columns_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y,t\n1,2,3\n")
    (tmp_path / "b.csv").write_text("t,y,x\n3,2,1\n")
    assert pairs_of(FileSet(tmp_path, Csv(**PAIRS), index_dir=tmp_path / "index")) == [([1, 2], 3)] * 2
    same = Csv(inputs=["x"], target="x")
    assert pairs_of(FileSet(tmp_path, same, index_dir=tmp_path / "index")) == [([1], 1)] * 2


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("1,2", "it has 2 fields, and the first line 3: correct the row; if it is the last one, the file may be cut"),
        ("1,2,3,4", "it has 4 fields, and the first line 3"),
        ("  ", "it has 1 fields, and the first line 3"),
        ("1,two,3", "y is 'two', no number"),
        ("1,NA,3", "y is 'NA', no number"),
        ("1,0x10,3", "y is '0x10', no number"),
        ("1,1_0,3", "y is '1_0', no number"),
        ("1,2,2.0", "t is '2.0', no whole number as a class is"),
        ("1,2,", "t is empty"),
        ('1,"",3', "y is empty"),
        (b"1,\xff,3", "y is .+, no number"),
        ('1,"2"5,3', r"it cannot be taken apart \(',' expected after '\"'\): close each quote"),
    ],
)
def test_a_row_of_csv_that_does_not_fit_is_named(
    row: str | bytes, cause: str, tmp_path: Path, small_blocks: None
) -> None:
    row = row.encode() if isinstance(row, str) else row
    content = b'x,y,t\n"1",2,3\n' + b"1,2,3\n" * 100 + b"\n\n" + row + b"\n"
    with pytest.raises(ConfigError, match=rf"^\S+/a.csv, line 105: {cause}") as failure:
        open_rows(tmp_path, content, Csv(**PAIRS))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x,y\n1,2\n", r" has no column 't'; its columns are \['x', 'y'\]: correct the name"),
        ("x,y,t,x\n1,2,3,4\n", ": two columns have the same name"),
        ('x,y,t\n1,2,3\n1,2,"3\n1,2,3\n', r", line 3: it cannot be taken apart \(unexpected end of data\): close each"),
        ('x,y,t,z\n1,2,3,"\n1,2,3,z\n', r", line 2: it cannot be taken apart \(unexpected end of data\): close each"),
        ('x,y,t,z\n1,2,3,"a\nb"\n\n1,two,3,\n', ", line 5: y is 'two', no number"),
        ("x,y,t,z\n1,2,3," + "z" * 1000, r" has a row of more than 0 MiB: write it in parts"),
        ("x,y,t", " holds no sample"),
        ("x,y,t\n", " holds no sample"),
        ("\n\n", " holds no sample"),
        ("\ufeff", " holds no sample"),
        ("", " is empty"),
        *[(content, NO_NAMES) for content in (b"x,y,\xe9\n1,2,3\n", "x,y,t\n1,2,3\n".encode("utf-16"))],
        ('"x"x,y,t\n1,2,3\n', NO_NAMES),
    ],
)
def test_csv_that_cannot_be_used_is_named(
    content: str | bytes, message: str, tmp_path: Path, small_blocks: None
) -> None:
    with pytest.raises(ConfigError, match=rf"^\S+/a.csv{message}") as failure:
        open_rows(tmp_path, content, Csv(**PAIRS))
    assert "\n" not in str(failure.value)


def test_words_that_are_not_in_utf_8_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a.csv, line 2: y is not in UTF-8"):
        open_rows(tmp_path, b"x,y\n1,\xff\n", Csv(text="y"))
    with pytest.raises(ConfigError, match=r"a.jsonl, line 3: y is not in UTF-8"):
        open_rows(tmp_path, b'{"y": "a"}\n\n{"y": "\xff"}\n', JsonLines(text="y"))


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("7", "is 7, no text"),
        ("null", "is empty: fill it in, leave"),
        ('["a"]', r"is \['a'\], unlike in the first line"),
    ],
)
def test_a_line_without_text_is_named(value: str, cause: str, tmp_path: Path, small_blocks: None) -> None:
    with pytest.raises(ConfigError, match=rf"^\S+/a.jsonl, line 32: y {cause}"):
        open_rows(tmp_path, '{"y": "a"}\n' * 30 + f'\n{{"y": {value}}}\n', JsonLines(text="y"))


def test_fields_may_be_long(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    try:
        for text in (f"{'n' * 200_000},y\n1,2\n", f"x,y\n1,{'f' * 200_000}\n", f'x,y\n1,2\n1,"{"q" * 200_000}"'):
            csv.field_size_limit(limit)
            rows = [
                row for name in text[: text.index("\n")].split(",") for row in open_rows(tmp_path, text, Csv(text=name))
            ]  # type: ignore[attr-defined]
            assert max(map(len, [*rows, *text.partition("\n")[0].split(",")])) == 200_000
    finally:
        csv.field_size_limit(limit)


@pytest.mark.parametrize("separator", ["", "ab", '"', "\n", "¦", None])
def test_a_separator_is_one_character(separator: Any) -> None:
    with pytest.raises(ConfigError, match=r"^separator=.*: give one ASCII character"):
        Csv(separator=separator, text="x")


@pytest.mark.parametrize(
    "columns",
    [
        *({"inputs": ["x"]}, {"target": "t"}, {"inputs": "x", "target": "t"}, {"inputs": [], "target": "t"}, {}),
        *({"text": "x", **PAIRS}, {"text": "x", "target": "t"}),
    ],
)
def test_columns_that_make_no_pair_are_named(columns: Any) -> None:
    with pytest.raises(ConfigError, match="inputs="):
        JsonLines(**columns)


@pytest.mark.parametrize("format", [JsonLines(text="x"), Csv(text="x"), JsonLines(**PAIRS)])
def test_text_without_rows_and_compressed_text_are_named(format: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\S+ holds no sample"):
        open_rows(tmp_path, "\ufeff", format)
    with pytest.raises(ConfigError, match=r"a\.gz is compressed, .* unpack it$"):
        open_rows(tmp_path, gzip.compress(b"x,y\n1,2\n"), format, name="a.gz")


# Copies


def copies_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.rows"))


def test_a_file_that_changes_gets_another_copy_and_a_run_that_goes_on_keeps_its_own(tmp_path: Path) -> None:
    before = open_rows(tmp_path, "x,y,t\n1,2,3\n", Csv(**PAIRS), "a.csv")
    first = pairs_of(before)
    (old,) = copies_in(tmp_path / "index")
    other = open_rows(tmp_path, "x,y,t\n7,8,9\n", Csv(inputs=["y"], target="x"), "a.csv")
    assert pairs_of(before) == first and pairs_of(other) == [([8], 7)]
    now = FileSet(tmp_path / "a.csv", Csv(**PAIRS), index_dir=tmp_path / "index")
    assert pairs_of(now) == [([7, 8], 9)] and pairs_of(before) == first
    before.opened.cache_clear()  # as if other files had been read since then
    assert pairs_of(before) == first and old in copies_in(tmp_path / "index")
    del before
    (tmp_path / "a.csv").write_text("x,y,t\n4,5,6\n")
    now = FileSet(tmp_path / "a.csv", Csv(**PAIRS), index_dir=tmp_path / "index")
    assert pairs_of(now) == [([4, 5], 6)] and old not in copies_in(tmp_path / "index")
    (tmp_path / "a.csv").unlink()
    assert pairs_of(FileSet(tmp_path / "a.csv", Csv(**PAIRS), index_dir=tmp_path / "index", build=False)) == pairs_of(
        now
    )


def test_what_a_killed_indexer_has_left_is_removed_once_it_is_old(tmp_path: Path) -> None:
    open_rows(tmp_path, "x,y,t\n1,2,3\n", Csv(**PAIRS))
    (copy,) = copies_in(tmp_path / "index")
    old, new = (tmp_path / "index" / f".tmp-{letter}-{copy}" for letter in "ab")
    old.touch(), new.touch()
    os.utime(old, (0, 0))
    open_rows(tmp_path, "x,y,t\n4,5,6\n", Csv(**PAIRS))
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("damage", [lambda copy: copy.unlink(), lambda copy: os.truncate(copy, 100)])
def test_a_copy_that_is_missing_or_cut_off_is_made_again_by_the_parent_alone(damage: Any, tmp_path: Path) -> None:
    ask: Any = {"index_dir": tmp_path / "index"}
    expected = pairs_of(open_rows(tmp_path, "x,y,t\n1,2,3\n", Csv(**PAIRS), "a.csv"))
    open_one = FileSet(tmp_path / "a.csv", Csv(**PAIRS), **ask)
    assert open_one[0]
    (copy,) = (tmp_path / "index").glob("*.rows")
    damage(copy)
    with pytest.raises(ConfigError, match=r"\.rows, the copy of \S+/a.csv, is missing or cut off: start again"):
        FileSet(tmp_path / "a.csv", Csv(**PAIRS), build=False, **ask)[0]
    if copy.exists():
        with pytest.raises(ConfigError, match=r"\.rows (ends after|has changed from)"):
            open_one[0]  # and no SIGBUS
    assert pairs_of(FileSet(tmp_path / "a.csv", Csv(**PAIRS), **ask)) == expected


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, path = module.ReaderFile.readinto, tmp_path / "a.csv"

    def readinto(self: Any, buffer: Any) -> int:
        os.truncate(path, 3000)
        return real(self, buffer)

    path.write_text("x,y,t\n" + "1,2,3\n" * 10_000)
    monkeypatch.setattr(module.ReaderFile, "readinto", readinto)
    with pytest.raises(ConfigError, match=r"^\S+/a.csv (ends after 3000 bytes|has changed from 60006 to 3000 bytes)"):
        FileSet(path, Csv(**PAIRS), index_dir=tmp_path / "index")
    assert not list((tmp_path / "index").iterdir())


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("x,y,t\n1,2,3\n")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"index cannot be written \(No space left"):
        patch.setattr(os, "fsync", fail)
        FileSet(tmp_path, Csv(**PAIRS), index_dir=tmp_path / "index")
    assert not list((tmp_path / "index").iterdir())
    assert len(FileSet(tmp_path, Csv(**PAIRS), index_dir=tmp_path / "index")) == 2


def test_runs_that_index_at_once_do_no_harm(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for name in "abc":
        (tmp_path / f"{name}.csv").write_text("x,y,t\n" + "".join(f"{i},2,3\n" for i in range(2000)))
    barrier, results = context.Barrier(4), context.Queue()

    def index_at_once() -> None:
        barrier.wait(30)
        rows = FileSet(tmp_path, Csv(**PAIRS), index_dir=tmp_path / "index")
        results.put([rows[i][0].tolist() for i in range(0, 6000, 7)])

    processes = [context.Process(target=index_at_once) for _ in range(4)]
    for process in processes:
        process.start()
    assert all(results.get(timeout=60) == [[i % 2000, 2] for i in range(0, 6000, 7)] for _ in processes)
    for process in processes:
        process.join()
    assert len(copies_in(tmp_path / "index")) == 3 and len(list((tmp_path / "index").iterdir())) == 4


def test_only_the_parent_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError("No module named 'pyarrow'")
        return real(name, *arguments)

    (tmp_path / "a.csv").write_text("x,y,t\n1,2,3\n")
    ask: Any = {"index_dir": tmp_path / "index"}
    monkeypatch.setattr(importlib, "import_module", without)
    wanted = rf"^data=csv: needs pyarrow, .+: {sys.executable} -m pip install 'pyarrow>=24'$"
    with pytest.raises(ConfigError, match=wanted):
        FileSet(tmp_path / "a.csv", Csv(**PAIRS), **ask)
    monkeypatch.undo()
    FileSet(tmp_path / "a.csv", Csv(**PAIRS), **ask)
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from ddp.data import Csv, FileSet\n"
        f"rows = FileSet({str(tmp_path / 'a.csv')!r}, Csv(inputs=['x', 'y'], target='t'), "
        f"index_dir={str(tmp_path / 'index')!r})\n"
        "assert rows[0][0].tolist() == [1, 2]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
