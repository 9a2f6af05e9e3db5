"""Which way an all-reduce should go: every way priced on the measured network, the cheapest first.

    way                     price
    "ring", "tree", …       the schedule, on the links as they were measured (`collectives/cost.py`)
    "shared_memory"         looked up among the times that were measured
    "shared_memory+ring"    a reduce-scatter and an all-gather in memory (measured); between them the schedule, played
                            by the ranks of every place on all hosts with that place's slice, all at once over the
                            hosts' links

The ranks must agree without asking each other: a ranking is a pure function of numbers that all of them have, made by
additions, multiplications and comparisons alone, whose results are the same bits on every machine (logarithms are not).
Equal prices are ordered by name.

Read before: `calibrate.py`. Read next: `Communicator.explain`, `Communicator.choose`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from ddp.collectives.cost import Anatomy, anatomy, price, volume
from ddp.collectives.placed import Hosts, placed
from ddp.collectives.schedule import Expression, Round, Schedule, canonical
from ddp.collectives.simulate import SEGMENT_BYTES, Network
from ddp.comm.calibrate import Measured

Order = Literal["any", "canonical"]
IN_MEMORY = "shared_memory"


@dataclass(frozen=True)
class Choice:
    """One way of an all-reduce, and what it is predicted to take.

    Attributes:
        name: as `algorithm=` takes it.
        predicted_s: `in_memory_s`, the price of `over_transport`, and what a call costs by itself.
        in_memory_s: the part that is spent in shared memory.
        over_transport: the part that the transport carries, if any.
    """

    name: str
    predicted_s: float
    in_memory_s: float = 0.0
    over_transport: Carried | None = None


@dataclass(frozen=True)
class Carried:
    """What the transport is to carry."""

    name: str
    schedule: Schedule
    nbytes: int
    network: Network
    segment_bytes: int

    def price_s(self) -> float:
        return price(self.name, self.schedule, self.nbytes, self.network, segment_bytes=self.segment_bytes)

    def anatomy(self) -> Anatomy:
        return anatomy(self.name, self.schedule, self.nbytes, self.network, segment_bytes=self.segment_bytes)


def rank_choices(
    nbytes: int,
    ways: Mapping[str, Schedule | None],
    measured: Measured,
    *,
    hosts: Hosts,
    allocated: bool = False,
    order: Order = "any",
    segment_bytes: int = SEGMENT_BYTES,
) -> list[Choice]:
    """Every way of an all-reduce of `nbytes`, the cheapest first.

    Args:
        ways: by name, the schedule that runs over the transport, if any.
        hosts: the ranks of every host.
        allocated: the tensor lies in memory that the ranks of a host share.
        order: "canonical" leaves out every way whose additions are not those of `schedule.canonical`.
        segment_bytes: the executor's.
    """
    network = replace(measured.network, hosts=hosts)
    choices = []
    for name, schedule in ways.items():
        if order == "canonical" and not is_canonical(name, schedule, hosts):
            continue
        in_memory_s, carried = 0.0, None
        if name.startswith(IN_MEMORY) and any(len(host) > 1 for host in hosts):
            assert measured.shared is not None, f"{name} without measured memory"
            in_memory_s = measured.shared.predict_s(nbytes, allocated=allocated)
        if schedule is not None:
            carried = _carried(name, schedule, nbytes, network, segment_bytes)
        predicted_s = measured.call_s + in_memory_s + (carried.price_s() if carried else 0.0)
        choices.append(Choice(name, predicted_s, in_memory_s, carried))
    return sorted(choices, key=lambda choice: (choice.predicted_s, choice.name))


def _carried(name: str, schedule: Schedule, nbytes: int, network: Network, segment_bytes: int) -> Carried:
    """The whole buffer by all ranks; or, after a reduce-scatter in memory, a slice by the ranks of each place."""
    if not name.startswith(IN_MEMORY):
        return Carried(name, schedule, nbytes, network, segment_bytes)
    columns = in_columns(schedule, network.hosts)
    num_slices = min(map(len, network.hosts))
    hosts = tuple(tuple(range(h * num_slices, (h + 1) * num_slices)) for h in range(len(network.hosts)))
    return Carried(name.removeprefix(f"{IN_MEMORY}+"), columns, nbytes, replace(network, hosts=hosts), segment_bytes)


@lru_cache(maxsize=256)
def in_columns(schedule: Schedule, hosts: Hosts) -> Schedule:
    """`schedule` among the ranks of each place on all hosts, each with its slice of the buffer, all at once.

    As many ranks of every host take part as the smallest has; they are renumbered host by host.
    """
    num_hosts, num_slices = len(hosts), min(map(len, hosts))
    each = schedule.num_chunks(num_hosts)

    def algorithm(rank: int, num_ranks: int) -> Iterator[Round]:
        place = rank % num_slices
        column = range(place, num_ranks, num_slices)
        return placed(schedule, rank, ranks=column, chunks=range(place * each, (place + 1) * each))

    return Schedule(algorithm, schedule.goal, lambda num_ranks: num_slices * each)


# --- the order of additions ------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def is_canonical(name: str, schedule: Schedule | None, hosts: Hosts) -> bool:
    """Whether this way adds up every element as the canonical binary tree over the ranks."""
    num_ranks = sum(map(len, hosts))
    if not name.startswith(IN_MEMORY):
        return schedule is not None and schedule.check(num_ranks).canonical
    inside = [_renamed(canonical(len(host)), host) for host in hosts]  # the order that `host_reduce.py` promises
    if schedule is None:
        return inside == [canonical(num_ranks)]
    between = schedule.check(len(hosts)).expressions
    return {_renamed(expression, inside) for expression in between} == {canonical(num_ranks)}


def _renamed(expression: Expression, names: Sequence[Expression]) -> Expression:
    """The expression with another one in the place of each leaf."""
    if isinstance(expression, int):
        return names[expression]
    return _renamed(expression[0], names), _renamed(expression[1], names)


# --- for a reader ----------------------------------------------------------------------------------------------------


def explain(nbytes: int, choices: Sequence[Choice]) -> str:
    """The ranking as a table: what each way is predicted to take, what it moves, and what most of its time is.

    1  shared_memory          1.41 ms       0            -  memory 100 %
    2  ring                   38.7 ms       6      37.5 MB  bytes 93 %
    """
    rows = [("", "way", "predicted", "rounds", "sent by a rank", "most of it")]
    rows += [(str(number), *_row(choice)) for number, choice in enumerate(choices, start=1)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, way, *figures, most in rows:
        cells = [number.rjust(widths[0]), way.ljust(widths[1])]
        cells += [text.rjust(width) for text, width in zip(figures, widths[2:], strict=False)]
        lines.append("  ".join([*cells, most]))
    return "\n".join([f"all-reduce of {nbytes:,} bytes; auto takes the first", *lines])


def _row(choice: Choice) -> tuple[str, str, str, str, str]:
    parts, num_rounds, sent = {"memory": choice.in_memory_s}, 0, "-"
    carried = choice.over_transport
    if carried is not None:
        parts |= carried.anatomy()._asdict()
        num_rounds, num_bytes = volume(carried.schedule, carried.nbytes, carried.network.num_ranks)
        sent = _size(num_bytes)
    most = max(parts, key=lambda part: parts[part])
    share = f"{most.removesuffix('_s')} {100 * parts[most] / choice.predicted_s:.0f} %" if choice.predicted_s else "-"
    return choice.name, _time(choice.predicted_s), str(num_rounds), sent, share


def _time(seconds: float) -> str:
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if seconds * f >= 1 or u == "µs")
    return f"{seconds * factor:#.3g} {unit}"


def _size(num_bytes: float) -> str:
    unit, factor = next((u, f) for u, f in (("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)) if num_bytes >= f or u == "B")
    return f"{num_bytes / factor:.3g} {unit}"
