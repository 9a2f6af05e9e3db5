"""Measures what the prices are made of, on the links that are there, once for a layout of ranks; under a second in all.

    what         how                                                                   who
    α            ping-pong of 8 bytes: half of there and back                          a pair of each host; between
    announce     exchange of 8 bytes, which both sides post at once: what it takes     hosts all pairs at once
                 above α
    busy         that exchange: what it takes above, divided by the number of those    all ranks of a host at once
                 who do it
    gap          eight messages in one round: what each further one adds               all ranks at once
    β            inside a host: ping-pong of many bytes; between: their exchange       a pair; one rank of each host
    shared       exchange of many bytes, divided by the number of those who do it      all ranks of a host at once
    γ            `add_`, per byte; and the exchange of 8 bytes which are added         every rank
    memory       the collectives of `host_reduce.py` at some sizes: caches make it     all ranks of a host
                 no straight line, so the times themselves are kept
    call         a whole all-reduce of 8 bytes, called as users call it: what it       all ranks
                 takes above the price of its rounds

Note "the last word". Where ranks share cores, the times of single rounds vary by a factor of two from one measurement
to the next. If the whole all-reduce takes less than its price, all latencies are scaled down until it does not.

Messages are sent by `execute`, several rounds at a time, as in a collective: what Python takes between two rounds
belongs to the price, and so does a core that falls asleep meanwhile and wakes up late. And all ranks work at once
wherever they would in a collective: where they share a core, they slow each other down. Only a host's link is filled by
one rank alone: sharing it is the simulator's business.

The time of a few rounds, or calls, in a row counts, of the slowest rank: a collective ends with its last rank. Of
several such times the median: a minimum would promise what is rarely met, and a mean would fall for one interruption.
All ranks exchange all their times and compute the figures from them; so they have the same ones, and the same ranking.

How often, and how many bytes, is agreed after a first look at each link.

Figures are kept for the life of the process, by layout: ranks that have all taken part in the same measurement use it
again when they meet in another communicator of that layout. They are not kept on disk: measuring costs less than a
second; a figure that another job, another network interface or another day made would decide for months, unseen; and
a run that must be repeated exactly is pinned to its choices, not to its measurements.

Read before: `collectives/simulate.py` (the model), `execute.py`. Read next: `select.py`.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp.clock import now_s
from ddp.collectives.catalog import ALL_REDUCE
from ddp.collectives.chunks import offsets
from ddp.collectives.cost import price
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Recv, Round, Send
from ddp.collectives.simulate import SEGMENT_BYTES, Link, Network
from ddp.comm.execute import Scratch, execute, program_of
from ddp.comm.host_reduce import HostGroup, NoSharedMemory
from ddp.transport.edge import Transport

Gather = Callable[[bytes], list[bytes]]  # everyone's bytes, by rank

SMALL_BYTES = 8
LOOK_BYTES = 256 << 10  # of the first look at the bandwidth
BULK_BYTES = 4 << 20  # at most
BULK_S, BULK_IN_ALL_S = 0.035, 0.07  # one exchange of many bytes should take at most so long, and all repetitions
ROW_S = 0.01  # and some rounds in a row
PHASE_S = 0.03  # and all repetitions of one measurement of latency
ROUNDS = 8  # in a row, at most; and calls of a collective in memory
MANY = 8  # messages in one round, for the gap
LOOKS, FEWEST, MOST, MOST_BULKS = 3, 3, 24, 12  # repetitions; another one before them is thrown away
ADD_BYTES = 4 << 20
MEMORY_BYTES = tuple(1 << k for k in (10, 15, 16, 20, 22, 24, 25))
TOGETHER_S = 2e-4
MIXED_BYTES = 4 << 20  # enough where a tensor goes through memory in pieces, to cross between hosts
MEMORY_IN_ALL = 64 << 20  # of a host's memory, lent for the measurement

WHOLE = "recursive_doubling"


def nothing() -> None:
    """Stands in for a call."""


# --- what is known afterwards ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes, between the points by straight lines; beyond the last one, on along the last line.

    Straight lines, since that is what α + βN is, and since every machine computes them to the same bits.
    """

    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, nbytes: int) -> float:
        if nbytes <= self.nbytes[0]:
            return self.seconds[0]
        after = min(bisect_left(self.nbytes, nbytes), len(self.nbytes) - 1)
        x0, x1 = self.nbytes[after - 1 : after + 1]
        y0, y1 = self.seconds[after - 1 : after + 1]
        on_the_line = y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)
        return on_the_line if nbytes <= x1 else max(on_the_line, y1)


