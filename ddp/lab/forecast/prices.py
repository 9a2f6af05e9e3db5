"""Tells what collectives cost on some ranks: `comm/plan.py`, on links and memory as they were measured.

A bucket travels by a dispatch: seconds of encoding, and the collectives that are called for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from ddp.collectives.placed import Hosts
from ddp.collectives.simulate import Link, Network
from ddp.comm.calibrate import Curve, Measured
from ddp.comm.flat_collectives import IN_MEMORY, possible_routes
from ddp.comm.plan import moved_s, ranked
from ddp.comm.wire_format import wire_format
from ddp.errors import ConfigError, did_you_mean
from ddp.lab.bench.place import PAYLOAD
from ddp.setting import Narrow

MANY_RANKS = 1000  # whose simulation takes seconds


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


class Dispatch(NamedTuple):
    """Tells how a bucket travels: seconds of a rank for encoding and decoding, and the collectives in their order."""

    encoding_s: float
    calls: tuple[Call, ...]


SMALL = Call("all_reduce", 64)  # totals, verdicts or norms that travel apart from gradients
BARRIER = Call("sum_in_host", 4)


class Prices:
    """Tells what collectives cost on some ranks.

    Args:
        measured: the figures of their links and memory.
        algorithm: of all-reduces; "auto" is memory where all ranks share it, else the cheapest.
        adding_s: by wire format, seconds for each byte that travels to encode, decode and add its numbers.
        taken_s: seconds of a core for each byte that a host sends (`replay.py`, note "cores").

    Raises:
        ConfigError: the algorithm is not possible on these ranks.
    """

    def __init__(
        self,
        measured: Measured,
        algorithm: str = "auto",
        *,
        adding_s: Mapping[Narrow, float] | None = None,
        taken_s: float = 0.0,
    ) -> None:
        self.measured, self.algorithm, self.taken_s = measured, algorithm, taken_s
        self.hosts, self.num_ranks = measured.network.hosts, measured.network.num_ranks
        self.routes = possible_routes(self.hosts, shared_memory=measured.allocated is not None)
        self._adding_s, self._known = adding_s or {}, dict[Call, tuple[float, str]]()
        if algorithm == "auto" and IN_MEMORY in self.routes:
            self.routes = {IN_MEMORY: self.routes[IN_MEMORY]}
        elif algorithm != "auto":
            self.routes = {name: route for name, route in self.routes.items() if route.answers_to(algorithm)}
        if not self.routes and self.num_ranks > 1:
            possible = possible_routes(self.hosts, shared_memory=measured.allocated is not None)
            hint, names = did_you_mean(algorithm, possible), ", ".join(possible)
            raise ConfigError(f"algorithm={algorithm!r} is not possible there.{hint} Choose one of auto, {names}")

    def of(self, call: Call) -> float:
        """Returns the seconds of a collective."""
        return self.told(call)[0]

    def told(self, call: Call) -> tuple[float, str]:
        """Returns the seconds of a collective, and the algorithm of an all-reduce."""
        if self.num_ranks == 1:
            return 0.0, ""
        if call not in self._known:
            self._known[call] = self._between(call) if self.num_ranks > MANY_RANKS else self._of(call)
        return self._known[call]

    def _between(self, call: Call) -> tuple[float, str]:
        """Returns what lies on the line between the powers of two around a size, so that few are simulated."""
        low = 1 << (call.nbytes.bit_length() - 1)
        if call.nbytes == low:
            return self._of(call)
        (low_s, _), (high_s, name) = (self.told(call._replace(nbytes=nbytes)) for nbytes in (low, 2 * low))
        return low_s + (high_s - low_s) * (call.nbytes - low) / low, name

    def _of(self, call: Call) -> tuple[float, str]:
        measured, curve, nbytes = self.measured, self.measured.allocated, call.nbytes
        memory_s = 0.0 if curve is None else curve.at(nbytes)
        if call.operation == "sum_in_host":
            return memory_s, ""
        form = None
        if call.wire is not None:
            form, gamma_s = wire_format(call.wire), self._adding_s.get(call.wire, measured.network.gamma_s)
            measured = replace(measured, network=replace(measured.network, gamma_s=gamma_s))
        if call.operation == "all_reduce":
            best = ranked(self.routes.values(), nbytes, measured, allocated=True, form=form)[0]
            return best.predicted_s, best.route.name
        nbytes = nbytes if form is None else form.bytes_of(nbytes // 4)
        if call.operation == "gather_across":
            return moved_s("all_gather", nbytes, measured) - memory_s / 2, ""
        return moved_s(call.operation, nbytes, measured), ""


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
        ConfigError: there are several hosts, and nothing says what the link between them is.
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
    return Measured(replace(network, hosts=hosts, between=between), curve, curve)


def cores_of_a_rank(cores: int, per_host: int, threads: int) -> float:
    """Returns how many cores a rank has to compute on, if a host's ranks share its cores evenly."""
    return min(threads, cores / per_host)


def threads_of_a_rank(cores: int, per_host: int, threads: int) -> int:
    """Returns how many of these threads a rank starts, if a host's ranks share its cores evenly: at least one."""
    return max(1, min(threads, cores // per_host))
