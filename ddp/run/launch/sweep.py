"""A sweep: the folder of each of its jobs, and its results side by side, the best first.

    runs/sweep-DATE/cluster.workers=2,optim.lr=0.1/     a job; it is named by what the sweep varies
                    sweep.csv, sweep.json               all jobs so far, written anew after each of them

The main metric and its direction come from the jobs' summary.json. Where there is none, speed decides.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ddp.process.arguments import shown
from ddp.process.files import json_object, write_whole

MOST_LETTERS = 120
"""A longer name of a folder is cut; file systems take 255 bytes for a name, and some of them less."""


@dataclass(frozen=True)
class Job:
    """One run of a sweep, and its exit status."""

    overrides: Sequence[str]
    run_dir: Path
    status: int

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
                return json_object((self.run_dir / "summary.json").read_text())
        return {}

    def number(self, key: str) -> float | None:
        """Returns a figure of the summary; None if it is missing or not a number, as after training has diverged."""
        value = self.summary.get(key)
        return value if isinstance(value, (int, float)) and not math.isnan(value) else None


class Results(NamedTuple):
    """A sweep's jobs, the best first; the keys that it varies; and the metric that orders it, "" if there is none."""

    jobs: Sequence[Job]
    varied: Sequence[str]
    main_metric: str


def job_folder(overrides: Sequence[str], varied: Collection[str], *, number: int) -> str:
    """Returns the name of a job's folder: what the sweep varies, and the job's number where that alone is no name."""
    settings = Job(overrides, Path(), 0).settings
    wanted = ",".join(f"{key}={settings[key]}" for key in settings if key in varied)
    name = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", wanted)[:MOST_LETTERS]
    return name if name and name == wanted else f"{name},job={number}".lstrip(",")


def gather(jobs: Sequence[Job], varied: Collection[str]) -> Results:
    """Reads what the jobs have left, and orders it. `varied`: the keys that the command line gives several values."""
    judged = next((job.summary for job in jobs if "main_metric" in job.summary), {})
    main_metric, sign = judged.get("main_metric", ""), 1 if judged.get("higher_is_better") else -1

    def place(job: Job) -> tuple[bool, float, float]:
        metric, rate = job.number(main_metric), job.number("samples_per_s")
        return job.status != 0, math.inf if metric is None else -sign * metric, -(rate or 0.0)

    keys = dict.fromkeys(key for job in jobs for key in job.settings)
    differ = [key for key in keys if key in varied or len({job.settings.get(key) for job in jobs}) > 1]
    return Results(sorted(jobs, key=place), differ, main_metric)


def write(results: Results, folder: Path) -> None:
    """Writes sweep.csv, with a column for each setting that varies, and sweep.json, with all settings and summaries."""
    from ddp.train.report import is_metric

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
    write_whole(folder / "sweep.json", json.dumps(found, indent=2) + "\n")


def show(results: Results, folder: Path) -> None:
    """Prints the jobs side by side: what varied, how good, how fast, how it ended. No value that varied is cut off."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ddp.train.report import metric_in_words, words_of

    table = Table()
    table.add_column("", style="bold")
    for key in results.varied:
        table.add_column(Text(key), overflow="fold")
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
            *(Text(job.settings.get(key, "")) for key in results.varied),
            *([metric_in_words(results.main_metric, metric)] if results.main_metric else []),
            "" if rate is None else f"{rate:,.0f}",
            _ended(job.status),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=1000)  # a file or a pipe has no edge
    console.print(f"sweep in {shown(folder)}/  (sweep.csv, sweep.json)", soft_wrap=True, highlight=False, markup=False)
    console.print(table)


def _ended(status: int) -> str:
    """Returns the meaning of an exit status; `command_line.py` has the table."""
    if status > 128:
        return f"stopped by {signal.Signals(status - 128).name} (status {status})"
    return {0: "done", 2: "refused (status 2)"}.get(status, f"failed (status {status})")
