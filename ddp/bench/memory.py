"""How much memory a worker needs to train: the peak of its PSS, less what it had before its model was built.

Each variant has a launch of its own, so that no other's memory counts for it:

    import everything, join torch.distributed   ── before
    build the model, wrap it, make its batch    ┐  peak while building
    some steps                                  ┘  peak while training
                                                   the worker's figure: the higher peak − before; reported: the highest

The communicator is made after "before", so its memory is ours and not everyone's. For scale, "alone" is the same
training without communication: parameters, gradients, momentum, activations, and pages of torch's libraries that come
in when they are first used.

Note "files". A library's page is shared by all processes that have it mapped, also by strangers: when a neighbour
starts or ends a torch of its own, this part of a worker's PSS falls or rises, and the figure with it. So it is shown
beside heap and shared memory, which are the worker's own; compare those where it differs between variants.

`scripts/bench_step --memory` is the command line. Read next: ddp/bench/pss.py, which samples.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch._dynamo
import torch.distributed as dist

from ddp.bench.pss import Memory, Peaks, Sampler
from ddp.bench.step import USUAL, Training, make, refuse_unknown, wrap
from ddp.bench.workloads import WORKLOADS
from ddp.comm.setup import init, shutdown
from ddp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MemoryFigures:
    """One variant of one model; bytes of PSS above "before", of the worker with the highest peak.

    Attributes:
        building, training: at the peak of either time, all PSS and its parts.
        num_samples, interval_s, longest_gap_s: how many while training, how far apart in the mean and at most.
    """

    workload: str
    variant: str
    world_size: int
    building: Memory
    training: Memory
    num_samples: int
    interval_s: float
    longest_gap_s: float

    @property
    def peak_bytes(self) -> int:
        return max(self.building.pss, self.training.pss)


def measure_memory(
    workload_name: str, variant: str, *, num_steps: int = 6, broadcast_buffers: bool = True
) -> MemoryFigures:
    """Runs on every rank of one host, in the environment that `ddp.launch` gives; the same figures on all of them.

    Raises:
        ConfigError: an unknown workload or variant, or a system that does not tell the PSS.
    """
    refuse_unknown("model", [workload_name], WORKLOADS)
    refuse_unknown("variant", [variant], USUAL)
    torch.set_num_threads(1)
    with torch.device("meta"):
        WORKLOADS[workload_name].make()  # imports what it needs, torchvision say, and takes no memory for numbers
    dist.init_process_group("gloo")
    figures = _measured(workload_name, variant, num_steps=num_steps, broadcast_buffers=broadcast_buffers)
    gc.collect()  # ddp/bench/step.py, note "replicas first"
    shutdown()
    dist.destroy_process_group()
    return figures


def _measured(workload_name: str, variant: str, *, num_steps: int, broadcast_buffers: bool) -> MemoryFigures:
    with contextlib.ExitStack() as stack:
        sampler = _start_sampler(stack)
        before = _take(sampler)
        if variant in ("ours", "naive"):
            init(device="cpu")
        module, batch = make(workload_name, rank=dist.get_rank())
        step = Training(wrap(variant, module, broadcast_buffers=broadcast_buffers), batch)
        building = _take(sampler)
        for _ in range(num_steps):
            step()
        training = _take(sampler)
    return MemoryFigures(
        workload=workload_name,
        variant=variant,
        world_size=len(before.by_process),
        building=_highest(building, before),
        training=_highest(training, before),
        num_samples=training.num_samples,
        interval_s=training.interval_s,
        longest_gap_s=training.longest_gap_s,
    )


def _start_sampler(stack: contextlib.ExitStack) -> Sampler | None:
    """On rank 0, for all ranks."""
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    problem, sampler = [""], None
    if dist.get_rank() == 0:
        try:
            sampler = stack.enter_context(Sampler(pids))
        except OSError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise ConfigError(f"memory cannot be measured here: {problem[0]}; it takes /proc/PID/smaps_rollup of Linux")
    return sampler


def _take(sampler: Sampler | None) -> Peaks:
    """Collective: all ranks have done what is to be counted, and none goes on before it is."""
    dist.barrier()
    found = [None if sampler is None else sampler.take()]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    return found[0]


def _highest(peaks: Peaks, before: Peaks) -> Memory:
    above: Sequence[Memory] = [peak - start for peak, start in zip(peaks.by_process, before.by_process, strict=True)]
    return max(above)
