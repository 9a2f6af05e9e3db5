"""The open exercise: an all-reduce of the reader's own is proven, priced, drawn, and trained with.

    scripts/ddp exercise schedule my_module:chain

Prices are of one network, simulated, and stand beside those of ring and tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch.nn import functional as F

from ddp.collectives.catalog import SCHEDULES, add, own_all_reduce
from ddp.collectives.schedule import Goal, Schedule, ScheduleError
from ddp.collectives.simulate import ELEMENT_BYTES, Link, Network, equal_hosts, simulate, whole_chunks
from ddp.comm.session import init, shutdown
from ddp.pictures.schedule import svg
from ddp.process.invocation import program
from ddp.replica.bucketed import BucketedDataParallel
from ddp.run.launch.command_line import launch
from ddp.run.settings.address import from_address, is_address
from ddp.units import counted, format_size, format_time
from recipes.tutorial.tools.mistake import Mistake, raised

MOST_PROVEN, MOST_PRICED, DRAWN, TRAINED = 64, 128, 4, 3  # ranks
NUM_STEPS = 20
SMALL, LARGE = 4 << 10, 25 << 20  # bytes


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
        raise Mistake(name, f"is no all-reduce, but one where {schedule.goal.value}")
    for num_ranks in range(1, MOST_PROVEN + 1):
        with mistakes_with(num_ranks, module):
            schedule.check(num_ranks)
    yield f"proven for 1 to {MOST_PROVEN} ranks: every contribution once, no deadlock, the same bits on every rank"
    picture = Path(f"{name.partition(':')[2]}.svg")
    title = f"{name}, {DRAWN} ranks"
    try:
        picture.write_text(svg(schedule, DRAWN, title=title), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {picture}: {error.strerror}; go to a folder where you may write") from error
    yield f"drawn with {DRAWN} ranks: {picture}"
    losses = launch(trained, schedule, workers=TRAINED, threads_per_worker=1, timeout_s=60)[0]
    yield (
        f"trained for {NUM_STEPS} steps on {TRAINED} workers: the replicas are equal bit by bit, "
        f"and the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    with mistakes_with(MOST_PRICED, module):
        schedule.check(MOST_PRICED)  # more than it has been proven for
        yield "\n".join(["priced, at 20 µs and 10 Gbit/s between ranks:", *_prices(name, schedule)])


@contextmanager
def mistakes_with(num_ranks: int, module: ModuleType) -> Iterator[None]:
    """Turns what a schedule does wrong with so many ranks into the reader's mistake."""
    step = f"with {counted(num_ranks, 'rank')}"
    try:
        yield
    except ScheduleError as error:
        mistake = raised(step, error, module)
        raise mistake or Mistake(step, str(error).removeprefix(f"{num_ranks} ranks, ")) from None


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


def _prices(name: str, schedule: Schedule) -> Iterator[str]:
    """Yields the lines of a table: seconds of the reader's schedule, of the ring and of the tree."""
    columns = [(num_ranks, nbytes) for num_ranks in (8, MOST_PRICED) for nbytes in (SMALL, LARGE)]
    width = max(len(name), len("ranks"))
    yield "  ".join(["ranks".rjust(width), *(f"{num_ranks:>10,}" for num_ranks, _ in columns)])
    yield "  ".join(["bytes".rjust(width), *(f"{format_size(nbytes):>10}" for _, nbytes in columns)])
    for label, priced in ((name, schedule), ("ring", SCHEDULES["ring"]), ("tree", SCHEDULES["tree"])):
        cells = [f"{format_time(_simulated(priced, nbytes, num_ranks)):>10}" for num_ranks, nbytes in columns]
        yield "  ".join([label.ljust(width), *cells])
    yield f"with more ranks: {program()} simulate {name} 1000"


def _simulated(schedule: Schedule, nbytes: int, num_ranks: int) -> float:
    link = Link(20e-6, 8 / 10e9)
    network = Network(hosts=equal_hosts(num_ranks, 1), inside=link, between=link, gamma_s=1 / 10e9)
    numel = whole_chunks(nbytes // ELEMENT_BYTES, schedule.num_chunks(num_ranks))  # so that one rank can stand for all
    return simulate(schedule, network, numel).makespan_s
