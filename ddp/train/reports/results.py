"""The results of a run, as summary.json and metrics.jsonl hold them, and the names of metrics; free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp.process.files import lines_of, read_own, write_whole
from ddp.process.records import Maker, json_object, to_json

SIDECAR = "sidecar"  # a folder in that of the run, with a metrics.jsonl of its own
SUMMARY, METRICS = "summary.json", "metrics.jsonl"


_FIGURES = ("samples_per_s", "seconds", "epochs", "steps", "train_loss", "clip_norm", "world_size")
_KINDS: dict[str, Any] = dict.fromkeys(("main_metric", "device", "all_reduce", "precision", "writes"), str)
_KINDS |= {"stopped_by": str | None, "sidecar": dict[str, Any], **dict.fromkeys(_FIGURES, float | None)}
_LINE = {**dict.fromkeys(("kind", "weights", "why", "unreadable"), str), **dict.fromkeys(("step", "order", "num"), int)}


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Returns the content of summary.json; a figure that is not finite is None.

    Raises:
        ConfigError, OSError: it cannot be read.
        ValueError: a value is of another type than `summary_of` makes it.
    """
    found = json_object(read_own(run_dir / SUMMARY))
    for key, value in found.items():
        is_figure = is_metric(key) or key.startswith("yardstick_") or key.endswith("_fraction")
        Maker().made(float | None if is_figure else _KINDS.get(key, Any), value, key)
    return found


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Writes summary.json."""
    write_whole(run_dir / SUMMARY, to_json(summary, indent=2) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a metrics.jsonl, each with its kind, and unless that is "skipped" with its step.

    Lines that are damaged, or that a crash cut off, are left out, and so are figures that are not finite numbers.
    """
    return list(filter(None, map(entry_of, lines_of(path))))


def entry_of(line: str) -> dict[str, Any]:
    """Returns the object in a line, as `read_metrics` does; an empty one of a line that is left out."""
    with suppress(ValueError):
        entry = {key: value for key, value in json_object(line).items() if _fits(key, value)}
        if "kind" in entry and ("step" in entry or entry["kind"] == "skipped"):
            return entry
    return {}


def _fits(key: str, value: Any) -> bool:
    kind: Any = _LINE.get(key, (int, float))
    return isinstance(value, kind) and not isinstance(value, bool) and (kind is str or math.isfinite(value))


def evaluations_in(metrics: Path, summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the evaluations of a run by its metrics.jsonl, or those of its side-car, if it had one."""
    if "sidecar" not in summary:
        return [entry for entry in read_metrics(metrics) if entry["kind"] == "evaluation"]
    lines = read_metrics(metrics.parent / SIDECAR / metrics.name)
    by_step = {entry["step"]: entry for entry in lines if entry["kind"] == "evaluation"}
    return [by_step[step] for step in sorted(by_step)]  # the run may have gone back to an earlier one


def is_metric(key: str) -> bool:
    """Returns True for the name of a metric of held-out samples, or of training samples evaluated with them."""
    return key.startswith(("validation_", "test_", "training_"))


def metric_in_words(key: str, value: float | None) -> str:
    """Returns a metric as text: an accuracy in percent."""
    if value is None:
        return ""
    return f"{value:.2%}" if is_metric(key) and key.endswith("_accuracy") else f"{value:.4f}"


def words_of(key: str) -> str:
    """Returns a metric's name as text for a table."""
    return key.removeprefix("yardstick_").replace("_", " ")
