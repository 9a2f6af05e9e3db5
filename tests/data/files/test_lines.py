"""Lines against Python's json and csv; line ends, quotes, blank lines and damaged files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ddp.data.files import lines
from ddp.data.files.file_set import FileSet
from ddp.data.files.lines import Csv, JsonLines
from ddp.errors import ConfigError, UnreadableSample

PAIRS: Any = {"inputs": ["x", "y"], "target": "t"}
NO_NAMES = r": the first line has no names of columns that can be read \(.+\): write the file as UTF-8"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 7)


def open_lines(folder: Path, content: str | bytes, format: Any, name: str = "") -> FileSet:
    path = folder / (name or f"a.{format.kind}")
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return FileSet(path, format, index_dir=folder / "index")


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
    rows = open_lines(tmp_path, start + end + end.join(written).rstrip() + end * has_last_end, JsonLines())
    assert list(rows) == records  # type: ignore[call-overload]
    assert rows.lengths is None  # bytes are no tokens
    loader = DataLoader(rows, batch_size=None, num_workers=2, multiprocessing_context="fork", collate_fn=lambda x: x)  # type: ignore[arg-type,var-annotated]
    if not start and has_last_end:
        assert list(loader) == records


def test_pairs_of_json(tmp_path: Path) -> None:
    rows = open_lines(
        tmp_path, '{"t": 3, "y": [1, [2.5]], "x": 4}\n{"x": true, "y": [], "t": 2.0}\n', JsonLines(**PAIRS)
    )
    inputs, target = rows[0]
    assert inputs.tolist() == [4.0, 1.0, 2.5]
    assert (inputs.dtype, target.dtype, target.item()) == (torch.float32, torch.int64, 3)
    assert (rows[1][0].tolist(), rows[1][1].item()) == ([1.0], 2)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"x": 1, "y": 2, "t": 3', "JSONDecodeError: .+"),
        ("[1]", "ValueError: it is a list"),
        ('{"x": 1, "t": 3}', r"ValueError: there is no 'y', only \['x', 't'\]"),
        ('{"x": null, "y": 2, "t": 3}', "ValueError: x is None, no number"),
        ('{"x": "1", "y": 2, "t": 3}', "ValueError: x is '1', no number"),
        ('{"x": 1, "y": 2, "t": [3, 4]}', "ValueError: t has 2 numbers, a target has one"),
        ('{"x": 1, "y": 2, "t": 0.5}', r"ValueError: t is 0.5, no whole number; give target_dtype=torch.float32"),
        ('{"x": 1, "y": 2, "t": NaN}', "ValueError: .+"),
        (b'{"x": "\xff"}', "UnicodeDecodeError: .+"),
    ],
)
def test_unreadable_json_is_named_with_its_line(
    line: str | bytes, cause: str, tmp_path: Path, small_blocks: None
) -> None:
    good, line = b'{"x": 1, "y": 2, "t": 3}\n', line.encode() if isinstance(line, str) else line
    format = JsonLines(**PAIRS, num_classes=4)
    rows = open_lines(tmp_path, good + b"\n\n" + good + line + b"\n" + good, format)
    with pytest.raises(UnreadableSample, match=rf"^\S+/a.jsonl, line 5 cannot be decoded \({cause}\): .") as failure:
        rows[2]
    assert "\n" not in str(failure.value)
    with pytest.raises(ConfigError, match=rf"^\S+/b.jsonl, line 2 is not a JSON object \({cause}\): check the file's"):
        open_lines(tmp_path, b"\n" + line + b"\n" + good, format, "b.jsonl")


def test_a_json_line_that_is_cut_off_is_named(tmp_path: Path) -> None:
    text = '{"x": 1}\n{"x": 2}\n{"x": 3}'
    assert [row["x"] for row in open_lines(tmp_path, text, JsonLines())] == [1, 2, 3]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^\S+/a.jsonl, line 3 is not a JSON object \(.+\): the file may be cut off"):
        open_lines(tmp_path, text[:-1], JsonLines())


def test_a_class_is_one_of_those_that_there_are(tmp_path: Path) -> None:
    text = "".join(f'{{"x": 1, "y": 2, "t": {target}}}\n' for target in (4, 3, -1)).rstrip()
    rows = open_lines(tmp_path, text, JsonLines(**PAIRS, num_classes=4))  # the index does not depend on it
    assert rows[1][1].item() == 3
    for number, target in ((0, 4), (2, -1)):
        with pytest.raises(UnreadableSample, match=rf"line {number + 1} .*t is {target}, and num_classes=4 has"):
            rows[number]
    assert open_lines(tmp_path, text, JsonLines(num_classes=4))[0] == {"x": 1, "y": 2, "t": 4}


def test_a_line_of_spaces_is_no_sample_of_json(tmp_path: Path, small_blocks: None) -> None:
    lines = ["   ", '{"x": 1}', " \t\r", '  {"x": 2} ', "\t", "\r", '{"x": 3}', "    "]
    for end in ("\n", "\r\n"):
        rows = open_lines(tmp_path, end.join(lines), JsonLines(), f"{len(end)}.jsonl")
        assert [row["x"] for row in rows] == [1, 2, 3]  # type: ignore[attr-defined]
    rows = open_lines(tmp_path, "x\n \n\n1\n", Csv())
    assert [row["x"] for row in rows] == [" ", "1"]  # type: ignore[attr-defined]


def test_json_is_utf_8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a.jsonl, line 1 is not a JSON object \(UnicodeDecodeError"):
        open_lines(tmp_path, '{"x": 1}\n{"x": 2}\n'.encode("utf-16"), JsonLines())


def test_a_regression_target(tmp_path: Path) -> None:
    format = JsonLines(inputs=["x"], target="x", target_dtype=torch.float32)
    inputs, target = open_lines(tmp_path, '{"x": 0.5}\n', format)[0]
    assert (inputs.tolist(), target.item(), target.dtype) == ([0.5], 0.5, torch.float32)


# CSV


FIELDS = st.text(st.sampled_from('ab1",\n\r ü'), max_size=6)


# Python's writer leaves a lone carriage return unquoted if lines end otherwise; its own reader refuses that.
DIALECTS = [("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(FIELDS, min_size=2, max_size=2), min_size=1, max_size=6), dialect=st.sampled_from(DIALECTS)
)
def test_csv_is_that_of_csv(
    rows: list[list[str]], dialect: tuple[str, int], tmp_path_factory: Any, small_blocks: None
) -> None:
    file = io.StringIO()
    csv.writer(file, lineterminator=dialect[0], quoting=dialect[1]).writerows([["x", "y"], *rows])  # type: ignore[arg-type]
    folder = tmp_path_factory.mktemp("csv")
    found = open_lines(folder, file.getvalue(), Csv())
    expected = list(csv.DictReader(io.StringIO(file.getvalue(), newline="")))
    assert list(found) == expected == [{"x": x, "y": y} for x, y in rows]  # type: ignore[call-overload]


def test_pairs_of_csv(tmp_path: Path) -> None:
    rows = open_lines(tmp_path, '\ufefft;ignored;y;x\r\n3;z;0.5;-1e2\r\n\r\n4;z;7;" 8"', Csv(separator=";", **PAIRS))
    assert [(inputs.tolist(), target.item()) for inputs, target in rows] == [([-100.0, 0.5], 3), ([8.0, 7.0], 4)]  # type: ignore[attr-defined]


def test_files_may_have_their_columns_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y,t\n1,2,3\n")
    (tmp_path / "b.csv").write_text("t,y,x\n3,2,1\n")
    first, second = FileSet(tmp_path, Csv(**PAIRS), index_dir=tmp_path / "index")  # type: ignore[misc]
    assert first[0].tolist() == second[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("1,2", "ValueError: it has 2 fields, and the first line 3"),
        ("1,2,3,4", "ValueError: it has 4 fields, and the first line 3"),
        ("1,two,3", "ValueError: y is 'two', no number"),
        ("1,2,0.5", "ValueError: t is 0.5, no whole number; .+"),
        ("1,2,4", "ValueError: t is 4, and num_classes=4 has the classes 0 … 3"),
        ("1,2,-1", "ValueError: t is -1, and num_classes=4 has the classes 0 … 3"),
        ('"1"x,2,3', "Error: .+"),
    ],
)
def test_an_unreadable_row_is_named_with_its_line(row: str, cause: str, tmp_path: Path, small_blocks: None) -> None:
    rows = open_lines(tmp_path, f'x,y,t\n"1\n",2,3\n{row}\n', Csv(**PAIRS, num_classes=4))
    with pytest.raises(UnreadableSample, match=rf"^\S+/a.csv, line 4 cannot be decoded \({cause}\): ."):
        rows[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x,y\n1,2\n", r" has no column 't'; the columns of its first line are \['x', 'y'\]"),
        ("x,y,t,x\n1,2,3,4\n", ": two columns have the same name"),
        ('x,y,t\n1,2,3\n1,"2,3\n', " has 1 double quotes, so one is not closed"),
        ("x,y,t\n1,2,3\n1,2", r", line 3 is not a row of this file \(.*2 fields.*\): the file may be cut off"),
        ("x,y,t\n", " holds no sample"),
        ("\n\n", " "),
        ("\ufeff", " "),
        *[(content, NO_NAMES) for content in (b"x,y,\xe9\n1,2,3\n", "x,y,t\n1,2,3\n".encode("utf-16"))],
        *[(content, NO_NAMES) for content in ("x,y,t\r1,2,3\r", '"x"x,y,t\n1,2,3\n')],
    ],
)
def test_csv_that_cannot_be_used_is_named(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^\S+/a.csv{message}") as failure:
        open_lines(tmp_path, content, Csv(**PAIRS))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("format", [JsonLines(), Csv()])
def test_a_byte_order_mark_alone_is_no_sample(format: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\S+ holds no sample"):
        open_lines(tmp_path, "\ufeff", format)


def test_fields_may_be_long(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    try:
        for text in (f"{'n' * 200_000},y\n1,2\n", f"x,y\n1,{'f' * 200_000}\n", f'x,y\n1,2\n1,"{"q" * 200_000}"'):
            csv.field_size_limit(limit)
            rows = open_lines(tmp_path, text, Csv())
            csv.field_size_limit(limit)  # as in a process that did not make the index
            found = [[*row, *row.values()] for row in rows]  # type: ignore[attr-defined]
            assert max(len(field) for row in found for field in row) == 200_000
    finally:
        csv.field_size_limit(limit)


@pytest.mark.parametrize("separator", ["", "ab", '"', "\n", None])
def test_a_separator_is_one_character(separator: Any) -> None:
    with pytest.raises(ConfigError, match=r"^separator=.*: give one character"):
        Csv(separator=separator)


# Columns


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (JsonLines, r"a.jsonl, line 1 is not a JSON object \(ValueError: there is no 'typo', only \['x', 'y', 't'\]\)"),
        (Csv, r"b.csv has no column 'typo'; the columns of its first line are \['x', 'y', 't'\]"),
    ],
)
def test_columns_are_compared_whenever_files_are_opened(format: Any, message: str, tmp_path: Path) -> None:
    record, line = '{"x": 1, "y": 2, "t": 3}\n', "1,2,3,4\n"
    (tmp_path / "a.jsonl").write_text(record)
    (tmp_path / "a.csv").write_text("x,y,t,typo\n" + line)
    (tmp_path / "b.csv").write_text("x,y,t\n" + line[2:])
    FileSet(tmp_path, format(**PAIRS), index_dir=tmp_path / "index")
    for target, build in (("typo", True), ("typo", False)):
        with pytest.raises(ConfigError, match=message):
            FileSet(tmp_path, format(**{**PAIRS, "target": target}), index_dir=tmp_path / "index", build=build)


@pytest.mark.parametrize(
    "columns", [{"inputs": ["x"]}, {"target": "t"}, {"inputs": "x", "target": "t"}, {"inputs": [], "target": "t"}]
)
def test_columns_that_make_no_pair_are_named(columns: Any) -> None:
    with pytest.raises(ConfigError, match="inputs="):
        JsonLines(**columns)


@pytest.mark.parametrize(
    ("format", "content", "line"),
    [
        (Csv(**PAIRS), "x,y,t\n1,2,0\n1,nan,0\n", "line 3.*: y is nan, no finite number"),
        (JsonLines(**PAIRS), '{"x": 1, "y": 2, "t": 0}\n{"x": [1, Infinity], "y": 0, "t": 1}\n', "line 2.*: x is"),
        (Csv(**PAIRS, target_dtype=torch.float32), "x,y,t\n1,2,inf\n1,2,0\n", "line 2.*: t is inf, no finite"),
    ],
    ids=["csv", "json", "target"],
)
def test_a_number_that_is_not_finite_is_named_with_its_line(
    format: Any, content: str, line: str, tmp_path: Path
) -> None:
    rows = open_lines(tmp_path, content, format)
    with pytest.raises(UnreadableSample, match=line):
        list(rows)  # type: ignore[call-overload]


@pytest.mark.parametrize("format", [JsonLines(), Csv()])
def test_compressed_lines_are_named_as_such(format: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.gz is compressed, .* unpack it$"):
        open_lines(tmp_path, gzip.compress(b"x,y\n1,2\n"), format, name="a.gz")
