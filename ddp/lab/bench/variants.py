"""Trains a model in one of several ways, whose steps are timed and whose memory is counted.

| variant           | a step                                                                                           |
|-------------------|--------------------------------------------------------------------------------------------------|
| ours              | `ddp.DistributedDataParallel`                                                                    |
| torch             | `torch.nn.parallel.DistributedDataParallel` on Gloo, with gradient_as_bucket_view=True           |
| copied            | ours without direct gradients (`replica/direct.py`): buckets copy all of them                    |
| naive             | `ddp.NaiveDataParallel`: one all-reduce per parameter, after backward                            |
| alone             | no communication; all ranks compute at the same time, as in the others                           |
| in_backward       | ours with `step_in_backward`: the optimizer steps a bucket while the next one is in flight       |
| bucketed          | `ddp.BucketedDataParallel`, without the parts that only torch's contract needs                   |
| fit               | `ddp.fit` on samples in memory: from one step's beginning to the next one's                      |
| fit_noise         | the same, and the gradient noise scale is measured in every step instead of every tenth          |
| by_hand           | the loop of torch's tutorials on the same samples: torch's class, DataLoader, DistributedSampler |
| mirrored          | every rank makes the whole update (`strategies/strategy.py`)                                     |
| sharded           | each rank updates a slice, and gives it to all (`strategies/sharded.py`)                         |
| fully_sharded     | each rank keeps a slice of parameters, gradients and state (`strategies/fully_sharded.py`)       |
| central_storage   | the ranks of a host share parameters and state (`strategies/central_storage.py`)                 |
| local_sgd         | each rank trains separately; every eighth step averages weights (`strategies/local_sgd.py`)      |
| torch_zero        | torch with its `ZeroRedundancyOptimizer`: each rank updates some of the tensors                  |
| fully_shard       | torch's `fully_shard` (FSDP2) of each unit of fully_sharded, and of the model                    |
| same_bits         | bucketed with num_shards=8: a forward and a backward for each of the worker's shards             |
| accumulated       | bucketed with the same forwards, added up by ranks: all but the last in `no_sync`                |
| torch_accumulated | the same of torch's class                                                                        |

`fit`, `fit_noise` and `by_hand` fetch a new batch for each step; the others have it. The strategies find the norm of
the global gradient in every step, as `ddp.fit` does; local_sgd that of its own, and its step is the mean over rounds.
The last three find the mean of `bucketed` but for rounding. `ours`, `torch` and `fit` have their default: a forward in
training mode begins with a broadcast of rank 0's buffers (BatchNorm's statistics).
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Any, cast

import torch
import torch._dynamo  # torch's optimizers ask for it, and it is not part of a step
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp.collectives.shards import shards_of_rank
from ddp.comm.session import current
from ddp.data.samples import TensorSet
from ddp.errors import ConfigError
from ddp.lab.bench.turns import bytes_sent, num_repetitions, slowest
from ddp.lab.bench.workloads import Batch, loss_of
from ddp.optim.trust_ratio import LAMB
from ddp.policies import NUM_SHARDS, Folder
from ddp.process.clock import now_s
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.drop_in.data_parallel import DistributedDataParallel
from ddp.replica.fully_sharded import FullyShardedDataParallel
from ddp.replica.naive import NaiveDataParallel
from ddp.replica.units import unit_modules
from ddp.strategies import strategy
from ddp.strategies.central_storage import CentralStorage
from ddp.strategies.fully_sharded import FullySharded
from ddp.strategies.local_sgd import LocalSteps
from ddp.strategies.sharded import Sharded
from ddp.strategies.strategy import Replicated
from ddp.train.fit import fit
from ddp.train.steps.callbacks import Callback
from ddp.train.steps.state import TrainState
from ddp.train.steps.task import LanguageModel, Task
from ddp.units import counted

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=1e-4, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-4, fused=True),
    "lamb": partial(LAMB, lr=1e-4),
}
WARM_UP = 5  # steps
PASSES = 16  # batches of each rank in an epoch of `fit`, `fit_noise` and `by_hand`
EVERY = 8  # steps of local_sgd from one exchange to the next


class Training:
    """Trains one variant of a model with its optimizer, in turns with others. Collective to make.

    Attributes:
        every: steps of a round, if the last one of these has more to do than the others; a turn has whole rounds.
        least: steps of a turn.
        optimizers: all that hold state.
        num_counted: steps of all turns so far.
    """

    every, least = 1, 10

    def __init__(self, replica: nn.Module, batch: Batch, optimizer: Optimizer) -> None:
        self.replica, self.batch, self.optimizers = replica, batch, [optimizer]
        self.loss, self.num_steps = torch.zeros(()), self.least  # of a turn
        self.num_counted, self._sent, self._waited_s = 0, 0, 0.0  # of all turns

    def step(self) -> None:
        """Trains on the batch once."""
        inputs, targets = self.batch
        self.optimizers[0].zero_grad(set_to_none=True)
        loss = loss_of(self.replica(inputs), targets)
        loss.backward()
        self.optimizers[0].step()
        self.loss = loss.detach()

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
        step_s = statistics.median(self.steps_s(WARM_UP))
        self.num_steps = num_repetitions(slowest([step_s])[0], least=self.least)

    def turn_s(self) -> float:
        """Returns the median step of the rank where that is longest: the others wait for it, or would have to."""
        dist.barrier()
        sent, waited_s = bytes_sent(), self.waited_s()
        took_s = slowest([self.of_turn(self.steps_s(self.num_steps))])[0]
        dist.barrier()
        self._sent, self._waited_s = self._sent + bytes_sent() - sent, self._waited_s + self.waited_s() - waited_s
        self.num_counted += self.num_steps
        return took_s

    def of_turn(self, steps_s: Sequence[float]) -> float:
        """Returns the time of a step, from those of a turn: a median; of rounds, that of the last steps counts once."""
        last, every = statistics.median(steps_s[self.every - 1 :: self.every]), self.every
        others = [step_s for number, step_s in enumerate(steps_s, 1) if number % every]
        return (last + (every - 1) * statistics.median(others)) / every if others else last

    def waited_s(self) -> float:
        """Returns how long all backwards have waited for reductions so far; 0 for a class that does not measure it."""
        return self.replica.waited.total_s if isinstance(self.replica, DistributedDataParallel) else 0.0

    def wait_s(self) -> float:
        """Returns how long the backward of a step has waited, on the rank where that is longest. Collective."""
        return slowest([self._waited_s / self.num_counted])[0]

    def sent(self) -> float:
        """Returns the bytes that have left a host in a step, where that is most. Collective."""
        return slowest([self._sent / self.num_counted])[0]

    def held(self) -> list[Tensor]:
        """Returns parameters and state on this rank."""
        inner = (getattr(each, "optim", each) for each in self.optimizers)  # of ZeroRedundancyOptimizer: this rank's
        states = (state for each in inner for state in each.state.values())
        replica = self.replica
        kept = replica.units.slices() if isinstance(replica, FullyShardedDataParallel) else replica.parameters()
        found = [*kept, *(v for state in states for v in state.values() if isinstance(v, Tensor))]
        return [each.to_local() if hasattr(each, "to_local") else each for each in found]  # torch's fully_shard


class ByStrategy(Training):
    """Trains by a strategy, with its update."""

    def __init__(self, made: Replicated, batch: Batch, every: int = 1) -> None:
        super().__init__(made.model, batch, made.optimizer)
        self.strategy, self.every, self._number = made, every, 0

    def step(self) -> None:
        inputs, targets = self.batch
        self._number += 1
        is_last = self._number % self.every == 0
        self.optimizers[0].zero_grad(set_to_none=True)
        with self.strategy.micro_batch(is_last=is_last):
            loss = loss_of(self.replica(inputs), targets)
            loss.backward()
        if is_last:
            strategy.step(self.strategy)
        self.loss = loss.detach()

    def find_pace(self) -> None:
        super().find_pace()
        self.num_steps = math.ceil(self.num_steps / self.every) * self.every
        self.steps_s(-self._number % self.every)  # so that a turn has whole rounds


class Fitting(Training):
    """Trains with `ddp.fit`, which logs as by default, and saves nothing."""

    noise_scale_every = 0

    def steps_s(self, num_steps: int) -> list[float]:
        """Returns the time of each step of a fit, from its beginning to the next one's."""
        comm, starts = current(), StepStarts()
        shared = [comm.broadcast(part.clone()) for part in self.batch]  # all ranks have the same samples
        inputs, targets = (torch.cat([part] * (PASSES * comm.world_size)) for part in shared)
        state = fit(
            self.replica,
            TensorSet(inputs, targets),
            self.optimizers[0],
            loss=_as_task(targets),
            global_batch=len(self.batch[0]) * comm.world_size,
            max_steps=num_steps + 1,
            folder=Folder(None, noise_scale_every=self.noise_scale_every, progress=False),
            callbacks=[starts],
        )
        self.loss = torch.tensor(state.train_loss)
        return [end - start for start, end in pairwise(starts.seen_s)]


