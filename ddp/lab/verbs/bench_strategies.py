"""Times training by each strategy beside torch's classes, in the same run, and counts memory and bytes.

    python -m ddp bench strategies                                     an MLP of 25M parameters with AdamW, 2 workers
    python -m ddp bench strategies --workers 2,4 --optimizers adamw,lamb --plot strategies.png
    python -m ddp bench strategies --models digits-cnn --strategies mirrored,sharded,alone --turns 1
    python -m ddp bench strategies --netbed 2x2@1gbit                  on hosts made for it (root, iproute2)

Strategies: mirrored, sharded, central_storage, by_hand (BucketedDataParallel and the optimizer), torch (its
DistributedDataParallel), torch_zero (the same with its ZeroRedundancyOptimizer), alone (no communication).
ddp/lab/bench/strategies.py says what is measured, ddp/lab/bench/workloads.py what the models are. Every worker has one
thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.commands.command import parser_of, respond
from ddp.errors import ConfigError
from ddp.lab.bench.command import Job, add_options, place_of, run
from ddp.lab.bench.counts import can_count_memory
from ddp.lab.bench.place import refuse_unknown, split
from ddp.lab.bench.strategies import OPTIMIZERS, STRATEGIES, MeasureStrategy, StrategyCell, TimeStrategies, merged
from ddp.lab.bench.workloads import add_models, models_of


def main(words: Sequence[str]) -> int:
    """Times and counts what the words ask for."""
    parser = parser_of("bench strategies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="2", least=1, turns=9, plots=True)
    add_models(parser, default="mlp-25m")
    usual = ",".join(STRATEGIES)
    parser.add_argument("--strategies", default=usual, metavar="NAME,NAME,…", help="(default: %(default)s)")
    parser.add_argument("--optimizers", default="adamw", metavar="NAME,…", help="adamw, lamb (default: %(default)s)")
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Times and counts them; the report is printed."""
    where, models = place_of(options), models_of(options)
    strategies, optimizers = split("--strategies", options.strategies), split("--optimizers", options.optimizers)
    refuse_unknown("strategy", strategies, STRATEGIES)
    refuse_unknown("optimizer", optimizers, OPTIMIZERS)
    if options.plot and "alone" not in strategies:
        raise ConfigError('--plot draws steps relative to the strategy "alone": ask for it, too')
    pairs = [(model, optimizer) for model in models for optimizer in optimizers]
    jobs: list[Job] = [TimeStrategies(*pair, tuple(strategies), options.turns, where) for pair in pairs]
    if where.bed is None and can_count_memory():
        jobs += [MeasureStrategy(*pair, strategy, where) for pair in pairs for strategy in strategies]
    run(options, jobs, StrategyCell, where, merged)
    return ""
