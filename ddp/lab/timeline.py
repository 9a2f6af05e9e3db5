"""Draws the timeline of a step, as text and as a picture.

    python -m ddp draw overlap           how much of the reductions backward has hidden

    rank 0  backward  ████████████████████████
            bucket 0        ░░░░░░░░░░
            bucket 1                   ·░░░░░░░░

    python -m ddp draw step runs/mine    a lane for each rank of a profiled step with its parts, and its buckets below

    rank 0  dffffffffbbbbbbbbbwwwwccbbbbuuuu      d data, f forward, b backward, c communication, w waiting, u update
            bucket 0          ░░░░░░

A run is a list of the results of `BucketedDataParallel.logging_data()`, by rank. Several runs are drawn one above
another on the same time scale, so that they can be compared.

Zero is the moment at which a rank's own backward began. Ranks of several hosts share no clock, and need none: their
waits show in the times between ready and done. A profiled step is a list of each rank's record in RUN_DIR/profile.json,
all on one clock; its zero is the moment at which the first rank began.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

from ddp.collectives.picture import FAINT, INK, PANEL, QUIET, color_of
from ddp.commands.registry import parser_of, respond
from ddp.commands.schedules import add_picture, write_picture
from ddp.errors import ConfigError
from ddp.process.records import to_json
from ddp.train.reports.profile import read_profile
from ddp.train.reports.traces import FOLDER, merged
from ddp.units import binary_size, counted, milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = Sequence[Mapping[str, Any]]
"""By rank, the result of `logging_data()`."""

MEANING = {
    "in the background": "a thread reduces buckets during backward",
    "in the foreground": "backward stands still while a bucket is reduced",
}

MOMENTS = ("ready_s", "launched_s", "done_s")  # of a bucket

# --- what backward hides, as text ------------------------------------------------------------------------------------

COLUMNS = 50  # of the time axis


def timeline_text(*runs: Run) -> str:
    """Returns a block for each run, with a line for every backward and bucket, and the contents of the buckets.

    Raises:
        ConfigError: a rank has reduced nothing yet.
    """
    longest_s = _longest_s(runs)
    blocks = ["\n".join(_block(run, longest_s)) for run in runs]
    names = [
        f"bucket {bucket['index']:<3}{binary_size(bucket['bytes']):<9} {_names(bucket['parameters'])}"
        for bucket in runs[0][0]["buckets"]
    ]
    return "\n\n".join([*blocks, "\n".join(names)])


def _block(run: Run, longest_s: float) -> Iterator[str]:
    how = run[0]["runs"]
    yield f"{how}: {MEANING[how]}"
    yield f"{'':18}0 ms{f'{longest_s * 1e3:.1f} ms':>{COLUMNS - 4}}   ready launched    done  hidden"
    for rank, step in enumerate(run):
        cells = painted("", 0.0, step["backward_s"], longest_s, "█")
        for began_s, over_s in _pauses(step):
            cells = painted(cells, began_s, over_s, longest_s, "─")
        yield f"rank {rank:<3}backward  {cells:<{COLUMNS}}{milliseconds(step['backward_s']):>24}{step['overlap']:>8.0%}"
        for bucket in step["buckets"]:
            ready, launched, done = (milliseconds(bucket[moment]) for moment in MOMENTS)
            times = f"{ready:>8}{launched:>9}{done:>7}{bucket['overlap']:>8.0%}"
            yield f"{_line_of(bucket, longest_s):<{COLUMNS + 18}}{times}"


def painted(cells: str, began_s: float, over_s: float, longest_s: float, letter: str, *, least: int = 0) -> str:
    """Returns the line with `letter` drawn from one moment to another, at least `least` times."""
    end = max(least, round(over_s / longest_s * COLUMNS))
    begin = min(end - least, round(began_s / longest_s * COLUMNS))
    cells = cells.ljust(end)
    return cells[:begin] + letter * (end - begin) + cells[end:]


# --- what backward hides, as a picture -------------------------------------------------------------------------------

TITLE = "One step: backward, and what it hides"
AXIS = 720  # points of the time axis, for fitting words into bars
COMPUTES = "#cbd5e1"


def timeline_figure(*runs: Run, title: str = TITLE) -> Figure:
    """Returns a picture with a panel for each run: every rank's backward, and below it its reductions.

    Raises:
        ConfigError: a rank has reduced nothing yet.
    """
    from matplotlib.figure import Figure

    longest_s = _longest_s(runs)
    heights = [sum(2.5 + max(lanes_of(step["buckets"])) for step in run) for run in runs]
    buckets = runs[0][0]["buckets"]
    num_rows = sum(heights) + 3 * len(runs) + max(6, len(buckets))
    figure = Figure(figsize=(11, 1.1 + 0.24 * num_rows), layout="constrained")
    panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        y = 0.0
        for rank, step in enumerate(run):
            y = _draw_rank(axes, rank, step, y, longest_s)
        how = run[0]["runs"]
        axes.set_title(f"{how.capitalize()}: {MEANING[how]}", loc="left", fontsize="medium")
        axes.tick_params(labelbottom=True)
        _finish(axes, 1.06e3 * longest_s, (y, -0.7))
    panels[-1].set_xlabel("ms since the rank's backward began")
    step = runs[0][0]
    what = f"{step['world_size']} ranks, {step['num_parameters']} parameters in {counted(len(buckets), 'bucket')}"
    figure.suptitle(f"{title}\n{what}, {binary_size(step['bytes'])} in all", x=0.01, ha="left", fontsize="large")
    figure.legend(handles=_legend(buckets), loc="outside lower left", ncols=2, frameon=False, fontsize="small")
    return figure


def _draw_rank(axes: Any, rank: int, step: Mapping[str, Any], y: float, longest_s: float) -> float:
    """Draws a rank's backward at height y, and its buckets below. Returns where the next rank begins."""
    buckets, lanes, end = step["buckets"], lanes_of(step["buckets"]), step["backward_s"] * 1e3
    small: dict[str, Any] = {"fontsize": "small", "va": "center"}
    words = {"x": -0.01, "transform": axes.get_yaxis_transform(), "ha": "right"}
    axes.text(y=y, s=f"rank {rank}", fontweight="bold", **words, **small)
    axes.text(y=y + 1, s=f"{step['overlap']:.0%} hidden", color=QUIET, **words, **small)
    edges = [0.0, *(moment * 1e3 for pause in _pauses(step) for moment in pause), end]
    axes.hlines(y, 0, end, color=FAINT, linewidth=1, zorder=0.9)  # visible where backward stands still
    axes.broken_barh(
        [(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)], (y - 0.38, 0.76), color=COMPUTES
    )
    axes.text(end, y, f" {milliseconds(step['backward_s'])} ms", **small)
    for bucket, lane in zip(buckets, lanes, strict=True):
        draw_bucket(axes, bucket, len(buckets), y + 1 + lane, AXIS / longest_s)
    axes.vlines(end, y - 0.5, y + 1.5 + max(lanes), color=INK, linestyle="--", linewidth=1)
    last, lane = max(zip(buckets, lanes, strict=True), key=lambda pair: float(pair[0]["done_s"]))
    ended = f" {milliseconds(last['done_s'])} ms"
    axes.text(last["done_s"] * 1e3, y + 1 + lane, ended, fontweight="bold", **small)
    return y + 2.5 + max(lanes)


