"""Measures the memory that a worker needs to train: its peak, less what it had before its model was built.

Each variant has a launch of its own, so that no other's memory counts for it:

    import everything, join torch.distributed               ── before
    build the model, wrap it, make its batch, some steps    ── peak − before, of the worker where that is highest

ddp/bench/pss.py says what counts as memory. The communicator is made after "before", so its memory is ours and
not everyone's. For scale, "alone" is the same training without communication: parameters, gradients, momentum and
activations.

`scripts/ddp bench_step --memory` is the command.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch._dynamo
import torch.distributed as dist

from ddp.bench.place import HERE, Place
from ddp.bench.pss import sampling
from ddp.bench.step import Training, make
from ddp.bench.turns import Cell
from ddp.bench.workloads import workload
from ddp.comm.setup import init, shutdown
from ddp.errors import ConfigError

NUM_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class MemoryCell(Cell):
    """Holds the figure of one variant of one model: bytes above "before", of the worker where that is highest."""

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
        torch.set_num_threads(1)
        with torch.device("meta"), suppress(ConfigError):  # one of the user's own may need numbers
            workload(self.model).make()  # imports what it needs, torchvision say, and takes no memory for numbers
        dist.init_process_group("gloo")
        peak = torch.tensor(self._measure())
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        gc.collect()  # ddp/bench/step.py, note "replicas first"
        place = self.place.title(dist.get_world_size())
        shutdown()
        dist.destroy_process_group()
        return [MemoryCell(place=place, name=self.model, variant=self.variant, peak=int(peak))]

    def _measure(self) -> int:
        """Returns this rank's peak above "before"."""
        with sampling(os.getpid()) as take:
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
