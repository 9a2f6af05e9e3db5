"""Says what each number of workers of a sweep has bought, and where more stop paying (`ddp/lab/scaling/`).

    python -m ddp train -m cluster.workers=1,2,4 sweep.name=mine
    python -m ddp report runs/mine              writes report.html, and report.md with pictures, into that folder

Runs are compared that differ in the number of workers alone: with the same global batch (strong scaling), or the same
batch per worker (weak scaling, as batch.global_size='${per_worker:32}' makes it).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError
from ddp.lab.scaling.charts import COLOURS, svg, themed
from ddp.lab.scaling.figures import compare
from ddp.lab.scaling.runs import read_runs
from ddp.lab.scaling.words import Section, Table, section_of
from ddp.process.arguments import positive, relative_path
from ddp.process.files import write_whole


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
        told = "".join(f"\n{note}" for note in notes)
        raise ConfigError(
            f"{options.sweep}: no two runs differ in the number of workers alone: make some, as with "
            f"train -m cluster.workers=1,2{told}"
        )
    sections = [section_of(each, options.price_per_worker_hour) for each in series]
    said = [f"{section.title}\n  {section.verdict}" for section in sections]
    if notes:
        sections.append(Section("Not shown", "", notes))
    try:
        write(options.sweep, f"What workers bought: {options.sweep.resolve().name}", sections)
    except OSError as error:
        raise ConfigError(f"{options.sweep}: {error.strerror}; make room there, or copy the sweep elsewhere") from error
    return "\n".join([*said, *notes, f"{relative_path(options.sweep / 'report.html')}, report.md"])


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
