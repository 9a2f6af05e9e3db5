"""Steps with a budget of tokens: many short samples, or a few long ones, and hardly any padding.

    lengths, sorted      3 3 3 4 4 │ 6 6 7 7 7 │ 11 12 12      buckets of about equal lengths
    a budget of 16       4 samples   2 samples   1 sample      budget ÷ the longest of the bucket
    steps of an epoch    7 7 │ 3 4 3 │ 12 │ 6 7 │ 3 4 │ …      batches of all buckets, in a random order

In a bucket the longest sample is at most an eighth longer than the shortest, unless it would be too small for one
batch. So a batch has little padding, and every rank has the same number of steps.

    layers of a bucket of 9    3 3 3 │ 4 4 4 │ 5 5 6        3 batches take one sample of each layer, at random
    a batch                    3 4 6  →  in steps of a golden section  →  3 6 4 …

Long and short samples alternate in a batch, so that shards, which are runs of equal counts, have about equally many
tokens at any number of shards. The batches of all buckets are shuffled, and so are the samples within a bucket.

Where a step begins depends on the position alone, not on the seed, so all epochs have the same number of steps.

Cost: 16 bytes a sample, and 32 a step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddp.data.orders.order import Indices, Order, Permutations, key_of, length_of, numbers_of, starts_of
from ddp.data.orders.steps import Steps
from ddp.errors import ConfigError
from ddp.process.streams import stream_seed


class TokenBudget(Order, Steps):
    """An order that cuts an epoch into steps of samples whose tokens, padded to the longest sample's, fit a budget.

    Args:
        tokens: most tokens of a step, of all ranks together.
        lengths: of each sample, [n], in tokens.

    Raises:
        ConfigError: a sample is longer than the budget, or has no length.
    """

    def __init__(self, tokens: int, lengths: ArrayLike) -> None:
        values, tokens = numbers_of(lengths, what="lengths", kind="whole"), length_of(tokens, what="tokens")
        if not tokens or values.max() > tokens:
            raise ConfigError(
                f"tokens={tokens}: sample {values.argmax()} alone has {values.max()}; take a budget of at least that "
                "(and 1), or cut long samples"
            )
        self.tokens, self.num_samples, self.length = tokens, len(values), len(values)
        self._sorted = np.argsort(values, kind="stable")
        self._bucket_starts, most = _buckets(values[self._sorted], tokens)
        bucket_sizes = np.diff(np.append(self._bucket_starts, self.length))
        num_batches = -(-bucket_sizes // most)
        # Of each batch, [K]: its bucket, its place there, and its size; those of a bucket differ by one at most.
        self._bucket = np.repeat(np.arange(len(num_batches)), num_batches)
        self._place = np.arange(len(self._bucket)) - starts_of(num_batches)[self._bucket]
        least, rest = np.divmod(bucket_sizes, num_batches)
        self._sizes = least[self._bucket] + (self._place < rest[self._bucket])
        self._num_batches, self._rest, self._least = num_batches, rest, least
        strides = {size: _stride(size) for size in np.unique(self._sizes).tolist()}
        self._strides = np.array([strides[size] for size in self._sizes.tolist()])
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
        batch = batches[step]
        bucket, place, size = self._bucket[batch], self._place[batch], self._sizes[batch]
        layer = (positions - starts[step]) * self._strides[batch] % size
        # Each layer of a bucket but the last has a sample for every batch.
        first = self._bucket_starts[bucket] + layer * self._num_batches[bucket]
        width = np.where(layer < self._least[bucket], self._num_batches[bucket], self._rest[bucket])
        shuffle = Permutations(key_of(seed, epoch), largest=int(self._num_batches.max()))
        found: Indices = self._sorted[first + shuffle.places(place, size=width, group=first)]
        return found

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return self._sorted, self._bucket_starts, self._sizes

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
            end = int(np.searchsorted(lengths, int(lengths[end]) * 9 // 8, side="right"))
            size = tokens // max(1, int(lengths[end - 1]))
        begins.append(begin)
        most.append(size)
    return np.array(begins), np.array(most)


def _stride(size: int) -> int:
    """Returns a step that leads through 0 … size − 1 in any order but the rising one: near the golden section."""
    golden = (5**0.5 - 1) / 2 * size
    return min((each for each in range(1, size + 1) if math.gcd(each, size) == 1), key=lambda each: abs(each - golden))