class FittingWithNoise(Fitting):
    """Trains with `ddp.fit`, which measures the noise scale in every step."""

    noise_scale_every = 1


class StepStarts(Callback):
    """A callback that records when each step begins."""

    def __init__(self) -> None:
        self.seen_s: list[float] = []

    def step_start(self, state: TrainState) -> None:
        self.seen_s.append(now_s())


class ByHand(Training):
    """Trains as torch's tutorials do."""

    def __init__(self, replica: nn.Module, batch: Batch, optimizer: Optimizer) -> None:
        super().__init__(replica, batch, optimizer)
        samples = TensorDataset(*(torch.cat([part] * (PASSES * dist.get_world_size())) for part in batch))
        self._sampler: DistributedSampler[Batch] = DistributedSampler(samples)
        self._loader = DataLoader(samples, batch_size=len(batch[0]), sampler=self._sampler)

    def steps_s(self, num_steps: int) -> list[float]:
        """Returns the time of each step, from its beginning to the next one's."""
        starts_s = [now_s()]
        for epoch in count():
            self._sampler.set_epoch(epoch)
            for batch in self._loader:
                self.batch = batch
                self.step()
                starts_s.append(now_s())
                if len(starts_s) > num_steps:
                    return [end - start for start, end in pairwise(starts_s)]
        raise AssertionError("the loop above has no other end")


