"""Times training steps: ours, torch's DistributedDataParallel, and the same step without communication.

Every variant trains its own copy of one model on the same batch. The variants take turns (ddp/bench/turns.py); a
repetition is one step: zero_grad, forward, backward, optimizer.

| variant     | what a step is                                                                                     |
|-------------|----------------------------------------------------------------------------------------------------|
| ours        | `ddp.DistributedDataParallel`                                                                      |
| torch       | `torch.nn.parallel.DistributedDataParallel` on Gloo, with gradient_as_bucket_view=True             |
| naive       | `ddp.NaiveDataParallel`: one all-reduce per parameter, after backward                              |
| alone       | no communication; all ranks compute at the same time, as in the others                             |
| in_backward | ours with `step_in_backward`: the optimizer steps a bucket while the next one is in flight         |

All replicas have their default: a forward in training mode begins with a broadcast of rank 0's buffers (BatchNorm's
statistics).

| figure            | meaning                                                                                       |
|-------------------|-----------------------------------------------------------------------------------------------|
| torch ÷ ours      | above 1, ours is faster                                                                       |
| over alone        | ours ÷ alone − 1: what communication adds to a step                                           |
| µs per parameter  | (ours − alone) ÷ parameters: with many tiny ones, the time in the interpreter                 |
| wait              | how long a backward of ours waits for reductions                                              |
| wire              | the least time in which the links of a bed carry the gradients                                |

Note "replicas first". torch's replica holds the process group. If the replica is the last to hold it, the replica's
destructor ends the group with the interpreter lock held, and waits there for Gloo's thread; that thread may be waiting
for the lock, to free a tensor of the last broadcast. Then the rank hangs (torch 2.13, one run in ten of the shortest).
So replicas end before the group does.

`scripts/ddp bench_step` is the command.

Read before: `turns.py`, `workloads.py`, `replica/naive.py`. Read next: `memory.py`.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ddp.bench.place import HERE, Place
from ddp.bench.turns import TimedCell, announce, num_repetitions, slowest, take_turns
from ddp.bench.units import three_digits, written
from ddp.bench.workloads import WORKLOADS, Batch
from ddp.clock import now_s
from ddp.comm.communicator import Communicator
from ddp.comm.setup import init, shutdown
from ddp.drop_in.data_parallel import DistributedDataParallel
from ddp.replica.naive import NaiveDataParallel

VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ours": DistributedDataParallel,
    "torch": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True),
    "naive": NaiveDataParallel,
    "alone": lambda module: module,
    "in_backward": DistributedDataParallel,
}
LEAST_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class StepCell(TimedCell):
    """Holds the figures of one model.

    Attributes:
        num_parameters: tensors that need a gradient.
        wait_s: how long backward waited for reductions, per step of ours, on the rank where that is longest.
        wire_s: the least time in which the links of a bed carry the gradients.
    """

    rival: ClassVar[str] = "torch"
    caption: ClassVar[str] = "ms per step; torch ÷ ours: above 1, ours is faster; over alone: what communication adds"
    num_parameters: int
    wait_s: float | None
    wire_s: float | None

    @property
    def over_alone(self) -> float | None:
        """Returns what communication adds to a step, as a share of the step without it."""
        ratio = self.ratio("ours", "alone")
        return None if ratio is None else ratio - 1

    @property
    def per_parameter_s(self) -> float | None:
        """Returns what communication adds to a step, per parameter."""
        alone_s = self.median_s("alone")
        return None if self.over_alone is None or alone_s is None else self.over_alone * alone_s / self.num_parameters

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        return {
            "model": self.name,
            **{variant: written(three_digits, self.median_s(variant), 1e3) for variant in VARIANTS},
            "torch ÷ ours": written(three_digits, self.speedup),
            "over turns": self.spread,
            "over alone": written("{:+.1%}".format, self.over_alone),
            "µs per parameter": written(three_digits, self.per_parameter_s, 1e6),
            "wait": written(three_digits, self.wait_s, 1e3),
            "wire": written(three_digits, self.wire_s, 1e3),
        }


@dataclass(frozen=True)
class TimeSteps:
    """Times a step of one model. A call runs on every rank, in the environment of torchrun or `ddp.launch`.

    Attributes:
        variants: those of `VARIANTS` that take turns.
    """

    model: str
    variants: tuple[str, ...] = ("ours", "torch", "naive", "alone")
    num_turns: int = 9
    place: Place = HERE

    def __call__(self) -> list[StepCell]:
        """Returns one cell, the same on all ranks."""
        torch.set_num_threads(1)
        comm = init(device="cpu")
        cell = self._measure(comm)
        announce(cell)
        gc.collect()  # note "replicas first"
        shutdown()
        return [cell]

    def _measure(self, comm: Communicator) -> StepCell:
        """Has all replicas in local variables, so that they end here (note "replicas first")."""
        module, batch = make(self.model, rank=comm.rank)
        trainings = {name: Training(name, copy.deepcopy(module), batch) for name in self.variants}
        for training in trainings.values():
            training.find_pace()
        ours = trainings.get("ours")
        waited_s = ours.waited_s() if ours else 0.0
        rivals = {name: partial(training.turn_s, comm) for name, training in trainings.items()}
        turns_s = take_turns(rivals, self.num_turns)
        if ours:
            waited_s = (ours.waited_s() - waited_s) / (self.num_turns * ours.num_steps)
        for name, training in trainings.items():
            if not training.loss.isfinite():
                raise RuntimeError(
                    f"{self.model}, {name}: the loss is {training.loss.item()}; such steps are not timed"
                )
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return StepCell(
            place=self.place.title(comm.world_size, len(comm.hosts)),
            name=self.model,
            turns_s=turns_s,
            num_parameters=len(parameters),
            wait_s=slowest([waited_s])[0] if ours else None,
            wire_s=self.place.wire_s(sum(parameter.numel() * parameter.element_size() for parameter in parameters)),
        )


def make(model: str, *, rank: int) -> tuple[nn.Module, Batch]:
    """Returns the same model on every rank, and a batch of the rank's own."""
    torch.manual_seed(0)
    module = WORKLOADS[model].make()
    torch.manual_seed(1 + rank)
    return module, WORKLOADS[model].batch()


