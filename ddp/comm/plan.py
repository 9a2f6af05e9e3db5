"""`algorithm="auto"`: which route an all-reduce takes.

    one host, memory shared     "shared_memory", at once: it is faster than every schedule at every size
    one host's GPUs             "all_to_all", at once: each reaches every other, and two rounds are the fewest
    anything else               the formulas of `collectives/cost.py` order the routes; the first of them are timed, as
                                many as fit into `TRIAL_S`; the fastest one is taken, where times that
                                differ by no more than a tenth count as equal (`fastest`)

Note "formula and trial". A formula counts what bytes cost on a wire. For large buffers it is accurate to a tenth, and
timing the routes would take seconds, so the formulas alone decide. A formula does not count waits for a core: with more
ranks than cores it is off by a factor of two or three. But there an all-reduce takes milliseconds, so trials are cheap.
A formula treats additions in a host's memory as free, and a host as one rank of the algorithm between hosts:
"shared_memory+ring" on h hosts costs what a ring of h ranks does.

The parameters of the links are measured once, in a fraction of a second, before the first formula:

    figure    what the ranks run                                               who runs it
    α         rounds in which each rank sends 8 bytes to the next rank of a    inside: all ranks of every host at once
              ring and receives 8: seconds per round                           between: the first rank of every host
    g         the same with 8 messages each way: what each further one adds    the same
    β         the same with one message of 4 MB: what a byte adds              the same
    γ         `add_` of 4 MB: seconds per byte                                 every rank

The rounds of most schedules are such exchanges, so α covers the whole overhead of a round: Python's time between
rounds, a send that waits for its receiver, a core shared with other ranks. One rank per host is enough between hosts,
because the ranks of a host share its link.

A repetition takes as long as its slowest rank, because a collective ends with its last rank. The median of the
repetitions is used, because a minimum is rarely reached again, and one interruption would distort a mean. All ranks
exchange all their times, so all have the same figures.

All ranks must choose the same route without further communication. So a choice is a pure function of numbers that all
of them have. It uses additions, multiplications and comparisons alone, because their results are the same bits on every
machine (logarithms are not). Equal costs are ordered by name.

Sizes up to the same power of two share a trial, so there are few trials, however many sizes a job has. Every choice is
cached by its size. Because it depends on measurements, another run may choose differently, and another route gives sums
with other bits. A run that must repeat another one bit by bit pins its `choices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import inf
from statistics import median
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ddp.collectives.all_to_all import schedule_over_shards
from ddp.collectives.cost import Link, Network, equal_hosts, formula_s, volume
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Goal, Recv, Schedule, Send
from ddp.collectives.shards import is_canonical_over_ranks, most_nodes
from ddp.comm import checks
from ddp.comm.call_queue import CallQueue
from ddp.comm.flat_collectives import IN_MEMORY, FlatCollectives, Route
from ddp.comm.host_links import HostLinks, Settings
from ddp.comm.reduction import SUM, Reduction, wire_format
from ddp.comm.transport.edge import gathered
from ddp.errors import ConfigError, did_you_mean
from ddp.process import gpu
from ddp.process.clock import now_s
from ddp.setting import Narrow
from ddp.units import binary_size, counted, format_time, lines_of_table

Result = TypeVar("Result")
Times = dict[str, list[float]]  # by name, the seconds of each repetition; absent if a rank took no part

TRIAL_S = 0.3  # limit for the trials of one size
DIRECT = "all_to_all"
NEARLY = 1.1  # times that differ by no more count as equal
NUM_REPETITIONS, IN_A_ROW = 5, 8  # repetitions of a measurement; calls or rounds in a repetition of a short one
SMALL_BYTES, BULK_BYTES, NUM_MESSAGES = 8, 4 << 20, 8

# --- times -----------------------------------------------------------------------------------------------------------


def timed(runs: Mapping[str, Callable[[], object]], in_a_row: int = 1, *, device: torch.device) -> Times:
    """Times each of these several times, in turn, so that a disturbance affects all of them equally.

    Args:
        in_a_row: calls in each repetition.

    Returns:
        By name, the seconds per call of each repetition; one more before them warms up.
    """
    times: Times = {name: [] for name in runs}
    for _ in range(NUM_REPETITIONS + 1):
        for name, run in runs.items():
            start_s = now_s()
            for _ in range(in_a_row):
                run()
            if device.type == gpu.KIND:
                gpu.cuda.synchronize(device)
            times[name].append((now_s() - start_s) / in_a_row)
    return {name: repetitions[1:] for name, repetitions in times.items()}


def agreed(mine: Times, gather: Callable[[Times], Sequence[Times]]) -> dict[str, float]:
    """Returns, by name, the median over the repetitions of the slowest rank's time, which is the same on all ranks."""
    everyone = gather(mine)
    names = dict.fromkeys(name for times in everyone for name in times)
    by_rank = {name: [times[name] for times in everyone if name in times] for name in names}
    return {name: median(map(max, zip(*times, strict=True))) for name, times in by_rank.items()}