class Accumulating(Training):
    """Cuts the batch into the shards of this rank, and adds up their gradients by ranks: the last backward reduces.

    Raises:
        ConfigError: the worker's batch has fewer samples than it has shards.
    """

    def __init__(self, replica: nn.Module, batch: Batch, optimizer: Optimizer) -> None:
        super().__init__(replica, batch, optimizer)
        self.shards = shards_of_rank(dist.get_rank(), dist.get_world_size(), NUM_SHARDS)
        if len(batch[0]) < len(self.shards):
            raise ConfigError(
                f"a worker's batch of {counted(len(batch[0]), 'sample')} cannot be cut into {len(self.shards)} "
                "shards: take more workers, or another model"
            )
        self._parts = list(zip(*(part.tensor_split(len(self.shards)) for part in batch), strict=True))

    def step(self) -> None:
        self.optimizers[0].zero_grad(set_to_none=True)
        for shard, (inputs, targets) in zip(self.shards, self._parts, strict=True):
            with self.block(shard) as scale:
                loss = loss_of(self.replica(inputs), targets)
                (loss if scale is None else loss * scale).backward()
                self.loss = loss.detach()
        self.optimizers[0].step()

    @contextlib.contextmanager
    def block(self, shard: int) -> Any:
        """Yields the factors on the loss of a shard; None for no factor."""
        replica: Any = self.replica
        with contextlib.nullcontext() if shard == self.shards[-1] else replica.no_sync():
            yield dist.get_world_size() / NUM_SHARDS


