"""Measures what the prices are made of, on the links that are there, once for a layout of ranks; under a second in all.

    what         how                                                                 who
    α            ping-pong of 8 bytes, the receive posted before: half a round trip  all pairs at once
    announce     exchange of 8 bytes, both sides post at once: what it takes above α  all ranks at once, in a ring
    gap          eight exchanges in one round: what each further message adds        the same
    β            exchange of many bytes against the exchange of 8                    inside a host all ranks at once,
                                                                                     between hosts one rank of each
    γ            `add_`, per byte                                                    every rank
    memory       the collectives of `host_reduce.py` at some sizes: caches make it   all ranks of a host
                 no straight line, so the times themselves are kept

All ranks measure at once wherever they would work at once in a collective: where ranks share a core they slow each
other down, and that belongs to the price. But a host's link is filled by one rank alone: the simulator shares it.

Of every repetition the slowest rank counts, since a collective ends with its last rank; of the repetitions, the median:
a minimum would promise what is rarely met, a mean would fall for one interruption. All ranks exchange all their times
and compute the figures from them, so they have the same ones, and the same ranking.

A repetition takes as many bytes as are sent in some `BULK_S`; how many those are is agreed after a first look.

Figures are kept for the life of the process, by layout: ranks that have all taken part in the same measurement use it
again when they meet in another communicator of that layout. They are not kept on disk: measuring costs less than a
second; a figure that another job, another network interface or another day made would decide for months, unseen; and
a run that must be repeated exactly is pinned to its choices, not to its measurements.

Read before: `collectives/simulate.py` (the model), `transport/edge.py`. Read next: `select.py`.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp.clock import now_s
from ddp.collectives.chunks import offsets
from ddp.collectives.placed import Hosts
from ddp.collectives.simulate import Link, Network
from ddp.comm.host_reduce import HostGroup, NoSharedMemory
from ddp.transport.edge import Transfer, Transport

Gather = Callable[[bytes], list[bytes]]  # everyone's bytes, by rank

SMALL_BYTES = 8
LOOK_BYTES = 64 << 10  # of the first look at the bandwidth
MOST_BYTES = 4 << 20
BULK_S = 0.03  # one exchange of many bytes should take about so long
PHASE_S = 0.06  # and all repetitions of a measurement of latency
LOOKS, FEWEST, MOST = 6, 4, 24  # repetitions; the first of each is thrown away
MANY = 8  # messages in one round, for the gap
MEMORY_BYTES = tuple(1 << k for k in (10, 13, 15, 16, 18, 20, 22, 24))
MEMORY_IN_ALL = 256 << 20  # of a host's memory, lent for the measurement
MEMORY_S = 0.012  # all repetitions of one size

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
        return max(y0, y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0))


@dataclass(frozen=True)
class SharedMemory:
    """What the ranks of a host need for their part of an all-reduce, in memory: all of it on one host; on several, the
    reduce-scatter before and the all-gather after what happens between hosts."""

    ordinary: Curve
    allocated: Curve

    def predict_s(self, nbytes: int, *, allocated: bool) -> float:
        return (self.allocated if allocated else self.ordinary).at(nbytes)


@dataclass(frozen=True)
class Measured:
    """The figures of one layout; the same on all its ranks.

    Attributes:
        shared: None where no host has several ranks with memory in common.
    """

    network: Network
    shared: SharedMemory | None


# --- measuring -------------------------------------------------------------------------------------------------------


def calibrate(
    transport: Transport,
    hosts: Hosts,
    group: HostGroup | None,
    gather: Gather,
    *,
    timeout_s: float,
    device: torch.device | str = "cpu",
) -> Measured:
    """Measures links and memory. Collective over all ranks of `transport`.

    Args:
        hosts: the ranks of every host.
        group: this host's memory, if its ranks share some.
        gather: all-gather of bytes; keeps a deadline of its own.
        timeout_s: longest wait for any one message.
        device: of the tensors that the transport carries.

    Raises:
        TransportError: a rank did not take part in time.
    """
    bench = _Bench(transport, hosts, timeout_s, torch.device(device))
    key = (tuple(map(len, hosts)), type(transport).__name__, group is not None)
    known = _known.get(key)
    looks = _exchanged({"known": known.digest if known else "", **bench.look()}, gather)
    if known is not None and {look["known"] for look in looks} == {known.digest}:
        return replace(known.measured, network=replace(known.measured.network, hosts=hosts))
    plans = {
        name: _Plan.after(_slowest(looks, f"{name} small"), _slowest(looks, f"{name} look")) for name in bench.rings
    }
    times = bench.measure(plans)
    if group is not None:
        times |= _time_memory(group, hosts, timeout_s)
    everyone = _exchanged(times, gather)
    measured = Measured(_network(everyone, plans, hosts), _shared(everyone))
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


def _slowest(everyone: Sequence[Mapping[str, list[float]]], name: str) -> float:
    """Of every repetition the slowest rank, of the repetitions the median; 0 for what nobody measured."""
    repetitions = list(zip(*(times[name] for times in everyone if times.get(name)), strict=True))
    return median(map(max, repetitions)) if repetitions else 0.0


class _Plan(NamedTuple):
    """How much to measure on a link: agreed, since all ranks must exchange equally often."""

    num_repetitions: int
    bulk_bytes: int

    @classmethod
    def after(cls, small_s: float, look_s: float) -> _Plan:
        """From the times of an exchange of few bytes, and of `LOOK_BYTES`."""
        beta_s = max(look_s - small_s, 1e-9) / LOOK_BYTES
        repetitions = min(MOST, max(FEWEST, int(PHASE_S / max(small_s, 1e-9))))
        return cls(repetitions, min(MOST_BYTES, max(LOOK_BYTES, int(BULK_S / beta_s))))


# --- links -----------------------------------------------------------------------------------------------------------


class _Ring(NamedTuple):
    """A rank's neighbours in a measurement: around a ring, and its partner in a pair (if it has one)."""

    after: int
    before: int
    partner: int | None
    is_first: bool  # of the pair
    carries_bulk: bool


