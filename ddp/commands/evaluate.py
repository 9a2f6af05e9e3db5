"""Evaluates a finished run on the samples that were held out from it, or on others.

    python -m ddp evaluate runs/mine                       the metrics, over all samples
    … data.test_path=other.csv cluster.workers=4           with settings other than those of the run
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ddp.commands.command import respond
from ddp.commands.finished import checked, launched, parsed, reading
from ddp.run.build import components
from ddp.run.build.load import load
from ddp.run.build.stages import joined
from ddp.run.settings.config import Config
from ddp.train.evaluate import evaluate
from ddp.train.report import metric_in_words, words_of
from ddp.units import counted


def main(words: Sequence[str]) -> int:
    """Says how good the run is that the words name."""
    parser, options = parsed("evaluate", words)
    return respond(parser, options, answer)


def answer(options: argparse.Namespace) -> str:
    """Returns the answer."""
    return evaluate_run(options.run, options.settings)


def evaluate_run(run: Path, words: Sequence[str]) -> str:
    """Returns, in words, the metrics of a run's best checkpoint, or of the checkpoint that `run` is.

    Args:
        words: settings on top of the run's, as KEY=VALUE.

    Raises:
        ConfigError, CheckpointError: the folder, a setting, or the data cannot be used.
        WorkersFailed: a worker raised or died.
    """
    config, trained, splits = checked(run, words, is_evaluation=True)
    means: Mapping[str, float] = launched(config, partial(_evaluate, config, trained.path))
    rows = {words_of(f"test_{name}"): metric_in_words(f"test_{name}", value) for name, value in means.items()}
    width = max(map(len, rows))
    samples = counted(len(splits.test), "sample")
    return "\n".join(
        [f"{trained.path}, on {samples} of data={config.data.name}:"]
        + [f"  {name:>{width}}  {value}" for name, value in rows.items()]
    )


def _evaluate(config: Config, checkpoint: Path) -> dict[str, float] | None:
    with joined(config) as comm:
        splits, model = components.load_held_out(config), load(checkpoint).built(config).to(comm.device)
        return evaluate(model, splits.test, loss=components.make_task(config), comm=comm, **reading(config, splits))
