"""What a run leaves can be read by every program, also if figures of it are no finite numbers.

Tests: ddp/process/records.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

import ddp
from ddp.process.records import from_json, to_json
from ddp.run.launch.sweep import Job, report_jobs
from ddp.train.reports.history import note_start
from ddp.train.reports.results import read_metrics, read_summary


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_json_file_of_a_run_whose_metric_is_not_finite_is_json(tmp_path: Path) -> None:
    """The loss of the held-out samples is NaN, and one of the optimizer's settings is infinite."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "bound": math.inf}], lr=0.1)
    data, bad = (torch.ones(8, 2), torch.ones(8, 1)), (torch.full((2, 2), math.nan), torch.ones(2, 1))
    keeps = ddp.Folder(tmp_path / "a", progress=False, curves=True, log_every=1, every_steps=1)
    how: dict[str, Any] = {"loss": torch.nn.functional.mse_loss, "global_batch": 8, "test_data": bad}
    how |= {"callbacks": [ddp.Profiler(1)], "same_bits": ddp.SameBits(on=True, hash_every=1)}
    ddp.fit(model, data, optimizer, max_steps=8, folder=keeps, **how)
    note_start(tmp_path / "a", {"folder": math.nan}, goes_on=True)
    job = Job(["model=a"], tmp_path / "a").begun().done(0)
    report_jobs(tmp_path)
    assert job.objective is None
    files = [path for path in tmp_path.rglob("*.json*") if path.is_file()]
    names = {"summary.json", "metrics.jsonl", "starts.jsonl", "manifest.json", "job.json", "sweep.json", "profile.json"}
    assert names <= {path.name for path in files}
    for path in files:
        text = path.read_text()
        for each in text.splitlines() if path.suffix == ".jsonl" else [text]:
            strict(each)
    assert read_summary(tmp_path / "a")["test_loss"] is None
    assert all("test_loss" not in each for each in read_metrics(tmp_path / "a" / "metrics.jsonl"))
    assert ddp.load(tmp_path / "a").step == 8


def test_numbers_are_written_as_they_are_and_what_is_none_as_null() -> None:
    value = {"a": [1.5, math.nan, (math.inf, 2)], "b": {"c": -math.inf}, "d": "NaN", "e": 10**30}
    assert strict(to_json(value)) == {"a": [1.5, None, [None, 2]], "b": {"c": None}, "d": "NaN", "e": 10**30}
    assert from_json('[NaN, Infinity, 1.5, "NaN"]') == [None, None, 1.5, "NaN"], "as older files have them"
    assert math.isnan(from_json("NaN", keeps_nan=True))
