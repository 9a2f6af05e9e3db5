"""Sharding: what the shards of a batch are made of. Files are dealt to shards, and never to ranks.

    sample          a step is a run of the epoch's order, cut into shards         any order, any data
    file            shard v of every step comes from lane v, a run of files       a worker opens its lanes' files only
    full_shuffle    each lane goes through everything, in its own order           an epoch has each sample V times
    off             every lane reads the same samples in the same order           an epoch has each sample V times
    a function      lane v has the samples of function(v, V), in a random order   rank and world size, where V is W
    auto            file, if there are files, and as many as shards; else sample

Lanes (below) depend on V = `batch.num_shards` alone. So the samples of a step are the same at any number of
workers, and a run can resume with more or fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddp.data.orders.order import (
    Blocks,
    Checksum,
    Indices,
    Order,
    Permutation,
    Permutations,
    indices,
    key_of,
    starts_of,
)
from ddp.errors import ConfigError, did_you_mean
from ddp.units import counted

# --- Lanes: each shard of a batch is taken from its own sequence -----------------------------------------------------
#
#     6 files of 4 samples, V = 3, B = 6      step 0   step 1   step 2   step 3
#     lane 0:  files 5 and 1                  20 23    22 21    4 7      5 6
#     lane 1:  files 0 and 3                  1 0      3 2      13 12    15 14
#     lane 2:  files 4 and 2                  16 19    18 17    8 10     9 11
#
# So an epoch has two orders: of *places*, lane after lane, and of *positions*, step after step. `Lanes` leads from one
# to the other, and is an order itself: a sampler does not know that there are lanes, and lanes do not know that there
# are ranks. Shard v begins at position v·B // V of a whole step. The last step takes what is left of all lanes.
#
# Since each step takes as many samples from a lane, the batch must not change inside an epoch.


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

    def checksum(self) -> Checksum | None:
        """Returns the checksum of a whole epoch."""
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

    def checksum(self) -> Checksum | None:
        """Returns the checksum of a whole epoch."""
        one = self.order.checksum()
        return None if one is None else one.times(self.number)

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return self.order.contents()

    def in_words(self) -> str:
        """Returns the order's name and what it depends on."""
        return f"{self.number} times {self.order.in_words()}"


