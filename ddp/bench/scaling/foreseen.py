"""Sets registered predictions of steps beside the steps that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ddp.bench.forecast.registered import Registered, is_for, prediction_for, read_registered
from ddp.bench.scaling.runs import Run
from ddp.errors import ConfigError
from ddp.units import counted


class Foreseen(NamedTuple):
    """A step that was forecast before its run was made, beside the one that was measured."""

    run: Run
    prediction: Registered
    measured_s: float

    @property
    def ratio(self) -> float:
        """Returns forecast ÷ measured."""
        return self.prediction.step_s / self.measured_s


def foreseen(sweep: Path, runs: Iterable[Run]) -> tuple[list[Foreseen], list[str]]:
    """Returns the registered predictions of runs with a profile, and a sentence for each that is not shown."""
    try:
        known = read_registered(sweep)
    except ConfigError as error:
        return [], [f"No registered prediction is shown: {error}."]
    found: list[Foreseen] = []
    notes: list[str] = []
    for run in sorted(runs, key=lambda run: run.workers):
        if run.profile is None:
            continue
        try:
            prediction = prediction_for(run.folder, run.profile, known)
        except ConfigError as error:
            notes.append(f"{run.name} is shown without its prediction: {error}.")
            continue
        if prediction is not None:
            found.append(Foreseen(run, prediction, run.profile.step_s))
    for each in known:
        if not any(run.profile and is_for(each, run.profile) for run in runs):
            ranks = counted(int(each.settings.get("ranks", 0)), "worker")
            notes.append(f"The prediction of {each.date} for {ranks} is for no run here that was profiled.")
    return found, notes
