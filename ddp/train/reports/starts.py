"""Notes what happens to a run: each start, each step that was left out, and the last calls of a rank that fails.

Starts are noted so that it can be said years later which sample was in which step (`commands/where.py`).

    starts.jsonl, a line for each start
        folder, settings     where it was started, and how, as `ddp/run/settings/config.py` has it
        position             step and sampler's state that it went on from; null for a new run
        dealt                what a sampler asks of samples that only the program has
        order                identity of the order that these must give; null: they give it by themselves

A step that the guard has left out has its own line, behind that of its start, and so has one after which the run
has gone back:

        left_out, went_back  step, epoch, position at which it begins, size, and why; and the step and the sampler's
                             state to which the run has gone back

The command line writes it, and so does `ddp.fit`, of what it knows. An order or a sharding that is an object of the
program cannot be written. Then the noted identity of the order is another one than `where` finds, which says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ddp.comm.communicator import Communicator
from ddp.data.loading.source import Source
from ddp.data.orders.order import Fixed, Permutation
from ddp.data.orders.steps import Batches
from ddp.data.sets.validation import selection_in
from ddp.errors import USER_ERRORS
from ddp.policies import Training
from ddp.process.files import if_possible, lines_of, make_folder, write_whole
from ddp.process.records import to_json
from ddp.train.steps.state import TrainState

STARTS = "starts.jsonl"


def note_start(run_dir: Path, start: Mapping[str, Any], *, goes_on: bool) -> None:
    """Writes a line, after those of the resumed run."""
    path = run_dir / STARTS
    noted = "".join(f"{line}\n" for line in (lines_of(path) if goes_on else ()))
    write_whole(path, f"{noted}{to_json(start, default=int)}\n")  # of NumPy's


def note_incident(run_dir: Path, incident: Mapping[str, Any]) -> None:
    """Writes a line about a step that the guard left out, or after which it went back (`checks/supervision.py`)."""
    note_start(run_dir, incident, goes_on=True)


_WORDS: dict[type, str] = {Fixed: "fixed", Permutation: "permutation"}


def note_start_of_fit(
    run_dir: Path,
    source: Source,
    state: TrainState,
    length: Training,
    batches: Batches,
    validation_data: Any,
    *,
    goes_on: bool,
) -> None:
    """Notes the start of a run that was made from Python. On rank 0 only.

    Args:
        length, batches, validation_data: the arguments of the fit.
        goes_on: the run is one that was resumed.
    """
    samples, sampler = _whole(source.samples), state.sampler
    sizes = getattr(samples, "file_sizes", None)
    data = {
        "name": "digits",  # any, because `dealt` stands for the samples
        "order": _WORDS.get(type(batches.order), "auto"),
        "sharding": batches.sharding if isinstance(batches.sharding, str) else "auto",
        "skip_steps": list(batches.skip_steps or ()),
        "validation": validation_data if isinstance(validation_data, float) else None,
    }
    parts = {"num_shards": sampler.num_shards, "micro_size": sampler.micro_size}
    settings = {
        "seed": batches.seed,
        "epochs": length.epochs,
        "max_steps": length.max_steps,
        "cluster": {"workers": state.comm.world_size},
        "batch": _batch(sampler.sizes.setting) | parts,
        "loader": {"num_workers": source.num_workers},
        "data": data,
    }
    start = {
        "folder": str(Path.cwd()),
        "position": {"step": state.step, "sampler": sampler.state_dict()} if goes_on else None,
        "settings": settings,
        "dealt": {"num_samples": len(samples)} | ({} if sizes is None else {"file_sizes": np.asarray(sizes).tolist()}),
        "order": sampler.order.identity,
    }
    note_start(run_dir, start, goes_on=goes_on)


def _whole(samples: Any) -> Any:
    """Returns the data set of which a share may have been set apart."""
    part = selection_in(samples)
    return samples if part is None else part.samples


def _batch(setting: Any) -> dict[str, Any]:
    """Returns the global batch, or how it grows, as `Steps.setting` has it, in the words of the settings."""
    if isinstance(setting, int):
        return {"global_size": setting}
    if isinstance(setting, list) and len(setting) == 3:
        return {"warmup_size": setting[0], "global_size": setting[1], "warmup_samples": setting[2]}
    return {}  # a budget of tokens, which has its own order


@contextmanager
def calls_left(run_dir: Path | None, comm: Communicator) -> Iterator[None]:
    """Leaves this rank's last calls in RUN_DIR/logs/calls-rank-R.jsonl if the block fails and the error is no user's.

    Args:
        run_dir: None: nothing is written.
    """
    try:
        yield
    except Exception as error:
        if run_dir is not None and not isinstance(error, USER_ERRORS):
            path = run_dir / "logs" / f"calls-rank-{comm.rank}.jsonl"
            with if_possible(path):
                make_folder(path.parent)
                write_whole(path, "".join(f"{to_json(call)}\n" for call in comm.recent_calls()))
        raise
