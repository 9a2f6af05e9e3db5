"""Runs a benchmark from its command line: starts ranks here or on a bed, and shows the report.

    bench … ──┬── launch on this host, once for each world size and job ──────── job()    ┐
              ├── hosts.py run, on a bed: this very command under torchrun ───── job()    ├── cells ── report
              └── under torchrun already ─────────────────────────────────────── job()    ┘

A job is a function that every rank runs; it returns cells. `BenchSite`, below, describes where it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from ddp.comm.meeting.place import place
from ddp.errors import ConfigError, WorkersFailed
from ddp.lab.bench.turns import Cell, TimedCell
from ddp.lab.clone import of_clone
from ddp.process import records
from ddp.process.arguments import Parser, listed, whole
from ddp.process.memory import available_cores
from ddp.process.terminal import console, say
from ddp.run.launch.from_python import launch
from ddp.run.settings.checks import most_workers
from ddp.units import counted

Job = Callable[[], Sequence[Cell]]
PLOTS = "recipes.studies.plots"


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cells to FILE, too")
    parser.set_defaults(plot=None, name=" ".join(parser.prog.split()[-2:]))
    rounds = "turns of each rival in a cell (default: %(default)s)"
    parser.add_argument("--turns", type=whole(1), default=turns, help=rounds)
    if plots:
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture of it")


def place_of(options: argparse.Namespace) -> BenchSite:
    """Returns where the ranks run.

    Raises:
        ConfigError: there is no such place, or a file that was asked for cannot be written.
    """
    for path in filter(None, (options.json, options.plot)):
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.absolute().parent}")
    if options.plot:
        of_clone(PLOTS, wanted_by="--plot")  # which refuses an installed package before anything is measured
    if options.netbed is None:
        return BenchSite(None, options.beside)
    return BenchSite(of_clone("recipes.studies.bed", wanted_by="--netbed").Bed.parse(options.netbed), options.beside)


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
        if where.bed is None:
            cells = _on_this_host(jobs, options)
        else:
            cells = from_json(where.bed.run_command(options.name), kind)
    _finish(merge(cells), options)
    say(f"load average of the machine before the run: {load:.1f}")


def _finish(cells: Sequence[Cell], options: argparse.Namespace) -> None:
    print_report(cells, console(wide=190))
    if options.json:
        options.json.write_text(to_json(cells))
    if options.plot:
        of_clone(PLOTS, wanted_by="--plot").draw(by_place(cells), options.plot)
        say(f"plot: {options.plot}")


def _on_this_host(jobs: Sequence[Job], options: argparse.Namespace) -> list[Cell]:
    cells: list[Cell] = []
    for workers, job in itertools.product(options.workers, jobs):
        try:
            cells += launch(job, workers=workers, threads_per_worker=1)[0]
        except WorkersFailed as failed:
            if isinstance(failed.exception, ConfigError):  # the same on every rank
                raise failed.exception from None
            raise
        if options.json:
            options.json.write_text(to_json(cells))  # a long run that is aborted leaves its cells
    return cells


# --- The report -------------------------------------------------------------------------------------------------------


AnyCell = TypeVar("AnyCell", bound=Cell)
WORDS = ("case", "algorithm", "model", "variant", "method")
"""Columns that hold words; all others hold numbers."""

# ------------------------------------------------------------------------------------------------------------- tables


def print_report(cells: Sequence[Cell], console: Console) -> None:
    """Prints a table for each place, without empty columns, and notes on all of its cells; then the legend."""
    shown: dict[str, str] = {}
    for where, group in by_place(cells).items():
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


def by_place(cells: Iterable[AnyCell]) -> dict[str, list[AnyCell]]:
    """Returns the cells of each place."""
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


# --- Where it runs: on this host or on a bed of network namespaces, alone or with strangers --------------------------
#
#     --netbed 2x2@1gbit@1ms     2 hosts with 2 ranks each; each link carries 1 Gbit/s each way; 1 ms from host to host
#     --beside 1                 one process that only computes runs on the same cores as the ranks


@dataclass(frozen=True)
class BenchSite:
    """Surroundings of the ranks of a benchmark.

    Attributes:
        bed: `recipes/studies/bed.py::Bed`; None: this host, or those of the ranks that are there.
        beside: the number of other processes that compute.
    """

    bed: Any = None
    beside: int = 0

    def title(self, world_size: int, num_hosts: int = 1) -> str:
        """Returns the headline: "2 ranks on one host, 2 cores, beside 1 process that only computes"."""
        ranks = f"{counted(world_size, 'rank')} on {'one host' if num_hosts == 1 else f'{num_hosts} hosts'}"
        bed = f" (netbed {self.bed.name})" if self.bed else ""
        strangers = "1 process that only computes" if self.beside == 1 else f"{self.beside} processes that only compute"
        return f"{ranks}{bed}, {available_cores()} cores{f', beside {strangers}' if self.beside else ''}"

    def wire_s(self, nbytes: int) -> float | None:
        """Returns the least time in which the links can all-reduce `nbytes`, or None where no link has a rate."""
        seconds: float | None = None if self.bed is None else self.bed.wire_s(nbytes)
        return seconds


HERE = BenchSite()


def refuse_unknown(what: str, names: Collection[str], known: Collection[str]) -> None:
    """Raises ConfigError if a name is unknown."""
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{what} {unknown[0]!r} is unknown; choose among {', '.join(known)}")


def split(option: str, text: str) -> list[str]:
    """Returns the parts between commas, each once; raises ConfigError if there is none."""
    if parts := list(dict.fromkeys(part for part in text.split(",") if part)):
        return parts
    raise ConfigError(f"{option} {text}: want at least one, or several with commas between them")


# --- Strangers on the ranks' cores -----------------------------------------------------------------------------------
#
# Keeps strangers, processes that only compute, on the cores of a benchmark where `--beside` asks for them.
#
# Beside a stranger both rivals show how they wait on a shared machine: a rank that spins until its neighbours are there
# takes the core from the very rank that it waits for.


# A stranger computes until its standard input closes. The kernel closes it also when the parent is killed by SIGKILL.
STRANGER = """
import select
while not select.select([0], [], [], 0)[0]:
    for _ in range(100_000):
        pass
"""


@contextmanager
def strangers(number: int) -> Iterator[list[int]]:
    """Keeps `number` processes computing, free to run on any core, until the block ends. Yields their ids."""
    with ExitStack() as stack:
        processes = [
            # A session of its own, because Ctrl-C would reach it otherwise.
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", STRANGER], stdin=subprocess.PIPE, start_new_session=True
            )
            for _ in range(number)
        ]
        for process in processes:
            stack.enter_context(process)  # which closes its standard input and waits for its end
        yield [process.pid for process in processes]
