"""A sweep, a search or a measurement: its jobs, the folder of each, and their results side by side, the best first.

    run                     main, in its own session: each job on its own cores, the next one as soon as one has ended
     │  starts               └─ the command line of one run: launcher and workers, as without a sweep
     │  waits, writes RUN_DIR/job.json, and the table after each job
     ▼
    gather                  the table, from the folder

    runs/sweep-DATE/cluster.workers=2,optim.lr=0.1/     a job; it is named by what the sweep varies
                        job.json                        its settings, when it began and ended, with which status and
                                                        objective (the main metric)
                    sweep.csv, sweep.json               all jobs so far, rewritten after each of them

The folder is the only state. So a resumed sweep, another launcher of Hydra's, another sweeper and a search lead to the
same table. The main metric and its direction come from the jobs' summary.json. Without a main metric, speed decides.

If several jobs run at the same time, each prints to its RUN_DIR/logs/job.log, because their lines would mix. A signal
to this process is passed on to all running jobs. Each job's workers agree on a stop and save, and no other job begins.
A job that still runs `STOP_S` after it was asked to stop, such as a paused one, is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

from ddp.errors import ConfigError
from ddp.process.arguments import quoted, relative_path
from ddp.process.clock import Patience
from ddp.process.files import hold, make_folder, read_own, to_append, write_whole
from ddp.process.host import VISIBLE_GPUS, visible_gpus
from ddp.process.memory import available_cores
from ddp.process.records import json_object, made, to_json
from ddp.process.terminal import console, ended_by_ctrl_c, say
from ddp.run.launch.supervisor import SHUTDOWN_S, paused_together, signals_to
from ddp.run.launch.worker import ORPHAN_GRACE_S, follow_parent
from ddp.train.reports.results import is_metric, metric_in_words, read_summary, words_of
from ddp.units import counted

MOST_LETTERS = 120
"""A longer name of a folder is cut; file systems take 255 bytes for a name, and some of them less."""
RESULT = "job.json"
_SAME_RUN = ("resume", "trust")  # settings that may change while a job remains the same


@dataclass(frozen=True)
class Job:
    """One run of a sweep: what RUN_DIR/job.json holds.

    Attributes:
        overrides: its settings, as words of a command line.
        status: the exit status of its process; None while it runs, and if its end was not seen.
        objective: the main metric at the end; None without one, and of a job that has failed.
        began, ended: seconds since 1970.
        pruned: a search has stopped it, because others were better.
    """

    overrides: Sequence[str]
    run_dir: Path
    status: Annotated[int, range(256)] | None = None
    objective: float | None = None
    began: float | None = None
    ended: float | None = None
    pruned: bool = False

    @classmethod
    def read(cls, run_dir: Path) -> Job | None:
        """Returns the job of a folder, or None if there is none, or if its file is damaged."""
        with contextlib.suppress(OSError, ValueError):
            return made(cls, {**json_object(read_own(run_dir / RESULT)), "run_dir": run_dir})
        return None

    def begun(self) -> Job:
        """Records that the job begins now; returns the new state."""
        make_folder(self.run_dir)
        return self._written(began=time.time())

    def done(self, status: int, *, pruned: bool = False) -> Job:
        """Records that the job has ended now; returns the new state."""
        job = replace(self, status=status)
        objective = job.number(job.summary.get("main_metric", "")) if status == 0 else None
        return self._written(status=status, objective=objective, ended=time.time(), pruned=pruned)

    def _written(self, **changes: Any) -> Job:
        job = replace(self, **changes)
        plain = {key: value for key, value in asdict(job).items() if key != "run_dir"}
        write_whole(job.run_dir / RESULT, to_json(plain, indent=1) + "\n")
        return job

    @property
    def settings(self) -> dict[str, str]:
        """Returns the settings of the command line for this job, by key."""
        parts = (each.replace("\\:", ":").partition("=") for each in self.overrides)  # Hydra's sweeper adds the \
        return {key.lstrip("+~"): re.sub(r'^"(.*)"$', r"\1", value) for key, _, value in parts}  # paths are quoted

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """Returns the figures that the run has left."""
        if self.status != 2:  # of a job that was refused, the folder may hold another run
            with contextlib.suppress(OSError, ValueError):
                return read_summary(self.run_dir)
        return {}

    def number(self, key: str) -> float | None:
        """Returns a figure of the summary; None if it is missing or not finite, as after training has diverged."""
        value = self.summary.get(key)
        return value if isinstance(value, (int, float)) else None


def earlier(job: Job) -> Job | None:
    """Returns the same job as an earlier command has left it; None if its folder is new.

    Raises:
        ConfigError: its folder holds another run.
    """
    found = Job.read(job.run_dir)
    if found is None:
        if (job.run_dir / "config.yaml").exists():
            raise ConfigError(f"{job.run_dir} holds a run that is no job of a sweep; take another sweep.name")
        return None
    refuse_other(found, job)
    return found


class Results(NamedTuple):
    """A sweep's jobs, the best first; the keys that differ; and the metric that orders it, "" if there is none."""

    jobs: Sequence[Job]
    varied: Sequence[str]
    main_metric: str


