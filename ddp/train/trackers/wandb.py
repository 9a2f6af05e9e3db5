"""The metrics of a run in Weights & Biases: WANDB_PROJECT, WANDB_MODE and its other variables say where, and whether.

Offline, a run's folder says which steps stand there, unless its process was killed: then those that a resumed run makes
once more are sent once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp.process.files import read_own, write_whole
from ddp.process.records import json_object, to_json
from ddp.train.reports.tracker import Start, Status, Tracker

KINDS = ("step", "evaluation", "report")


class WandB(Tracker):
    """Sends a run to Weights & Biases, beside any other run that the program has there."""

    title, module, skips = "Weights & Biases", "wandb", True

    def begin(self, id: str, start: Start) -> str:
        import wandb

        how = {"id": id, "resume": "allow"} if id else {"group": start.group or None}
        run = wandb.init(dir=start.folder, name=start.name, reinit="create_new", **how)
        run.define_metric("*", step_metric="step")
        self._wandb, self._run = wandb, run
        known: Any = run.summary
        self._note = start.folder / "wandb" / f"sent-{run.id}.json" if run.offline and start.folder else None
        if id and self._note is not None:
            self.skips = self._note.exists()
            known = json_object(read_own(self._note)) if self.skips else {}
            self._note.unlink(missing_ok=True)
        self._last = {kind: known.get(f"last_{kind}", -1) for kind in KINDS}
        return str(run.id)

    def settings(self, values: Mapping[str, str]) -> None:
        self._run.config.update(values)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        if step > self._last[kind]:
            self._run.log({**values, "step": step, f"last_{kind}": step})
            self._last[kind] = step

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
        if self._note is not None and self.skips:
            write_whole(self._note, to_json({f"last_{kind}": step for kind, step in self._last.items()}))
