"""Explains which all-reduce "auto" would choose on this machine for tensors of a size: formulas and times."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import ddp
from ddp.comm.meeting.place import is_rank
from ddp.commands.command import add_workers, parser_of, respond
from ddp.process import memory
from ddp.process.arguments import checked, whole
from ddp.run.launch import from_python
from ddp.units import format_size, parse_size


def main(words: Sequence[str]) -> int:
    """Measures, and explains what the words ask."""
    parser = parser_of("explain", epilog="Between several hosts: torchrun --nnodes … -m ddp explain … on each of them.")
    parser.add_argument("bytes", type=checked(parse_size), help="size of the tensor, e.g. 25MB")
    add_workers(parser)
    parser.add_argument("--transport-only", action="store_true", help="as if they could not share memory")
    parser.add_argument("--shards", type=whole(1), metavar="V", help="of sums over V shards of a batch (same_bits.on)")
    return respond(parser, parser.parse_args(words), run)


def run(options: argparse.Namespace) -> str:
    """Returns the text that the command prints."""
    if 2 * options.bytes * options.workers > memory.available_bytes():
        raise ValueError(
            f"{format_size(options.bytes)}: all-reduces of it are timed, and {options.workers} ranks have no "
            "memory for that here; give a smaller size"
        )
    if options.shards is not None and options.shards < options.workers:
        raise ValueError(f"--shards {options.shards}: fewer than --workers {options.workers}; give as many at least")
    how = {"shared_memory": not options.transport_only, "num_shards": options.shards}
    question = partial(explained, options.bytes, **how)
    if is_rank():
        return question()
    answers = from_python.launch(question, workers=options.workers, threads_per_worker=1, timeout_s=120)
    return str(answers[0])


def explained(nbytes: int, *, shared_memory: bool, num_shards: int | None = None) -> str:
    """Returns, as rank 0 of a new world, what its communicator says about an all-reduce of `nbytes`; elsewhere ""."""
    comm = ddp.init(device="auto", shared_memory=shared_memory)
    answer, rank = comm.plan.explain(nbytes, num_shards=num_shards), comm.rank
    ddp.shutdown()
    return answer if rank == 0 else ""
