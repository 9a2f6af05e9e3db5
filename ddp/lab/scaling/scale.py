"""Measures within seconds the speed-up of each number of workers: your own run on 1, 2, 4 … workers, one after another.

    python -m ddp scale model=resnet18 data=synthetic          strong scaling: they share the global batch
    python -m ddp scale batch.global_size='${per_worker:32}'   weak scaling: it grows with them

Each number of workers is a job as of a sweep (`run/launch/sweep.py`). It ends after the seconds, with a profile, and
without evaluation or checkpoint. So it measures speed alone; the report is that of any sweep.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp.comm.meeting.place import refuse_workers
from ddp.commands.registry import parser_of
from ddp.errors import ConfigError
from ddp.lab.scaling import report
from ddp.lab.scaling.figures import Series, compare
from ddp.lab.scaling.report import tables_of
from ddp.lab.scaling.runs import read_runs
from ddp.process.arguments import listed, positive, program, quoted, relative_path, whole
from ddp.process.memory import available_cores
from ddp.process.terminal import say
from ddp.run.assembly.stages import check
from ddp.run.launch import sweep
from ddp.run.launch.command_line import bad_input_to, composed, exit_with_error, for_hydra, options_first, varied_keys
from ddp.run.launch.run_folder import unwritable
from ddp.run.launch.sweep import Job
from ddp.run.settings.checks import check_gpus, check_strategy, places, resolve
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain
from ddp.units import counted, lines_of_table

_MANY = f"{10**9}"  # steps
CHANGED = {
    **dict.fromkeys(("epochs", "batch.warmup_size", "batch.warmup_samples", "batch.warmup_epochs"), "null"),
    **dict.fromkeys(("evaluate.every_epochs", "evaluate.every_steps", "early_stopping.patience"), "null"),
    "early_stopping.min_delta": "0",
    **dict.fromkeys(("max_steps", "checkpoint.every_steps"), _MANY),
    "watch.action": "off",
    "trackers": "[]",
    "evaluate.by": "workers",
    "report.curves": "false",
    "report.log_every": "5",
    "profile.steps": "50",
}
"""Settings in which a job differs from the user's run: it makes steps of the whole batch, and nothing else."""
REFUSED = {
    "-": "is for training; leave it out",
    "cluster.workers": "is what varies here; give --workers 1,2,4",
    "cluster.spec": "is for training; here all workers are on this host",
    "cluster.task": "is for training; here all workers are on this host",
    "profile.seconds": "is given as --seconds",
    "resume": "a run to be measured starts from scratch; leave it out",
    "sweep.parallel": "jobs that run at the same time slow each other down; leave it out",
    "trial": "has too few steps to be measured; leave it out",
}
"""Beginnings of words that make no sense here."""


