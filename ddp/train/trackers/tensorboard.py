"""The metrics of a run in TensorBoard: `tensorboard --logdir runs` shows all runs below runs/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ddp.train.reports.tracker import Start, Status, Tracker


class TensorBoard(Tracker):
    """Writes event files into the run's folder. What a resumed run makes once more, TensorBoard shows once."""

    title, module, needs_folder = "TensorBoard", "tensorboard", True

    def begin(self, id: str, start: Start) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(start.folder), purge_step=start.step + 1)
        return str(start.folder)

    def settings(self, values: Mapping[str, str]) -> None:
        rows = [f"| {name} | {value} |" for name, value in values.items()]
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), 0)

    def metrics(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a kill would lose what came before the checkpoint, too

    def file(self, path: Path, step: int) -> None:
        from PIL import Image  # which torch's writer needs for a picture, too

        if path.is_dir():
            self._writer.add_text("checkpoint", str(path), step)
        else:
            self._writer.add_image("curves", np.asarray(Image.open(path)), step, dataformats="HWC")

    def end(self, status: Status, reason: str, step: int) -> None:
        self._writer.add_text("status", f"{status}: {reason}" if reason else status, step)
        self._writer.close()
