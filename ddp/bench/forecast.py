"""Forecasts a training step on other ranks, hosts and links from a step that was profiled: a pure function.

    work        what one rank computes in a step, and when each gradient is ready; medians of the profile, without what
                its reductions took
    dispatch    how a bucket travels: seconds of encoding, and the collectives that are called for it
    prices      seconds of each collective: `comm/plan.py` on links and memory as they were measured
    replay      the step of all ranks, bucket after bucket in the order of launch, as `replica/backward.py` runs it:

    in the foreground    ▓ fc ▓│░ bucket 0 ░│▓▓ conv4 ▓▓│░░ bucket 1 ░░│▓▓ …     backward stands still meanwhile
    in the background    ▓ fc ▓│▓▓ conv4 ▓▓│▓▓ conv3 ▓▓│▓▓ …                     one thread takes buckets in turn
                               │░ bucket 0 ░│░░ bucket 1 ░░│░ …

A collective begins when its last rank has come, and ends for all ranks together: no all-reduce can end before that.

Stragglers: in each step each rank's computing is multiplied by a number drawn from the profile's own: what each rank
computed in each profiled step, relative to the median. With more ranks the slowest draw is slower.

Note "cores". Where a host has no core to spare, what the communication thread computes (encoding, additions, copies of
the network's stack) takes time from backward: while the wire is busy, backward runs slower by that share.

Note "samples". Forward, backward and reading grow with a rank's samples; update and the rest do not. What a smaller
share costs more than in proportion is known once processes of that share were measured: then their profile is the work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddp.bench.place import PAYLOAD
from ddp.collectives.placed import Hosts
from ddp.collectives.simulate import Link, Network
from ddp.comm.calibrate import Curve, Measured
from ddp.comm.flat_collectives import IN_MEMORY, possible_routes
from ddp.comm.plan import moved_s, ranked
from ddp.comm.wire_format import wire_format
from ddp.errors import ConfigError, did_you_mean
from ddp.gradients.bucket import Slot, span
from ddp.gradients.layout import MIB, plan_buckets
from ddp.setting import Narrow
from ddp.train.monitor.profile import Profile, RankStep

Strategy = Literal["replicated", "sharded", "central_storage"]
STRATEGIES: Mapping[str, Strategy] = {
    "Replicated": "replicated",
    "Sharded": "sharded",
    "CentralStorage": "central_storage",
}
NUM_STEPS = 50  # that are drawn where there are stragglers
MANY_RANKS = 1000  # whose simulation takes seconds
MOST_TAKEN = 0.95  # of a core by communication: backward always goes on

# --- the work of a rank ----------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """A parameter's gradient; `ready_s` is seconds of computing since backward began."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ready_s: float

    @property
    def like(self) -> nn.Parameter:
        """Returns a parameter of its shape and type, without memory."""
        return nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="meta"), requires_grad=False)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Holds what one rank computes in a step.

    Attributes:
        num_samples: of the rank.
        before_s: until the backward begins that sends gradients.
        update_s, other_s: of the optimizer, and of what is in no other part.
        buckets: the gradients of each bucket, in the order in which they are ready.
        spread: what ranks computed in a step ÷ the median, in the order of size.
    """

    num_samples: float
    before_s: float
    update_s: float
    other_s: float
    buckets: tuple[tuple[Gradient, ...], ...]
    spread: tuple[float, ...] = (1.0,)

    @property
    def backward_s(self) -> float:
        """Returns the length of the backward that sends gradients."""
        return max(gradient.ready_s for bucket in self.buckets for gradient in bucket)

    @property
    def computing_s(self) -> float:
        """Returns the length of a step without communication."""
        return self.before_s + self.backward_s + self.update_s + self.other_s

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all gradients."""
        return sum(map(bytes_of, self.buckets))

    def of_samples(self, num_samples: float) -> Work:
        """Returns the work of another number of samples (note "samples")."""
        ratio = num_samples / self.num_samples
        return replace(self._paced(ratio), num_samples=num_samples, before_s=self.before_s * ratio)

    def slower(self, factor: float) -> Work:
        """Returns the same work on cores that are slower by a factor."""
        parts = {name: getattr(self, name) * factor for name in ("before_s", "update_s", "other_s")}
        return replace(self._paced(factor), **parts)

    def in_buckets(self, bucket_mb: float) -> Work:
        """Returns the same work with buckets that are closed at another size; the first one, at 1 MiB at most."""
        gradients = list(chain.from_iterable(self.buckets))
        slots = [Slot(number, each.name, each.like) for number, each in enumerate(gradients)]
        limits = [int(min(bucket_mb, 1.0) * MIB), int(bucket_mb * MIB)]
        groups = plan_buckets(slots, limits=limits)
        return replace(self, buckets=tuple(tuple(gradients[slot.index] for slot in group) for group in groups))

    def _paced(self, factor: float) -> Work:
        def paced(bucket: Sequence[Gradient]) -> tuple[Gradient, ...]:
            return tuple(each._replace(ready_s=each.ready_s * factor) for each in bucket)

        return replace(self, buckets=tuple(map(paced, self.buckets)))


