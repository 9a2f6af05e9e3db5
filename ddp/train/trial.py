"""A trial of a fit: three steps, one evaluation, one save, as quickly as they go, of which no file is kept.

It finds out in a minute what would else show after hours: a batch that does not fit into memory, an evaluation that
fails, a disk that is full, a state that cannot be saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ddp.comm.communicator import Communicator
from ddp.comm.objects import on_rank_zero
from ddp.errors import ConfigError
from ddp.process.files import scratch_folder
from ddp.process.terminal import say
from ddp.train.arguments import FitArguments
from ddp.train.reports.profiler import Profiler
from ddp.train.reports.trackers import Tracker
from ddp.train.steps.state import TrainState

NUM_STEPS = 3
_NAME = ".ddp-trial-"  # begins the name of a trial's folder, and of no other, because it is removed


def tried(
    train: Callable[[FitArguments, Communicator], TrainState], given: FitArguments, comm: Communicator
) -> TrainState:
    """Returns the state after a trial of what is given. Model and optimizer have made its steps.

    Its files lie beside the run's folder, on the same disk, until it is over.
    """
    keeps, folder, until_end = given.folder, None, contextlib.ExitStack()
    if keeps.path is not None:
        run_dir = Path(keeps.path)
        folder = on_rank_zero(comm, lambda: _folder_beside(run_dir, until_end), label="making a folder")
    num_steps = min(NUM_STEPS, given.max_steps or NUM_STEPS)
    short = replace(
        given,
        max_steps=num_steps,
        evaluation=replace(given.evaluation, every_epochs=None, every_steps=num_steps),
        folder=replace(keeps, path=folder, every_steps=NUM_STEPS, trial=False),
        callbacks=[each for each in given.callbacks if not isinstance(each, (Tracker, Profiler))],
    )
    with until_end:
        state = train(short, comm)
    if keeps.progress and comm.rank == 0:
        more = {"an evaluation": bool(state.evaluation), "a save": folder is not None}
        done = ", ".join([f"{state.step} steps", *(what for what, was_made in more.items() if was_made)])
        say(f"the trial went well: {done}; no file of it is kept")
    return state


def _folder_beside(run_dir: Path, until_end: contextlib.ExitStack) -> Path:
    """Returns a new folder, which is removed at the end. On rank 0 only."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        return until_end.enter_context(scratch_folder(run_dir.parent, _NAME))
    except OSError as error:
        raise ConfigError(f"folder={run_dir}: {error.strerror}; take another folder") from error
