"""Shows what the benchmarks have measured: tables for people, JSON for programs, and a picture.

A table is a set of columns: each has a title and a function from a cell to a text. A column without any text is left
out. There is a table for each place, and below it whether ours was slower than its rival anywhere.

Read before: ddp/bench/collectives.py, ddp/bench/step.py, ddp/bench/memory.py. Read next: ddp/bench/command.py.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from ddp.bench.collectives import CollectiveCell
from ddp.bench.step import VARIANTS, StepCell
from ddp.bench.turns import Cell, TimedCell
from ddp.bench.units import format_bandwidth, format_size, format_time, three_digits
from ddp.errors import ConfigError

AnyCell = TypeVar("AnyCell", bound=Cell)
NEAR = 0.3
"""A prediction is near if it is within this share of what was measured."""

# ------------------------------------------------------------------------------------------------------------- tables


def print_report(cells: Sequence[Cell], console: Console) -> None:
    """Prints a table for each place, and what its cells say together."""
    for place, group in _by_place(cells).items():
        columns, caption = _columns_of(group[0])
        table = Table(title=place, caption=caption)
        shown = {title: [text(cell) for cell in group] for title, text in columns.items()}
        shown = {title: texts for title, texts in shown.items() if any(texts)}
        for title in shown:
            table.add_column(
                title, justify="left" if title in ("case", "algorithm", "model", "variant") else "right", no_wrap=True
            )
        for row in zip(*shown.values(), strict=True):
            table.add_row(*row)
        console.print(table)
        for line in summary(group):
            console.print(line)


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
        near = [cell for cell in predicted if abs(_of_ours(cell, cell.predicted_s) - 1) <= NEAR]
        lines.append(f"predicted within {NEAR:.0%} of measured: {len(near)} of {len(predicted)} cells")
    return lines


Columns = Mapping[str, Callable[[Any], str]]


def _columns_of(cell: Cell) -> tuple[Columns, str]:
    if isinstance(cell, CollectiveCell):
        return COLLECTIVE_COLUMNS, "GB/s: bus bandwidth; Gloo ÷ ours: above 1, ours is faster"
    if isinstance(cell, StepCell):
        return STEP_COLUMNS, "ms per step; torch ÷ ours: above 1, ours is faster; over alone: what communication adds"
    return MEMORY_COLUMNS, "MiB of PSS above what the worker had before, of the worker with the highest peak"


def _text(write: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else write(value)


def _ms(seconds: float | None) -> str:
    return _text(lambda seconds: three_digits(1e3 * seconds), seconds)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f}"


def _step_of(variant: str) -> Callable[[StepCell], str]:
    return lambda cell: _ms(cell.median_s(variant))


def _of_ours(cell: TimedCell, seconds: float | None) -> float:
    """Returns a time ÷ the time of ours."""
    return (seconds or math.nan) / (cell.median_s("ours") or math.nan)


def _spread(cell: TimedCell) -> str:
    ratios = cell.ratios(cell.rival, "ours")
    return f"{three_digits(min(ratios))} – {three_digits(max(ratios))}" if ratios else ""


COLLECTIVE_COLUMNS: Columns = {
    "case": lambda cell: cell.case,
    "algorithm": lambda cell: cell.algorithm,
    "size": lambda cell: format_size(cell.nbytes) if cell.nbytes else "",
    "time": lambda cell: format_time(cell.median_s("ours")),
    "GB/s": lambda cell: format_bandwidth(cell.bus_bytes_s) if cell.nbytes else "",
    "of wire": lambda cell: f"{_of_ours(cell, cell.wire_s):.0%}" if cell.wire_s else "",
    "delays": lambda cell: three_digits(1 / _of_ours(cell, cell.delay_s)) if cell.delay_s else "",
    "predicted": lambda cell: _text(format_time, cell.predicted_s),
    "Gloo": lambda cell: format_time(cell.median_s("Gloo")),
    "Gloo ÷ ours": lambda cell: f"[bold]{three_digits(cell.speedup)}[/]",
    "over turns": _spread,
}
STEP_COLUMNS: Columns = {
    "model": lambda cell: cell.name,
    **{variant: _step_of(variant) for variant in VARIANTS},
    "torch ÷ ours": lambda cell: _text(lambda speedup: f"[bold]{three_digits(speedup)}[/]", cell.speedup),
    "over turns": _spread,
    "over alone": lambda cell: _text("{:+.1%}".format, cell.over_alone),
    "µs per parameter": lambda cell: _text(lambda seconds: three_digits(1e6 * seconds), cell.per_parameter_s),
    "wait": lambda cell: _ms(cell.wait_s),
    "wire": lambda cell: _ms(cell.wire_s),
}
MEMORY_COLUMNS: Columns = {
    "model": lambda cell: cell.name,
    "variant": lambda cell: cell.variant,
    "peak": lambda cell: _mib(cell.pss),
    "heap": lambda cell: _mib(cell.heap),
    "shared": lambda cell: _mib(cell.shared),
    "files": lambda cell: _mib(cell.files),
}


def _by_place(cells: Iterable[AnyCell]) -> dict[str, list[AnyCell]]:
    places: dict[str, list[AnyCell]] = {}
    for cell in cells:
        places.setdefault(cell.place, []).append(cell)
    return places


# --------------------------------------------------------------------------------------------------------------- JSON


def to_json(cells: Sequence[Cell]) -> str:
    """Writes a list of cells; those with turns say how many times as fast as their rival ours is, too."""
    ratios = [{"speedup": cell.speedup} if isinstance(cell, TimedCell) else {} for cell in cells]
    return json.dumps([{**asdict(cell), **ratio} for cell, ratio in zip(cells, ratios, strict=True)], indent=1) + "\n"


def from_json(text: str, kind: type[AnyCell]) -> list[AnyCell]:
    """Reads the cells that `to_json` wrote."""
    return [kind(**{field.name: plain[field.name] for field in fields(kind)}) for plain in json.loads(text)]


# ------------------------------------------------------------------------------------------------------------ picture


def draw_plot(cells: Sequence[Cell], picture: Path) -> None:
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
    width = 8.0 if isinstance(cells[0], CollectiveCell) else 2.0 + 1.3 * max(3, most)
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


COLOURS = ("#1b2a52", "#e08a1e", "#c8ccd4", "#b3243b", "#2f8f6b", "#6fa8dc")
"""Of unequal darkness, so that they differ without colour too."""


def _draw_times(axes: Any, cells: Sequence[Any]) -> None:
    """Draws a line for each case; dotted: predicted; dashed: Gloo."""
    sizes = sorted({cell.nbytes for cell in cells})
    for case, colour, marker in zip(
        dict.fromkeys(cell.case for cell in cells), itertools.cycle(COLOURS), itertools.cycle("os^Dv"), strict=False
    ):
        line = sorted((cell for cell in cells if cell.case == case), key=lambda cell: cell.nbytes)
        x = [cell.nbytes for cell in line]
        axes.plot(x, [cell.median_s("ours") for cell in line], color=colour, marker=marker, ms=5, label=case)
        axes.plot(x, [cell.predicted_s or math.nan for cell in line], color=colour, ls=":")
    gloo = [statistics.median(cell.median_s("Gloo") or 0 for cell in cells if cell.nbytes == size) for size in sizes]
    axes.plot(sizes, gloo, color="0.5", ls="--", marker="x", ms=5, label="Gloo")
    axes.plot([], [], color="0.2", ls=":", label="predicted")
    axes.set(xscale="log", yscale="log", ylabel="time of an all-reduce")
    axes.yaxis.set_major_formatter(lambda seconds, _: format_time(seconds))
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.minorticks_off()


def _draw_steps(axes: Any, cells: Sequence[Any]) -> None:
    """Draws bars for ours, torch and alone; whiskers go from the least to the greatest turn."""
    for number, (name, colour) in enumerate(zip(("ours", "torch", "alone"), COLOURS, strict=False)):
        ratios = [cell.ratios(name, "alone") or [math.nan] for cell in cells]
        heights = [statistics.median(each) for each in ratios]
        whiskers = [[height - min(each) for each, height in zip(ratios, heights, strict=True)]]
        whiskers += [[max(each) - height for each, height in zip(ratios, heights, strict=True)]]
        x = [place + 0.27 * (number - 1) for place in range(len(cells))]
        bars = axes.bar(x, heights, 0.25, color=colour, yerr=whiskers, ecolor="0.5", label=name)
        if name != "alone":
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_ylabel("step ÷ step without communication")
    axes.set_xticks(range(len(cells)), [f"{cell.name}\n{_ms(cell.median_s('alone'))} ms alone" for cell in cells])
