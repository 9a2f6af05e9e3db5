"""How long a training step takes: torch's DistributedDataParallel, ours, and the same step without communication.

Every variant trains its own copy of one model on the same batch. They take turns, some steps each, so that a
machine whose speed drifts is the same machine for all of them; ratios are taken turn by turn, and their median is
reported.

    in turn        ours ▓▓▓▓▓   torch ▓▓▓▓▓   alone ▓▓▓▓▓   ours ▓▓▓▓▓   torch ▓▓▓▓▓   …
    one figure     median over turns of (median step of ours ÷ median step of torch)
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp.clock import now_s
from ddp.comm.communicator import Communicator
from ddp.comm.setup import init, shutdown
from ddp.models.cnn import CNN
from ddp.models.gpt import GPT
from ddp.models.mlp import MLP
from ddp.models.resnet import resnet
from ddp.replica.data_parallel import DistributedDataParallel, NaiveDataParallel

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, and one worker's batch for it."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]


def _images(n: int, channels: int, size: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(n, channels, size, size), torch.randint(0, 10, (n,)))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "digits-cnn",  # the default job: global batch 64 on two workers
            lambda: CNN(in_channels=1, image_size=8, num_classes=10),
            _images(32, 1, 8),
        ),
        Workload("resnet18-32px", lambda: resnet("resnet18", num_classes=10, small_images=True), _images(16, 3, 32)),
        Workload("mlp-25m", lambda: MLP(in_features=1024, hidden=(4096, 4096), num_classes=1000), _images(64, 1, 32)),
        Workload(
            "gpt-10m",
            lambda: GPT(vocab_size=256, context=128, width=384, depth=6, heads=6),
            lambda: (torch.randint(0, 256, (4, 128)), torch.randint(0, 256, (4, 128))),
        ),
    )
}


@dataclass(frozen=True)
class StepFigures:
    """Medians of one workload: step times in seconds, and ratios over turns.

    Attributes:
        ours_s, torch_s, naive_s, alone_s: one step; `alone_s` is without communication.
        over_torch: ours ÷ torch's; below 1 is faster.
        over_alone: ours ÷ alone; what communication costs.
    """

    workload: str
    world_size: int
    ours_s: float
    torch_s: float
    naive_s: float
    alone_s: float
    over_torch: float
    over_alone: float


def measure_step(workload_name: str, *, num_turns: int = 9, steps_per_turn: int = 10) -> StepFigures:
    """Runs on every rank; all ranks return rank 0's kind of figures, each its own times."""
    comm = init()
    workload = WORKLOADS[workload_name]
    torch.manual_seed(0)
    module = workload.make()
    batch = workload.batch()
    variants: dict[str, nn.Module] = {
        "ours": DistributedDataParallel(copy.deepcopy(module), broadcast_buffers=False),
        "torch": nn.parallel.DistributedDataParallel(copy.deepcopy(module), gradient_as_bucket_view=True),
        "naive": NaiveDataParallel(copy.deepcopy(module), broadcast_buffers=False),
        "alone": module,
    }
    turns = {name: _Turn(comm, replica, batch) for name, replica in variants.items()}
    for turn in turns.values():
        turn.median_step_s(max(3, steps_per_turn // 2))  # warm up; torch rebuilds its buckets after the first step
    medians: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(num_turns):
        for name, turn in turns.items():
            medians[name].append(turn.median_step_s(steps_per_turn))
    shutdown()
    middle = {name: statistics.median(values) for name, values in medians.items()}
    return StepFigures(
        workload=workload_name,
        world_size=comm.world_size,
        ours_s=middle["ours"],
        torch_s=middle["torch"],
        naive_s=middle["naive"],
        alone_s=middle["alone"],
        over_torch=_median_ratio(medians["ours"], medians["torch"]),
        over_alone=_median_ratio(medians["ours"], medians["alone"]),
    )


class _Turn:
    """One variant with its optimizer."""

    def __init__(self, comm: Communicator, replica: nn.Module, batch: Batch) -> None:
        self._comm, self._replica, self._batch = comm, replica, batch
        self._optimizer = torch.optim.SGD(replica.parameters(), lr=1e-4, momentum=0.9)

    def median_step_s(self, num_steps: int) -> float:
        inputs, targets = self._batch
        times = []
        self._comm.barrier()
        for _ in range(num_steps):
            start_s = now_s()
            self._optimizer.zero_grad(set_to_none=True)
            scores = self._replica(inputs)
            F.cross_entropy(scores.flatten(0, -2), targets.flatten()).backward()
            self._optimizer.step()
            times.append(now_s() - start_s)
        return statistics.median(times)


def _median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
