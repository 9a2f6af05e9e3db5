"""Stands for Weights & Biases: what `ddp.trackers.WandB` calls, with its parameters; runs are JSON files.

The folder of the runs is that of the environment variable FAKE_TRACKERS.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from ddp.process.files import write_whole

DRAWN = random.random()


def init(
    entity: Any = None, project: Any = None, dir: Any = None, id: Any = None, name: Any = None, notes: Any = None,
    tags: Any = None, config: Any = None, group: Any = None, mode: Any = None, reinit: Any = None, resume: Any = None,
    settings: Any = None,
) -> Run:  # fmt: skip
    return Run({"id": id, "dir": dir, "name": name, "group": group, "resume": resume, "mode": mode, "config": config})


class Image:
    def __init__(self, data_or_path: Any) -> None:
        self.path = Path(data_or_path)


class Summary(dict[str, Any]):
    pass


class Config(dict[str, Any]):
    def update(self, d: Any, allow_val_change: Any = None) -> None:  # type: ignore[override]
        super().update(d)


class Run:
    def __init__(self, given: dict[str, Any]) -> None:
        self.id = given.get("id") or f"{random.getrandbits(40):x}"
        self._path = Path(os.environ["FAKE_TRACKERS"], f"wandb-{self.id}.json")
        self._kept: dict[str, Any] = {"history": [], "artifacts": [], "metrics": [], "summary": {}, "config": {}}
        if given.get("resume") == "allow" and self._path.exists():
            self._kept = json.loads(self._path.read_text())
        self._kept |= {"state": "running", "name": given["name"]}
        self._kept["config"] |= given["config"] or {}
        self.offline = given["mode"] == "offline" or os.environ.get("WANDB_MODE") == "offline"
        self._is_disabled = given["mode"] == "disabled"
        if given.get("group"):
            self._kept["group"] = given["group"]
        if self.offline:
            Path(given["dir"], "wandb").mkdir(exist_ok=True)
        self.summary, self.config = Summary({} if self.offline else self._kept["summary"]), Config(self._kept["config"])
        self._save()

    def _save(self) -> None:
        if self._is_disabled:
            return
        self._kept |= {"summary": self._kept["summary"] | self.summary, "config": self.config}
        write_whole(self._path, json.dumps(self._kept))

    def define_metric(self, name: Any, step_metric: Any = None) -> None:
        self._kept["metrics"] += [[name, step_metric]]

    def log(self, data: Any, step: Any = None, commit: Any = None) -> None:
        row = {name: value.path.name if isinstance(value, Image) else value for name, value in data.items()}
        self._kept["history"].append(row)
        self.summary.update(row)
        self._save()

    def log_artifact(
        self, artifact_or_path: Any, name: Any = None, type: Any = None, aliases: Any = None, tags: Any = None
    ) -> None:
        self._kept["artifacts"].append([name, type, Path(artifact_or_path).name])

    def mark_preempting(self) -> None:
        self._kept["state"] = "preempting"

    def finish(self, exit_code: Any = None) -> None:
        ends = {"running": "failed", "preempting": "preempted"}
        self._kept["state"] = ends[self._kept["state"]] if exit_code else "finished"
        self._save()
