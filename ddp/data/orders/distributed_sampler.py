"""Samplers for your own training loop.

    DistributedSampler    a drop-in for torch's class: the same indices, with an epoch that moves by itself
    EvaluationSampler     each sample exactly once over all ranks, one contiguous run per rank

Ranks read positions rank, rank + W, … of the epoch's permutation, which is lengthened from its own beginning (or cut:
`drop_last`) to a multiple of W. torch's class repeats its first order forever unless the caller sets the epoch; here
finished pass k over the sampler yields what torch's class yields after `set_epoch(k)`.

Note "finished". An aborted pass does not count, and of several passes at once over one epoch only one does; so a rank
may read one batch, and still reads the same epoch as the others. A pass is finished once its last index has been handed
out, because the sampler cannot see which of its indices were used. So reading the first batch finishes a pass that has
no more batches than a DataLoader reads for it: 1, or num_workers * prefetch_factor. Call `set_epoch` then, or after
epochs whose last batch is never read.

Note "resumed by StatefulDataLoader". When torchdata's loader takes the indices of a batch, it saves the states of the
sampler and of the iterator over it, and keeps them with that batch. So the number of indices that the iterator had
handed out by then is the position after the batch. Under a plain DataLoader the same number is wrong: that loader reads
ahead, and keeps no state with a batch. Only the iterator's state holds the position. Pass the sampler as `sampler=`,
because StatefulDataLoader saves no state of a sampler inside torch's BatchSampler.

Cost: each pass makes one permutation (4 bytes a sample), copies this rank's part of it (4 / W bytes a sample) and frees
the rest. The part becomes Python integers in blocks, so the first index does not wait for a list of all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ddp.data.orders.steps import SamplerState, read_state, replicas
from ddp.errors import ConfigError

_BLOCK = 4096  # indices that become Python integers at a time
_IN_THE_ITERATOR = {"position": "in the iterator's state"}  # what StatefulDataLoader saves as the sampler's own state


class _Stage(Enum):
    """The progress of a pass."""

    COMING = auto()
    ANNOUNCED = auto()  # coming, and set_epoch has named its epoch
    BEGUN = auto()  # an iterator has asked for its first index
    FINISHED = auto()  # an iterator has handed out its last index


@dataclass
class _Pass:
    """One pass over an epoch: all iterators that began before one of them had finished."""

    epoch: int
    start: int  # global position where it begins; 0 unless it was resumed
    stage: _Stage = _Stage.COMING


class DistributedSampler(Sampler[int]):
    """Yields each rank's indices as `torch.utils.data.DistributedSampler` does, and moves to the next epoch by itself.

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
        self.num_replicas, self.rank = replicas(num_replicas, rank)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self._pass = _Pass(epoch=0, start=0)  # the running or last one; the next one, if none has begun

    @property
    def epoch(self) -> int:
        """Returns the epoch of the running or last pass, or of the next one if none has begun."""
        return self._pass.epoch

    @property
    def num_samples(self) -> int:
        """Returns the number of indices per rank in a whole epoch."""
        return self._num_samples_from(0)

    @property
    def total_size(self) -> int:
        """Returns the number of indices of all ranks in a whole epoch."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        """Returns this rank's indices in the running or next pass: `num_samples`, or the rest of a resumed epoch."""
        return self._num_samples_from(self._pass.start)

    def _num_samples_from(self, start: int) -> int:
        left = max(0, len(self.dataset) - start)
        return left // self.num_replicas if self.drop_last else math.ceil(left / self.num_replicas)

    def __iter__(self) -> _Indices:
        return _Indices(self)

    def _coming(self) -> _Pass:
        """Returns the pass that an iterator belongs to if it begins now."""
        this = self._pass
        return _Pass(this.epoch + 1, start=0) if this.stage is _Stage.FINISHED else this

    def _share(self, epoch: int, position: int) -> Tensor:
        """Returns this rank's indices of an epoch from a global position on, [number]."""
        length, number = len(self.dataset), self._num_samples_from(position)
        order = self._order(epoch)
        share = order[position + self.rank :: self.num_replicas][:number]
        if len(share) < number:  # by 1, which is taken from the beginning of the order
            padding = (position + self.rank + len(share) * self.num_replicas) % length
            share = torch.cat((share, order[padding : padding + 1]))
        return share.clone()  # so that the order is freed

    def _order(self, epoch: int) -> Tensor:
        """Returns the samples of an epoch in torch's order, [length]."""
        length = len(self.dataset)
        # torch draws the same permutation for both types, and the smaller one in two thirds of the time.
        dtype = torch.int32 if length < 2**31 else torch.int64
        if not self.shuffle:
            return torch.arange(length, dtype=dtype)
        generator = torch.Generator().manual_seed(self.seed + epoch)  # torch's key, not our "order" stream
        return torch.randperm(length, generator=generator, dtype=dtype)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that of `epoch`. A position that was loaded for this epoch stays."""
        stays = epoch == self._pass.epoch and self._pass.stage is not _Stage.FINISHED
        self._pass = _Pass(epoch, self._pass.start if stays else 0, _Stage.ANNOUNCED)

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Returns {seed, epoch, consumed}, equal on all ranks.

        Args:
            consumed: samples of the running epoch that all ranks together have trained on; `total_size` (or more) when
                it is over. It may be left out while no pass has begun. torchdata's StatefulDataLoader leaves it out
                always, because it saves the state of the iterator, too.

        Raises:
            ConfigError: `consumed` is missing in the middle of a pass. The sampler cannot know it, because a loader
                reads ahead.
        """
        if consumed is None:
            # Only the stack tells this caller from one whose loader reads ahead, which must be refused below.
            if str(sys._getframe(1).f_globals.get("__name__")).startswith("torchdata."):
                return _IN_THE_ITERATOR.copy()
            if self._pass.stage in (_Stage.BEGUN, _Stage.FINISHED):
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
        """Makes the next pass the rest of the saved epoch, which the present ranks share."""
        if state == _IN_THE_ITERATOR:
            return  # StatefulDataLoader loads the iterator's state next
        self.seed, epoch, consumed = read_state(state, length=len(self.dataset))
        self._pass = _Pass(epoch, consumed)


