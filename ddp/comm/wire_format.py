"""Wire formats: what travels between hosts in the place of a tensor's own numbers.

    bf16    float32's range, 8 bits of precision                         2 bytes a number
    fp16    11 bits of precision, from 6e-8 to 65504                     2 bytes a number
    int8    whole numbers up to 127, and a scale for every block         1 byte a number, and 4 a block
    int8_stochastic    the same, rounded up or down by chance, so that the mean over many steps is right

Sums stay wide: what arrives is widened, and then added. So a number is rounded once for each hop that it makes.

A rank that passes on what it has received encodes it anew, and must come to the same bits, or replicas would differ. A
cast keeps what a cast has left. An int8 block keeps its largest number at 127 scales, from which the same scale follows
to the bit, and so the same whole numbers. Blocks must be the same, too: chunks begin at multiples of `unit`.

fp16 has a small range. Where sums are divided at the end, everything that travels is divided by a power of two before,
so that it is about as large as a mean.

Read before: `transport/topology.py`. Read next: `arithmetic.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from ddp.errors import ConfigError

WireName = Literal["bf16", "fp16", "int8", "int8_stochastic"]
BLOCK = 256  # numbers with one scale
STRETCH = 256 * BLOCK  # numbers whose temporary copies fit a cache
MOST = 127
SCALE_BYTES, ALIGNMENT_BYTES = 4, 16
HASH = (-1_640_531_535, 2_135_587_861, 1_540_483_477)  # odd numbers without a pattern in their bits
TINY = torch.finfo(torch.float32).tiny  # smaller scales lose digits, and their blocks are zeros then


class WireFormat(ABC):
    """A format in which numbers travel.

    Attributes:
        dtype: of the elements that travel.
        unit: a message begins at a multiple of this, counted in numbers from the start of the buffer.
    """

    dtype: torch.dtype
    unit = 1

    @abstractmethod
    def length(self, numel: int) -> int:
        """Returns how many elements carry so many numbers."""

    @abstractmethod
    def encode(self, numbers: Tensor, into: Tensor) -> None:
        """Writes numbers, [numel], as they travel, [length(numel)]."""

    @abstractmethod
    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Writes what has travelled as numbers."""

    @abstractmethod
    def add(self, encoded: Tensor, to: Tensor) -> None:
        """Adds what has travelled to numbers, in their own type."""

    def bytes_of(self, numel: int) -> int:
        """Returns how many bytes carry so many numbers."""
        return self.length(numel) * self.dtype.itemsize


class Cast(WireFormat):
    """Numbers of a narrower type.

    Args:
        divide_by: a power of two, by which numbers are smaller while they travel.
    """

    def __init__(self, dtype: torch.dtype, divide_by: int = 1) -> None:
        self.dtype, self._times = dtype, divide_by

    def length(self, numel: int) -> int:
        return numel

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        if self._times == 1:
            into.copy_(numbers)
            return
        for here, there in self._stretches(numbers, into):
            there.copy_(here * (1 / self._times))

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        for here, there in self._stretches(into, encoded):
            here.copy_(there)
            if self._times != 1:
                here.mul_(self._times)

    def add(self, encoded: Tensor, to: Tensor) -> None:
        for here, there in self._stretches(to, encoded):
            here.add_(there.to(here.dtype), alpha=self._times)  # twice as fast as adding a narrow tensor to a wide one

    def _stretches(self, numbers: Tensor, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(numbers.split(STRETCH), encoded.split(STRETCH), strict=True)


class Int8(WireFormat):
    """Whole numbers of eight bits, with a float32 scale for each block: its largest number divided by 127.

    A message is the scales, and then the whole numbers, as bytes. A number differs from what was encoded by half a
    scale at most; by less than a scale, if chance decides. A block with a number that is not finite has only such ones
    afterwards.

    Args:
        key: of the stream by which chance decides, the same on every rank; None: each is rounded to the nearest.
    """

    def __init__(self, key: int | None = None) -> None:
        self._key = key

    dtype = torch.uint8
    unit = BLOCK

    def length(self, numel: int) -> int:
        num_bytes = SCALE_BYTES * -(-numel // BLOCK) + numel
        return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        for values, whole, scales in self._blocks(numbers, into):
            scales.copy_(values.abs().amax(dim=1)).div_(MOST)
            scales.masked_fill_(scales < TINY, 0.0)
            inverse = torch.where(scales > 0, 1 / scales, 0.0)
            steps = torch.mul(values, inverse.unsqueeze(1))
            whole.copy_(steps.round_() if self._key is None else self._by_chance(steps, values))

    def _by_chance(self, steps: Tensor, values: Tensor) -> Tensor:
        """Rounds up with a probability of what is behind the point; whole numbers stay, in spite of rounding errors.

        The draw is a hash of the value, its place in the block and the key: the same wherever two ranks round the same.
        """
        assert self._key is not None
        place = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
        mixed = values.float().view(torch.int32) * HASH[0] + (place * HASH[1] + _wrapped(self._key * HASH[2]))
        draws = mixed.bitwise_right_shift_(22).bitwise_and_(1023)
        return steps.add_((draws + 0.5) / 1024).floor_()

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        for values, whole, scales in self._blocks(into, encoded):
            torch.mul(whole, scales.unsqueeze(1), out=values)

    def add(self, encoded: Tensor, to: Tensor) -> None:
        for values, whole, scales in self._blocks(to, encoded):
            values.add_(torch.mul(whole, scales.unsqueeze(1)))

    def _blocks(self, numbers: Tensor, encoded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields views of some blocks at a time: numbers and whole numbers, [blocks, numbers], and scales, [blocks]."""
        numel = len(numbers)
        num_blocks = -(-numel // BLOCK)
        scales = encoded[: SCALE_BYTES * num_blocks].view(torch.float32)
        whole = encoded[SCALE_BYTES * num_blocks :][:numel].view(torch.int8)
        last = numel // BLOCK * BLOCK
        for start in range(0, last, STRETCH):
            stop = min(start + STRETCH, last)
            of_stretch = scales[start // BLOCK : stop // BLOCK]
            yield numbers[start:stop].view(-1, BLOCK), whole[start:stop].view(-1, BLOCK), of_stretch
        if last < numel:
            yield numbers[last:].view(1, -1), whole[last:].view(1, -1), scales[last // BLOCK :]


def _wrapped(number: int) -> int:
    """Returns a number as 32 bits hold it."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def wire_format(name: WireName, divide_by: int = 1, key: int = 0) -> WireFormat:
    """Returns the format of this name, for sums that will be divided by so much.

    Args:
        key: of the stream of "int8_stochastic"; the same on every rank.

    Raises:
        ConfigError: there is none.
    """
    match name:
        case "bf16":
            return Cast(torch.bfloat16)
        case "fp16":
            return Cast(torch.float16, 1 << (divide_by.bit_length() - 1))
        case "int8":
            return Int8()
        case "int8_stochastic":
            return Int8(key)
    raise ConfigError(f"wire={name!r}: take one of {', '.join(get_args(WireName))}, or leave it out")
