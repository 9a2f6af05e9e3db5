"""Which samples a rank reads, in which order: three samplers, whose state is three numbers or nothing.

    DistributedSampler   drop-in for torch's class: pads or drops, so that all ranks read equally many
    TrainSampler         for `fit`: each sample exactly once per epoch, in steps of a global batch
    EvaluationSampler    each sample exactly once over all ranks, one contiguous run per rank

The state is (seed, epoch, consumed), and `consumed` counts *global* samples of the epoch. No rank occurs in it, so it
is O(1), equal on all ranks, and valid at any other world size.

How TrainSampler cuts an epoch (B = 10 samples a step, V = 4 shards, W = 2 workers, micro-batches of at most 2):

    permutation   |............ consumed ............|  0  1  2  3  4  5  6  7  8  9  |.......
    shards        boundary i at position i*B//V         0  1 |2  3  4 |5  6 |7  8  9 |
    workers       boundary r at shard r*V//W            rank 0        |rank 1        |
    micro-batches parts of one shard, evenly            01   |2  34   |56   |7  89   |

Proof that the shares of two workers differ by at most one sample if W divides V: rank r begins at shard rV/W, that
is at position floor((rV/W) B/V) = floor(rB/W), and consecutive floors of multiples of B/W differ by floor(B/W) or
ceil(B/W). The same holds for the shards with V for W. If W does not divide V, one worker computes at most one shard
more than another, so that shares differ by at most one shard and one sample.

Shards hang on V alone and micro-batches on their shard alone: a step's parts, and the random streams keyed by them, are
the same at every world size.

Cost: one permutation per epoch (8 bytes a sample); a step costs its own indices.
Read before: streams.py. Read next: loader.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from ddp.data.streams import order_generator
from ddp.errors import ConfigError


class SamplerState(NamedTuple):
    """Where a run stands in its data."""

    seed: int
    epoch: int
    consumed: int  # global samples of this epoch that were trained on


# -------------------------------------------------------------------------------------------------- drop-in for torch's


@dataclass
class _Pass:
    """One way through an epoch, or several at once: all iterators that began before one of them had finished."""

    epoch: int
    start: int  # global position where it begins; not 0 only when resumed
    begun: bool = False
    finished: bool = False


class DistributedSampler(Sampler[int]):
    """Each rank's indices as `torch.utils.data.DistributedSampler` gives them, with an epoch that moves by itself.

    Finished pass k over the sampler yields what torch's class yields after `set_epoch(k)`; without that call torch's
    class repeats its first order for ever. Ranks read positions rank, rank + W, ... of the epoch's permutation, which
    is lengthened from its own beginning (or cut: `drop_last`) to a multiple of W.

    Note "finished": a pass that was broken off does not count, and of several passes at once over one epoch only one
    does; so a rank may look at a batch, and still reads the same epoch as the others. A pass is finished once its last
    index has been handed out, because the sampler cannot see who reads. So a look at the first batch finishes a pass
    that has no more batches than a DataLoader reads for it: 1, or num_workers * prefetch_factor; call `set_epoch` then,
    or after epochs that never read their last batch.

    Args:
        dataset: anything with a length.
        num_replicas, rank: default to the initialised `torch.distributed`.
        shuffle, seed, drop_last: as in torch's class.

    Raises:
        ConfigError (a ValueError): `rank` outside [0, num_replicas), or no default for them.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.num_replicas, self.rank = _replicas(num_replicas, rank)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._pass = _Pass(epoch=0, start=0)  # the running or last one; the next one, if none has begun

    @property
    def epoch(self) -> int:
        """Returns the epoch of the running or last pass, or of the next one if none has begun."""
        return self._pass.epoch

    @property
    def num_samples(self) -> int:
        """Indices per rank in a whole epoch."""
        return self._num_samples_from(0)

    @property
    def total_size(self) -> int:
        """Indices of all ranks in a whole epoch."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        """Indices of this rank in the running or next pass: `num_samples`, or what is left of a resumed epoch."""
        return self._num_samples_from(self._pass.start)

    def _num_samples_from(self, start: int) -> int:
        left = max(0, len(self.dataset) - start)
        return left // self.num_replicas if self.drop_last else math.ceil(left / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        # A generator, so that a pass begins with its first index: DataLoader sometimes asks for an iterator twice.
        if self._pass.finished:
            self._pass = _Pass(self._pass.epoch + 1, start=0)
        this = self._pass  # of this iterator; the sampler may have left it behind when it ends
        this.begun = True
        order = self._order()
        end = this.start + len(self) * self.num_replicas
        positions = range(this.start + self.rank, end, self.num_replicas)
        this.finished = this.finished or not positions
        for position in positions:
            this.finished = this.finished or position == positions[-1]
            yield order[position % len(order)]  # padding begins again at the front

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # torch's key, not our "order" stream
        order: list[int] = torch.randperm(len(self.dataset), generator=generator).tolist()
        return order

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that of `epoch`. Not needed; does no harm to a position that was loaded."""
        stays = epoch == self._pass.epoch and not self._pass.finished
        self._pass = _Pass(epoch, self._pass.start if stays else 0)

    def state_dict(self, *, consumed: int | None = None) -> dict[str, int]:
        """{seed, epoch, consumed}, equal on all ranks.

        Args:
            consumed: samples of the running epoch that all ranks together have trained on; `total_size` (or more) when
                it is over. May be left out only while no pass has begun.

        Raises:
            ConfigError: `consumed` is missing in the middle of a pass. The sampler cannot know it: a loader reads
                ahead.
        """
        if consumed is None:
            if self._pass.begun:
                raise ConfigError(
                    f"state_dict() in the middle of epoch {self.epoch} needs consumed=: the global number of samples "
                    "trained on in it (the loader reads ahead, so the sampler cannot know); pass total_size at its end"
                )
            consumed = self._pass.start
        if consumed < 0:
            raise ConfigError(f"consumed must be at least 0, got {consumed}")
        end = min(self.total_size, len(self.dataset))  # what follows is padding, or dropped
        over = 0 < end <= consumed
        return SamplerState(self.seed, self.epoch + over, 0 if over else consumed)._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass the rest of the saved epoch, shared by the ranks there are now."""
        self.seed, epoch, consumed = _read_state(state, length=len(self.dataset))
        self._pass = _Pass(epoch, consumed)


# ------------------------------------------------------------------------------------------------------ for training


class Micro(NamedTuple):
    """What one forward and backward computes: part `part` of shard `shard` of a step."""

    shard: int
    part: int
    indices: tuple[int, ...]  # never empty


class StepPlan(NamedTuple):
    """One step: `size` samples from global `position` of `epoch`; `micros` are this rank's (none if it has none)."""

    epoch: int
    position: int
    size: int
    micros: tuple[Micro, ...]

    @property
    def num_samples_local(self) -> int:
        """This rank's share of `size`."""
        return sum(len(micro.indices) for micro in self.micros)


