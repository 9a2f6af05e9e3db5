"""Sets registered predictions of steps beside the steps that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ddp.errors import ConfigError
from ddp.lab.forecast.registered import Registered, prediction_for, read_registered, settings_of
from ddp.lab.scaling.runs import Run
from ddp.train.monitor.profile import Profile


class Foreseen(NamedTuple):
    """A step that was forecast before its run was made, beside the one that was measured.

    Attributes:
        deviation: of repeats, as `deviations` has it.
    """

    run: Run
    prediction: Registered
    measured_s: float
    deviation: float | None

    @property
    def ratio(self) -> float:
        """Returns forecast ÷ measured."""
        return self.prediction.step_s / self.measured_s

    @property
    def naive_ratio(self) -> float:
        """Returns the naive guess ÷ measured."""
        return self.prediction.naive_s / self.measured_s


def foreseen(sweep: Path, runs: Iterable[Run]) -> tuple[list[Foreseen], list[str]]:
    """Returns the registered predictions of runs with a profile, and a sentence for each that is not shown."""
    known, notes = read_registered(sweep)
    if not known:
        return [], notes
    profiled = [(run, run.profile) for run in sorted(runs, key=lambda run: run.workers) if run.profile is not None]
    told, deviation = [(run, profile, _settings(profile)) for run, profile in profiled], deviations(profiled)
    found: list[Foreseen] = []
    for run, profile, settings in told:
        try:
            prediction = prediction_for(run.folder, settings, known)
        except ConfigError as error:
            notes.append(f"{run.name} is shown without its prediction: {error}.")
            continue
        if prediction is not None:
            found.append(Foreseen(run, prediction, profile.step_s, deviation[run.name]))
    for each in known:
        if not any(settings == each.settings for _, _, settings in told):
            notes.append(f"The prediction of {each.day} {_for_whom(each.settings, [last for *_, last in told])}.")
    return found, notes


def deviations(runs: Iterable[tuple[Run, Profile]]) -> dict[str, float | None]:
    """Returns by name how far the step of a run with the same settings is from their median at most; None for one."""
    steps_s: dict[str, list[float]] = {}
    told = [(run.name, str(_settings(profile) or run.name), profile.step_s) for run, profile in runs]
    for _, settings, step_s in told:
        steps_s.setdefault(settings, []).append(step_s)
    of_all = {key: max(abs(each / median(found) - 1) for each in found) for key, found in steps_s.items()}
    return {name: of_all[settings] if len(steps_s[settings]) > 1 else None for name, settings, _ in told}


def _settings(profile: Profile) -> dict[str, Any]:
    """Returns the settings that a prediction would have; none if forecasts do not know the run's strategy or hook."""
    try:
        return settings_of(profile)
    except ConfigError:
        return {}


def _for_whom(settings: Mapping[str, Any], of_runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns what sets a prediction apart from the run here that is most like it."""
    others = [{key: value for key, value in settings.items() if run.get(key) != value} for run in of_runs if run]
    if not others:
        return "is for no run here: none was profiled"
    apart = ", ".join(f"{key}={value}" for key, value in min(others, key=len).items())
    return f"is for no run here that was profiled: none had {apart:.200}"
