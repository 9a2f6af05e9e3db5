"""Orders: which sample is read at which position of an epoch, as a pure function. No order knows a rank.

    position      0  1  2  3  4  5  6  7  8  9         an epoch has `length` positions
    Permutation   7  2  9  0  4  8  1  6  3  5         everything is mixed with everything
    Blocks        6  4  5 │ 9  7  8 │ 2  0  1  3       files in a random order; mixed within a window only
    Stratified    7  2  9  0  4 …                      classes are spread evenly: each batch has its share of each
    Weighted      7  7  2  9  7 …                      drawn with replacement, heavy samples more often
    Fixed         0  1  2  3  4  5  6  7  8  9         as the data set has them
    FirstOf       7  2  9  0  4  8                     the beginning of another order, such as its whole steps

Since an order gives the sample at any position, a rank computes its own samples only, a resumed run begins in the
middle of an epoch, and a step has the same samples at any number of workers. The key is (seed, epoch).

Cost: Permutation, Fixed: no memory. Blocks: 8 bytes a file. Weighted, Stratified: 8 and 16 bytes a sample. About 0.1 to
1 µs a position, in blocks of thousands. No permutation is stored: the end of this file shows how a place is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import copy
from functools import cached_property, reduce
from hashlib import blake2b
from operator import xor
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ddp.errors import ConfigError
from ddp.process.streams import stream_seed
from ddp.setting import Whole, refusal
from ddp.units import counted

# --- Attributes of samples -------------------------------------------------------------------------------------------
#
# Numbers that users give for each sample or each file: weights, lengths, classes, sizes.
#
# They come as lists, arrays, tensors or columns of a table, and one wrong number would put samples in the wrong place
# without an error. So each is checked when an order is made, and named with its place.


LARGEST = 1 << 56  # of whole numbers, so that sums and small multiples are exact


def numbers_of(values: Any, *, what: str, kind: Literal["whole", "real"]) -> NDArray[Any]:
    """Returns one number for each sample or file, [n], int64 or float64.

    Args:
        what: the name of the values, for errors.

    Raises:
        ConfigError: they are not one number each, or some are negative, too large, or not of this kind.
    """
    found = _array(values)
    if found is None or found.ndim != 1 or not len(found) or found.dtype.kind not in "iufb":
        raise ConfigError(f"{what} {_in_words(values, found)}: give one number for each, as a list, array or tensor")
    is_bad = ~np.isfinite(found) | (found < 0) | (found > LARGEST if kind == "whole" else np.bool_(False))
    if kind == "whole" and found.dtype.kind == "f":
        is_bad |= found != np.floor(found)
    if is_bad.any():
        where = int(is_bad.argmax())
        wanted = f"a whole number from 0 to {LARGEST}" if kind == "whole" else "a finite number, at least 0"
        raise ConfigError(f"{what}[{where}]={found[where].item():g}: must be {wanted}")
    return found.astype(np.int64 if kind == "whole" else np.float64)


def labels_of(values: Any, *, what: str) -> NDArray[np.int64]:
    """Returns the number of each sample's class, [n], where classes are anything that NumPy can sort.

    Raises:
        ConfigError: they are not one class for each sample.
    """
    found = _array(values)
    if found is not None and found.ndim == 1 and len(found):
        with suppress(TypeError):  # some cannot be compared with others
            return np.unique(found, return_inverse=True)[1].astype(np.int64)
    raise ConfigError(f"{what} {_in_words(values, found)}: give one class for each, all of them numbers or all texts")


def length_of(value: Any, *, what: str) -> int:
    """Returns a number of samples.

    Raises:
        ConfigError: it is none.
    """
    if why := refusal(value, Whole):
        raise ConfigError(f"{what}={value!r}: {why}")
    return int(value)


def digest_of_numbers(*arrays: NDArray[Any]) -> str:
    """Returns a few letters that tell arrays apart."""
    digest = blake2b(digest_size=4)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _array(values: Any) -> NDArray[Any] | None:
    """Returns values as an array; None if they are none."""
    if np.ma.is_masked(values):
        return None
    try:
        if isinstance(values, Tensor):
            plain = values.detach().cpu()
            values = (plain.double() if plain.is_floating_point() else plain).numpy()
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # lists of unequal lengths, or sparse tensors, say
        return None


def _in_words(values: Any, found: NDArray[Any] | None) -> str:
    if found is None or found.ndim == 0:
        return f"is a {type(values).__name__}"
    return f"has the shape {list(found.shape)}" if found.ndim != 1 or not len(found) else f"holds {found.dtype.name}"


_BLOCK = 1 << 16  # positions that are searched together


class Order(ABC):
    """A pure function from the positions of an epoch to samples. Derive your own order from it.

    Attributes:
        num_samples: length of the data set.
        length: positions of an epoch.
    """

    num_samples: int
    length: int

    @abstractmethod
    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`, [k], each in 0 … length − 1."""

    def checked_samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`.

        Raises:
            ConfigError: the user's own order returned something else.
        """
        found = np.asarray(self.samples(positions, seed=seed, epoch=epoch))
        if found.shape != positions.shape or found.dtype.kind not in "iu":
            raise ConfigError(
                f"the order ({self.in_words()}) returned {found.dtype.name} {list(found.shape)} for "
                f"{counted(len(positions), 'position')}: return one whole number for each"
            )
        if len(found) and not 0 <= found.min() <= found.max() < self.num_samples:
            wrong = found.min() if found.min() < 0 else found.max()
            raise ConfigError(
                f"the order ({self.in_words()}) returned sample {wrong}, and the data have samples 0 … "
                f"{self.num_samples - 1}"
            )
        return indices(found)

    def positions(self, sample: int, *, seed: int, epoch: int) -> list[int]:
        """Returns where a sample is read in an epoch, in rising order, after searching all of it."""
        found: list[int] = []
        for begin in range(0, self.length, _BLOCK):
            where = np.arange(begin, min(begin + _BLOCK, self.length))
            found += where[self.samples(where, seed=seed, epoch=epoch) == sample].tolist()
        return found

    def checksum(self) -> Checksum | None:
        """Returns the checksum of an epoch's samples; None if that is not known, or differs from epoch to epoch.

        If `length` is `num_samples`, each sample is expected once.
        """
        return Checksum.of_range(self.num_samples) if self.length == self.num_samples else None

    def in_words(self) -> str:
        """Returns the order's name, and the choices that it depends on besides the data set."""
        return type(self).__name__.lower()

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return ()

    @cached_property
    def identity(self) -> str:
        """Returns a text that is the same for equal orders only, because a position in an epoch is one of its order."""
        sizes = np.array([self.num_samples, self.length])
        return f"{self.in_words()} ({self.length} positions, {digest_of_numbers(sizes, *self.contents())})"


class Checksum(NamedTuple):
    """Number, sum (modulo 2⁶⁴) and exclusive or of sample numbers: enough to notice a missing or a repeated one."""

    num: int = 0
    total: int = 0
    xor: int = 0

    @classmethod
    def of(cls, samples: Indices) -> Checksum:
        """Returns the checksum of these samples."""
        words = samples.astype(np.int64, copy=False).view(np.uint64)
        return cls(len(words), int(words.sum(dtype=np.uint64)), int(np.bitwise_xor.reduce(words)) if len(words) else 0)

    def with_samples(self, samples: Iterable[int]) -> Checksum:
        """Returns the checksum with a few more samples, too few to be worth an array."""
        more = list(samples)
        return Checksum(self.num + len(more), (self.total + sum(more)) % 2**64, reduce(xor, more, self.xor))

    @classmethod
    def of_range(cls, length: int) -> Checksum:
        """Returns the checksum of 0 … length − 1."""
        last = length - 1
        xor = (last, 1, last + 1, 0)[last % 4]
        return cls(length, length * last // 2 % 2**64, xor)

    def with_(self, other: Checksum) -> Checksum:
        """Returns the checksum of both together."""
        return Checksum(self.num + other.num, (self.total + other.total) % 2**64, self.xor ^ other.xor)

    def without(self, other: Checksum) -> Checksum:
        """Returns the checksum of the samples that are not among the other ones."""
        return Checksum(self.num - other.num, (self.total - other.total) % 2**64, self.xor ^ other.xor)

    def times(self, number: int) -> Checksum:
        """Returns the checksum of all samples, each `number` times."""
        return Checksum(self.num * number, self.total * number % 2**64, self.xor * (number % 2))


def key_of(seed: int, epoch: int) -> int:
    """Returns the key of an epoch's order."""
    return stream_seed(seed, "order", epoch)


class Permutation(Order):
    """Each sample once, in a random order."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = self.length = length_of(num_samples, what="num_samples")

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        return Permutations(key_of(seed, epoch), largest=self.length).places(positions, size=self.length)

    def positions(self, sample: int, *, seed: int, epoch: int) -> list[int]:
        """Returns where a sample is read in an epoch, without a search."""
        if not 0 <= sample < self.length:
            return []
        back = Permutations(key_of(seed, epoch), largest=self.length).inverse()
        return [int(position) for position in back.places(np.array([sample]), size=self.length)]


class Fixed(Order):
    """Each sample once, as the data set has them, the same in each epoch."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = self.length = length_of(num_samples, what="num_samples")

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        return positions


class FirstOf(Order):
    """The first positions of each epoch of another order. The samples of the others rest until the next epoch.

        FirstOf(Permutation(1000), 960)     the whole steps of 64 samples, as `drop_last` of torch's DataLoader has them

    Args:
        order: the other order.
        length: number of positions, at most as many as that has.

    Raises:
        ConfigError: the other order has fewer.
    """

    def __init__(self, order: Order, length: int) -> None:
        if not 0 <= length_of(length, what="length") <= order.length:
            raise ConfigError(f"length={length}: the order ({order.in_words()}) has {order.length} positions")
        self.num_samples, self.length, self._order = order.num_samples, int(length), order

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        return self._order.samples(positions, seed=seed, epoch=epoch)

    def positions(self, sample: int, *, seed: int, epoch: int) -> list[int]:
        """Returns where a sample is read in an epoch."""
        return [each for each in self._order.positions(sample, seed=seed, epoch=epoch) if each < self.length]

    def checksum(self) -> Checksum | None:
        """Returns the other order's checksum if this is all of it; else None, because each epoch leaves out others."""
        return self._order.checksum() if self.length == self._order.length else None

    def in_words(self) -> str:
        """Returns both names."""
        return f"the first of {self._order.in_words()}"

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the other order depends on."""
        return self._order.contents()


# --------------------------------------------------------------------------------------------------- file by file


class Blocks(Order):
    """Each sample once: files in a random order, and the samples of a window of that sequence mixed.

    So a reader finishes one file after another, and yet neighbours in a file are seldom neighbours in training.

    Args:
        file_sizes: samples of each file; those of a file have consecutive numbers.
        window: samples that are mixed with each other; the more, the better, and the more files are open at once. None:
            4096, or as many as four files have, if that is less.
        lanes: lengths of the runs that the sequence is cut into; no window reaches from one into the next.
    """

    def __init__(self, file_sizes: ArrayLike, *, window: int | None = None, lanes: ArrayLike | None = None) -> None:
        self.file_sizes = numbers_of(file_sizes, what="file_sizes", kind="whole")
        self.num_samples = self.length = int(self.file_sizes.sum())
        if window is None:
            window = max(1, min(4096, 4 * self.length // max(1, int(np.count_nonzero(self.file_sizes)))))
        if length_of(window, what="window") < 1:
            raise ConfigError(f"window={window}: samples that are mixed; must be at least 1")
        self.window = min(int(window), max(1, self.length))
        self._first_samples = starts_of(self.file_sizes)
        self._lanes = np.asarray([self.length] if lanes is None else lanes, dtype=np.int64)
        self._lane_starts = starts_of(self._lanes)
        self._files: tuple[tuple[int, int], Indices, Indices] | None = None

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        lane = np.searchsorted(self._lane_starts, positions, side="right") - 1
        first, end = self._lane_starts[lane], self._lane_starts[lane] + self._lanes[lane]
        begin = first + (positions - first) // self.window * self.window
        shuffle = Permutations(key_of(seed, epoch), largest=min(self.window, self.length))
        mixed = shuffle.places(positions - begin, size=np.minimum(self.window, end - begin), group=begin)
        files, starts = self._sequence(seed, epoch)
        slot = np.searchsorted(starts, begin + mixed, side="right") - 1
        found: Indices = self._first_samples[files[slot]] + begin + mixed - starts[slot]
        return found

    def _sequence(self, seed: int, epoch: int) -> tuple[Indices, Indices]:
        """Returns the files that have samples, in the order of the epoch, and the position at which each begins."""
        found = self._files
        if found is None or found[0] != (seed, epoch):
            full = np.flatnonzero(self.file_sizes)
            shuffle = Permutations(stream_seed(seed, "files", epoch), largest=len(full))
            files = full[shuffle.places(np.arange(len(full)), size=len(full))]
            self._files = found = (seed, epoch), files, starts_of(self.file_sizes[files])
        return found[1:]  # not the attribute, which another thread may have changed

    def in_words(self) -> str:
        """Returns the order's name and window."""
        return f"blocks with a window of {self.window}"

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return (self.file_sizes, self._lanes)


def starts_of(sizes: Indices) -> Indices:
    """Returns where each of several runs begins that lie one after the other."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)[:-1]])


# ------------------------------------------------------------------------------------------- by weight and by class


class Weighted(Order):
    """Samples drawn with replacement, each with a chance that is proportional to its weight.

    Args:
        weights: of each sample, [n]; at least 0, and some above 0.
        length: draws of an epoch; None for n.

    Raises:
        ConfigError: the weights cannot be chances.
    """

    def __init__(self, weights: ArrayLike, *, length: int | None = None) -> None:
        values = numbers_of(weights, what="weights", kind="real")
        if not values.any():
            raise ConfigError(f"all {len(values)} weights are 0: no sample could ever be drawn; give some a weight")
        self.num_samples = len(values)
        self.length = self.num_samples if length is None else length_of(length, what="length")
        self._chances = np.cumsum(values / values.max())  # large weights would add up to infinity
        self._chances /= self._chances[-1]

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`, each drawn by itself."""
        draws = uniform(key_of(seed, epoch), positions)
        return np.searchsorted(self._chances, draws, side="right").astype(np.int64)

    def checksum(self) -> None:
        """Returns None, because each epoch draws other samples."""

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return (self._chances,)


class Stratified(Order):
    """Each sample once, with the classes spread evenly: each run of positions has nearly its share of every class.

    Position k of a class with n_c members is due at (k + ½) / n_c of the epoch; all classes are sorted by that. Which
    member comes k-th is random in each epoch.

    Args:
        classes: of each sample, [n]: whole numbers, or anything that numpy can sort.
    """

    def __init__(self, classes: ArrayLike) -> None:
        label = labels_of(classes, what="classes")
        self.num_samples = self.length = len(label)
        self._sizes = np.bincount(label).astype(np.int64)
        self._starts = starts_of(self._sizes)
        self._members = np.argsort(label, kind="stable")  # class after class
        of_class = np.repeat(np.arange(len(self._sizes)), self._sizes)
        due = (np.arange(self.length) - self._starts[of_class] + 0.5) / self._sizes[of_class]
        self._slots = np.argsort(due, kind="stable")  # position → place in `_members`

    def samples(self, positions: Indices, *, seed: int, epoch: int) -> Indices:
        """Returns the samples at `positions`."""
        slots = self._slots[positions]
        label = np.searchsorted(self._starts, slots, side="right") - 1
        mixed = Permutations(key_of(seed, epoch), largest=int(self._sizes.max())).places(
            slots - self._starts[label], size=self._sizes[label], group=label
        )
        found: Indices = self._members[self._starts[label] + mixed]
        return found

    def contents(self) -> tuple[NDArray[Any], ...]:
        """Returns the arrays that the order depends on."""
        return (self._sizes, self._members)


# --- A random permutation of any length that is never stored: each place is computed from a key -----------------------
#
#     swap or not, round r:    K = a number of the round, 0 … n − 1          the partner of x:  K − x  (mod n)
#
#                              x = 2, partner 5  ─┐  one bit, drawn for      swap: 2 → 5 and 5 → 2
#                              x = 5, partner 2  ─┘  the pair's larger one   or not: 2 → 2 and 5 → 5
#
# A round pairs all numbers, and a coin decides for each pair whether it changes places. So a round is a permutation. A
# number that is swapped once is anywhere with equal chance. Two numbers keep their distance only while both are swapped
# or both are not, with chance ½ each round. After 2·log₂ n + 16 rounds that is less likely than 2⁻¹⁶ for any of the n²
# pairs.
#
# Many permutations are computed at once: each number belongs to a *group* of some size, which has its own permutation.
#
# Cost: no memory but for the numbers asked for; some 5 ns a number and round, 0.4 µs a number for n = 10⁹, in blocks of
# thousands. A call for a few numbers takes 0.2 ms.
#
# Source: Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle" (CRYPTO 2012, arXiv 1208.1176), Fig.
# 1. Its rounds draw from a cipher; without an attacker, the mixer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) is
# enough.


Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ ÷ the golden ratio, odd
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_AT_ONCE = 1 << 14  # numbers that are computed together: they stay in the cache


class Permutations:
    """Permutations of groups, the same wherever they are computed.

    Args:
        key: names them, in [0, 2**63).
        largest: size of the largest group; the number of rounds follows from it.
    """

    def __init__(self, key: int, *, largest: int) -> None:
        num_rounds = 2 * int(largest).bit_length() + 16
        numbers = np.arange(2 * num_rounds, dtype=np.uint64)
        self._keys = _mixed(_STEP * numbers + np.uint64(key)).reshape(num_rounds, 2)

    def inverse(self) -> Permutations:
        """Returns the permutations that lead back: the same rounds from the last to the first, for each is its own."""
        back = copy(self)
        back._keys = self._keys[::-1]
        return back

    def places(self, numbers: Indices, *, size: Indices | int, group: Indices | int = 0) -> Indices:
        """Returns where each number goes.

        Args:
            numbers: [k], each in 0 … size − 1.
            size: of the number's group.
            group: number of the group, from 0; [k], or one for all.
        """
        found = np.empty(len(numbers), dtype=np.int64)
        for begin in range(0, len(numbers), _AT_ONCE):
            part = slice(begin, begin + _AT_ONCE)
            sizes, groups = (np.atleast_1d(np.asarray(each, dtype=np.int64)) for each in (size, group))
            sizes, groups = (each[part] if len(each) > 1 else each for each in (sizes, groups))
            found[part] = _swapped_or_not(self._keys, numbers[part], sizes, groups)
        return found


def _swapped_or_not(keys: Words, x: Indices, size: Indices, group: Indices) -> Indices:
    """Returns x after all rounds. `size` and `group` are [k] or [1]."""
    for pairing, shift in _rounds(keys, _mixed(group.view(np.uint64) * _STEP), size):
        partner = pairing - x
        partner += (partner >> 63) & size  # modulo the size, without a division
        coin = np.maximum(x, partner).view(np.uint64) * _STEP
        coin += shift
        coin ^= coin >> np.uint64(32)
        coin *= _FIRST
        x = np.where(coin.view(np.int64) < 0, partner, x)
    return x


def _rounds(keys: Words, salt: Words, size: Indices) -> Iterator[tuple[Indices, Words]]:
    """Yields K of each round, and the salt of its coins: all at once where all numbers share them."""
    sizes, shift = size.view(np.uint64), salt * _STEP
    if len(salt) == len(sizes) == 1:
        pairings = (_mixed(salt ^ keys[:, :1]) % sizes).view(np.int64)
        yield from zip(pairings, shift + keys[:, 1:], strict=True)
        return
    for first, second in keys:
        yield (_mixed(salt ^ first) % sizes).view(np.int64), shift + second


def _mixed(x: Words) -> Words:
    """Returns words whose bits all depend on all bits of x's; different ones for different ones."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def uniform(key: int, numbers: Indices) -> NDArray[np.float64]:
    """Returns a random number in [0, 1) for each of `numbers`, which depends on it and on the key alone."""
    words = _mixed(_mixed(numbers.view(np.uint64) * _STEP + np.uint64(key)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def indices(values: Iterable[int] | Indices) -> Indices:
    """Returns whole numbers as an array, [k] int64."""
    return np.fromiter(values, dtype=np.int64) if not isinstance(values, np.ndarray) else values.astype(np.int64)
