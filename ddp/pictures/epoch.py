"""Draws an epoch that is dealt by files (SVG): which sample of which file is in which step, shard and worker.

    one panel for each number of workers: rows are the shards of the batch, columns the steps, colours the files

The panels have the same samples at the same places. What changes is who computes a row, and so who opens which files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ddp.data.orders.order import Blocks
from ddp.data.orders.sampler import sampler_of
from ddp.pictures.svg import FAINT, PANEL, QUIET, color_of, page, rect, text

MARGIN, LABELS, FILES = 28, 128, 210  # left of everything; names of rows; what a worker opens
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # names of files
HEADER, HEAD, CELL, GAP, ROW = 92, 34, 26, 16, 34  # title; a panel's title; a sample; between steps; a shard


class _Files(Sequence[int]):
    """Samples in files."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.file_sizes = np.array(sizes)

    def __len__(self) -> int:
        return int(self.file_sizes.sum())

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index

    def file_of(self, sample: int) -> int:
        """Returns the number of a sample's file."""
        return int(np.searchsorted(np.cumsum(self.file_sizes), sample, side="right"))


class Epoch(NamedTuple):
    """Describes an epoch: files of these sizes, in steps of a global batch that is cut into shards."""

    file_sizes: Sequence[int]
    num_shards: int
    global_batch: int
    window: int


def epoch_svg(epoch: Epoch, world_sizes: Sequence[int], *, title: str) -> str:
    """Returns a picture of the first epoch at several numbers of workers."""
    files = _Files(epoch.file_sizes)
    panel = HEAD + epoch.num_shards * ROW + 18
    steps = -(-len(files) // epoch.global_batch)
    shard = -(-epoch.global_batch // epoch.num_shards)
    width = MARGIN + LABELS + steps * (shard * CELL + GAP) + FILES
    height = HEADER + len(world_sizes) * panel + MARGIN
    parts = [*_heading(epoch, title)]
    for number, world_size in enumerate(world_sizes):
        parts += _panel(epoch, files, world_size, top=HEADER + number * panel, step_width=shard * CELL + GAP)
    return page(title, width, height, parts)


def _heading(epoch: Epoch, title: str) -> Iterator[str]:
    counts = f"{len(epoch.file_sizes)} files of {epoch.file_sizes[0]} samples are dealt to {epoch.num_shards} shards"
    yield text(MARGIN, 34, title, size=20, weight="bold")
    yield text(MARGIN, 54, f"{counts}; a colour is a file.", size=12)
    yield text(MARGIN, 71, "Each step has the same samples, in the same shards, at any number of workers.", size=12)


def _panel(epoch: Epoch, files: _Files, world_size: int, *, top: float, step_width: float) -> Iterator[str]:
    """Yields an epoch of one number of workers."""
    name = f"{world_size} worker" + "s" * (world_size > 1)
    yield text(MARGIN, top + 16, name, size=14, weight="bold")
    left = MARGIN + LABELS
    for step in range(-(-len(files) // epoch.global_batch)):
        yield text(left + step * step_width, top + 16, f"step {step + 1}", size=11, fill=QUIET)
    for rank in range(world_size):
        yield from _worker(epoch, files, rank, world_size, top=top + HEAD, left=left, step_width=step_width)


def _worker(
    epoch: Epoch, files: _Files, rank: int, world_size: int, *, top: float, left: float, step_width: float
) -> Iterator[str]:
    """Yields the rows of one worker, and what it opens."""
    order = Blocks(epoch.file_sizes, window=epoch.window)
    sampler, _ = sampler_of(
        files,
        order=order,
        sharding="file",
        global_batch=epoch.global_batch,
        rank=rank,
        world_size=world_size,
        num_shards=epoch.num_shards,
    )
    first, end = (each * epoch.num_shards // world_size for each in (rank, rank + 1))
    above, below = top + first * ROW, top + end * ROW - (ROW - CELL)
    plans, opened = list(sampler.plans()), set[int]()
    right = left + len(plans) * step_width
    yield rect(MARGIN, above - 4, right - GAP - MARGIN + 8, below - above + 8, fill=PANEL, stroke=FAINT)
    yield text(MARGIN + 8, above + 17, f"worker {rank}", size=12, weight="bold")
    for shard in range(first, end):
        yield text(MARGIN + 76, top + shard * ROW + 17, f"shard {shard}", size=11, fill=QUIET)
    for step, plan in enumerate(plans):
        for micro in plan.micros:
            for slot, sample in enumerate(micro.indices):
                file = files.file_of(sample)
                opened.add(file)
                x, y = left + step * step_width + slot * CELL, top + micro.shard * ROW
                number = sample - int(files.file_sizes[:file].sum())
                yield rect(x, y, CELL, CELL, fill=color_of(file, len(epoch.file_sizes)), stroke=FAINT)
                yield text(x + CELL / 2, y + 17, f"{LETTERS[file]}{number}", size=11, anchor="middle")
    yield text(right + 8, (above + below) / 2 - 6, "opens the files", size=11, fill=QUIET)
    for place, file in enumerate(sorted(opened)):
        x, y = right + 8 + place * CELL, (above + below) / 2
        yield rect(x, y, CELL - 6, CELL - 10, fill=color_of(file, len(epoch.file_sizes)), stroke=FAINT)
        yield text(x + (CELL - 6) / 2, y + 12, LETTERS[file], size=11, anchor="middle")
