"""Wire formats: what travels between hosts in the place of a tensor's own numbers.

    bf16    float32's range, 8 bits of precision                         2 bytes a number
    fp16    11 bits of precision, from 6e-8 to 65504                     2 bytes a number
    int8    whole numbers up to 127, and a scale for every block         1 byte a number, and 4 a block
    int8_stochastic    the same, rounded up or down by chance, so that the mean over many different blocks is right
    fp32    no narrower than float32: tensors of a narrower type are made float32, and added up so

Sums stay wide: what arrives is widened, and then added. So a number is rounded once for each hop that it makes.

A rank that passes on what it has received encodes it again, and must reach the same bits, or replicas would differ. A
cast keeps what a cast has left. An int8 block keeps its largest number at 127 scales, from which the same scale follows
to the bit, and so the same whole numbers. Blocks must be the same, too: chunks begin at multiples of `unit`.

fp16 has a small range. Where sums are divided in the end, a buffer is divided by a power of two before anything of it
travels (`shrink`), and sums by the rest. So terms, sums and the result are all about as large as a mean.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor

from ddp.errors import ConfigError, did_you_mean
from ddp.process import gpu
from ddp.setting import Narrow, WireName

NAMES: tuple[str, ...] = (*get_args(Narrow), "fp32")
BLOCK = 256  # numbers with one scale
STRETCH = 256 * BLOCK  # numbers whose temporary copies fit a CPU's cache; on a GPU each stretch would cost commands
MOST = 127
SCALE_BYTES, ALIGNMENT_BYTES = 4, 16
HASH = (-1_640_531_535, 2_135_587_861, 1_540_483_477)  # odd numbers without a pattern in their bits
TINY = torch.finfo(torch.float32).tiny  # smaller scales lose digits, and their blocks are zeros then
BELOW_TINY = TINY * (1 - 2**-23)


class WireFormat(ABC):
    """A format in which numbers travel.

    Attributes:
        dtype: of the elements that travel.
        shrink: a power of two, by which numbers must be divided before they are encoded.
        unit: a message begins at a multiple of this, counted in numbers from the start of the buffer.
    """

    dtype: torch.dtype
    unit = 1
    shrink = 1

    @abstractmethod
    def length(self, numel: int) -> int:
        """Returns the number of elements that carry `numel` numbers."""

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
        """Returns the number of bytes that carry `numel` numbers."""
        return self.length(numel) * self.dtype.itemsize


class Cast(WireFormat):
    """Numbers of a narrower type."""

    def __init__(self, dtype: torch.dtype, shrink: int = 1) -> None:
        self.dtype, self.shrink = dtype, shrink

    def length(self, numel: int) -> int:
        return numel

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        into.copy_(numbers)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        into.copy_(encoded)

    def add(self, encoded: Tensor, to: Tensor) -> None:
        if to.device.type == gpu.KIND:
            to.add_(encoded)
            return
        for here, there in zip(to.split(STRETCH), encoded.split(STRETCH), strict=True):
            here.add_(there.to(here.dtype))  # twice as fast as adding a narrow tensor to a wide one


class Int8(WireFormat):
    """Whole numbers of eight bits, with a float32 scale for each block: its largest number divided by 127.

    A message is the scales, and then the whole numbers, as bytes. A number differs from what was encoded by half a
    scale at most; by less than a scale, if chance decides. A block with a number that is not finite has only such ones
    afterwards.

    Args:
        by_chance: a number is rounded up with a probability of what is behind the point, and not to the nearest.
    """

    def __init__(self, *, by_chance: bool = False) -> None:
        self._is_by_chance = by_chance

    dtype = torch.uint8
    unit = BLOCK

    def length(self, numel: int) -> int:
        num_bytes = SCALE_BYTES * -(-numel // BLOCK) + numel
        return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        for values, whole, scales in self._blocks(numbers, into):
            on_gpu = values.device.type == gpu.KIND
            if on_gpu:
                torch.linalg.vector_norm(values.float(), math.inf, 1, out=scales)  # one command; slow on a CPU
            else:
                scales.copy_(values.abs().amax(dim=1))
            torch._foreach_div_([scales], MOST)  # a GPU's `div_` by a number multiplies by a rounded 1/127
            divisors = torch.threshold(scales, BELOW_TINY, math.inf).unsqueeze(1)
            steps = values / divisors if on_gpu else values * divisors.reciprocal_()  # which is faster on a CPU
            whole.copy_(self._by_chance(steps, values, scales) if self._is_by_chance else steps.round_())

    def _by_chance(self, steps: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        """Rounds up with a probability of what is behind the point; whole numbers stay, in spite of rounding errors.

        The draw is a hash of the value, its place in the block and the block's scale, which is another one in each step
        of a training. So it is the same wherever two ranks round the same, and when a run is repeated.
        """
        place = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
        of_block = scales.view(torch.int32).unsqueeze(1) * HASH[2]
        mixed = values.float().view(torch.int32) * HASH[0] + (place * HASH[1] + of_block)
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
        stretch = STRETCH if numbers.device.type == "cpu" else max(BLOCK, last)
        for start in range(0, last, stretch):
            stop = min(start + stretch, last)
            of_stretch = scales[start // BLOCK : stop // BLOCK]
            yield numbers[start:stop].view(-1, BLOCK), whole[start:stop].view(-1, BLOCK), of_stretch
        if last < numel:
            yield numbers[last:].view(1, -1), whole[last:].view(1, -1), scales[last // BLOCK :]


def widened(tensor: Tensor, name: WireName | None) -> tuple[Tensor, Narrow | None]:
    """Returns the tensor that is added up, widened if asked for, and the narrow format in which it travels, if any."""
    if name == "fp32":
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)), None
    return tensor, name


def wire_format(name: Narrow, divide_by: int = 1) -> WireFormat:
    """Returns the format of this name, for sums that will be divided by so much.

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
            return Int8(by_chance=True)
    raise ConfigError(f"wire={name!r}: take one of {', '.join(NAMES)}, or leave it out.{did_you_mean(name, NAMES)}")