def main(words: Sequence[str]) -> int:
    """Measures, prints the table and writes the report; returns the exit status."""
    usage = f"{program()} scale [--workers K,K,…] [--seconds S] [SETTING=VALUE …]"
    parser = parser_of("scale", usage=usage, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "numbers of workers (default: 1, 2, 4 … up to the GPUs or cores here)"
    parser.add_argument("--workers", type=listed(whole(1)), metavar="K,K,…", help=about)
    about = "to measure each of them, after a warm-up (default: %(default)g)"
    parser.add_argument("--seconds", type=positive, default=5.0, metavar="S", help=about)
    options, settings = parser.parse_known_args(words)
    with bad_input_to(exit_with_error):
        refuse_workers("scale", instead="start it by itself, with its own workers")
        settings = options_first(settings, own=("--workers", "--seconds"))
        given = [each for each in settings if not each.startswith("sweep.name=")]
        named = Job([each for each in settings if each not in given], Path()).settings.get("sweep.name", "null")
        name = time.strftime("scale-%Y-%m-%d_%H-%M-%S") if named in ("", "null") else named
        from_plain({"sweep": {"name": name}})  # which refuses a wrong name
        folder = Path("runs", name).absolute()
        todo = jobs_for(given, folder, numbers=options.workers, seconds=options.seconds)
        try:
            numbers = ", ".join(job.settings["cluster.workers"] for job in todo)
            say(f"measuring {numbers} workers, for {options.seconds:g} s each, in {relative_path(folder)}/")
            stopped = sweep.run(iter(todo), folder, in_view=False)
        except OSError as error:
            raise unwritable(error.filename or folder, error) from error
        status = show(folder, given)
        if stopped is None:
            return status
        say(f"measure the missing runs by {program()} scale {shlex.join(sweep.again(words, folder))}", to=sys.stderr)
        return stopped
    raise AssertionError("bad input ends the process")


# --- before a worker starts ------------------------------------------------------------------------------------------


def jobs_for(given: Sequence[str], folder: Path, *, numbers: Sequence[int] | None, seconds: float) -> list[Job]:
    """Returns a job for each number of workers.

    Args:
        given: the user's settings.
        numbers: of workers; None: all that have a core or a GPU each.

    Raises:
        ConfigError: they cannot work, or cannot be compared.
    """
    for word in given:
        if why := next((why for key, why in REFUSED.items() if word.lstrip("+").startswith(key)), None):
            raise ConfigError(f"{word}: {why}")
    settings = for_hydra(given)
    if varied := varied_keys(settings):
        raise ConfigError(f"{varied[0]}: has several values, and the number of workers alone varies here; give it one")
    numbers = _numbers(composed(settings)[0], numbers)
    threads = str(max(1, available_cores() // numbers[-1]))  # the same for all, so that a worker more is a core more
    changed = {"cluster.threads_per_worker": threads} | CHANGED | {"profile.seconds": f"{seconds:g}"}
    if any(_key(each) == "cluster.threads_per_worker" for each in settings):
        del changed["cluster.threads_per_worker"]
    fixed = [each for each in settings if _key(each) not in changed]
    fixed += [f"{key}={value}" for key, value in changed.items()]
    for found in sweep.jobs_in(folder):
        sweep.refuse_other(found, Job(fixed, folder), but=["cluster.workers"])
    todo = []
    for number in numbers:
        overrides = [*fixed, f"cluster.workers={number}"]
        todo.append(Job(overrides, folder / sweep.job_folder(overrides, ["cluster.workers"], number=number)))
    configs = []
    for job in todo:
        configs.append(config := composed(job.overrides)[0])
        check_gpus(config)
        check_strategy(config)
        resolve(config)
    check(configs[-1])
    for sentence in compares(configs):
        say(sentence)
    return todo


def _key(setting: str) -> str:
    return setting.partition("=")[0].lstrip("+~")


def _numbers(config: Config, asked: Sequence[int] | None) -> list[int]:
    """Returns the numbers of workers, rising.

    Raises:
        ConfigError: there is no second one, or they cannot have a core or a GPU each.
    """
    most, what = places(config)
    numbers = sorted({*asked} if asked else {most, *(1 << power for power in range(most.bit_length()))})
    if numbers[-1] > most:
        raise ConfigError(
            f"--workers {numbers[-1]}: {what} can be used here, and workers that take turns do not show what more "
            f"would buy; take at most {most}, and for more workers {program()} forecast"
        )
    if len(numbers) == 1:
        only = f"--workers {numbers[0]}" if asked else f"{what} can be used here"
        raise ConfigError(f"{only}: a single number of workers has nothing to be compared with; it takes two or more")
    return numbers


def compares(configs: Sequence[Config]) -> list[str]:
    """Returns sentences on the comparison, and on unequal shares of the batch."""
    batches = {config.cluster.workers: config.batch.global_size for config in configs}
    if len(set(batches.values())) == 1:
        sentences = [f"Strong scaling: the workers share a global batch of {configs[0].batch.global_size}."]
    else:
        each = ", ".join(f"{batch} for {counted(workers, 'worker')}" for workers, batch in batches.items())
        sentences = [f"Weak scaling: the global batch grows with the workers, {each}."]
    for workers, batch in batches.items():
        if batch % workers:
            largest = -(-batch // workers)
            sentences.append(
                f"A batch of {batch} does not divide among {workers} workers: a step waits for the largest share, "
                f"{largest}, so that their efficiency is at most {batch / (workers * largest):.0%}."
            )
    return sentences


# --- results of the jobs ---------------------------------------------------------------------------------------------


def show(folder: Path, given: Sequence[str]) -> int:
    """Prints the results of the jobs in a folder, writes the report, and prints the next commands; returns the status.

    Args:
        given: the user's settings.
    """
    runs, notes = read_runs(folder)
    series, more = compare(runs)
    status = sweep.status_of(sweep.jobs_in(folder))
    if not series:
        say("\n".join([*notes, *more, "so there is nothing to compare"]))
        return status or 1
    for each in series:
        for table in tables_of(each):
            say("\n".join([f"{table.title}:", *lines_of_table(table.rows), ""]))
    say("This is about speed alone: nothing was evaluated, so it is unknown how well more workers learn.")
    report.main([str(folder)])
    say("\n".join(_next_commands(folder, series[0], given)))
    return status


def _next_commands(folder: Path, series: Series, given: Sequence[str]) -> list[str]:
    """Returns commands that find out whether more workers learn as well, and forecast the speed-up of still more."""
    points, whole_run = series.points, f"{folder.name}-whole"
    most = points[-1].workers
    workers = f"cluster.workers={','.join(str(point.workers) for point in points)}"
    threads = f"cluster.threads_per_worker={series.base.run.settings['cluster.threads_per_worker']}"
    words = [threads, *(each for each in given if _key(each) != "cluster.threads_per_worker")]
    learns = ["train", "-m", workers, *words, "profile.steps=5", f"sweep.name={quoted(whole_run)}"]
    batch = [] if series.kind == "strong" else ["--batch", str(4 * points[-1].run.batch)]
    like_here = ["--ranks", str(4 * most), "--per-host", str(most), "--rate", "10gbit", "--alpha", "50us", *batch]
    forecast = ["forecast", str(relative_path(series.base.run.folder)), *like_here]
    again = shlex.join(["report", f"runs/{whole_run}"])
    lines = [f"do they learn as well?   {program()} {shlex.join(learns)}; {program()} {again}"]
    if series.base.run.settings["strategy.name"] not in ("fully_sharded", "local_sgd", "parameter_server"):
        lines.append(f"four hosts like this?    {program()} {shlex.join(forecast)}")
    return lines
