"""The open exercise: an all-reduce of the reader's own is proven, and trained with.

    scripts/ddp exercise schedule my_module:chain

The commands `draw`, `simulate` and `train` take it, too, and are named at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch.nn import functional as F

from ddp.collectives.catalog import add, own_all_reduce
from ddp.collectives.schedule import Goal, Schedule, ScheduleError
from ddp.comm.session import init, shutdown
from ddp.process.arguments import program
from ddp.replica.bucketed import BucketedDataParallel
from ddp.run.launch.from_python import launch
from ddp.run.settings.address import from_address, is_address
from ddp.units import counted
from recipes.tutorial.tools.mistake import Mistake, raised

MOST_PROVEN, TRAINED = 64, 3  # ranks
NUM_STEPS = 20


def of_address(name: str) -> tuple[Schedule, ModuleType]:
    """Returns the reader's schedule and file.

    Args:
        name: its address, MODULE:NAME.
    """
    if not is_address(name):
        raise ValueError(f"schedule {name!r}: give the address of an all-reduce of yours, e.g. my_module:chain")
    schedule = own_all_reduce(from_address(name, key="schedule", folder=Path.cwd()))
    return schedule, sys.modules[name.partition(":")[0]]


def open_exercise(name: str, schedule: Schedule, module: ModuleType) -> Iterator[str]:
    """Checks a schedule of the reader's own, and uses it.

    Args:
        name: its address, MODULE:NAME.
        module: the reader's file.
    """
    if schedule.goal is not Goal.ALL_REDUCE:
        raise Mistake(name, f"is not an all-reduce: its goal is that {schedule.goal.value}")
    for num_ranks in range(1, MOST_PROVEN + 1):
        try:
            schedule.check(num_ranks)
        except ScheduleError as error:
            step, says = f"with {counted(num_ranks, 'rank')}", str(error).removeprefix(f"{num_ranks} ranks, ")
            raise raised(step, error, module) or Mistake(step, says) from None
    yield f"proven for 1 to {MOST_PROVEN} ranks: every contribution once, no deadlock, the same bits on every rank"
    losses = launch(trained, schedule, workers=TRAINED, threads_per_worker=1, timeout_s=60)[0]
    yield (
        f"trained for {NUM_STEPS} steps on {TRAINED} workers: the replicas are equal bit by bit, "
        f"and the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}"
    )


def what_next(name: str) -> str:
    """Returns the commands that take the reader's schedule as they take the library's."""
    picture = f"{name.partition(':')[2]}.svg"
    return "\n".join(
        [
            f"draw it: {program()} draw {name} 4 --svg {picture}",
            f"price it, as you can price the ring: {program()} simulate {name} 100",
            f"train with it: {program()} train comm.algorithm={name}",
        ]
    )


def trained(schedule: Schedule) -> list[float]:
    """Trains a small net as one of several ranks; returns the loss before each step.

    Raises:
        ReplicaMismatch: the replicas are not equal afterwards.
    """
    add("of_the_reader", schedule)
    comm = init(algorithm="of_the_reader")
    torch.manual_seed(comm.rank)
    net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    replica = BucketedDataParallel(net, comm=comm)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.5)
    points = torch.randn(64, 2)
    inside = (points.norm(dim=1) < 1).long()
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(replica(points), inside)
        loss.backward()
        optimizer.step()
        losses.append(comm.all_reduce(loss.detach().clone(), "mean").item())
    replica.verify_replicas()
    shutdown()
    return losses