@dataclass(frozen=True)
class SharedMemory:
    """What the ranks of a host need for their part of an all-reduce, in memory, calls included: all of it on one host;
    on several, the reduce-scatter before and the all-gather after what happens between hosts."""

    ordinary: Curve
    allocated: Curve

    def predict_s(self, nbytes: int, *, allocated: bool) -> float:
        return (self.allocated if allocated else self.ordinary).at(nbytes)


@dataclass(frozen=True)
class Measured:
    """The figures of one layout; the same on all its ranks.

    Attributes:
        shared: None where no host has several ranks with memory in common.
        call_s: what a call over the transport costs besides its messages and additions.
        mixed_call_s: the same of one that goes through memory and the transport.
    """

    network: Network
    shared: SharedMemory | None
    call_s: float = 0.0
    mixed_call_s: float = 0.0


# --- measuring -------------------------------------------------------------------------------------------------------


def calibrate(
    transport: Transport,
    hosts: Hosts,
    group: HostGroup | None,
    gather: Gather,
    *,
    timeout_s: float,
    device: torch.device | str = "cpu",
    empty_call: Callable[[], object] = nothing,
) -> Measured:
    """Measures links and memory. Collective over all ranks of `transport`.

    Args:
        hosts: the ranks of every host.
        group: this host's memory, if its ranks share some.
        gather: all-gather of bytes; keeps a deadline of its own.
        timeout_s: longest wait for any one message.
        device: of the tensors that the transport carries.
        empty_call: does nothing, by way of all that a call passes before anything is sent or added.

    Raises:
        TransportError: a rank did not take part in time.
    """
    bench = _Bench(transport, hosts, timeout_s=timeout_s, device=torch.device(device), empty_call=empty_call)
    key = (tuple(map(len, hosts)), type(transport).__name__, group is not None)
    known = _known.get(key)
    looks = _exchanged({"known": known.digest if known else "", **bench.look()}, gather)
    if known is not None and {look["known"] for look in looks} == {known.digest}:
        return replace(known.measured, network=replace(known.measured.network, hosts=hosts))
    plans = {
        name: _Plan.after(_slowest(looks, f"{name} small", min), _slowest(looks, f"{name} look", min))
        for name in bench.rings
    }
    times = bench.measure(plans)
    memory = _Memory(group, hosts, timeout_s=timeout_s, empty_call=empty_call) if group is not None else None
    times |= bench.whole_collectives(plans, memory)
    times |= memory.measure() if memory is not None else {}
    everyone = _exchanged(times, gather)
    measured = _measured(everyone, plans, hosts, bench.usual)
    _known[key] = _Known(measured, hashlib.sha256(repr(everyone).encode()).hexdigest())
    return measured


class _Known(NamedTuple):
    """A measurement of this process, and what tells it from others."""

    measured: Measured
    digest: str


_known: dict[tuple[tuple[int, ...], str, bool], _Known] = {}

Times = dict[str, list[float]]  # by name of a measurement, seconds by repetition; absent where a rank had no part in it


def _exchanged(mine: Mapping[str, object], gather: Gather) -> list[dict[str, Any]]:
    return [json.loads(text) for text in gather(json.dumps(mine).encode())]


def _slowest(
    everyone: Sequence[Mapping[str, list[float]]],
    name: str,
    among: Callable[[Iterable[float]], float] = median,
) -> float:
    """Of every repetition the slowest rank; of the repetitions the median, or another; 0 for what nobody measured."""
    repetitions = list(zip(*(times[name] for times in everyone if times.get(name)), strict=True))
    return among([max(times) for times in repetitions]) if repetitions else 0.0