class Training:
    """Trains one variant of a model with its optimizer. The constructor is collective."""

    def __init__(self, variant: str, module: nn.Module, batch: Batch) -> None:
        self.replica, self._batch = VARIANTS[variant](module), batch
        self._optimizer = _optimizer(self.replica.parameters())
        if variant == "in_backward":
            assert isinstance(self.replica, DistributedDataParallel)
            self.replica.step_in_backward(_optimizer)  # which leaves the other optimizer no gradient to step with
        self.loss = torch.zeros(())
        self.num_steps = LEAST_STEPS  # of a turn

    def step(self) -> None:
        """Trains on the batch once."""
        inputs, targets = self._batch
        self._optimizer.zero_grad(set_to_none=True)
        scores = self.replica(inputs)
        loss = F.cross_entropy(scores.flatten(0, -2), targets.flatten())
        loss.backward()
        self._optimizer.step()
        self.loss = loss.detach()

    def find_pace(self) -> None:
        """Warms up, since both classes rebuild their buckets after the first step, and chooses the steps of a turn."""
        start_s = now_s()
        for _ in range(LEAST_STEPS // 2):
            self.step()
        step_s = (now_s() - start_s) / (LEAST_STEPS // 2)
        self.num_steps = num_repetitions(slowest([step_s])[0], least=LEAST_STEPS)

    def turn_s(self, comm: Communicator) -> float:
        """Returns the median step of the rank where that is longest: the others wait for it, or would have to."""
        times_s = []
        comm.barrier()
        for _ in range(self.num_steps):
            start_s = now_s()
            self.step()
            times_s.append(now_s() - start_s)
        return slowest([statistics.median(times_s)])[0]

    def waited_s(self) -> float:
        """Returns how long all backwards of ours have waited for reductions so far."""
        assert isinstance(self.replica, DistributedDataParallel)
        return self.replica.waited.total_s


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)
