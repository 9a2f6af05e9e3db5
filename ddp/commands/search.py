"""Searches for settings by Optuna: each trial is a run in a separate process, and the folder resumes.

    python -m ddp search 'optim.lr=tag(log,interval(1e-4,1e-1))' model.width=16,32 --trials 20 sweep.name=mine
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ddp.comm.meeting.place import refuse_workers
from ddp.commands.command import parser_of
from ddp.errors import ConfigError
from ddp.process.arguments import program, whole
from ddp.run.launch import jobs
from ddp.run.launch.command_line import bad_input_to, composed, exit_with_error, for_hydra, options_first
from ddp.run.launch.run_folder import unwritable
from ddp.run.search import Search, Space, run
from ddp.run.settings.checks import NO_METRIC
from ddp.run.settings.config import Sweep
from ddp.run.settings.reader import from_plain, value_of


def main(words: Sequence[str]) -> int:
    """Makes the trials that are left; returns the exit status."""
    usage = f"{program()} search KEY=VALUE,VALUE KEY='interval(LOW,HIGH)' … [--trials N] [SETTING=VALUE …]"
    about = "KEY='range(1,9)' and KEY='tag(log,interval(1e-4,1e-1))', too; sweep.name=, sweep.parallel=: docs/sweeps.md"
    parser = parser_of("search", usage=usage, epilog=about)
    parser.add_argument("--trials", type=whole(1), default=20, metavar="N", help="in all (default: %(default)s)")
    parser.add_argument("--no-pruning", action="store_true", help="let hopeless trials run to their end")
    about = "of Optuna's proposals (default: %(default)s)"
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N", help=about)
    options, settings = parser.parse_known_args(words)
    with bad_input_to(exit_with_error):
        refuse_workers("a search", instead="start it by itself")
        settings = options_first(settings, own=("--trials", "--no-pruning", "--seed"))
        ours = [each for each in settings if each.startswith("sweep.")]
        space = Space.of(for_hydra([each for each in settings if each not in ours], sweeps=True))
        sweep = _sweep(ours)
        config, _ = composed(space.first())
        if config.trial:
            raise ConfigError("trial=true: keeps no metric to search by; leave it out")
        if config.evaluate.by == "sidecar" and not options.no_pruning:
            why = NO_METRIC.format("evaluate.by=sidecar")
            raise ConfigError(f"--no-pruning: is missing, because pruning {why}; add it, or leave that setting out")
        from ddp.run.assembly.components import make_task

        task, folder = make_task(config), Path("runs", sweep.name or time.strftime("search-%Y-%m-%d_%H-%M-%S"))
        search = Search(
            space,
            folder.absolute(),
            metric=task.main_metric,
            higher_is_better=task.higher_is_better,
            num_trials=options.trials,
            parallel=sweep.parallel,
            seed=options.seed,
            prunes=not options.no_pruning,
        )
        try:
            return run(search, parallel=sweep.parallel, typed=f"{program()} train")
        except OSError as error:
            raise unwritable(error.filename or folder, error) from error
    raise AssertionError("bad input ends the process")


def _sweep(words: Sequence[str]) -> Sweep:
    """Returns the settings of the sweep as a whole."""
    parts = (each.partition("=") for each in words)
    found = {key.removeprefix("sweep."): value_of(key, text) for key, _, text in parts}
    sweep: Sweep = from_plain({"sweep": found}).sweep
    jobs.check_parallel(sweep.parallel)
    return sweep
