"""The names of metrics as summary.json and metrics.jsonl have them, and as they are shown; free of torch."""

from __future__ import annotations


def is_metric(key: str) -> bool:
    """Returns True for the name of a metric of held-out samples."""
    return key.startswith(("validation_", "test_"))


def metric_in_words(key: str, value: float | None) -> str:
    """Returns a metric as it is shown: an accuracy in percent."""
    if value is None:
        return ""
    return f"{value:.2%}" if key in ("test_accuracy", "validation_accuracy") else f"{value:.4f}"


def words_of(key: str) -> str:
    """Returns a metric's name as it is shown."""
    return key.removeprefix("yardstick_").replace("_", " ")
