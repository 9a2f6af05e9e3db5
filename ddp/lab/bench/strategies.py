"""Times and counts training by each strategy on one job, beside torch's classes.

| strategy        | what a step is                                                                                   |
|-----------------|--------------------------------------------------------------------------------------------------|
| mirrored        | every rank has all parameters and state, and makes the whole update (`strategies/replicated.py`) |
| sharded         | each rank updates a slice, and gives it to all (`strategies/sharded.py`)                         |
| central_storage | the ranks of a host share parameters and state (`strategies/central_storage.py`)                 |
| local_sgd       | a rank's own; every eighth ends with an exchange of weights (`strategies/local_sgd.py`)          |
| by_hand         | `ddp.BucketedDataParallel`, and then the optimizer: what `mirrored` does, without the word       |
| torch           | `torch.nn.parallel.DistributedDataParallel` on Gloo, with gradient_as_bucket_view=True           |
| torch_zero      | the same with torch's `ZeroRedundancyOptimizer`: each rank updates some of the tensors           |
| alone           | no communication; all ranks compute at the same time, and each makes the whole update            |

All have the same optimizer: torch's fused AdamW, or LAMB (`ddp/optim/lamb.py`). The first three find the norm of the
global gradient in every step, as `ddp.fit` does, and local_sgd that of its own; the others do not. A step of local_sgd
is the mean over rounds.

Times are those of turns in one launch (ddp/lab/bench/step.py, where a repetition is one step). The bytes of parameters
and state are counted there, too, and on a bed the bytes that leave a host. Memory is measured in a separate launch for
each strategy, so that no other's counts for it:

    import everything, join torch.distributed               ── before
    build the model, its optimizer and strategy, some steps ── peak − before, summed over the ranks of the host

`scripts/ddp bench strategies` is the command.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.session import init
from ddp.lab.bench.counts import bytes_in, bytes_sent, sampling, spans_of
from ddp.lab.bench.place import HERE, Place
from ddp.lab.bench.step import Training, make, session, timed, without_communicator
from ddp.lab.bench.turns import OVER_TURNS, STEP, TimedCell, announce, slowest
from ddp.lab.bench.workloads import Batch, loss_of
from ddp.optim.lamb import LAMB
from ddp.replica.bucketed import BucketedDataParallel
from ddp.strategies.central_storage import CentralStorage
from ddp.strategies.local_sgd import LocalSteps
from ddp.strategies.replicated import Replicated
from ddp.strategies.sharded import Sharded
from ddp.strategies.strategy import step
from ddp.units import three_digits, written

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "lamb": partial(LAMB, lr=1e-4),
}
KINDS: dict[str, type[Replicated]] = {
    "mirrored": Replicated,
    "sharded": Sharded,
    "central_storage": CentralStorage,
    "local_sgd": LocalSteps,
}
EVERY = 8  # steps of local_sgd from one exchange to the next
OF_TORCH: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True),
    "torch_zero": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True),
    "alone": lambda module: module,
}
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {"by_hand": BucketedDataParallel, **OF_TORCH}
STRATEGIES = (*KINDS, *WRAPS)
NUM_STEPS = 4  # of which the first makes the state, and the second has the layout of buckets that stays
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StrategyCell(TimedCell):
    """Holds the figures of one job, by strategy: a line for each.

    Attributes:
        peak: bytes above "before" of all ranks of a host.
        held: bytes of parameters and optimizer state on a host, where that is most.
        sent: bytes that leave a host in a step, where that is most, for each sample of the global batch; on a bed.
    """

    rival: ClassVar[str] = "torch"
    legend: ClassVar[Mapping[str, str]] = {
        "job": "what is trained, and the optimizer",
        "strategy": "who holds the model, and who updates it (ddp/lab/bench/strategies.py)",
        "step": STEP,
        "÷ sharded": "step ÷ that of sharded, median over turns",
        "÷ by_hand": "the same of the class by hand",
        "over alone": "step ÷ alone − 1: what communication adds; each of alone's workers makes the whole update",
        "torch ÷": "torch's class ÷ step: above 1, it is faster than torch's class",
        "over turns": OVER_TURNS,
        "peak": "MiB above what the workers of a host had before the model, together; shared memory counts once",
        "÷ mirrored": "peak ÷ that of mirrored",
        "held": "MiB of parameters and optimizer state on a host",
        "sent": "bytes that leave a host for each sample of the global batch",
    }
    peak: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, float] = field(default_factory=dict)

    @property
    def drawn(self) -> Sequence[str]:
        return list(self.turns_s)

    def rows(self) -> list[dict[str, str]]:
        """Returns a line for each strategy, by titles of columns."""
        return [self._row(one) for one in dict.fromkeys((*self.turns_s, *self.peak))]

    def columns(self) -> dict[str, str]:
        return self.rows()[0]

    def _row(self, one: str) -> dict[str, str]:
        over_alone, ratios = self.ratio(one, "alone"), self.ratios("torch", one)
        peaks = self.peak.get(one), self.peak.get("mirrored")
        return {
            "job": self.name,
            "strategy": one,
            "step": written(three_digits, self.median_s(one), 1e3),
            "÷ sharded": written("{:.3f}".format, self.ratio(one, "sharded")),
            "÷ by_hand": written("{:.3f}".format, self.ratio(one, "by_hand")),
            "over alone": written("{:+.1%}".format, None if over_alone is None else over_alone - 1),
            "torch ÷": written(three_digits, self.ratio("torch", one)),
            "over turns": f"{three_digits(min(ratios))} – {three_digits(max(ratios))}" if ratios else "",
            "peak": written("{:.1f}".format, peaks[0], 1 / MIB),
            "÷ mirrored": written("{:.2f}".format, peaks[0] / peaks[1] if peaks[0] and peaks[1] else None),
            "held": written("{:.1f}".format, self.held.get(one), 1 / MIB),
            "sent": written("{:,.0f}".format, self.sent.get(one)),
        }


def merged(cells: Iterable[StrategyCell]) -> list[StrategyCell]:
    """Returns one cell for each job and place, with all that is known of it."""
    found: dict[tuple[str, str], StrategyCell] = {}
    for cell in cells:
        known = found.setdefault((cell.place, cell.name), cell)
        found[cell.place, cell.name] = replace(
            known,
            turns_s={**known.turns_s, **cell.turns_s},
            peak={**known.peak, **cell.peak},
            held={**known.held, **cell.held},
            sent={**known.sent, **cell.sent},
        )
    return list(found.values())


# --- One strategy trains a model -------------------------------------------------------------------------------------


class StrategyTraining(Training):
    """Trains a module by one strategy. The constructor is collective."""

    def __init__(self, name: str, optimizer: str, module: nn.Module, batch: Batch) -> None:
        self.module, self._strategy = module, None
        make_optimizer, parameters = OPTIMIZERS[optimizer], module.parameters()
        if name in KINDS:
            self._strategy = KINDS[name](module, make_optimizer(parameters))
            self._set_up(self._strategy.model, batch, self._strategy.optimizer)
        elif name == "torch_zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # here, because torch warns of what it imports

            sharded = ZeroRedundancyOptimizer(parameters, cast("type[Optimizer]", make_optimizer))
            self._set_up(WRAPS[name](module), batch, sharded)
        else:
            self._set_up(WRAPS[name](module), batch, make_optimizer(parameters))
        self._sent, self._num_counted = 0, 0
        self.every, self._number = EVERY if name == "local_sgd" else 1, 0

    def step(self) -> None:
        if self._strategy is None:
            super().step()
            return
        inputs, targets = self._batch
        self._number += 1
        is_last = self._number % self.every == 0
        self._optimizer.zero_grad(set_to_none=True)
        with self._strategy.micro_batch(is_last=is_last):
            loss = loss_of(self.replica(inputs), targets)
            loss.backward()
        if is_last:
            step(self._strategy)
        self.loss = loss.detach()

    def find_pace(self) -> None:
        super().find_pace()
        self.num_steps = math.ceil(self.num_steps / self.every) * self.every
        self.steps_s(-self._number % self.every)  # so that a turn has whole rounds

    def turn_s(self, comm: Communicator) -> float:
        comm.barrier()
        before = bytes_sent()
        took_s = super().turn_s(comm)
        comm.barrier()
        self._sent, self._num_counted = self._sent + bytes_sent() - before, self._num_counted + self.num_steps
        return took_s

    def sent(self) -> float:
        """Returns the bytes that have left this host in a step."""
        return self._sent / self._num_counted

    def held(self) -> list[Tensor]:
        """Returns parameters and state on this rank."""
        inner = getattr(self._optimizer, "optim", self._optimizer)  # of torch's ZeroRedundancyOptimizer: this rank's
        state = (value for each in inner.state.values() for value in each.values() if isinstance(value, Tensor))
        return [*self.module.parameters(), *state]


# --- Jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeStrategies:
    """Times a step by each strategy. A call runs on every rank, in the environment of torchrun or `ddp.launch`.

    Attributes:
        optimizer: one of `OPTIMIZERS`.
        strategies: those of `STRATEGIES` that take turns.
    """

    model: str
    optimizer: str = "adamw"
    strategies: tuple[str, ...] = STRATEGIES
    num_turns: int = 9
    place: Place = HERE

    def __call__(self) -> list[StrategyCell]:
        """Returns one cell, the same on all ranks."""
        with session() as comm:
            cell = self._measure(comm)
            announce(cell)
        return [cell]

    def _measure(self, comm: Communicator) -> StrategyCell:
        module, batch = make(self.model, rank=comm.rank)
        trainings = {
            name: StrategyTraining(name, self.optimizer, copy.deepcopy(module), batch) for name in self.strategies
        }
        turns_s = timed(self.model, trainings, comm, self.num_turns)
        samples = _total(len(batch[0]))
        return StrategyCell(
            place=self.place.title(comm.world_size, len(comm.hosts)),
            name=f"{self.model}, {self.optimizer}",
            turns_s=turns_s,
            held={name: _held(each.held(), comm) for name, each in trainings.items()},
            sent={name: slowest([each.sent()])[0] / samples for name, each in trainings.items() if self.place.bed},
        )


@dataclass(frozen=True)
class MeasureStrategy:
    """Measures the memory of one strategy. A call runs on every rank of one host, as that of `TimeStrategies`."""

    model: str
    optimizer: str
    strategy: str
    place: Place = HERE

    def __call__(self) -> list[StrategyCell]:
        """Returns one cell, the same on all ranks."""
        with without_communicator(self.model):
            peak, place = self._measure(), self.place.title(dist.get_world_size())
        return [StrategyCell(place=place, name=f"{self.model}, {self.optimizer}", turns_s={}, peak=peak)]

    def _measure(self) -> dict[str, int]:
        """Returns the peak of all ranks above "before", which rank 0 samples."""
        pids: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(pids, os.getpid())
        with sampling(*pids) if dist.get_rank() == 0 else contextlib.nullcontext(lambda: 0) as take:
            before = _together(take)
            if self.strategy not in OF_TORCH:
                init(device="cpu")
            training = StrategyTraining(self.strategy, self.optimizer, *make(self.model, rank=dist.get_rank()))
            for _ in range(NUM_STEPS * training.every):
                training.step()
            peak = _together(take) - before
        return {self.strategy: _total(peak)}


def _together(take: Callable[[], int]) -> int:
    """Takes the peak once all ranks are here, and lets none go on before it is taken."""
    dist.barrier()
    taken = take()
    dist.barrier()
    return taken


def _total(number: int) -> int:
    """Returns the sum over all ranks. Collective."""
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total)


def _held(tensors: Iterable[Tensor], comm: Communicator) -> int:
    """Returns the bytes of these tensors of all ranks of a host, where that is most. Collective."""
    found = all_gather_object(comm, spans_of(tensors))
    return max(bytes_in(chain.from_iterable(found[rank] for rank in host)) for host in comm.hosts)
