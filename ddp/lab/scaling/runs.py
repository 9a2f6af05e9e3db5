"""Reads the runs of a sweep: those that are complete, and a sentence for each other job.

Note "time". Time to a target is that of training steps: evaluations, checkpoints and the start do not count. It is the
samples of each stretch between two logged steps ÷ its samples per second, as metrics.jsonl has them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp.errors import ConfigError
from ddp.process.records import damage_as_error
from ddp.run.launch.sweep import RESULT, Job, ending
from ddp.run.settings.reader import read_settings
from ddp.train.checkpoints.checkpoint import flat
from ddp.train.reports import profile as profiles
from ddp.train.reports.profile import Profile, read_profile
from ddp.train.reports.results import evaluations_in, read_metrics, read_summary
from ddp.train.steps.callbacks import EARLY, MEASURED
from ddp.train.steps.stopping import is_signal

LEFT_BY_RUNS = ("config.yaml", "summary.json", "metrics.jsonl", RESULT)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that is complete.

    Attributes:
        settings: by dotted name, of config.yaml; summary: of summary.json.
        stretches: of each logged step, the samples of the run so far, and samples/s since the one before.
        evaluations: samples so far, and the main metric.
        memory: the most that each rank has used, in bytes; of its device, where it has one. Empty: not measured.
    """

    folder: Path
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    stretches: Sequence[tuple[float, float]] = ()
    evaluations: Sequence[tuple[float, float]] = ()
    memory: Sequence[float] = ()
    profile: Profile | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def workers(self) -> int:
        return int(self.summary["world_size"])

    @property
    def batch(self) -> int:
        """Returns the samples of a step, of all workers."""
        return int(self.summary["global_batch"])

    @property
    def samples_per_s(self) -> float:
        """Returns those of the whole run; of one that was there to be measured, of its profiled steps."""
        measured = self._measured
        return float(self.summary["samples_per_s"]) if measured is None else self.batch / measured.step_s

    @property
    def window_rates(self) -> list[float]:
        """Returns the samples/s in each window of a run that was there to be measured; else those of the whole run."""
        measured = self._measured
        return [self.samples_per_s] if measured is None else [self.batch / each for each in measured.windows_s]

    @property
    def _measured(self) -> Profile | None:
        return self.profile if self.summary.get("stopped_by") == MEASURED else None

    @property
    def metric(self) -> float | None:
        """Returns the main metric at the end; None if there is none, or if training has diverged."""
        found: float | None = self.summary.get(str(self.summary.get("main_metric")))
        return found

    def seconds_at(self, samples: float) -> float:
        """Returns how long the steps took until the run had trained on these samples (note "time")."""
        seconds = before = 0.0
        rate = self.samples_per_s
        for until, rate in self.stretches:
            if until >= samples:
                break
            seconds, before = seconds + (until - before) / rate, until
        return seconds + (samples - before) / rate


def read_runs(sweep: Path, *, takes_one: bool = False) -> tuple[list[Run], list[str]]:
    """Returns the runs in the folder of a sweep, and a sentence for each that cannot be shown.

    Args:
        takes_one: the folder may be that of a run.

    Raises:
        ConfigError: there is no such folder, or no job in it.
    """
    if not sweep.is_dir():
        raise ConfigError(f"{sweep}: there is no such folder; give that of a sweep, such as runs/sweep-…")
    folders = sorted(
        path for path in sweep.glob("[!.]*") if path.is_dir() and any((path / name).exists() for name in LEFT_BY_RUNS)
    )
    is_run = any((sweep / name).exists() for name in LEFT_BY_RUNS)
    if is_run and takes_one:
        folders = [sweep]
    if not folders:
        what = "is a single run" if is_run else "holds no runs"
        raise ConfigError(f"{sweep} {what}: give the folder of a sweep, as train -m cluster.workers=1,2 leaves it")
    runs: list[Run] = []
    notes: list[str] = []
    for folder in folders:
        try:
            runs.append(read_run(folder, notes))
        except ConfigError as error:
            notes.append(f"{folder.name} is left out: {error}.")
    return runs, notes


def read_run(folder: Path, notes: list[str]) -> Run:
    """Returns the records of a run; adds a sentence to the notes for a part that is damaged.

    Raises:
        ConfigError: it is not complete, or damaged; the message says in what way.
    """
    job = Job.read(folder)
    if job is not None and (job.pruned or job.status):
        raise ConfigError(f"its job has ended so: {ending(job)}")
    summary = _summary(folder)
    path = folder / "config.yaml"
    if not path.exists():
        raise ConfigError("it has no config.yaml, so that its settings are unknown")
    try:
        settings = flat(read_settings(path))
    except ConfigError as error:
        raise ConfigError(_short(error, folder)) from error
    stopped = summary.get("stopped_by")
    if settings.get("profile.seconds") is not None and stopped not in (None, EARLY, MEASURED):
        steps = summary.get("steps")
        raise ConfigError(f"it was there to be measured, and was stopped after {steps} steps by {stopped}")
    main = str(summary.get("main_metric"))
    entries = read_metrics(folder / "metrics.jsonl")
    steps = [entry for entry in entries if entry["kind"] == "step"]
    profile = None
    if (folder / profiles.FILE).exists():
        try:
            profile = read_profile(folder)
            if profile.world_size != summary["world_size"]:
                raise ConfigError(f"{profiles.FILE} is of {profile.world_size} workers")
        except ConfigError as error:
            profile = None
            notes.append(f"{folder.name} is shown without its profile: {_short(error, folder)}.")
    return Run(
        folder=folder,
        settings=settings,
        summary=summary,
        stretches=[(samples, rate) for samples, rate in _pairs(steps, "samples_per_s") if rate > 0],
        evaluations=_pairs(evaluations_in(folder / "metrics.jsonl", summary), main),
        memory=_memory(steps),
        profile=profile,
    )


def _summary(folder: Path) -> dict[str, Any]:
    """Returns the summary of a run that is complete.

    Raises:
        ConfigError: it is not, or the summary is damaged.
    """
    if not (folder / "summary.json").exists():
        raise ConfigError("it has no summary.json, because it has failed or is running")
    with damage_as_error("its summary.json", "make the run again"):
        summary = read_summary(folder)
        if min(int(summary["world_size"]), int(summary["global_batch"])) < 1 or not summary["seconds"] >= 0:
            raise ValueError("a number is below 1")
        rate = summary["samples_per_s"] or 0.0
    if is_signal(stopped := str(summary.get("stopped_by"))):
        raise ConfigError(f"it was stopped by {stopped} after {summary.get('steps')} steps; resume it with resume=auto")
    if rate <= 0:
        raise ConfigError("it has trained no step")
    return summary


def _short(error: Exception, folder: Path) -> str:
    """Returns the error's text, without the folder, which the caller names, and without a remedy for one run."""
    return " ".join(str(error).replace(f"{folder}/", "").partition(". The checkpoints")[0].split()).rstrip(".")


def _pairs(entries: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Returns samples and a figure of each entry that has it."""
    return [(entry["samples"], entry[key]) for entry in entries if entry.get("samples") and key in entry]


def _memory(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns by rank the most memory that was seen, in bytes."""
    for name in ("device_memory_mb", "memory_mb"):
        most: dict[int, float] = defaultdict(float)
        for key, value in (item for entry in steps for item in entry.items()):
            kind, _, rank = key.partition("/rank_")
            if kind == name and re.fullmatch(r"\d{1,6}", rank):
                most[int(rank)] = max(most[int(rank)], value * 1e6)
        if most:
            return [most[rank] for rank in sorted(most)]
    return []
