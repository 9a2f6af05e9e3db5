"""The drawing of a profiled step, as text and as a picture."""

from __future__ import annotations

from typing import Any

from matplotlib.colors import to_hex

from ddp.lab.timeline import PARTS, step_figure, step_text


def rank(began_s: float, *spans: tuple[str, float]) -> dict[str, Any]:
    """Returns what a profile has of a rank, with a bucket that is ready 10 ms after backward has begun, at 20 ms."""
    edges = [0.0]
    for _, seconds in spans:
        edges.append(edges[-1] + seconds)
    named = [(name, *edges[place : place + 2]) for place, (name, _) in enumerate(spans)]
    bucket = {"index": 0, "bytes": 2048, "ready_s": 0.01, "launched_s": 0.012, "done_s": 0.02}
    return {"step": 6, "began_s": began_s, "backward_began_s": 0.02, "spans": named, "buckets": [bucket]}


FIRST = rank(7.0, ("data", 0.01), ("forward", 0.01), ("backward", 0.02), ("wait", 0.005), ("update", 0.005))
SECOND = rank(7.01, ("forward", 0.02), ("backward", 0.02))
TEXT = """\
step 6 of 2 ranks

                  0 ms                                       50.0 ms
rank 0            ddddddddddffffffffffbbbbbbbbbbbbbbbbbbbbwwwwwuuuuu
        bucket 0                                ··░░░░░░░░
rank 1                      ffffffffffffffffffffbbbbbbbbbbbbbbbbbbbb
        bucket 0                                          ··░░░░░░░░
d data, f forward, b backward, c communication, w wait, u update, · other

median, in ms       data   forward  backward   exposed   waiting    update     other      step
rank 0              10.0      10.0      20.0       0.0       5.0       5.0       0.0      50.0
rank 1               0.0      20.0      20.0       0.0       0.0       0.0       0.0      40.0"""


def test_a_step_is_drawn_as_text() -> None:
    assert step_text([[FIRST, SECOND], [FIRST, SECOND]], 1) == TEXT


def test_each_part_is_a_bar_where_it_was() -> None:
    axes = step_figure([FIRST, SECOND], title="mine").axes[0]
    found = []
    for bars in axes.collections:
        colors = list(map(to_hex, bars.get_facecolor()))
        name = next((part for part, (_, color) in PARTS.items() if color in colors), "")
        for path in bars.get_paths() if name else ():
            box = path.get_extents()
            found.append((round(box.y0) > 0, name, round(box.x0), round(box.x1)))
    assert sorted(found) == [
        (False, "backward", 20, 40),
        (False, "data", 0, 10),
        (False, "forward", 10, 20),
        (False, "update", 45, 50),
        (False, "wait", 40, 45),
        (True, "backward", 30, 50),
        (True, "forward", 10, 30),
    ]


def test_of_many_ranks_the_first_are_drawn() -> None:
    text = step_text([[FIRST] * 40], 0)
    assert text.startswith("step 6 of the first 32 of 40 ranks\n")
    assert text.count("bucket 0") == 32 and "rank 39   " in text.rpartition("median")[2]
