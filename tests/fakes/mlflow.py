"""Stands for MLflow: the functions that `ddp.trackers.MLflow` calls, with MLflow's parameters; runs are JSON files.

The folder of the runs is that of the environment variable FAKE_TRACKERS. Importing this draws random numbers, as
importing a large library may.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ddp.process.files import write_whole

DRAWN = random.random(), np.random.rand(), torch.rand(1)
_active = threading.local()


def _path(run_id: str) -> Path:
    return Path(os.environ["FAKE_TRACKERS"], f"mlflow-{run_id}.json")


def _changed(change: Any) -> None:
    """Changes the active run's file."""
    path = _path(_active.run_id)
    run = json.loads(path.read_text())
    change(run)
    write_whole(path, json.dumps(run))  # which a kill leaves whole


def start_run(
    run_id: Any = None, experiment_id: Any = None, run_name: Any = None, nested: Any = False, parent_run_id: Any = None,
    tags: Any = None, description: Any = None, log_system_metrics: Any = None,
) -> Any:  # fmt: skip
    fails("start_run")
    if run_id is None:
        run_id = f"{random.getrandbits(64):x}"
        new = {"name": run_name, "tags": tags or {}, "params": {}, "metrics": {}, "artifacts": {}}
        write_whole(_path(run_id), json.dumps(new))
    _active.run_id = run_id
    _changed(lambda run: run.update(status="RUNNING"))
    metrics = json.loads(_path(run_id).read_text())["metrics"]
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id), data=SimpleNamespace(metrics=metrics))


def log_params(params: Any, synchronous: Any = None, run_id: Any = None) -> None:
    _check_names(params)

    def change(run: Any) -> None:
        assert not run["params"], "MLflow refuses to change them"
        run["params"] = dict(params)

    _changed(change)


def log_metrics(
    metrics: Any, step: Any = None, synchronous: Any = None, run_id: Any = None, timestamp: Any = None,
    model_id: Any = None, dataset: Any = None,
) -> None:  # fmt: skip
    fails(f"step {step}")
    _check_names(metrics)
    _changed(lambda run: [run["metrics"].setdefault(name, []).append([step, value]) for name, value in metrics.items()])


def _check_names(values: Any) -> None:
    assert all(re.fullmatch(r"[\w/.\- :]{1,250}", name) for name in values), f"MLflow refuses {list(values)}"


def log_artifact(local_path: Any, artifact_path: Any = None, run_id: Any = None) -> None:
    assert Path(local_path).is_file()
    _changed(lambda run: run["artifacts"].update({Path(local_path).name: Path(local_path).stat().st_size}))


def log_artifacts(local_dir: Any, artifact_path: Any = None, run_id: Any = None) -> None:
    names = sorted(each.name for each in Path(local_dir).iterdir())
    _changed(lambda run: run["artifacts"].update({artifact_path: names}))


def set_tag(key: Any, value: Any, synchronous: Any = None) -> None:
    _changed(lambda run: run["tags"].update({key: value}))


def end_run(status: Any = "FINISHED") -> None:
    assert status in ("FINISHED", "FAILED", "KILLED")
    if hasattr(_active, "run_id"):
        _changed(lambda run: run.update(status=status))
        del _active.run_id


class MlflowClient:
    def __init__(self, tracking_uri: Any = None, registry_uri: Any = None) -> None:
        pass

    def get_metric_history(self, run_id: Any, key: Any) -> Any:
        history = json.loads(_path(run_id).read_text())["metrics"][key]
        return [SimpleNamespace(step=step, value=value) for step, value in history]


def fails(where: str) -> None:
    """Fails, or does not answer, where the environment variable FAKE_FAILURE says so."""
    how, _, at = os.environ.get("FAKE_FAILURE", "").partition(" at ")
    if at == where and how == "fails":
        raise ConnectionError("the server is down")
    if at == where and how == "hangs":
        time.sleep(3600)
