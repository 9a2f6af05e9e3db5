"""Measures on this host how much slower ranks compute that share its cores and memory: none of them communicates.

    alone       one process trains on as many samples as a rank had in the profiled run; the others wait
    at once     all processes train on as many samples as a rank would have

They take turns, because the speed of a machine that others use, too, changes from second to second.

The ratio, with the numbers of samples taken out, is what a forecast multiplies computing by. So it also holds what a
small share costs more than in proportion.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch

import ddp
from ddp.comm.objects import all_gather_object
from ddp.data.loading.loader import EvaluationLoader
from ddp.data.loading.source import source_of
from ddp.process.clock import now_s
from ddp.run.assembly import components
from ddp.run.launch.from_python import launch
from ddp.run.settings.config import Config

NUM_WARM_UP, NUM_TURNS, TURN_S, TIMEOUT_S = 2, 7, 0.3, 300


def slow_down(config: Config, *, before: int, samples: int, num_ranks: int, threads: int) -> float:
    """Returns by which factor ranks compute slower than in proportion to their samples.

    Args:
        config: of a run, as `commands/finished.py` reads it.
        before: samples of the rank that was profiled; samples: of each of `num_ranks` on one host.
    """
    work = partial(_slow_down, config, before=before, samples=samples)
    return float(launch(work, workers=num_ranks, threads_per_worker=threads, timeout_s=TIMEOUT_S)[0])


def _slow_down(config: Config, *, before: int, samples: int) -> float:
    comm = ddp.init(device="cpu")
    splits = components.load_held_out(config)
    task = components.make_task(config, splits)
    source = source_of(splits.test, what="data", collate=splits.collate)
    torch.manual_seed(config.seed)
    model = components.make_model(config, splits).train()

    def batch_of(num_samples: int) -> Any:
        samples, collate = source.samples, source.collate
        return next(iter(EvaluationLoader(samples, batch_size=num_samples, rank=0, world_size=1, collate=collate)))

    def step_s(batch: Any) -> float:
        began_s = now_s()
        model.zero_grad(set_to_none=True)
        loss_sum, _ = task.loss(model, batch)
        loss_sum.backward()
        return now_s() - began_s

    def typical_s(batch: Any) -> float:
        times_s: list[float] = []
        while not times_s or sum(times_s) < TURN_S:
            times_s.append(step_s(batch))
        return statistics.median(times_s)

    most = len(source.samples)
    one, many = batch_of(min(before, most)), batch_of(min(samples, most))
    for _ in range(NUM_WARM_UP):
        step_s(one)
        step_s(many)
    factors: list[float] = []
    for _ in range(NUM_TURNS):
        comm.barrier()
        alone_s = typical_s(one) if comm.rank == 0 else 0.0
        comm.barrier()
        times = all_gather_object(comm, (alone_s, typical_s(many)))
        together_s = statistics.median(at_once_s for _, at_once_s in times)
        factors.append(together_s / min(samples, most) / (times[0][0] / min(before, most)))
    ddp.shutdown()
    return statistics.median(factors)
