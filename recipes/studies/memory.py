"""Measures the memory that a worker needs to train: its peak, less what it had before its model was built.

Each variant has a launch of its own, so that no other's memory counts for it:

    import everything, join torch.distributed               ── before
    build the model, wrap it, make its batch, some steps    ── peak − before, of the worker where that is highest

`ddp/lab/bench/counts.py` says how memory is counted. The communicator is made after "before", so its memory is ours and
not everyone's. For scale, "alone" is the same training without communication: parameters, gradients,
momentum and activations.

    python recipes/studies/memory.py --models mlp-25m,gpt-10m --variants ours,torch,alone

Variants and models are those of `ddp bench step`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from ddp.comm.session import init
from ddp.commands.command import respond
from ddp.errors import ConfigError
from ddp.lab.bench.command import add_options, place_of, run
from ddp.lab.bench.counts import can_count_memory, sampling
from ddp.lab.bench.place import HERE, Place, refuse_unknown, split
from ddp.lab.bench.step import VARIANTS, TimeSteps, Training, make, without_communicator
from ddp.lab.bench.turns import Cell
from ddp.lab.bench.workloads import add_models, models_of
from ddp.process.arguments import Parser

NUM_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class MemoryCell(Cell):
    """Holds the figure of one variant of one model: bytes above "before", of the worker where that is highest."""

    legend: ClassVar[Mapping[str, str]] = {
        "model": "what is trained",
        "variant": "how it is trained (ddp bench step --help lists the variants)",
        "peak": "MiB above what the worker had before it built its model, of the worker where that is highest",
    }
    variant: str
    peak: int

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        return {"model": self.name, "variant": self.variant, "peak": f"{self.peak / (1 << 20):.1f}"}


@dataclass(frozen=True)
class MeasureMemory:
    """Measures one variant of one model. A call runs on every rank of one host, in the environment of `ddp.launch`."""

    model: str
    variant: str
    place: Place = HERE

    def __call__(self) -> list[MemoryCell]:
        """Returns one cell, the same on all ranks."""
        with without_communicator(self.model):
            peak = torch.tensor(self._measure())
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            place = self.place.title(dist.get_world_size())
        return [MemoryCell(place=place, name=self.model, variant=self.variant, peak=int(peak))]

    def _measure(self) -> int:
        """Returns this rank's peak above "before"."""
        with sampling() as take:
            before = _together(take)
            if self.variant not in ("torch", "alone"):
                init(device="cpu")
            training = Training(self.variant, *make(self.model, rank=dist.get_rank()))
            for _ in range(NUM_STEPS):
                training.step()
            return _together(take) - before


def _together(take: Callable[[], int]) -> int:
    """Takes the peak once all ranks are here, and lets none go on before all have taken theirs."""
    dist.barrier()
    taken = take()
    dist.barrier()
    return taken


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, workers="2", least=1)
    add_models(parser)
    usual = ",".join(TimeSteps.variants)
    parser.add_argument("--variants", default=usual, metavar="NAME,NAME,…", help="(default: %(default)s)")
    sys.exit(respond(parser, parser.parse_args(), answer))


def answer(options: argparse.Namespace) -> str:
    """Measures what was asked for, a launch for each; the report is printed."""
    where, models, variants = place_of(options), models_of(options), split("--variants", options.variants)
    refuse_unknown("variant", variants, VARIANTS)
    if where.bed is not None:
        raise ConfigError("memory is measured on this host: leave --netbed out")
    if not can_count_memory():
        raise ConfigError("memory is measured as PSS, which Linux alone counts")
    jobs = [MeasureMemory(model, variant, where) for model in models for variant in variants]
    run(options, jobs, MemoryCell, where)
    return ""


if __name__ == "__main__":
    main()
