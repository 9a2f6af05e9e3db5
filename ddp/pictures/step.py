"""Draws a profiled step, as text and as a picture: a lane for each rank with its parts, and its buckets below.

python -m ddp draw step runs/mine

rank 0  dffffffffbbbbbbbbbwwwwccbbbbuuuu      d data, f forward, b backward, c communication, w waiting, u update
        bucket 0          ░░░░░░

A step is a list of what RUN_DIR/profile.json has of each rank. All ranks are on one clock; zero is the moment at which
the first of them began.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ddp.pictures.schedule import PANEL, QUIET, color_of
from ddp.pictures.timeline import AXIS, draw_bucket, lanes_of, painted
from ddp.units import binary_size, counted, milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ranks = Sequence[Mapping[str, Any]]

PARTS = {  # letter, colour
    "data": ("d", "#e9c46a"),
    "forward": ("f", "#a8dadc"),
    "backward": ("b", "#457b9d"),
    "communication": ("c", "#e76f51"),
    "wait": ("w", "#f4b8a9"),
    "update": ("u", "#81b29a"),
    "other": ("·", "#d1d5db"),
}
IN_WORDS = {"communication": "exposed", "wait": "waiting"}
"""Parts that tables call otherwise than profile.json does."""
MOST_RANKS = 32  # of a drawing


def step_text(steps: Sequence[Ranks], number: int) -> str:
    """Returns the drawing of a step, and a table of the parts on each rank: medians over all profiled steps."""
    ranks = steps[number]
    legend = ", ".join(f"{letter} {part}" for part, (letter, _) in PARTS.items())
    return "\n".join([_title(ranks), "", *_lanes(ranks[:MOST_RANKS]), legend, "", *_table(steps)])


def _title(ranks: Ranks) -> str:
    shown = f"the first {MOST_RANKS} of " if len(ranks) > MOST_RANKS else ""
    return f"step {ranks[0]['step']} of {shown}{counted(len(ranks), 'rank')}"


def _lanes(ranks: Ranks) -> Iterator[str]:
    first_s, length_s = _extent(ranks)
    yield f"{'':18}0 ms{f'{length_s * 1e3:.1f} ms':>46}"
    for rank, mine in enumerate(ranks):
        after_s = mine["began_s"] - first_s
        cells = ""
        for part, began_s, ended_s in mine["spans"]:
            cells = painted(cells, after_s + began_s, after_s + ended_s, length_s, PARTS[part][0])
        yield f"rank {rank:<13}{cells}"
        after_s += mine["backward_began_s"]
        for bucket in mine["buckets"]:
            ready_s, launched_s, done_s = (after_s + bucket[f"{moment}_s"] for moment in ("ready", "launched", "done"))
            cells = painted("", ready_s, launched_s, length_s, "·")
            yield f"{'':8}bucket {bucket['index']:<3}{painted(cells, launched_s, done_s, length_s, '░', least=1)}"


def _table(steps: Sequence[Ranks]) -> Iterator[str]:
    yield f"{'median, in ms':14}" + "".join(f"{IN_WORDS.get(part, part):>10}" for part in PARTS) + f"{'step':>10}"
    for rank in range(len(steps[0])):
        mine = [step[rank] for step in steps]
        cells = [median(_seconds_of(part, each) for each in mine) for part in PARTS]
        cells.append(median(each["spans"][-1][2] for each in mine))
        yield f"rank {rank:<9}" + "".join(f"{milliseconds(cell):>10}" for cell in cells)


def _seconds_of(part: str, mine: Mapping[str, Any]) -> float:
    return math.fsum(ended_s - began_s for name, began_s, ended_s in mine["spans"] if name == part)


def _extent(ranks: Ranks) -> tuple[float, float]:
    """Returns when the first rank began, and how long it took until the last one had ended."""
    first_s = min(mine["began_s"] for mine in ranks)
    return first_s, max(mine["began_s"] + mine["spans"][-1][2] for mine in ranks) - first_s


# --- picture ---------------------------------------------------------------------------------------------------------


def step_figure(ranks: Ranks, *, title: str) -> Figure:
    """Returns a picture of a step: every rank's parts, and below them its buckets."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = ranks[:MOST_RANKS]
    first_s, length_s = _extent(shown)
    height = sum(2.0 + len({*lanes_of(mine["buckets"])}) for mine in shown)
    figure = Figure(figsize=(11, 1.6 + 0.27 * height), layout="constrained")
    axes: Any = figure.subplots()
    y = 0.0
    for rank, mine in enumerate(shown):
        y = _draw_rank(axes, rank, mine, y, first_s, length_s)
    axes.set(yticks=[], xlim=(0, 1.01e3 * length_s), ylim=(y - 0.6, -0.8), facecolor=PANEL)
    axes.tick_params(length=0, labelsize="small")
    axes.grid(axis="x", color="#dbe2ea")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("ms since the first rank began the step")
    buckets = ranks[0]["buckets"]
    size = binary_size(sum(bucket["bytes"] for bucket in buckets))
    what = f", {size} of gradients in {counted(len(buckets), 'bucket')}" if buckets else ""
    figure.suptitle(f"{title}\n{_title(ranks)}{what}", x=0.01, ha="left", fontsize="large")
    handles = [Patch(color=color, label=part) for part, (_, color) in PARTS.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(PARTS), frameon=False, fontsize="small")
    return figure


def _draw_rank(axes: Any, rank: int, mine: Mapping[str, Any], y: float, first_s: float, length_s: float) -> float:
    """Draws a rank's parts at height y, and its buckets below. Returns where the next rank begins."""
    after_s = mine["began_s"] - first_s
    words = {"x": -0.01, "transform": axes.get_yaxis_transform(), "ha": "right", "va": "center", "fontsize": "small"}
    axes.text(y=y, s=f"rank {rank}", fontweight="bold", **words)
    for part, (_, color) in PARTS.items():
        stretches = [(began_s, ended_s) for name, began_s, ended_s in mine["spans"] if name == part]
        if bars := [(1e3 * (after_s + began_s), 1e3 * (ended_s - began_s)) for began_s, ended_s in stretches]:
            axes.broken_barh(bars, (y - 0.45, 0.9), color=color, linewidth=0)
    buckets, lanes = mine["buckets"], lanes_of(mine["buckets"])
    after_s += mine["backward_began_s"]
    for bucket, lane in zip(buckets, lanes, strict=True):
        moved = bucket | {moment: after_s + bucket[moment] for moment in ("ready_s", "launched_s", "done_s")}
        draw_bucket(axes, moved, color_of(bucket["index"], len(buckets)), y + 1.1 + lane, AXIS / length_s)
    if buckets:
        axes.text(y=y + 1.1, s="buckets", color=QUIET, **words)
    return y + 2.0 + len({*lanes})