def refuse_other(found: Job, job: Job, *, but: Collection[str] = ()) -> None:
    """Raises ConfigError if a job in the folder and a new one differ in a setting.

    Args:
        but: keys in which they may differ.
    """
    then, now = ({k: v for k, v in each.settings.items() if k not in (*_SAME_RUN, *but)} for each in (found, job))
    for key in [*then, *now]:
        if then.get(key) != now.get(key):
            has, wants = (f"{key}={each[key]}" if key in each else f"no {key}" for each in (then, now))
            differ = f"{found.run_dir} holds a job with {has}, and this one has {wants}"
            raise ConfigError(f"{differ}; take another sweep.name")


def job_folder(overrides: Sequence[str], varied: Collection[str], *, number: int) -> str:
    """Returns the name of a job's folder: what the sweep varies, and the job's number where that alone is no name."""
    settings = Job(overrides, Path()).settings
    wanted = ",".join(f"{key}={settings[key]}" for key in settings if key in varied)
    name = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", wanted)[:MOST_LETTERS]
    return name if name and name == wanted else f"{name},job={number}".lstrip(",")


def jobs_in(folder: Path) -> list[Job]:
    """Returns the jobs that have begun in the folder of a sweep, in the order in which they did."""
    found = [job for path in folder.glob(f"[!.]*/{RESULT}") if (job := Job.read(path.parent)) is not None]
    return sorted(found, key=lambda job: job.began or 0.0)


def gather(folder: Path) -> Results:
    """Reads the results of a sweep's jobs so far, and orders them."""
    jobs = jobs_in(folder)
    evaluated = next((job.summary for job in jobs if "main_metric" in job.summary), {})
    main_metric, sign = evaluated.get("main_metric", ""), 1 if evaluated.get("higher_is_better") else -1

    def place(job: Job) -> tuple[bool, float, float]:
        metric, rate = job.number(main_metric), job.number("samples_per_s")
        return job.status != 0, math.inf if metric is None else -sign * metric, -(rate or 0.0)

    keys = dict.fromkeys(key for job in jobs for key in job.settings)
    varied = [key for key in keys if len(jobs) == 1 or len({job.settings.get(key) for job in jobs}) > 1]
    return Results(sorted(jobs, key=place), varied, main_metric)


def again(words: Sequence[str], folder: Path) -> list[str]:
    """Returns a command line's words, changed so that they make the jobs that are missing in a folder."""
    return [*(each for each in words if not each.startswith("sweep.name=")), f"sweep.name={quoted(folder.name)}"]


def report_jobs(folder: Path) -> int:
    """Writes and prints the table. Returns the status of the sweep: that of the first job that is not done."""
    results = gather(folder)
    write(results, folder)
    show(results, folder)
    return status_of(results.jobs)


def status_of(jobs: Iterable[Job]) -> int:
    """Returns the status of the first job that is not done; 0 if there is none."""
    return next((1 if job.status is None else job.status for job in jobs if job.status != 0), 0)


