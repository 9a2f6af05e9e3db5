"""The metrics of a run in Weights & Biases: WANDB_PROJECT, WANDB_MODE and its other variables say where, and whether.

Offline it cannot tell which steps stand there: those that a resumed run makes once more are sent once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ddp.train.tracker import Start, Status, Tracker

KINDS = ("step", "evaluation", "report")


class WandB(Tracker):
    """Sends a run to Weights & Biases, beside any other run that the program has there."""

    title, module = "Weights & Biases", "wandb"

    def begin(self, id: str, start: Start) -> str:
        import wandb

        how = {"id": id, "resume": "allow"} if id else {"group": start.group or None}
        run = wandb.init(dir=start.folder, name=start.name, reinit="create_new", **how)
        run.define_metric("*", step_metric="step")
        self._wandb, self._run = wandb, run
        self._last = {kind: run.summary.get(f"last_{kind}", -1) for kind in KINDS}
        return str(run.id)

    def settings(self, values: Mapping[str, str]) -> None:
        self._run.config.update(values)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if step > self._last[kind]:
            self._run.log({**values, "step": step, f"last_{kind}": step})

    def file(self, path: Path, step: int) -> None:
        if path.is_dir():
            self._run.log_artifact(str(path), name=f"checkpoint-{self._run.id}", type="model")
        else:
            self._run.log({path.stem: self._wandb.Image(str(path)), "step": step})

    def end(self, status: Status, reason: str, step: int) -> None:
        self._run.summary.update({"status": status, "reason": reason})
        if status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)
