"""Compares forecasts of training steps with the steps that they forecast, in the same run.

    python -m ddp bench forecast --workers 1,2 --models digits-cnn,mlp-25m            on this host
    python -m ddp bench forecast --netbed 2x1@1gbit                                   on hosts made for it (root)
    python -m ddp bench forecast --netbed 2x1@100mbit --methods plain,int8,powersgd   which is fastest?

ddp/lab/forecast/cells.py says what is measured, ddp/lab/bench/workloads.py what the models are. Every worker has one
thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.commands.command import parser_of, respond
from ddp.lab.bench.command import add_options, place_of, run
from ddp.lab.bench.place import refuse_unknown, split
from ddp.lab.bench.workloads import add_models, models_of
from ddp.lab.forecast.cells import METHODS, PLAIN, CompareForecasts, ForecastCell


def main(words: Sequence[str]) -> int:
    """Compares what the words ask for."""
    parser = parser_of("bench forecast", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="1,2", least=1, turns=3)
    add_models(parser, default="digits-cnn,mlp-25m,resnet18-small-stem,gpt-10m")
    parser.add_argument(
        "--methods",
        default=PLAIN,
        metavar="NAME,NAME,…",
        help=f"how gradients travel: some of {', '.join(METHODS)} (default: %(default)s)",
    )
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Compares them; the report is printed."""
    where, models, methods = place_of(options), models_of(options), tuple(split("--methods", options.methods))
    refuse_unknown("method", methods, METHODS)
    run(options, [CompareForecasts(model, methods, options.turns, where) for model in models], ForecastCell, where)
    return ""
