"""Computes the speed-up of workers: the figures of one number, of a series, and from where more do not pay.

The fewest workers, as a rule one, are the base: k times as many workers are ideal if they are k times as fast. A run
has reached the target at its first evaluation that is as good (`runs.py`, note "time").

A series is found among the runs of a sweep, in which nothing but the number of workers differs:

    strong   all with the same global batch
    weak     all with the same batch per worker

Note "repeats". Runs that differ in their seed alone are not averaged: the one of median speed is shown, and the range
of all with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from statistics import fmean, median_low
from typing import Any, Literal, NamedTuple

from ddp.lab.scaling.runs import Run
from ddp.train.reports.profile import PARTS, Profile


class Waited(NamedTuple):
    """Counts of how often a rank was the one that the others waited for.

    Attributes:
        share: of the buckets, in [0, 1], of which this rank's was ready last, by more than the clocks may be off.
        mean_s: by how much later than the last but one, on average of these buckets.
    """

    share: float
    mean_s: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """The figures of one number of workers.

    Attributes:
        run: the one that is shown; repeats: it and those that differ in their seed.
        speed_up: samples/s ÷ those of the base; efficiency: that ÷ times as many workers.
        efficiencies: the least and the most, by windows of both, and of their repeats.
        samples_to, seconds_to: of training until the target; None: not reached, or unknown.
        time_efficiency: efficiency by the time to the target.
        parts: seconds of a step by part, on each rank; of rank 0 alone and coarser where there is no profile.
        waited: by rank; empty where there is no profile.
    """

    run: Run
    repeats: Sequence[Run]
    speed_up: float
    efficiency: float
    efficiencies: tuple[float, float]
    samples_to: float | None
    seconds_to: float | None
    time_efficiency: float | None
    parts: Sequence[Mapping[str, float]]
    waited: Sequence[Waited]

    @property
    def workers(self) -> int:
        return self.run.workers

    @property
    def worker_seconds(self) -> float:
        """Returns the seconds of the run, summed over the workers, from its beginning to its end."""
        return self.workers * float(self.run.summary["seconds"])

    @property
    def worker_seconds_to(self) -> float | None:
        """Returns the seconds until the target, summed over the workers."""
        return None if self.seconds_to is None else self.workers * self.seconds_to

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Returns the main metric over seconds of training."""
        return [(self.run.seconds_at(samples), metric) for samples, metric in self.run.evaluations]


Kind = Literal["strong", "weak"]
Reason = Literal["speed", "target", "samples"]


