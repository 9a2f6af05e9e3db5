"""A drop-in for `torch.utils.data.DistributedSampler`: the same indices, with an epoch that moves by itself.

Ranks read positions rank, rank + W, … of the epoch's permutation, which is lengthened from its own beginning (or cut:
`drop_last`) to a multiple of W. torch's class repeats its first order for ever unless the caller sets the epoch; here
finished pass k over the sampler yields what torch's class yields after `set_epoch(k)`.

Note "finished". A pass that was broken off does not count, and of several passes at once over one epoch only one
does; so a rank may look at a batch, and still reads the same epoch as the others. A pass is finished once its last
index has been handed out, because the sampler cannot see which of its indices were used. So a look at the first batch
finishes a pass that has no more batches than a DataLoader reads for it: 1, or num_workers * prefetch_factor. Call
`set_epoch` then, or after epochs whose last batch is never read.

Read before: `sampler.py`. Read next: `loader.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from ddp.data.sampler import SamplerState, read_state, replicas
from ddp.errors import ConfigError


@dataclass
class _Pass:
    """One pass over an epoch: all iterators that began before one of them had finished."""

    epoch: int
    start: int  # global position where it begins; not 0 only when resumed
    begun: bool = False
    finished: bool = False


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

    def __iter__(self) -> Iterator[int]:
        # A generator, so that a pass begins with its first index: DataLoader sometimes makes an iterator twice.
        if self._pass.finished:
            self._pass = _Pass(self._pass.epoch + 1, start=0)
        this = self._pass  # of this iterator, because the sampler may be in another pass when it ends
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
        """Makes the next pass that of `epoch`. A position that was loaded for this epoch stays."""
        stays = epoch == self._pass.epoch and not self._pass.finished
        self._pass = _Pass(epoch, self._pass.start if stays else 0)

    def state_dict(self, *, consumed: int | None = None) -> dict[str, int]:
        """Returns {seed, epoch, consumed}, equal on all ranks.

        Args:
            consumed: samples of the running epoch that all ranks together have trained on; `total_size` (or more) when
                it is over. It may be left out only while no pass has begun.

        Raises:
            ConfigError: `consumed` is missing in the middle of a pass. The sampler cannot know it, because a loader
                reads ahead.
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
        self.seed, epoch, consumed = read_state(state, length=len(self.dataset))
        self._pass = _Pass(epoch, consumed)
