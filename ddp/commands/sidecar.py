"""Follows a run as its side-car: evaluates each checkpoint that the run saves (`ddp/train/sidecar.py`).

    python -m ddp sidecar runs/mine                on this host or any that sees the folder; ends when the run has
    … device=cuda evaluate.batch=1024              with settings that differ from those of the run
    … evaluate.wait_s=86400                        waits a day for a run that was stopped

`train evaluate.by=sidecar` starts one by itself. So does the task `evaluator` of a cluster.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ddp.comm.meeting.place import refuse_workers
from ddp.commands.finished import options_of, reading_of, settings_for
from ddp.commands.registry import parser_of, respond
from ddp.errors import CheckpointError, ConfigError
from ddp.process.arguments import program
from ddp.process.clock import now_s
from ddp.process.memory import available_cores
from ddp.process.terminal import say
from ddp.run.assembly import components
from ddp.run.assembly.load import trained_of
from ddp.run.assembly.stages import joined
from ddp.run.launch.command_line import composed, options_first
from ddp.run.launch.worker import ORPHAN_GRACE_S, follow_parent
from ddp.train.checkpoints.checkpoint_store import StoredCheckpoint
from ddp.train.evaluate import evaluate
from ddp.train.held_out import Side
from ddp.train.reports.results import read_summary, write_summary
from ddp.train.sidecar import POLL_S, SideCar, only_sidecar, results_of_sidecar
from ddp.train.steps.stopping import StopFlag

OF_THE_EVALUATOR = ("device=", "evaluate.", "loader.", "trust=")
"""Settings in which a cluster's evaluator may differ."""


def main(words: Sequence[str]) -> int:
    """Follows the run that the words name; returns 128 + its number after a signal."""
    parser = parser_of("sidecar", usage=f"{program()} sidecar RUN [KEY=VALUE …]")
    parser.add_argument("run", type=Path, help="the folder of a run, which may still train, or have ended")
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # of one that a launcher has started
    options, stop = options_of(parser, words), StopFlag()
    if options.parent is not None:
        follow_parent(options.parent, grace_s=ORPHAN_GRACE_S)
        os.nice(19)
    respond(parser, options, lambda options: _follow(options, stop))
    return _status(stop)


def _follow(options: argparse.Namespace, stop: StopFlag) -> str:
    refuse_workers(f"{program()} sidecar", instead="start it by itself, next to the run")
    with stop.listening():
        follow(options.run, options.settings, stop, waits=options.parent is None)
    return ""


def follow(run_dir: Path, words: Sequence[str], stop: StopFlag, *, waits: bool = True) -> None:
    """Evaluates what a run saves until it has ended, or a signal asks to stop; then completes its summary.json.

    Args:
        words: settings on top of the run's, as KEY=VALUE.
        waits: gives up on a run in whose folder nothing happens for `evaluate.wait_s`.

    Raises:
        ConfigError: the folder, a setting or the data cannot be used; or another side-car follows the run.
    """
    config = settings_for(run_dir, words, validates=True)
    config.cluster.threads_per_worker = config.cluster.threads_per_worker or available_cores()
    has_share = any(getattr(config.data, name, None) is not None for name in ("validation", "validation_path"))
    loaded = (components.load_data if has_share else components.load_held_out)(config, download=True)
    sides: dict[Side, object] = {"validation": loaded.validation, "test": loaded.test}
    samples = {side: each for side, each in sides.items() if each is not None and len(each)}  # type: ignore[arg-type]
    task = components.make_task(config, loaded)
    if not samples:
        raise ConfigError(f"data={config.data.name}: there are no held-out samples; check the path and the split")

    with only_sidecar(run_dir) as folder, joined(config) as comm:

        def measure(checkpoint: StoredCheckpoint, side: Side) -> Mapping[str, float] | None:
            trained = trained_of(checkpoint)
            for name, then in trained.facts.items():
                now = getattr(loaded, name)
                if None not in (then, now) and then != now:
                    raise CheckpointError(f"its {name} is {then}, and that of data={config.data.name} is {now}")
            model, reading = trained.built(config).to(comm.device), reading_of(config, loaded)
            metrics = evaluate(model, samples[side], loss=task, comm=comm, stop=stop, **reading)
            return metrics and {f"{side}_{name}": value for name, value in metrics.items()}

        side_car = SideCar(
            run_dir,
            folder,
            measure,
            sides=list(samples),
            main_metric=task.main_metric,
            higher_is_better=task.higher_is_better,
            say=say,
        )
        try:
            side_car.follow(stop, patience_s=config.evaluate.wait_s if waits else math.inf)
        except OSError as error:
            where = error.filename2 or error.filename or run_dir
            raise ConfigError(f"{where}: {error.strerror}; make room, and start the side-car again") from error
        if waits and not stop and config.evaluate.by == "sidecar":  # the run may have ended long ago
            summary = read_summary(run_dir)
            found = results_of_sidecar(run_dir, summary["main_metric"], last_step=summary["steps"])
            write_summary(run_dir, {**found, **summary, **found})


def follow_the_others(me: str, typed: Sequence[str]) -> NoReturn:
    """Follows the run of a cluster's other tasks, which may not have begun yet; ends the process.

    Args:
        me: which task this process is.
        typed: the command line, which names the run as that of the others does.

    Raises:
        ConfigError: it names no folder, or no run begins there within `evaluate.wait_s`; or as `follow`.
    """
    words, stop = [each for each in typed if not each.lstrip("+").startswith("cluster.")], StopFlag()
    if not any(each.startswith(("run.name=", "hydra.run.dir=")) for each in words):
        raise ConfigError(f"train: this process is {me}, but no run is named: give all tasks run.name=NAME")
    config, run_dir = composed(options_first(words))
    until_s = now_s() + config.evaluate.wait_s
    with stop.listening():
        while not (run_dir / "config.yaml").exists() and not stop:
            if now_s() > until_s:
                raise ConfigError(f"{run_dir}: no run began there within evaluate.wait_s={config.evaluate.wait_s:g}")
            time.sleep(POLL_S)
        if not stop:
            follow(run_dir, [each for each in words if each.startswith(OF_THE_EVALUATOR)], stop)
    sys.exit(_status(stop))


def _status(stop: StopFlag) -> int:
    return 128 + signal.Signals[stop.signal_name] if stop.signal_name else 0
