"""Makes some steps of a run again, from a checkpoint, with the run's own settings and by one worker, and traces them.

A run by shards has the same bits with one worker as with many. So this is what the run has computed, if its machines
have computed rightly.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddp.errors import ConfigError
from ddp.policies import Evaluation, Folder, SameBits
from ddp.run.assembly.stages import given_of, joined
from ddp.run.settings.address import check_trust, own_parts
from ddp.run.settings.config import choose
from ddp.run.settings.reader import read_config, settings_of
from ddp.train.checkpoints.checkpoint_store import listed
from ddp.train.fit import train
from ddp.train.reports.hashes import StepTrace, Trace
from ddp.train.reports.profiler import Profiler
from ddp.train.steps.callbacks import EarlyStopping
from ddp.train.steps.stopping import StopFlag


def checkpoint_before(run: Path, step: int) -> Path | None:
    """Returns the run's last checkpoint from before a step; None if there is none."""
    found = [each for each in listed(run / "checkpoints").saved if each.manifest.step < step]
    return max(found, key=lambda each: each.manifest.step).path if found else None


def threads_of(run: Path) -> int:
    """Returns the threads of a worker of a run; 1 of one from Python."""
    path = settings_of(run)
    return 1 if path is None else read_config(path).cluster.threads_per_worker or 1


def traced(run: Path, checkpoint: Path, *, last_step: int, trust: bool) -> list[StepTrace]:
    """Returns the trace of a run's steps from after a checkpoint to the last one asked for. In a process of its own.

    Args:
        trust: as of `check_trust`; what the run's own settings say of it does not count.

    Raises:
        ConfigError: the run was made from Python, so that only its program knows model and data; or others may have
            written its settings, which name code.
    """
    path = settings_of(run)
    if path is None:
        raise ConfigError(f"{run} is of a run from Python, whose program alone knows model and data")
    config = read_config(path)
    check_trust(own_parts(asdict(config)), code=config.run.code, settings=path, trust=trust)
    config.cluster.workers = config.cluster.local_workers = 1
    config.cluster.servers, config.strategy, config.trackers = 0, choose("strategy", "auto"), []
    trace, stop = Trace(last_step), StopFlag()
    with joined(config) as comm:
        with redirect_stdout(io.StringIO()):  # what a run says of its learning rate
            given = given_of(config, comm, stop, is_resumed=True)
        quiet = Folder(None, checkpoint, progress=False, curves=False)
        apart: dict[str, Any] = {"validation_data": None, "test_data": None, "same_bits": SameBits(on=True)}
        own = [each for each in given.callbacks if not isinstance(each, (EarlyStopping, Profiler))]
        how = {"folder": quiet, "evaluation": Evaluation(every_epochs=None), "callbacks": [*own, trace], **apart}
        train(replace(given, **how))
    return trace.steps
