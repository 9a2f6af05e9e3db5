"""Turns a user's tensors into the flat buffers that collectives run on, and combines two buffers into one.

`op=` says how two are combined. A mean is a sum that is divided once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, SupportsInt

import torch
from torch import Tensor

from ddp.comm.wire_format import WireFormat, wire_format
from ddp.errors import ConfigError
from ddp.setting import Narrow

Op = Literal["sum", "mean", "product", "min", "max"]


COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""By operation, the function of two tensors; its `out` may be one of them."""


class OnDevice:
    """A divisor that a GPU computes, so that the host need not wait for it."""

    def on_device(self) -> Tensor | None:
        """Returns it as a scalar, on the current stream; None if the host knows it."""
        return None


class Reduction(NamedTuple):
    """An operation on the ranks' tensors, and what happens to its result on the way.

    Attributes:
        divide_by: what every sum is divided by, once: a whole number, but where a wire format has shrunk the terms; or
            a scalar that only the GPU knows.
        wire: how numbers travel between hosts, if not in the tensors' own type.
        before, after: what terms and results are multiplied by, where sums would overflow and a mean does not.
    """

    op: str = "sum"
    divide_by: float | Tensor = 1
    wire: WireFormat | None = None
    before: float | Tensor = 1.0
    after: float | Tensor = 1.0


def is_identity(factor: float | Tensor) -> bool:
    """Returns True for 1, which changes nothing. A factor that exists only on the GPU is never read."""
    return not isinstance(factor, Tensor) and factor == 1


def divided_(numbers: Tensor, divisor: float | Tensor) -> Tensor:
    """Divides in place. A GPU would round its own divisor to the numbers' type first, if that is narrow."""
    if isinstance(divisor, Tensor) and numbers.dtype.itemsize < 4:
        return numbers.copy_(numbers.float().div_(divisor))
    return numbers.div_(divisor)


def scaled_(numbers: Tensor, factor: float | Tensor) -> Tensor:
    """Multiplies in place, as `divided_` divides."""
    if isinstance(factor, Tensor) and numbers.dtype.itemsize < 4:
        return numbers.copy_(numbers.float().mul_(factor))
    return numbers.mul_(factor)


_PLAIN = {op: Reduction(op) for op in COMBINE}
SUM = _PLAIN["sum"]

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types that torch hardly computes with, and those whose sums and products have the same bits."""

OVERFLOWING = (torch.float16, torch.complex32)  # 65504 is the largest: a sum may be infinite, and the mean far from it


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
    elif wire == "fp16":  # whose numbers may overflow; no power of two can be chosen without knowing the divisor
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
    """Returns the sum of shards, each of which was divided by `overflow_headroom` if its sums may overflow."""
    found = reduction_of("sum", dtype, num_shards, divide_by)
    if dtype in OVERFLOWING and is_identity(found.before):  # nothing divides
        return found._replace(after=overflow_headroom(num_shards))
    return found._replace(before=1.0)


def overflow_headroom(num_terms: int) -> int:
    """Returns the divisor of n terms whose sum must not overflow: a power of two, because that loses no digits."""
    return 1 << (num_terms - 1).bit_length()


def refuse_divisor_out_of_range(divide_by: int) -> None:
    """Raises ConfigError for a divisor that is not positive, or has more than 63 bits."""
    if not 1 <= divide_by < 1 << 63:
        raise ConfigError(f"divide_by={divide_by}: must be from 1 to {(1 << 63) - 1}")


# --- flat buffers -----------------------------------------------------------------------------------------------------


def flatten(tensor: Tensor) -> Tensor:
    """Returns [numel], contiguous: the tensor's own memory, or a copy where that is laid out otherwise.

    Wide unsigned integers, which torch hardly computes with, become signed ones; sums and products have the same bits.
    """
    if (
        tensor.dim() == 1
        and tensor.is_contiguous()
        and tensor.is_floating_point()
        and not (tensor.requires_grad or tensor.is_neg())
    ):
        return tensor  # a bucket: what all this is for, and the quickest way through
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    signed = SIGNED.get(flat.dtype)
    return flat if signed is None else flat.view(signed)


def buffers(given: Tensor | Sequence[Tensor]) -> list[tuple[Tensor, Sequence[Tensor]]]:
    """Returns flat buffers, and the tensors that each holds: a tensor's own memory, or copies of a list's by dtype."""
    if isinstance(given, Tensor):
        return [(flatten(given), (given,))]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in given:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [(torch.cat([flatten(tensor) for tensor in tensors]), tensors) for tensors in by_dtype.values()]


def write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies a buffer back into the tensors that it holds, unless it is their own memory."""
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
    """Returns a flat buffer's pieces, rank r's with rows[r] rows, in all else shaped like a tensor."""
    bounds = bounds_of(rows, like)
    return [flat[a:b].view(n, *like.shape[1:]) for n, (a, b) in zip(rows, pairwise(bounds), strict=True)]


def bounds_of(rows: Sequence[int], like: Tensor) -> list[int]:
    """Returns where each rank's rows begin in a flat buffer, in elements; the last entry is its length."""
    return [0, *accumulate(n * like.shape[1:].numel() for n in rows)]


@cache  # a message of a few bytes takes a few microseconds
def dtype_name(dtype: torch.dtype) -> str:
    """Returns "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
