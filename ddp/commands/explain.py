"""Explains which all-reduce "auto" would choose on this machine for tensors of a size, or what each hook would save."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import ddp
from ddp.comm.communicator import Communicator
from ddp.comm.meeting.place import is_rank
from ddp.commands.command import add_workers, parser_of, respond, time_of
from ddp.gradients import ErrorFeedback, PowerSGD, RandomK, Sign, TopK
from ddp.gradients.hooks.traffic import Traffic, predicted
from ddp.process import memory
from ddp.process.arguments import checked
from ddp.run.launch import from_python
from ddp.units import format_size, format_time, parse_size, three_digits

MOST_EXPLAINED = "128GB"


def main(words: Sequence[str]) -> int:
    """Measures, and explains what the words ask."""
    parser = parser_of("explain", epilog="Between several hosts: torchrun --nnodes … -m ddp explain … on each of them.")
    parser.add_argument(
        "bytes", type=size_explained, help="size of the tensor, or with --hooks of a model's gradients, e.g. 25MB"
    )
    add_workers(parser)
    parser.add_argument("--transport-only", action="store_true", help="as if they could not share memory")
    parser.add_argument("--hooks", action="store_true", help="what every wire format and hook would make of a step")
    parser.add_argument("--compute", type=time_of, metavar="TIME", help="of its forward and backward, e.g. 250ms")
    return respond(parser, parser.parse_args(words), answer)


def answer(options: argparse.Namespace) -> str:
    """Returns the answer."""
    if options.compute is not None and not options.hooks:
        raise ValueError("--compute goes with --hooks, which says what they make of a step")
    if not options.hooks and 2 * options.bytes * options.workers > memory.available_bytes():
        raise ValueError(
            f"{format_size(options.bytes)}: all-reduces of it are timed, and {options.workers} ranks have no "
            "memory for that here; give a smaller size"
        )
    question = partial(
        explained,
        options.bytes,
        shared_memory=not options.transport_only,
        compute_s=(options.compute or 0.0) if options.hooks else None,
    )
    if is_rank():
        return question()
    answers = from_python.launch(question, workers=options.workers, threads_per_worker=1, timeout_s=120)
    return str(answers[0])


def size_explained(text: str) -> int:
    """Returns the bytes of a tensor that `explain` is asked about."""
    nbytes = checked(parse_size)(text)
    if nbytes > parse_size(MOST_EXPLAINED):
        raise argparse.ArgumentTypeError(f"{text:.40}: give up to {MOST_EXPLAINED}, for which predictions take seconds")
    return nbytes


def explained(nbytes: int, *, shared_memory: bool, compute_s: float | None) -> str:
    """Returns, as rank 0 of a new world, what its communicator says about an all-reduce of `nbytes`; elsewhere "".

    Args:
        compute_s: of a step; None: nothing is asked about hooks.
    """
    comm = ddp.init(device="auto", shared_memory=shared_memory)
    answer = comm.plan.explain(nbytes) if compute_s is None else compared(comm, nbytes, compute_s=compute_s)
    rank = comm.rank
    ddp.shutdown()
    return answer if rank == 0 else ""


# -------------------------------------------------------------------------------------- what each hook would save

PLAIN = "as they are"
OFFERS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    **{f"replica.wire={wire}": {"wire": wire} for wire in ("bf16", "fp16", "int8", "int8_stochastic")},
    "hook=sign": {"hook": ErrorFeedback(Sign())},
    "hook=top_k": {"hook": ErrorFeedback(TopK())},
    "hook=random_k": {"hook": ErrorFeedback(RandomK())},
    "hook=powersgd": {"hook": ErrorFeedback(PowerSGD())},
    "hook=powersgd hook.rank=1": {"hook": ErrorFeedback(PowerSGD(1))},
}
"""settings on the command line → keywords of `fit`."""

SIDE = 1024  # about so many rows and columns have the matrices that stand for a model's
BUCKET_MATRICES = 6  # about 25 MB


class Gradients(NamedTuple):
    """Stands for a model's gradients: square matrices, in buckets."""

    side: int
    num_matrices: int

    @classmethod
    def of(cls, nbytes: int) -> Gradients:
        """Returns as many matrices as hold about `nbytes` of float32."""
        num_matrices = max(1, round(nbytes / (4 * SIDE**2)))
        return cls(max(1, math.isqrt(nbytes // (4 * num_matrices))), num_matrices)

    def buckets(self, device: torch.device) -> list[list[nn.Parameter]]:
        """Returns the parameters of each bucket; of memory they take one matrix."""
        matrix = nn.Parameter(torch.empty(self.side, self.side, device=device), requires_grad=False)
        numbers = range(0, self.num_matrices, BUCKET_MATRICES)
        return [[matrix] * min(BUCKET_MATRICES, self.num_matrices - number) for number in numbers]


def compared(comm: Communicator, nbytes: int, *, compute_s: float) -> str:
    """Returns a table: bytes and cost of gradients of `nbytes`, sent in every way. Collective.

    Args:
        compute_s: seconds of a step's forward and backward.
    """
    num_hosts = comm.host_partition.num_hosts
    if num_hosts == 1:
        why = "there is one worker" if comm.world_size == 1 else "all workers share a host's memory"
        return f"{why}: no gradient travels, and any wire format or hook would only cost time"
    gradients = Gradients.of(nbytes)
    found = {name: predicted(comm, gradients.buckets(comm.device), **offer) for name, offer in OFFERS.items()}
    of_many = "1 matrix" if gradients.num_matrices == 1 else f"{gradients.num_matrices} matrices"
    shape = f"{of_many} of {gradients.side} × {gradients.side}"
    title = f"gradients of {nbytes:,} bytes, as {shape}, between {num_hosts} hosts"
    if compute_s:
        title += f", in a step that computes for {format_time(compute_s)}"
    return "\n".join([title, *table(found, compute_s)])


def table(found: Mapping[str, Traffic], compute_s: float) -> list[str]:
    """Returns the lines of a table, with the names of `OFFERS`."""
    rows = [("", "leaves a host", "encoding", "network", "step", "plain ÷ step")]
    for name, traffic in found.items():
        step_s = traffic.step_s(compute_s)
        rows.append(
            (
                *(name, f"{three_digits(traffic.link_bytes / 1e6)} MB"),
                format_time(traffic.encoding_s) if traffic.encoding_s else "-",
                *(format_time(traffic.network_s), format_time(step_s)),
                three_digits(found[PLAIN].step_s(compute_s) / step_s),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = "  ".join(f"{{:{'<' if number == 0 else '>'}{width}}}" for number, width in enumerate(widths))
    return [aligned.format(*row) for row in rows]
