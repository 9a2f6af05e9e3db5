"""Says what each number of workers of a sweep has bought, and where more stop paying (`ddp/lab/scaling/`).

    python -m ddp train -m cluster.workers=1,2,4 sweep.name=mine
    python -m ddp report runs/mine              writes report.html, and report.md with pictures, into that folder

Runs are compared that differ in the number of workers alone: with the same global batch (strong scaling), or the same
batch per worker (weak scaling, as batch.global_size='${per_worker:32}' makes it).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from ddp.commands.command import parser_of, respond
from ddp.errors import ConfigError
from ddp.lab.scaling.figures import compared
from ddp.lab.scaling.page import write
from ddp.lab.scaling.runs import read_runs
from ddp.lab.scaling.words import Section, section_of
from ddp.process.arguments import positive, shown


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
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Writes the report, and returns its sentences."""
    runs, notes = read_runs(options.sweep)
    series, more = compared(runs, target=options.target, goal=options.goal_efficiency)
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
    return "\n".join([*said, *notes, f"{shown(options.sweep / 'report.html')}, report.md"])


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
