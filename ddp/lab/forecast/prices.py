"""Tells what collectives cost on some ranks: `comm/plan.py`, on links and memory as they were measured.

A bucket travels by a dispatch: seconds of encoding, and the collectives that are called for it. What no profile has
is measured on this host: links and memory, and the time that hooks take to encode.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

import ddp
from ddp.collectives.placed import Hosts
from ddp.collectives.simulate import Link, Network
from ddp.comm.calibrate import Curve, Measured
from ddp.comm.communicator import Communicator
from ddp.comm.flat_collectives import IN_MEMORY, HostPartition, possible_routes
from ddp.comm.objects import all_gather_object
from ddp.comm.plan import adding_times, moved_s, ranked
from ddp.comm.wire_format import widened, wire_format
from ddp.comm.work import Work, done
from ddp.errors import ConfigError, did_you_mean
from ddp.gradients import ErrorFeedback, PowerSGD, RandomK, Sign, TopK
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.hooks.compression import Compression
from ddp.gradients.hooks.hook import Hook
from ddp.lab.bench.command import PAYLOAD
from ddp.lab.forecast.work import Gradient, bytes_of
from ddp.process.clock import now_s
from ddp.process.memory import available_bytes
from ddp.run.launch.from_python import launch
from ddp.setting import Narrow, WireName
from ddp.train.monitor.profile import Profile

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


def measured_of(profile: Profile) -> Measured | None:
    """Returns the figures of a profiled run's links and memory; None if it had one rank."""
    if (figures := profile.network) is None:
        return None
    curve = None
    if figures.allocated:
        nbytes, seconds = zip(*figures.allocated, strict=True)
        curve = Curve(tuple(nbytes), tuple(seconds))
    hosts = tuple(map(tuple, profile.hosts))
    return Measured(Network(hosts, figures.inside, figures.between, figures.gamma_s), curve, curve)


def measured_on(
    known: Measured | None,
    hosts: Hosts,
    *,
    alpha_s: float | None = None,
    rate_bit_s: float | None = None,
    num_measured: int = 1,
) -> Measured:
    """Returns the figures of ranks of which there are other numbers than were measured, on links that may be others.

    In memory an all-reduce by p ranks reads p buffers and writes p, all through one memory: its time grows with p.

    Args:
        known: as they were measured; None: there are none.
        alpha_s, rate_bit_s: of the link between hosts.
        num_measured: the ranks of a host whose memory was measured.

    Raises:
        ConfigError: there are several hosts, and the link between them is unknown.
    """
    per_host = max(map(len, hosts))
    if len(hosts) > 1 and known is None and (alpha_s is None or rate_bit_s is None):
        raise ConfigError("the profile has no figures of links between hosts: give --alpha and --rate")
    network = known.network if known is not None else Network(hosts, Link(0.0, 0.0), Link(0.0, 0.0))
    between = network.between
    if rate_bit_s is not None:
        between = replace(between, beta_s=8 / (PAYLOAD * rate_bit_s))
    if alpha_s is not None:
        between = replace(between, alpha_s=alpha_s, gap_s=min(alpha_s, between.gap_s))
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


# --- Measured here: links, memory, and what communication takes from computing ----------------------------------------
#
#     measured_here    links, and memory that ranks share, as calibration finds them
#     taken_s          seconds of a core for each byte that a host sends: how much slower a matrix product is beside it


MATRIX, LOOPS_S, SENT_BYTES = 256, 0.1, 8 << 20
TIMEOUT_S = 300


def measured_here(num_ranks: int, threads: int) -> Measured:
    """Returns the figures of links and memory of this number of ranks on this host."""
    found: Measured = launch(_figures, workers=num_ranks, threads_per_worker=threads, timeout_s=TIMEOUT_S)[0]
    return found


def _figures() -> Measured:
    comm = ddp.init(device="cpu")
    measured = comm.plan.measured
    ddp.shutdown()
    return measured


