"""Reports the speed-up of each number of workers of a sweep, and from where more do not pay (`ddp/lab/scaling/`).

    python -m ddp train -m cluster.workers=1,2,4 sweep.name=mine
    python -m ddp report runs/mine              writes report.html, and report.md with pictures, into that folder

Runs are compared that differ in the number of workers alone: with the same global batch (strong scaling), or the same
batch per worker (weak scaling, as batch.global_size='${per_worker:32}' makes it).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError
from ddp.lab.scaling.charts import COLOURS, Panel, in_seconds, panels_of, parts_in, svg, themed
from ddp.lab.scaling.figures import Point, Series, compare
from ddp.lab.scaling.runs import read_runs
from ddp.lab.timeline import IN_WORDS
from ddp.process.arguments import positive, relative_path
from ddp.process.files import write_whole
from ddp.train.reports.results import metric_in_words, words_of
from ddp.units import counted, milliseconds, written


def main(words: Sequence[str]) -> int:
    """Writes the report of the sweep that the words name."""
    parser = parser_of("report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the folder of a sweep")
    parser.add_argument(
        "--target",
        type=_finite,
        metavar="VALUE",
        help="of the main metric, such as 0.95 (default: the worst end that is about as good as that of the fewest)",
    )
    parser.add_argument(
        "--goal-efficiency",
        type=_share,
        default=0.8,
        metavar="SHARE",
        help="speed-up ÷ workers from which on a worker pays (default: %(default)s)",
    )
    parser.add_argument(
        "--price-per-worker-hour", type=positive, metavar="PRICE", help="of one worker, in any currency"
    )
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Writes the report, and returns its sentences."""
    runs, notes = read_runs(options.sweep)
    series, more = compare(runs, target=options.target, goal=options.goal_efficiency)
    notes += more
    if not series:
        listed = "".join(f"\n{note}" for note in notes)
        raise ConfigError(
            f"{options.sweep}: no two runs differ in the number of workers alone: make some, as with "
            f"train -m cluster.workers=1,2{listed}"
        )
    sections = [section_of(each, options.price_per_worker_hour) for each in series]
    lines = [f"{section.title}\n  {section.verdict}" for section in sections]
    if notes:
        sections.append(Section("Not shown", "", notes))
    try:
        write(options.sweep, f"What workers bought: {options.sweep.resolve().name}", sections)
    except OSError as error:
        raise ConfigError(f"{options.sweep}: {error.strerror}; make room there, or copy the sweep elsewhere") from error
    return "\n".join([*lines, *notes, f"{relative_path(options.sweep / 'report.html')}, report.md"])


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text:.40}: give a number, such as 0.95")
    return number


def _share(text: str) -> float:
    share = positive(text)
    if share > 1:
        raise argparse.ArgumentTypeError(f"{text:.40}: give a share above 0 and at most 1, such as 0.8")
    return share


# --- The pages: report.md with pictures, and report.html, one file that needs nothing else ----------------------------

PICTURE = "report-{}.svg"

# --- Markdown --------------------------------------------------------------------------------------------------------


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Returns the report as Markdown, with the names of the pictures that `write` draws."""
    blocks = (block for each in enumerate(sections, 1) for block in _blocks(*each))
    return "\n\n".join([f"# {_plain(title)}", *blocks]) + "\n"


def _blocks(number: int, section: Section) -> Iterator[str]:
    yield f"## {_plain(section.title)}"
    if section.verdict:
        yield f"**{_plain(section.verdict)}**"
    if section.sentences:
        yield "\n".join(f"- {_plain(each)}" for each in section.sentences)
    for place, panel in enumerate(section.panels):
        yield f"![{_plain(f'{panel.title}: {panel.words}')}]({PICTURE.format(f'{number}.{place}')})"
    for table in section.tables:
        yield f"### {_plain(table.title)}"
        yield _rows(table)


def _rows(table: Table) -> str:
    head, *rows = ([_plain(cell).replace("|", "\\|") for cell in row] for row in table.rows)
    lines = [head, ["--:" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Returns a text whose letters mean nothing to Markdown."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#" else letter for letter in " ".join(text.split()))


# --- HTML ------------------------------------------------------------------------------------------------------------

_CSS = """
:root { color-scheme: light dark; LIGHT }
@media (prefers-color-scheme: dark) { :root { DARK } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
       font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 64px }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .2em; overflow-wrap: anywhere }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.4em 0 .5em; padding-top: .8em; border-top: 1px solid var(--line);
     overflow-wrap: anywhere }
