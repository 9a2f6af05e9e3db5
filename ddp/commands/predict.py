"""Predicts with a finished run: writes what its model makes of each sample, a row each, in order.

    python -m ddp predict runs/mine --out scores.csv       of the samples that were held out from it
    … data.test_path=other.csv cluster.workers=4           with settings other than those of the run

Rank 0 writes the file, whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddp.commands.command import respond
from ddp.commands.finished import at_all_ranks, checked, parsed
from ddp.errors import ConfigError
from ddp.process.files import whole_file
from ddp.train.evaluation.evaluate import predict
from ddp.train.tasks.task import Task
from ddp.units import counted

ENDINGS = (".csv", ".npy")


def main(words: Sequence[str]) -> int:
    """Writes what the run that the words name makes of each sample."""
    parser, options = parsed("predict", words, writes=True)
    return respond(parser, options, lambda options: predict_run(options.run, options.settings, options.out))


def predict_run(run: str, words: Sequence[str], out: Path) -> str:
    """Writes what a run's model makes of each sample, and returns as text what was written.

    Args:
        run, words: as in `evaluate_run`.
        out: NAME.csv, with a column for each number of an output; or NAME.npy, [samples, ...].

    Raises:
        ConfigError, CheckpointError: as `evaluate_run`; or `out` cannot be written.
        WorkersFailed: a worker raised or died; `out` is what it was.
    """
    _check_writable(out)
    config, trained, _ = checked(run, words, is_evaluation=False)
    shape: Sequence[int] = at_all_ranks(config, trained, partial(_predict, out.absolute()))
    form = " × ".join(map(str, shape[1:])) or "1"
    return f"{out}: {counted(shape[0], 'row')}, each with {form} of {trained}"


def _check_writable(out: Path) -> None:
    if out.suffix not in ENDINGS:
        raise ConfigError(f"--out {out}: its name must end with {' or '.join(ENDINGS)}")
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise ConfigError(f"--out {out}: {'is a folder' if out.is_dir() else f'there is no folder {folder}'}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: {folder} cannot be written; take another folder")


def _predict(out: Path, model: Any, samples: Any, task: Task, **reading: Any) -> list[int]:
    outputs = predict(model, samples, task=task, **reading)
    if not isinstance(outputs, torch.Tensor):
        what = "several tensors" if isinstance(outputs, (tuple, dict)) else "tensors of several shapes"
        raise ConfigError(f"the outputs are {what}, and a file has one table: write those of ddp.predict yourself")
    if reading["comm"].rank == 0:
        plain = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
        write_out(out, plain.cpu().numpy())
    return list(outputs.shape)


def write_out(out: Path, rows: NDArray[Any]) -> None:
    """Writes rows to a file, whole or not at all.

    Raises:
        ConfigError: the disk refuses, as a full one does.
    """
    try:
        with whole_file(out) as file:
            write_rows(file, rows, is_csv=out.suffix == ".csv")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}; make room there, or take another folder") from error


def write_rows(file: IO[bytes], rows: NDArray[Any], *, is_csv: bool) -> None:
    """Writes rows [n, ...] as they are, or as CSV, with the fewest digits that are read back as the same numbers."""
    if not is_csv:
        np.save(file, rows)
        return
    flat = rows.reshape(len(rows), -1)
    names = [f"output_{column}" for column in range(flat.shape[1])] if rows.ndim > 1 else ["output"]
    file.write(f"{','.join(names)}\n".encode())
    for row in flat:
        file.write(f"{','.join(map(str, row))}\n".encode())
