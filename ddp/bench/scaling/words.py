"""Says the figures of a sweep in sentences and tables, from which the pages are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ddp.bench.forecast.replay import Forecast
from ddp.bench.scaling.charts import in_seconds, parts_in
from ddp.bench.scaling.elsewhere import ALPHA_S, RATES_BIT_S, Elsewhere, elsewhere
from ddp.bench.scaling.figures import Point, Series
from ddp.bench.scaling.foreseen import Foreseen
from ddp.errors import ConfigError
from ddp.pictures.step import IN_WORDS
from ddp.train.metric_names import metric_in_words, words_of
from ddp.units import counted, format_time, milliseconds

MORE_THAN_IDEAL = 1.15
"""An efficiency above this is no merit of the workers; caches may give a little."""


class Table(NamedTuple):
    """Rows of cells; the first row has the titles of the columns."""

    title: str
    rows: Sequence[Sequence[str]]


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
    networks, untold = _elsewhere(series)
    tables = [_speed(series), _target(series, price), *_parts(series), *_waited(series), *networks]
    return Section(title_of(series), verdict(series), [*_sentences(series), *untold], tables, series)


def title_of(series: Series) -> str:
    """Returns which runs a series compares."""
    batch = f"{float(series.batch):,.10g}"
    what = f"global batch {batch}" if series.kind == "strong" else f"batch {batch} per worker"
    settings = "".join(f", {key}={'null' if value is None else value}" for key, value in series.settings.items())
    return f"{series.kind.capitalize()} scaling: {what}{settings}"


# --- sentences -------------------------------------------------------------------------------------------------------


def verdict(series: Series) -> str:
    """Returns in one sentence where more workers stop paying."""
    last, first, reason = series.stop
    if first is None:
        how = f"{_faster(series, last)}, an efficiency of {last.efficiency:.0%} (goal {series.goal:.0%})"
        return f"More workers pay up to {last.workers}, the most that were measured: they are {how}{_unknown(series)}."
    before = f"More workers stop paying after {last.workers}"
    many = counted(first.workers, "worker")
    if reason == "target":
        return f"{before}: with {first.workers} training does not reach {_metric(series)} {_target_of(series)}."
    if reason == "samples":
        assert first.samples_to and series.base.samples_to and first.time_efficiency is not None
        times = first.samples_to / series.base.samples_to
        reach = f"reach {_metric(series)} {_target_of(series)} after {times:.2f} times"
        efficiency = f"an efficiency by that time of {first.time_efficiency:.0%} (goal {series.goal:.0%})"
        return f"{before}: {many} are {_faster(series, first)}, but {reach} as many samples, {efficiency}."
    slower = first.run.samples_per_s < last.run.samples_per_s
    than = f"are slower than {last.workers}" if slower else f"are {_faster(series, first)}"
    return f"{before}: {many} {than}, an efficiency of {first.efficiency:.0%} (goal {series.goal:.0%})."


def _faster(series: Series, point: Point) -> str:
    return f"{point.speed_up:.2f} times as fast as {series.base.workers}"


def _unknown(series: Series) -> str:
    return "" if series.metric else ", but nobody knows how well they have learnt"


def _metric(series: Series) -> str:
    return words_of(series.metric)


def _target_of(series: Series) -> str:
    return metric_in_words(series.metric, series.target)


def _sentences(series: Series) -> Iterator[str]:
    points, base = series.points, series.base
    if not series.metric:
        yield "Nothing was evaluated: this report is about speed, and says nothing about how well the runs have learnt."
    for point in points:
        many = counted(point.workers, "worker")
        if series.metric and point.run.metric is None:
            yield f"With {many} training has diverged, or was not evaluated."
        elif not series.reaches(point):
            yield f"With {many} training does not reach {_metric(series)} {_target_of(series)}."
    if base.workers > 1:
        yield f"There is no run of one worker: speed-up and efficiency are against {base.workers}."
    if any(point.efficiency > MORE_THAN_IDEAL for point in points):
        slow = f"the run of {counted(base.workers, 'worker')} was slowed down, as by a busy host: make it again"
        yield f"An efficiency far above 100% is no merit of the workers: {slow}."
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
                spread += f", {_metric(series)} {least}{f' to {most}' if most != least else ''}"
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
    ours, theirs = (fmean(abs(ratio - 1) for ratio in ratios) for ratios in zip(*map(_ratios, found), strict=True))
    sentences = [
        f"These steps were forecast before their runs were made. Forecasts are off by {ours:.0%} on average, the worst "
        f"one is {worst:.2f} × measured; naive guesses, one worker's step and bytes ÷ rate, are off by {theirs:.0%}."
    ]
    if all(each.deviation is None for each in found):
        sentences.append("No run was repeated, so nobody knows how far repeats are apart: add seed=1,2,3 to the sweep.")
    return Section("Registered predictions", "", sentences, [Table("Steps", [titles, *cells])], None)


def _ratios(found: Foreseen) -> tuple[float, float]:
    return found.ratio, found.naive_ratio


# --- tables ----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A column, whose cells are "" where a figure is missing; one with no cell at all is left out."""

    title: str
    cell: Callable[[Point], str]