def draw_bucket(axes: Any, bucket: Mapping[str, Any], num_buckets: int, y: float, points_per_s: float) -> None:
    """Draws when a bucket was ready, launched and done, with the longest label that fits."""
    ready, launched, done = (1e3 * bucket[moment] for moment in MOMENTS)
    color = color_of(bucket["index"], num_buckets)
    axes.hlines(y, ready, launched, color=color, linewidth=2)
    axes.broken_barh([(launched, done - launched)], (y - 0.38, 0.76), color=color)
    axes.plot(ready, y - 0.4, marker="v", markersize=5, color=INK, clip_on=False)
    room = points_per_s * (bucket["done_s"] - bucket["launched_s"])
    number = str(bucket["index"])
    choices = (f"bucket {number}  ·  {binary_size(bucket['bytes'])}", f"bucket {number}", number, "")
    words = next(words for words in choices if not words or 6 * len(words) + 4 < room)
    axes.text((launched + done) / 2, y, words, ha="center", va="center", fontsize="small")


def _legend(buckets: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the entries of the legend: marks, and then buckets."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    color = color_of(0, 1)
    marks = [
        Patch(color=COMPUTES, label="backward computes"),
        Line2D([], [], color=FAINT, label="it stands still"),
        Line2D([], [], color=INK, linestyle="--", label="it has ended"),
        Line2D([], [], color=INK, marker="v", linestyle="", label="a bucket is ready"),
        Line2D([], [], color=color, linewidth=2, label="it waits for its turn"),
        Patch(color=color, label="it is in flight, or waits for the other ranks"),
    ]
    named = [
        Patch(
            color=color_of(bucket["index"], len(buckets)),
            label=f"bucket {bucket['index']}   {binary_size(bucket['bytes'])}   {_names(bucket['parameters'])}",
        )
        for bucket in buckets
    ]
    blank = Line2D([], [], linestyle="", label=" ")
    height = max(len(marks), len(named))
    return [*marks, *[blank] * (height - len(marks)), *named, *[blank] * (height - len(named))]


# --- both ------------------------------------------------------------------------------------------------------------


def _longest_s(runs: Sequence[Run]) -> float:
    """Returns the seconds of the longest step of all runs and ranks."""
    steps = [step for run in runs for step in run]
    if not steps or not all(step["buckets"] for step in steps):
        raise ConfigError("no bucket has been reduced yet: call logging_data() after a backward on every rank")
    return max(map(ended_s, steps))


def ended_s(step: Mapping[str, Any]) -> float:
    """Returns when a rank's backward and all its reductions had ended."""
    return max(float(step["backward_s"]), *(float(bucket["done_s"]) for bucket in step["buckets"]))


def _pauses(step: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns the intervals in which backward stood still, because it reduced in the foreground."""
    if step["runs"] != "in the foreground":
        return []
    moments = [(bucket["launched_s"], bucket["done_s"]) for bucket in step["buckets"]]
    return [(launched_s, done_s) for launched_s, done_s in moments if done_s <= step["backward_s"]]


def lanes_of(buckets: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the row of each bucket: the first one that is free when the bucket is ready."""
    free_s: list[float] = []
    lanes = []
    for bucket in buckets:
        lane = next((lane for lane, at_s in enumerate(free_s) if at_s <= bucket["ready_s"]), len(free_s))
        free_s[lane:] = [bucket["done_s"], *free_s[lane + 1 :]]
        lanes.append(lane)
    return lanes


def _moved(bucket: Mapping[str, Any], after_s: float) -> dict[str, Any]:
    """Returns a bucket whose times are counted from another moment."""
    return {**bucket, **{moment: after_s + bucket[moment] for moment in MOMENTS}}


def _line_of(bucket: Mapping[str, Any], longest_s: float) -> str:
    """Returns the line of text that shows when a bucket was ready, launched and done."""
    ready_s, launched_s, done_s = (bucket[moment] for moment in MOMENTS)
    cells = painted("", ready_s, launched_s, longest_s, "·")
    return f"{'':8}bucket {bucket['index']:<3}{painted(cells, launched_s, done_s, longest_s, '░', least=1)}"


def _finish(axes: Any, longest_ms: float, height: tuple[float, float]) -> None:
    """Gives axes their extent, a grid in time, and no frame."""
    axes.set(yticks=[], xlim=(0, longest_ms), ylim=height, facecolor=PANEL)
    axes.tick_params(length=0, labelsize="small")
    axes.grid(axis="x", color="#dbe2ea")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _names(parameters: Sequence[str]) -> str:
    return parameters[0] if len(parameters) == 1 else f"{parameters[0]} … {parameters[-1]}"


# --- figures of matplotlib as files -----------------------------------------------------------------------------------


def svg_of(figure: Figure, title: str) -> str:
    """Returns a figure as SVG with text as text; redrawing it gives the same bytes."""
    from matplotlib import rc_context

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(written, format="svg", metadata={"Title": title, "Date": None, "Creator": None})
    return written.getvalue()


def png_of(figure: Figure) -> bytes:
    """Returns a figure as PNG."""
    figure.savefig(written := io.BytesIO(), format="png", dpi=150)
    return written.getvalue()


# --- draw step: where the time of a step of a run went ---------------------------------------------------------------


def main(words: Sequence[str]) -> int:
    """Draws a step of a run that was profiled, or writes the traces of its ranks as one."""
    parser = parser_of("draw step")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run with profile.steps=5")
    parser.add_argument("--step", type=int, metavar="N", help="number of the step (default: the one of median length)")
    add_picture(parser)
    parser.add_argument("--png", type=Path, metavar="FILE", help="the same as a PNG")
    about = "write the traces of all ranks as one, for ui.perfetto.dev"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=about)
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the drawing, or what was written."""
    profile = read_profile(options.run)
    lengths = [max(rank.step_s for rank in step) for step in profile.steps]
    numbers = [step[0].step for step in profile.steps]
    index = lengths.index(median_low(lengths))
    if options.step is not None:
        if options.step not in numbers:
            raise ValueError(f"--step {options.step}: {options.run} has the steps {numbers[0]} to {numbers[-1]}")
        index = numbers.index(options.step)
    steps = [[asdict(rank) for rank in step] for step in profile.steps]
    title = f"{options.run.name}: {profile.model}, {profile.strategy}"
    made: dict[str, Callable[[], str | bytes]] = {
        "svg": lambda: svg_of(step_figure(steps[index], title=title), title),
        "png": lambda: png_of(step_figure(steps[index], title=title)),
        "trace": lambda: to_json(merged(options.run / FOLDER)),
    }
    wanted = {option: path for option in made if (path := getattr(options, option)) is not None}
    for option, path in wanted.items():
        write_picture(path, made[option](), after=f"--{option}")
    if wanted:
        return f"{', '.join(map(str, wanted.values()))}: step {numbers[index]} of {options.run}"
    return step_text(steps, index)


# --- a profiled step -------------------------------------------------------------------------------------------------

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
"""Parts with another name in tables than in profile.json."""
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
        yield from (_line_of(_moved(bucket, after_s), length_s) for bucket in mine["buckets"])


def _table(steps: Sequence[Ranks]) -> Iterator[str]:
    yield f"{'median, in ms':14}" + "".join(f"{IN_WORDS.get(part, part):>10}" for part in (*PARTS, "step"))
    for rank in range(len(steps[0])):
        mine = [step[rank] for step in steps]
        cells = [median(_seconds_of(part, each) for each in mine) for part in PARTS]
        cells.append(median(each["spans"][-1][2] for each in mine))
        yield f"rank {rank:<9}" + "".join(f"{milliseconds(cell):>10}" for cell in cells)


def _seconds_of(part: str, mine: Mapping[str, Any]) -> float:
    return math.fsum(ended_s - began_s for name, began_s, ended_s in mine["spans"] if name == part)


def _extent(ranks: Ranks) -> tuple[float, float]:
    """Returns when the first rank began, and the seconds until the last one had ended."""
    first_s = min(mine["began_s"] for mine in ranks)
    return first_s, max(mine["began_s"] + mine["spans"][-1][2] for mine in ranks) - first_s


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
        y = _draw_parts(axes, rank, mine, y, first_s, length_s)
    _finish(axes, 1.01e3 * length_s, (y - 0.6, -0.8))
    axes.set_xlabel("ms since the first rank began the step")
    buckets = ranks[0]["buckets"]
    size = binary_size(sum(bucket["bytes"] for bucket in buckets))
    what = f", {size} of gradients in {counted(len(buckets), 'bucket')}" if buckets else ""
    figure.suptitle(f"{title}\n{_title(ranks)}{what}", x=0.01, ha="left", fontsize="large")
    handles = [Patch(color=color, label=part) for part, (_, color) in PARTS.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(PARTS), frameon=False, fontsize="small")
    return figure


def _draw_parts(axes: Any, rank: int, mine: Mapping[str, Any], y: float, first_s: float, length_s: float) -> float:
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
        draw_bucket(axes, _moved(bucket, after_s), len(buckets), y + 1.1 + lane, AXIS / length_s)
    if buckets:
        axes.text(y=y + 1.1, s="buckets", color=QUIET, **words)
    return y + 2.0 + len({*lanes})