def write(results: Results, folder: Path) -> None:
    """Writes sweep.csv, with a column for each setting that varies, and sweep.json, with all settings and summaries."""
    metrics = dict.fromkeys(key for job in results.jobs for key in job.summary if is_metric(key))
    columns = [*metrics, "samples_per_s", "seconds"]
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow([*results.varied, *columns, "status", "folder"])
    found = []
    for job in results.jobs:
        values = [*(job.settings.get(key) for key in results.varied), *(job.summary.get(key) for key in columns)]
        writer.writerow([*values, job.status, job.run_dir.name])
        found.append(
            {"settings": job.settings, "status": job.status, "folder": job.run_dir.name, "summary": job.summary}
        )
    write_whole(folder / "sweep.csv", table.getvalue())
    write_whole(folder / "sweep.json", to_json(found, indent=2) + "\n")


def show(results: Results, folder: Path) -> None:
    """Prints the jobs side by side: what varied, how good, how fast, how it ended. No value that varied is cut off."""
    from rich.table import Table

    table = Table()
    table.add_column("", style="bold")
    for key in results.varied:
        table.add_column(key, overflow="fold")
    if results.main_metric:
        table.add_column(words_of(results.main_metric), justify="right", no_wrap=True)
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("ended", no_wrap=True)
    for place, job in enumerate(results.jobs):
        decided = job.number(results.main_metric or "samples_per_s")
        is_best = place == 0 and job.status == 0 and decided is not None and len(results.jobs) > 1
        metric, rate = job.summary.get(results.main_metric), job.summary.get("samples_per_s")
        table.add_row(
            ("best" if results.main_metric else "fastest") if is_best else "",
            *(job.settings.get(key, "") for key in results.varied),
            *([metric_in_words(results.main_metric, metric)] if results.main_metric else []),
            "" if rate is None else f"{rate:,.0f}",
            ending(job),
        )
    terminal = console(wide=1000)
    terminal.print(f"sweep in {relative_path(folder)}/  (sweep.csv, sweep.json)", soft_wrap=True, highlight=False)
    terminal.print(table)


def ending(job: Job) -> str:
    """Returns how a job has ended, as text; `command_line.py` has the table of statuses."""
    status = job.status
    if job.pruned or status is None:
        return "pruned" if job.pruned else "unfinished"
    if status == 0 and job.summary.get("sidecar", {}).get("missing"):
        return "done, but not evaluated to the end"
    if status - 128 in [*signal.Signals]:
        return f"stopped by {signal.Signals(status - 128).name} (status {status})"
    known = {0: "done", 2: "refused (status 2)", 3: "ended by its watch (status 3)"}
    return known.get(status, f"failed (status {status})")


# --- The processes of the jobs ---------------------------------------------------------------------------------------

Item = TypeVar("Item")

POLL_S = 0.05
STOP_S = 2 * SHUTDOWN_S  # its launcher gives the workers SHUTDOWN_S, and then writes the results
_TAIL = 15  # lines of the log of a job that has failed


@dataclass
class _Running:
    """A job's process, and the number of its share of the cores.

    Attributes:
        patience: time until it is killed, once it was asked to stop.
    """

    job: Job
    process: subprocess.Popen[bytes]
    share: int
    is_hopeless: bool = False
    patience: Patience | None = None

    def stop(self, number: int) -> None:
        """Asks the job to stop."""
        self.process.send_signal(number)
        self.patience = self.patience or Patience(STOP_S)

    def has_ended(self) -> bool:
        """Returns True if the process has ended; kills it when its time is up."""
        if self.patience is not None and not self.patience.left_s():
            self.process.kill()
        return self.process.poll() is not None

    def done(self) -> Job:
        """Records how the job has ended; returns the new state."""
        status = self.process.returncode
        status = status if status >= 0 else 128 - status
        return self.job.done(status, pruned=self.is_hopeless and status > 128)