def taken_s(comm: Communicator) -> float:
    """Returns the seconds of a core that communication takes for each byte that a host sends. Collective."""
    num_hosts = comm.host_partition.num_hosts
    if num_hosts == 1:
        return 0.0
    matrix, flat = torch.randn(MATRIX, MATRIX), torch.zeros(SENT_BYTES // 4)
    comm.all_reduce(flat.clone())  # finds the algorithm
    comm.barrier()
    start_s, loops = now_s(), 0
    while now_s() - start_s < LOOPS_S:
        torch.mm(matrix, matrix)
        loops += 1
    loop_s = (now_s() - start_s) / loops
    comm.barrier()
    start_s, loops = now_s(), 0
    work = comm.all_reduce(flat, async_op=True)
    while not work.is_completed():
        torch.mm(matrix, matrix)
        loops += 1
    work.wait()
    lost_s = max(0.0, now_s() - start_s - loops * loop_s)
    sent = 2 * SENT_BYTES * (num_hosts - 1) / num_hosts
    return float(statistics.fmean(all_gather_object(comm, lost_s / sent)))


# --- Measured here: what a hook takes to encode gradients. Nothing is sent --------------------------------------------
#
# The hook encodes and decodes random gradients of the shapes that the profiled run has, while a stand-in for the
# communicator takes notes of every collective. So no hook needs its own formula. `forecast --hook` takes those in
# `HOOKS`; another one is an argument of `dispatches`.
#
# Bytes are those of the algorithms that send the least: with h hosts, 2 (h − 1) ÷ h of what is reduced leave each host,
# and (h − 1) ÷ h of what is gathered.


LATE = 1 << 30  # steps after which warm-ups are over
NUM_REPETITIONS = 3
COPIES = 5  # of a bucket: its parameters, the bucket, what the hook keeps and sends
CPU = torch.device("cpu")

WIRES: tuple[Narrow, ...] = ("bf16", "fp16", "int8", "int8_stochastic")
HOOKS: Mapping[str, Hook] = {
    "sign": ErrorFeedback(Sign()),
    "top_k": ErrorFeedback(TopK()),
    "random_k": ErrorFeedback(RandomK()),
    "powersgd": ErrorFeedback(PowerSGD()),
    "powersgd1": ErrorFeedback(PowerSGD(1)),
}
"""What a forecast can ask for; powersgd1 is hook=powersgd hook.rank=1."""


def adding_s() -> dict[Narrow, float]:
    """Returns for each wire format seconds for each byte that travels."""
    return {wire: median(adding_times(wire, CPU)) for wire in WIRES}


def dispatches(
    buckets: Sequence[Sequence[Gradient]], hook: Hook, hosts: Hosts, *, shares_memory: bool
) -> list[Dispatch]:
    """Returns how buckets travel with a hook: what rank 0 of these hosts encodes and sends.

    Args:
        shares_memory: the ranks of a host add up in its memory first.

    Raises:
        ConfigError: they need more memory than is free.
    """
    if COPIES * (most := max(map(bytes_of, buckets))) >= available_bytes():
        size = f"{most / 1e9:,.3g} GB"
        raise ConfigError(f"--hook: to try it on a bucket of {size} here takes more memory than is free; leave it out")
    known: dict[Any, Dispatch] = {}
    found = []
    for bucket in buckets:
        alike = tuple((gradient.shape, gradient.dtype) for gradient in bucket)
        if alike not in known:
            known[alike] = _dispatch(bucket, hook, hosts, shares_memory=shares_memory)
        found.append(known[alike])
    return found


def _dispatch(gradients: Sequence[Gradient], hook: Hook, hosts: Hosts, *, shares_memory: bool) -> Dispatch:
    slots = [
        Slot(index, f"{index}", nn.Parameter(torch.zeros(each.shape, dtype=each.dtype)))
        for index, each in enumerate(gradients)
    ]
    bucket, dry_run = Bucket(0, slots), DryRun(hosts, shares_memory=shares_memory)
    bucket.allocate(torch.zeros(bucket.numel, dtype=gradients[0].dtype))
    compression = Compression(hook, dry_run, [(slot.name, slot.parameter) for slot in slots])  # type: ignore[arg-type]
    for _ in range(2):  # the first ones make room for what the hook keeps, and for that of the step before
        dry_run.encoding_s(compression, bucket)
    encoding_s = median(dry_run.encoding_s(compression, bucket) for _ in range(NUM_REPETITIONS))
    return Dispatch(encoding_s, tuple(dry_run.calls))


class DryRun:
    """Stands for the communicator of rank 0, sends nothing, and notes what was to be sent."""

    def __init__(self, hosts: Hosts, *, shares_memory: bool) -> None:
        self.rank, self.world_size, self.device = 0, sum(map(len, hosts)), CPU
        self.slices = list(range(self.world_size))
        if not shares_memory:
            hosts = tuple((rank,) for rank in self.slices)
        seats = {rank: (host, place) for host, ranks in enumerate(hosts) for place, rank in enumerate(ranks)}
        numbers, places = zip(*(seats[rank] for rank in self.slices), strict=True)
        self.host_partition = HostPartition(numbers, places, min(map(len, hosts)))
        self.calls: list[Call] = []
        self._draws = torch.Generator(device=CPU).manual_seed(0)
        self._aside_s = 0.0

    def encoding_s(self, compression: Compression, bucket: Bucket) -> float:
        """Returns the seconds in which a hook encodes and decodes a bucket, whose collectives it notes."""
        bucket.flat.normal_(generator=self._draws)
        self.calls.clear()
        compression.begin()
        compression.num_steps = LATE
        self._aside_s, start_s = 0.0, now_s()
        compression.reduce(bucket, divide_by=1, async_op=False, label="")
        return now_s() - start_s - self._aside_s

    def chain(self, function: Any, **how: Any) -> None:
        function()

    def sum_in_host(self, flat: Tensor, **how: Any) -> None:
        self.calls.append(Call("sum_in_host", flat.nbytes))

    def all_reduce(self, flat: Tensor, *, wire: WireName | None = None, **how: Any) -> None:
        wide, narrow = widened(flat, wire)
        crossing = wide.nbytes if narrow is None else wire_format(narrow).bytes_of(wide.numel())
        self.calls.append(Call("all_reduce", wide.nbytes, 2 * crossing, narrow))

    def all_gather_(self, flat: Tensor, bounds: Sequence[int], **how: Any) -> Work:
        """Gives itself in the place of all others what it has to send, so that there is as much to decode."""
        start_s, number = now_s(), self.slices[self.rank]
        mine = flat[bounds[number] : bounds[number + 1]].clone()
        for start, stop in pairwise(bounds):
            there = flat[start:stop][: len(mine)]
            there.copy_(mine[: len(there)])
        self.calls.append(Call("all_gather", flat.nbytes, flat.nbytes))
        self._aside_s += now_s() - start_s
        return done(flat)