def bytes_of(bucket: Sequence[Gradient]) -> int:
    """Returns the bytes of a bucket, padding included."""
    return sum(span(each.like) * each.dtype.itemsize for each in bucket)


def work_of(profile: Profile) -> Work:
    """Returns the work of a rank in a profiled step.

    Raises:
        ConfigError: its gradients were not sent in buckets.
    """
    records = list(chain.from_iterable(profile.steps))
    if not all(record.buckets for record in records):
        raise ConfigError("the profiled run sent no buckets of gradients: profile one with replica.kind=bucketed")
    in_foreground = profile.runs == "in the foreground"
    ready = [_ready_s(record, in_foreground=in_foreground) for record in records]
    ready_s = list(map(median, zip(*ready, strict=True)))
    computed = [record.step_s - record.communication_s - record.wait_s for record in records]
    last_s = median(map(max, ready))
    return Work(
        num_samples=median(record.num_samples for record in records),
        before_s=max(0.0, median(each.data_s + each.forward_s + each.backward_s for each in records) - last_s),
        update_s=median(record.update_s for record in records),
        other_s=median(record.other_s for record in records),
        buckets=tuple(_gradients(records[0], ready_s)),
        spread=tuple(sorted(each / median(computed) for each in computed)),
    )


def _ready_s(record: RankStep, *, in_foreground: bool) -> list[float]:
    """Returns by bucket the seconds of computing until it is full: in the foreground without earlier reductions."""
    return [
        bucket.ready_s
        - sum(each.done_s - each.launched_s for each in record.buckets if each.launched_s < bucket.ready_s)
        * in_foreground
        for bucket in record.buckets
    ]


def _gradients(record: RankStep, ready_s: Sequence[float]) -> list[tuple[Gradient, ...]]:
    """Returns the gradients of each bucket. Inside of a bucket they are ready in proportion to their bytes."""
    found, began_s = [], 0.0
    for bucket, ended_s in zip(record.buckets, accumulate(ready_s, max), strict=True):
        dtype = getattr(torch, bucket.dtype)
        numels = [math.prod(shape) for shape in bucket.shapes]
        shares = [until / max(1, sum(numels)) for until in accumulate(numels)]
        found.append(
            tuple(
                Gradient(name, tuple(shape), dtype, began_s + share * (ended_s - began_s))
                for name, shape, share in zip(bucket.parameters, bucket.shapes, shares, strict=True)
            )
        )
        began_s = ended_s
    return found


# --- what collectives cost -------------------------------------------------------------------------------------------

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
        taken_s: seconds of a core for each byte that a host sends (note "cores").

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
        ConfigError: there are several hosts, and nobody knows the link between them.
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


