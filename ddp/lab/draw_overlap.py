"""Draws how much of the reductions backward hides here: a step reduced in the background of backward, and after it."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.commands.registry import add_workers, parser_of, respond
from ddp.commands.schedules import add_picture, write_picture
from ddp.pictures.timeline import TITLE, Run, ended_s, svg_of, timeline_figure, timeline_text
from ddp.process.arguments import positive
from ddp.replica.bucketed import BucketedDataParallel
from ddp.run.launch import from_python

WIDTH, DEPTH, BATCH = 1024, 5, 64  # of the network whose step is drawn; samples of a rank
WARM_UP, NUM_STEPS = 3, 15


def main(words: Sequence[str]) -> int:
    """Trains a small network, and draws the timeline of a step."""
    parser = parser_of("draw overlap", description="Trains a small network, and draws the timeline of a step.")
    add_workers(parser)
    parser.add_argument(
        "--bucket-mb", type=positive, default=4.0, metavar="MB", help="size of a bucket, in MiB (default: %(default)s)"
    )
    add_picture(parser)
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the timeline, or what was drawn."""
    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise ValueError(f"cannot write {options.svg}: there is no such folder; name another file after --svg")
    rank = {"threads_per_worker": 1, "timeout_s": 300}
    measured = from_python.launch(overlap_here, options.bucket_mb, workers=options.workers, **rank)
    background, foreground, default = measured[0]
    if options.svg is not None:
        write_picture(options.svg, svg_of(timeline_figure(background, foreground), TITLE))
        return f"{options.svg}: a step of {options.workers} workers"
    text = timeline_text(background, foreground)
    return f"{text}\n\nBackward and reductions in ms. Here ddp reduces {default} by default."


def overlap_here(bucket_mb: float) -> Overlap:
    """Returns, as one rank of a new world, the timelines of a step."""
    measured = overlap(ddp.init(device="cpu"), bucket_mb=bucket_mb)
    ddp.shutdown()
    return measured


class Overlap(NamedTuple):
    """The timelines of two steps.

    Attributes:
        default: where the replica reduces here by default: "in the background" or "in the foreground".
    """

    background: Run
    foreground: Run
    default: str


def overlap(comm: Communicator, *, bucket_mb: float = 4.0) -> Overlap:
    """Trains a network for some steps in either way, and returns the step of median length. Collective."""
    runs = [_timeline(comm, bucket_mb=bucket_mb, overlap=overlap) for overlap in (True, False)]
    return Overlap(runs[0], runs[1], "in the background" if comm.plan.overlaps else "in the foreground")


def _timeline(comm: Communicator, *, bucket_mb: float, overlap: bool) -> Run:
    layers = OrderedDict[str, nn.Module]()
    for number in range(1, DEPTH + 1):
        layers[f"hidden{number}"], layers[f"relu{number}"] = nn.Linear(WIDTH, WIDTH), nn.ReLU()
    model = BucketedDataParallel(
        nn.Sequential(layers | {"output": nn.Linear(WIDTH, 10)}), bucket_cap_mb=bucket_mb, overlap=overlap, comm=comm
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, classes = torch.randn(BATCH, WIDTH), torch.randint(0, 10, (BATCH,))
    mine = []
    for _ in range(WARM_UP + NUM_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        mine.append(model.logging_data())
    steps = list(zip(*all_gather_object(comm, mine[WARM_UP:]), strict=True))
    lengths_s = [max(map(ended_s, step)) for step in steps]
    return steps[lengths_s.index(median_low(lengths_s))]
