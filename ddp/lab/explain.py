"""Explains which all-reduce "auto" would choose on this machine for tensors of a size, by what it measures here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddp.comm.meeting.place import is_rank
from ddp.commands.registry import parser_of, respond
from ddp.lab.ranks import add_workers, at_ranks, joined
from ddp.process import memory
from ddp.process.arguments import checked, whole
from ddp.units import format_size, parse_size

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator


def main(words: Sequence[str]) -> int:
    """Measures, and explains the choice for the size that the words give."""
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
    question, shared = partial(explained, options.bytes, num_shards=options.shards), not options.transport_only
    if is_rank():
        return str(joined(question, device="auto", shared_memory=shared))
    return str(at_ranks(question, options.workers, timeout_s=120, device="auto", shared_memory=shared))


def explained(nbytes: int, comm: Communicator, *, num_shards: int | None = None) -> str:
    """Returns on rank 0 its communicator's text on an all-reduce of `nbytes`; elsewhere ""."""
    answer = comm.plan.explain(nbytes, num_shards=num_shards)
    return answer if comm.rank == 0 else ""
