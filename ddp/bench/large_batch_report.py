"""Tells what a study of large batches has found, in a table and in a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ddp.bench.large_batch import BATCHES, RIVALS, Result
from ddp.train.monitor.noise_scale import Estimate
from ddp.units import counted


@dataclass(frozen=True)
class Point:
    """The tests of one optimizer at one batch.

    Attributes:
        accuracies: by seed; 0 for a run that diverged.
        to_target: samples until the target was reached, mean over the seeds; None if one of them did not.
    """

    rival: str
    batch: int
    rate: float
    accuracies: tuple[float, ...]
    to_target: float | None

    @property
    def mean(self) -> float:
        """Returns the mean accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def spread(self) -> float:
        """Returns the standard deviation over the seeds."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


class Findings(NamedTuple):
    """Holds what the tests of a study say together.

    Attributes:
        points: by optimizer and batch.
        target: the accuracy that `to_target` asks for: two points below the best mean at the smallest batch.
        noise: the noise scales that the runs at the smallest batch have measured by their end.
    """

    points: dict[tuple[str, int], Point]
    target: float
    noise: list[Estimate]

    @classmethod
    def of(cls, results: Sequence[Result]) -> Findings:
        """Returns what these results say; runs that are missing are left out."""
        tests: dict[tuple[str, int], list[Result]] = {}
        for result in results:
            if result.trial.is_test:
                tests.setdefault((result.trial.rival, result.trial.batch), []).append(result)
        small = {key: of for key, of in tests.items() if key[1] == BATCHES[0]}
        target = max((statistics.fmean(_accuracies(of)) for of in small.values()), default=0.02) - 0.02
        noise = [each.noise_scale for of in small.values() for each in of if each.noise_scale is not None]
        return cls({key: _point(of, target) for key, of in tests.items()}, target, noise)

    @property
    def scales(self) -> list[float]:
        """Returns the noise scales of the runs in which the signal stood out."""
        return [each.scale for each in self.noise if each.scale is not None]

    @property
    def lower_bound(self) -> float | None:
        """Returns the median of the lower bounds that the other runs have found."""
        bounds = [each.above for each in self.noise if each.above is not None]
        return statistics.median(bounds) if bounds else None


def _point(tests: Sequence[Result], target: float) -> Point:
    reached = [samples_to(target, result.curve) for result in tests]
    known = [samples for samples in reached if samples is not None]
    to_target = statistics.fmean(known) if len(known) == len(tests) else None
    trial = tests[0].trial
    return Point(trial.rival, trial.batch, trial.rate, _accuracies(tests), to_target)


def _accuracies(tests: Sequence[Result]) -> tuple[float, ...]:
    return tuple(result.accuracy or 0.0 for result in tests)


def samples_to(target: float, curve: Sequence[tuple[int, float]]) -> float | None:
    """Returns the samples after which a curve crosses the target, between evaluations by a line; None if never."""
    before = (0, 0.0)
    for samples, accuracy in curve:
        if accuracy >= target:
            share = (target - before[1]) / (accuracy - before[1])
            return before[0] + share * (samples - before[0])
        before = samples, accuracy
    return None


def foretold(found: Findings) -> str:
    """Returns the critical batch that the noise scale foretells."""
    told = [f"{min(found.scales):,.0f} to {max(found.scales):,.0f} samples"] if found.scales else []
    if found.lower_bound is not None:
        num = len(found.noise) - len(found.scales)
        told.append(f"above {found.lower_bound:,.0f} samples by the median of {counted(num, 'run')}")
    return "; ".join(told) or "not measured"


def show(found: Findings) -> None:
    """Prints the table."""
    title = "accuracy in percent ± deviation over seeds (rate, * the least or greatest tried)"
    table = Table(title=f"{title}\nsamples to {found.target:.1%}")
    table.add_column("optimizer")
    for batch in BATCHES:
        table.add_column(f"batch {batch:,}", justify="right")
    for name in RIVALS:
        table.add_row(name, *(_cell(found.points.get((name, batch))) for batch in BATCHES))
    Console().print(table)
    print(f"critical batch that the gradient noise scale foretold at batch {BATCHES[0]}: {foretold(found)}")


def _cell(point: Point | None) -> str:
    if point is None:
        return ""
    to_target = "not reached" if point.to_target is None else f"{point.to_target:,.0f}"
    rates = RIVALS[point.rival].rates
    mark = "*" if point.rate in (rates[0], rates[-1]) else ""
    return f"{100 * point.mean:.1f} ± {100 * point.spread:.1f} ({point.rate:g}{mark})\n{to_target}"


def draw(found: Findings, picture: Path) -> None:
    """Draws accuracy and samples to the target over the batch."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(RIVALS):
        mine = [point for (rival, _), point in sorted(found.points.items()) if rival == name]
        batches, how = [point.batch for point in mine], {"color": f"C{number}", "ms": 4, "label": name}
        left.errorbar(batches, [100 * p.mean for p in mine], [100 * p.spread for p in mine], fmt="o-", **how)
        reached = [(point.batch, point.to_target / 1e6) for point in mine if point.to_target is not None]
        if reached:
            right.plot(*zip(*reached, strict=True), "o-", **how)
    left.set(title="accuracy after the same number of samples, %", xlabel="global batch", xscale="log")
    right.set(title=f"samples to {found.target:.1%}, millions", xlabel="global batch", xscale="log")
    for axes in (left, right):
        if found.scales:
            axes.axvspan(min(found.scales), max(found.scales), color="gray", alpha=0.2, label="noise scale")
        elif found.lower_bound is not None:
            axes.axvline(found.lower_bound, color="gray", ls="--", label="noise scale, at least")
        axes.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(picture, dpi=120)
