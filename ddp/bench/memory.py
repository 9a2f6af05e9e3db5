"""Measures the memory that a worker needs to train: the peak of its PSS, less what it had before its model was built.

Each variant has a launch of its own, so that no other's memory counts for it:

    import everything, join torch.distributed            ── before
    build the model, wrap it, make its batch, some steps    peak − before, of the worker where that is highest

The communicator is made after "before", so its memory is ours and not everyone's. For scale, "alone" is the same
training without communication: parameters, gradients, momentum, activations, and pages of torch's libraries that come
in when they are first used.

Note "files". A library's page is shared by all processes that have it mapped, also by strangers: when a neighbour
starts or ends a torch of its own, this part of a worker's PSS falls or rises, and the figure with it. So it is shown
beside heap and shared memory, which are the worker's own; compare those where it differs between variants.

`scripts/bench_step --memory` is the command. Read before: ddp/bench/step.py. Read next: ddp/bench/pss.py, which
samples.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist

from ddp.bench.place import HERE, Place, refuse_unknown
from ddp.bench.pss import Memory, sampling
from ddp.bench.step import VARIANTS, Training, make
from ddp.bench.turns import Cell
from ddp.bench.workloads import WORKLOADS
from ddp.comm.setup import init, shutdown
from ddp.errors import ConfigError

NUM_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class MemoryCell(Cell):
    """One variant of one model; bytes of PSS above "before", of the worker with the highest peak, and their parts."""

    variant: str
    pss: int
    heap: int
    files: int
    shared: int


@dataclass(frozen=True)
class MeasureMemory:
    """Measures one variant of one model. A call runs on every rank of one host, in the environment of `ddp.launch`.

    Raises:
        ConfigError: an unknown model or variant, or a system that does not tell the PSS.
    """

    model: str
    variant: str
    place: Place = HERE

    def __post_init__(self) -> None:
        refuse_unknown("model", [self.model], WORKLOADS)
        refuse_unknown("variant", [self.variant], VARIANTS)
        if not Path("/proc/self/smaps_rollup").exists():
            raise ConfigError("memory cannot be measured here: it takes /proc/PID/smaps_rollup of Linux")

    def __call__(self) -> list[MemoryCell]:
        """Returns one cell, the same on all ranks."""
        torch.set_num_threads(1)
        with torch.device("meta"):
            WORKLOADS[self.model].make()  # imports what it needs, torchvision say, and takes no memory for numbers
        dist.init_process_group("gloo")
        by_rank = [Memory(0, 0, 0, 0)] * dist.get_world_size()
        dist.all_gather_object(by_rank, self._measure())
        gc.collect()  # ddp/bench/step.py, note "replicas first"
        place = self.place.title(dist.get_world_size())
        shutdown()
        dist.destroy_process_group()
        return [MemoryCell(place=place, name=self.model, variant=self.variant, **max(by_rank)._asdict())]

    def _measure(self) -> Memory:
        """Returns this rank's peak above "before"."""
        with sampling(os.getpid()) as take:
            before = _together(take)
            if self.variant not in ("torch", "alone"):
                init(device="cpu")
            training = Training(self.variant, *make(self.model, rank=dist.get_rank()))
            for _ in range(NUM_STEPS):
                training.step()
            return _together(take) - before


def _together(take: Callable[[], Memory]) -> Memory:
    """Takes the peak once all ranks are here, and lets none go on before all have taken theirs."""
    dist.barrier()
    taken = take()
    dist.barrier()
    return taken
