"""Evaluates a run on the samples that were held out from it, or on others.

    python -m ddp evaluate runs/mine                       the metrics, over all samples
    … data.test_path=other.csv cluster.workers=4           with settings other than those of the run
    python -m ddp evaluate region=mine                     a running job, with strategy.region=mine, at this moment
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp.commands.command import respond
from ddp.commands.finished import at_all_ranks, checked, parsed
from ddp.train.evaluation.evaluate import evaluate
from ddp.train.reports.results import metric_in_words, words_of
from ddp.train.tasks.task import Task
from ddp.units import counted


def main(words: Sequence[str]) -> int:
    """Says how good the run is that the words name."""
    parser, options = parsed("evaluate", words)
    return respond(parser, options, lambda options: evaluate_run(options.run, options.settings))


def evaluate_run(run: str, words: Sequence[str]) -> str:
    """Returns, as text, the metrics of a run's best checkpoint, or of the checkpoint that `run` is.

    Args:
        run: a folder; or "region=NAME", for the parameters that a run has at this moment.
        words: settings on top of the run's, as KEY=VALUE.

    Raises:
        ConfigError, CheckpointError: the folder, a setting, or the data cannot be used.
        WorkersFailed: a worker raised or died.
    """
    config, trained, splits = checked(run, words, is_evaluation=True)
    means: Mapping[str, float] = at_all_ranks(config, trained, _evaluate)
    rows = {words_of(f"test_{name}"): metric_in_words(f"test_{name}", value) for name, value in means.items()}
    width = max(map(len, rows))
    title = f"{trained}, on {counted(len(splits.test), 'sample')} of data={config.data.name}:"
    return "\n".join([title, *(f"  {name:>{width}}  {value}" for name, value in rows.items())])


def _evaluate(model: Any, samples: Any, task: Task, **reading: Any) -> dict[str, float] | None:
    return evaluate(model, samples, loss=task, **reading)
