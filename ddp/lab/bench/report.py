"""Shows what the benchmarks have measured: tables for people, JSON for programs, and a picture.

There is a table for each place, and below it in which cells ours was slower than its rival. The report ends with what
its columns mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from ddp.lab.bench.turns import Cell, TimedCell
from ddp.process import records

AnyCell = TypeVar("AnyCell", bound=Cell)
WORDS = ("case", "algorithm", "model", "variant", "method")
"""Columns that hold words; all others hold numbers."""

# ------------------------------------------------------------------------------------------------------------- tables


def print_report(cells: Sequence[Cell], console: Console) -> None:
    """Prints a table for each place, without empty columns, and what its cells say together; then the legend."""
    shown: dict[str, str] = {}
    for place, group in _by_place(cells).items():
        rows = [row for cell in group for row in cell.rows()]
        table = Table(title=place)
        titles = [title for title in rows[0] if any(row[title] for row in rows)]
        shown |= {title: group[0].meaning(title) for title in titles}
        for title in titles:
            justify: Literal["left", "right"] = "left" if title in WORDS else "right"
            table.add_column(title, justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(row[title] for title in titles))
        console.print(table)
        for line in group[0].summary(group):
            console.print(line)
    legend = Table.grid(padding=(0, 2))
    for title, meaning in shown.items():
        legend.add_row(title, meaning)
    console.print("", legend)


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
    """Draws a panel for each place, as the cells say."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = _by_place(cells)
    figure, panels = pyplot.subplots(
        len(places), 1, figsize=(8.0, 4.0 * len(places)), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, (title, group) in zip(panels[:, 0], places.items(), strict=True):
        group[0].draw(axes, group)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