# --- the replay ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The ranks that are asked about, and what a step is there.

    Attributes:
        prices: of collectives there.
        batch: samples of a step, of all ranks.
        wire: the format in which gradients travel between hosts.
        cores: usable, of each host; threads: of a rank.
        in_background: None: as a run decides it (`comm/plan.py`, `Plan.overlaps`).
    """

    prices: Prices
    batch: float
    strategy: Strategy = "replicated"
    wire: Narrow | None = None
    cores: int = 1
    threads: int = 1
    in_background: bool | None = None

    @property
    def num_ranks(self) -> int:
        return self.prices.num_ranks

    @property
    def per_host(self) -> int:
        """The ranks of the largest host."""
        return max(map(len, self.prices.hosts))

    @property
    def has_spare_cores(self) -> bool:
        """Returns True if communication threads have cores of their own."""
        return self.cores >= self.per_host * (self.threads + 1)

    @property
    def overlaps(self) -> bool:
        """Returns True if buckets are reduced in the background of backward."""
        if self.in_background is not None:
            return self.in_background
        return self.num_ranks > 1 and (IN_MEMORY not in self.prices.routes or self.has_spare_cores)

    def dispatches(self, work: Work) -> list[Dispatch]:
        """Returns how buckets travel without a hook."""
        return [Dispatch(0.0, self._calls(bytes_of(bucket))) for bucket in work.buckets]

    def _calls(self, nbytes: int) -> tuple[Call, ...]:
        sent = nbytes if self.wire is None else wire_format(self.wire).bytes_of(nbytes // 4)
        if self.strategy == "replicated":
            return (Call("all_reduce", nbytes, 2 * sent, self.wire),)
        calls = (Call("reduce_scatter", nbytes, sent, self.wire),)
        return (*calls, Call("gather_across", nbytes, nbytes)) if self.strategy == "central_storage" else calls


class Timed(NamedTuple):
    """A bucket of the replay: when it is ready, and the seconds of its reduction; those of them that compute."""

    ready_s: float
    seconds: float
    computing_s: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of all ranks, as the replay runs it.

    Attributes:
        before_s, backward_s, update_s, other_s: what a rank computes.
        buckets: in the order of launch.
        opening_s, closing_s, gathering_s: what collectives take that all ranks wait for, before backward, after it, and
            after the update.
        in_background: of backward.
        shares_cores: communication takes time from backward (note "cores").
    """

    before_s: float
    backward_s: float
    update_s: float
    other_s: float
    buckets: tuple[Timed, ...]
    opening_s: float = 0.0
    closing_s: float = 0.0
    gathering_s: float = 0.0
    in_background: bool = False
    shares_cores: bool = False


def step_of(work: Work, setup: Setup, dispatches: Sequence[Dispatch]) -> Step:
    """Returns the step that a rank's work becomes on these ranks.

    Args:
        dispatches: by bucket.
    """
    price, sharded = setup.prices.of, setup.strategy != "replicated"
    dtypes = {bucket[0].dtype for bucket in (work.buckets[0], work.buckets[-1])}
    has_hook = any(dispatch.encoding_s for dispatch in dispatches)
    rides = not sharded and not has_hook and setup.wire is None and dtypes <= {torch.float32, torch.float64}
    closing: list[Call] = [] if rides else [SMALL]
    gathering, slices = list[Call](), 1
    if setup.strategy == "sharded":
        closing, slices = [SMALL, SMALL], setup.num_ranks  # the second one, for norms
        gathering = [Call("all_gather", nbytes, nbytes) for nbytes in map(bytes_of, work.buckets)]
    elif setup.strategy == "central_storage":
        closing, gathering, slices = [SMALL, BARRIER], [BARRIER], setup.per_host
    timed = []
    for bucket, dispatch in zip(work.buckets, dispatches, strict=True):
        taken_s = setup.prices.taken_s * _leaving(dispatch.calls, len(setup.prices.hosts))
        seconds = dispatch.encoding_s + sum(map(price, dispatch.calls))
        timed.append(Timed(bucket[-1].ready_s, seconds, min(seconds, dispatch.encoding_s + taken_s)))
    return Step(
        before_s=work.before_s,
        backward_s=work.backward_s,
        update_s=work.update_s / slices,
        other_s=work.other_s,
        buckets=tuple(timed) if setup.num_ranks > 1 else (),
        opening_s=0.0 if rides else price(SMALL),
        closing_s=sum(map(price, closing)),
        gathering_s=sum(map(price, gathering)),
        in_background=setup.overlaps,
        shares_cores=not setup.has_spare_cores,
    )


