"""Turns a user's tensors into the flat buffers that collectives run on, and combines two buffers into one.

`op=` is the operation on two buffers. A mean is a sum that is divided once, at the end.

`wire=` is the format in which a tensor's numbers travel between hosts:

    bf16    float32's range, 8 bits of precision                         2 bytes a number
    fp16    11 bits of precision, from 6e-8 to 65504                     2 bytes a number
    int8    whole numbers up to 127, and a scale for every block         1 byte a number, and 4 a block
    int8_stochastic    the same, rounded up or down by chance, so that the mean over many different blocks is right
    fp32    at least float32: tensors of a narrower type are converted, and added up as float32

Sums stay wide: incoming numbers are widened, and then added. So a number is rounded once per hop.

A rank that forwards numbers encodes them again, and must get the same bits, or replicas would differ. A second cast
changes nothing. In an int8 block the largest number stays at 127 scales, which gives the same scale to the bit, and so
the same whole numbers. The blocks must be the same, too: chunks begin at multiples of `unit`.

fp16 has a small range. If sums are divided in the end, a buffer is divided by a power of two before it travels
(`shrink`), and its sums by the remaining factor. So terms, sums and the result are all about as large as a mean.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, SupportsInt, get_args

import torch
from torch import Tensor

from ddp.errors import ConfigError, did_you_mean
from ddp.process import gpu
from ddp.setting import Narrow, WireName

Op = Literal["sum", "mean", "product", "min", "max"]


COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""The function of two tensors for each operation; its `out` may be one of them."""


class OnDevice:
    """A divisor that is computed on a GPU, so that the host need not wait for it."""

    def on_device(self) -> Tensor | None:
        """Returns the divisor as a scalar, on the current stream; None if it is on the host."""
        return None


class Reduction(NamedTuple):
    """An operation on the ranks' tensors, with its scaling and wire format.

    Attributes:
        divide_by: the divisor of every sum: a whole number, unless a wire format has shrunk the terms; or a scalar that
            exists only on the GPU.
        wire: the format in which numbers travel between hosts, if not the tensors' own type.
        before, after: factors of terms and results, for means whose sums would overflow.
    """

    op: str = "sum"
    divide_by: float | Tensor = 1
    wire: WireFormat | None = None
    before: float | Tensor = 1.0
    after: float | Tensor = 1.0


def is_identity(factor: float | Tensor) -> bool:
    """Returns True for 1, which is a no-op. A factor that exists only on the GPU is never read."""
    return not isinstance(factor, Tensor) and factor == 1


def divided_(numbers: Tensor, divisor: float | Tensor) -> Tensor:
    """Divides in place. A divisor on the GPU would first be rounded to the numbers' type, if that is narrow."""
    if isinstance(divisor, Tensor) and numbers.dtype.itemsize < 4:
        return numbers.copy_(numbers.float().div_(divisor))
    return numbers if is_identity(divisor) else numbers.div_(divisor)


def scaled_(numbers: Tensor, factor: float | Tensor) -> Tensor:
    """Multiplies in place, as `divided_` divides."""
    if isinstance(factor, Tensor) and numbers.dtype.itemsize < 4:
        return numbers.copy_(numbers.float().mul_(factor))
    return numbers if is_identity(factor) else numbers.mul_(factor)


_PLAIN = {op: Reduction(op) for op in COMBINE}
SUM = _PLAIN["sum"]

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types that torch hardly supports, and the types whose sums and products have the same bits."""

OVERFLOWING = (torch.float16, torch.complex32)  # up to 65504: a sum may overflow although the mean is small


def reduction_of(
    op: Op, dtype: torch.dtype, num_ranks: int, divide_by: SupportsInt = 1, wire: Narrow | None = None
) -> Reduction:
    """Returns the reduction of tensors of this type.

    Args:
        divide_by: the divisor of a sum; that of a mean is `num_ranks`.
        wire: the format in which numbers travel.
    """
    if op == "mean":
        op, divide_by = "sum", num_ranks
    divisor: int | Tensor
    if not isinstance(divide_by, OnDevice) or (known := divide_by.on_device()) is None:
        divisor = int(divide_by)
    elif wire == "fp16":  # its numbers may overflow, and a power of two depends on the divisor
        return Reduction(op, 1, wire_format(wire), known.reciprocal())
    else:
        divisor = known
    if is_identity(divisor):
        return _PLAIN[op] if wire is None else Reduction(op, 1, wire_format(wire))
    if not isinstance(divisor, Tensor):
        refuse_divisor_out_of_range(divisor)
    before: float | Tensor = 1.0
    after: float | Tensor = 1.0
    if dtype in OVERFLOWING:
        room = overflow_headroom(num_ranks)
        divisor, before, after = 1, 1 / room, room / divisor
    form = None if wire is None else wire_format(wire, 1 if isinstance(divisor, Tensor) else divisor)
    return Reduction(op, divisor, form, before, after)


def reduction_of_shards(dtype: torch.dtype, num_shards: int, divide_by: SupportsInt) -> Reduction:
    """Returns the reduction of shards, each of which was divided by `overflow_headroom` if sums may overflow."""
    found = reduction_of("sum", dtype, num_shards, divide_by)
    if dtype in OVERFLOWING and is_identity(found.before):  # there is no divisor
        return found._replace(after=overflow_headroom(num_shards))
    return found._replace(before=1.0)


def overflow_headroom(num_terms: int) -> int:
    """Returns a divisor for n terms whose sum must not overflow: a power of two, which loses no digits."""
    return 1 << (num_terms - 1).bit_length()


def refuse_divisor_out_of_range(divide_by: int) -> None:
    """Raises ConfigError for a divisor that is not positive, or has more than 63 bits."""
    if not 1 <= divide_by < 1 << 63:
        raise ConfigError(f"divide_by={divide_by}: must be from 1 to {(1 << 63) - 1}")


# --- flat buffers -----------------------------------------------------------------------------------------------------


def flatten(tensor: Tensor) -> Tensor:
    """Returns [numel], contiguous: the tensor's own memory, or a copy if it is not contiguous.

    Wide unsigned integers, which torch hardly supports, become signed ones; sums and products have the same bits.
    """
    if (
        tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.is_floating_point()
        and not (tensor.requires_grad or tensor.is_neg())
    ):
        return tensor  # a bucket: the most frequent case
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    signed = SIGNED.get(flat.dtype)
    return flat if signed is None else flat.view(signed)


def buffers(given: Tensor | Sequence[Tensor]) -> list[tuple[Tensor, Sequence[Tensor]]]:
    """Returns flat buffers, and the tensors in each: a tensor's own memory, or copies of a list by dtype."""
    if isinstance(given, Tensor):
        return [(flatten(given), (given,))]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in given:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [(torch.cat([flatten(tensor) for tensor in tensors]), tensors) for tensors in by_dtype.values()]