h3 { font-size: 1rem; margin: 1.8em 0 .4em }
.verdict { font-size: 1.1rem; font-weight: 600; margin: .4em 0 .8em; padding: .7em 1em; border-radius: 8px;
           background: color-mix(in srgb, var(--mark) 13%, var(--paper)); border-left: 4px solid var(--mark) }
.pays { --mark: var(--good) } .stops { --mark: var(--bad) }
ul { padding-left: 1.2em; margin: .4em 0; color: var(--quiet) }
li { margin: .25em 0; overflow-wrap: anywhere }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 20px 28px;
          margin: 1.4em 0 }
figure { margin: 0 } figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3em }
svg { width: 100%; height: auto; display: block } svg text { font-family: inherit !important }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { text-align: right; padding: .35em .9em; border-bottom: 1px solid var(--line) }
th { color: var(--quiet); font-weight: 500 } th:first-child, td:first-child { padding-left: 0 }
"""


def html(title: str, sections: Sequence[Section], pictures: Mapping[str, str]) -> str:
    """Returns the report as a page that needs nothing else, in light and dark. `pictures`: by name."""
    light, dark = ("; ".join(f"--{name}: {pair[tone]}" for name, pair in COLOURS.items()) for tone in (0, 1))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_CSS.replace('LIGHT', light).replace('DARK', dark)}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape(title)}</h1>",
            *(line for number, section in enumerate(sections, 1) for line in _section(number, section, pictures)),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _section(number: int, section: Section, pictures: Mapping[str, str]) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    if section.verdict:
        kind = "pays" if section.pays else "stops"
        yield f'<p class="verdict {kind}">{escape(section.verdict)}</p>'
    if section.sentences:
        yield f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in section.sentences)}</ul>"
    if section.panels:
        yield '<div class="charts">'
        for place, panel in enumerate(section.panels):
            words = escape(f"{panel.title}: {panel.words}", quote=True)
            picture = themed(pictures[PICTURE.format(f"{number}.{place}")])
            picture = picture.replace("<svg", f'<svg role="img" aria-label="{words}"', 1)
            yield f"<figure><figcaption>{escape(panel.title)}</figcaption>{picture}</figure>"
        yield "</div>"
    for table in section.tables:
        yield f"<h3>{escape(table.title)}</h3>"
        head, *rows = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in _tagged(table))
        yield f'<div class="wide"><table><tr>{head}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def _tagged(table: Table) -> Iterator[tuple[str, Sequence[str]]]:
    for place, row in enumerate(table.rows):
        yield "td" if place else "th", row


# --- files -----------------------------------------------------------------------------------------------------------


def write(folder: Path, title: str, sections: Sequence[Section]) -> None:
    """Writes report.md with its pictures, and report.html."""
    names = [(f"{n}.{place}", panel) for n, each in enumerate(sections, 1) for place, panel in enumerate(each.panels)]
    pictures = {PICTURE.format(name): svg(panel, name) for name, panel in names}
    for name, picture in pictures.items():
        write_whole(folder / name, picture)
    write_whole(folder / "report.md", markdown(title, sections))
    write_whole(folder / "report.html", html(title, sections, pictures))


# --- Sections: a series in sentences and tables ---------------------------------------------------------------------


MORE_THAN_IDEAL = 1.15
"""An efficiency above this is no merit of the workers; caches may give a little."""


class Section(NamedTuple):
    """A part of the report.

    Attributes:
        verdict: the sentence that matters most; "" for none.
        sentences: further facts.
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
    """Returns the target as text, such as "98.33%"."""
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
    """Returns the table of the costs of the target, and of the whole run. `price`: of a worker for an hour."""

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
