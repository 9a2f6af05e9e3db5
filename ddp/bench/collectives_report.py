"""What `ddp.bench.collectives` has measured, for people and for programs: a table, JSON lines, a picture, the goals.

The goals are what this project asks of itself on two cores; a cell that has one shows it beside what was reached.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from ddp.bench.bystanders import Bystanders
from ddp.bench.collectives import Bed, Figures
from ddp.bench.units import format_bandwidth, format_size, format_time, three_digits
from ddp.errors import ConfigError

KB, MB, ANY = 1 << 10, 1 << 20, 1 << 62
NEAR = 0.3
"""A prediction is near if it is within this share of what was measured."""


# ------------------------------------------------------------------------------------------------------------- goals


class Goal(NamedTuple):
    """What is wanted of a case from `least` to `most` bytes: so many times as fast as Gloo, or so few seconds."""

    case: str
    ranks_per_host: tuple[int, ...]
    bed: str  # "" for this machine as it is
    least: int
    most: int
    speedup: float
    share_of_optimum: float = 0.0
    time_s: float = float("inf")

    def covers(self, figures: Figures) -> bool:
        return (self.case, self.ranks_per_host, self.bed) == (figures.case, figures.ranks_per_host, _bed(figures)) and (
            self.least <= figures.nbytes <= self.most
        )

    def is_reached(self, figures: Figures) -> bool:
        return (
            figures.speedup >= self.speedup
            and (figures.share_of_optimum or 0.0) >= self.share_of_optimum
            and figures.time_s <= self.time_s
        )

    def __str__(self) -> str:
        share = f", {self.share_of_optimum:.0%} of optimum" if self.share_of_optimum else ""
        return f"{self.speedup:g}×{share}{f', ≤ {format_time(self.time_s)}' if self.time_s < 1e9 else ''}"


GOALS = (
    Goal("allocated", (2,), "", 1 * KB, 1 * KB, 7.0, time_s=30e-6),
    Goal("allocated", (2,), "", 0, 4 * MB - 1, 7.0),
    Goal("allocated", (2,), "", 4 * MB, ANY, 11.0),
    Goal("allocated", (4,), "", 0, 1 * MB, 25.0),
    Goal("allocated", (4,), "", 1 * MB + 1, ANY, 7.0),
    Goal("ordinary", (2,), "", 0, 4 * MB, 5.0),
    Goal("ordinary", (2,), "", 4 * MB + 1, ANY, 2.5),
    Goal("ordinary", (4,), "", 0, 1 * MB, 16.0),
    Goal("ordinary", (4,), "", 1 * MB + 1, ANY, 2.0),
    Goal("transport", (2,), "", 0, ANY, 1.0),
    Goal("transport", (4,), "", 0, 1 * MB, 1.3),
    Goal("transport", (4,), "", 1 * MB + 1, ANY, 1.0),
    Goal("barrier", (2,), "", 0, 0, 40.0),
    Goal("barrier", (4,), "", 0, 0, 40.0),
    Goal("allocated", (2, 2), "2x2@1gbit", 25 * MB, 25 * MB, 1.4, share_of_optimum=0.85),
    Goal("ordinary", (2, 2), "2x2@1gbit", 25 * MB, 25 * MB, 1.4, share_of_optimum=0.85),
    Goal("allocated", (1, 1, 1, 1), "4x1@5ms", 4 * KB, 4 * KB, 2.5),
    Goal("ordinary", (1, 1, 1, 1), "4x1@5ms", 4 * KB, 4 * KB, 2.5),
)


def goal_of(figures: Figures) -> Goal | None:
    """The first that covers the cell."""
    return next((goal for goal in GOALS if goal.covers(figures)), None)


def _bed(figures: Figures) -> str:
    return str(figures.bed or "")


# ------------------------------------------------------------------------------------------------------------- table


def print_report(all_figures: Sequence[Figures], console: Console) -> None:
    """A table for each set of ranks, then what the cells say together."""
    for title, figures in _by_place(all_figures).items():
        console.print(_table(title, figures))
    disturbed = [cell for cell in all_figures if _bystanders(cell).disturb]
    if disturbed:
        worst = max(disturbed, key=lambda cell: cell.others_cores)
        console.print(f"! {len(disturbed)} of {len(all_figures)} cells were disturbed; at worst {_bystanders(worst)}")
    for line in summary(all_figures):
        console.print(line)


def summary(all_figures: Iterable[Figures]) -> list[str]:
    """How many goals were reached, and how many predictions were near."""
    figures = list(all_figures)
    lines = []
    wanted = [(cell, goal) for cell in figures if (goal := goal_of(cell)) is not None]
    if wanted:
        missed = [_what(cell) for cell, goal in wanted if not goal.is_reached(cell)]
        misses = f"; missed: {', '.join(missed)}" if missed else ""
        lines.append(f"goals reached: {len(wanted) - len(missed)} of {len(wanted)}{misses}")
    judged = [abs(cell.over_predicted - 1) <= NEAR for cell in figures if cell.over_predicted and _is_judged(cell)]
    if judged:
        lines.append(f"predicted within {NEAR:.0%} of measured: {sum(judged)} of {len(judged)} cells (wanted: 9 in 10)")
    return lines


def _what(cell: Figures) -> str:
    where = str(cell.bed or f"{cell.world_size} ranks")
    return " ".join(filter(None, (cell.case, _size(cell), f"({where})")))


def _is_judged(figures: Figures) -> bool:
    """A cost model knows links and memory. Who gets a core when there are too few it cannot know."""
    return figures.bed is not None or (figures.case != "transport" and figures.world_size <= figures.num_cores)


def _table(title: str, figures: Sequence[Figures]) -> Table:
    table = Table(title=title, caption="bandwidths in GB/s; Gloo in the same run; × Gloo: above 1 is faster than Gloo")
    table.add_column("case")
    table.add_column("algorithm", no_wrap=True)
    limits = _limits(figures[0])
    right = ("size", "time", "algbw", "busbw", *limits, "predicted", "÷ measured", "Gloo", "× Gloo", "at least")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    for number, cell in enumerate(figures):
        last_of_case = number + 1 == len(figures) or figures[number + 1].case != cell.case
        table.add_row(*_row(cell), end_section=last_of_case)
    return table


def _limits(cell: Figures) -> dict[str, str]:
    """What a time here is held against, by column: one core's memory, or the links of a bed."""
    if cell.bed is None:
        return {"of copy": _share(cell.share_of_copy)}
    of_rate = {"of optimum": _share(cell.share_of_optimum)} if cell.bed.rate_bit_s else {}
    return {**of_rate, **({"delays": _number(cell.num_delays)} if cell.bed.delay_s else {})}


