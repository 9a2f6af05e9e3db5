"""Which way an all-reduce should go: every way priced on the measured network, the cheapest first.

    way                     price
    "ring", "tree", …       the schedule, on the links as they were measured (`collectives/cost.py`)
    "shared_memory"         looked up among the times that were measured
    "shared_memory+ring"    a reduce-scatter and an all-gather in memory (measured); between them the schedule, played
                            by the ranks of every place on all hosts with that place's slice, all at once over the
                            hosts' links. Long buffers go piece by piece: memory works while the wire does

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
from ddp.collectives.simulate import SEGMENT_BYTES, Network, equal_hosts
from ddp.comm.calibrate import Measured
from ddp.comm.carrier import CROSSING_BYTES, IN_MEMORY

Order = Literal["any", "canonical"]
MEMORY_FIRST, PER_BUFFER_SENT = 0.95, 0.04  # prices are no better than that


@dataclass(frozen=True)
class Choice:
    """One way of an all-reduce, and what it is predicted to take.

    Attributes:
        name: as `algorithm=` takes it.
        predicted_s: the sum of what follows, where the transport's part counts `num_crossings` times.
        call_s: what a call costs before anything is done.
        in_memory_s: what shared memory takes, without what it does while the wire is busy.
        over_transport: what the transport carries, if it carries anything.
    """

    name: str
    predicted_s: float
    call_s: float = 0.0
    in_memory_s: float = 0.0
    over_transport: Carried | None = None
    num_crossings: int = 1


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
    """Every way of an all-reduce of `nbytes`, the cheapest first; of nearly equal ones, what asks less of one rank.

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
        if schedule is None:
            in_memory_s = _in_memory_s(nbytes, measured, hosts, allocated=allocated)
            choices.append(Choice(name, in_memory_s, in_memory_s=in_memory_s))
        elif name.startswith(IN_MEMORY):
            piece_s = _in_memory_s(nbytes // _num_pieces(nbytes), measured, hosts, allocated=allocated)
            crossing = _crossing(name, schedule, nbytes, network, segment_bytes)
            choices.append(_piece_by_piece(name, piece_s, crossing, nbytes, measured.mixed_call_s))
        else:
            carried = Carried(name, schedule, nbytes, network, segment_bytes)
            choices.append(Choice(name, measured.call_s + carried.price_s(), measured.call_s, over_transport=carried))
    return sorted(choices, key=lambda choice: (_handicapped_s(choice), choice.name))


def _handicapped_s(choice: Choice) -> float:
    """Where prices are nearly equal, memory goes first: it asks less of the processor, which no price knows. Then those
    that give every rank as much to do: a busy master is what everybody waits for, should a link be slower than it was.
    """
    burden, carried = 0.0, choice.over_transport
    if carried is not None:
        burden = volume(carried.schedule, 1, carried.network.num_ranks).bytes_sent
    return choice.predicted_s * (MEMORY_FIRST if choice.in_memory_s else 1.0) * (1.0 + PER_BUFFER_SENT * burden)


def _in_memory_s(nbytes: int, measured: Measured, hosts: Hosts, *, allocated: bool) -> float:
    if all(len(host) == 1 for host in hosts):
        return 0.0
    assert measured.shared is not None, "this way needs memory, which nobody has measured"
    return measured.shared.predict_s(nbytes, allocated=allocated)


def _crossing(name: str, schedule: Schedule, nbytes: int, network: Network, segment_bytes: int) -> Carried:
    """What the transport carries of one piece: a slice by the ranks of each place."""
    num_slices, num_hosts = min(map(len, network.hosts)), len(network.hosts)
    return Carried(
        name.removeprefix(f"{IN_MEMORY}+"),
        in_columns(schedule, network.hosts),
        nbytes // _num_pieces(nbytes),
        replace(network, hosts=equal_hosts(num_hosts * num_slices, num_slices)),
        segment_bytes,
    )


def _num_pieces(nbytes: int) -> int:
    """As `carrier.py` cuts them."""
    return max(1, nbytes // CROSSING_BYTES)


def _piece_by_piece(name: str, piece_s: float, crossing: Carried, nbytes: int, call_s: float) -> Choice:
    """While one piece crosses, memory works on the next: all but the first and the last half of it is hidden, unless
    memory is the slower one."""
    num_pieces, crossing_s = _num_pieces(nbytes), crossing.price_s()
    seen_s = piece_s + (num_pieces - 1) * max(0.0, piece_s - crossing_s)
    return Choice(name, call_s + seen_s + num_pieces * crossing_s, call_s, seen_s, crossing, num_pieces)


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
    parts, num_rounds, sent = {"calling": choice.call_s, "memory": choice.in_memory_s}, 0, "-"
    carried = choice.over_transport
    if carried is not None:
        parts |= {part: choice.num_crossings * seconds for part, seconds in carried.anatomy()._asdict().items()}
        num_rounds, num_bytes = volume(carried.schedule, carried.nbytes, carried.network.num_ranks)
        num_rounds *= choice.num_crossings
        sent = _size(num_bytes * choice.num_crossings)
    most = max(parts, key=lambda part: parts[part])
    share = f"{most.removesuffix('_s')} {100 * parts[most] / choice.predicted_s:.0f} %" if choice.predicted_s else "-"
    return choice.name, _time(choice.predicted_s), str(num_rounds), sent, share


def _time(seconds: float) -> str:
    unit, factor = next((u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if seconds * f >= 1 or u == "µs")
    return f"{seconds * factor:#.3g} {unit}"


def _size(num_bytes: float) -> str:
    unit, factor = next((u, f) for u, f in (("MB", 1 << 20), ("KB", 1 << 10), ("B", 1)) if num_bytes >= f or u == "B")
    return f"{num_bytes / factor:.3g} {unit}"
