"""Runs both benchmarks from the command line: reads options, starts ranks here or on a bed, shows the report.

    scripts/bench_… ──┬── launch on this host, once for each world size and job ──── job()    ┐
                      ├── hosts.py run, on a bed: this very script under torchrun ── job()    ├── cells ── report
                      └── under torchrun already ──────────────────────────────────  job()    ┘

A job is a function that every rank runs; it returns cells. The script passes `ddp.launch` in, because that stands on a
higher floor than this package.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ddp.bench.place import Bed, Place
from ddp.bench.report import draw_plot, from_json, print_report, to_json
from ddp.bench.strangers import strangers
from ddp.bench.turns import PROGRESS, Cell
from ddp.errors import ConfigError, WorkersFailed
from ddp.process import arguments
from ddp.process.arguments import listed, whole

Job = Callable[[], Sequence[Cell]]


class Parser(arguments.Parser):
    """Has the options of both benchmarks.

    Args:
        text: the script's docstring.
        workers: the world sizes unless others are asked for; each must be at least `least`.
        most: the largest number of processes that share this host.
    """

    def __init__(self, text: str | None, *, workers: str, least: int, most: int, turns: int) -> None:
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        place = self.add_mutually_exclusive_group()
        place.add_argument(
            "--workers",
            type=listed(whole(least, most, "more would take turns on the cores")),
            default=workers,
            metavar="N,N,…",
            help="world sizes on this host (default: %(default)s)",
        )
        place.add_argument(
            "--netbed", metavar="HOSTSxRANKS[@RATE][@DELAY]", help="run on hosts made for it, e.g. 2x2@1gbit (root)"
        )
        self.add_argument(
            "--beside",
            type=whole(0, most),
            default=0,
            metavar="N",
            help="keep N processes computing on the same cores meanwhile",
        )
        self.add_argument(
            "--turns", type=whole(1), default=turns, help="turns of each rival in a cell (default: %(default)s)"
        )
        self.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to FILE, too")
        self.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a picture of it")

    def checked(self) -> argparse.Namespace:
        """Returns the options once those that both benchmarks share have been found possible.

        Raises:
            ConfigError: an option is impossible.
        """
        options = self.parse_args()
        for path in filter(None, (options.json, options.plot)):
            if not path.absolute().parent.is_dir():
                raise ConfigError(f"{path}: there is no folder {path.absolute().parent}")
        options.place = Place(None if options.netbed is None else Bed.parse(options.netbed), options.beside)
        return options


def split(option: str, text: str) -> list[str]:
    """Returns the parts between commas, each once; raises ConfigError if there is none."""
    if parts := list(dict.fromkeys(part for part in text.split(",") if part)):
        return parts
    raise ConfigError(f"{option} {text}: want at least one, or several with commas between them")


def run(
    parser: Parser,
    jobs_of: Callable[[argparse.Namespace], list[Any]],
    kind: type[Cell],
    *,
    launch: Callable[..., Any],
    rank: str | None,
) -> None:
    """Runs a benchmark from its command line to its report.

    Args:
        jobs_of: returns what to measure; raises ConfigError for options that cannot work, before any rank starts.
        kind: the class of the cells.
        launch: `ddp.launch`.
        rank: under torchrun, this process's rank.
    """
    try:
        options = parser.checked()
        jobs = jobs_of(options)
        if rank is not None:
            with strangers(options.beside if rank == "0" and options.place.bed is None else 0):
                cells = [cell for job in jobs for cell in job()]
            if rank == "0":
                _finish(cells, options)
            return
        load = os.getloadavg()[0]
        with strangers(options.beside):
            if options.place.bed is None:
                cells = _on_this_host(jobs, options, launch)
            else:
                cells = _on_bed(options.place.bed, kind)
        _finish(cells, options)
        print(f"load average of the machine before the run: {load:.1f}")
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _finish(cells: Sequence[Cell], options: argparse.Namespace) -> None:
    console = Console()
    print_report(cells, console if console.is_terminal else Console(width=190))
    if options.json:
        options.json.write_text(to_json(cells))
    if options.plot:
        draw_plot(cells, options.plot)
        print(f"plot: {options.plot}")


def _on_this_host(jobs: Sequence[Job], options: argparse.Namespace, launch: Callable[..., Any]) -> list[Cell]:
    cells: list[Cell] = []
    for workers, job in itertools.product(options.workers, jobs):
        try:
            cells += launch(job, workers=workers, threads_per_worker=1)[0]
        except WorkersFailed as failed:
            last_line = str(failed).rstrip().splitlines()[-1]
            if last_line.startswith("ConfigError: "):  # every rank has said the same
                raise ConfigError(last_line.removeprefix("ConfigError: ")) from None
            raise
        if options.json:
            options.json.write_text(to_json(cells))  # a long run that breaks off leaves what it had
    return cells


def _on_bed(bed: Bed, kind: type[Cell]) -> list[Cell]:
    """Runs this very script under torchrun on hosts that hosts.py makes for it and removes afterwards."""
    if os.geteuid():
        raise ConfigError("--netbed needs root: it makes network namespaces")
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        raise ConfigError(f"--netbed needs {', '.join(missing)}: install iproute2 and util-linux")
    script = Path(sys.argv[0]).resolve()
    hosts = [sys.executable, str(script.parent / "netbed" / "hosts.py"), "--name", f"bench{os.getpid()}"]
    up = ["--up", str(bed.num_hosts), "--delay", f"{bed.delay_s * 1e6:g}us"]
    up += [] if bed.rate_bit_s is None else ["--rate", f"{bed.rate_bit_s:.0f}bit"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="ddp-bench-") as folder:
        kept = Path(folder) / "cells.json"
        command = [*hosts, "run", *up, "-k", str(bed.ranks_per_host)]
        command += [str(script), *sys.argv[1:], "--json", str(kept)]
        said = _lines_of(command)
        if not kept.exists():
            refusals = [line for line in said if f"{script.name}: " in line]
            if refusals:
                raise ConfigError(refusals[0].partition(f"{script.name}: ")[2].rstrip())
            sys.exit("".join([*said[-30:], f"{script.name}: the ranks failed, see above"]))
        return from_json(kept.read_text(), kind)


def _lines_of(command: Sequence[str]) -> list[str]:
    """Returns what the command prints; passes on its progress meanwhile."""
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
                    print(line, end="", file=sys.stderr, flush=True)
        except BaseException:
            process.terminate()  # it ends what it has started on the hosts, and removes them
            raise
    return said
