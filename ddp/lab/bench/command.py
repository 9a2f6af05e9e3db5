"""Runs a benchmark from its command line: starts ranks here or on a bed, and shows the report.

    bench … ──┬── launch on this host, once for each world size and job ──────── job()    ┐
              ├── hosts.py run, on a bed: this very command under torchrun ───── job()    ├── cells ── report
              └── under torchrun already ─────────────────────────────────────── job()    ┘

A job is a function that every rank runs; it returns cells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from ddp.comm.meeting.place import place
from ddp.errors import ConfigError, WorkersFailed
from ddp.lab.bench.place import Bed, BenchSite, strangers
from ddp.lab.bench.turns import PROGRESS, Cell, TimedCell
from ddp.process import records
from ddp.process.arguments import Parser, listed, whole
from ddp.process.terminal import console, say
from ddp.run.launch.from_python import launch
from ddp.run.settings.checks import most_workers

Job = Callable[[], Sequence[Cell]]
HOSTS = Path(__file__).parents[3] / "scripts" / "netbed" / "hosts.py"


def add_options(parser: Parser, *, workers: str, least: int, turns: int, plots: bool = False) -> None:
    """Adds the options of all benchmarks.

    Args:
        workers: the world sizes unless others are asked for; each must be at least `least`.
        turns: how often rivals take turns unless something else is asked for.
        plots: a picture can be asked for.
    """
    where = parser.add_mutually_exclusive_group()
    most = most_workers()
    where.add_argument(
        "--workers",
        type=listed(whole(least, most, "more would take turns on the cores")),
        default=workers,
        metavar="N,N,…",
        help="world sizes on this host (default: %(default)s)",
    )
    where.add_argument(
        "--netbed", metavar="HOSTSxRANKS[@RATE][@DELAY]", help="run on hosts made for it, e.g. 2x2@1gbit (root)"
    )
    parser.add_argument(
        "--beside", type=whole(0, most), default=0, metavar="N", help="keep N processes computing on the same cores"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to FILE, too")
    parser.set_defaults(plot=None, name=" ".join(parser.prog.split()[-2:]))
    rounds = "turns of each rival in a cell (default: %(default)s)"
    parser.add_argument("--turns", type=whole(1), default=turns, help=rounds)
    if plots:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture of it")


def place_of(options: argparse.Namespace) -> BenchSite:
    """Returns where the ranks run.

    Raises:
        ConfigError: there is no such place, or what was asked for cannot be written.
    """
    for path in filter(None, (options.json, options.plot)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.absolute().parent}")
    return BenchSite(None if options.netbed is None else Bed.parse(options.netbed), options.beside)


def run_jobs(
    options: argparse.Namespace,
    jobs: Sequence[Job],
    kind: type[Cell],
    where: BenchSite,
    merge: Callable[[list[Any]], Sequence[Cell]] = list,
) -> None:
    """Runs jobs, and shows their cells, which are of this kind.

    Args:
        merge: makes the cells that are shown out of those of all jobs.

    Raises:
        ConfigError: a rank found that an option cannot work.
    """
    here = place()
    if here is not None:
        with strangers(options.beside if here.rank == 0 and where.bed is None else 0):
            cells = [cell for job in jobs for cell in job()]
        if here.rank == 0:
            _finish(merge(cells), options)
        return
    load = os.getloadavg()[0]
    with strangers(options.beside):
        cells = _on_this_host(jobs, options) if where.bed is None else _on_bed(where.bed, options.name, kind)
    _finish(merge(cells), options)
    say(f"load average of the machine before the run: {load:.1f}")


def _finish(cells: Sequence[Cell], options: argparse.Namespace) -> None:
    print_report(cells, console(wide=190))
    if options.json:
        options.json.write_text(to_json(cells))
    if options.plot:
        draw_plot(cells, options.plot)
        say(f"plot: {options.plot}")


def _on_this_host(jobs: Sequence[Job], options: argparse.Namespace) -> list[Cell]:
    cells: list[Cell] = []
    for workers, job in itertools.product(options.workers, jobs):
        try:
            cells += launch(job, workers=workers, threads_per_worker=1)[0]
        except WorkersFailed as failed:
            if isinstance(failed.exception, ConfigError):  # every rank has said the same
                raise failed.exception from None
            raise
        if options.json:
            options.json.write_text(to_json(cells))  # a long run that breaks off leaves what it had
    return cells


def _on_bed(bed: Bed, name: str, kind: type[Cell]) -> list[Cell]:
    """Runs this very command under torchrun on hosts that hosts.py makes for it and removes afterwards."""
    if os.geteuid():
        raise ConfigError("--netbed needs root: it makes network namespaces")
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        raise ConfigError(f"--netbed needs {', '.join(missing)}: install iproute2 and util-linux")
    if not HOSTS.exists():
        raise ConfigError("--netbed needs scripts/netbed/hosts.py, which is in the sources only: run it from a clone")
    script = Path(sys.argv[0]).resolve()
    program = ["-m", "ddp"] if script.name == "__main__.py" else [str(script)]
    up = ["--up", str(bed.num_hosts), "--delay", f"{bed.delay_s * 1e6:g}us"]
    up += [] if bed.rate_bit_s is None else ["--rate", f"{bed.rate_bit_s:.0f}bit"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
        kept = Path(folder) / "cells.json"
        hosts = [sys.executable, str(HOSTS), "--name", f"bench{os.getpid()}"]
        command = [*hosts, "run", *up, "-k", str(bed.ranks_per_host), *program, *sys.argv[1:], "--json", str(kept)]
        said = _lines_of(command)
        if not kept.exists():
            refusals = [line for line in said if f"{name}: " in line]
            if refusals:
                raise ConfigError(refusals[0].partition(f"{name}: ")[2].rstrip())
            sys.exit("".join([*said[-30:], f"{name}: the ranks failed, see above"]))
        return from_json(kept.read_text(), kind)


def _lines_of(command: Sequence[str]) -> list[str]:
    """Returns the lines that the command prints; passes on its progress meanwhile."""
    said = []
    # In a session of its own, so that Ctrl-C reaches only us, and a second one does not leave half a bed.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                if PROGRESS in line:
                    say(line.rstrip("\n"), to=sys.stderr)
        except BaseException:
            process.terminate()  # it ends what it has started on the hosts, and removes them
            raise
    return said


# --- The report -------------------------------------------------------------------------------------------------------


AnyCell = TypeVar("AnyCell", bound=Cell)
WORDS = ("case", "algorithm", "model", "variant", "method")
"""Columns that hold words; all others hold numbers."""

# ------------------------------------------------------------------------------------------------------------- tables


def print_report(cells: Sequence[Cell], console: Console) -> None:
    """Prints a table for each place, without empty columns, and what its cells say together; then the legend."""
    shown: dict[str, str] = {}
    for where, group in _by_place(cells).items():
        rows = [row for cell in group for row in cell.rows()]
        table = Table(title=where)
        titles = [title for title in rows[0] if any(row[title] for row in rows)]
        shown |= {title: group[0].meaning(title) for title in titles}
        for title in titles:
            justify: Literal["left", "right"] = "left" if title in WORDS else "right"
            table.add_column(title, justify=justify, no_wrap=True)
        for row in rows:
            table.add_row(*(row[title] for title in titles))
        console.print(table)
        for line in group[0].summary(group):
            console.print(line)
    legend = Table.grid(padding=(0, 2))
    for title, meaning in shown.items():
        legend.add_row(title, meaning)
    console.print("", legend)


def _by_place(cells: Iterable[AnyCell]) -> dict[str, list[AnyCell]]:
    places: dict[str, list[AnyCell]] = {}
    for cell in cells:
        places.setdefault(cell.place, []).append(cell)
    return places


# --------------------------------------------------------------------------------------------------------------- JSON


def to_json(cells: Sequence[Cell]) -> str:
    """Writes a list of cells; those with turns say how many times as fast as their rival ours is, too."""
    ratios = [{"speedup": cell.speedup} if isinstance(cell, TimedCell) else {} for cell in cells]
    plain = [{**asdict(cell), **ratio} for cell, ratio in zip(cells, ratios, strict=True)]
    return records.to_json(plain, indent=1) + "\n"


def from_json(text: str, kind: type[AnyCell]) -> list[AnyCell]:
    """Reads the cells that `to_json` wrote."""
    return [kind(**{field.name: plain[field.name] for field in fields(kind)}) for plain in json.loads(text)]


# ------------------------------------------------------------------------------------------------------------ picture


def draw_plot(cells: Sequence[Any], picture: Path) -> None:
    """Draws a panel for each place, as the cells say."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = _by_place(cells)
    figure, panels = pyplot.subplots(
        len(places), 1, figsize=(8.0, 4.0 * len(places)), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, (title, group) in zip(panels[:, 0], places.items(), strict=True):
        group[0].draw(axes, group)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
