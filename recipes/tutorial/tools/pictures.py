"""Draws the pictures of the read-along, recipes/tutorial/pictures/, from schedules and from what was measured.

    python -m recipes.tutorial.tools.pictures              draws all of them again, from the JSON files beside them
    python -m recipes.tutorial.tools.pictures --measure    measures first: minutes on a machine with nothing else to do

A JSON file says on what it was measured. Drawing is exact: the same files give the same bytes. A machine whose speed
drifts spoils a comparison, so the numbers of workers take turns. Other programs can only slow a round down, so the
fastest round counts; `scaling.svg` shows the median, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.cost import textbook
from ddp.collectives.simulate import Link, Network
from ddp.pictures.epoch import Epoch, epoch_svg
from ddp.pictures.schedule import svg
from ddp.pictures.svg import FAINT, PANEL, QUIET, line, marks, page, rect, text
from ddp.pictures.timeline import timeline_svg
from ddp.process.memory import available_cores
from ddp.units import format_size, format_time
from recipes.tutorial.tools.chart import Axis, Panel

FOLDER = Path(__file__).parent.parent / "pictures"


class Plan(NamedTuple):
    """Says with which numbers of workers something is measured, and in how many rounds."""

    workers: tuple[int, ...]
    num_rounds: int


PLANS = {"overlap": Plan((2,), 1), "costs": Plan((2,), 9), "scaling": Plan((1, 2, 3, 4), 7)}

# --- schedules -------------------------------------------------------------------------------------------------------


def schedule(name: str, num_ranks: int) -> str:
    """Returns the rounds of an all-reduce."""
    return svg(SCHEDULES[name], num_ranks, title=f"{name.replace('_', '-')}, {num_ranks} ranks")


# --- what was measured -----------------------------------------------------------------------------------------------


def overlap() -> str:
    """Returns the timeline of a step, in the background and in the foreground."""
    kept = measured("overlap")
    background, foreground, _ = kept["rounds"]["2"][0]
    return timeline_svg(background, foreground, title=f"One step of 2 workers on {kept['cores']} cores")


def costs() -> str:
    """Returns the time of all-reduces over their bytes, for few and for many ranks, by the formulas of the model."""
    kept = measured("costs")
    rounds = kept["rounds"]["2"]
    figures = min(rounds, key=lambda figures: figures["alpha_s"])
    link = Link(figures["alpha_s"], figures["beta_s"], figures["gap_s"])
    speed = f"α = {format_time(link.alpha_s)} for a message, 1/β = {1e-9 / link.beta_s:.2g} GB/s for each link."
    parts = [
        text(28, 34, "What an all-reduce costs: α for every message, β for every byte", size=20, weight="bold"),
        text(28, 54, f"By the formulas of ddp/collectives/cost.py. {speed}", size=12),
        text(
            28, 71, f"Two processes talk through sockets, the fastest of {len(rounds)} rounds, {place(kept)}.", size=12
        ),
    ]
    sizes = [2.0 ** (power / 2) for power in range(16, 61)]
    bytes_axis = Axis(sizes[0], sizes[-1], [2.0**power for power in (10, 20, 30)], lambda n: format_size(int(n)), True)
    time_axis = Axis(1e-4, 5e4, [10.0**power for power in range(-4, 6, 2)], _short_time, True)
    for number, num_ranks in enumerate((8, 10_000)):
        network = Network(tuple((rank,) for rank in range(num_ranks)), link, link, figures["gamma_s"])
        curves = {
            name: [(nbytes, textbook(key, int(nbytes), network) or 0.0) for nbytes in sizes]
            for name, key in {
                "ring": "ring",
                "tree": "tree",
                "butterfly": "butterfly",
                "master-worker": "master_worker",
                "recursive doubling": "recursive_doubling",
                "naive all-to-all": "naive_all_to_all",
            }.items()
        }
        panel = Panel(90 + 480 * number, 142, 270, 300, bytes_axis, time_axis)
        parts += panel.frame(f"{num_ranks:,} ranks", x_name="bytes of the buffer", y_name="time of an all-reduce")
        parts += [*panel.curves(curves), text(panel.left, 504, "the cheapest:", size=11), *panel.winners(curves, 511)]
    return page("What an all-reduce costs", 980, 552, parts)


def scaling() -> str:
    """Returns samples per second over the number of workers, beside what they would be without any loss."""
    kept = measured("scaling")
    rounds = {float(workers): speeds for workers, speeds in kept["rounds"].items()}
    curve = [(workers, max(speeds)) for workers, speeds in rounds.items()]
    (_, alone), (most, fastest), cores = curve[0], curve[-1], kept["cores"]
    top = most * alone * 1.05
    x_axis = Axis(0.6, most + 0.4, list(rounds), lambda workers: f"{workers:.0f}")
    panel = Panel(100, 122, 420, 340, x_axis, Axis(0.0, top, marks(top, 6), lambda speed: f"{speed:,.0f}"))
    counted = f"The fastest of {len(rounds[most])} rounds; bars: down to the median. {place(kept).capitalize()}."
    parts = [
        text(28, 34, "Samples per second over the number of workers", size=20, weight="bold"),
        text(28, 54, "Training of a small CNN, always 240 images in a step, which the workers share.", size=12),
        text(28, 71, counted, size=12),
    ]
    beyond, right, bottom = panel.at((cores + 0.5, 0.0))[0], panel.left + panel.width, panel.top + panel.height
    if beyond < right:
        parts += [
            rect(beyond, panel.top, right - beyond, panel.height, fill=PANEL, stroke="none"),
            text((beyond + right) / 2, bottom - 12, f"they share {cores} cores", size=11, anchor="middle"),
        ]
    ideal, last = panel.at((most, most * alone)), panel.at((most, fastest))
    parts += [
        *panel.frame("", x_name="workers", y_name="samples/s"),
        line([panel.at((1.0, alone)), ideal], stroke=FAINT, thickness=2, dash="6 4"),
        text(ideal[0] + 24, ideal[1] + 4, f"ideal: {most:.0f} × one worker", size=11, weight="bold", fill=QUIET),
        *panel.points(curve, [(median(speeds), max(speeds)) for speeds in rounds.values()]),
        text(last[0] + 24, last[1] + 4, "measured", size=11, weight="bold"),
    ]
    return page("Samples per second over the number of workers", 680, 520, parts)


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
    drawn = Epoch(file_sizes=[4] * 6, num_shards=3, global_batch=6, window=8)
    return epoch_svg(drawn, (1, 2, 3), title="An epoch of 6 files on 1, 2 and 3 workers")


# --- all of them -----------------------------------------------------------------------------------------------------

PICTURES: dict[str, Callable[[], str]] = {
    "ring.svg": partial(schedule, "ring", 4),
    "tree.svg": partial(schedule, "tree", 8),
    "butterfly.svg": partial(schedule, "butterfly", 8),
    "master_worker.svg": partial(schedule, "master_worker", 4),
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