def write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies a buffer back into its tensors, unless it is their own memory."""
    if flat is tensors[0]:
        return
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        if part.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
            tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))


def with_rows(tensor: Tensor) -> Tensor:
    """Returns [n, ...]: a scalar counts as one row."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def by_rank(flat: Tensor, rows: Sequence[int], like: Tensor) -> list[Tensor]:
    """Returns a flat buffer's pieces: rank r's with rows[r] rows, otherwise in the shape of `like`."""
    bounds = bounds_of(rows, like)
    return [flat[a:b].view(n, *like.shape[1:]) for n, (a, b) in zip(rows, pairwise(bounds), strict=True)]


def bounds_of(rows: Sequence[int], like: Tensor) -> list[int]:
    """Returns the start of each rank's rows in a flat buffer, in elements; the last entry is its length."""
    return [0, *accumulate(n * like.shape[1:].numel() for n in rows)]


@cache  # matters for messages that take a few microseconds
def dtype_name(dtype: torch.dtype) -> str:
    """Returns "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


# --- wire formats ----------------------------------------------------------------------------------------------------


NAMES: tuple[str, ...] = (*get_args(Narrow), "fp32")
BLOCK = 256  # numbers per scale
STRETCH = 256 * BLOCK  # numbers whose temporary copies fit in a CPU's cache; on a GPU each stretch would cost commands
MOST = 127
SCALE_BYTES, ALIGNMENT_BYTES = 4, 16
HASH = (-1_640_531_535, 2_135_587_861, 1_540_483_477)  # odd numbers without a pattern in their bits
TINY = torch.finfo(torch.float32).tiny  # smaller scales lose digits, so their blocks become zeros
BELOW_TINY = TINY * (1 - 2**-23)


class WireFormat(ABC):
    """A format in which numbers travel.

    Attributes:
        dtype: of the elements that travel.
        shrink: a power of two by which numbers must be divided before they are encoded.
        unit: messages begin at multiples of this many numbers from the start of the buffer.
    """

    dtype: torch.dtype
    unit = 1
    shrink = 1

    @abstractmethod
    def length(self, numel: int) -> int:
        """Returns the number of elements that carry `numel` numbers."""

    @abstractmethod
    def encode(self, numbers: Tensor, into: Tensor) -> None:
        """Encodes numbers, [numel], into [length(numel)]."""

    @abstractmethod
    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Decodes into numbers."""

    @abstractmethod
    def add(self, encoded: Tensor, to: Tensor) -> None:
        """Decodes and adds to numbers, in their own type."""

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
    """8-bit integers, with a float32 scale for each block: its largest number divided by 127.

    A message is the scales, and then the integers, as bytes. The error of a number is at most half a scale; less than a
    scale with stochastic rounding. A block with a non-finite number has only non-finite numbers afterwards.

    Args:
        by_chance: stochastic rounding, up with the probability of the fractional part, instead of to nearest.
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
        """Rounds up with the probability of the fractional part; whole numbers stay, in spite of rounding errors.

        The draw is a hash of the value, its place in the block and the block's scale, which differs in each step. So it
        is the same if two ranks round the same value, and if a run is repeated.
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
        """Yields views of some blocks at a time: numbers and integers, [blocks, numbers], and scales, [blocks]."""
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
    """Returns the tensor to add up, widened if requested, and the narrow format in which it travels, if any."""
    if name == "fp32":
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)), None
    return tensor, name


def wire_format(name: Narrow, divide_by: int = 1) -> WireFormat:
    """Returns the format of this name, for sums that will be divided by `divide_by`.

    Raises:
        ConfigError: the name is unknown.
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
