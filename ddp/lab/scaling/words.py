"""Says in sentences and tables what workers bought, and puts the sections of the report together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from ddp.lab.scaling.charts import Panel, in_seconds, panels_of, parts_in
from ddp.lab.scaling.figures import Point, Series
from ddp.pictures.timeline import IN_WORDS
from ddp.train.reports.results import metric_in_words, words_of
from ddp.units import counted, milliseconds, written

MORE_THAN_IDEAL = 1.15
"""An efficiency above this is no merit of the workers; caches may give a little."""


class Section(NamedTuple):
    """A part of the report.

    Attributes:
        verdict: the sentence that matters most; "" for none.
        sentences: what has to be known besides.
        panels: the charts.
        pays: more workers do, as far as they were measured.
    """

    title: str
    verdict: str
    sentences: Sequence[str]
    tables: Sequence[Table] = ()
    panels: Sequence[Panel] = ()
    pays: bool = True


def section_of(series: Series, price: float | None) -> Section:
    """Returns the verdict on a series. `price`: of a worker for an hour."""
    tables, pays = [*tables_of(series), to_target(series, price)], series.stop.first is None
    return Section(title_of(series), verdict(series), list(_sentences(series)), tables, panels_of(series), pays)


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
        unknown = "" if series.metric else ", but it is unknown how well they have learnt"
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
    if all(point.run.profile is None for point in points):
        yield "Parts of a step on each rank, and who was waited for, are known with profile.steps=5 in the sweep."
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


# --- tables -----------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Rows of cells; the first row has the titles of the columns."""

    title: str
    rows: Sequence[Sequence[str]]


class Column(NamedTuple):
    """A column, whose cells are "" where a figure is missing; one with no cell at all is left out."""

    title: str
    cell: Callable[[Point], str]


def metric_of(series: Series) -> str:
    """Returns the main metric as text."""
    return words_of(series.metric)


def target_of(series: Series) -> str:
    """Returns the target as it is shown, such as "98.33%"."""
    return metric_in_words(series.metric, series.target)


def _table(title: str, points: Sequence[Point], columns: Sequence[Column]) -> Table:
    cells = [(column.title, [column.cell(point) for point in points]) for column in columns]
    shown = [[name, *column] for name, column in cells if any(column)]
    return Table(title, list(zip(*shown, strict=True)))


def tables_of(series: Series) -> list[Table]:
    """Returns the tables that `scale` prints and the report begins with: speed, and parts of a step over all ranks."""
    columns = [
        Column("workers", lambda point: str(point.workers)),
        Column("global batch", lambda point: "" if series.kind == "strong" else str(point.run.batch)),
        Column("samples/s", lambda point: f"{point.run.samples_per_s:,.1f}"),
        Column("speed-up", lambda point: f"{point.speed_up:.2f}"),
        Column("efficiency", lambda point: f"{point.efficiency:.1%}"),
        Column("memory", lambda point: f"{max(point.run.memory) / 1e6:,.0f} MB" if point.run.memory else ""),
        Column("step, ms", lambda point: milliseconds(point.run.batch / point.run.samples_per_s)),
        Column(f"goal {series.goal:.0%}", lambda point: _goal(series, point)),
        Column(f"{metric_of(series)} at the end", lambda point: metric_in_words(series.metric, point.run.metric)),
    ]
    names = parts_in(parts for point in series.points for parts in point.parts)
    parts = [columns[0], *(Column(IN_WORDS.get(name, name), _mean_of(name)) for name in names)]
    tables = [("Speed", columns if series.metric else columns[:-1]), ("Parts of a step, in ms", parts)]
    return [_table(title, series.points, each) for title, each in tables if each[1:]]


def _mean_of(part: str) -> Callable[[Point], str]:
    """Returns the cell of a part: its mean over the ranks."""

    def cell(point: Point) -> str:
        found = [parts[part] for parts in point.parts if part in parts]
        return milliseconds(fmean(found)) if found else ""

    return cell


def _goal(series: Series, point: Point) -> str:
    if point is series.base:
        return ""
    why = {"speed": "missed", "target": "missed: target not reached", "samples": "missed: by time to the target"}
    fault = series.fault(point)
    return why[fault] if fault else "met"


def to_target(series: Series, price: float | None) -> Table:
    """Returns the table of what the target, and the whole run, have cost. `price`: of a worker for an hour."""

    def priced(worker_seconds: float | None) -> str:
        return "" if price is None or worker_seconds is None else _amount(worker_seconds / 3600 * price)

    target = f"{metric_of(series)} {target_of(series)}"
    columns = [
        Column("workers", lambda point: str(point.workers)),
        Column("training time", lambda point: written(in_seconds, point.seconds_to)),
        Column("samples", lambda point: written(lambda samples: f"{samples:,.0f}", point.samples_to)),
        Column("worker-seconds", lambda point: written(lambda each: f"{each:,.1f}", point.worker_seconds_to)),
        Column("price", lambda point: priced(point.worker_seconds_to)),
        Column("efficiency by time", lambda point: written(lambda each: f"{each:.1%}", point.time_efficiency)),
        Column("whole run", lambda point: in_seconds(float(point.run.summary["seconds"]))),
        Column("worker-seconds in all", lambda point: f"{point.worker_seconds:,.1f}"),
        Column("price in all", lambda point: priced(point.worker_seconds)),
    ]
    return _table(f"To {target}, and in all" if series.target is not None else "In all", series.points, columns)


def _amount(price: float) -> str:
    """Returns a price with cents, or if it is small with three digits."""
    return f"{price:,.2f}" if price >= 1 else f"{price:.{2 - math.floor(math.log10(price)) if price else 2}f}"
