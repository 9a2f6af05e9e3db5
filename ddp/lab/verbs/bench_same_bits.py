"""Measures what same_bits costs in time and memory.

    python -m ddp bench same_bits                                      an MLP, a ResNet-18 and a GPT, 2 workers
    python -m ddp bench same_bits --parts steps,memory --models mlp-25m --json costs.json
    python -m ddp bench same_bits --models mine:Net                    your own: example_batch() gives a batch
    python -m ddp bench same_bits --netbed 2x1@1gbit --models mlp-25m  steps on hosts made for it (root, iproute2)

Steps: ms of a step, compared in turns with ordinary accumulation of the same shards, with torch's
DistributedDataParallel, and with one large forward. Memory: of a worker, compared with ordinary accumulation.
ddp/lab/bench/shard_costs.py says how both are measured. Every worker has one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ddp.commands.command import parser_of, respond
from ddp.lab.bench.command import Job, add_options, place_of, run
from ddp.lab.bench.counts import can_count_memory
from ddp.lab.bench.place import refuse_unknown, split
from ddp.lab.bench.shard_costs import IN_MEMORY, MeasureMode, ShardsCell, TimeModes, merged
from ddp.lab.bench.workloads import add_models, models_of

PARTS = ("steps", "memory")


def main(words: Sequence[str]) -> int:
    """Measures what the words ask for."""
    parser = parser_of("bench same_bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="2", least=1, turns=9)
    add_models(parser, default="mlp-25m,resnet18-32px,gpt-10m")
    usual = ",".join(PARTS)
    parser.add_argument("--parts", default=usual, metavar="NAME,…", help="what is measured (default: %(default)s)")
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Measures it; the report is printed."""
    where, models, parts = place_of(options), models_of(options), split("--parts", options.parts)
    refuse_unknown("part", parts, PARTS)
    jobs: list[Job] = [TimeModes(model, options.turns, where) for model in models if "steps" in parts]
    if "memory" in parts and where.bed is None and can_count_memory():
        jobs += [MeasureMode(model, mode, where) for model in models for mode in IN_MEMORY]
    run(options, jobs, ShardsCell, where, merged)
    return ""
