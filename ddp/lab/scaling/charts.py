"""Draws the figures of a series of runs, a panel for each, as SVG on light paper.

In a page every colour of the table below becomes a variable, which is another one on dark paper (`themed`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddp.lab import timeline
from ddp.lab.scaling.figures import Point, Series
from ddp.lab.timeline import svg_of
from ddp.train.reports.results import metric_in_words, words_of
from ddp.units import counted, format_time, three_digits

COLOURS = {  # name: on light, on dark paper
    "paper": ("#ffffff", "#111827"),
    "ink": ("#1f2937", "#e5e7eb"),
    "quiet": ("#5b6779", "#a3afc0"),
    "line": ("#dde3ea", "#374151"),
    "good": ("#2a6fdb", "#6aa5ff"),
    "bad": ("#c2571a", "#f59e5b"),
    "green": ("#0f8a6a", "#3cc9a0"),
    "violet": ("#8a3ffc", "#b78bff"),
    "pink": ("#c21e6b", "#ff7ab2"),
}
CURVES = ("quiet", "good", "bad", "green", "violet", "pink")
PARTS = {part: colour for part, (_, colour) in timeline.PARTS.items()}
PARTS = {"compute": PARTS["backward"], **PARTS}  # of runs without a profile
MOST_RANKS = 8
"""Of one number of workers whose steps are drawn."""


def parts_in(steps: Iterable[Mapping[str, float]]) -> list[str]:
    """Returns the parts that these steps have, in the order in which they are shown."""
    found = {part for parts in steps for part in parts}
    return [part for part in PARTS if part in found]


class Panel(NamedTuple):
    """A chart: its title, its text without the picture, and how it is drawn into axes."""

    title: str
    words: str
    draw: Callable[[Any], None]


def _light(name: str) -> str:
    return COLOURS[name][0]


# --- panels ----------------------------------------------------------------------------------------------------------


def panels_of(series: Series) -> list[Panel]:
    """Returns the charts that the figures of a series are enough for."""
    points = series.points
    found: list[Panel] = []

    def add(title: str, labels: Sequence[str], draw: Callable[..., None], *arguments: Any) -> None:
        sizes = (counted(point.workers, "worker") for point in points)
        words = "; ".join(f"{size}: {label}" for size, label in zip(sizes, labels, strict=True))
        found.append(Panel(title, words, lambda axes: draw(axes, *arguments)))

    speeds = [f"{point.speed_up:.2f}× ({point.efficiency:.0%})" for point in points]
    add(f"Speed-up (goal {series.goal:.0%} of the ideal)", speeds, _speed_up, series)
    if any(len(point.curve) > 1 for point in points):
        ends = [metric_in_words(series.metric, point.run.metric) for point in points]
        name = words_of(series.metric)
        add(f"{name[:1].upper()}{name[1:]} over training time", ends, _curves, series)
    if series.target is not None and any(point.seconds_to for point in points):
        seconds = [point.seconds_to or 0.0 for point in points]
        labels = [in_seconds(each) if each else "not reached" for each in seconds]
        title = f"Training time to {metric_in_words(series.metric, series.target)}"
        add(title, labels, _seconds, points, seconds, labels)
    if any(point.parts for point in points):
        steps = [sum(point.parts[0].values()) if point.parts else 0.0 for point in points]
        first = f" (first {MOST_RANKS} ranks)" if any(len(point.parts) > MOST_RANKS for point in points) else ""
        labels = [format_time(each) if each else "not measured" for each in steps]
        add(f"Parts of a step{first}", labels, _parts, series)
    return found


def in_seconds(seconds: float) -> str:
    """Returns "8.31 s" or "1,234 s"."""
    return f"{three_digits(seconds) if seconds < 999.5 else f'{seconds:,.0f}'} s"


def _speed_up(axes: Any, series: Series) -> None:
    """Draws the speed-up over workers, with the ideal and the goal."""
    sizes, base = [point.workers for point in series.points], series.base.workers
    speeds = [point.speed_up for point in series.points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ideal = [size / base for size in sizes]
    goals = [1.0, *(series.goal * each for each in ideal[1:])]
    axes.plot(sizes, ideal, color=_light("quiet"), ls=(0, (4, 3)), lw=1.2)
    axes.plot(sizes, goals, color=_light("bad"), ls=(0, (1, 2)), lw=1.2)
    axes.plot(sizes, speeds, color=_light("good"), lw=2.2, marker="o", ms=6, clip_on=False)
    for size, speed, best in list(zip(sizes, speeds, ideal, strict=True))[1:]:
        is_low = speed <= best
        axes.annotate(
            f"{speed:.2f}×",
            (size, speed),
            xytext=(0, -8 if is_low else 7),
            textcoords="offset points",
            ha="center",
            va="top" if is_low else "bottom",
            color=_light("ink"),
        )
    angle = {"rotation": 0, "ha": "right", "va": "bottom", "color": _light("quiet")}
    for name, line in (("ideal", ideal), ("goal", goals)):
        axes.annotate(name, (sizes[-1], line[-1]), xytext=(-6, 0), textcoords="offset points", **angle)
    low, high = min(speeds + goals), max(speeds + ideal)
    axes.set(xlabel="workers", xlim=(sizes[0] / 1.15, sizes[-1] * 1.15), ylim=(low / 1.45, high * 1.15))
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_yticks(ideal, [f"{each:g}×" for each in ideal])
    axes.minorticks_off()
    axes.grid(axis="y", color=_light("line"), lw=0.8)


def _seconds(axes: Any, points: Sequence[Point], heights: Sequence[float], labels: Sequence[str]) -> None:
    """Draws a bar for each number of workers, with its label above."""
    places = range(len(points))
    axes.bar_label(axes.bar(places, heights, 0.62, color=_light("good")), labels, padding=3, color=_light("ink"))
    axes.set(xlabel="workers", ylabel="seconds", xlim=(-0.6, len(points) - 0.4), ylim=(0, 1.18 * max(heights)))
    axes.set_xticks(places, [str(point.workers) for point in points])
    axes.grid(axis="y", color=_light("line"), lw=0.8)


def _curves(axes: Any, series: Series) -> None:
    """Draws the main metric over seconds of training, a line for each number of workers, and the target."""
    for number, point in enumerate(series.points):
        colour = _light(CURVES[number % len(CURVES)])
        seconds, metrics = zip(*point.curve, strict=True) if point.curve else ((), ())
        label = counted(point.workers, "worker")
        axes.plot(seconds, metrics, color=colour, lw=1.8, marker="o", ms=3.5, label=label)
        if point.seconds_to is not None and point.samples_to is not None:
            metric = next(metric for samples, metric in point.run.evaluations if samples == point.samples_to)
            axes.plot(point.seconds_to, metric, color=colour, marker="o", ms=8, mfc="none", mew=1.6, clip_on=False)
    if series.target is not None:
        axes.axhline(series.target, color=_light("ink"), ls=(0, (4, 3)), lw=1.2)
    axes.set_xlabel("seconds of training")
    axes.set_xlim(left=0)
    if series.metric.endswith("accuracy"):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    axes.grid(color=_light("line"), lw=0.8)
    place = "lower right" if series.higher_is_better else "upper right"
    axes.legend(loc=place, frameon=False, labelcolor=_light("ink"), handlelength=1.4)


def _parts(axes: Any, series: Series) -> None:
    """Draws a bar for each rank, of the parts of its step one after the other; and the legend below."""
    rows = [
        (f"{rank} of {point.workers}", parts)
        for point in series.points
        for rank, parts in enumerate(point.parts[:MOST_RANKS])
    ]
    left = [0.0] * len(rows)
    for part in parts_in(parts for _, parts in rows):
        widths = [1e3 * parts.get(part, 0.0) for _, parts in rows]
        axes.barh(range(len(rows)), widths, 0.72, left=left, color=PARTS[part], label=timeline.IN_WORDS.get(part, part))
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set(xlabel="ms", ylabel="rank", ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.02 * max(left)))
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize="small" if len(rows) > 8 else "medium")
    axes.grid(axis="x", color=_light("line"), lw=0.8)
    place = axes.get_position()
    axes.set_position([place.x0, place.y0 + 0.2 * place.height, place.width, 0.8 * place.height])
    style = {"frameon": False, "labelcolor": _light("ink"), "handlelength": 0.9, "columnspacing": 1.0}
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=4, fontsize="small", **style)


# --- pictures --------------------------------------------------------------------------------------------------------

_STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.fontsize": 9,
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _light("quiet")),
    **dict.fromkeys(("axes.titlecolor", "text.color"), _light("ink")),
    "axes.edgecolor": _light("line"),
}


# Fixed margins, in inches: a layout that measures its words draws everything twice.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BELOW, _ABOVE = 3.7, 2.6, 0.62, 0.12, 0.5, 0.12


def svg(panel: Panel, name: str) -> str:
    """Returns a panel. `name` is unique among those of a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    margins = {"left": _LEFT / _WIDTH, "right": 1 - _RIGHT / _WIDTH}
    margins |= {"bottom": _BELOW / _HEIGHT, "top": 1 - _ABOVE / _HEIGHT}
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), facecolor=_light("paper"))
        axes: Any = figure.subplots(gridspec_kw=margins)
        axes.set_facecolor("none")
        panel.draw(axes)
        text = svg_of(figure, name)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<title>.*?</title>", "", text, flags=re.DOTALL)
    return re.sub(r' id="[a-zA-Z0-9.]+_\d+"', "", text)  # ids without a reference


def themed(picture: str) -> str:
    """Returns a panel whose colours are a page's variables."""
    for colour, (light, _) in COLOURS.items():
        picture = picture.replace(light, f"var(--{colour})")
    return picture
