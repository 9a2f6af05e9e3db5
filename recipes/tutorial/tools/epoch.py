"""Draws an epoch that is dealt by files: which sample of which file is in which step, shard and worker.

    one panel for each number of workers: rows are the shards of the batch, columns the steps, colours the files

The panels have the same samples at the same places. What changes is who computes a row, and so who opens which files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddp.collectives.picture import FAINT, PANEL, QUIET, color_of
from ddp.data.orders.order import Blocks
from ddp.data.orders.sampler import StepPlan, sampler_of
from ddp.units import counted

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # names of files
INCHES = 0.36  # of a sample's cell
BETWEEN, LABELS = 0.6, 5  # cells from step to step, and for the names of rows


class _Files(Sequence[int]):
    """Samples in files."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.file_sizes = np.array(sizes)

    def __len__(self) -> int:
        return int(self.file_sizes.sum())

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index

    def place_of(self, sample: int) -> tuple[int, int]:
        """Returns the number of a sample's file, and its number in there."""
        file = int(np.searchsorted(np.cumsum(self.file_sizes), sample, side="right"))
        return file, sample - int(self.file_sizes[:file].sum())


class Epoch(NamedTuple):
    """Describes an epoch: files of these sizes, in steps of a global batch that is cut into shards."""

    file_sizes: Sequence[int]
    num_shards: int
    global_batch: int
    window: int

    def plans(self, rank: int, world_size: int) -> list[StepPlan]:
        """Returns what a worker reads in the first epoch, step by step."""
        sampler, _ = sampler_of(
            _Files(self.file_sizes),
            order=Blocks(self.file_sizes, window=self.window),
            sharding="file",
            global_batch=self.global_batch,
            rank=rank,
            world_size=world_size,
            num_shards=self.num_shards,
        )
        return list(sampler.plans())


def epoch_figure(epoch: Epoch, world_sizes: Sequence[int], *, title: str) -> Figure:
    """Returns a picture of the first epoch at several numbers of workers."""
    num_steps = len(epoch.plans(0, 1))
    step = -(-epoch.global_batch // epoch.num_shards) + BETWEEN
    width, height = LABELS + num_steps * step + len(epoch.file_sizes) + 1, 1.3 * epoch.num_shards + 1.5
    figure = Figure(figsize=(INCHES * width, INCHES * height * len(world_sizes) + 1.0), layout="constrained")
    counts = f"{counted(len(epoch.file_sizes), 'file')} of {epoch.file_sizes[0]} samples are dealt to "
    counts += (
        f"{counted(epoch.num_shards, 'shard')}; a colour is a file. Each step has the same samples, in the same shards."
    )
    figure.suptitle(f"{title}\n{counts}", x=0.01, ha="left", fontsize="medium")
    for axes, world_size in zip(figure.subplots(len(world_sizes), 1, squeeze=False)[:, 0], world_sizes, strict=True):
        axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        axes.set_axis_off()
        axes.text(0, 0.6, counted(world_size, "worker"), fontweight="bold")
        for number in range(num_steps):
            axes.text(LABELS + number * step, 0.6, f"step {number + 1}", color=QUIET, fontsize="small")
        for rank in range(world_size):
            _draw_worker(axes, epoch, rank, world_size, step)
    return figure


def _draw_worker(axes: Any, epoch: Epoch, rank: int, world_size: int, step: float) -> None:
    """Draws the rows of one worker, and what it opens."""
    first, end = (each * epoch.num_shards // world_size for each in (rank, rank + 1))
    above, below = 1.2 + 1.3 * first, 1.2 + 1.3 * end - 0.3
    plans, files, opened = epoch.plans(rank, world_size), _Files(epoch.file_sizes), set[int]()
    right = LABELS + len(plans) * step
    axes.add_patch(Rectangle((0, above - 0.12), right - BETWEEN + 0.3, below - above + 0.24, fc=PANEL, ec=FAINT))
    axes.text(0.3, above + 0.5, f"worker {rank}", fontweight="bold", va="center", fontsize="small")
    for shard in range(first, end):
        axes.text(3, 1.7 + 1.3 * shard, f"shard {shard}", color=QUIET, va="center", fontsize="small")
    for number, plan in enumerate(plans):
        for micro in plan.micros:
            for slot, sample in enumerate(micro.indices):
                file, place = files.place_of(sample)
                opened.add(file)
                _draw_cell(axes, LABELS + number * step + slot, 1.2 + 1.3 * micro.shard, epoch, file, f"{place}")
    axes.text(right + 0.3, (above + below) / 2 - 0.3, "opens the files", color=QUIET, va="center", fontsize="small")
    for place, file in enumerate(sorted(opened)):
        _draw_cell(axes, right + 0.3 + place, (above + below) / 2, epoch, file, "", height=0.7)


def _draw_cell(axes: Any, x: float, y: float, epoch: Epoch, file: int, number: str, *, height: float = 1.0) -> None:
    color = color_of(file, len(epoch.file_sizes))
    axes.add_patch(Rectangle((x, y), height, height, fc=color, ec=FAINT))
    words = f"{LETTERS[file]}{number}"
    axes.text(x + height / 2, y + height / 2, words, ha="center", va="center_baseline", fontsize="small")
