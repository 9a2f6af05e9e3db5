"""A random permutation of any length that is never stored: each place is computed from a key.

    swap or not, round r:    K = a number of the round, 0 … n − 1          the partner of x:  K − x  (mod n)

                             x = 2, partner 5  ─┐  one bit, drawn for      swap: 2 → 5 and 5 → 2
                             x = 5, partner 2  ─┘  the pair's larger one   or not: 2 → 2 and 5 → 5

A round pairs all numbers, and a coin decides for each pair whether it changes places. So a round is a permutation. A
number that is swapped once is anywhere with equal chance. Two numbers keep their distance only while both are swapped
or both are not, with chance ½ each round. After 2·log₂ n + 16 rounds that is less likely than 2⁻¹⁶ for any of the n²
pairs.

Many permutations are computed at once: each number belongs to a *group* of some size, which has a permutation of its
own.

Cost: no memory but for the numbers asked for; some 5 ns a number and round, 0.4 µs a number for n = 10⁹, in blocks of
thousands. A call for a few numbers takes 0.2 ms.

Source: Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle" (CRYPTO 2012, arXiv 1208.1176), Fig. 1.
Its rounds draw from a cipher; without an attacker, the mixer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ ÷ the golden ratio, odd
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BLOCK = 1 << 14  # numbers that are computed together: they stay in the cache


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

    def places(self, numbers: Indices, *, size: Indices | int, group: Indices | int = 0) -> Indices:
        """Returns where each number goes.

        Args:
            numbers: [k], each in 0 … size − 1.
            size: of the number's group.
            group: number of the group, from 0; [k], or one for all.
        """
        found = np.empty(len(numbers), dtype=np.int64)
        for begin in range(0, len(numbers), _BLOCK):
            part = slice(begin, begin + _BLOCK)
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
    """Yields K of each round, and what makes its coins others: all at once where all numbers share them."""
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