def _leaving(calls: Sequence[Call], num_hosts: int) -> float:
    """Returns the bytes that leave a host, by the algorithms that send the least."""
    return sum(call.crossing for call in calls) * (num_hosts - 1) / num_hosts


def replay(step: Step, paces: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns when each of some steps in a row has ended, at its last rank, [num_steps].

    Args:
        paces: what each rank computes in each step takes so many times as long, [num_steps, num_ranks].
    """
    now, ends = np.zeros(paces.shape[1]), []
    for pace in paces:
        now = together(now + pace * step.before_s, step.opening_s)
        computed_s = done_s = total_s = taken_s = 0.0  # of backward; when the last launched bucket is complete
        for number, bucket in enumerate((*step.buckets, None)):
            # The last bucket waits for the end of backward, because it carries what each rank has found in it.
            is_last = number >= len(step.buckets) - 1
            until_s = step.backward_s if bucket is None or is_last else max(bucket.ready_s, computed_s)
            share = min(MOST_TAKEN, taken_s / total_s) if step.shares_cores and total_s else 0.0
            now = now + _beside(pace * (until_s - computed_s), done_s - now, share)
            computed_s = until_s
            if bucket is None:
                break
            done_s = max(done_s, float(now.max())) + bucket.seconds
            total_s, taken_s = total_s + bucket.seconds, taken_s + bucket.computing_s
            if not step.in_background:
                now = np.full_like(now, done_s)
                total_s = taken_s = 0.0
        now = together(np.maximum(now, done_s), step.closing_s)
        now = together(now + pace * step.update_s, step.gathering_s)
        now = now + pace * step.other_s
        ends.append(now.max())
    return np.array(ends)


def together(now: NDArray[np.float64], seconds: float) -> NDArray[np.float64]:
    """Returns when the ranks leave a collective that all of them wait for, if there is one."""
    return np.full_like(now, now.max() + seconds) if seconds else now


def _beside(computing_s: NDArray[np.float64], busy_s: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Returns what computing takes while communication takes a share of the core for so long."""
    busy_s = np.maximum(0.0, busy_s)
    return np.minimum(computing_s / (1 - share), computing_s + share * busy_s)


# --- the answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step on some ranks.

    Attributes:
        step_s: the median of steps whose stragglers were drawn.
        computing_s: of a rank that is no straggler, without communication.
        encoding_s, network_s: of all buckets, hidden by backward or not.
        exposed_s: what communication adds to computing; waiting_s: what stragglers add to both.
        link_bytes: that leave a host in a step.
        algorithm: by which the largest bucket is reduced.
    """

    num_ranks: int
    batch: float
    step_s: float
    computing_s: float
    encoding_s: float
    network_s: float
    exposed_s: float
    waiting_s: float
    link_bytes: float
    algorithm: str

    @property
    def samples_per_s(self) -> float:
        """Returns the samples of all ranks in a second."""
        return self.batch / self.step_s


def forecast(
    work: Work, setup: Setup, dispatches: Sequence[Dispatch] | None = None, *, num_steps: int = NUM_STEPS, seed: int = 0
) -> Forecast:
    """Returns what a step takes.

    Args:
        work: of a rank there, but for the number of samples.
        dispatches: by bucket; None: without a hook.
        num_steps: that are drawn where there are stragglers.

    Raises:
        ConfigError: there are fewer samples than ranks.
    """
    if setup.batch < setup.num_ranks:
        raise ConfigError(f"a batch of {setup.batch:g} on {setup.num_ranks:,} ranks: give at least a sample for each")
    work = work.of_samples(setup.batch / setup.num_ranks)
    dispatches = setup.dispatches(work) if dispatches is None else dispatches
    step = step_of(work, setup, dispatches)
    step_s = even_s = float(replay(step, np.ones((1, 1)))[0])
    if setup.num_ranks > 1 and len(set(work.spread)) > 1:
        drawn = np.random.default_rng(seed).choice(work.spread, (num_steps, setup.num_ranks))
        step_s = float(np.median(np.diff(replay(step, drawn), prepend=0.0)))
    calls = [call for dispatch in dispatches for call in dispatch.calls]
    computing_s = step.before_s + step.backward_s + step.update_s + step.other_s
    encoding_s = sum(dispatch.encoding_s for dispatch in dispatches) if setup.num_ranks > 1 else 0.0
    return Forecast(
        num_ranks=setup.num_ranks,
        batch=setup.batch,
        step_s=step_s,
        computing_s=computing_s,
        encoding_s=encoding_s,
        network_s=sum(map(setup.prices.of, calls)),
        exposed_s=even_s - computing_s,
        waiting_s=step_s - even_s,
        link_bytes=_leaving(calls, len(setup.prices.hosts)),
        algorithm=setup.prices.told(max(calls, key=lambda call: (call.operation == "all_reduce", call.nbytes)))[1],
    )


def naive_s(work: Work, setup: Setup) -> float:
    """Returns the guess that a forecast should beat: a step of one worker, and bytes ÷ rate of the slowest link."""
    measured, share = setup.prices.measured, work.of_samples(setup.batch / setup.num_ranks)
    if setup.num_ranks == 1:
        return share.computing_s
    if len(setup.prices.hosts) > 1:
        return share.computing_s + work.num_bytes * measured.network.between.beta_s
    curve = measured.allocated
    byte_s = measured.network.inside.beta_s if curve is None else curve.seconds[-1] / curve.nbytes[-1]
    return share.computing_s + work.num_bytes * byte_s


# --- to the same loss ------------------------------------------------------------------------------------------------
#
# With noise scale N, a run at batch B needs S(B) = S_min (1 + N ÷ B) steps to the same loss (McCandlish et al., arXiv
# 1812.06162, equation 2.7). So workers stop paying for two reasons: at the same batch, a worker's share becomes small
# beside what a step costs whatever the share; with a batch that grows along, samples become worth less.

HALF = 0.5  # of what workers cost is lost: no longer worth it


def steps_at(batch: float, *, noise_scale: float, num_steps: float, known_batch: float) -> float:
    """Returns the steps to the loss that a run with another batch reached in `num_steps`."""
    return num_steps * (1 + noise_scale / batch) / (1 + noise_scale / known_batch)


class ToLoss(NamedTuple):
    """Tells what reaching a loss takes."""

    batch: int
    num_steps: float
    seconds: float
    worker_hours: float


def to_loss(
    batch: int, step_s: float, *, num_ranks: int, noise_scale: float, num_steps: float, known_batch: float
) -> ToLoss:
    """Returns what it takes to reach the loss of a known run with another batch, whose steps take `step_s`."""
    steps = steps_at(batch, noise_scale=noise_scale, num_steps=num_steps, known_batch=known_batch)
    return ToLoss(batch, steps, steps * step_s, steps * step_s * num_ranks / 3600)


def batches_for(num_ranks: int, known_batch: int) -> list[int]:
    """Returns batches to try: multiples of the number of ranks, up to 64 times the known one, four to a doubling."""
    wanted = (known_batch * 2 ** (quarter / 4) for quarter in range(-12, 25))
    return sorted({known_batch, *(num_ranks * max(1, round(each / num_ranks)) for each in wanted)} - {0})


def first_reason(
    efficiencies: Mapping[int, float], *, noise_scale: float | None, batch: int
) -> tuple[int | None, int | None]:
    """Returns the number of workers from which on half is lost: at the same batch, and at one that grows along.

    Args:
        efficiencies: by number of workers, at the same batch.

    Returns:
        None for a reason that none of these numbers meets, or that is not known.
    """
    ranks = sorted(efficiencies)
    by_share = next((k for k in ranks if efficiencies[k] < HALF), None)
    if noise_scale is None:
        return by_share, None
    return by_share, next((k for k in ranks if (noise_scale + batch) / (noise_scale + k * batch) < HALF), None)