def _row(cell: Figures) -> list[str]:
    goal = goal_of(cell)
    mark = "" if goal is None else " [green]✓[/]" if goal.is_reached(cell) else " [red]✗[/]"
    return [
        cell.case,
        cell.algorithm,
        _size(cell),
        f"{'! ' if _bystanders(cell).disturb else ''}{format_time(cell.time_s)}",
        format_bandwidth(cell.algorithm_bytes_s) if cell.nbytes else "",
        format_bandwidth(cell.bus_bytes_s) if cell.nbytes else "",
        *_limits(cell).values(),
        "" if cell.predicted_s is None else format_time(cell.predicted_s),
        _number(cell.over_predicted),
        format_time(cell.gloo_s),
        f"[bold]{three_digits(cell.speedup)}[/]",
        "" if goal is None else f"{goal}{mark}",
    ]


def _size(figures: Figures) -> str:
    return format_size(figures.nbytes) if figures.nbytes else ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "" if value is None else three_digits(value)


def _bystanders(figures: Figures) -> Bystanders:
    return Bystanders(figures.others_cores, figures.greediest)


def _by_place(all_figures: Iterable[Figures]) -> dict[str, list[Figures]]:
    """Cells that ran on the same ranks, under a title."""
    places: dict[str, list[Figures]] = {}
    for cell in all_figures:
        hosts = sorted(set(cell.ranks_per_host))
        ranks = " or ".join(map(str, hosts)) + (" rank" if hosts == [1] else " ranks")
        title = (
            f"{ranks} on one host" if len(cell.ranks_per_host) == 1 else f"{len(cell.ranks_per_host)} hosts × {ranks}"
        )
        places.setdefault(title if cell.bed is None else f"netbed {cell.bed}: {title}", []).append(cell)
    return places


# -------------------------------------------------------------------------------------------------------- JSON lines


def to_json(figures: Figures) -> str:
    """One line: what was measured, and what follows from it."""
    goal = goal_of(figures)
    derived: dict[str, Any] = {
        "bed": None if figures.bed is None else str(figures.bed),
        "world_size": figures.world_size,
        "algorithm_bytes_s": figures.algorithm_bytes_s,
        "bus_bytes_s": figures.bus_bytes_s,
        "over_predicted": figures.over_predicted,
        "share_of_copy": figures.share_of_copy,
        "share_of_optimum": figures.share_of_optimum,
        "num_delays": figures.num_delays,
        "at_least": None if goal is None else goal.speedup,
        "is_reached": None if goal is None else goal.is_reached(figures),
    }
    return json.dumps({**asdict(figures), **derived})