class _Indices(Iterator[int]):
    """Hands out this rank's indices of one pass, and counts them: see "resumed by StatefulDataLoader".

    It belongs to a pass from its first index on, because DataLoader sometimes makes an iterator twice.
    """

    def __init__(self, sampler: DistributedSampler) -> None:
        self._sampler = sampler
        self._pass: _Pass | None = None
        self._seed = sampler.seed  # of its pass, because the sampler may load another one in the meantime
        self._indices: Iterator[int] = iter(())
        self._end, self._num_left = 0, 0  # global position after the last index; indices not handed out yet

    def __next__(self) -> int:
        this = self._pass or self._begin(self._sampler._coming())
        index = next(self._indices)
        self._num_left -= 1
        if not self._num_left:
            this.stage = _Stage.FINISHED
        return index

    def _begin(self, this: _Pass, position: int | None = None) -> _Pass:
        """Joins a pass, of which it hands out the indices after a global position."""
        position = this.start if position is None else position
        share = self._sampler._share(this.epoch, position)
        self._sampler._pass = self._pass = this
        self._seed = self._sampler.seed
        self._indices = chain.from_iterable(block.tolist() for block in share.split(_BLOCK))
        self._num_left = len(share)
        self._end = position + self._num_left * self._sampler.num_replicas
        this.stage = _Stage.BEGUN if self._num_left else _Stage.FINISHED
        return this

    def state_dict(self) -> dict[str, int]:
        """Returns {seed, epoch, consumed, start}: a sampler's state, and where its pass began. Equal on all ranks."""
        if self._pass is None:
            this = self._sampler._coming()
            return {**SamplerState(self._sampler.seed, this.epoch, this.start)._asdict(), "start": this.start}
        over = len(self._sampler.dataset)  # what follows the last index is padding, or dropped
        consumed = self._end - self._num_left * self._sampler.num_replicas if self._num_left else over
        return {**SamplerState(self._seed, self._pass.epoch, consumed)._asdict(), "start": self._pass.start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes this iterator the rest of the saved pass, and that pass the sampler's running one.

        StatefulDataLoader calls it when the pass begins, which may be after `set_epoch`. A saved pass from which some
        but not all indices were handed out is resumed anyway. Any other gives way to an epoch that `set_epoch` named.

        Raises:
            ConfigError: a field is missing, or the position lies outside this data set.
        """
        sampler, length = self._sampler, len(self._sampler.dataset)
        sampler.seed, _, _ = read_state(state, length=length)
        this, consumed = _Pass(int(state["epoch"]), int(state["start"])), int(state["consumed"])
        names_other_epoch = sampler._pass.stage is _Stage.ANNOUNCED and sampler._pass.epoch != this.epoch
        if this.start < consumed < length or not names_other_epoch:
            self._begin(this, consumed)


# --- Evaluation: each sample exactly once over all ranks -------------------------------------------------------------


class EvaluationSampler(Sampler[int]):
    """Gives each sample to exactly one rank: rank r reads [r*n//W, (r+1)*n//W), in the data set's order.

    Shares differ by at most one sample, and a rank may have none. So reduce metrics as (sum, count).

    Attributes:
        share: the indices of this rank.

    Raises:
        ConfigError: `rank` outside [0, num_replicas), or no default for them.
    """

    def __init__(
        self, dataset_or_length: Sized | int, *, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        self.num_replicas, self.rank = replicas(num_replicas, rank)
        length = dataset_or_length if isinstance(dataset_or_length, int) else len(dataset_or_length)
        begin, end = (r * length // self.num_replicas for r in (self.rank, self.rank + 1))
        self.share = range(begin, end)

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Iterator[int]:
        return iter(self.share)
