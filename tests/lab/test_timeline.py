"""Timelines are drawn to scale; what cannot be drawn or measured is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from ddp.__main__ import main
from ddp.errors import ConfigError
from ddp.lab.timeline import TITLE, svg_of, timeline_figure, timeline_text

SVG = "{http://www.w3.org/2000/svg}"


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


def spans_ms(axes: Any) -> list[tuple[float, ...]]:
    """Returns from when to when each bar of a panel lasts."""
    paths = [path for bars in axes.collections if isinstance(bars, PolyCollection) for path in bars.get_paths()]
    return [tuple(np.round(path.get_extents().intervalx, 1).tolist()) for path in paths]


def rows(axes: Any) -> list[float]:
    """Returns at which height each bar of a panel is."""
    paths = [path for bars in axes.collections if isinstance(bars, PolyCollection) for path in bars.get_paths()]
    return [round(path.get_extents().y0, 2) for path in paths]


def test_the_picture_is_to_scale() -> None:
    figure = timeline_figure([BACKGROUND], [FOREGROUND], title="a < b")
    background, foreground = figure.axes
    assert spans_ms(background) == [(0, 30), (10, 25), (24, 40), (30, 50)]
    assert spans_ms(foreground) == [(0, 10), (20, 30), (35, 40), (10, 20), (30, 35), (40, 45)], (
        "backward in three pieces"
    )
    assert background.get_xlim() == foreground.get_xlim()
    above = rows(background)
    assert above[1] == above[3] < above[2], "buckets that are in flight together stand below each other"
    assert len(set(rows(foreground)[3:])) == 1
    written = svg_of(figure, "a < b")
    picture = ElementTree.fromstring(written)
    assert picture.findtext(f"{SVG}title") == "a < b"
    words = {str(text.text).strip() for text in picture.iter(f"{SVG}text")}
    assert {"30.0 ms", "50.0 ms", "rank 0", "50% hidden"} <= words
    assert any("2.weight … 2.bias" in each for each in words) and any(
        each.startswith("In the foreground") for each in words
    )
    assert written == svg_of(timeline_figure([BACKGROUND], [FOREGROUND], title="a < b"), "a < b")


@pytest.mark.parametrize("runs", [[], [[]], [[step("in the background", 30)]]])
def test_a_step_without_reductions_is_refused(runs: list[list[dict[str, Any]]]) -> None:
    for draw in (timeline_text, timeline_figure):
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
    monkeypatch.setattr("ddp.run.launch.from_python.launch", lambda *args, **kwargs: measured)
    assert main(["draw", "overlap", "--svg", str(tmp_path / "step.svg")]) == 0
    assert (tmp_path / "step.svg").read_text(encoding="utf-8") == svg_of(
        timeline_figure([BACKGROUND], [FOREGROUND]), TITLE
    )
    assert main(["draw", "overlap"]) == 0
    said = capsys.readouterr().out
    assert timeline_text([BACKGROUND], [FOREGROUND]) in said and "ddp reduces in the foreground" in said
    with pytest.raises(SystemExit):
        main(["draw", "overlap", "--svg", str(tmp_path)])
    assert "cannot write" in capsys.readouterr().err
