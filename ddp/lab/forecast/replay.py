"""Forecasts a training step on other ranks, hosts and links from a step that was profiled: a pure function.

    work        what one rank computes in a step, and when each gradient is ready (`work.py`)
    dispatch    how a bucket travels: seconds of encoding, and the collectives that are called for it (`prices.py`)
    step        both on the ranks that are asked about (`setup.py`)
    replay      the step of all ranks, bucket after bucket in the order of launch, as `replica/backward.py` runs it:

    in the foreground    ▓ fc ▓│░ bucket 0 ░│▓▓ conv4 ▓▓│░░ bucket 1 ░░│▓▓ …     backward stands still meanwhile
    in the background    ▓ fc ▓│▓▓ conv4 ▓▓│▓▓ conv3 ▓▓│▓▓ …                     one thread takes buckets in turn
                               │░ bucket 0 ░│░░ bucket 1 ░░│░ …

A collective begins when its last rank has come, and ends for all ranks together: no all-reduce can end before that.

Stragglers: in each step each rank's computing is multiplied by a number drawn from the profile's own: what each rank
computed in each profiled step, relative to the median. With more ranks the slowest draw is slower.

Note "cores". Where a host has no core to spare, what the communication thread computes (encoding, additions, copies of
the network's stack) takes time from backward: while the wire is busy, backward runs slower by that share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddp.errors import ConfigError
from ddp.lab.forecast.prices import Dispatch
from ddp.lab.forecast.setup import Setup, Step, leaving, step_of
from ddp.lab.forecast.work import Work

NUM_STEPS, SEED = 50, 0  # of the steps that are drawn where there are stragglers
MOST_TAKEN = 0.95  # of a core by communication: backward always goes on


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


# --- the answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step on some ranks.

    Attributes:
        step_s: the mean of steps whose stragglers were drawn.
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


def forecast(work: Work, setup: Setup, dispatches: Sequence[Dispatch] | None = None) -> Forecast:
    """Returns what a step takes.

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
        algorithm=setup.prices.told(max(calls, key=lambda call: (call.operation == "all_reduce", call.nbytes)))[1],
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
