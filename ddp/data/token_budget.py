"""Steps with a budget of tokens: many short samples, or a few long ones, and hardly any padding.

    lengths, sorted      3 3 3 4 4 │ 6 6 7 7 7 │ 11 12 12      buckets of about equal lengths
    a budget of 16       4 samples   2 samples   1 sample      budget ÷ the longest of the bucket
    steps of an epoch    7 7 │ 3 4 3 │ 12 │ 6 7 │ 3 4 │ …      batches of all buckets, in a random order

Samples are shuffled inside their bucket, and the batches of all buckets in an epoch. In a bucket the longest sample is
at most an eighth longer than the shortest, unless it would be too small for one batch. So a batch has little padding,
shards of equal counts have equal tokens, and every rank has the same number of steps.

Where a step begins depends on the position alone, not on the seed, so all epochs have the same number of steps.

Cost: 16 bytes a sample, and 8 a step.

Read before: `steps.py`. Read next: `lanes.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ddp.data.orders import Order, key_of, starts_of
from ddp.data.permutation import Indices, Permutations
from ddp.data.steps import Steps
from ddp.data.streams import stream_seed
from ddp.errors import ConfigError


class TokenBudget(Order, Steps):
    """Cuts an epoch into steps of samples whose tokens, padded to the longest one's, fit a budget.

    Args:
        tokens: most tokens of a step, of all ranks together.
        lengths: of each sample, [n], in tokens.

    Raises:
        ConfigError: a sample is longer than the budget, or has no length.
    """

    def __init__(self, tokens: int, lengths: ArrayLike) -> None:
        values = np.asarray(lengths, dtype=np.int64)
        if values.ndim != 1 or not len(values):
            raise ConfigError(f"lengths has the shape {list(values.shape)}: give one number for each sample")
        if values.min() < 0:
            raise ConfigError(f"lengths[{values.argmin()}]={values.min()}: a sample has at least 0 tokens")
        if values.max() > tokens:
            raise ConfigError(
                f"tokens={tokens}: sample {values.argmax()} alone has {values.max()}; take a budget of at least that, "
                "or cut long samples"
            )
        self.tokens, self.num_samples, self.length = tokens, len(values), len(values)
        self._sorted = np.argsort(values, kind="stable")
        self._bucket_starts, most = _buckets(values[self._sorted], tokens)
        self._bucket_sizes = np.diff(np.append(self._bucket_starts, self.length))
        num_batches = -(-self._bucket_sizes // most)
        bucket = np.repeat(np.arange(len(num_batches)), num_batches)
        number = np.arange(len(bucket)) - starts_of(num_batches)[bucket]
        # Batches of a bucket are of one size, or differ by one sample.
        self._begins, ends = (
            self._bucket_starts[bucket] + each * self._bucket_sizes[bucket] // num_batches[bucket]
            for each in (number, number + 1)
        )
        self._sizes = ends - self._begins
        self._epoch: tuple[int, Indices, Indices] | None = None

    def _batches(self, epoch: int) -> tuple[Indices, Indices]:
        """Returns the batches in the order of an epoch, [K], and where each begins and the last one ends, [K + 1]."""
        found = self._epoch
        if found is None or found[0] != epoch:
            num = len(self._sizes)
            batches = Permutations(stream_seed(0, "batches", epoch), largest=num).places(np.arange(num), size=num)
            self._epoch = found = epoch, batches, np.concatenate([[0], np.cumsum(self._sizes[batches])])
        return found[1:]  # not the attribute, which another thread may have changed

    # As an order

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        batches, starts = self._batches(epoch)
        step = np.searchsorted(starts, positions, side="right") - 1
        place = self._begins[batches[step]] + positions - starts[step]  # among the sorted samples
        bucket = np.searchsorted(self._bucket_starts, place, side="right") - 1
        first = self._bucket_starts[bucket]
        shuffle = Permutations(key_of(seed, epoch), largest=int(self._bucket_sizes.max()))
        mixed = shuffle.places(place - first, size=self._bucket_sizes[bucket], group=bucket)
        found: Indices = self._sorted[first + mixed]
        return found

    def in_words(self) -> str:
        """Returns the budget."""
        return f"of up to {self.tokens:,} tokens"

    # As steps

    def size_at(self, position: int) -> int:
        """Returns the size of the step that begins after `position` samples of the run."""
        epoch, place = divmod(position, self.length)
        _, starts = self._batches(epoch)
        return int(starts[np.searchsorted(starts, place, side="right")]) - place

    def num_steps(self, begin: int, end: int) -> int:
        """Returns the number of steps that lead from one position to another, or just beyond it."""
        return max(0, self._number(end) - self._number(begin + 1) + 1)

    def after(self, begin: int, num_steps: int) -> int:
        """Returns the position after some steps."""
        if not num_steps:
            return begin
        epoch, number = divmod(self._number(begin + 1) - 1 + num_steps, len(self._sizes))
        return epoch * self.length + int(self._batches(epoch)[1][number])

    def _number(self, position: int) -> int:
        """Returns how many steps of the run begin before a position."""
        epoch, place = divmod(position, self.length)
        return epoch * len(self._sizes) + int(np.searchsorted(self._batches(epoch)[1], place))

    def all(self) -> set[int]:
        """Returns the sizes that the steps of a run may have."""
        return set(self._sizes.tolist())

    @property
    def num_steps_per_epoch(self) -> int:
        """Returns the number of steps of an epoch."""
        return len(self._sizes)

    @property
    def usual(self) -> int:
        """Returns the mean number of samples of a step."""
        return round(self.length / len(self._sizes))

    @property
    def setting(self) -> str:
        """Returns the budget."""
        return f"{self.tokens} tokens"


def _buckets(lengths: Indices, tokens: int) -> tuple[Indices, Indices]:
    """Returns where each bucket of sorted lengths begins, and how many samples a batch of it has at most."""
    begins, most, end = [], [], 0
    while end < len(lengths):
        begin, size = end, 0
        while end < len(lengths) and end - begin <= size:  # too small for a batch
            end = int(np.searchsorted(lengths, lengths[end] * 9 // 8, side="right"))
            size = tokens // max(1, int(lengths[end - 1]))
        begins.append(begin)
        most.append(size)
    return np.array(begins), np.array(most)
