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
| fit         | `ddp.fit` on samples in memory: from one step's beginning to the next one's                        |
| fit_noise   | the same, and the gradient noise scale is measured in every step instead of every tenth            |
| lamb        | ours as in `ddp.fit`, with LAMB instead of SGD, and the norm of the gradient                       |
| sharded     | the same, and each rank updates a slice of the parameters (`ddp/strategies/sharded.py`)            |
| by_hand     | the loop of torch's tutorials on the same samples: torch's class, DataLoader, DistributedSampler   |

`fit`, `fit_noise` and `by_hand` fetch a new batch for each step; the others have it. All replicas have their default: a
forward in training mode begins with a broadcast of rank 0's buffers (BatchNorm's statistics).

`StepCell.legend` says what the figures mean.

Note "replicas first". torch's replica holds the process group. If the replica is the last to hold it, the replica's
destructor ends the group with the interpreter lock held, and waits there for Gloo's thread; that thread may be waiting
for the lock, to free a tensor of the last broadcast. Then the rank hangs (torch 2.13, one run in ten of the shortest).
So replicas end before the group does.

`scripts/ddp bench_step` is the command.
"""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import ClassVar

import torch
import torch._dynamo  # torch's optimizers ask for it, and it counts for nobody
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp.bench.place import HERE, Place
from ddp.bench.turns import OVER_TURNS, STEP, TimedCell, announce, num_repetitions, slowest, take_turns
from ddp.bench.workloads import Batch, loss_of, workload
from ddp.comm.communicator import Communicator
from ddp.comm.session import current, init, shutdown
from ddp.data.samples import TensorSet
from ddp.errors import ConfigError
from ddp.optim.lamb import LAMB
from ddp.policies import Folder
from ddp.process.clock import now_s
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.drop_in.data_parallel import DistributedDataParallel
from ddp.replica.naive import NaiveDataParallel
from ddp.replica.replica import Replica
from ddp.replica.sharded import ShardedDataParallel
from ddp.strategies import strategy
from ddp.strategies.choice import strategy_for
from ddp.train.fit import fit
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState
from ddp.train.tasks.cross_entropy import LanguageModel
from ddp.train.tasks.task import Task
from ddp.units import three_digits, written

VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ours": DistributedDataParallel,
    "torch": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True),
    "naive": NaiveDataParallel,
    "alone": lambda module: module,
    "in_backward": DistributedDataParallel,
    "fit": partial(BucketedDataParallel, broadcast_buffers=True),
    "fit_noise": partial(BucketedDataParallel, broadcast_buffers=True),
    "lamb": BucketedDataParallel,
    "sharded": ShardedDataParallel,
    "by_hand": partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True),
}
LEAST_STEPS = 10
PASSES = 16  # batches of each rank in an epoch of `fit`, `fit_noise` and `by_hand`
NOISE_SCALE_EVERY = 10  # steps, which is the default of `fit`


@dataclass(frozen=True, kw_only=True)
class StepCell(TimedCell):
    """Holds the figures of one model.

    Attributes:
        num_parameters: tensors that need a gradient.
        wait_s: how long backward waited for reductions, per step of ours, on the rank where that is longest.
        wire_s: the least time in which the links of a bed carry the gradients.
    """

    rival: ClassVar[str] = "torch"
    legend: ClassVar[Mapping[str, str]] = {
        "model": "what is trained",
        "ours": f"ddp.DistributedDataParallel: {STEP}",
        "torch": "the same of torch's DistributedDataParallel on Gloo",
        "naive": "the same with one all-reduce per parameter, after backward",
        "alone": "the same without communication",
        "in_backward": "ours, with the optimizer inside backward",
        "fit": "ms of a step of ddp.fit, from its beginning to the next one's: fetching, logging and checks included",
        "fit_noise": "the same, and the gradient noise scale is measured in every step",
        "lamb": f"ours with LAMB, and the norm of the gradient: {STEP}",
        "sharded": "the same, and each rank updates a slice of the parameters",
        "by_hand": "the same of torch's class in a loop by hand, with DataLoader and DistributedSampler",
        "torch ÷ ours": "median over turns; above 1, ours is faster",
        "over turns": OVER_TURNS,
        "by_hand ÷ fit": "median over turns; above 1, ddp.fit is faster",
        "lamb ÷ sharded": "median over turns; above 1, sharding is faster",
        "noise scale": "(fit_noise ÷ fit − 1) ÷ 10: what measuring it in every tenth step adds",
        "over alone": "ours ÷ alone − 1: what communication adds to a step",
        "µs per parameter": "(ours − alone) ÷ number of parameter tensors",
        "wait": "ms per step that backward of ours waits for reductions, on the rank where that is longest",
        "wire": "least ms in which the hosts' links carry the gradients of a step",
    }
    num_parameters: int
    wait_s: float | None
    wire_s: float | None

    @property
    def over_alone(self) -> float | None:
        """Returns the time that communication adds to a step, as a share of the step without it."""
        ratio = self.ratio("ours", "alone")
        return None if ratio is None else ratio - 1

    @property
    def over_unmeasured(self) -> float | None:
        """Returns the share that measuring the noise scale in every tenth step adds to the mean step."""
        ratio = self.ratio("fit_noise", "fit")
        return None if ratio is None else (ratio - 1) / NOISE_SCALE_EVERY

    @property
    def per_parameter_s(self) -> float | None:
        """Returns the time that communication adds to a step, per parameter."""
        alone_s = self.median_s("alone")
        return None if self.over_alone is None or alone_s is None else self.over_alone * alone_s / self.num_parameters

    def columns(self) -> dict[str, str]:
        """Returns the line by titles of columns."""
        return {
            "model": self.name,
            **{variant: written(three_digits, self.median_s(variant), 1e3) for variant in VARIANTS},
            "torch ÷ ours": written(three_digits, self.speedup),
            "over turns": self.spread,
            "by_hand ÷ fit": written(three_digits, self.ratio("by_hand", "fit")),
            "lamb ÷ sharded": written(three_digits, self.ratio("lamb", "sharded")),
            "noise scale": written("{:+.2%}".format, self.over_unmeasured),
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
        with session() as comm:
            cell = self._measure(comm)
            announce(cell)
        return [cell]

    def _measure(self, comm: Communicator) -> StepCell:
        """Has all replicas in local variables, so that they end here (note "replicas first")."""
        module, batch = make(self.model, rank=comm.rank)
        trainings = {name: KINDS.get(name, Training)(name, copy.deepcopy(module), batch) for name in self.variants}
        for training in trainings.values():
            training.find_pace()
        ours = trainings.get("ours")
        waited_s = ours.waited_s() if ours else 0.0
        rivals = {name: partial(training.turn_s, comm) for name, training in trainings.items()}
        turns_s = take_turns(rivals, self.num_turns)
        if ours:
            waited_s = (ours.waited_s() - waited_s) / (self.num_turns * ours.num_steps)
        refuse_divergence(self.model, trainings)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return StepCell(
            place=self.place.title(comm.world_size, len(comm.hosts)),
            name=self.model,
            turns_s=turns_s,
            num_parameters=len(parameters),
            wait_s=slowest([waited_s])[0] if ours else None,
            wire_s=self.place.wire_s(sum(parameter.numel() * parameter.element_size() for parameter in parameters)),
        )


@contextmanager
def session() -> Iterator[Communicator]:
    """Yields the communicator of all ranks, each with one thread; ends it after replicas (note "replicas first")."""
    torch.set_num_threads(1)
    yield init(device="cpu")
    gc.collect()
    shutdown()


@contextmanager
def without_communicator(model: str) -> Iterator[None]:
    """Joins torch.distributed on Gloo for a launch that measures memory: a communicator of ours is to count.

    What the model needs was imported before. All ends after replicas (note "replicas first").
    """
    torch.set_num_threads(1)
    with torch.device("meta"), suppress(ConfigError):  # one of the user's own may need numbers
        workload(model).make()  # imports torchvision, say, and takes no memory for numbers
    dist.init_process_group("gloo")
    yield
    gc.collect()
    shutdown()
    dist.destroy_process_group()


def make(model: str, *, rank: int) -> tuple[nn.Module, Batch]:
    """Returns the same model on every rank, and a batch of the rank's own."""
    torch.manual_seed(0)
    chosen = workload(model)
    module = chosen.make()
    torch.manual_seed(1 + rank)
    return module, chosen.batch()


