"""Stands for TensorBoard, and for torch's writer of its files, with that one's parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class SummaryWriter:
    def __init__(
        self, log_dir: Any = None, comment: Any = "", purge_step: Any = None, max_queue: Any = 10,
        flush_secs: Any = 120, filename_suffix: Any = "",
    ) -> None:  # fmt: skip
        self._path = Path(log_dir, "events.jsonl")
        self._unwritten = list[dict[str, Any]]()
        self._add({"purge": purge_step})

    def _add(self, event: dict[str, Any]) -> None:
        self._unwritten.append(event)

    def add_scalar(
        self, tag: Any, scalar_value: Any, global_step: Any = None, walltime: Any = None, new_style: Any = False,
        double_precision: Any = False,
    ) -> None:  # fmt: skip
        self._add({"tag": tag, "value": scalar_value, "step": global_step})

    def add_text(self, tag: Any, text_string: Any, global_step: Any = None, walltime: Any = None) -> None:
        self._add({"tag": tag, "value": text_string, "step": global_step})

    def add_image(
        self, tag: Any, img_tensor: Any, global_step: Any = None, walltime: Any = None, dataformats: Any = "CHW"
    ) -> None:
        assert dataformats == "HWC" and img_tensor.shape[2] in (3, 4) and img_tensor.shape[1] > img_tensor.shape[0]
        self._add({"tag": tag, "value": "picture", "step": global_step})

    def flush(self) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(event) + "\n" for event in self._unwritten)
        self._unwritten.clear()

    def close(self) -> None:
        self._add({"closed": True})
        self.flush()