class Listed(Order):
    """Lists of samples, one after the other, each in its own random order.

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
        """Returns the checksum of a whole epoch."""
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
        shuffle = Permutations(key_of(seed, epoch), largest=self.num_samples)
        return shuffle.places(offset, size=self.num_samples, group=lane)

    def checksum(self) -> Checksum:
        """Returns the checksum of a whole epoch."""
        return Checksum.of_range(self.num_samples).times(self.number)


OwnSharding = Callable[[int, int], Iterable[int]]
"""A function (shard, number of shards) → the samples of that lane."""

SHARDINGS = ("auto", "file", "sample", "full_shuffle", "off")


class ShardOrder(NamedTuple):
    """An order with the shards asked for, and the choice as text."""

    order: Order
    note: str


def shard_order(
    samples: Any, order: Order | None, sharding: str | OwnSharding, *, num_shards: int, batch: int | None
) -> ShardOrder:
    """Returns the order in which the steps of an epoch read a data set.

    Args:
        samples: the data set; `file_sizes`, if it has them, are the numbers of samples of its files.
        order: None for a permutation, or for blocks where files are dealt.
        sharding: one of `SHARDINGS`, or a function.
        num_shards: shards of a step.
        batch: samples of a step; None where it changes inside an epoch.

    Raises:
        ConfigError: the choices contradict each other or the data.
    """
    if not callable(sharding) and sharding not in SHARDINGS:
        hint, known = did_you_mean(sharding, SHARDINGS), ", ".join(SHARDINGS)
        raise ConfigError(f"sharding={sharding!r}: take one of {known}, or a function (shard, shards).{hint}")
    if order is not None and order.num_samples != len(samples):
        raise ConfigError(f"the order is made for {order.num_samples} samples, and the data have {len(samples)}")
    blocks = order if isinstance(order, Blocks) else _blocks_of(samples) if order is None else None
    note = ""
    if sharding == "auto":
        sharding, note = _chosen(blocks, num_shards=num_shards, can_follow_files=batch is not None)
    if sharding == "sample":
        return ShardOrder(order or Permutation(len(samples)), note)
    name = "file" if sharding == "file" else f"{sharding}" if isinstance(sharding, str) else "a function"
    if batch is None:
        raise ConfigError(
            f"sharding={name}: takes equally many samples from a lane in all steps of an epoch, and this batch changes "
            "inside an epoch; take sharding=sample, or a batch of constant size"
        )
    if sharding == "file":
        return _by_file(blocks, order, num_shards=num_shards, batch=batch)
    if callable(sharding):
        if order is not None:
            raise ConfigError(
                f"a sharding function says which samples a shard has, in a random order; leave the order "
                f"({order.in_words()}) out"
            )
        lists = _own_lists(sharding, len(samples), num_shards)
        return ShardOrder(Lanes(lists, lists.sizes, batch=batch), lists.note())
    if batch % num_shards:
        raise ConfigError(f"sharding={name}: all lanes are equally long; take a batch that {num_shards} shards divide")
    if sharding == "off":
        places: Order = Copies(order or Permutation(len(samples)), num_shards)
    elif order is None or isinstance(order, Permutation):
        places = Shuffles(len(samples), num_shards)
    else:
        raise ConfigError(f"sharding=full_shuffle: shuffles by itself; leave the order ({order.in_words()}) out")
    note = f"an epoch has each of the {len(samples):,} samples {num_shards} times, because of sharding={name}"
    return ShardOrder(Lanes(places, np.full(num_shards, places.length // num_shards), batch=batch), note)


def _blocks_of(samples: Any) -> Blocks | None:
    """Returns the usual order of samples that lie in files; None if they do not say in which.

    Raises:
        ConfigError: their `file_sizes` are wrong.
    """
    sizes = getattr(samples, "file_sizes", None)
    if sizes is None:
        return None
    blocks = Blocks(sizes)
    if blocks.num_samples != len(samples):
        found = f"add up to {blocks.num_samples}, and they have {len(samples)} samples"
        raise ConfigError(f"the file_sizes of the data {found}: give the number of samples in each file")
    return blocks


def _num_files(blocks: Blocks) -> int:
    return int(np.count_nonzero(blocks.file_sizes))


def _chosen(blocks: Blocks | None, *, num_shards: int, can_follow_files: bool) -> tuple[str, str]:
    """Returns the sharding that "auto" stands for, and as text why files are not followed, if there are any."""
    if blocks is None:
        return "sample", ""
    if can_follow_files and _num_files(blocks) >= num_shards:
        return "file", ""
    why = f"{counted(_num_files(blocks), 'file')} for {counted(num_shards, 'shard')}"
    why = why if can_follow_files else "the batch changes inside an epoch"
    return "sample", f"{why}: shards do not follow files, so a worker opens all of them"


def _by_file(blocks: Blocks | None, order: Order | None, *, num_shards: int, batch: int) -> ShardOrder:
    """Returns an order in which each shard follows its own run of files."""
    if blocks is None and order is not None:
        raise ConfigError(
            f"sharding=file: the order ({order.in_words()}) does not keep to files; take one of blocks, or leave it out"
        )
    if blocks is None:
        raise ConfigError(
            "sharding=file: it is not known which samples lie in one file, because the data have no attribute "
            "`file_sizes`; take sharding=sample"
        )
    files = counted(_num_files(blocks), "file")
    if _num_files(blocks) < num_shards:
        raise ConfigError(
            f"sharding=file: {files} cannot be dealt to {counted(num_shards, 'shard')}; write more and smaller files, "
            "take sharding=sample, or fewer shards (num_shards, at least one for each worker)"
        )
    lengths = _equal_lanes(blocks.length, num_shards, batch)
    order = Lanes(Blocks(blocks.file_sizes, window=blocks.window, lanes=lengths), lengths, batch=batch)
    mixed = min(blocks.window, int(lengths.max()))
    are = "is" if _num_files(blocks) == 1 else "are"
    return ShardOrder(order, f"{files} {are} dealt to {counted(num_shards, 'shard')}, samples mixed {mixed} at a time")


def _equal_lanes(length: int, num_shards: int, batch: int) -> Indices:
    """Returns how many samples each shard has in all steps of an epoch, if each is cut as evenly as can be."""
    num_whole, rest = divmod(length, batch)
    edges = np.arange(num_shards + 1)
    return num_whole * np.diff(edges * batch // num_shards) + np.diff(edges * rest // num_shards)


def _own_lists(function: OwnSharding, num_samples: int, num_shards: int) -> Listed:
    """Returns the lanes of the user's own function."""
    lists = [_own_list(function, shard, num_samples, num_shards) for shard in range(num_shards)]
    if not sum(map(len, lists)):
        raise ConfigError(f"the sharding function returned no sample for any of {counted(num_shards, 'shard')}")
    return Listed(lists, num_samples=num_samples)


def _own_list(function: OwnSharding, shard: int, num_samples: int, num_shards: int) -> Indices:
    """Returns the samples of one lane."""
    call = f"the sharding function, called with ({shard}, {num_shards}),"
    try:
        returned: Any = function(shard, num_shards)
    except Exception as error:
        raise ConfigError(f"{call} failed: {type(error).__name__}: {' '.join(str(error).split())}") from error
    try:
        found = np.asarray(returned if hasattr(returned, "__array__") else list(returned))
    except (TypeError, ValueError):
        raise ConfigError(f"{call} returned {returned!r:.60}: return the numbers of samples, such as a list") from None
    if not found.size:
        return indices([])
    if found.dtype.kind == "b":
        raise ConfigError(f"{call} returned true and false: return the numbers of samples, as np.flatnonzero(mask)")
    if found.ndim != 1 or found.dtype.kind not in "iu":
        what = f"{found.dtype.name} {list(found.shape)}"
        raise ConfigError(f"{call} returned {what}: return whole numbers of samples, in one dimension")
    if not 0 <= found.min() <= found.max() < num_samples:
        wrong = found.min() if found.min() < 0 else found.max()
        raise ConfigError(f"{call} returned sample {wrong}, and the data have samples 0 … {num_samples - 1}")
    return indices(found)
