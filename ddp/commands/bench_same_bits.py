"""Holds same_bits against its promise, and measures what it costs.

    python -m ddp bench_same_bits                                      all of it: some forty minutes on two cores
    python -m ddp bench_same_bits --parts hashes --models mlp,gpt --workers 1,3,8
    python -m ddp bench_same_bits --parts steps,memory --timed mlp-25m --json costs.json
    python -m ddp bench_same_bits --parts faults                       runs with faults: some ten minutes
    python -m ddp bench_same_bits --netbed 2x1@1gbit --timed mlp-25m   steps on hosts made for it (root, iproute2)

Hashes: runs on different numbers of workers, and one that is resized from checkpoint to checkpoint, end with the same
bits or not. Steps: ms beside ordinary accumulation of the same shards, beside torch's DistributedDataParallel, and
beside one large forward. Memory: of a worker, beside ordinary accumulation. ddp/bench/shard_costs.py says how that is
measured. Faults: a rank that computes wrongly, and a sample that is not finite, are named, and healthy ranks are not
(ddp/bench/planted_faults.py). Every worker has one thread. The exit status is 0 if all bits are equal and all faults
named, 1 if some are not.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ddp.bench.command import Job, add_options, place_of, run
from ddp.bench.counts import can_count_memory
from ddp.bench.place import Place, refuse_unknown, split
from ddp.bench.planted_faults import WORLD_SIZES, FaultCell, named, plant_faults, said_of
from ddp.bench.report import print_report, to_json
from ddp.bench.same_bits import KINDS, OPTIMIZERS, RESIZES, SUBJECTS, BitsCell, Case, compare_bits, verdict
from ddp.bench.shard_costs import IN_MEMORY, MeasureMode, ShardsCell, TimeModes, merged
from ddp.bench.turns import Cell
from ddp.bench.workloads import WORKLOADS, models_of
from ddp.commands.command import parser_of, respond
from ddp.policies import NUM_SHARDS
from ddp.process.arguments import Parser, listed, whole

PARTS = ("hashes", "faults", "steps", "memory")


def main(words: Sequence[str]) -> int:
    """Compares and measures what the words ask for; returns 1 if bits differ."""
    parser = parser_of("bench_same_bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers=",".join(map(str, (1, 2, 3, 4, 5, 6, NUM_SHARDS))), least=1, turns=9)
    _add_choices(parser)
    of_shards = whole(1, NUM_SHARDS, "each worker needs a shard")
    parser.add_argument("--steps", type=whole(1), default=12, metavar="N", help="of a run (default: %(default)s)")
    parser.add_argument(
        "--resizes",
        type=lambda text: [of_shards(part) for part in filter(None, text.split(","))],
        default=",".join(map(str, RESIZES)),
        metavar="N,N,…",
        help='workers of a run that is resized, one after another; "": there is none (default: %(default)s)',
    )
    parser.add_argument(
        "--timed-workers",
        type=listed(of_shards),
        default="2",
        metavar="N,N,…",
        help="world sizes on which steps are timed, and memory is measured (default: %(default)s)",
    )
    trials = "runs with each fault, on 3 and on 4 workers (default: %(default)s)"
    parser.add_argument("--trials", type=whole(1), default=20, metavar="N", help=trials)
    found: list[Cell] = []
    status = respond(parser, parser.parse_args(words), lambda options: answer(options, found))
    return status or int(any(cell.differs for cell in found if isinstance(cell, BitsCell | FaultCell)))


def _add_choices(parser: Parser) -> None:
    """Adds what is run, as names with commas between them."""
    timed = "mlp-25m,resnet18-32px,gpt-10m"
    for option, usual, about in (
        ("--parts", ",".join(PARTS), "what is done"),
        ("--models", ",".join(SUBJECTS), "of the runs whose bits are compared"),
        ("--optimizers", ",".join(OPTIMIZERS), "of these runs"),
        ("--strategies", ",".join(KINDS), "of these runs"),
        ("--timed", timed, f"models that are timed: {', '.join(WORKLOADS)}, or your own by MODULE:NAME"),
    ):
        parser.add_argument(option, default=usual, metavar="NAME,…", help=f"{about} (default: %(default)s)")


def answer(options: argparse.Namespace, found: list[Cell]) -> str:
    """Makes the runs, and measures; the tables are printed, and the answer says whether bits are equal.

    Args:
        found: gets the cells that are shown.
    """
    where, parts, cases = place_of(options), split("--parts", options.parts), _cases(options)
    refuse_unknown("part", parts, PARTS)
    models = models_of(argparse.Namespace(models=options.timed))
    said: list[str] = []
    if "hashes" in parts and where.bed is None:
        bits = compare_bits(cases, workers=options.workers, resizes=options.resizes, num_steps=options.steps)
        _show(options, found, bits)
        said.append(verdict(bits))
    if "faults" in parts and where.bed is None:
        trials = [cell for workers in WORLD_SIZES for cell in plant_faults(workers, options.trials)]
        _show(options, found, trials)
        said += [*said_of(trials), named(trials)]
    if jobs := _jobs(models, parts, where, options.turns):
        measure = argparse.Namespace(**vars(options) | {"workers": options.timed_workers, "json": None})

        def kept(cells: list[Any]) -> Sequence[Cell]:
            _keep(options, found, together := merged(cells))
            return together

        run(measure, jobs, ShardsCell, where, kept)
    return "\n".join(said)


def _cases(options: argparse.Namespace) -> list[Case]:
    """Returns all cases of the runs whose bits are compared."""
    models, optimizers = split("--models", options.models), split("--optimizers", options.optimizers)
    strategies = split("--strategies", options.strategies)
    refuse_unknown("model", models, SUBJECTS)
    refuse_unknown("optimizer", optimizers, OPTIMIZERS)
    refuse_unknown("strategy", strategies, KINDS)
    return [Case(model, optimizer, each) for model in models for optimizer in optimizers for each in strategies]


def _jobs(models: Sequence[str], parts: Sequence[str], where: Place, num_turns: int) -> list[Job]:
    jobs: list[Job] = [TimeModes(model, num_turns, where) for model in models if "steps" in parts]
    if "memory" in parts and where.bed is None and can_count_memory():
        jobs += [MeasureMode(model, mode, where) for model in models for mode in IN_MEMORY]
    return jobs


def _show(options: argparse.Namespace, found: list[Cell], cells: Sequence[Cell]) -> None:
    """Prints cells, and keeps them."""
    console = Console()
    print_report(cells, console if console.is_terminal else Console(width=190))
    _keep(options, found, cells)


def _keep(options: argparse.Namespace, found: list[Cell], cells: Sequence[Cell]) -> None:
    """Keeps cells that are shown, also in the file that was asked for."""
    found.extend(cells)
    if options.json:
        options.json.write_text(to_json(found))