def _table(title: str, points: Sequence[Point], columns: Sequence[Column]) -> Table:
    cells = [(column.title, [column.cell(point) for point in points]) for column in columns]
    shown = [[name, *column] for name, column in cells if any(column)]
    return Table(title, list(zip(*shown, strict=True)))


def _speed(series: Series) -> Table:
    columns = [
        Column("workers", lambda point: str(point.workers)),
        Column("global batch", lambda point: "" if series.kind == "strong" else str(point.run.batch)),
        Column("threads each", lambda point: str(point.run.summary.get("threads_per_worker") or "")),
        Column("samples/s", lambda point: f"{point.run.samples_per_s:,.1f}"),
        Column("speed-up", lambda point: f"{point.speed_up:.2f}"),
        Column("efficiency", lambda point: f"{point.efficiency:.1%}"),
        Column(f"goal {series.goal:.0%}", lambda point: _goal(series, point)),
        Column("memory per worker", _memory),
        Column(f"{_metric(series)} at the end", lambda point: metric_in_words(series.metric, point.run.metric)),
    ]
    return _table("Speed", series.points, columns if series.metric else columns[:-1])


def in_short(series: Series) -> list[Table]:
    """Returns two tables that a terminal has room for: speed and memory, and parts of a step, as means over ranks."""
    names = parts_in(parts for point in series.points for parts in point.parts)
    columns = [
        Column("workers", lambda point: str(point.workers)),
        Column("samples/s", lambda point: f"{point.run.samples_per_s:,.0f}"),
        Column("speed-up", lambda point: f"{point.speed_up:.2f}"),
        Column("efficiency", lambda point: f"{point.efficiency:.0%}"),
        Column("memory per worker", _memory),
        Column("step, ms", lambda point: milliseconds(point.run.batch / point.run.samples_per_s)),
    ]
    parts = [columns[0], *(Column(IN_WORDS.get(name, name), _mean_of(name)) for name in names)]
    tables = [("Speed", columns), ("Where the time of a step goes, in ms", parts)]
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


def _memory(point: Point) -> str:
    return f"{max(point.run.memory) / 1e6:,.0f} MB" if point.run.memory else ""


