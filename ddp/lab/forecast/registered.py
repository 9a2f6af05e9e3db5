"""Registered predictions: what was forecast for a run before it was made, in the sweep's folder.

    SWEEP/predictions/2026-11-26T08-15-02.481516-64.json      date, settings, and the step that was forecast

A prediction that is younger than its run is refused, because it may have known the result. A run has begun when its
sweep says so, or when the oldest file in its folder was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp.errors import ConfigError
from ddp.lab.forecast.question import Asked, asked_of
from ddp.lab.forecast.work import work_of
from ddp.process.files import make_folder, read_own, write_whole
from ddp.process.records import json_object, made, to_json
from ddp.run.launch.sweep import Job
from ddp.train.monitor.profile import Profile

FOLDER = "predictions"


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A prediction.

    Attributes:
        date: when it was made, in ISO 8601.
        settings: that decide which run it is for, as `settings_of` has them.
        how: the command line that made it.
        step_s: that was forecast; naive_s: the guess that a forecast should beat.
    """

    date: str
    settings: dict[str, Any]
    how: str
    step_s: float
    naive_s: float

    @property
    def day(self) -> str:
        """Returns when it was made, to the second, for people."""
        return f"{datetime.fromisoformat(self.date).astimezone(UTC):%F %T}"


def settings_of(profile: Profile, asked: Asked | None = None, *, threads: int | None = None) -> dict[str, Any]:
    """Returns what decides which run a prediction is for: of the profiled run, or of one that is asked about.

    Args:
        threads: of a rank there.

    Raises:
        ConfigError: forecasts do not know the strategy or the hook of the run.
    """
    asked, work = asked or asked_of(profile), work_of(profile)
    buckets = (work if asked.bucket_mb is None else work.in_buckets(asked.bucket_mb)).buckets
    return {
        "model": profile.model,
        "num_parameters": profile.num_parameters,
        "device": profile.device.partition(":")[0],
        "threads": profile.threads if threads is None else threads,
        **{key: value for key, value in asdict(asked).items() if key != "bucket_mb"},
        "num_buckets": len(buckets),
    }


def register(sweep: Path, prediction: Registered) -> Path:
    """Writes a prediction into the folder of a sweep, which need not exist yet. Returns the file."""
    date = prediction.date.partition("+")[0].replace(":", "-")  # whole, so that no prediction overwrites another
    path = sweep / FOLDER / f"{date}-{prediction.settings['num_ranks']}.json"
    try:
        make_folder(path.parent)
        write_whole(path, to_json(asdict(prediction), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--register={sweep}: {error.strerror}; give another folder") from error
    return path


def read_registered(sweep: Path) -> tuple[list[Registered], list[str]]:
    """Returns the predictions in the folder of a sweep, the oldest first, and a sentence for each that is damaged."""
    found: list[Registered] = []
    notes: list[str] = []
    for path in sorted((sweep / FOLDER).glob("[!.]*.json")):
        try:
            prediction = made(Registered, json_object(read_own(path)))
            if datetime.fromisoformat(prediction.date).tzinfo is None:
                raise ValueError("its date has no time zone")
            if min(prediction.step_s, prediction.naive_s) <= 0:
                raise ValueError("step_s or naive_s is no time")
        except (OSError, ValueError) as error:
            notes.append(f"{FOLDER}/{path.name} is damaged ({error}): register the prediction again, or remove it.")
            continue
        found.append(prediction)
    return sorted(found, key=lambda prediction: datetime.fromisoformat(prediction.date)), notes


def prediction_for(run: Path, settings: Mapping[str, Any], known: Sequence[Registered]) -> Registered | None:
    """Returns the latest prediction that is for these settings and older than the run; None if none is for them.

    Raises:
        ConfigError: all of them are younger than the run.
    """
    mine, began = [each for each in known if each.settings == settings], began_at(run)
    older = [each for each in mine if datetime.fromisoformat(each.date) < began]
    if mine and not older:
        raise ConfigError(
            f"the prediction of {mine[0].day} is younger than the run, which began {began:%F %T}: "
            "register predictions before the run is made"
        )
    return older[-1] if older else None


def began_at(run: Path) -> datetime:
    """Returns when a run began. One that went on has begun before its sweep noted it for the last time."""
    moments = [path.lstat().st_mtime for path in run.iterdir()]
    job = Job.read(run)
    if job is not None and job.began is not None and job.began >= 0:
        moments.append(job.began)
    return datetime.fromtimestamp(min(moments), UTC)
