"""The metrics of a run in MLflow: where MLFLOW_TRACKING_URI says, or mlflow.db in the current folder (`mlflow ui`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp.train.reports.tracker import Start, Status, Tracker

STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """Sends a run to MLflow, into the experiment of MLFLOW_EXPERIMENT_NAME or `mlflow.set_experiment`."""

    title, module, skips = "MLflow", "mlflow", True

    def begin(self, id: str, start: Start) -> str:
        import mlflow

        group = {"group": start.group} if start.group else None
        run = mlflow.start_run(id or None, run_name=start.name, tags=group)  # the active one of this thread alone
        self._mlflow, client = mlflow, mlflow.MlflowClient()
        history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        self._last = {name: max(each.step for each in found) for name, found in history.items()}
        return str(run.info.run_id)

    def settings(self, values: Mapping[str, str]) -> None:
        self._mlflow.log_params(_named(values))

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        new = {name: value for name, value in _named(values).items() if step > self._last.get(name, -1)}
        if new:
            self._mlflow.log_metrics(new, step)

    def file(self, path: Path, step: int) -> None:
        if path.is_dir():
            self._mlflow.log_artifacts(str(path), f"checkpoints/{path.name}")
        else:
            self._mlflow.log_artifact(str(path))

    def end(self, status: Status, reason: str, step: int) -> None:
        self._mlflow.set_tag("reason", reason)
        self._mlflow.end_run(STATUS[status])


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values under names that MLflow takes: of others it would refuse all that is sent with them."""
    return {re.sub(r"[^\w/.\- :]", "_", name)[:250]: value for name, value in values.items()}