class _Plan(NamedTuple):
    """How much to measure on a link: agreed, since all ranks must exchange equally often."""

    num_rounds: int
    num_repetitions: int
    bulk_bytes: int
    num_bulks: int  # several: the first ones find TCP's windows small

    @classmethod
    def after(cls, small_s: float, look_s: float) -> _Plan:
        """From the times of an exchange of few bytes, and of `LOOK_BYTES`."""
        small_s = max(small_s, 1e-7)
        num_rounds = min(ROUNDS, max(1, int(ROW_S / small_s)))
        num_repetitions = min(MOST, max(FEWEST, int(PHASE_S / (small_s * num_rounds))))
        beta_s = max(look_s - small_s, 1e-7) / LOOK_BYTES
        bulk_bytes = min(BULK_BYTES, max(LOOK_BYTES, int(BULK_S / beta_s)))
        num_bulks = min(MOST_BULKS, max(FEWEST, int(BULK_IN_ALL_S / (bulk_bytes * beta_s))))
        return cls(num_rounds, num_repetitions, bulk_bytes, num_bulks)


# --- links -----------------------------------------------------------------------------------------------------------


class _Ring(NamedTuple):
    """A rank's neighbours in a measurement: around a ring, and its partner in a pair (if it has one)."""

    after: int
    before: int
    partner: int | None
    place: int  # in the ring; pairs are 0 and 1, 2 and 3, …


