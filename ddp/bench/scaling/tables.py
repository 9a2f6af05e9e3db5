"""Puts the figures of a sweep into tables, from which the pages, and what a terminal shows, are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ddp.bench.forecast.replay import Forecast
from ddp.bench.scaling.charts import in_seconds, parts_in
from ddp.bench.scaling.elsewhere import ALPHA_S, RATES_BIT_S, Elsewhere, elsewhere
from ddp.bench.scaling.figures import Point, Series
from ddp.errors import ConfigError
from ddp.pictures.step import IN_WORDS
from ddp.train.reports.results import metric_in_words, words_of
from ddp.units import format_time, milliseconds, written


class Table(NamedTuple):
    """Rows of cells; the first row has the titles of the columns."""

    title: str
    rows: Sequence[Sequence[str]]


class Column(NamedTuple):
    """A column, whose cells are "" where a figure is missing; one with no cell at all is left out."""

    title: str
    cell: Callable[[Point], str]


def metric_of(series: Series) -> str:
    """Returns the main metric in words."""
    return words_of(series.metric)


def target_of(series: Series) -> str:
    """Returns the target as it is shown, such as "98.33%"."""
    return metric_in_words(series.metric, series.target)


def _table(title: str, points: Sequence[Point], columns: Sequence[Column]) -> Table:
    cells = [(column.title, [column.cell(point) for point in points]) for column in columns]
    shown = [[name, *column] for name, column in cells if any(column)]
    return Table(title, list(zip(*shown, strict=True)))


def speed(series: Series) -> Table:
    """Returns the table of samples/s, efficiency, memory, and how well the runs have learnt."""
    columns = [
        Column("workers", lambda point: str(point.workers)),
        Column("global batch", lambda point: "" if series.kind == "strong" else str(point.run.batch)),
        Column("threads each", lambda point: str(point.run.summary.get("threads_per_worker") or "")),
        Column("samples/s", lambda point: f"{point.run.samples_per_s:,.1f}"),
        Column("speed-up", lambda point: f"{point.speed_up:.2f}"),
        Column("efficiency", lambda point: f"{point.efficiency:.1%}"),
        Column(f"goal {series.goal:.0%}", lambda point: _goal(series, point)),
        Column("memory per worker", _memory),
        Column(f"{metric_of(series)} at the end", lambda point: metric_in_words(series.metric, point.run.metric)),
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


def of_parts(series: Series) -> Iterator[Table]:
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


def on_other_networks(series: Series) -> tuple[list[Table], list[str]]:
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


def of_waiting(series: Series) -> Iterator[Table]:
    """Yields the table of who was waited for."""
    cells = [
        [str(point.workers), str(rank), f"{share:.0%}", milliseconds(mean_s)]
        for point in series.points
        for rank, (share, mean_s) in enumerate(point.waited)
    ]
    if cells:
        yield Table("Who was waited for", [["workers", "rank", "last with a bucket", "later by, in ms"], *cells])
