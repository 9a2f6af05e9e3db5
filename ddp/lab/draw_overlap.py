"""Draws how much of the reductions backward hides here: a step reduced in the background of backward, and after it."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from statistics import median_low

import torch
from torch import nn
from torch.nn import functional as F

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.commands.registry import parser_of, respond
from ddp.commands.schedules import add_picture, write_picture
from ddp.lab.ranks import add_workers, at_ranks
from ddp.lab.timeline import TITLE, Run, ended_s, svg_of, timeline_figure, timeline_text
from ddp.process.arguments import positive
from ddp.replica.bucketed import BucketedDataParallel

WIDTH, DEPTH, BATCH = 1024, 5, 64  # of the network whose step is drawn; samples of a rank
WARM_UP, NUM_STEPS = 3, 15


def main(words: Sequence[str]) -> int:
    """Trains a small network, and draws the timeline of a step."""
    parser = parser_of("draw overlap")
    add_workers(parser)
    about = "size of a bucket, in MiB (default: %(default)s)"
    parser.add_argument("--bucket-mb", type=positive, default=4.0, metavar="MB", help=about)
    add_picture(parser)
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the timeline, or what was drawn."""
    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise ValueError(f"cannot write {options.svg}: there is no such folder; name another file after --svg")
    measure = partial(overlap, bucket_mb=options.bucket_mb)
    background, foreground, default = at_ranks(measure, options.workers, timeout_s=300, device="cpu")
    if options.svg is not None:
        write_picture(options.svg, svg_of(timeline_figure(background, foreground), TITLE))
        return f"{options.svg}: a step of {options.workers} workers"
    text = timeline_text(background, foreground)
    return f"{text}\n\nBackward and reductions in ms. Here ddp reduces {default} by default."


Overlap = tuple[Run, Run, str]
"""A step in the background of backward, one in the foreground, and which of the two a replica does here by default."""


def overlap(comm: Communicator, *, bucket_mb: float = 4.0) -> Overlap:
    """Trains a network for some steps in either way, and returns the step of median length. Collective."""
    background, foreground = (_timeline(comm, bucket_mb=bucket_mb, overlap=overlap) for overlap in (True, False))
    return background, foreground, "in the background" if comm.plan.overlaps else "in the foreground"


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
