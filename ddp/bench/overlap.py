"""Measures how much of the reductions backward hides: a step in the background of backward, and in the foreground."""

from __future__ import annotations

from collections import OrderedDict
from statistics import median_low
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.pictures.timeline import Run, ended_s
from ddp.replica.bucketed import BucketedDataParallel

WIDTH, DEPTH, BATCH = 1024, 5, 64  # of the network whose step is drawn; samples of a rank
WARM_UP, NUM_STEPS = 3, 15


class Overlap(NamedTuple):
    """The timelines of two steps.

    Attributes:
        default: what the replica does here if it is not told: "in the background" or "in the foreground".
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
