"""Draws the pictures of the read-along, recipes/tutorial/pictures/, from schedules and from what was measured.

    python -m ddp.tutorial.pictures              draws all of them again, from the JSON files beside them
    python -m ddp.tutorial.pictures --measure    measures first; takes two minutes, best on a machine with nothing to do

A JSON file says on what it was measured. Drawing is exact: the same files give the same bytes.

Read before: `collectives/picture.py`, `measure.py`, `chart.py`. Read next: `launcher.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ddp.bench.place import available_cores
from ddp.bench.units import format_size, format_time
from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.cost import textbook
from ddp.collectives.picture import svg
from ddp.collectives.simulate import Link, Network
from ddp.replica.timeline_picture import timeline_svg
from ddp.svg import FAINT, PANEL, QUIET, line, marks, page, rect, text
from ddp.tutorial.chart import Axis, Panel

FOLDER = Path(__file__).parents[2] / "recipes" / "tutorial" / "pictures"
WORLDS = {"overlap": (2,), "costs": (2,), "scaling": (1, 2, 3, 4)}
"""By measurement, the numbers of workers that it is made with."""

# --- schedules -------------------------------------------------------------------------------------------------------


def schedule(name: str, num_ranks: int) -> str:
    """Returns the rounds of an all-reduce."""
    return svg(SCHEDULES[name], num_ranks, title=f"{name.replace('_', '-')}, {num_ranks} ranks")


# --- what was measured -----------------------------------------------------------------------------------------------


def overlap() -> str:
    """Returns the timeline of a step, in the background and in the foreground."""
    background, foreground, _ = measured("overlap")["2 workers"]
    return timeline_svg(background, foreground)


def costs() -> str:
    """Returns the time of all-reduces over their bytes, for few and for many ranks, by the formulas of the model."""
    kept = measured("costs")
    figures = kept["2 workers"]
    link = Link(figures["alpha_s"], figures["beta_s"], figures["gap_s"])
    parts = [
        text(28, 34, "What an all-reduce costs: α for every message, β for every byte", size=20, weight="bold"),
        text(28, 54, f"By the formulas of ddp/collectives/cost.py, at α = {format_time(link.alpha_s)} per message and "
             f"{1e-9 / link.beta_s:.2g} GB/s per link.", size=12),
        text(28, 71, f"α and β are those of two processes that talk through sockets ({place(kept)}).", size=12),
    ]  # fmt: skip
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
            }.items()
        }
        panel = Panel(90 + 480 * number, 142, 270, 300, bytes_axis, time_axis)
        parts += panel.frame(f"{num_ranks:,} ranks", x_name="bytes of the buffer", y_name="time of an all-reduce")
        parts += [*panel.curves(curves), text(panel.left, 504, "the cheapest:", size=11), *panel.winners(curves, 511)]
    return page("What an all-reduce costs", 980, 552, parts)


def scaling() -> str:
    """Returns samples per second over the number of workers, beside what they would be without any loss."""
    kept = measured("scaling")
    turns = {workers: kept[f"{workers} worker{'s' * (workers > 1)}"] for workers in WORLDS["scaling"]}
    curve = [(float(workers), median(speeds)) for workers, speeds in turns.items()]
    most, (_, alone), cores = curve[-1][0], curve[0], kept["cores"]
    top = most * alone * 1.05
    axis = Axis(0.0, top, marks(top, 6), lambda speed: f"{speed:,.0f}")
    panel = Panel(100, 122, 420, 340, Axis(0.6, most + 0.4, list(map(float, turns)), lambda n: f"{n:.0f}"), axis)
    beyond = panel.at((cores + 0.5, 0.0))[0]
    right = panel.left + panel.width
    x, y = panel.at(curve[-1])
    parts = [
        text(28, 34, "Samples per second over the number of workers", size=20, weight="bold"),
        text(28, 54, "Training of a small CNN, always 240 images in a step, which the workers share.", size=12),
        text(28, 71, f"Median of the turns; bars: the slowest and the fastest ({place(kept)}).", size=12),
    ]  # fmt: skip
    if beyond < right:
        middle, bottom = (beyond + right) / 2, panel.top + panel.height
        parts += [
            rect(beyond, panel.top, right - beyond, panel.height, fill=PANEL, stroke="none"),
            text(middle, bottom - 12, f"they share {cores} cores", size=11, anchor="middle"),
        ]
    ideal = [panel.at((n, n * alone)) for n in (1.0, most)]
    parts += [
        *panel.frame("", x_name="workers", y_name="samples/s"),
        line(ideal, stroke=FAINT, thickness=2, dash="6 4"),
        text(ideal[1][0] + 24, ideal[1][1] + 4, f"ideal: {most:.0f} × one worker", size=11, weight="bold", fill=QUIET),
        *panel.points(curve, [(min(speeds), max(speeds)) for speeds in turns.values()]),
        text(x + 24, y + 4, "measured", size=11, weight="bold"),
    ]  # fmt: skip
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


# --- all of them -----------------------------------------------------------------------------------------------------

PICTURES: dict[str, Callable[[], str]] = {
    "ring.svg": partial(schedule, "ring", 4),
    "tree.svg": partial(schedule, "tree", 8),
    "butterfly.svg": partial(schedule, "butterfly", 8),
    "master_worker.svg": partial(schedule, "master_worker", 4),
    "overlap.svg": overlap,
    "costs.svg": costs,
    "scaling.svg": scaling,
}


def measure(name: str) -> None:
    """Runs a measurement with each of its numbers of workers, and keeps what it prints."""
    import torch

    kept: dict[str, Any] = {
        "command": "python -m ddp.tutorial.pictures --measure",
        "cores": available_cores(),
        "torch": torch.__version__.partition("+")[0],
    }
    for workers in WORLDS[name]:
        ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        command = [sys.executable, "-m", *ranks, "-m", "ddp.tutorial.measure", name]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        kept[f"{workers} worker{'s' * (workers > 1)}"] = json.loads(said.splitlines()[-1], parse_float=_four_digits)
    (FOLDER / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _four_digits(number: str) -> float:
    return float(f"{float(number):.4g}")


def main(argv: Sequence[str]) -> None:
    """Draws all pictures; measures first if told so."""
    for name in WORLDS if "--measure" in argv else ():
        measure(name)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(FOLDER / name)


if __name__ == "__main__":
    main(sys.argv[1:])
