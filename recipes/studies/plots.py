"""Draws what `bench step` and `bench collectives` have measured (`--plot`): a panel for each place, as PNG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp.lab.bench.collectives import CollectiveCell
from ddp.lab.bench.step import StepCell
from ddp.units import format_size, format_time, three_digits, written

COLOURS = ("#1b2a52", "#e08a1e", "#c8ccd4", "#b3243b", "#2f8f6b", "#6fa8dc", "#7a5c99")
"""Of unequal darkness, so that they differ without colour too."""


def draw(places: Mapping[str, Sequence[Any]], picture: Path) -> None:
    """Draws the cells of each place, all of one kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(places), 1, figsize=(8.0, 4.0 * len(places)), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, (title, cells) in zip(panels[:, 0], places.items(), strict=True):
        (draw_steps if isinstance(cells[0], StepCell) else draw_times)(axes, cells)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def draw_steps(axes: Any, cells: Sequence[StepCell]) -> None:
    """Draws bars for all variants, relative to alone."""
    names = list(cells[0].turns_s)
    axes.figure.set_figwidth(max(8.0, 2.0 + 0.43 * len(names) * len(cells)))
    width = 0.81 / len(names)
    for number, name in enumerate(names):
        heights = [cell.ratio(name, "alone") or math.nan for cell in cells]
        x = [place + width * (number - (len(names) - 1) / 2) for place in range(len(cells))]
        bars = axes.bar(x, heights, 0.93 * width, color=COLOURS[number % len(COLOURS)], label=name)
        if name != "alone":
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_ylabel("step ÷ step without communication")
    alone_ms = [written(three_digits, cell.median_s("alone"), 1e3) for cell in cells]
    axes.set_xticks(range(len(cells)), [f"{c.name}\n{ms} ms alone" for c, ms in zip(cells, alone_ms, strict=True)])


def draw_times(axes: Any, cells: Sequence[CollectiveCell]) -> None:
    """Draws times over sizes, a line for each case; dashed: Gloo."""
    cells = [cell for cell in cells if cell.nbytes]
    sizes = sorted({cell.nbytes for cell in cells})
    for number, case in enumerate(dict.fromkeys(cell.case for cell in cells)):
        colour, marker = COLOURS[number % len(COLOURS)], "os^Dv"[number % 5]
        line = sorted((cell for cell in cells if cell.case == case), key=lambda cell: cell.nbytes)
        x = [cell.nbytes for cell in line]
        axes.plot(x, [cell.time_s for cell in line], color=colour, marker=marker, ms=5, label=case)
    gloo = [statistics.median(c.median_s("Gloo") or 0 for c in cells if c.nbytes == size) for size in sizes]
    axes.plot(sizes, gloo, color="0.5", ls="--", marker="x", ms=5, label="Gloo")
    axes.set(xscale="log", yscale="log", ylabel="time of an all-reduce")
    axes.yaxis.set_major_formatter(lambda seconds, _: format_time(seconds))
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.minorticks_off()
