"""Compares two runs bit by bit: are they equal, and if not, from which step on and in what?

    python -m ddp train same_bits.on=true same_bits.hash_every=10 run.name=one
    python -m ddp train same_bits.on=true same_bits.hash_every=10 cluster.workers=3 run.name=three
    python -m ddp same_bits runs/one runs/three

Each run has recorded hashes (`ddp/train/reports/history.py`). The result also names the settings in which the runs
differ, where bits depend on them. If both have a checkpoint before the first difference, their steps are made again
here, each with its own settings: then it names the first shard and module in which they part, or the update. The exit
status is 0 if they are equal, 1 if they differ, and 2 if they cannot be compared.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddp.commands.registry import parser_of, respond
from ddp.errors import ConfigError, WorkersFailed, first_line
from ddp.policies import Evaluation, Folder, SameBits
from ddp.run.assembly.stages import fit_arguments, joined, loaded
from ddp.run.launch import from_python
from ddp.run.settings.address import check_trust, own_parts
from ddp.run.settings.config import choose
from ddp.run.settings.reader import read_config, settings_of
from ddp.train.checkpoints.checkpoint_store import listed
from ddp.train.fit import train
from ddp.train.reports.history import Comparison, StepTrace, Trace, compare, parting, read_hashes
from ddp.train.reports.profiler import Profiler
from ddp.train.steps.callbacks import EarlyStopping
from ddp.train.steps.stopping import StopFlag
from ddp.units import counted

MOST_NAMED = 3


def main(words: Sequence[str]) -> int:
    """Compares the runs that the words name; returns 1 if they differ."""
    parser = parser_of("same_bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about = "the folder of a run with same_bits.hash_every=10 or another number"
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help=about)
    parser.add_argument("trust", nargs="?", choices=["trust=true"], help="imports code that the runs' settings name")
    found: list[Comparison] = []

    def run(options: argparse.Namespace) -> str:
        one, other = options.runs
        found.append(compare_runs(one, other))
        return "\n".join([in_words(found[0]), *made_again(one, other, found[0], trust=options.trust is not None)])

    status = respond(parser, parser.parse_args(words), run)
    return status or int(found[0].first_different is not None)


def compare_runs(one: Path, other: Path) -> Comparison:
    """Compares two runs.

    Raises:
        ConfigError: they are one, or one has no hashes, or no step has hashes in both.
    """
    if one.resolve() == other.resolve():
        raise ConfigError(f"{one} and {other} are the same run: name another one to compare it with")
    return compare(read_hashes(one), read_hashes(other))


def made_again(one: Path, other: Path, found: Comparison, *, trust: bool) -> list[str]:
    """Returns where the two runs part if their steps before the first difference are made again, from checkpoints."""
    step, starts = found.first_different, []
    if step is None:
        return []
    if not all(lines[step].identity.get("same_bits") for lines in map(read_hashes, (one, other))):
        return ["to find where they part, both runs need same_bits.on=true, so that one worker can make them again"]
    for run in (one, other):
        path = checkpoint_before(run, (found.last_equal or 0) + 1)
        if path is None:
            return [
                f"to find where they part, both runs need a checkpoint before step {step:,}, and {run} has none: "
                "checkpoint.every_steps and checkpoint.keep_last say which ones a run keeps"
            ]
        starts.append(path)
    again = partial(traced, last_step=step, trust=trust)
    try:
        traces = [
            from_python.launch(again, run, path, workers=1, threads_per_worker=threads_of(run))[0]
            for run, path in zip((one, other), starts, strict=True)
        ]
    except (ConfigError, WorkersFailed) as error:
        cause = error.exception if isinstance(error, WorkersFailed) and error.exception is not None else error
        return [f"their steps cannot be made again: {first_line(cause)}"]
    for run, trace in zip((one, other), traces, strict=True):
        if not trace or trace[-1].step < step:
            return [f"their steps cannot be made again: the settings that {run} has now end it before step {step:,}"]
    first = max(each[0].step for each in traces)
    part = parting(*([each for each in trace if each.step >= first] for trace in traces))
    if part is None:
        why = "a machine of one of them has computed wrongly, or is of another kind"
        if found.changed:
            why = "they are made with the settings that each run has now, and it may have had others then"
        return [f"made again here, steps {first:,} to {step:,} of both runs have the same bits: {why}"]
    return [f"made again here, from checkpoints, they part in step {part[0]:,}: {part[1]}"]


def in_words(found: Comparison) -> str:
    """Returns the comparison as text, and its consequences."""
    num_steps = counted(len(found.steps), "common step")
    if found.first_different is None:
        lines = [f"equal at all {num_steps}, up to step {found.last_equal:,}"]
    else:
        more = len(found.names) - MOST_NAMED
        names = ", ".join(found.names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
        where = f"step {found.first_different:,}, the first of {num_steps}"
        if found.last_equal is not None:
            where = f"step {found.first_different:,}; the last equal one is step {found.last_equal:,}, of {num_steps}"
        lines = [f"different at {where}", f"  {len(found.names):,} of {counted(found.num_names, 'value')}: {names}"]
    if found.changed:
        lines += ["bits depend on these, in which the second run differs from the first:"]
        lines += [f"  {change}" for change in found.changed]
    return "\n".join(lines)


# --- steps that are made again, from a checkpoint, with the run's own settings and by one worker ---------------------
#
# A run by shards has the same bits with one worker as with many. So this is what the run has computed, if its machines
# have computed rightly.


def checkpoint_before(run: Path, step: int) -> Path | None:
    """Returns the run's last checkpoint from before a step; None if there is none."""
    found = [each for each in listed(run / "checkpoints").saved if each.manifest.step < step]
    return max(found, key=lambda each: each.manifest.step).path if found else None


def threads_of(run: Path) -> int:
    """Returns the threads of a worker of a run; 1 of one from Python."""
    path = settings_of(run)
    return 1 if path is None else read_config(path).cluster.threads_per_worker or 1


def traced(run: Path, checkpoint: Path, *, last_step: int, trust: bool) -> list[StepTrace]:
    """Returns the trace of a run's steps after a checkpoint, up to `last_step`. Runs in a separate process.

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
    config.resume, config.cluster.min_workers = "auto", None  # so that its first weights are not asked for
    trace, stop = Trace(last_step), StopFlag()
    with joined(config) as comm:
        with redirect_stdout(io.StringIO()):  # what a run says of its learning rate
            given = fit_arguments(config, run, loaded(config), stop).for_ranks(comm)
        quiet = Folder(None, checkpoint, progress=False, curves=False)
        apart: dict[str, Any] = {"validation_data": None, "test_data": None, "same_bits": SameBits(on=True)}
        own = [each for each in given.callbacks if not isinstance(each, (EarlyStopping, Profiler))]
        how = {"folder": quiet, "evaluation": Evaluation(every_epochs=None), "callbacks": [*own, trace], **apart}
        train(replace(given, **how))
    return trace.steps