def from_json(line: str) -> Figures:
    """What `to_json` wrote."""
    kept = json.loads(line)
    values = {field.name: kept[field.name] for field in fields(Figures)}
    values["bed"] = None if kept["bed"] is None else Bed.parse(kept["bed"])
    values["ranks_per_host"] = tuple(kept["ranks_per_host"])
    return Figures(**values)


# ----------------------------------------------------------------------------------------------------------- picture

Shown = Literal["time", "busbw"]

STYLES = (
    # Dark to light, so that they differ without colour too; and by marker.
    {"color": "#1b2a52", "marker": "o"},
    {"color": "#b3243b", "marker": "s"},
    {"color": "#2f8f6b", "marker": "^"},
    {"color": "#e08a1e", "marker": "D"},
    {"color": "#6fa8dc", "marker": "v"},
    {"color": "#c9a0dc", "marker": "P"},
)


def draw_plot(all_figures: Sequence[Figures], picture: Path, *, shown: Shown = "time") -> None:
    """Time or bus bandwidth over size, both logarithmic; a panel for each set of ranks, a line for each case.

    Solid: measured. Dotted: predicted. Dashed: Gloo, in the same run. Grey dash-dotted: one core's `copy_`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = _by_place(cell for cell in all_figures if cell.nbytes)
    if not places:
        raise ConfigError("nothing to draw: a barrier has no size")
    cases = list(dict.fromkeys(cell.case for cells in places.values() for cell in cells))
    styles = {case: STYLES[number % len(STYLES)] for number, case in enumerate(cases)}
    figure, panels = pyplot.subplots(
        1, len(places), figsize=(1.2 + 5.2 * len(places), 4.9), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, (title, cells) in zip(panels[0], places.items(), strict=True):
        _draw_panel(axes, cells, styles, shown)
        axes.set_title(title, fontsize=11)
    _label(panels[0], shown)
    figure.suptitle("all-reduce of float32, slowest rank, median of paired runs", fontsize=10, color="0.35")
    handles: dict[str, Any] = {}
    for axes in panels[0]:
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    num_columns = min(len(handles), 1 + 3 * len(places))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=num_columns, frameon=False)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def _draw_panel(axes: Any, cells: Sequence[Figures], styles: dict[str, dict[str, str]], shown: Shown) -> None:
    def height(cell: Figures, time_s: float) -> float:
        return time_s if shown == "time" else cell.bus_bytes_s * cell.time_s / time_s

    sizes = sorted({cell.nbytes for cell in cells})
    at_size = [[cell for cell in cells if cell.nbytes == nbytes] for nbytes in sizes]
    for case, style in styles.items():
        line = sorted((cell for cell in cells if cell.case == case), key=lambda cell: cell.nbytes)
        near = [(cell.nbytes, height(cell, cell.predicted_s)) for cell in line if cell.predicted_s]
        axes.plot(*zip(*near, strict=True) if near else ([], []), ls=":", lw=1.6, color=style["color"])
        points = [(cell.nbytes, height(cell, cell.time_s)) for cell in line]
        axes.plot(*zip(*points, strict=True) if points else ([], []), lw=2, ms=5.5, label=case, **style)
    axes.plot([], [], ls=":", lw=1.6, color="0.2", label="predicted")
    gloo = [statistics.median(height(cell, cell.gloo_s) for cell in same) for same in at_size]
    axes.plot(sizes, gloo, ls="--", lw=2, color="0.45", marker="x", ms=5, label="Gloo")
    copy = [statistics.median(height(cell, cell.copy_s or cell.time_s) for cell in same) for same in at_size]
    if cells[0].bed is None:
        axes.plot(sizes, copy, ls=(0, (1, 1, 5, 1)), lw=1.2, color="0.65", label="copy_ by one core")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sizes, [format_size(nbytes) for nbytes in sizes], fontsize=9)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label(panels: Sequence[Any], shown: Shown) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    spelled = {"time": lambda y, _: f"{_plain(y)}", "busbw": lambda y, _: f"{y / 1e9:g} GB/s"}[shown]
    for axes in panels:
        axes.set_xlabel("size")
        axes.yaxis.set_major_locator(LogLocator(base=10))
        axes.yaxis.set_major_formatter(FuncFormatter(spelled))
    panels[0].set_ylabel({"time": "time (lower is better)", "busbw": "bus bandwidth (higher is better)"}[shown])


def _plain(seconds: float) -> str:
    return next(f"{seconds * by:g} {unit}" for by, unit in ((1e6, "µs"), (1e3, "ms"), (1, "s")) if seconds * by < 999)
