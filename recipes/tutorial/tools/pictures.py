"""Draws the pictures of the read-along, recipes/tutorial/pictures/, from schedules and from what was measured.

    python -m recipes.tutorial.tools.pictures              draws all of them again, from the JSON files beside them
    python -m recipes.tutorial.tools.pictures --measure    measures first: minutes on a machine with nothing else to do

A JSON file says on what it was measured. A machine whose speed
drifts spoils a comparison, so the numbers of workers take turns. Other programs can only slow a round down, so the
fastest round counts; `scaling.svg` shows the median, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from ddp.collectives.all_to_all import schedule_over_shards
from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.cost import Link, Network, textbook
from ddp.collectives.picture import FAINT, INK, PANEL, svg
from ddp.collectives.schedule import Goal
from ddp.lab.timeline import svg_of, timeline_figure
from ddp.process.memory import available_cores
from ddp.units import format_size, format_time
from recipes.tutorial.tools.epoch import Epoch, epoch_figure

FOLDER = Path(__file__).parent.parent / "pictures"
HEADING: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": "medium"}


class Plan(NamedTuple):
    """Says with which numbers of workers something is measured, and in how many rounds."""

    workers: tuple[int, ...]
    num_rounds: int


PLANS = {"overlap": Plan((2,), 1), "costs": Plan((2,), 9), "scaling": Plan((1, 2, 3, 4), 7)}

# --- schedules -------------------------------------------------------------------------------------------------------


def schedule(name: str, num_ranks: int) -> str:
    """Returns the rounds of an all-reduce."""
    return svg(SCHEDULES[name], num_ranks, title=f"{name.replace('_', '-')}, {num_ranks} ranks")


def shards(num_shards: int, num_ranks: int) -> str:
    """Returns the rounds of an all-reduce over the shards of a batch."""
    over_shards = schedule_over_shards(num_shards, Goal.ALL_REDUCE)
    return svg(over_shards, num_ranks, title=f"{num_shards} shards, {num_ranks} ranks")


# --- what was measured -----------------------------------------------------------------------------------------------


def overlap() -> str:
    """Returns the timeline of a step, in the background and in the foreground."""
    kept = measured("overlap")
    background, foreground, _ = kept["rounds"]["2"][0]
    title = f"One step of 2 workers on {kept['cores']} cores"
    return svg_of(timeline_figure(background, foreground, title=title), title)


COLORS = ("#1b2a52", "#b8690b", "#2b8563", "#b3243b", "#3b78b8", "#6d4b9e")
CURVES = {
    "ring": "ring",
    "tree": "tree",
    "butterfly": "butterfly",
    "master-worker": "master_worker",
    "recursive doubling": "recursive_doubling",
    "naive all-to-all": "naive_all_to_all",
}


def costs() -> str:
    """Returns the time of all-reduces over their bytes, for few and for many ranks, by the formulas of the model."""
    kept = measured("costs")
    rounds = kept["rounds"]["2"]
    figures = min(rounds, key=lambda figures: figures["alpha_s"])
    link = Link(figures["alpha_s"], figures["beta_s"], figures["gap_s"])
    title = "What an all-reduce costs: α for every message, β for every byte"
    speed = f"α = {format_time(link.alpha_s)} for a message, 1/β = {1e-9 / link.beta_s:.2g} GB/s for each link"
    figure = Figure(figsize=(11, 5.8), layout="constrained")
    figure.suptitle(
        f"{title}\nBy the formulas of ddp/collectives/cost.py: {speed}.\n"
        f"Two processes talk through sockets, the fastest of {len(rounds)} rounds, {place(kept)}.",
        **HEADING,
    )
    panels = figure.subplots(2, 2, sharex=True, height_ratios=(12, 1))
    sizes = [2.0 ** (power / 2) for power in range(16, 61)]
    for number, num_ranks in enumerate((8, 10_000)):
        network = Network(tuple((rank,) for rank in range(num_ranks)), link, link, figures["gamma_s"])
        curves = {name: [textbook(key, int(size), network) or 0.0 for size in sizes] for name, key in CURVES.items()}
        _draw_curves(panels[0, number], sizes, curves)
        panels[0, number].set_title(f"{num_ranks:,} ranks", loc="left", fontweight="bold")
        _draw_cheapest(panels[1, number], sizes, curves)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return svg_of(figure, "What an all-reduce costs")


def _draw_curves(axes: Any, sizes: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    for (name, times_s), color in zip(curves.items(), COLORS, strict=True):
        axes.plot(sizes, times_s, color=color, label=name, linewidth=2)
    axes.set(xscale="log", yscale="log", ylim=(1e-4, 5e4), ylabel="time of an all-reduce")
    axes.set_yticks([10.0**power for power in range(-4, 6, 2)])
    axes.yaxis.set_major_formatter(lambda seconds, _: _short_time(seconds))
    axes.grid(color="#e2e8f0")
    _plain(axes)


def _draw_cheapest(axes: Any, sizes: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    """Draws a band that says which curve is the lowest where."""
    names = list(curves)
    lowest = [min(names, key=lambda name: curves[name][place]) for place in range(len(sizes))]
    begins = [place for place, name in enumerate(lowest) if place == 0 or name != lowest[place - 1]]
    for begin, end in pairwise([*begins, len(lowest) - 1]):
        left, right, name = sizes[begin], sizes[end], lowest[begin]
        axes.broken_barh([(left, right - left)], (0, 1), color=COLORS[names.index(name)], edgecolor="white")
        if 2.0 ** len(name) < (right / left) ** 2:  # room for its name
            words = {"ha": "center", "va": "center", "color": "white", "fontsize": "small"}
            axes.text((left * right) ** 0.5, 0.5, name, **words)
    ticks = [2.0**power for power in (10, 20, 30)]
    axes.set(ylim=(0, 1), yticks=[], xlabel="bytes of the buffer, and the cheapest all-reduce")
    axes.set_xticks(ticks, [format_size(int(tick)) for tick in ticks])
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)


def scaling() -> str:
    """Returns samples per second over the number of workers, beside what they would be without any loss."""
    kept = measured("scaling")
    cores, rounds = kept["cores"], {int(workers): speeds for workers, speeds in kept["rounds"].items()}
    workers, fastest = list(rounds), [max(speeds) for speeds in rounds.values()]
    medians, most = [median(speeds) for speeds in rounds.values()], workers[-1]
    title = "Samples per second over the number of workers"
    figure = Figure(figsize=(7.2, 5.4), layout="constrained")
    figure.suptitle(
        f"{title}\nTraining of a small CNN, always 240 images in a step, which the workers share.\n"
        f"The fastest of {len(rounds[most])} rounds; bars: down to the median. {place(kept).capitalize()}.",
        **HEADING,
    )
    axes = figure.subplots()
    if cores < most:
        axes.axvspan(cores + 0.5, most + 0.4, color=PANEL)
        axes.text((cores + most + 0.9) / 2, 0, f"they share {cores} cores\n", ha="center", fontsize="small")
    axes.plot(
        [1, most], [fastest[0], most * fastest[0]], color=FAINT, ls="--", lw=2, label=f"ideal: {most} × one worker"
    )
    axes.vlines(workers, medians, fastest, color=INK)
    axes.plot(workers, fastest, "o-", color=COLORS[0], lw=2, label="measured")
    for number, speed in zip(workers, fastest, strict=True):
        axes.annotate(f"{speed:,.0f}", (number, speed), (6, -14), textcoords="offset points", fontweight="bold")
    axes.set(xlim=(0.6, most + 0.4), ylim=(0, most * fastest[0] * 1.05), xlabel="workers", ylabel="samples/s")
    axes.set_xticks(workers)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="#e2e8f0")
    axes.legend(frameon=False, loc="upper left")
    _plain(axes)
    return svg_of(figure, title)


def _short_time(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:,.0f} s"


def measured(name: str) -> dict[str, Any]:
    """Returns what is kept of a measurement."""
    kept: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return kept


def place(kept: dict[str, Any]) -> str:
    """Says on what something was measured."""
    return f"measured on {kept['cores']} cores, torch {kept['torch']}"


# --- an epoch --------------------------------------------------------------------------------------------------------


def epoch() -> str:
    """Draws chapter 14's epoch of six files."""
    drawn, title = Epoch([4] * 6, num_shards=3, global_batch=6, window=8), "An epoch of 6 files on 1, 2 and 3 workers"
    return svg_of(epoch_figure(drawn, (1, 2, 3), title=title), title)


