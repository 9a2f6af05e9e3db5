"""Finds in a sweep the series in which nothing but the number of workers differs.

    strong   all with the same global batch
    weak     all with the same batch per worker

Note "repeats". Runs that differ in their seed alone are not averaged: the one of median speed is shown, and the range
of all beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from ddp.lab.scaling.figures import Kind, Series, median_run, point_of
from ddp.lab.scaling.runs import Run

ABOUT = 0.02
"""Ends of the main metric that are worse by no more than this share are about as good."""
_OF_A_RUN = ("run", "sweep", "resume", "trust", "trial", "seed", "cluster", "batch.global_size", "batch.num_shards")
"""Settings, or groups of them, that name a run, repeat it, or say its number of workers and its batch."""
_DERIVED = ("cluster.threads_per_worker", "cluster.local_workers", "batch.num_shards")
"""Settings that follow from the number of workers, unless they were given."""


def compared(
    runs: Sequence[Run], *, target: float | None = None, goal: float = 0.8
) -> tuple[list[Series], list[str]]:
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
