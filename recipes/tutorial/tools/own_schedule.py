"""The open exercise: an all-reduce of the reader's own is proven, priced, drawn, and trained with.

    python -m ddp exercise schedule my_module:chain

Prices are of one network, and stand beside those of ring and tree. They are simulated; where ten thousand ranks would
take too long, the simulated prices of 32, 64 and 128 ranks are continued: what a doubling adds grows by the same factor
at each doubling. For a ring or a chain that factor is 2, for a tree it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch.nn import functional as F

from ddp.collectives.catalog import SCHEDULES, add
from ddp.collectives.cost import about_messages
from ddp.collectives.schedule import Goal, Schedule, ScheduleError
from ddp.collectives.simulate import ELEMENT_BYTES, Link, Network, equal_hosts, repeats, simulate, whole_chunks
from ddp.comm.setup import init, shutdown
from ddp.pictures.schedule import svg
from ddp.replica.bucketed import BucketedDataParallel
from ddp.units import counted, format_time
from recipes.tutorial.tools.mistake import Mistake, raised

MOST_PROVEN, MOST_PRICED, DRAWN, TRAINED = 64, 10_000, 4, 3  # ranks
NUM_STEPS = 20
SMALL, LARGE = 4 << 10, 25 << 20  # bytes
SIMULATED_EVENTS = 100_000  # rounds of all ranks, the idle ones included, or messages; more would take many seconds
Train = Callable[[Callable[[Schedule], list[float]], Schedule], list[list[float]]]


def open_exercise(name: str, schedule: Schedule, module: ModuleType, *, train: Train) -> Iterator[str]:
    """Checks a schedule of the reader's own, and uses it.

    Args:
        name: its address, MODULE:NAME.
        module: the reader's file.
        train: runs a function of the schedule on `TRAINED` workers, and returns its results by rank.
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
    losses = train(trained, schedule)[0]
    yield (
        f"trained for {NUM_STEPS} steps on {TRAINED} workers: the replicas are equal bit by bit, "
        f"and the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    with mistakes_with(MOST_PRICED, module):  # it is not proven for so many, and may end in anything
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
    yield "  ".join(["bytes".rjust(width), *(f"{_size(nbytes):>10}" for _, nbytes in columns)])
    continued = False
    for label, priced in ((name, schedule), ("ring", SCHEDULES["ring"]), ("tree", SCHEDULES["tree"])):
        cells = []
        for num_ranks, nbytes in columns:
            if _can_be_simulated(priced, num_ranks):
                cells.append(f"{format_time(_simulated(priced, nbytes, num_ranks)):>10}")
            else:
                cells.append(f"{'≈ ' + format_time(_continued(priced, nbytes, num_ranks)):>10}")
                continued = True
        yield "  ".join([label.ljust(width), *cells])
    if continued:
        yield "≈: continued from 32, 64 and 128 ranks, because a simulation would take too long"


def _can_be_simulated(schedule: Schedule, num_ranks: int) -> bool:
    num_rounds = sum(1 for _ in schedule.algorithm(0, num_ranks))
    if num_rounds == 0:
        raise ScheduleError(f"{num_ranks} ranks, rank 0 has no round: nobody sends anything")
    num_events = max(num_rounds * num_ranks, about_messages(schedule, num_ranks))
    return num_events <= SIMULATED_EVENTS or repeats(schedule, equal_hosts(num_ranks, 1))


def _simulated(schedule: Schedule, nbytes: int, num_ranks: int) -> float:
    link = Link(20e-6, 8 / 10e9)
    network = Network(hosts=equal_hosts(num_ranks, 1), inside=link, between=link, gamma_s=1 / 10e9)
    numel = whole_chunks(nbytes // ELEMENT_BYTES, schedule.num_chunks(num_ranks))  # so that one rank can stand for all
    return simulate(schedule, network, numel).makespan_s


def _continued(schedule: Schedule, nbytes: int, num_ranks: int) -> float:
    """Returns the seconds with many ranks, from those with few."""
    schedule.check(128)  # more than it has been proven for
    small, medium, large = (_simulated(schedule, nbytes, few) for few in (32, 64, 128))
    growth = max(1.0, (large - medium) / max(medium - small, 1e-12))
    doublings = math.log2(num_ranks / 128)
    times = doublings if growth < 1.001 else growth * (growth**doublings - 1) / (growth - 1)
    return large + (large - medium) * times


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20}MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10}KiB"
