"""Registered predictions: what was forecast for a run before it was made, in the sweep's folder.

    SWEEP/predictions/2026-11-26T08-15-02-64.json      date, settings, and the step that was forecast

A prediction that is younger than its run is refused, because it may have known the result.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp.errors import ConfigError
from ddp.process.files import json_object, make_folder, read_own, write_whole
from ddp.train.monitor.profile import Profile

FOLDER = "predictions"


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A prediction.

    Attributes:
        date: when it was made, in ISO 8601.
        settings: that decide which run it is for, as `settings_of` has them.
        how: the command line that made it.
        step_s, samples_per_s: what was forecast.
    """

    date: str
    settings: dict[str, Any]
    how: str
    step_s: float
    samples_per_s: float

    def check_is_older(self, began: datetime, run: Path) -> None:
        """Raises ConfigError unless the prediction was made before its run began."""
        if datetime.fromisoformat(self.date) >= began:
            raise ConfigError(
                f"the prediction of {self.date} is younger than its run {run}, which began {began.isoformat()}: "
                "register predictions before the run is made"
            )


def settings_of(profile: Profile) -> dict[str, Any]:
    """Returns the settings of a run that a prediction names."""
    return {
        "model": profile.model,
        "num_parameters": profile.num_parameters,
        "ranks": profile.world_size,
        "per_host": max(map(len, profile.hosts)),
        "batch": profile.batch,
        "strategy": profile.strategy,
        "hook": profile.hook,
        "wire": profile.wire,
    }


def register(sweep: Path, prediction: Registered) -> Path:
    """Writes a prediction into the folder of a sweep, which need not exist yet. Returns the file."""
    date = prediction.date.partition(".")[0].partition("+")[0].replace(":", "-")
    path = sweep / FOLDER / f"{date}-{prediction.settings['ranks']}.json"
    try:
        make_folder(path.parent)
        write_whole(path, json.dumps(asdict(prediction), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--register={sweep}: {error.strerror}; give another folder") from error
    return path


def read_registered(sweep: Path) -> list[Registered]:
    """Returns the predictions in the folder of a sweep, the oldest first.

    Raises:
        ConfigError: one is damaged.
    """
    found = []
    for path in sorted((sweep / FOLDER).glob("*.json")):
        try:
            plain = json_object(read_own(path))
            prediction = Registered(**{item.name: plain[item.name] for item in fields(Registered)})
            if datetime.fromisoformat(prediction.date).tzinfo is None or not float(prediction.step_s) > 0:
                raise ValueError("date or step_s cannot be")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is damaged ({error}): register the prediction again, or remove it") from error
        found.append(prediction)
    return sorted(found, key=lambda prediction: prediction.date)


def prediction_for(run: Path, profile: Profile, known: list[Registered]) -> Registered | None:
    """Returns the latest prediction for the settings of a run; None if there is none.

    Raises:
        ConfigError: it is younger than the run.
    """
    mine = [each for each in known if is_for(each, profile)]
    if not mine:
        return None
    mine[-1].check_is_older(began_at(run), run)
    return mine[-1]


def is_for(prediction: Registered, profile: Profile) -> bool:
    """Returns True if a prediction was made for these settings."""
    wanted = settings_of(profile)
    return {key: prediction.settings.get(key) for key in wanted} == wanted


def began_at(run: Path) -> datetime:
    """Returns when a run began: as its sweep noted it, else when its settings were written."""
    try:
        seconds = float(json_object(read_own(run / "job.json"))["began"])
    except (OSError, ValueError, KeyError, TypeError):
        written = [path for path in (run / "config.yaml", run / "starts.jsonl", run / "profile.json") if path.exists()]
        seconds = written[0].stat().st_mtime if written else 0.0
    return datetime.fromtimestamp(seconds, UTC)