def check_parallel(parallel: int) -> None:
    """Raises ConfigError if the jobs cannot have a core each; warns if they cannot have a GPU each."""
    cores = available_cores()
    if parallel > cores:
        raise ConfigError(
            f"sweep.parallel={parallel}: each job has its own cores, and {cores} can be used here; take at most that"
        )
    if 0 < (num_gpus := len(visible_gpus())) < parallel:
        there = f"there {'is' if num_gpus == 1 else 'are'} {counted(num_gpus, 'GPU')}"
        say(f"sweep.parallel={parallel}: {there}, so jobs share one", to=sys.stderr)


def run(
    todo: Iterator[Job],
    folder: Path | None = None,
    *,
    parallel: int = 1,
    options: Sequence[str] = (),
    in_view: bool | None = None,
    is_hopeless: Callable[[Job], bool] = lambda _: False,
    ended: Callable[[Job], object] = lambda _: None,
) -> int | None:
    """Runs the jobs that are not done already; returns the status of a signal that has stopped them, else None.

    Args:
        todo: the next one is taken when there are cores for it.
        folder: the sweep's, in which the table is rewritten after each job; None: another process does that.
        options: Hydra's own, for each job.
        in_view: the jobs print to this process's output; None: if there is one at a time.
        is_hopeless: is called repeatedly while a job runs; if it returns True, the job is asked to stop.
        ended: is called with each job that has ended, or is found to be done.

    Raises:
        ConfigError: the folder of a job holds another run.
    """
    is_seen = parallel == 1 if in_view is None else in_view
    running: list[_Running] = []
    signals: list[signal.Signals] = []

    def note(job: Job) -> None:
        ended(job)
        if folder is not None:
            write(gather(folder), folder)

    with contextlib.ExitStack() as until_end:
        if folder is not None:
            make_folder(folder)
            until_end.enter_context(contextlib.closing(hold(folder)))
        until_end.enter_context(signals_to(signals.append))
        until_end.enter_context(paused_together(signal.SIGTSTP))
        until_end.callback(_end, running)
        num_passed_on = 0
        while True:
            while not signals and len(running) < parallel and (job := next(todo, None)) is not None:
                before = earlier(job)
                if before is not None and before.status == 0:
                    note(before)
                    continue
                words = _words(job, resumes=before is not None and (job.run_dir / "config.yaml").exists())
                share = min({*range(parallel)} - {each.share for each in running})
                cores = _share_of_cores(share, parallel) if parallel > 1 else []
                gpus = _share_of_gpus(share, parallel) if parallel > 1 else []
                job = job.begun()
                running.append(_Running(job, _start(job, [*options, *words], cores, gpus, is_seen), share))
            if not running:
                return 128 + signals[0] if signals else None
            for each in [each for each in running if each.has_ended()]:
                running.remove(each)
                job = each.done()
                if not is_seen:
                    _print_end(job)
                note(job)
            for number in signals[num_passed_on:]:
                num_passed_on += 1
                for each in running:
                    each.stop(number)
            for each in running:
                if not signals and not each.is_hopeless and is_hopeless(each.job):
                    each.is_hopeless = True
                    each.stop(signal.SIGTERM)
            time.sleep(POLL_S)


def _end(running: Sequence[_Running]) -> None:
    """Ends the jobs that run after an error."""
    for each in running:
        each.stop(signal.SIGTERM)
    while not all(each.has_ended() for each in running):
        time.sleep(POLL_S)


def _start(
    job: Job, words: Sequence[str], cores: Sequence[int], gpus: Sequence[str], is_seen: bool
) -> subprocess.Popen[bytes]:
    """Starts a job's process, in its own session, so that signals of the terminal reach it through this one.

    Args:
        cores, gpus: that it may use; empty: all.
    """
    bootstrap = [sys.executable, "-P", str(Path(__file__).parent / "bootstrap.py"), "ddp.run.launch.sweep"]
    about = ["--parent", str(os.getpid()), "--cores", ",".join(map(str, cores))]
    command = [*bootstrap, *about, str(job.run_dir), "--", *words]
    if gpus:
        command = ["env", f"{VISIBLE_GPUS}={','.join(gpus)}", *command]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the job handles it: see `main`
    try:
        if is_seen:
            sys.stdout.flush()
            return subprocess.Popen(command, start_new_session=True)
        logs = job.run_dir / "logs"
        make_folder(logs)
        with to_append(logs / "job.log") as log:
            return subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _words(job: Job, *, resumes: bool) -> list[str]:
    """Returns the settings of a job's command line; its own come after those that the sweep proposes."""
    resume = ["resume=auto"] if resumes else []
    group = f"run.group={quoted(job.run_dir.parent.name)}"
    return [group, *resume, *job.overrides, f"hydra.run.dir={quoted(str(job.run_dir))}"]


