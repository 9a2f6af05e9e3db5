"""Forecasts a training step on other ranks, hosts and links from a step that was profiled: a pure function.

    work        seconds that one rank computes in a step, and when each gradient is ready (`work.py`)
    dispatch    how a bucket travels: seconds of encoding, and the collectives that are called for it (`prices.py`)
    setup       the ranks that are asked about: hosts, batch, strategy, wire format and cores
    step        seconds that a rank computes there, and of each bucket when it is ready and its reduction's seconds
    replay      the step of all ranks, bucket after bucket in the order of launch, as `replica/backward.py` runs it:

    in the foreground    ▓ fc ▓│░ bucket 0 ░│▓▓ conv4 ▓▓│░░ bucket 1 ░░│▓▓ …     backward stands still meanwhile
    in the background    ▓ fc ▓│▓▓ conv4 ▓▓│▓▓ conv3 ▓▓│▓▓ …                     one thread takes buckets in turn
                               │░ bucket 0 ░│░░ bucket 1 ░░│░ …

A collective begins when its last rank has come, and ends for all ranks together: no all-reduce can end before that.

Stragglers: in each step each rank's computing is multiplied by a number drawn from the profile's own: what each rank
computed in each profiled step, relative to the median. With more ranks the slowest draw is slower.

Note "cores". Where a host has no core to spare, encoding in the communication thread takes time from
backward: while the wire is busy, backward runs slower by that share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ddp.comm.flat_collectives import IN_MEMORY
from ddp.comm.reduction import wire_format
from ddp.errors import ConfigError
from ddp.lab.forecast.prices import BARRIER, SMALL, Call, Dispatch, Prices
from ddp.lab.forecast.work import Work, bytes_of
from ddp.setting import Narrow

Strategy = Literal["replicated", "sharded", "central_storage"]
STRATEGIES: Mapping[str, Strategy] = {
    "Replicated": "replicated",
    "Sharded": "sharded",
    "CentralStorage": "central_storage",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The ranks of a forecast, and the properties of a step there.

    Attributes:
        prices: of collectives there.
        batch: samples of a step, of all ranks.
        wire: the format in which gradients travel between hosts.
        cores: usable, of each host; threads: of a rank.
    """

    prices: Prices
    batch: float
    strategy: Strategy = "replicated"
    wire: Narrow | None = None
    cores: int = 1
    threads: int = 1

    @property
    def num_ranks(self) -> int:
        return self.prices.num_ranks

    @property
    def per_host(self) -> int:
        """The ranks of the largest host."""
        return max(map(len, self.prices.hosts))

    @property
    def share(self) -> int:
        """The samples of the rank that has the most, for which the others wait. Shares differ by one at most."""
        return math.ceil(self.batch / self.num_ranks)

    @property
    def has_spare_cores(self) -> bool:
        """Returns True if communication threads have their own cores."""
        return self.cores >= self.per_host * (self.threads + 1)

    @property
    def overlaps(self) -> bool:
        """Returns True if buckets are reduced in the background of backward, as a run decides it (`comm/plan.py`)."""
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
        before_s, backward_s, update_s, other_s: a rank's seconds of computing.
        buckets: in the order of launch.
        opening_s, closing_s, gathering_s: seconds of collectives that all ranks wait for: before backward, after it,
            and after the update.
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
    # Loss, count and flags ride along in wide buckets (`gradients/layout.py`), or else travel by themselves.
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
        seconds = dispatch.encoding_s + sum(map(price, dispatch.calls))
        timed.append(Timed(bucket[-1].ready_s, seconds, dispatch.encoding_s))
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


def leaving(calls: Sequence[Call], num_hosts: int) -> float:
    """Returns the bytes that leave a host, by the algorithms that send the least."""
    return sum(call.crossing for call in calls) * (num_hosts - 1) / num_hosts


# --- the replay -------------------------------------------------------------------------------------------------------


NUM_STEPS, SEED = 50, 0  # of the steps that are drawn where there are stragglers
MOST_TAKEN = 0.95  # of a core by communication: backward always continues


def replay(step: Step, paces: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns when each of some steps in a row has ended, at its last rank, [num_steps].

    Args:
        paces: factors on each rank's computing in each step, [num_steps, num_ranks].
    """
    now, ends = np.zeros(paces.shape[1]), []
    for pace in paces:
        now = together(now + pace * step.before_s, step.opening_s)
        computed_s = done_s = total_s = taken_s = 0.0  # of backward; when the last launched bucket is complete
        for number, bucket in enumerate((*step.buckets, None)):
            # The last bucket waits for the end of backward, because it carries the flags of each rank.
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
    """Returns the time of computing while communication takes a share of the core for that long."""
    busy_s = np.maximum(0.0, busy_s)
    return np.minimum(computing_s / (1 - share), computing_s + share * busy_s)


# --- the answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step on some ranks.

    Attributes:
        step_s: the mean of steps whose stragglers were drawn.
        computing_s: of a rank that is no straggler, without communication.
        encoding_s, network_s: of all buckets, hidden by backward or not.
        exposed_s: added to computing by communication; waiting_s: added to both by stragglers.
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


def forecast(work: Work, setup: Setup, dispatches: Sequence[Dispatch] | None = None) -> Forecast:
    """Returns the time of a step.

    Args:
        work: of a rank there, but for the number of samples.
        dispatches: by bucket; None: without a hook.

    Raises:
        ConfigError: there are fewer samples than ranks.
    """
    if setup.batch < setup.num_ranks:
        raise ConfigError(f"a batch of {setup.batch:g} on {setup.num_ranks:,} ranks: give at least a sample for each")
    work = work.of_samples(setup.share)
    dispatches = setup.dispatches(work) if dispatches is None else dispatches
    step = step_of(work, setup, dispatches)
    step_s = even_s = float(replay(step, np.ones((1, 1)))[0])
    if setup.num_ranks > 1 and len(set(work.spread)) > 1:
        drawn = np.random.default_rng(SEED).choice(work.spread, (NUM_STEPS, setup.num_ranks))
        step_s = float(replay(step, drawn)[-1]) / NUM_STEPS
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
        link_bytes=leaving(calls, len(setup.prices.hosts)),
        algorithm=setup.prices.price(max(calls, key=lambda call: (call.operation == "all_reduce", call.nbytes)))[1],
    )


def naive_s(work: Work, setup: Setup) -> float:
    """Returns the guess that a forecast should beat: a step of one worker, and bytes ÷ rate of the slowest link."""
    measured, share = setup.prices.measured, work.of_samples(setup.share)
    if setup.num_ranks == 1:
        return share.computing_s
    if len(setup.prices.hosts) > 1:
        return share.computing_s + work.num_bytes * measured.network.between.beta_s
    curve = measured.allocated
    byte_s = measured.network.inside.beta_s if curve is None else curve.seconds[-1] / curve.nbytes[-1]
    return share.computing_s + work.num_bytes * byte_s
