"""`algorithm="auto"`: which route an all-reduce takes.

    one host, memory shared     "shared_memory", at once: it is faster than every schedule at every size
    one host's GPUs             "shared_memory" for what `allocate` has given, if the ranks were told to share memory
                                "all_to_all", at once: each reaches every other, and two rounds are the fewest
    anything else               the model predicts what every route costs; the cheapest routes are timed, as many as fit
                                into `TRIAL_S`; the fastest one is taken

    way                         prediction
    "ring", "tree", …           the schedule, simulated on the measured links (`collectives/cost.py`)
    "shared_memory"             looked up among the times that calibration measured
    "shared_memory+ring"        an all-reduce in memory (looked up); between its halves the schedule, run by the ranks
                                of every place on all hosts with that place's slice, all at once over the hosts' links.
                                A long buffer goes piece by piece, so that additions overlap with the transfers

With a wire format the schedule moves fewer bytes, and each addition is dearer: a number is encoded, decoded and added.
So a route that makes a number hop more often is charged for each time that it is rounded.

Note "model and trial". The model knows what bytes cost on a wire. Where moving them takes long, its predictions are
within a tenth, and timing the routes would take seconds. The model knows little about ranks that wait for a core: with
more ranks than cores it is off by a factor of two or three. But there an all-reduce takes milliseconds, so trials are
cheap.

All ranks must take the same way without asking each other. So a choice is a pure function of numbers that all of them
have. It uses additions, multiplications and comparisons alone, because their results are the same bits on every machine
(logarithms are not). Equal costs are ordered by name.

Sizes up to the same power of two share a trial, so there are few trials, however many sizes a job has. Every choice is
remembered by its size. Because it comes from measurements, another run may choose otherwise, and by another route the
sums have other bits. A run that must repeat another one bit by bit takes over its `choices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from math import inf
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ddp.collectives.cost import anatomy, cost_s, volume
from ddp.collectives.placed import Hosts, placed
from ddp.collectives.schedule import Goal, Round, Schedule
from ddp.collectives.shards import is_canonical_over_ranks, most_nodes
from ddp.collectives.simulate import SEGMENT_BYTES, Network, equal_hosts
from ddp.collectives.slice_owners import schedule_over_shards
from ddp.comm import checks
from ddp.comm.calibrate import BULK_BYTES, IN_A_ROW, NUM_REPETITIONS, Measured, agreed, calibrate, timed
from ddp.comm.call_queue import CallQueue
from ddp.comm.flat_collectives import IN_MEMORY, FlatCollectives, Route
from ddp.comm.host_links import by_size, num_pieces
from ddp.comm.reduction import SUM, Reduction
from ddp.comm.settings import Settings
from ddp.comm.wire_format import WireFormat, wire_format
from ddp.errors import ConfigError, did_you_mean
from ddp.process import gpu
from ddp.setting import Narrow
from ddp.units import binary_size, counted, format_time, lines_of_table

Moved = Literal["reduce_scatter", "all_gather"]
Result = TypeVar("Result")

TRIAL_S = 0.3  # the most time that trials of one size should take
DIRECT = "all_to_all"
NEARLY = 1.1  # times that differ by no more count as equal

# --- predictions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossing:
    """A schedule that the transport runs `num_times` in a row, for an all-reduce or for its pieces."""

    algorithm: str
    schedule: Schedule
    nbytes: int
    network: Network
    segment_bytes: int
    num_times: int = 1

    @property
    def cost_s(self) -> float:
        """Seconds of one run."""
        return cost_s(self.algorithm, self.schedule, self.nbytes, self.network, segment_bytes=self.segment_bytes)


@dataclass(frozen=True)
class Choice:
    """One route of an all-reduce, and what it is predicted to take.

    Attributes:
        memory_s: the part of it that shared memory takes, without what it does while the wire is busy.
        crossing: what the transport does, if anything.
    """

    route: Route
    predicted_s: float
    memory_s: float
    crossing: Crossing | None


def ranked(
    routes: Iterable[Route],
    nbytes: int,
    measured: Measured,
    *,
    allocated: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
    form: WireFormat | None = None,
) -> list[Choice]:
    """Predicts an all-reduce of `nbytes` by each of these routes; the cheapest first.

    Args:
        allocated: the tensor lies in memory that the ranks of a host share.
        segment_bytes: the executor's.
        form: the format in which float32 travels between ranks that share no memory.
    """
    choices = [_predict(route, nbytes, measured, allocated, segment_bytes, form) for route in routes]
    return sorted(choices, key=lambda choice: (choice.predicted_s, choice.route.name))


def _predict(
    route: Route, nbytes: int, measured: Measured, allocated: bool, segment_bytes: int, form: WireFormat | None
) -> Choice:
    network, schedule = measured.network, route.schedule
    curve = measured.allocated if allocated else measured.ordinary
    pieces = num_pieces(nbytes) if route.in_memory and schedule is not None else 1
    piece_s = curve.at(nbytes // pieces) if route.in_memory and curve is not None else 0.0
    if schedule is None:
        return Choice(route, piece_s, piece_s, None)
    if route.in_memory:
        schedule, network = in_columns(schedule, route.hosts), _carrying(network)
    crossing_bytes = nbytes // pieces if form is None else form.bytes_of(nbytes // pieces // 4)
    crossing = Crossing(route.algorithm, schedule, crossing_bytes, network, segment_bytes, pieces)
    # While one piece crosses, memory works on the next one: all but the first and the last half of its work is hidden,
    # unless memory is the slower one.
    memory_s = piece_s + (pieces - 1) * max(0.0, piece_s - crossing.cost_s)
    return Choice(route, memory_s + pieces * crossing.cost_s, memory_s, crossing)


def moved_s(operation: Moved, nbytes: int, measured: Measured, *, segment_bytes: int = SEGMENT_BYTES) -> float:
    """Predicts a reduce-scatter or an all-gather of `nbytes`, those of all slices; in memory, half of an all-reduce."""
    network, curve = measured.network, measured.allocated
    if curve is None:
        schedule, memory_s = by_size(operation, nbytes, network.num_ranks), 0.0
    else:
        num_hosts, num_slices, memory_s = len(network.hosts), min(map(len, network.hosts)), curve.at(nbytes) / 2
        if num_hosts == 1:
            return memory_s
        schedule = in_columns(by_size(operation, nbytes // num_slices, num_hosts), network.hosts)
        network = _carrying(network)
    return memory_s + cost_s(operation, schedule, nbytes, network, segment_bytes=segment_bytes)


def adding_times(wire: Narrow, device: torch.device) -> list[float]:
    """Times a wire format: seconds for each byte that travels to encode a number here, and decode and add it there."""
    form = wire_format(wire)
    numbers = torch.ones(BULK_BYTES // 4, dtype=torch.float32, device=device)
    encoded = torch.zeros(form.length(len(numbers)), dtype=form.dtype, device=device)

    def hop() -> None:
        form.encode(numbers, encoded)
        form.add(encoded, numbers)

    return [took_s / encoded.nbytes for took_s in timed({wire: hop}, device=device)[wire]]


def _carrying(network: Network) -> Network:
    """Returns the network of the ranks that carry slices between hosts: as many of each as the smallest one has."""
    num_slices = min(map(len, network.hosts))
    return replace(network, hosts=equal_hosts(len(network.hosts) * num_slices, num_slices))


@lru_cache(maxsize=256)
def in_columns(schedule: Schedule, hosts: Hosts) -> Schedule:
    """Returns `schedule` among the ranks of each place on all hosts, each with its slice of the buffer, all at once.

    As many ranks of every host take part as the smallest has; they are renumbered host by host.
    """
    num_hosts, num_slices = len(hosts), min(map(len, hosts))
    each = schedule.num_chunks(num_hosts)

    def algorithm(rank: int, num_ranks: int) -> Iterator[Round]:
        place = rank % num_slices
        column = range(place, num_ranks, num_slices)
        return placed(schedule, rank, ranks=column, chunks=range(place * each, (place + 1) * each))

    return Schedule(algorithm, schedule.goal, lambda num_ranks: num_slices * each)


# --- the choice ------------------------------------------------------------------------------------------------------


class Plan:
    """Chooses for one communicator, and predicts. Every rank asks the same questions in the same order.

    Attributes:
        algorithm: what "auto" stands for: "auto", or the name of a route.
        choices: bytes, with the wire format if there is one, and "canonical" if only such routes were asked for → name
            of the route that was chosen by its cost.

    Raises:
        ConfigError: the algorithm asked for is not possible here.
    """

    def __init__(self, collectives: FlatCollectives, settings: Settings, queue: CallQueue) -> None:
        self.algorithm, self._queue = settings.algorithm, queue
        self.choices: dict[str, str] = {}
        self._collectives, self._settings, self._routes = collectives, settings, collectives.routes
        self._measured: Measured | None = None
        self._adding: dict[Narrow, float] = {}  # seconds for each byte that travels
        self._trials: dict[tuple[int, Narrow | None], dict[str, float]] = {}  # by bytes and format, by route
        on_one_host = len(collectives.hosts) == 1 and settings.device.type == gpu.KIND
        self._is_direct = on_one_host and (settings.order == "any" or self._routes[DIRECT].is_canonical)
        self.check(self.algorithm)

    def check(self, name: str) -> None:
        """Accepts the name of a route, "auto", or "shared_memory", which stands for several routes on several hosts.

        Raises:
            ConfigError: there is no such route here.
        """
        if name != "auto" and not self._collectives.offers(name):
            hint, routes = did_you_mean(name, self._routes), ", ".join(self._routes)
            raise ConfigError(f"algorithm={name!r} is not possible here.{hint} Choose one of auto, {routes}")

    def route(self, flat: Tensor, algorithm: str, wire: Narrow | None = None) -> Route:
        """Returns the route for this tensor. The name may stand for several routes.

        Args:
            wire: the format in which numbers travel.

        Raises:
            ConfigError: the route uses the host's memory, and the tensor is elsewhere.
        """
        asked = self.algorithm if algorithm == "auto" else algorithm
        if asked == "auto":
            asked = self._choose(flat.nbytes, wire)
        route = self._routes.get(asked) or cheapest(self.ranking(flat.nbytes, wire=wire), asked).route
        if route.in_memory and not flat.is_cpu:
            raise ConfigError(f"a tensor on {flat.device}: this communicator's are on the CPU; move it there")
        return route

    def route_over_shards(self, flat: Tensor, num_shards: int) -> Route | None:
        """Returns the route over the ranks that adds up their nodes as the tree over the shards does; None: none does.

        Raises:
            ConfigError: the user has asked for a route that adds up in another order.
        """
        if not is_canonical_over_ranks(self._collectives.world_size, num_shards):
            return None
        if self.algorithm == "auto":
            return self._routes[self._choose(flat.nbytes, is_canonical=True)]
        ranking = self.ranking(flat.nbytes, is_canonical=True)
        if not any(each.route.answers_to(self.algorithm) for each in ranking):
            names = ", ".join(each.route.name for each in ranking)
            raise ConfigError(
                f"algorithm={self.algorithm!r} adds up in another order than the tree over {num_shards} shards: take "
                f"auto, or one of {names}"
            )
        return cheapest(ranking, self.algorithm).route

    def algorithms(self) -> list[str]:
        """Returns every algorithm that an all-reduce can take here: what `algorithm=` accepts besides "auto"."""
        return list(self._routes)

    @property
    def overlaps(self) -> bool:
        """Returns True if an all-reduce in the background runs without taking CPU time from the caller.

        It does if there are links to wait for, or a processor to spare. Otherwise the foreground takes less time,
        because it needs no thread switches.
        """
        group = self._collectives.group
        if group is None or self.algorithm not in ("auto", IN_MEMORY) or IN_MEMORY not in self._routes:
            return self._collectives.world_size > 1
        return group.num_processors >= group.size * (torch.get_num_threads() + 1)

    def choose(self, nbytes: int, wire: Narrow | None = None) -> str:
        """Returns the algorithm that "auto" takes for a buffer of this size. Collective: the first call may measure."""
        return self._asked("choose", nbytes, lambda: self._choose(nbytes, wire))

    def _asked(self, question: str, nbytes: int, answer: Callable[[], Result]) -> Result:
        """Answers a question about some bytes in a collective, because the first question measures."""
        checks.size(nbytes)
        return self._queue.run(self._queue.number(question, how=(nbytes,)), answer)

    def _choose(self, nbytes: int, wire: Narrow | None = None, *, is_canonical: bool = False) -> str:
        if IN_MEMORY in self._routes:
            return IN_MEMORY
        if self._is_direct and not (is_canonical and not self._routes[DIRECT].is_canonical):
            return DIRECT
        key = " ".join([str(nbytes), *filter(None, [wire, "canonical" if is_canonical else None])])
        if key not in self.choices:
            size = size_of_trial(nbytes)
            ranking = self.ranking(size, wire=wire, is_canonical=is_canonical)
            candidates = affordable(ranking)
            predicted = {choice.route.name: choice.predicted_s for choice in ranking}
            times = self._trial(size, candidates, wire) if len(candidates) > 1 else predicted
            self.choices[key] = fastest(self._routes, times)
        return self.choices[key]

    def ranking(
        self, nbytes: int, *, allocated: bool = False, wire: Narrow | None = None, is_canonical: bool = False
    ) -> list[Choice]:
        """Returns the prediction for every route, the cheapest first.

        Args:
            allocated: the tensor lies in memory from `allocate`.
            wire: as in `route`.
            is_canonical: of those alone that add up as the canonical tree over the ranks, whatever `order` is.
        """
        is_any = self._settings.order == "any" and not is_canonical
        routes = [route for route in self._routes.values() if is_any or route.is_canonical]
        measured, form = self.measured, None
        if wire is not None:
            measured = replace(measured, network=replace(measured.network, gamma_s=self._adding_s(wire)))
            form = wire_format(wire)
        segment_bytes = self._settings.segment_bytes
        return ranked(routes, nbytes, measured, allocated=allocated, segment_bytes=segment_bytes, form=form)

    def predict(self, nbytes: int, algorithm: str = "auto", *, allocated: bool = False) -> float:
        """Returns the predicted seconds of an all-reduce. Collective: the first call measures.

        Args:
            allocated: the tensor lies in memory from `allocate`.
        """
        self.check(algorithm)
        asked = self.algorithm if algorithm == "auto" else algorithm
        return self._asked(
            "predict", nbytes, lambda: cheapest(self.ranking(nbytes, allocated=allocated), asked).predicted_s
        )

    def figures(self) -> Measured:
        """Returns the figures of the links. Collective: the first call measures."""
        return self._asked("figures", 0, lambda: self.measured)

    @property
    def measured(self) -> Measured:
        """The figures of the links, for a question that has its turn. Collective: the first one measures."""
        if self._measured is None:
            self._measured = calibrate(self._collectives, self._settings)
        return self._measured

    def _adding_s(self, wire: Narrow) -> float:
        """Returns seconds for each byte that travels: its numbers are encoded here, and decoded and added there."""
        if wire not in self._adding:
            times = adding_times(wire, self._settings.device)
            self._adding[wire] = agreed({wire: times}, self._collectives.links.gather_bytes)[wire]
        return self._adding[wire]

    def _trial(self, nbytes: int, candidates: Sequence[Choice], wire: Narrow | None = None) -> dict[str, float]:
        """Times these routes; seconds by name, remembered."""
        if (nbytes, wire) not in self._trials:
            device, gather = self._settings.device, self._collectives.links.gather_bytes
            flat = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
            in_a_row = max(1, min(IN_A_ROW, int(TRIAL_S / max(1e-9, sum(map(trial_s, candidates))))))
            reduction = SUM if wire is None else Reduction(wire=wire_format(wire))
            runs = {
                each.route.name: partial(self._collectives.all_reduce, flat, each.route, reduction)
                for each in candidates
            }
            self._trials[nbytes, wire] = agreed(timed(runs, in_a_row, device=device), gather)
        return self._trials[nbytes, wire]

    def explain(self, nbytes: int, *, num_shards: int | None = None) -> str:
        """Returns a table of every algorithm, fastest first, and how far predictions were off. Collective.

        Args:
            num_shards: of sums over this number of shards of a batch, which have other algorithms to choose among.
        """
        if num_shards is None:
            return self._asked("explain", nbytes, lambda: self._explain(nbytes))
        return self._asked("explain", nbytes, lambda: self._explain_over_shards(nbytes, num_shards))

    def _explain_over_shards(self, nbytes: int, num_shards: int) -> str:
        world_size, what = self._collectives.world_size, f"sum of {num_shards} shards, {nbytes:,} bytes"
        if IN_MEMORY in self._routes:
            rows = counted(most_nodes(world_size, num_shards), "row")
            return f"{what}: in the host's memory, from up to {rows} of each rank"
        ranking = self._ranking_over_shards(nbytes, num_shards)
        return "\n".join([f"{what}; auto takes {ranking[0].route.name}", *table(ranking, size_of_trial(nbytes), {})])

    def _ranking_over_shards(self, nbytes: int, num_shards: int) -> list[Choice]:
        """Returns the prediction for every route by which shards can be added up, the cheapest first."""
        if is_canonical_over_ranks(self._collectives.world_size, num_shards):
            return self.ranking(nbytes, is_canonical=True)
        schedule = schedule_over_shards(num_shards, Goal.ALL_REDUCE)
        route = Route("slice_owners", schedule, False, self._collectives.hosts)
        return ranked([route], nbytes, self.measured, segment_bytes=self._settings.segment_bytes)

    def _explain(self, nbytes: int) -> str:
        chosen, size = self._choose(nbytes), size_of_trial(nbytes)
        ranking = self.ranking(size)
        times = self._trial(size, affordable(ranking) or ranking[:1])
        lines = [f"all-reduce of {nbytes:,} bytes; auto takes {chosen}", *table(self.ranking(nbytes), size, times)]
        if ratios := [times[each.route.name] / each.predicted_s for each in ranking if times.get(each.route.name)]:
            lines.append(f"what was timed took {min(ratios):.2f} to {max(ratios):.2f} times what was predicted")
        return "\n".join(lines)

    def pin(self, choices: Mapping[str, str]) -> None:
        """Takes over what another run chose.

        Raises:
            ConfigError: a route is not possible here.
        """
        for route in choices.values():
            self.check(route)
        self.choices.update(choices)

    def describe(self) -> str:
        """Says how all-reduces go here, in a few words: for a headline, and for the identity in a checkpoint."""
        if self.algorithm != "auto":
            return self.algorithm
        if IN_MEMORY in self._routes:
            return "shared memory"
        if self._is_direct:
            return DIRECT
        memory = "shared memory and " if any(route.in_memory for route in self._routes.values()) else ""
        sizes = "+".join(str(len(host)) for host in self._collectives.hosts)
        order = ", canonical" if self._settings.order == "canonical" else ""
        return f"auto over {memory}transport, hosts of {sizes}{order}"


def size_of_trial(nbytes: int) -> int:
    """Returns the size that stands for this one in trials: the next power of two."""
    return max(4, 1 << (nbytes - 1).bit_length())


def trial_s(choice: Choice) -> float:
    """Returns the predicted seconds of timing this route."""
    return (NUM_REPETITIONS + 1) * choice.predicted_s


def affordable(ranking: Sequence[Choice]) -> list[Choice]:
    """Returns the cheapest routes, as many as can be timed within `TRIAL_S`."""
    taken_s = accumulate(map(trial_s, ranking))
    return [choice for choice, until_s in zip(ranking, taken_s, strict=True) if until_s <= TRIAL_S]


def fastest(routes: Mapping[str, Route], times: Mapping[str, float]) -> str:
    """Returns the name of the route to take, given what the routes take.

    Of those that are nearly as fast as the fastest: one through memory, because that takes less CPU time; then the
    first in the catalog, which begins with the ring, because there every rank talks to its neighbours only.
    """
    near = [route for route in routes.values() if times.get(route.name, inf) <= NEARLY * min(times.values())]
    return min(near, key=lambda route: not route.in_memory).name


def cheapest(ranking: Sequence[Choice], name: str = "auto") -> Choice:
    """Returns the first choice of a ranking whose route answers to the name.

    Raises:
        ConfigError: none does, because of the order of additions that was asked for.
    """
    for choice in ranking:
        if name == "auto" or choice.route.answers_to(name):
            return choice
    raise ConfigError(f"no way {name!r} adds in canonical order here; leave order at 'any', or take another way")


# --- for a reader ----------------------------------------------------------------------------------------------------


def table(ranking: Sequence[Choice], size: int, times: Mapping[str, float]) -> list[str]:
    """Returns the lines of a table: what every route is predicted to take, what it moves, and what most of its time is.

        way            predicted  rounds  sent by a rank  most of it  32 MB timed
     1  all_to_all       40.4 ms       2         37.5 MB  bytes 93 %      48.2 ms
     2  ring             40.4 ms       6         37.5 MB  bytes 85 %            -

    Args:
        size: the bytes of what was timed.
        times: by the name of a route, what it took.
    """
    rows = [("", "way", "predicted", "rounds", "sent by a rank", "most of it", f"{binary_size(size)} timed")]
    for number, choice in enumerate(ranking, start=1):
        name, crossing = choice.route.name, choice.crossing
        parts, num_rounds, sent = {"memory": choice.memory_s}, 0, "-"
        if crossing is not None:
            of_one = (crossing.schedule, crossing.nbytes, crossing.network)
            seconds = anatomy(crossing.algorithm, *of_one, segment_bytes=crossing.segment_bytes)
            parts |= {part.removesuffix("_s"): crossing.num_times * s for part, s in seconds._asdict().items()}
            moved = volume(crossing.schedule, crossing.nbytes, crossing.network.num_ranks)
            num_rounds, sent = moved.num_rounds * crossing.num_times, binary_size(moved.bytes_sent * crossing.num_times)
        most = max(parts, key=lambda part: parts[part])
        share = f"{most} {100 * parts[most] / choice.predicted_s:.0f} %" if choice.predicted_s else "-"
        took = format_time(times[name]) if name in times else "-"
        rows.append((str(number), name, format_time(choice.predicted_s), str(num_rounds), sent, share, took))
    return lines_of_table(rows, "><>>><>")