# --- links -----------------------------------------------------------------------------------------------------------


def measured_network(links: HostLinks, hosts: Hosts, device: torch.device) -> Network:
    """Measures the existing links. Collective.

    Raises:
        TransportError: a rank did not take part in time.
    """
    here, arrived = (torch.zeros(BULK_BYTES // 4, dtype=torch.float32, device=device) for _ in range(2))
    mine = timed({"adding": partial(here.add_, arrived)}, device=device)
    rings = {
        "inside": next(host for host in hosts if links.rank in host),
        "between": tuple(host[0] for host in hosts),
    }
    for name, ring in rings.items():
        if links.rank in ring and len(ring) > 1:
            exchange = partial(_exchange, links, ring, device=device)
            small = {f"{name} alpha": exchange(1, SMALL_BYTES), f"{name} gap": exchange(NUM_MESSAGES, SMALL_BYTES)}
            mine |= timed(small, IN_A_ROW, device=device)
            mine |= timed({f"{name} beta": exchange(1, BULK_BYTES)}, device=device)
    return network_of(agreed(mine, partial(gathered, links.gather_bytes)), hosts)


def network_of(times: Mapping[str, float], hosts: Hosts) -> Network:
    """Computes the parameters of the links from the agreed times."""
    inside, between = _link(times, "inside"), _link(times, "between")
    one_link = inside or between or Link(0.0, 0.0)  # a missing link takes the figures of the other
    return Network(hosts, inside or one_link, between or one_link, times["adding"] / BULK_BYTES)


def _exchange(
    links: HostLinks, ring: Sequence[int], num_messages: int, num_bytes: int, *, device: torch.device
) -> Callable[[], object]:
    """Returns a round in which this rank sends to the next one of a ring and receives from the one before."""
    place = ring.index(links.rank)
    sends = [Send(ring[(place + 1) % len(ring)], range(k, k + 1)) for k in range(num_messages)]
    receives = [Recv(ring[place - 1], range(k, k + 1), add=False) for k in range(num_messages, 2 * num_messages)]
    schedule = Schedule(
        lambda rank, num_ranks: iter([(*sends, *receives)]), Goal.ALL_TO_ALL, lambda num_ranks: 2 * num_messages
    )
    return partial(links.run, schedule, torch.zeros(2 * num_messages * num_bytes, dtype=torch.uint8, device=device))


def _link(times: Mapping[str, float], name: str) -> Link | None:
    if f"{name} alpha" not in times:
        return None
    alpha_s = times[f"{name} alpha"]
    beta_s = max(0.0, times[f"{name} beta"] - alpha_s) / BULK_BYTES
    return Link(alpha_s, beta_s, max(0.0, times[f"{name} gap"] - alpha_s) / (NUM_MESSAGES - 1))


# --- formulas --------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A route of an all-reduce, and its seconds by formula."""

    route: Route
    formula_s: float


def ranked(routes: Iterable[Route], nbytes: int, network: Network) -> list[Candidate]:
    """Returns these routes in the order of their formulas for an all-reduce of `nbytes`, the cheapest first."""
    num_hosts = len(network.hosts)
    across = replace(network, hosts=equal_hosts(num_hosts, 1))  # a host counts as one rank

    def seconds(route: Route) -> float:
        there = across if route.in_memory else network
        return 0.0 if route.schedule is None else formula_s(route.algorithm, route.schedule, nbytes, there)

    return sorted((Candidate(each, seconds(each)) for each in routes), key=lambda each: (each[1], each.route.name))


# --- the choice ------------------------------------------------------------------------------------------------------


class Plan:
    """Chooses the routes of one communicator. All ranks make the same calls in the same order.

    Attributes:
        algorithm: the meaning of "auto": "auto", or the name of a route.
        choices: bytes, with the wire format if any, and "canonical" if only such routes were allowed → name of the
            chosen route.

    Raises:
        ConfigError: the requested algorithm is not possible here.
    """

    def __init__(self, collectives: FlatCollectives, settings: Settings, queue: CallQueue) -> None:
        self.algorithm, self._queue = settings.algorithm, queue
        self.choices: dict[str, str] = {}
        self._collectives, self._settings, self._routes = collectives, settings, collectives.routes
        self._network: Network | None = None
        self._trials: dict[tuple[object, ...], dict[str, float]] = {}  # by bytes, format and routes; then by route
        on_one_host = len(collectives.hosts) == 1 and settings.device.type == gpu.KIND
        self._is_direct = on_one_host and (settings.order == "any" or self._routes[DIRECT].is_canonical)
        self.check(self.algorithm)

    def check(self, name: str) -> None:
        """Accepts the name of a route, "auto", or "shared_memory", which fits several routes on several hosts.

        Raises:
            ConfigError: there is no such route here.
        """
        if name != "auto" and not self._collectives.offers(name):
            hint, routes = did_you_mean(name, self._routes), ", ".join(self._routes)
            raise ConfigError(f"algorithm={name!r} is not possible here.{hint} Choose one of auto, {routes}")

    def route(self, flat: Tensor, algorithm: str, wire: Narrow | None = None) -> Route:
        """Returns the route for this tensor. The name may fit several routes.

        Args:
            wire: the format in which numbers travel.
        """
        asked = self.algorithm if algorithm == "auto" else algorithm
        if asked == "auto":
            asked = self._choose(flat.nbytes, wire)
        return self._routes.get(asked) or cheapest(self.ranking(flat.nbytes, wire), asked)

    def route_over_shards(self, flat: Tensor, num_shards: int) -> Route | None:
        """Returns the route over the ranks that adds their nodes in the order of the tree over the shards; None: none
        does.

        Raises:
            ConfigError: the requested route adds up in another order.
        """
        if not is_canonical_over_ranks(self._collectives.world_size, num_shards):
            return None
        if self.algorithm == "auto":
            return self._routes[self._choose(flat.nbytes, is_canonical=True)]
        ranking = self.ranking(flat.nbytes, is_canonical=True)
        if not any(each.route.matches(self.algorithm) for each in ranking):
            names = ", ".join(each.route.name for each in ranking)
            raise ConfigError(
                f"algorithm={self.algorithm!r} does not add up in the order of the tree over {num_shards} shards: take "
                f"auto, or one of {names}"
            )
        return cheapest(ranking, self.algorithm)

    def algorithms(self) -> list[str]:
        """Returns every algorithm for an all-reduce here: the values of `algorithm=` besides "auto"."""
        return list(self._routes)

    @property
    def overlaps(self) -> bool:
        """Returns True if an all-reduce in the background runs without taking CPU time from the caller.

        It does so if there are links to wait for, or a free processor. Otherwise the foreground is faster, because it
        needs no thread switches.
        """
        group = self._collectives.group
        if group is None or self.algorithm not in ("auto", IN_MEMORY) or IN_MEMORY not in self._routes:
            return self._collectives.world_size > 1
        return group.num_processors >= group.size * (torch.get_num_threads() + 1)

    def choose(self, nbytes: int, wire: Narrow | None = None) -> str:
        """Returns the choice of "auto" for a buffer of this size. Collective: the first call may measure."""
        return self._in_collective("choose", nbytes, lambda: self._choose(nbytes, wire))

    def network(self) -> Network:
        """Returns the parameters of the links. Collective: the first call measures."""
        return self._in_collective("network", 0, self._links)

    def _in_collective(self, question: str, nbytes: int, compute: Callable[[], Result]) -> Result:
        """Runs `compute` as a collective call, because the first one measures."""
        checks.size(nbytes)
        return self._queue.run(self._queue.number(question, how=(nbytes,)), compute)

    def _choose(self, nbytes: int, wire: Narrow | None = None, *, is_canonical: bool = False) -> str:
        if IN_MEMORY in self._routes:
            return IN_MEMORY
        if self._is_direct and not (is_canonical and not self._routes[DIRECT].is_canonical):
            return DIRECT
        key = " ".join([str(nbytes), *filter(None, [wire, "canonical" if is_canonical else None])])
        if key not in self.choices:
            size = size_of_trial(nbytes)
            ranking = self.ranking(size, wire, is_canonical=is_canonical)
            candidates = affordable(ranking)
            times = {each.route.name: each.formula_s for each in ranking}
            if len(candidates) > 1:
                times = self._trial(size, candidates, wire)
            self.choices[key] = fastest(self._routes, times)
        return self.choices[key]

    def ranking(self, nbytes: int, wire: Narrow | None = None, *, is_canonical: bool = False) -> list[Candidate]:
        """Returns every route with its formula, the cheapest first; to be called inside a collective.

        Args:
            wire: as in `route`.
            is_canonical: only routes in the order of the canonical tree over the ranks, whatever `order` is.
        """
        is_any = self._settings.order == "any" and not is_canonical
        routes = (route for route in self._routes.values() if is_any or route.is_canonical)
        return ranked(routes, nbytes if wire is None else wire_format(wire).bytes_of(nbytes // 4), self._links())

    def _links(self) -> Network:
        if self._network is None:
            self._network = measured_network(self._collectives.links, self._collectives.hosts, self._settings.device)
        return self._network

    def _trial(self, nbytes: int, candidates: Sequence[Candidate], wire: Narrow | None = None) -> dict[str, float]:
        """Times these routes. Returns the seconds by name, which are cached."""
        key = nbytes, wire, *(each.route.name for each in candidates)  # a canonical choice has fewer routes
        if key not in self._trials:
            device, gather = self._settings.device, partial(gathered, self._collectives.links.gather_bytes)
            flat = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
            in_a_row = max(1, min(IN_A_ROW, int(TRIAL_S / max(1e-9, sum(map(trial_s, candidates))))))
            reduction = SUM if wire is None else Reduction(wire=wire_format(wire))
            runs = {
                each.route.name: partial(self._collectives.all_reduce, flat, each.route, reduction)
                for each in candidates
            }
            self._trials[key] = agreed(timed(runs, in_a_row, device=device), gather)
        return self._trials[key]

    def explain(self, nbytes: int, *, num_shards: int | None = None) -> str:
        """Returns a table of every algorithm with its time by formula and in the trial. Collective.

        Args:
            num_shards: for sums over this number of shards of a batch, which have other algorithms.
        """
        return self._in_collective("explain", nbytes, lambda: self._explain(nbytes, num_shards))

    def _explain(self, nbytes: int, num_shards: int | None) -> str:
        is_canonical, world_size = num_shards is not None, self._collectives.world_size
        what = f"all-reduce of {nbytes:,} bytes"
        if num_shards is not None:
            what = f"sum of {num_shards} shards, {nbytes:,} bytes"
            if IN_MEMORY in self._routes:
                rows = counted(most_nodes(world_size, num_shards), "row")
                return f"{what}: in the host's memory, from up to {rows} of each rank"
            if not is_canonical_over_ranks(world_size, num_shards):
                schedule = schedule_over_shards(num_shards, Goal.ALL_REDUCE)
                only = Route("slice_owners", schedule, False, self._collectives.hosts)
                lines = table(ranked([only], nbytes, self._links()), nbytes, size_of_trial(nbytes), {})
                return "\n".join([f"{what}; auto takes {only.name}", *lines])
        chosen, size = self._choose(nbytes, is_canonical=is_canonical), size_of_trial(nbytes)
        ranking = self.ranking(size, is_canonical=is_canonical)
        times = self._trial(size, affordable(ranking) or ranking[:1])
        lines = table(self.ranking(nbytes, is_canonical=is_canonical), nbytes, size, times)
        return "\n".join([f"{what}; auto takes {chosen}", *lines])

    def pin(self, choices: Mapping[str, str]) -> None:
        """Takes over the choices of another run.

        Raises:
            ConfigError: a route is not possible here.
        """
        for key, route in choices.items():
            self.check(route)
            if "canonical" not in key or self._routes[route].is_canonical:  # older runs may have other ones there
                self.choices[key] = route

    def describe(self) -> str:
        """Returns a short description of the routes, for a headline and for the identity in a checkpoint."""
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
    """Returns the size that trials use for this one: the next power of two."""
    return max(4, 1 << (nbytes - 1).bit_length())


def trial_s(candidate: Candidate) -> float:
    """Returns the seconds that timing this route takes, by its formula."""
    return (NUM_REPETITIONS + 1) * candidate.formula_s


def affordable(ranking: Sequence[Candidate]) -> list[Candidate]:
    """Returns as many of the cheapest routes as can be timed within `TRIAL_S`."""
    taken_s = accumulate(map(trial_s, ranking))
    return [candidate for candidate, until_s in zip(ranking, taken_s, strict=True) if until_s <= TRIAL_S]


def fastest(routes: Mapping[str, Route], times: Mapping[str, float]) -> str:
    """Returns the name of the best route by these times.

    Among routes that are nearly as fast as the fastest, one through memory comes first, because it takes less CPU time;
    then the first in the catalog, which begins with the ring, because its ranks talk to neighbours only.
    """
    near = [route for route in routes.values() if times.get(route.name, inf) <= NEARLY * min(times.values())]
    return min(near, key=lambda route: not route.in_memory).name


def cheapest(ranking: Sequence[Candidate], name: str) -> Route:
    """Returns the first route of a ranking that fits the name.

    Raises:
        ConfigError: none does, because of the required order of additions.
    """
    for candidate in ranking:
        if candidate.route.matches(name):
            return candidate.route
    raise ConfigError(f"no route {name!r} adds in canonical order here; leave order at 'any', or take another route")


# --- for a reader ----------------------------------------------------------------------------------------------------


def table(ranking: Sequence[Candidate], nbytes: int, size: int, times: Mapping[str, float]) -> list[str]:
    """Returns the lines of a table: every route's time by formula, its rounds and bytes, and its measured time.

        way            formula  rounds  sent by a rank  32 MB timed
     1  all_to_all     40.4 ms       2         37.5 MB      48.2 ms
     2  ring           40.4 ms       6         37.5 MB            -

    Args:
        nbytes: of the buffer.
        size: the bytes of the timed buffer.
        times: by route, its measured seconds.
    """
    rows = [("", "way", "formula", "rounds", "sent by a rank", f"{binary_size(size)} timed")]
    for number, (route, seconds) in enumerate(ranking, start=1):
        formula, num_rounds, sent = "-", "-", "-"
        if route.schedule is not None:
            num_ranks = len(route.hosts) if route.in_memory else sum(map(len, route.hosts))
            moved = volume(route.schedule, nbytes, num_ranks)
            formula, num_rounds, sent = format_time(seconds), str(moved.num_rounds), binary_size(moved.bytes_sent)
        took = format_time(times[route.name]) if route.name in times else "-"
        rows.append((str(number), route.name, formula, num_rounds, sent, took))
    return lines_of_table(rows, "><>>>>")