class Stop(NamedTuple):
    """The number of workers beyond which more do not pay.

    Attributes:
        last: the most workers that pay.
        first: the next number, which does not; None if all that were measured pay.
        reason: it is too slow, does not reach the target, or needs too many samples for it.
    """

    last: Point
    first: Point | None
    reason: Reason | None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Runs in which nothing but the number of workers differs.

    Attributes:
        batch: of all workers for "strong", of each for "weak".
        settings: those by which the series differs from others of the sweep, by dotted name.
        metric: the name of the main metric; "" if nothing was evaluated.
        target: of that metric; None if no run has it.
        goal: the efficiency that pays.
        points: by the number of workers.
    """

    kind: Kind
    batch: Fraction
    settings: Mapping[str, Any]
    metric: str
    higher_is_better: bool
    target: float | None
    goal: float
    points: Sequence[Point]

    @property
    def base(self) -> Point:
        """Returns the fewest workers, which others are compared with."""
        return self.points[0]

    def reaches(self, point: Point) -> bool:
        """Returns True unless a run has ended worse than the target, and never was as good."""
        if self.target is None:
            return True
        return point.samples_to is not None or _as_good(point.run.metric, self.target, self.higher_is_better)

    def fault(self, point: Point) -> Reason | None:
        """Returns why this many workers do not pay; None if they do."""
        if point.efficiency < self.goal:
            return "speed"
        if not self.reaches(point):
            return "target"
        is_slow = point.time_efficiency is not None and point.time_efficiency < self.goal
        return "samples" if is_slow else None

    @cached_property
    def stop(self) -> Stop:
        """Returns where more workers stop paying."""
        last = self.base
        for point in self.points[1:]:
            if reason := self.fault(point):
                return Stop(last, point, reason)
            last = point
        return Stop(last, None, None)


def _as_good(metric: float | None, target: float, higher_is_better: bool) -> bool:
    return metric is not None and (metric >= target if higher_is_better else metric <= target)


def point_of(repeats: Sequence[Run], of_base: Sequence[Run], target: float | None) -> Point:
    """Returns the figures of one number of workers, compared with the repeats of the base."""
    run, base = median_run(repeats), median_run(of_base)
    times = run.workers / base.workers
    rates, of_one = ([rate for each in runs for rate in each.window_rates] for runs in (repeats, of_base))
    speed_up = run.samples_per_s / base.samples_per_s
    samples_to, seconds_to, base_s = samples_until(run, target), seconds_until(run, target), seconds_until(base, target)
    return Point(
        run=run,
        repeats=repeats,
        speed_up=speed_up,
        efficiency=speed_up / times,
        efficiencies=(min(rates) / max(of_one) / times, max(rates) / min(of_one) / times),
        samples_to=samples_to,
        seconds_to=seconds_to,
        time_efficiency=base_s / (times * seconds_to) if base_s and seconds_to else None,
        parts=parts_of(run),
        waited=[] if run.profile is None else waited_for(run.profile),
    )


def median_run(repeats: Sequence[Run]) -> Run:
    """Returns the run of median speed, the slower one of two."""
    speed = median_low(run.samples_per_s for run in repeats)
    return next(run for run in repeats if run.samples_per_s == speed)


def samples_until(run: Run, target: float | None) -> float | None:
    """Returns the samples that a run was trained on until an evaluation was as good as the target, if one was."""
    higher = bool(run.summary.get("higher_is_better"))
    if target is None:
        return None
    return next((samples for samples, metric in run.evaluations if _as_good(metric, target, higher)), None)


def seconds_until(run: Run, target: float | None) -> float | None:
    """Returns the seconds of training until then (`runs.py`, note "time")."""
    samples = samples_until(run, target)
    return None if samples is None else run.seconds_at(samples)


def parts_of(run: Run) -> list[dict[str, float]]:
    """Returns the seconds of a step by part, on each rank: means over the profiled steps, so that they add up.

    Without a profile: shares of all steps on rank 0, as the summary has them.
    """
    if run.profile is not None:
        ranks = range(run.profile.world_size)
        return [{part: fmean(step[rank].parts[part] for step in run.profile.steps) for part in PARTS} for rank in ranks]
    shares = {part: run.summary.get(f"{part}_fraction") for part in ("data", "compute", "wait")}
    step_s = run.batch / run.samples_per_s
    return [{part: share * step_s for part, share in shares.items() if share is not None}] if any(shares) else []


def waited_for(profile: Profile) -> list[Waited]:
    """Returns by rank how often the others waited for it: until its bucket was ready, on one clock for all ranks."""
    ranks = range(profile.world_size)
    late: dict[int, list[float]] = {rank: [] for rank in ranks}
    num_buckets = 0
    for step in profile.steps:
        for buckets in zip(*(each.buckets for each in step), strict=False):
            moments = [each.began_s + each.backward_began_s for each in step]
            ready = sorted((moments[rank] + buckets[rank].ready_s, rank) for rank in ranks)
            num_buckets += 1
            if len(ready) == 1:
                continue
            (second_s, other), (last_s, rank) = ready[-2:]
            if last_s - second_s > profile.clock[rank].error_s + profile.clock[other].error_s:
                late[rank].append(last_s - second_s)
    if not num_buckets or len(ranks) == 1:
        return []
    return [Waited(len(late[rank]) / num_buckets, fmean(late[rank]) if late[rank] else 0.0) for rank in ranks]


# --- which runs are compared ------------------------------------------------------------------------------------------


ABOUT = 0.02
"""Ends of the main metric that are worse by no more than this share are about as good."""
_OF_A_RUN = ("run", "sweep", "resume", "trust", "trial", "seed", "cluster", "batch.global_size", "batch.num_shards")
"""Settings, or groups of them, that name a run, repeat it, or say its number of workers and its batch."""
_DERIVED = ("cluster.threads_per_worker", "cluster.local_workers", "batch.num_shards")
"""Settings that follow from the number of workers, unless they were given."""


def compare(runs: Sequence[Run], *, target: float | None = None, goal: float = 0.8) -> tuple[list[Series], list[str]]:
    """Returns the series of a sweep, the strong ones first, and a sentence about runs that are in none.

    Args:
        target: of the main metric; None: the worst end of a run that is about as good as that of the fewest workers.
        goal: the efficiency that pays.
    """
    groups: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        groups[_others(run)].append(run)
    parted = [part for group in groups.values() for part in _without_mixed(group)]
    found: list[tuple[Kind, Fraction, list[Run]]] = []
    for kind in ("strong", "weak"):
        for part in parted:
            by_batch: dict[Fraction, list[Run]] = defaultdict(list)
            for run in part:
                by_batch[Fraction(run.batch, 1 if kind == "strong" else run.workers)].append(run)
            found += [(kind, batch, each) for batch, each in sorted(by_batch.items()) if _num_sizes(each) > 1]
    shown = {id(run) for _, _, each in found for run in each}
    notes = [
        f"{run.name} is in no comparison, because no other run differs from it in the number of workers alone."
        for run in runs
        if id(run) not in shown
    ]
    differing = _differing([run for run in runs if id(run) in shown])
    return [
        _series(kind, batch, each, {key: each[0].settings.get(key) for key in differing}, target, goal)
        for kind, batch, each in found
    ], notes


def _series(
    kind: Kind, batch: Fraction, runs: Sequence[Run], settings: Mapping[str, Any], target: float | None, goal: float
) -> Series:
    by_workers: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_workers[run.workers].append(run)
    sizes = sorted(by_workers)
    shown = [median_run(by_workers[size]) for size in sizes]
    metric, higher = _metric(shown)
    if target is None and metric:
        target = _target(shown, by_workers[sizes[0]], higher_is_better=higher)
    fewest = by_workers[sizes[0]]
    points = [point_of(by_workers[size], fewest, target if metric else None) for size in sizes]
    return Series(
        kind=kind,
        batch=batch,
        settings=settings,
        metric=metric,
        higher_is_better=higher,
        target=target if metric else None,
        goal=goal,
        points=points,
    )


def _target(runs: Sequence[Run], of_fewest: Sequence[Run], *, higher_is_better: bool) -> float | None:
    """Returns the worst end that is about as good as with the fewest workers: others have not learnt as well."""
    sign = 1 if higher_is_better else -1
    ends, yardstick = ([sign * run.metric for run in each if run.metric is not None] for each in (runs, of_fewest))
    least = min(yardstick or ends, default=0.0)
    return sign * min((each for each in ends if each >= least - ABOUT * abs(least)), default=least) if ends else None


def _metric(runs: Sequence[Run]) -> tuple[str, bool]:
    """Returns the name of the main metric, "" if nothing was evaluated, and whether higher is better."""
    for run in runs:
        if run.metric is not None:
            return str(run.summary["main_metric"]), bool(run.summary.get("higher_is_better"))
    return "", False


def _others(run: Run) -> Hashable:
    """Returns all settings of a run that must be equal where runs are compared."""
    return tuple(sorted((key, repr(value)) for key, value in run.settings.items() if not _is_of_a_run(key)))


def _is_of_a_run(key: str) -> bool:
    return key in _OF_A_RUN or key.startswith(tuple(f"{name}." for name in _OF_A_RUN))


def _without_mixed(runs: Sequence[Run]) -> list[list[Run]]:
    """Splits runs by settings that follow from the number of workers, as far as they do not follow from it here."""
    mixed = []
    for key in _DERIVED:
        values = defaultdict(set)
        for run in runs:
            values[run.workers].add(repr(run.settings.get(key)))
        if any(len(each) > 1 for each in values.values()):
            mixed.append(key)
    parts: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        parts[tuple(repr(run.settings.get(key)) for key in mixed)].append(run)
    return list(parts.values())


def _num_sizes(runs: Sequence[Run]) -> int:
    return len({run.workers for run in runs})


def _differing(runs: Sequence[Run]) -> list[str]:
    """Returns the settings in which series differ."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if not _is_of_a_run(key))
    found = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]
    for key in _DERIVED:
        values = {(run.workers, repr(run.settings.get(key))) for run in runs}
        if len(values) > _num_sizes(runs):
            found.append(key)
    return found
