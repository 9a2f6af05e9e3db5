"""The pictures of the read-along are drawn again, and timelines are true to their times."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from ddp.__main__ import main
from ddp.replica.timeline_picture import timeline_svg, timeline_text
from ddp.tutorial.pictures import FOLDER, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_again_from_schedules_and_measurements(name: str) -> None:
    picture = PICTURES[name]()
    assert picture == (FOLDER / name).read_text()
    assert ElementTree.fromstring(picture).attrib["viewBox"]


def test_no_other_pictures_lie_there() -> None:
    assert {path.name for path in FOLDER.glob("*.svg")} == set(PICTURES)


def step(*, shift_s: float) -> dict[str, Any]:
    """The last backward of a rank: two buckets, the first launched in the middle."""
    buckets = [
        {"index": 0, "parameters": ["b", "a"], "bytes": 1024, "ready_s": 0.01, "launched_s": 0.01, "done_s": 0.03},
        {"index": 1, "parameters": ["x"], "bytes": 2048, "ready_s": 0.02, "launched_s": 0.03, "done_s": 0.04 + shift_s},
    ]
    for bucket, overlap in zip(buckets, (0.5, 0.0), strict=True):
        bucket |= {"overlap": overlap, "numel": 1, "dtype": "float32"}
    return {
        "num_steps": 1,
        "world_size": 2,
        "num_parameters": 3,
        "order_is_learned": True,
        "runs": "in the background",
        "bytes": 3072,
        "backward_s": 0.02,
        "overlap": 0.33,
        "buckets": buckets,
    }


def test_bars_are_as_long_as_the_times() -> None:
    run = [step(shift_s=0.0), step(shift_s=0.01)]
    lines = timeline_text(run).splitlines()
    bars = [re.search("[█░]+", line) for line in lines if re.match(r"(rank \d|\s+bucket)", line)]
    starts = [bar.start() - bars[0].start() for bar in bars if bar and bars[0]]
    lengths = [len(bar[0]) for bar in bars if bar]
    unit = lengths[0] / 2  # columns for 10 ms
    assert lengths == pytest.approx([2 * unit, 2 * unit, unit, 2 * unit, 2 * unit, 2 * unit], abs=1)
    assert starts == pytest.approx([0, unit, 3 * unit, 0, unit, 3 * unit], abs=1)
    root = ElementTree.fromstring(timeline_svg(run))
    shown = "".join(root.itertext())
    assert "rank 0" in shown and "rank 1" in shown and "bucket 0" in shown and "33% hidden" in shown


def test_draw_overlap_measures_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "overlap", "--bucket-mb", "8"]) == 0
    text = capsys.readouterr().out
    assert text.count("rank 0 ") == text.count("rank 1 ") == 2  # in the background, and in the foreground
    assert "in the background" in text and "in the foreground" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("draw overlap --workers 0", "one worker alone has nothing to reduce; take 2 or more"),
        ("draw overlap --workers 1", "one worker alone has nothing to reduce; take 2 or more"),
        ("draw overlap --bucket-mb 0", "--bucket-mb 0: give a size above 0"),
        ("draw overlap --svg no/where.svg", "cannot write no/where.svg: there is no such folder"),
        ("draw overlap 4", "unrecognized arguments: 4"),
        ("draw overlop 4", "there is no schedule 'overlop'"),
    ],
)
def test_what_draw_overlap_refuses(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