class TrainSampler:
    """Steps of a global batch over an epoch's permutation: nothing padded, nothing dropped, nothing by rank.

    The last step of an epoch may be smaller, and a rank may then have no sample at all.

    A step is a transaction: `plans()` looks ahead without moving, `commit(plan)` moves once the step has happened.

        for plan in sampler.plans():    # from the state to the end of its epoch
            ...                         # forward, backward, agree, optimizer step
            sampler.commit(plan)

    Args:
        length: number of samples of the data set.
        global_batch: samples per step of all ranks together, at least `world_size`.
        rank, world_size: whose share to plan.
        num_shards: parts that a step is cut into, fixed for a run; at least `world_size`, which is the default. A
            multiple of every world size to be used keeps shares equal to one sample.
        micro_size: most samples in one forward; None for whole shards.
        seed, shuffle: of the order.

    Raises:
        ConfigError: one of these cannot work; says which, and what to do.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch: int,
        rank: int,
        world_size: int,
        num_shards: int | None = None,
        micro_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        num_shards = world_size if num_shards is None else num_shards
        if length < 1:
            raise ConfigError(f"the training set has {length} samples; check its path and its split")
        _replicas(world_size, rank)
        if global_batch < world_size:
            raise ConfigError(
                f"a global batch of {global_batch} cannot be shared by {world_size} workers: "
                f"raise it to {world_size} or more, or use {max(global_batch, 1)} worker(s)"
            )
        if num_shards < world_size:
            raise ConfigError(
                f"num_shards={num_shards} is less than {world_size} workers, so some would compute nothing: "
                f"set it to a multiple of {world_size}"
            )
        if micro_size is not None and micro_size < 1:
            raise ConfigError(f"micro_size must be at least 1, got {micro_size}; leave it out for whole shards")
        self.length, self.global_batch, self.num_shards, self.micro_size = length, global_batch, num_shards, micro_size
        self.rank, self.world_size, self.shuffle = rank, world_size, shuffle
        self._state = SamplerState(seed, epoch=0, consumed=0)
        self._ordered: tuple[tuple[int, int], Tensor] | None = None  # ((seed, epoch), permutation [length])

    @property
    def num_steps_per_epoch(self) -> int:
        """Steps of a whole epoch, the smaller last one included."""
        return math.ceil(self.length / self.global_batch)

    @property
    def state(self) -> SamplerState:
        """After the last committed step."""
        return self._state

    def plans(self) -> Iterator[StepPlan]:
        """The steps from the present state to the end of its epoch. The state stays where it is."""
        return self._plans_from(self._state)  # the state of now, not that of the first next()

    def _plans_from(self, state: SamplerState) -> Iterator[StepPlan]:
        order = self._order(state.seed, state.epoch)
        for position in range(state.consumed, self.length, self.global_batch):
            step = order[position : position + self.global_batch]
            yield StepPlan(state.epoch, position, len(step), tuple(self._micros(step)))

    def _order(self, seed: int, epoch: int) -> Tensor:
        """The samples of an epoch in the order of training, [length]."""
        if self._ordered is None or self._ordered[0] != (seed, epoch):
            generator = order_generator(seed, epoch)
            order = torch.randperm(self.length, generator=generator) if self.shuffle else torch.arange(self.length)
            self._ordered = (seed, epoch), order
        return self._ordered[1]

    def _micros(self, step: Tensor) -> Iterator[Micro]:
        """This rank's parts of the samples of a step, [size]."""
        size, num_shards = len(step), self.num_shards
        first, end = (rank * num_shards // self.world_size for rank in (self.rank, self.rank + 1))
        for shard in range(first, end):
            indices = step[shard * size // num_shards : (shard + 1) * size // num_shards].tolist()
            num_parts = math.ceil(len(indices) / (self.micro_size or max(1, len(indices))))
            for part in range(num_parts):
                begin, stop = (i * len(indices) // num_parts for i in (part, part + 1))
                yield Micro(shard, part, tuple(indices[begin:stop]))

    def commit(self, plan: StepPlan) -> None:
        """Moves the state past a step that has happened; at the epoch's end, to the beginning of the next.

        Raises:
            ConfigError: the plan does not begin where the state stands (a step was left out, or committed twice).
        """
        seed, epoch, consumed = self._state
        if (plan.epoch, plan.position) != (epoch, consumed):
            raise ConfigError(
                f"the step at epoch {plan.epoch}, position {plan.position} cannot be committed: the sampler stands at "
                f"epoch {epoch}, position {consumed}; commit each plan once, in the order of plans()"
            )
        consumed += plan.size
        self._state = SamplerState(seed, epoch, consumed)
        if consumed >= self.length:
            self._state = SamplerState(seed, epoch + 1, 0)

    def state_dict(self) -> dict[str, int]:
        """{seed, epoch, consumed}, equal on all ranks; valid at any world size, global batch or number of shards."""
        return self._state._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from there, with the saved seed.

        Raises:
            ConfigError: a field is missing, or the position lies outside this data set.
        """
        self._state = _read_state(state, length=self.length)


# ----------------------------------------------------------------------------------------------------- for evaluation


class EvaluationSampler(Sampler[int]):
    """Each sample exactly once over all ranks: rank r reads [r*n//W, (r+1)*n//W), in the data set's order.

    Shares differ by at most one sample, and a rank may have none; so reduce metrics as (sum, count).

    Attributes:
        share: the indices of this rank.

    Raises:
        ConfigError: `rank` outside [0, num_replicas), or no default for them.
    """

    def __init__(
        self, dataset_or_length: Sized | int, *, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        self.num_replicas, self.rank = _replicas(num_replicas, rank)
        length = dataset_or_length if isinstance(dataset_or_length, int) else len(dataset_or_length)
        begin, end = (r * length // self.num_replicas for r in (self.rank, self.rank + 1))
        self.share = range(begin, end)

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Iterator[int]:
        return iter(self.share)


# -------------------------------------------------------------------------------------------------- arguments and state


def _replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Both numbers, taken from `torch.distributed` where they are None, and checked."""
    if num_replicas is None or rank is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"num_replicas={num_replicas} and rank={rank} have no default, as torch.distributed is not "
                "initialised: call ddp.init() first, or pass both"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    if num_replicas < 1:
        raise ConfigError(f"the number of workers must be at least 1, got {num_replicas}")
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"invalid rank {rank}: with {num_replicas} workers it must lie in [0, {num_replicas - 1}]")
    return num_replicas, rank


def _read_state(state: Mapping[str, Any], *, length: int) -> SamplerState:
    missing = [name for name in SamplerState._fields if name not in state]
    if missing:
        raise ConfigError(f"a sampler's state needs {', '.join(SamplerState._fields)}; missing: {', '.join(missing)}")
    loaded = SamplerState(*(int(state[name]) for name in SamplerState._fields))
    if loaded.epoch < 0 or not 0 <= loaded.consumed <= length:
        raise ConfigError(
            f"{loaded} is no position in a data set of {length} samples: "
            "it was saved with another data set; give that one, or start without the sampler's state"
        )
    return loaded if loaded.consumed < length else SamplerState(loaded.seed, loaded.epoch + 1, 0)
