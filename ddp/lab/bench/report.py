"""Shows what the benchmarks have measured: tables for people, JSON for programs, and a picture.

There is a table for each place, and below it in which cells ours was slower than its rival. The report ends with what
its columns mean.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from ddp.errors import ConfigError
from ddp.lab.bench.collectives import CollectiveCell
from ddp.lab.bench.turns import Cell, TimedCell
from ddp.process import records
from ddp.units import format_size, format_time, three_digits, written

AnyCell = TypeVar("AnyCell", bound=Cell)
WORDS = ("case", "algorithm", "model", "variant", "method", "job", "strategy")
"""Columns that hold words; all others hold numbers."""
NEAR = 0.3
"""A prediction is near if it is within this share of what was measured."""

# ------------------------------------------------------------------------------------------------------------- tables


def print_report(cells: Sequence[Cell], console: Console) -> None:
    """Prints a table for each place, without empty columns, and what its cells say together; then the legend."""
    shown: dict[str, str] = {}
    for place, group in _by_place(cells).items():
        rows = [row for cell in group for row in cell.rows()]
        table = Table(title=place)
        titles = [title for title in rows[0] if any(row[title] for row in rows)]
        shown |= {title: group[0].legend[title] for title in titles}
        for title in titles:
            justify: Literal["left", "right"] = "left" if title in WORDS else "right"
            table.add_column(title, justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(row[title] for title in titles))
        console.print(table)
        for line in summary(group):
            console.print(line)
    legend = Table.grid(padding=(0, 2))
    for title, meaning in shown.items():
        legend.add_row(title, meaning)
    console.print("", legend)


def summary(cells: Sequence[Cell]) -> list[str]:
    """Returns in which cells ours was slower than its rival, and how many predictions were near."""
    timed = [cell for cell in cells if isinstance(cell, TimedCell) and cell.speedup is not None]
    lines = []
    if timed:
        slower = [f"{cell.name} ({cell.speedup:.2f}×)" for cell in timed if cell.speedup and cell.speedup < 1]
        where = f"in {len(slower)} of {len(timed)} cells: {', '.join(slower)}" if slower else "nowhere"
        lines.append(f"slower than {timed[0].rival}: {where}")
    predicted = [cell for cell in cells if isinstance(cell, CollectiveCell) and cell.predicted_s]
    if predicted:
        near = [cell for cell in predicted if abs((cell.predicted_s or 0) / cell.time_s - 1) <= NEAR]
        lines.append(f"predicted within {NEAR:.0%} of measured: {len(near)} of {len(predicted)} cells")
    return lines


def _by_place(cells: Iterable[AnyCell]) -> dict[str, list[AnyCell]]:
    places: dict[str, list[AnyCell]] = {}
    for cell in cells:
        places.setdefault(cell.place, []).append(cell)
    return places


# --------------------------------------------------------------------------------------------------------------- JSON


def to_json(cells: Sequence[Cell]) -> str:
    """Writes a list of cells; those with turns say how many times as fast as their rival ours is, too."""
    ratios = [{"speedup": cell.speedup} if isinstance(cell, TimedCell) else {} for cell in cells]
    plain = [{**asdict(cell), **ratio} for cell, ratio in zip(cells, ratios, strict=True)]
    return records.to_json(plain, indent=1) + "\n"


def from_json(text: str, kind: type[AnyCell]) -> list[AnyCell]:
    """Reads the cells that `to_json` wrote."""
    return [kind(**{field.name: plain[field.name] for field in fields(kind)}) for plain in json.loads(text)]


# ------------------------------------------------------------------------------------------------------------ picture


def draw_plot(cells: Sequence[Any], picture: Path) -> None:
    """Draws times over sizes for collectives, or steps relative to the step without communication; a panel a place.

    Raises:
        ConfigError: there is nothing to draw, since a barrier has no size.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = _by_place(cell for cell in cells if not isinstance(cell, CollectiveCell) or cell.nbytes)
    if not places:
        raise ConfigError("nothing to draw: a barrier has no size")
    most = max(map(len, places.values()))
    width = 8.0 if isinstance(cells[0], CollectiveCell) else 2.0 + 0.43 * len(cells[0].drawn) * max(3, most)
    figure, panels = pyplot.subplots(
        len(places), 1, figsize=(width, 4.0 * len(places)), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, (title, group) in zip(panels[:, 0], places.items(), strict=True):
        (_draw_times if isinstance(group[0], CollectiveCell) else _draw_steps)(axes, group)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


COLOURS = ("#1b2a52", "#e08a1e", "#c8ccd4", "#b3243b", "#2f8f6b", "#6fa8dc", "#7a5c99")
"""Of unequal darkness, so that they differ without colour too."""


def _draw_times(axes: Any, cells: Sequence[Any]) -> None:
    """Draws a line for each case; dotted: predicted; dashed: Gloo."""
    sizes = sorted({cell.nbytes for cell in cells})
    for number, case in enumerate(dict.fromkeys(cell.case for cell in cells)):
        colour, marker = COLOURS[number % len(COLOURS)], "os^Dv"[number % 5]
        line = sorted((cell for cell in cells if cell.case == case), key=lambda cell: cell.nbytes)
        x = [cell.nbytes for cell in line]
        axes.plot(x, [cell.time_s for cell in line], color=colour, marker=marker, ms=5, label=case)
        axes.plot(x, [cell.predicted_s or math.nan for cell in line], color=colour, ls=":")
    gloo = [statistics.median(cell.median_s("Gloo") or 0 for cell in cells if cell.nbytes == size) for size in sizes]
    axes.plot(sizes, gloo, color="0.5", ls="--", marker="x", ms=5, label="Gloo")
    axes.plot([], [], color="0.2", ls=":", label="predicted")
    axes.set(xscale="log", yscale="log", ylabel="time of an all-reduce")
    axes.yaxis.set_major_formatter(lambda seconds, _: format_time(seconds))
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.minorticks_off()


def _draw_steps(axes: Any, cells: Sequence[Any]) -> None:
    """Draws bars for those that `drawn` of a cell names, relative to alone."""
    names = cells[0].drawn
    width = 0.81 / len(names)
    for number, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        heights = [cell.ratio(name, "alone") or math.nan for cell in cells]
        x = [place + width * (number - (len(names) - 1) / 2) for place in range(len(cells))]
        bars = axes.bar(x, heights, 0.93 * width, color=colour, label=name)
        if name != "alone":
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_ylabel("step ÷ step without communication")
    axes.set_xticks(
        range(len(cells)),
        [f"{cell.name}\n{written(three_digits, cell.median_s('alone'), 1e3)} ms alone" for cell in cells],
    )