class _Bench:
    """Times messages on this rank.

    Args:
        empty_call: see `calibrate`.

    Attributes:
        rings: "inside" a host, and "between" hosts the ranks of one place; None where this rank is alone.
        usual: of those two, the one that additions and calls are measured on.
    """

    def __init__(
        self,
        transport: Transport,
        hosts: Hosts,
        *,
        timeout_s: float,
        device: torch.device,
        empty_call: Callable[[], object],
    ) -> None:
        self._transport, self._timeout_s, self._device, self._empty_call = transport, timeout_s, device, empty_call
        self._scratch = Scratch()
        rank = transport.rank
        mine = next(host for host in hosts if rank in host)
        self._place = mine.index(rank)
        column = [host[self._place] for host in hosts] if self._place < min(map(len, hosts)) else [rank]
        self.rings = {"inside": _ring(mine, rank), "between": _ring(column, rank)}
        self.usual = "inside" if any(len(host) > 1 for host in hosts) else "between"
        self._is_mixed = self.usual == "inside" and len(hosts) > 1

    def look(self) -> Times:
        """A first look, and a warm-up."""
        times: Times = {}
        for name, ring in self.rings.items():
            if ring is not None:
                times[f"{name} small"] = self._time(_exchange(ring), SMALL_BYTES, LOOKS)
                times[f"{name} look"] = self._time(_exchange(ring), LOOK_BYTES, LOOKS)
        return times

    def measure(self, plans: Mapping[str, _Plan]) -> Times:
        times: Times = {"adding": self._add()}
        for name, ring in self.rings.items():
            if ring is not None:
                times |= {f"{name} {what}": found for what, found in self._latencies(name, ring, plans[name]).items()}
                times |= {f"{name} {what}": found for what, found in self._bandwidths(name, ring, plans[name]).items()}
                if name == self.usual:
                    plan = plans[name]
                    summing = _exchange(ring, add=True) * plan.num_rounds
                    times["sums"] = self._time(summing, SMALL_BYTES, plan.num_repetitions, divide_by=plan.num_rounds)
        return times

    def whole_collectives(self, plans: Mapping[str, _Plan], memory: _Memory | None) -> Times:
        """All-reduces of few bytes, called one by one: by recursive doubling; through memory and once between hosts."""
        slower = min(plans.values())
        calls, count = max(1, slower.num_rounds // 2), max(2 * FEWEST, slower.num_repetitions)
        rank, num_ranks = self._transport.rank, self._transport.world_size
        if num_ranks == 1:
            return {}
        rounds = list(ALL_REDUCE[WHOLE].algorithm(rank, num_ranks))
        times = {"whole": self._time(rounds, SMALL_BYTES, count, calls=calls)}
        if self._is_mixed:
            across = self.rings["between"]
            times["mixed"] = self._time(
                [()] if across is None else _exchange(across, add=True),
                SMALL_BYTES,
                count,
                calls=calls,
                before=memory.reduce_scatter_little if memory else nothing,
                after=memory.all_gather_little if memory else nothing,
            )
        return times

    def _latencies(self, name: str, ring: _Ring, plan: _Plan) -> Times:
        """Inside a host those of all ranks together, and of one pair by itself; between hosts of all pairs together."""
        rounds, count = plan.num_rounds, plan.num_repetitions
        few = max(1, rounds // 4)
        times = {
            "small": self._time(_exchange(ring) * rounds, SMALL_BYTES, count, divide_by=rounds),
            "many": self._time(_exchange(ring, MANY) * few, SMALL_BYTES, count, divide_by=few),
        }
        is_the_pair = name == "inside" and ring.place < 2
        if is_the_pair and ring.partner is not None and ring.after != ring.before:
            pair = _Ring(ring.partner, ring.partner, ring.partner, ring.place)
            times["pair"] = self._time(_exchange(pair) * rounds, SMALL_BYTES, count, divide_by=rounds)
        if (name == "between" or is_the_pair) and (ping_pong := self._ping_pong(ring)):
            times["one way"] = self._time(ping_pong * rounds, SMALL_BYTES, count, divide_by=2 * rounds)
        return times

    def _bandwidths(self, name: str, ring: _Ring, plan: _Plan) -> Times:
        """Inside a host that of all ranks together, and that of one pair by itself; between hosts that of one rank."""
        times: Times = {}
        if name == "inside" or self._place == 0:
            times["bulk"] = self._time(_exchange(ring), plan.bulk_bytes, plan.num_bulks)
        if name == "inside" and ring.place < 2 and (ping_pong := self._ping_pong(ring)):
            times["bulk one way"] = self._time(ping_pong, plan.bulk_bytes, plan.num_bulks, divide_by=2)
        return times

    def _ping_pong(self, ring: _Ring) -> list[Round]:
        """Not on GPUs: there the host waits for each message anyway, and would pay for it twice."""
        if ring.partner is None or self._device.type == "cuda":
            return []
        send: Round = (Send(ring.partner, range(1)),)
        receive: Round = (Recv(ring.partner, range(1, 2), add=False),)
        return [send, receive] if ring.place % 2 == 0 else [receive, send]

    def _time(
        self,
        rounds: Sequence[Round],
        num_bytes: int,
        count: int,
        *,
        divide_by: int = 1,
        calls: int = 0,
        before: Callable[[], object] = nothing,
        after: Callable[[], object] = nothing,
    ) -> list[float]:
        """Runs the rounds on messages of so many bytes; seconds by repetition, divided.

        Args:
            calls: if not 0, so often in each repetition, each time as users call it; seconds per call.
        """
        num_chunks = max((op.chunks.stop for ops in rounds for op in ops), default=1)
        flat = torch.ones(num_chunks * num_bytes, dtype=torch.uint8, device=self._device)
        program = program_of(rounds, [range(0, flat.numel() + 1, num_bytes)], segment_numel=SEGMENT_BYTES)
        times = []
        for _ in range(count + 1):
            start_s = now_s()
            for _ in range(max(1, calls)):
                if calls:
                    self._empty_call()
                before()
                execute(
                    program,
                    [flat],
                    self._transport,
                    scratch=self._scratch,
                    combine=Tensor.add_,
                    timeout_s=self._timeout_s,
                )
                after()
            times.append((now_s() - start_s) / divide_by / max(1, calls))
        return times[1:]

    def _add(self) -> list[float]:
        here, arrived = (torch.zeros(ADD_BYTES // 4, device=self._device) for _ in range(2))
        times = []
        for _ in range(FEWEST + 1):
            start_s = now_s()
            here.add_(arrived)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append(now_s() - start_s)
        return times[1:]


def _ring(ranks: Sequence[int], rank: int) -> _Ring | None:
    if len(ranks) == 1:
        return None
    here = ranks.index(rank)
    other = here ^ 1
    return _Ring(ranks[(here + 1) % len(ranks)], ranks[here - 1], ranks[other] if other < len(ranks) else None, here)


def _exchange(ring: _Ring, num_messages: int = 1, *, add: bool = False) -> list[Round]:
    """A round in which everyone sends to its right and receives from its left."""
    sends = [Send(ring.after, range(k, k + 1)) for k in range(num_messages)]
    receives = [Recv(ring.before, range(k, k + 1), add) for k in range(num_messages, 2 * num_messages)]
    return [(*sends, *receives)]


def _measured(everyone: Sequence[Times], plans: Mapping[str, _Plan], hosts: Hosts, usual: str) -> Measured:
    network, shared = _network(everyone, plans, hosts, usual), _shared(everyone)
    call_s, mixed_call_s = 0.0, 0.0
    if network.num_ranks > 1:
        whole_s = _slowest(everyone, "whole")
        price_s = price(WHOLE, ALL_REDUCE[WHOLE], SMALL_BYTES, network)
        if whole_s < price_s:  # note "the last word"
            network = _scaled(network, whole_s / price_s)
        call_s = max(0.0, whole_s - price_s)
    if (mixed_s := _slowest(everyone, "mixed")) and shared is not None:
        exchange_s = network.between.announce_s + network.between.alpha_s + network.addition_s
        mixed_call_s = max(0.0, mixed_s - exchange_s - shared.predict_s(MEMORY_BYTES[0], allocated=False))
    return Measured(network, shared, call_s, mixed_call_s)


def _scaled(network: Network, factor: float) -> Network:
    """All latencies times `factor`."""
    inside, between = (
        replace(
            link,
            alpha_s=link.alpha_s * factor,
            announce_s=link.announce_s * factor,
            gap_s=link.gap_s * factor,
            busy_s=link.busy_s * factor,
        )
        for link in (network.inside, network.between)
    )
    return replace(network, inside=inside, between=between, addition_s=network.addition_s * factor)


def _network(everyone: Sequence[Times], plans: Mapping[str, _Plan], hosts: Hosts, usual: str) -> Network:
    largest = max(map(len, hosts))
    links = {name: _link(everyone, name, plan, num_sharing=largest) for name, plan in plans.items()}
    inside = links["inside"] if largest > 1 else links["between"]
    between = links["between"] if len(hosts) > 1 else links["inside"]
    return Network(
        hosts,
        inside,
        between,
        gamma_s=_slowest(everyone, "adding") / ADD_BYTES,
        addition_s=max(0.0, _slowest(everyone, "sums") - _slowest(everyone, f"{usual} small")),
    )


def _link(everyone: Sequence[Times], name: str, plan: _Plan, *, num_sharing: int) -> Link:
    small_s, many_s, one_way_s = (_slowest(everyone, f"{name} {what}") for what in ("small", "many", "one way"))
    pair_s = min(small_s, _slowest(everyone, f"{name} pair") or small_s)
    alpha_s, busy_s = min(one_way_s or pair_s, pair_s), (small_s - pair_s) / num_sharing
    beta_s, shared_s = max(0.0, _slowest(everyone, f"{name} bulk") - small_s) / plan.bulk_bytes, 0.0
    if alone_s := _slowest(everyone, f"{name} bulk one way"):
        shared_s = beta_s / num_sharing
        beta_s = min(beta_s, max(0.0, alone_s - alpha_s) / plan.bulk_bytes)
    return Link(
        alpha_s=alpha_s,
        beta_s=max(beta_s, shared_s),
        announce_s=pair_s - alpha_s,
        gap_s=max(0.0, (many_s - small_s) / (MANY - 1) - num_sharing * busy_s),
        shared_s=shared_s,
        busy_s=busy_s,
    )


# --- memory ----------------------------------------------------------------------------------------------------------


class _Memory:
    """Times what the ranks of a host do in their memory: all of an all-reduce, or the two ends of one between hosts."""

    def __init__(self, group: HostGroup, hosts: Hosts, *, timeout_s: float, empty_call: Callable[[], object]) -> None:
        self._group, self._timeout_s, self._empty_call = group, timeout_s, empty_call
        self._is_only_host, self._num_slices = len(hosts) == 1, min(map(len, hosts))
        self._little = torch.ones(MEMORY_BYTES[0] // 4, device="cpu")

    def measure(self) -> Times:
        """At some sizes, on an ordinary tensor and on one that is shared."""
        group = self._group
        largest = min(MEMORY_BYTES[-1], MEMORY_IN_ALL // group.size if self._is_only_host else MIXED_BYTES)
        tensors = {"ordinary": torch.zeros(largest // 4, device="cpu")}
        try:
            tensors["allocated"] = group.allocate(largest // 4, torch.float32, timeout_s=self._timeout_s)
        except NoSharedMemory:  # on all ranks of the host alike; then nobody gets such tensors
            pass
        times = {
            f"{kind} {nbytes}": self._time(tensor[: nbytes // 4])
            for kind, tensor in tensors.items()
            for nbytes in MEMORY_BYTES
            if nbytes <= largest
        }
        if "allocated" in tensors:
            group.free(tensors["allocated"])
        return times

    def reduce_scatter_little(self) -> None:
        self._reduce_scatter(self._little)

    def all_gather_little(self) -> None:
        self._all_gather(self._little)

    def _time(self, flat: Tensor) -> list[float]:
        calls = ROUNDS if self._group.is_crowded and flat.nbytes <= 1 << 20 else 1
        count = FEWEST * (4 if flat.nbytes <= 1 << 20 else 2 if flat.nbytes <= 4 << 20 else 1)
        times = []
        for _ in range(count + 1):
            flat.fill_(1.0)  # as a gradient, it was written just now
            self._begin_together()
            start_s = now_s()
            for _ in range(calls):
                self._empty_call()
                if self._is_only_host:
                    self._group.all_reduce(flat, "sum", sequence=0, timeout_s=self._timeout_s)
                else:
                    self._reduce_scatter(flat)
                    self._all_gather(flat)
            times.append((now_s() - start_s) / calls)
        return times[1:]

    def _begin_together(self) -> None:
        """Returns on all ranks of the host at the same moment, which they agree on by their common clock.

        Out of a barrier they come one after another, then wait for each other in every collective that follows. Where
        they share cores, waiting for a moment would take the core from those who are late: there they do come so.
        """
        moment = torch.tensor([now_s() + TOGETHER_S], dtype=torch.float64, device="cpu")
        self._group.all_reduce(moment, "max", sequence=0, timeout_s=self._timeout_s)
        if not self._group.is_crowded:
            moment_s = moment.item()
            while now_s() < moment_s:
                pass

    def _reduce_scatter(self, flat: Tensor) -> None:
        self._group.reduce_scatter(flat, self._slices(flat), "sum", sequence=0, timeout_s=self._timeout_s)

    def _all_gather(self, flat: Tensor) -> None:
        self._group.all_gather(flat, self._slices(flat), sequence=0, timeout_s=self._timeout_s)

    def _slices(self, flat: Tensor) -> list[int]:
        """Cuts slices as `carrier.py` does: the smallest host says how many."""
        return offsets(flat.numel(), self._num_slices) + [flat.numel()] * (self._group.size - self._num_slices)


def _shared(everyone: Sequence[Times]) -> SharedMemory | None:
    curves = {kind: _curve(everyone, kind) for kind in ("ordinary", "allocated")}
    ordinary = curves["ordinary"]
    return None if ordinary is None else SharedMemory(ordinary, curves["allocated"] or ordinary)


def _curve(everyone: Sequence[Times], kind: str) -> Curve | None:
    """The sizes that every host with a memory has measured; None if one of them has measured nothing."""
    measuring = [times for times in everyone if f"ordinary {MEMORY_BYTES[0]}" in times]
    sizes = [size for size in MEMORY_BYTES if measuring and all(f"{kind} {size}" in times for times in measuring)]
    if not sizes:
        return None
    return Curve(tuple(sizes), tuple(_slowest(everyone, f"{kind} {size}") for size in sizes))