class _Bench:
    """Times messages on this rank.

    Attributes:
        rings: "inside" a host, and "between" hosts the ranks of one place; None where this rank is alone.
    """

    def __init__(self, transport: Transport, hosts: Hosts, timeout_s: float, device: torch.device) -> None:
        self._transport, self._timeout_s, self._device = transport, timeout_s, device
        rank = transport.rank
        mine = next(host for host in hosts if rank in host)
        place = mine.index(rank)
        column = [host[place] for host in hosts] if place < min(map(len, hosts)) else [rank]
        self.rings = {
            "inside": _ring(mine, rank, carries_bulk=True),
            "between": _ring(column, rank, carries_bulk=place == 0),
        }

    def look(self) -> Times:
        """A first look, and a warm-up."""
        times: Times = {}
        for name, ring in self.rings.items():
            if ring is not None:
                times[f"{name} small"] = self._exchange(ring, SMALL_BYTES, LOOKS)
                times[f"{name} look"] = self._exchange(ring, LOOK_BYTES, LOOKS)
        return times

    def measure(self, plans: Mapping[str, _Plan]) -> Times:
        times: Times = {"adding": self._add()}
        for name, ring in self.rings.items():
            if ring is not None:
                count, bulk_bytes = plans[name]
                times[f"{name} small"] = self._exchange(ring, SMALL_BYTES, count)
                times[f"{name} many"] = self._exchange(ring, SMALL_BYTES, count, num_messages=MANY)
                times[f"{name} ping-pong"] = self._ping_pong(ring, count)
                if ring.carries_bulk:
                    times[f"{name} bulk"] = self._exchange(ring, bulk_bytes, FEWEST)
        return times

    def _exchange(self, ring: _Ring, num_bytes: int, count: int, *, num_messages: int = 1) -> list[float]:
        """Everyone sends to its right and receives from its left, all at once; seconds by repetition."""
        outgoing, incoming = self._bytes(num_bytes * num_messages), self._bytes(num_bytes * num_messages)
        sends = [Transfer(ring.after, data) for data in outgoing.split(num_bytes)]
        receives = [Transfer(ring.before, data) for data in incoming.split(num_bytes)]
        times = []
        for _ in range(count + 1):
            start_s = now_s()
            self._transport.post(sends, receives).wait(self._timeout_s)
            times.append(now_s() - start_s)
        return times[1:]

    def _ping_pong(self, ring: _Ring, count: int) -> list[float]:
        """One way, by half the way there and back. A receive is posted before its message can have been sent.

        Not on GPUs: NCCL runs what a rank posts one after another, so a send behind that receive would never begin.
        """
        if ring.partner is None or self._device.type == "cuda":
            return []
        ping, pong = (
            [Transfer(ring.partner, self._bytes(SMALL_BYTES))],
            [Transfer(ring.partner, self._bytes(SMALL_BYTES))],
        )
        times = []
        receiving = self._transport.post([], pong)
        for left in reversed(range(count + 1)):
            start_s = now_s()
            if ring.is_first:
                self._transport.post(ping, []).wait(self._timeout_s)
            receiving.wait(self._timeout_s)
            times.append((now_s() - start_s) / 2)
            if left:
                receiving = self._transport.post([], pong)
            if not ring.is_first:
                self._transport.post(ping, []).wait(self._timeout_s)
        return times[1:] if ring.is_first else []

    def _add(self) -> list[float]:
        here, arrived = self._bytes(MOST_BYTES).view(torch.float32), self._bytes(MOST_BYTES).view(torch.float32)
        times = []
        for _ in range(FEWEST + 1):
            start_s = now_s()
            here.add_(arrived)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append(now_s() - start_s)
        return times[1:]

    def _bytes(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


def _ring(ranks: Sequence[int], rank: int, *, carries_bulk: bool) -> _Ring | None:
    if len(ranks) == 1:
        return None
    here = ranks.index(rank)
    other = here ^ 1
    partner = ranks[other] if other < len(ranks) else None
    return _Ring(ranks[(here + 1) % len(ranks)], ranks[here - 1], partner, here % 2 == 0, carries_bulk)


def _network(everyone: Sequence[Times], plans: Mapping[str, _Plan], hosts: Hosts) -> Network:
    links = {name: _link(everyone, name, plan) for name, plan in plans.items()}
    inside = links["inside"] if any(len(host) > 1 for host in hosts) else links["between"]
    between = links["between"] if len(hosts) > 1 else links["inside"]
    return Network(hosts, inside, between, _slowest(everyone, "adding") / MOST_BYTES)


def _link(everyone: Sequence[Times], name: str, plan: _Plan) -> Link:
    small_s, many_s, bulk_s, alpha_s = (
        _slowest(everyone, f"{name} {what}") for what in ("small", "many", "bulk", "ping-pong")
    )
    alpha_s = min(alpha_s or small_s, small_s)
    return Link(
        alpha_s=alpha_s,
        beta_s=max(0.0, bulk_s - small_s) / plan.bulk_bytes,
        announce_s=small_s - alpha_s,
        gap_s=max(0.0, many_s - small_s) / (MANY - 1),
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def _time_memory(group: HostGroup, hosts: Hosts, timeout_s: float) -> Times:
    """Times the collectives of a host's memory at some sizes, on an ordinary tensor and on one that is shared."""
    largest = min(MEMORY_BYTES[-1], MEMORY_IN_ALL // group.size)
    tensors = {"ordinary": torch.zeros(largest // 4)}
    try:
        tensors["allocated"] = group.allocate(largest // 4, torch.float32, timeout_s=timeout_s)
    except NoSharedMemory:  # on all ranks of the host alike; then nobody gets such tensors
        pass
    times = {
        f"{kind} {nbytes}": _time_reductions(group, tensor[: nbytes // 4], hosts, timeout_s)
        for kind, tensor in tensors.items()
        for nbytes in MEMORY_BYTES
        if nbytes <= largest
    }
    if "allocated" in tensors:
        group.free(tensors["allocated"])
    return times


def _time_reductions(group: HostGroup, flat: Tensor, hosts: Hosts, timeout_s: float) -> list[float]:
    num_slices = min(map(len, hosts))
    slices = offsets(flat.numel(), num_slices) + [flat.numel()] * (group.size - num_slices)
    times = []
    for _ in range(_repetitions(flat.nbytes) + 1):
        flat.fill_(1.0)  # as a gradient, it was written just now
        group.barrier(sequence=0, timeout_s=timeout_s)
        start_s = now_s()
        if len(hosts) == 1:
            group.all_reduce(flat, "sum", sequence=0, timeout_s=timeout_s)
        else:
            group.reduce_scatter(flat, slices, "sum", sequence=0, timeout_s=timeout_s)
            group.all_gather(flat, slices, sequence=0, timeout_s=timeout_s)
        times.append(now_s() - start_s)
    return times[1:]


def _repetitions(nbytes: int) -> int:
    return 16 if nbytes <= 1 << 16 else 8 if nbytes <= 1 << 20 else FEWEST


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
