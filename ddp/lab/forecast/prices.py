"""The cost of collectives on given ranks: schedules by the simulator, and memory as it was measured.

A bucket travels by a dispatch: seconds of encoding, and the collectives that are called for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from ddp.collectives.cost import Link, Network, equal_hosts, formula_s
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Schedule
from ddp.collectives.simulate import cost_s
from ddp.comm.communicator import Communicator
from ddp.comm.flat_collectives import IN_MEMORY, Route, possible_routes
from ddp.comm.host_links import by_size, num_pieces
from ddp.comm.objects import all_gather_object
from ddp.comm.plan import IN_A_ROW, agreed, timed
from ddp.comm.reduction import wire_format
from ddp.errors import ConfigError, did_you_mean
from ddp.lab.ranks import at_ranks
from ddp.setting import Narrow

TIMEOUT_S = 300
MEMORY_BYTES, MEMORY_IN_ALL = tuple(1 << k for k in (10, 16, 20, 22, 24)), 64 << 20
"""Sums in a host's memory that are timed, and the most memory that its ranks take for that."""
PAYLOAD = 0.956
"""The share of a link's rate that is left for payload; the rest is headers (scripts/netbed/README.md)."""
MANY_RANKS = 1000  # whose simulation takes seconds, so that formulas answer for more


Operation = Literal["all_reduce", "sum_in_host", "reduce_scatter", "all_gather", "gather_across"]


class Call(NamedTuple):
    """A collective.

    Attributes:
        operation: "gather_across" is the part of an all-gather that crosses between hosts.
        nbytes: of the tensor.
        crossing: its bytes as they travel, once for each time that they cross from host to host.
        wire: the format in which numbers travel.
    """

    operation: Operation
    nbytes: int
    crossing: int = 0
    wire: Narrow | None = None


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes: straight lines between the points, and along the last line beyond the last point."""

    nbytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, nbytes: int) -> float:
        (x0, x1), (y0, y1) = self.nbytes[-2:], self.seconds[-2:]
        beyond_s = max(0.0, (y1 - y0) * (nbytes - x1) / (x1 - x0)) if nbytes > x1 else 0.0
        return float(np.interp(nbytes, self.nbytes, self.seconds)) + beyond_s


@dataclass(frozen=True)
class Measured:
    """The figures of one layout of ranks: links, and sums in a host's memory; None where no ranks share memory."""

    network: Network
    allocated: Curve | None = None


class Dispatch(NamedTuple):
    """The way of a bucket: seconds of a rank for encoding and decoding, and the collectives in their order."""

    encoding_s: float
    calls: tuple[Call, ...]


SMALL = Call("all_reduce", 64)  # totals, flags or norms that travel separately from gradients
BARRIER = Call("sum_in_host", 4)