class ByShards(Accumulating):
    """Adds up the gradients of all shards in an order that does not depend on the ranks."""

    def block(self, shard: int) -> Any:
        replica: Any = self.replica
        return replica.shard(shard)


def _as_task(targets: Tensor) -> nn.Module | Task:
    """Returns the loss of `loss_of`, as `ddp.fit` takes it."""
    if targets.is_floating_point():
        return nn.MSELoss()
    return LanguageModel() if targets.dim() > 1 else nn.CrossEntropyLoss()


# --- The table -------------------------------------------------------------------------------------------------------

MakeTraining = Callable[[nn.Module, Batch, MakeOptimizer], Training]
_torch = partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
_broadcasting = partial(BucketedDataParallel, broadcast_buffers=True)


def _in(wrap: Callable[[nn.Module], nn.Module], kind: type[Training] = Training) -> MakeTraining:
    def made(module: nn.Module, batch: Batch, make_optimizer: MakeOptimizer) -> Training:
        replica = wrap(module)
        return kind(replica, batch, make_optimizer(replica.parameters()))

    return made


def _by(kind: type[Replicated], every: int = 1) -> MakeTraining:
    return lambda module, batch, make: ByStrategy(kind(module, make(module.parameters())), batch, every)


def _in_backward(module: nn.Module, batch: Batch, make_optimizer: MakeOptimizer) -> Training:
    replica = DistributedDataParallel(module)
    training = Training(replica, batch, make_optimizer(replica.parameters()))  # which is left no gradient

    def of_bucket(parameters: Iterable[nn.Parameter]) -> Optimizer:
        training.optimizers.append(make_optimizer(parameters))
        return training.optimizers[-1]

    replica.step_in_backward(of_bucket)
    return training


def _torch_zero(module: nn.Module, batch: Batch, make_optimizer: MakeOptimizer) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here, because torch warns of what it imports

    sliced = ZeroRedundancyOptimizer(module.parameters(), cast("type[Optimizer]", make_optimizer))
    return Training(_torch(module), batch, sliced)


def _fully_shard(module: nn.Module, batch: Batch, make_optimizer: MakeOptimizer) -> Training:
    from torch.distributed.device_mesh import init_device_mesh  # here, because torch warns of what it imports
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*unit_modules(module).values(), module):
        fully_shard(each, mesh=mesh)
    return Training(module, batch, make_optimizer(module.parameters()))


VARIANTS: Mapping[str, MakeTraining] = {
    "ours": _in(DistributedDataParallel),
    "torch": _in(_torch),
    "copied": _in(partial(DistributedDataParallel, direct_gradients=False)),
    "naive": _in(NaiveDataParallel),
    "alone": _in(lambda module: module),
    "in_backward": _in_backward,
    "bucketed": _in(BucketedDataParallel),
    "fit": _in(_broadcasting, Fitting),
    "fit_noise": _in(_broadcasting, FittingWithNoise),
    "by_hand": _in(_torch, ByHand),
    "mirrored": _by(Replicated),
    "sharded": _by(Sharded),
    "fully_sharded": _by(FullySharded),
    "central_storage": _by(CentralStorage),
    "local_sgd": _by(LocalSteps, EVERY),
    "torch_zero": _torch_zero,
    "fully_shard": _fully_shard,
    "same_bits": _in(partial(BucketedDataParallel, num_shards=NUM_SHARDS), ByShards),
    "accumulated": _in(BucketedDataParallel, Accumulating),
    "torch_accumulated": _in(_torch, Accumulating),
}