# --- all of them -----------------------------------------------------------------------------------------------------

PICTURES: dict[str, Callable[[], str]] = {
    "ring.svg": partial(schedule, "ring", 4),
    "tree.svg": partial(schedule, "tree", 8),
    "butterfly.svg": partial(schedule, "butterfly", 8),
    "master_worker.svg": partial(schedule, "master_worker", 4),
    "shards.svg": partial(shards, 8, 3),
    "overlap.svg": overlap,
    "costs.svg": costs,
    "scaling.svg": scaling,
    "epoch.svg": epoch,
}


def measure(name: str) -> None:
    """Runs a measurement with each of its numbers of workers, and keeps what it prints."""
    import torch

    plan = PLANS[name]
    rounds: dict[str, list[Any]] = {str(workers): [] for workers in plan.workers}
    for workers in plan.workers * plan.num_rounds:
        ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        command = [sys.executable, "-m", *ranks, "-m", "recipes.tutorial.tools.measure", name]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        rounds[str(workers)].append(json.loads(said.splitlines()[-1], parse_float=_four_digits))
    kept = {
        "command": "python -m recipes.tutorial.tools.pictures --measure",
        "cores": available_cores(),
        "torch": torch.__version__.partition("+")[0],
        "rounds": rounds,
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _four_digits(number: str) -> float:
    return float(f"{float(number):.4g}")


def main(argv: Sequence[str]) -> None:
    """Draws all pictures; measures first if told so."""
    for name in PLANS if "--measure" in argv else ():
        measure(name)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main(sys.argv[1:])
