"""A trial of a fit: three steps, one evaluation, one save, as quickly as they go, of which no file is kept.

It finds out in a minute what would else show after hours: a batch that does not fit into memory, an evaluation that
fails, a disk that is full, a state that cannot be saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddp.comm.objects import on_rank_zero
from ddp.errors import ConfigError
from ddp.process.scratch import scratch_folder
from ddp.strategies.choice import ranks_of
from ddp.train.state import TrainState

NUM_STEPS = 3
_NAME = ".ddp-trial-"  # begins the name of a trial's folder, and of nobody else's, because it is removed


def tried(fit: Callable[..., TrainState], given: Mapping[str, Any]) -> TrainState:
    """Returns the state after a trial of `fit` with the arguments given. Model and optimizer have made its steps.

    Its files lie beside the run's folder, on the same disk, until it is over.
    """
    comm = given["comm"] or ranks_of(given["model"])
    folder, until_end = None, contextlib.ExitStack()
    if given["checkpoint_dir"] is not None:
        run_dir = Path(given["checkpoint_dir"])
        folder = on_rank_zero(comm, lambda: _folder_beside(run_dir, until_end), label="making a folder")
    num_steps = min(NUM_STEPS, given["max_steps"] or NUM_STEPS)
    changed = {
        "max_steps": num_steps,
        "evaluate_every_epochs": None,
        "evaluate_every_steps": num_steps,
        "checkpoint_every_steps": NUM_STEPS,
        "checkpoint_dir": folder,
        "trial": False,
    }
    with until_end:
        state = fit(**{**given, **changed, "comm": comm})
    if given["progress"] and comm.rank == 0:
        more = {"an evaluation": bool(state.evaluation), "a save": folder is not None}
        done = ", ".join([f"{state.step} steps", *(what for what, was_made in more.items() if was_made)])
        print(f"the trial went well: {done}; no file of it is kept", flush=True)
    return state


def _folder_beside(run_dir: Path, until_end: contextlib.ExitStack) -> Path:
    """Returns a new folder, which is removed at the end. On rank 0 only."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        return until_end.enter_context(scratch_folder(run_dir.parent, _NAME))
    except OSError as error:
        raise ConfigError(f"checkpoint_dir={run_dir}: {error.strerror}; take another folder") from error