class Training:
    """Trains one variant of a model with its optimizer. The constructor is collective.

    Attributes:
        every: steps of a round, if the last one of these has more to do than the others; a turn has whole rounds.
    """

    every = 1

    def __init__(self, variant: str, module: nn.Module, batch: Batch) -> None:
        self._set_up(VARIANTS[variant](module), batch)
        if variant == "in_backward":
            assert isinstance(self.replica, DistributedDataParallel)
            self.replica.step_in_backward(_optimizer)  # which leaves the other optimizer no gradient to step with

    def _set_up(self, replica: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.replica, self._batch, self._optimizer = replica, batch, optimizer or _optimizer(replica.parameters())
        self.loss, self.num_steps = torch.zeros(()), LEAST_STEPS  # of a turn

    def step(self) -> None:
        """Trains on the batch once."""
        inputs, targets = self._batch
        self._optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.replica(inputs), targets)
        loss.backward()
        self._update()
        self.loss = loss.detach()

    def _update(self) -> None:
        self._optimizer.step()

    def steps_s(self, num_steps: int) -> list[float]:
        """Returns the time of each step."""
        times_s = []
        for _ in range(num_steps):
            start_s = now_s()
            self.step()
            times_s.append(now_s() - start_s)
        return times_s

    def find_pace(self) -> None:
        """Warms up, since both classes rebuild their buckets after the first step, and chooses the steps of a turn."""
        step_s = statistics.fmean(self.steps_s(LEAST_STEPS // 2))
        self.num_steps = num_repetitions(slowest([step_s])[0], least=LEAST_STEPS)

    def turn_s(self, comm: Communicator) -> float:
        """Returns the median step of the rank where that is longest: the others wait for it, or would have to."""
        comm.barrier()
        return slowest([self.of_turn(self.steps_s(self.num_steps))])[0]

    def of_turn(self, steps_s: Sequence[float]) -> float:
        """Returns the time of a step, from those of a turn: a median; of rounds, that of the last steps counts once."""
        last, every = statistics.median(steps_s[self.every - 1 :: self.every]), self.every
        others = [step_s for number, step_s in enumerate(steps_s, 1) if number % every]
        return (last + (every - 1) * statistics.median(others)) / every if others else last

    def waited_s(self) -> float:
        """Returns how long all backwards have waited for reductions so far; 0 if the class is torch's."""
        return self.replica.waited.total_s if isinstance(self.replica, DistributedDataParallel) else 0.0


class Updating(Training):
    """Trains with LAMB; a step ends as in `ddp.fit`."""

    def __init__(self, variant: str, module: nn.Module, batch: Batch) -> None:
        super().__init__(variant, module, batch)
        self._optimizer = LAMB(self.replica.parameters(), lr=1e-4)
        assert isinstance(self.replica, Replica)
        self._strategy = strategy_for(self.replica, self._optimizer)

    def _update(self) -> None:
        strategy.step(self._strategy)


class Fitting(Training):
    """Trains with `ddp.fit`, which logs as it does unless told otherwise, and saves nothing."""

    def __init__(self, variant: str, module: nn.Module, batch: Batch) -> None:
        super().__init__(variant, module, batch)
        self._noise_scale_every = 1 if variant == "fit_noise" else 0
        self._comm = current()
        shared = [self._comm.broadcast(part.clone()) for part in batch]  # all ranks have the same samples
        inputs, targets = (torch.cat([part] * (PASSES * self._comm.world_size)) for part in shared)
        self._samples = TensorSet(inputs, targets)

    def steps_s(self, num_steps: int) -> list[float]:
        """Returns the time of each step of a fit, from its beginning to the next one's."""
        starts = StepStarts()
        state = fit(
            self.replica,
            self._samples,
            self._optimizer,
            loss=_as_task(self._samples.targets),
            global_batch=len(self._batch[0]) * self._comm.world_size,
            max_steps=num_steps + 1,
            folder=Folder(None, noise_scale_every=self._noise_scale_every, progress=False),
            callbacks=[starts],
        )
        self.loss = torch.tensor(state.train_loss)
        return [end - start for start, end in pairwise(starts.seen_s)]


class StepStarts(Callback):
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.seen_s: list[float] = []

    def step_start(self, state: TrainState) -> None:
        self.seen_s.append(now_s())


class ByHand(Training):
    """Trains as torch's tutorials do."""

    def __init__(self, variant: str, module: nn.Module, batch: Batch) -> None:
        super().__init__(variant, module, batch)
        samples = TensorDataset(*(torch.cat([part] * (PASSES * dist.get_world_size())) for part in batch))
        self._sampler: DistributedSampler[Batch] = DistributedSampler(samples)
        self._loader = DataLoader(samples, batch_size=len(batch[0]), sampler=self._sampler)

    def steps_s(self, num_steps: int) -> list[float]:
        """Returns the time of each step, from its beginning to the next one's."""
        starts_s = [now_s()]
        for epoch in count():
            self._sampler.set_epoch(epoch)
            for batch in self._loader:
                self._batch = batch
                self.step()
                starts_s.append(now_s())
                if len(starts_s) > num_steps:
                    return [end - start for start, end in pairwise(starts_s)]
        raise AssertionError("the loop above has no other end")


KINDS: dict[str, type[Training]] = {
    "fit": Fitting,
    "fit_noise": Fitting,
    "lamb": Updating,
    "sharded": Updating,
    "by_hand": ByHand,
}


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def _as_task(targets: Tensor) -> nn.Module | Task:
    """Returns the loss of `loss_of`, as `ddp.fit` takes it."""
    if targets.is_floating_point():
        return nn.MSELoss()
    return LanguageModel() if targets.dim() > 1 else nn.CrossEntropyLoss()


def refuse_divergence(model: str, trainings: Mapping[str, Training]) -> None:
    """Raises RuntimeError if a loss is not finite any more, because such steps take another time."""
    for name, training in trainings.items():
        if not training.loss.isfinite():
            raise RuntimeError(f"{model}, {name}: the loss is {training.loss.item()}; such steps are not timed")


def timed(model: str, trainings: Mapping[str, Training], comm: Communicator, num_turns: int) -> dict[str, list[float]]:
    """Returns what the turns of each training have taken, in s per step. Collective.

    Raises:
        RuntimeError: a loss is not finite any more.
    """
    for training in trainings.values():
        training.find_pace()
    turns_s = take_turns({name: partial(each.turn_s, comm) for name, each in trainings.items()}, num_turns)
    refuse_divergence(model, trainings)
    return turns_s
