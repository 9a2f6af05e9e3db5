"""Timelines are drawn to scale; what cannot be drawn or measured is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ddp.__main__ import main
from ddp.errors import ConfigError
from ddp.pictures.timeline import AXIS, LABELS, MARGIN, timeline_svg, timeline_text

SVG = "{http://www.w3.org/2000/svg}"
LEFT = MARGIN + LABELS


def step(runs: str, backward_ms: float, *times_ms: tuple[float, float, float]) -> dict[str, Any]:
    """Returns what `logging_data()` would; each bucket's ready, launched and done."""
    names = ("ready_s", "launched_s", "done_s")
    buckets = [
        {"index": index, "parameters": [f"{index}.weight", f"{index}.bias"], "bytes": 1 << 20, "overlap": 0.5}
        | {name: at_ms / 1e3 for name, at_ms in zip(names, moments, strict=True)}
        for index, moments in enumerate(times_ms)
    ]
    whole = {"runs": runs, "world_size": 1, "num_parameters": 2 * len(buckets), "bytes": len(buckets) << 20}
    return whole | {"backward_s": backward_ms / 1e3, "overlap": 0.5, "buckets": buckets}


BACKGROUND = step("in the background", 30, (10, 10, 25), (20, 24, 40), (30, 30, 50))
FOREGROUND = step("in the foreground", 40, (10, 10, 20), (30, 30, 35), (40, 40, 45))


def test_a_column_of_text_is_a_millisecond() -> None:
    """The longest step takes 50 ms, and the axis has 50 columns."""
    lines = timeline_text([BACKGROUND], [FOREGROUND]).splitlines()
    assert [line[18:68].rstrip() for line in lines[2:6]] == [
        "█" * 30,
        " " * 10 + "░" * 15,
        " " * 20 + "····" + "░" * 16,
        " " * 30 + "░" * 20,
    ]
    paused = "█" * 10 + "─" * 10 + "█" * 10 + "─" * 5 + "█" * 5
    assert lines[9][18:68].rstrip() == paused
    assert lines[4].split()[-4:] == ["20.0", "24.0", "40.0", "50%"]
    assert lines[-1] == "bucket 2  1 MiB     2.weight … 2.bias"
    assert max(map(len, lines)) <= 101


def test_a_short_reduction_is_seen_where_it_happened() -> None:
    short = step("in the background", 50, (20.1, 20.1, 20.2), (50, 50, 50.001))
    rows = [line[18:].rstrip() for line in timeline_text([short]).splitlines()[3:5]]
    assert [(row.index("░"), row.count("░")) for row in rows] == [(19, 1), (49, 1)]


def test_the_picture_is_to_scale() -> None:
    picture = ElementTree.fromstring(timeline_svg([BACKGROUND], [FOREGROUND], title="a < b"))
    assert picture.findtext(f"{SVG}title") == "a < b"
    bars = [bar for bar in picture.findall(f"{SVG}rect") if bar.get("height") == "18.0"]
    spans_ms = [
        tuple(round((float(bar.get("x", 0)) + add - LEFT) / AXIS * 50, 1) for add in (0.0, float(bar.get("width", 0))))
        for bar in bars
    ]
    assert spans_ms == [
        *[(0, 30), (10, 25), (24, 40), (30, 50)],
        *[(0, 10), (20, 30), (35, 40), (10, 20), (30, 35), (40, 45)],  # three pieces of backward, between pauses
    ]
    rows = [float(bar.get("y", 0)) for bar in bars]
    assert rows[1] == rows[3] < rows[2], "buckets that are in flight together stand below each other"
    assert rows[7] == rows[8] == rows[9]
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    for box in picture.findall(f"{SVG}rect")[1:]:
        assert float(box.get("x", 0)) + float(box.get("width", 0)) < width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) < height
    words = [text.text for text in picture.findall(f"{SVG}text")]
    assert {"30.0 ms", "50.0 ms", "rank 0", "50% hidden", "2.weight … 2.bias", "In the foreground"} <= set(words)


@pytest.mark.parametrize("runs", [[], [[]], [[step("in the background", 30)]]])
def test_a_step_without_reductions_is_refused(runs: list[list[dict[str, Any]]]) -> None:
    for draw in (timeline_text, timeline_svg):
        with pytest.raises(ConfigError, match="no bucket has been reduced yet: call logging_data"):
            draw(*runs)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--workers 1", "--workers: 1: give a whole number from 2 to "),
        ("--bucket-mb 0", "--bucket-mb: 0: give a number above 0"),
        ("--svg /no/such/place.svg", "cannot write /no/such/place.svg: there is no such folder; name another file"),
        ("4", "unrecognized arguments: 4"),
    ],
)
def test_what_the_command_refuses(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["draw", "overlap", *words.split()])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


def test_the_command_writes_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [([BACKGROUND], [FOREGROUND], "in the foreground")]
    monkeypatch.setattr("ddp.run.launch.command_line.launch", lambda *args, **kwargs: measured)
    assert main(["draw", "overlap", "--svg", str(tmp_path / "step.svg")]) == 0
    assert (tmp_path / "step.svg").read_text(encoding="utf-8") == timeline_svg([BACKGROUND], [FOREGROUND])
    assert main(["draw", "overlap"]) == 0
    said = capsys.readouterr().out
    assert timeline_text([BACKGROUND], [FOREGROUND]) in said and "ddp reduces in the foreground" in said
    with pytest.raises(SystemExit):
        main(["draw", "overlap", "--svg", str(tmp_path)])
    assert "cannot write" in capsys.readouterr().err
