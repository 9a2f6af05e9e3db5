"""Times training steps of our replicas beside torch's DistributedDataParallel on Gloo, in the same run.

    python -m ddp bench step                                           the default job and ResNet-18, 2 workers
    python -m ddp bench step --models all --workers 2,4 --plot steps.png
    python -m ddp bench step --models mlp-25m --variants ours,torch,alone --turns 3
    python -m ddp bench step --models mine:Net                         your own: example_batch() gives a batch
    python -m ddp bench step --beside 1                                beside a process that keeps a core busy
    python -m ddp bench step --netbed 2x1@1gbit --models mlp-25m       on hosts made for it (root, iproute2)

Variants: ours, torch (its DistributedDataParallel), naive (one all-reduce per parameter), alone (no communication),
in_backward (ours, the optimizer inside backward). ddp/lab/bench/step.py says what is measured,
ddp/lab/bench/workloads.py what the models are. Every worker has one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.commands.command import parser_of, respond
from ddp.errors import ConfigError
from ddp.lab.bench.command import add_options, place_of, run
from ddp.lab.bench.place import refuse_unknown, split
from ddp.lab.bench.step import VARIANTS, StepCell, TimeSteps
from ddp.lab.bench.workloads import add_models, models_of


def main(words: Sequence[str]) -> int:
    """Times the steps that the words ask for."""
    parser = parser_of("bench step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="2", least=1, turns=9, plots=True)
    add_models(parser)
    usual = ",".join(TimeSteps.variants)
    parser.add_argument("--variants", default=usual, metavar="NAME,NAME,…", help="what to time (default: %(default)s)")
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Times them; the report is printed."""
    where, models, variants = place_of(options), models_of(options), tuple(split("--variants", options.variants))
    refuse_unknown("variant", variants, VARIANTS)
    if options.plot and "alone" not in variants:
        raise ConfigError('--plot draws steps relative to the variant "alone": ask for it, too')
    run(options, [TimeSteps(model, variants, options.turns, where) for model in models], StepCell, where)
    return ""