def _target(series: Series, price: float | None) -> Table:
    def priced(worker_seconds: float | None) -> str:
        return "" if price is None or worker_seconds is None else _amount(worker_seconds / 3600 * price)

    target = f"{_metric(series)} {_target_of(series)}"
    columns = [
        Column("workers", lambda point: str(point.workers)),
        Column("training time", lambda point: _or_none(point.seconds_to, in_seconds)),
        Column("samples", lambda point: _or_none(point.samples_to, lambda samples: f"{samples:,.0f}")),
        Column("worker-seconds", lambda point: _or_none(point.worker_seconds_to, lambda each: f"{each:,.1f}")),
        Column("price", lambda point: priced(point.worker_seconds_to)),
        Column("efficiency by time", lambda point: _or_none(point.time_efficiency, lambda each: f"{each:.1%}")),
        Column("whole run", lambda point: in_seconds(float(point.run.summary["seconds"]))),
        Column("worker-seconds in all", lambda point: f"{point.worker_seconds:,.1f}"),
        Column("price in all", lambda point: priced(point.worker_seconds)),
    ]
    return _table(f"To {target}, and in all" if series.target is not None else "In all", series.points, columns)


def _amount(price: float) -> str:
    """Returns a price with cents, or if it is small with three digits."""
    return f"{price:,.2f}" if price >= 1 else f"{price:.{2 - math.floor(math.log10(price)) if price else 2}f}"


def _or_none(value: float | None, write: Callable[[float], str]) -> str:
    return "" if value is None else write(value)


def _parts(series: Series) -> Iterator[Table]:
    """Yields the table of the parts of a step on each rank, in ms."""
    rows = [(point, rank, parts) for point in series.points for rank, parts in enumerate(point.parts)]
    if names := parts_in(parts for _, _, parts in rows):
        cells = [
            [str(point.workers), str(rank), *(_ms(parts, name) for name in names), milliseconds(sum(parts.values()))]
            for point, rank, parts in rows
        ]
        titles = ["workers", "rank", *(IN_WORDS.get(name, name) for name in names), "step"]
        yield Table("Parts of a step, in ms", [titles, *cells])


def _ms(parts: Mapping[str, float], name: str) -> str:
    return milliseconds(parts[name]) if name in parts else ""


def _elsewhere(series: Series) -> tuple[list[Table], list[str]]:
    """Returns the table of other networks, and sentences about it."""
    profiled = [(point, point.run.profile) for point in series.points if point.run.profile is not None]
    if not profiled:
        what = "Parts of a step on each rank, who was waited for, and what another network would have made of it"
        return [], [f"{what}, are known once runs have a profile: add profile.steps=5 to the sweep."]
    told: list[tuple[Point, float, Elsewhere]] = []
    sentences = []
    for point, profile in profiled:
        try:
            told.append((point, profile.step_s, elsewhere(profile)))
        except ConfigError as error:
            sentences.append(f"What another network would have made of {point.run.name} is not known: {error}.")
    if not told or told[-1][0].workers == 1:
        return [], sentences
    titles = ["workers", "measured", "forecast", *(f"at {rate / 1e9:g} Gbit/s" for rate in RATES_BIT_S)]
    base = told[0][2].there
    cells = [
        [str(point.workers), milliseconds(step_s), milliseconds(found.here.step_s), *map(_against, found.there, base)]
        for point, step_s, found in told
    ]
    where = f"a worker of a run on one host gets a host of its own, a round of messages costs {format_time(ALPHA_S)}"
    sentences.append(f"Other networks are forecast from each run's own profile: {where}; in brackets the efficiency.")
    return [Table("The same step on another network, in ms", [titles, *cells])], sentences


def _against(found: Forecast, base: Forecast) -> str:
    share = found.samples_per_s / base.samples_per_s * base.num_ranks / found.num_ranks
    return f"{milliseconds(found.step_s)} ({share:.0%})"


def _waited(series: Series) -> Iterator[Table]:
    """Yields the table of who was waited for."""
    cells = [
        [str(point.workers), str(rank), f"{share:.0%}", milliseconds(mean_s)]
        for point in series.points
        for rank, (share, mean_s) in enumerate(point.waited)
    ]
    if cells:
        yield Table("Who was waited for", [["workers", "rank", "last with a bucket", "later by, in ms"], *cells])
