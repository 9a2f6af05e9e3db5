"""What `ddp.bench.step` and `ddp.bench.memory` have measured, for people and for programs: tables, JSON, a picture.

The goals are what this project asks of itself on two cores, with two workers on one host; and nowhere is ours to be
slower than torch's.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ddp.bench.bystanders import Bystanders
from ddp.bench.memory import MemoryFigures
from ddp.bench.step import VARIANTS, StepFigures
from ddp.bench.units import three_digits
from ddp.errors import ConfigError

MIB = 1 << 20

# ------------------------------------------------------------------------------------------------------------- goals


class Goal(NamedTuple):
    """What is wanted of a cell: torch ÷ ours at least `speedup`, ours ÷ alone − 1 at most `cost`."""

    speedup: float = 1.0
    cost: float | None = None

    def misses(self, figures: StepFigures) -> list[str]:
        """What is not reached, in words. A figure that was not measured misses nothing."""
        missed = []
        if figures.speedup is not None and figures.speedup < self.speedup:
            missed.append(f"{three_digits(figures.speedup)} of {self.speedup:g}×")
        if self.cost is not None and figures.cost is not None and figures.cost > self.cost:
            missed.append(f"{figures.cost:+.1%} of {self.cost:+.0%}")
        return missed

    def is_judged(self, figures: StepFigures) -> bool:
        """Whether anything was measured that it speaks of."""
        return figures.speedup is not None or (self.cost is not None and figures.cost is not None)

    def __str__(self) -> str:
        return f"{self.speedup:g}×" + ("" if self.cost is None else f", {self.cost:+.0%}")


EVERYWHERE = Goal()
GOALS = {
    ("mlp-25m", 2): Goal(1.4, 0.12),
    ("resnet18-32px", 2): Goal(1.45, 0.15),
    ("gpt-10m", 2): Goal(1.3, 0.10),
    ("cnn-b64", 2): Goal(1.06, 0.02),
}
"""By workload and workers, on one host."""


def goal_of(figures: StepFigures) -> Goal:
    return GOALS.get((figures.workload, figures.world_size), EVERYWHERE) if figures.num_hosts == 1 else EVERYWHERE


# ------------------------------------------------------------------------------------------------------------ tables


def print_report(all_figures: Sequence[StepFigures], console: Console) -> None:
    """A table for each number of workers, then what the cells say together."""
    for title, figures in _by_place(all_figures).items():
        console.print(_table(title, figures))
    for line in summary(all_figures):
        console.print(line)


def summary(all_figures: Iterable[StepFigures]) -> list[str]:
    """How many goals were reached, and who disturbed the measuring."""
    figures = list(all_figures)
    lines = []
    judged = [cell for cell in figures if goal_of(cell).is_judged(cell)]
    if judged:
        missed = [f"{_what(cell)} {', '.join(misses)}" for cell in judged if (misses := goal_of(cell).misses(cell))]
        which = f"; missed: {'; '.join(missed)}" if missed else ""
        lines.append(f"goals reached: {len(judged) - len(missed)} of {len(judged)}{which}")
    disturbed = [cell for cell in figures if _bystanders(cell).disturb]
    if disturbed:
        worst = max(disturbed, key=lambda cell: cell.others_cores)
        lines.append(f"! {len(disturbed)} of {len(figures)} cells were disturbed; at worst {_bystanders(worst)}")
    return lines


def _table(title: str, figures: Sequence[StepFigures]) -> Table:
    variants = [name for name in VARIANTS if any(name in cell.turns_s for cell in figures)]
    caption = "ms per step; torch ÷ ours: above 1, ours is faster; over alone: what communication adds to ours"
    table = Table(title=title, caption=caption)
    table.add_column("model", no_wrap=True)
    derived = ("torch ÷ ours", "over turns", "over alone", "µs per parameter", "wanted")
    for name in (*variants, *derived):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in figures:
        table.add_row(*_row(cell, variants))
    return table


def _row(cell: StepFigures, variants: Sequence[str]) -> list[str]:
    goal = goal_of(cell)
    mark = "" if not goal.is_judged(cell) else " [red]✗[/]" if goal.misses(cell) else " [green]✓[/]"
    spread = f"{three_digits(min(cell.speedups))} – {three_digits(max(cell.speedups))}" if cell.speedups else ""
    return [
        f"{'! ' if _bystanders(cell).disturb else ''}{cell.workload}",
        *(_number(cell.step_s(name), 1e3) for name in variants),
        f"[bold]{_number(cell.speedup)}[/]",
        spread,
        "" if cell.cost is None else f"{cell.cost:+.1%}",
        _number(cell.per_parameter_s, 1e6),
        f"{goal}{mark}",
    ]


def print_overlap(all_figures: Sequence[StepFigures], console: Console, *, rate_bit_s: float | None) -> None:
    """How much of its communication a step of ours hides behind computing, and what no step could be faster than.

    Args:
        rate_bit_s: of each host's link; None if it is not known: the wire's part is left out then.
    """
    table = Table(title="what a step of ours consists of, in ms")
    rows = [
        {"model": cell.workload, "variant": name, **_overlap(cell, name, rate_bit_s)}
        for cell in all_figures
        for name in ("ours", "in_backward")
        if name in cell.turns_s
    ]
    for name in rows[0] if rows else ():
        table.add_column(name, justify="left" if name in ("model", "variant") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def _overlap(cell: StepFigures, variant: str, rate_bit_s: float | None) -> dict[str, str]:
    compute_s, step_s, reduce_s = (cell.step_s(name) for name in ("alone", variant, "reduce"))
    wait_s = cell.wait_s if variant == "ours" else None
    columns = {"without communication": _number(compute_s, 1e3)}
    if rate_bit_s is not None:
        columns["wire"] = _number(cell.wire_s(rate_bit_s), 1e3)
    columns["step"] = _number(step_s, 1e3)
    if rate_bit_s is not None:
        bound_s = max(compute_s or 0.0, cell.wire_s(rate_bit_s))
        columns["÷ the longer of both"] = "" if compute_s is None else _number(_quotient(step_s, bound_s))
    columns["reduce alone"], columns["wait"] = _number(reduce_s, 1e3), _number(wait_s, 1e3)
    return {**columns, "wait ÷ reduce": _number(_quotient(wait_s, reduce_s))}


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def print_memory(all_figures: Sequence[MemoryFigures], console: Console) -> None:
    """A row for each launch."""
    caption = "MiB of PSS above what the worker had before; at the higher peak: heap, shared memory, files"
    table = Table(title="memory of the worker with the highest peak", caption=caption)
    for name in ("model", "workers", "variant"):
        table.add_column(name, no_wrap=True)
    for name in ("peak", "building", "training", "heap", "shared", "files", "sampled every", "longest gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, cell in enumerate(all_figures):
        peak = max(cell.building, cell.training)
        parts = (cell.building.pss, cell.training.pss, peak.anonymous, peak.shared, peak.file)
        table.add_row(
            *(cell.workload, str(cell.world_size), cell.variant, f"[bold]{cell.peak_bytes / MIB:.1f}[/]"),
            *(f"{part / MIB:.1f}" for part in parts),
            *(f"{time_s * 1e3:.1f} ms" for time_s in (cell.interval_s, cell.longest_gap_s)),
            end_section=number + 1 == len(all_figures) or _cell(all_figures[number + 1]) != _cell(cell),
        )
    console.print(table)


def _cell(figures: MemoryFigures) -> tuple[str, int]:
    return figures.workload, figures.world_size


def _what(cell: StepFigures) -> str:
    return f"{cell.workload} ({cell.world_size} workers)"


def _number(value: float | None, factor: float = 1.0) -> str:
    return "" if value is None else three_digits(value * factor)


def _bystanders(figures: StepFigures) -> Bystanders:
    return Bystanders(figures.others_cores, figures.greediest)


def _by_place(all_figures: Iterable[StepFigures]) -> dict[str, list[StepFigures]]:
    """Cells with the same ranks, under a title."""
    places: dict[str, list[StepFigures]] = {}
    for cell in all_figures:
        cores = f"{cell.num_cores} core{'s' * (cell.num_cores > 1)}"
        where = f"on {cores}" if cell.num_hosts == 1 else f"on {cell.num_hosts} hosts"
        places.setdefault(f"{cell.world_size} worker{'s' * (cell.world_size > 1)} {where}", []).append(cell)
    return places


# -------------------------------------------------------------------------------------------------------------- JSON


def to_json(all_figures: Sequence[StepFigures] | Sequence[MemoryFigures]) -> str:
    """A list: what was measured, and what follows from it."""
    plain = [_step_to_plain(cell) if isinstance(cell, StepFigures) else _memory_to_plain(cell) for cell in all_figures]
    return json.dumps(plain, indent=2) + "\n"


def _step_to_plain(cell: StepFigures) -> dict[str, Any]:
    goal = goal_of(cell)
    return {
        **asdict(cell),
        "step_s": {variant: cell.step_s(variant) for variant in cell.turns_s},
        "speedup": cell.speedup,
        "speedup_min": min(cell.speedups, default=None),
        "speedup_max": max(cell.speedups, default=None),
        "cost": cell.cost,
        "per_parameter_s": cell.per_parameter_s,
        "wanted_speedup": goal.speedup,
        "wanted_cost": goal.cost,
        "is_reached": not goal.misses(cell) if goal.is_judged(cell) else None,
    }


def _memory_to_plain(cell: MemoryFigures) -> dict[str, Any]:
    named = {"building": cell.building._asdict(), "training": cell.training._asdict()}
    return {**asdict(cell), **named, "peak_bytes": cell.peak_bytes}


# ----------------------------------------------------------------------------------------------------------- picture

COLOURS = {"ours": "#1b2a52", "torch": "#e08a1e", "alone": "#c8ccd4"}
"""Of what is drawn; dark to light, so that they differ without colour too."""
BAR = 0.27
"""Width; a model's place is 1."""
HIGHEST = 3.0
"""Where a bar is cut, so that the others stay readable."""