class Prices:
    """The cost of collectives on given ranks.

    Args:
        measured: the figures of their links and memory.
        algorithm: of all-reduces; "auto" is memory where all ranks share it, else the cheapest.
        adding_s: by wire format, seconds for each byte that travels to encode, decode and add its numbers.

    Raises:
        ConfigError: the algorithm is not possible on these ranks.
    """

    def __init__(
        self,
        measured: Measured,
        algorithm: str = "auto",
        *,
        adding_s: Mapping[Narrow, float] | None = None,
    ) -> None:
        self.measured, self.algorithm = measured, algorithm
        self.hosts, self.num_ranks = measured.network.hosts, measured.network.num_ranks
        self.routes = possible_routes(self.hosts, shared_memory=measured.allocated is not None)
        self._adding_s, self._known = adding_s or {}, dict[Call, tuple[float, str]]()
        if algorithm == "auto" and IN_MEMORY in self.routes:
            self.routes = {IN_MEMORY: self.routes[IN_MEMORY]}
        elif algorithm != "auto":
            self.routes = {name: route for name, route in self.routes.items() if route.matches(algorithm)}
        if not self.routes and self.num_ranks > 1:
            possible = possible_routes(self.hosts, shared_memory=measured.allocated is not None)
            hint, names = did_you_mean(algorithm, possible), ", ".join(possible)
            raise ConfigError(f"algorithm={algorithm!r} is not possible there.{hint} Choose one of auto, {names}")

    def of(self, call: Call) -> float:
        """Returns the seconds of a collective."""
        return self.price(call)[0]

    def price(self, call: Call) -> tuple[float, str]:
        """Returns the seconds of a collective, and the algorithm of an all-reduce."""
        if self.num_ranks == 1:
            return 0.0, ""
        if call not in self._known:
            self._known[call] = self._of(call)
        return self._known[call]

    def _of(self, call: Call) -> tuple[float, str]:
        if call.operation == "sum_in_host":
            return self._memory_s(call.nbytes), ""
        if call.operation == "all_reduce":
            return min((self._reduced_s(each, call), each.name) for each in self.routes.values())
        is_across = call.operation == "gather_across"
        schedule = "all_gather" if is_across else call.operation
        memory_s = 0.0 if is_across else self._memory_s(call.nbytes) / 2  # half of an all-reduce
        network, nbytes = self._crossing(call, in_memory=self.measured.allocated is not None)
        return memory_s + _seconds(schedule, by_size(schedule, nbytes, network.num_ranks), nbytes, network), ""

    def _memory_s(self, nbytes: int) -> float:
        return 0.0 if self.measured.allocated is None else self.measured.allocated.at(nbytes)

    def _reduced_s(self, route: Route, call: Call) -> float:
        """Returns the seconds of an all-reduce. Memory adds up one piece while others cross, so one is counted."""
        if route.schedule is None:
            return self._memory_s(call.nbytes)
        network, nbytes = self._crossing(call, in_memory=route.in_memory)
        memory_s = self._memory_s(call.nbytes // num_pieces(call.nbytes)) if route.in_memory else 0.0
        return memory_s + _seconds(route.algorithm, route.schedule, nbytes, network)

    def _crossing(self, call: Call, *, in_memory: bool) -> tuple[Network, int]:
        """Returns the ranks between which bytes travel, and how many; in memory a host counts as one rank."""
        network, nbytes = self.measured.network, call.nbytes
        if in_memory:
            network = replace(network, hosts=equal_hosts(len(self.hosts), 1))
        if call.wire is None:
            return network, nbytes
        gamma_s = self._adding_s.get(call.wire, network.gamma_s)
        return replace(network, gamma_s=gamma_s), wire_format(call.wire).bytes_of(nbytes // 4)


def _seconds(name: str, schedule: Schedule, nbytes: int, network: Network) -> float:
    return (cost_s if network.num_ranks <= MANY_RANKS else formula_s)(name, schedule, nbytes, network)


def measured_in(comm: Communicator) -> Measured:
    """Measures the links of ranks, and the memory that those of a host share. Collective."""
    return Measured(comm.plan.network(), _memory_curve(comm))


def _memory_curve(comm: Communicator) -> Curve | None:
    """Returns bytes and seconds of sums in the memory of a host; None if no ranks share any. Collective."""
    if comm.host_partition.num_hosts == comm.world_size:
        return None
    sizes = [nbytes for nbytes in MEMORY_BYTES if nbytes * max(map(len, comm.hosts)) <= MEMORY_IN_ALL]
    shared, mine = comm.allocate(sizes[-1] // 4, torch.float32), dict[str, list[float]]()
    for nbytes in sizes:
        runs = {f"{nbytes}": partial(comm.sum_in_host, shared[: nbytes // 4])}
        mine |= timed(runs, IN_A_ROW if nbytes <= 1 << 20 else 1, device=comm.device)
    comm.free(shared)
    times = agreed(mine, partial(all_gather_object, comm))
    return Curve(tuple(sizes), tuple(times[f"{nbytes}"] for nbytes in sizes))


def measured_here(num_ranks: int, threads: int) -> Measured:
    """Returns the figures of links and memory of this number of ranks on this host."""
    found: Measured = at_ranks(measured_in, num_ranks, threads=threads, timeout_s=TIMEOUT_S, device="cpu")
    return found


def measured_on(
    known: Measured | None,
    hosts: Hosts,
    *,
    alpha_s: float | None = None,
    rate_bit_s: float | None = None,
    num_measured: int = 1,
) -> Measured:
    """Returns the figures of other ranks than were measured here; links between hosts are those that are asked about.

    In memory an all-reduce by p ranks reads p buffers and writes p, all through one memory: its time grows with p.

    Args:
        known: as they were measured here; None: there are none.
        alpha_s, rate_bit_s: of the link between hosts, if there are several.
        num_measured: the ranks of a host whose memory was measured.

    Raises:
        ConfigError: there are several hosts, and no argument describes the link between them.
    """
    per_host = max(map(len, hosts))
    network = known.network if known is not None else Network(hosts, Link(0.0, 0.0), Link(0.0, 0.0))
    between = network.between
    if len(hosts) > 1:
        if alpha_s is None or rate_bit_s is None:
            raise ConfigError(f"{len(hosts):,} hosts: give --alpha and --rate of the links between them")
        between = replace(
            between, alpha_s=alpha_s, beta_s=8 / (PAYLOAD * rate_bit_s), gap_s=min(alpha_s, between.gap_s)
        )
    curve = None
    if per_host > 1 and known is not None and known.allocated is not None:
        times_s = tuple(each * per_host / num_measured for each in known.allocated.seconds)
        curve = Curve(known.allocated.nbytes, times_s)
    return Measured(replace(network, hosts=hosts, between=between), curve)


def cores_of_a_rank(cores: int, per_host: int, threads: int) -> float:
    """Returns how many cores a rank has to compute on, if a host's ranks share its cores evenly."""
    return min(threads, cores / per_host)


def threads_of_a_rank(cores: int, per_host: int, threads: int) -> int:
    """Returns how many of these threads a rank starts, if a host's ranks share its cores evenly: at least one."""
    return max(1, min(threads, cores // per_host))
