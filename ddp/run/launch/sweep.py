"""A sweep: the folder of each of its jobs, and its results side by side, the best first.

    runs/sweep-DATE/cluster.workers=2,optim.lr=0.1/     a job; it is named by what the sweep varies
                        job.json                        its settings, when it began and ended, with which status and
                                                        objective (the main metric)
                    sweep.csv, sweep.json               all jobs so far, written anew after each of them

Nothing is remembered but what stands in the folder. So a resumed sweep, another launcher of Hydra's, another
sweeper and a search lead to the same table. The main metric and its direction come from the jobs' summary.json. Where
there is none, speed decides.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ddp.errors import ConfigError
from ddp.process.arguments import relative_path
from ddp.process.files import make_folder, read_own, write_whole
from ddp.process.records import json_object, made, to_json
from ddp.process.terminal import console
from ddp.train.reports.results import is_metric, metric_in_words, read_summary, words_of

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
        """Notes that the job begins now; returns it so."""
        make_folder(self.run_dir)
        return self._written(began=time.time())

    def done(self, status: int, *, pruned: bool = False) -> Job:
        """Notes that the job has ended now; returns it so."""
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
    """Reads what the jobs of a sweep have left so far, and orders it."""
    jobs = jobs_in(folder)
    judged = next((job.summary for job in jobs if "main_metric" in job.summary), {})
    main_metric, sign = judged.get("main_metric", ""), 1 if judged.get("higher_is_better") else -1

    def place(job: Job) -> tuple[bool, float, float]:
        metric, rate = job.number(main_metric), job.number("samples_per_s")
        return job.status != 0, math.inf if metric is None else -sign * metric, -(rate or 0.0)

    keys = dict.fromkeys(key for job in jobs for key in job.settings)
    varied = [key for key in keys if len(jobs) == 1 or len({job.settings.get(key) for job in jobs}) > 1]
    return Results(sorted(jobs, key=place), varied, main_metric)


def conclude(folder: Path) -> int:
    """Writes and prints the table. Returns the status of the sweep: that of the first job that is not done."""
    results = gather(folder)
    write(results, folder)
    show(results, folder)
    statuses = (1 if job.status is None else job.status for job in results.jobs)
    return next((status for status in statuses if status), 0)


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