def draw_plot(all_figures: Sequence[StepFigures], picture: Path) -> None:
    """Bars: a step relative to the same step without communication; a group for each model, a panel for each place.

    Whiskers go from the least to the greatest turn.

    Raises:
        ConfigError: nothing was measured beside "alone".
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    places = _by_place(cell for cell in all_figures if "alone" in cell.turns_s)
    if not places:
        raise ConfigError('nothing to draw: bars stand relative to the variant "alone"')
    size = (2.0 + 1.3 * max(3, *map(len, places.values())), 0.7 + 3.2 * len(places))
    figure, panels = pyplot.subplots(len(places), 1, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axes, (title, cells) in zip(panels[:, 0], places.items(), strict=True):
        _draw_panel(axes, cells)
        axes.set_title(title, fontsize=11, loc="left")
    labels = {
        **dict(zip(COLOURS, COLOURS, strict=True)),
        "torch": "torch's DDP on Gloo",
        "alone": "no communication (ms below)",
    }
    handles = [patches.Patch(color=COLOURS[name], label=labels[name]) for name in COLOURS]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.supylabel("step ÷ step without communication", fontsize=10)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def _draw_panel(axes: Any, cells: Sequence[StepFigures]) -> None:
    variants = [name for name in COLOURS if any(name in cell.turns_s for cell in cells)]
    for place, cell in enumerate(cells):
        for number, name in enumerate(variants):
            if name in cell.turns_s:
                _draw_bar(axes, place + (number - (len(variants) - 1) / 2) * BAR, cell, name)
    axes.axhline(1.0, color="0.35", lw=0.8, zorder=3)
    names = [f"{cell.workload}\n{_number(cell.step_s('alone'), 1e3)} ms" for cell in cells]
    axes.set_xticks(range(len(cells)), names, fontsize=9)
    axes.margins(y=0.12)  # room for what stands above a bar
    axes.set_xlim(-0.6, len(cells) - 0.4)
    axes.tick_params(length=0)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_bar(axes: Any, x: float, cell: StepFigures, variant: str) -> None:
    ratios = cell.ratios(variant, "alone")
    middle, top = statistics.median(ratios), min(max(ratios), 1.05 * HIGHEST)
    is_cut = middle > HIGHEST
    axes.bar(x, min(middle, HIGHEST), width=0.92 * BAR, color=COLOURS[variant])
    if variant == "alone":
        return
    if not is_cut:
        axes.vlines(x, min(ratios), top, color="0.5", lw=1.0, zorder=4)
    text, above = (f"↑ {middle:.2f}", HIGHEST) if is_cut else (f"{middle:.2f}", max(middle, top))
    place = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(text, (x, above), **place, fontsize=8, color="0.2", annotation_clip=False)
