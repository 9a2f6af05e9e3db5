"""Says in sentences what workers bought, and puts the sections of the report together; `tables.py` has the tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from ddp.bench.scaling.figures import Point, Series
from ddp.bench.scaling.foreseen import Foreseen
from ddp.bench.scaling.tables import (
    Table,
    metric_of,
    of_parts,
    of_waiting,
    on_other_networks,
    speed,
    target_of,
    to_target,
)
from ddp.train.reports.results import metric_in_words
from ddp.units import counted, milliseconds

MORE_THAN_IDEAL = 1.15
"""An efficiency above this is no merit of the workers; caches may give a little."""


class Section(NamedTuple):
    """A part of the report.

    Attributes:
        verdict: the sentence that matters most; "" for none.
        sentences: what has to be known besides.
        series: whose charts stand here; None: no charts.
    """

    title: str
    verdict: str
    sentences: Sequence[str]
    tables: Sequence[Table]
    series: Series | None


def section_of(series: Series, price: float | None) -> Section:
    """Returns what is said of a series. `price`: of a worker for an hour."""
    networks, untold = on_other_networks(series)
    tables = [speed(series), to_target(series, price), *of_parts(series), *of_waiting(series), *networks]
    return Section(title_of(series), verdict(series), [*_sentences(series), *untold], tables, series)


def title_of(series: Series) -> str:
    """Returns which runs a series compares."""
    batch = f"{float(series.batch):,.10g}"
    what = f"global batch {batch}" if series.kind == "strong" else f"batch {batch} per worker"
    settings = "".join(f", {key}={'null' if value is None else value}" for key, value in series.settings.items())
    return f"{series.kind.capitalize()} scaling: {what}{settings}"


# --- sentences -------------------------------------------------------------------------------------------------------


def verdict(series: Series) -> str:
    """Returns in one sentence where more workers stop paying, or why that is unknown."""
    last, first, reason = series.stop
    for point in series.points[1 : series.points.index(first or last) + 1]:
        doubt, (least, most) = "", point.efficiencies
        if point.efficiency > MORE_THAN_IDEAL:
            doubt = f"which is no merit of theirs: the run of {counted(series.base.workers, 'worker')} was slowed down"
        elif reason in (None, "speed") and least < series.goal <= most:
            doubt = f"and between {least:.0%} and {most:.0%} by windows and repeats (goal {series.goal:.0%})"
        if doubt:
            found = f"{counted(point.workers, 'worker')} have an efficiency of {point.efficiency:.0%}, {doubt}"
            return f"Unknown whether more workers pay: {found}. Measure again on a quiet host, or for longer."
    if first is None:
        how = f"{_faster(series, last)}, an efficiency of {_efficiency(series, last)}"
        unknown = "" if series.metric else ", but nobody knows how well they have learnt"
        return f"More workers pay up to {last.workers}, the most that were measured: they are {how}{unknown}."
    before = f"More workers stop paying after {last.workers}"
    many = counted(first.workers, "worker")
    if reason == "target":
        return f"{before}: with {first.workers} training does not reach {metric_of(series)} {target_of(series)}."
    if reason == "samples":
        assert first.samples_to and series.base.samples_to and first.time_efficiency is not None
        times = first.samples_to / series.base.samples_to
        reach = f"reach {metric_of(series)} {target_of(series)} after {times:.2f} times"
        efficiency = f"an efficiency by that time of {first.time_efficiency:.0%} (goal {series.goal:.0%})"
        return f"{before}: {many} are {_faster(series, first)}, but {reach} as many samples, {efficiency}."
    slower = first.run.samples_per_s < last.run.samples_per_s
    than = f"are slower than {last.workers}" if slower else f"are {_faster(series, first)}"
    return f"{before}: {many} {than}, an efficiency of {_efficiency(series, first)}."


def _efficiency(series: Series, point: Point) -> str:
    least, most = point.efficiencies
    windows = f"{least:.0%} to {most:.0%} by windows, " if least < most else ""
    return f"{point.efficiency:.0%} ({windows}goal {series.goal:.0%})"


def _faster(series: Series, point: Point) -> str:
    return f"{point.speed_up:.2f} times as fast as {series.base.workers}"


def _sentences(series: Series) -> Iterator[str]:
    points, base = series.points, series.base
    if not series.metric:
        yield "Nothing was evaluated: this report is about speed, and says nothing about how well the runs have learnt."
    for point in points:
        many = counted(point.workers, "worker")
        if series.metric and point.run.metric is None:
            yield f"With {many} training has diverged, or was not evaluated."
        elif not series.reaches(point):
            yield f"With {many} training does not reach {metric_of(series)} {target_of(series)}."
    if base.workers > 1:
        yield f"There is no run of one worker: speed-up and efficiency are against {base.workers}."
    threads = {point.workers: point.run.summary.get("threads_per_worker") for point in points}
    if len(set(threads.values())) > 1:
        each = ", ".join(f"{number} with {counted(workers, 'worker')}" for workers, number in threads.items())
        yield f"Threads per worker: {each}; so a worker more is not a core more."
    for point in points:
        if len(point.repeats) > 1:
            speeds = [run.samples_per_s for run in point.repeats]
            spread = f"{min(speeds):,.0f} to {max(speeds):,.0f} samples/s"
            ends = [run.metric for run in point.repeats if run.metric is not None]
            if series.metric and ends:
                least, most = (metric_in_words(series.metric, each) for each in (min(ends), max(ends)))
                spread += f", {metric_of(series)} {least}{f' to {most}' if most != least else ''}"
            runs = f"{len(point.repeats)} runs, which differ at most in their seed, made {spread}"
            yield f"With {counted(point.workers, 'worker')} {runs}; the one of median speed is shown."
    for point in points:
        if point.waited:
            yield _who(point)


def _who(point: Point) -> str:
    """Returns who was waited for."""
    share, mean_s = max(point.waited)
    rank = list(point.waited).index(max(point.waited))
    beginning = f"With {counted(point.workers, 'worker')}"
    if not share:
        return f"{beginning} no rank was waited for: they are ready at once, as far as their clocks can tell."
    late = f"the last to have its bucket ready in {share:.0%} of all cases, on average by {milliseconds(mean_s)} ms"
    return f"{beginning} rank {rank} was waited for most often: it was {late}."


def section_of_predictions(found: Sequence[Foreseen]) -> Section:
    """Returns what was forecast before it was measured."""
    cells = [
        [
            each.run.name,
            str(each.run.workers),
            each.prediction.day[:-3],
            *map(milliseconds, (each.prediction.step_s, each.measured_s)),
            "" if each.deviation is None else f"{each.deviation:.0%}",
            f"{each.ratio:.2f}",
            f"{each.naive_ratio:.2f}",
            each.prediction.how,
        ]
        for each in found
    ]
    titles = ["run", "workers", "registered", "forecast, ms", "measured, ms", "± of repeats", "forecast ÷ measured"]
    titles += ["naive guess ÷ measured", "by"]
    worst = max((each.ratio for each in found), key=lambda ratio: abs(math.log(ratio)))
    ours, theirs = (fmean(abs(each.ratio - 1) for each in found), fmean(abs(each.naive_ratio - 1) for each in found))
    sentences = [
        f"These steps were forecast before their runs were made. Forecasts are off by {ours:.0%} on average, the worst "
        f"one is {worst:.2f} × measured; naive guesses, one worker's step and bytes ÷ rate, are off by {theirs:.0%}."
    ]
    if all(each.deviation is None for each in found):
        sentences.append("No run was repeated, so nobody knows how far repeats are apart: add seed=1,2,3 to the sweep.")
    return Section("Registered predictions", "", sentences, [Table("Steps", [titles, *cells])], None)
