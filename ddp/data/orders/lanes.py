"""Lanes: each shard of a batch is taken from a sequence of its own.

    6 files of 4 samples, V = 3, B = 6      step 0   step 1   step 2   step 3
    lane 0:  files 5 and 1                  20 23    22 21    4 7      5 6
    lane 1:  files 0 and 3                  1 0      3 2      13 12    15 14
    lane 2:  files 4 and 2                  16 19    18 17    8 10     9 11

So an epoch has two orders: of *places*, lane after lane, and of *positions*, step after step. `Lanes` leads from one to
the other, and is an order itself: a sampler does not know that there are lanes, and lanes do not know that there are
ranks. Shard v begins at position v·B // V of a whole step. The last step takes what is left of all lanes.

Since each step takes as many samples from a lane, the batch must not change inside an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp.data.orders.order import Checksum, Order, key_of, starts_of
from ddp.data.orders.permutation import Indices, Permutations, indices
from ddp.errors import ConfigError
from ddp.units import counted


class Lanes(Order):
    """An order whose shard v of every step comes from lane v.

    Args:
        places: orders the samples lane after lane.
        lengths: places of each lane, [V]; each has enough for the whole steps of an epoch.
        batch: samples of a step, but for the last one of an epoch.

    Raises:
        ConfigError: there are fewer samples than lanes, or a lane is too short.
    """

    def __init__(self, places: Order, lengths: Sequence[int] | Indices, *, batch: int) -> None:
        self.places, self.batch = places, batch
        self.num_samples, self.length = places.num_samples, places.length
        self.lengths = indices(lengths)
        self.num_lanes = len(self.lengths)
        if self.length < self.num_lanes:
            shards = counted(self.num_lanes, "shard")
            raise ConfigError(f"{counted(self.length, 'sample')} cannot be dealt to {shards}: take fewer shards")
        self._starts = starts_of(self.lengths)
        self._num_whole = self.length // batch
        edges = np.arange(self.num_lanes + 1) * batch // self.num_lanes
        self._edges, self._taken = edges[:-1], np.diff(edges)  # of a whole step, from each lane
        left = self.lengths - self._num_whole * self._taken
        if left.min() < 0:
            lane = int(left.argmin())
            raise ConfigError(
                f"shard {lane} of {self.num_lanes} has {self.lengths[lane]} samples, and the {self._num_whole} whole "
                f"steps of an epoch take {self._num_whole * self._taken[lane]} from it: give all shards about as many "
                "samples, and take a global batch that the number of shards divides"
            )
        self._left_starts = starts_of(left)

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        step, slot = np.divmod(positions, self.batch)
        lane = ((slot + 1) * self.num_lanes - 1) // self.batch
        place = self._starts[lane] + step * self._taken[lane] + slot - self._edges[lane]
        last = step == self._num_whole  # takes what is left of each lane
        lane = np.where(last, np.searchsorted(self._left_starts, slot, side="right") - 1, lane)
        of_last = self._starts[lane] + self._num_whole * self._taken[lane] + slot - self._left_starts[lane]
        return self.places.samples(np.where(last, of_last, place), seed=seed, epoch=epoch)

    def positions(self, sample: int, *, seed: int, epoch: int) -> list[int]:
        """Returns the positions of a sample."""
        return sorted(map(self._position, self.places.positions(sample, seed=seed, epoch=epoch)))

    def _position(self, place: int) -> int:
        lane = int(np.searchsorted(self._starts, place, side="right")) - 1
        offset, taken = place - int(self._starts[lane]), int(self._taken[lane])
        if offset >= self._num_whole * taken:
            return self._num_whole * self.batch + int(self._left_starts[lane]) + offset - self._num_whole * taken
        return offset // taken * self.batch + int(self._edges[lane]) + offset % taken

    def checksum(self) -> Checksum | None:
        """Returns what the samples of a whole epoch add up to."""
        return self.places.checksum()

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return (self.lengths, *self.places.contents())

    def in_words(self) -> str:
        """Returns the order's name and what it depends on."""
        return f"{self.places.in_words()} in {self.num_lanes} lanes for a batch of {self.batch}"


# ------------------------------------------------------------------------------------------------ orders of places


class Copies(Order):
    """One order again and again: every lane reads the same."""

    def __init__(self, order: Order, number: int) -> None:
        self.order, self.number = order, number
        self.num_samples, self.length = order.num_samples, number * order.length

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        return self.order.samples(positions % self.order.length, seed=seed, epoch=epoch)

    def positions(self, sample: int, *, seed: int, epoch: int) -> list[int]:
        """Returns the positions of a sample, one in each copy."""
        first = self.order.positions(sample, seed=seed, epoch=epoch)
        return [copy * self.order.length + position for copy in range(self.number) for position in first]

    def checksum(self) -> Checksum | None:
        """Returns what the samples of a whole epoch add up to."""
        one = self.order.checksum()
        return None if one is None else one.times(self.number)

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return self.order.contents()

    def in_words(self) -> str:
        """Returns the order's name and what it depends on."""
        return f"{self.number} times {self.order.in_words()}"


class Listed(Order):
    """Lists of samples, one after the other, each in a random order of its own.

    Args:
        lists: samples of each lane; a sample may be in several.
        num_samples: length of the data set.
    """

    def __init__(self, lists: Sequence[Indices], *, num_samples: int) -> None:
        self.num_samples = num_samples
        self.sizes = indices(map(len, lists))
        self._starts = starts_of(self.sizes)
        self._listed = np.concatenate(lists)
        self.length = len(self._listed)

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        which = np.searchsorted(self._starts, positions, side="right") - 1
        first = self._starts[which]
        shuffle = Permutations(key_of(seed, epoch), largest=int(self.sizes.max()))
        found: Indices = self._listed[first + shuffle.places(positions - first, size=self.sizes[which], group=which)]
        return found

    def checksum(self) -> Checksum:
        """Returns what the samples of a whole epoch add up to."""
        return Checksum.of(self._listed)

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return self.sizes, self._listed

    def note(self) -> str:
        """Returns how many samples an epoch does not have, or has several times; "" if each is there once."""
        times = np.bincount(self._listed, minlength=self.num_samples)
        left_out, repeated = int((times == 0).sum()), int((times > 1).sum())
        if not left_out and not repeated:
            return ""
        return f"of {self.num_samples:,} samples, an epoch leaves out {left_out:,} and has {repeated:,} several times"


class Shuffles(Order):
    """Everything several times, each time in another random order."""

    def __init__(self, num_samples: int, number: int) -> None:
        self.num_samples, self.number, self.length = num_samples, number, number * num_samples

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        lane, offset = np.divmod(positions, self.num_samples)
        return self._permutations(seed, epoch).places(offset, size=self.num_samples, group=lane)

    def positions(self, sample: int, *, seed: int, epoch: int) -> list[int]:
        """Returns the positions of a sample, one in each shuffle."""
        lanes = np.arange(self.number)
        offset = self._permutations(seed, epoch).numbers(
            np.full(self.number, sample), size=self.num_samples, group=lanes
        )
        return [int(position) for position in lanes * self.num_samples + offset]

    def _permutations(self, seed: int, epoch: int) -> Permutations:
        return Permutations(key_of(seed, epoch), largest=self.num_samples)

    def checksum(self) -> Checksum:
        """Returns what the samples of a whole epoch add up to."""
        return Checksum.of_range(self.num_samples).times(self.number)