def _share_of_cores(share: int, parallel: int) -> Sequence[int]:
    """Returns one of `parallel` equal parts of the cores that this process may use; both threads of a core together.

    Where a quota pays for fewer cores than there are, each part is cut to its share of them.
    """
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (_siblings(core), core))
    mine = _part(cores, share, parallel)
    return mine if available_cores() == len(cores) else mine[: len(_part(range(available_cores()), share, parallel))]


def _share_of_gpus(share: int, parallel: int) -> Sequence[str]:
    """Returns one of `parallel` equal parts of the GPUs, as CUDA names them; one alone where there are fewer."""
    gpus = visible_gpus()
    return _part(gpus, share, parallel) or gpus[share % max(1, len(gpus)) :][:1]


def _part(of: Sequence[Item], share: int, parallel: int) -> Sequence[Item]:
    return of[share * len(of) // parallel : (share + 1) * len(of) // parallel]


def _siblings(core: int) -> tuple[int, int]:
    """Returns package and core that a logical processor belongs to; itself where the kernel does not say."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    with contextlib.suppress(OSError, ValueError):
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    return 0, core


def _print_end(job: Job) -> None:
    """Prints how a job that prints to its log has ended; if it has failed, with the end of that log."""
    objective = "" if job.objective is None else f", {job.summary['main_metric']} {job.objective:.6g}"
    say(f"{relative_path(job.run_dir)}/: {ending(job)}{objective}")
    log = job.run_dir / "logs" / "job.log"
    if job.status in (1, 2) and log.is_file():
        lines = log.read_text(errors="replace").splitlines()[-_TAIL if job.status == 1 else -1 :]
        say("\n".join([f"the end of {relative_path(log)}:", *lines]), to=sys.stderr)


# --- The process of a job --------------------------------------------------------------------------------------------
#
#     python -P …/bootstrap.py ddp.run.launch.sweep --parent PID --cores 0,1 RUN_DIR -- SETTING …


def main(argv: Sequence[str]) -> NoReturn:
    """Takes the cores of a job, follows its parent, and runs one command line; ends with its status."""
    parser = argparse.ArgumentParser(prog="ddp.run.launch.sweep")
    parser.add_argument("--parent", type=int, required=True, help="process id of the sweep")
    parser.add_argument("--cores", default="", help="numbers of the cores to use; none: all")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("words", nargs="*", help="settings, and Hydra's own options")
    options = parser.parse_args(argv)

    with ended_by_ctrl_c():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # which the sweep has kept from the interpreter
    follow_parent(options.parent, grace_s=ORPHAN_GRACE_S + SHUTDOWN_S)
    if options.cores:
        os.sched_setaffinity(0, map(int, options.cores.split(",")))
    sys.orig_argv.clear()  # the user has not typed it: the commands that this process suggests begin as usual
    sys.argv[1:] = options.words
    with paused_together():  # from the beginning, because the kernel pauses no session that has no terminal
        _wait_for_orphans(options.run_dir)
        import_module("ddp.run.launch.command_line").main()  # by name, because that starts jobs
    raise AssertionError("training ends the process")


def _wait_for_orphans(run_dir: Path) -> None:
    """Waits for the workers of a sweep that was killed: they agree to stop, save, and then release the folder."""
    deadline_s = time.monotonic() + ORPHAN_GRACE_S + SHUTDOWN_S
    for folder in (run_dir, run_dir / "checkpoints"):
        while folder.is_dir():
            try:
                hold(folder).close()
                break
            except (ConfigError, OSError):  # the run itself will say what is wrong
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.2)
