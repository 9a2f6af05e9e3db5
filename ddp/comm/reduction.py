"""Combines two tensors into one, as `op=` says. A mean is a sum that is divided once, at the end."""

from __future__ import annotations

from collections.abc import Callable
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
    """A divisor that a GPU finds out, so that the host need not wait for it."""

    def on_device(self) -> Tensor | None:
        """Returns it as a scalar, on the current stream; None if it is the host that is to know."""
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


def is_one(factor: float | Tensor) -> bool:
    """Returns True if nothing is to be done. Of what only a GPU knows, nobody asks."""
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
    if is_one(divisor):
        return _PLAIN[op] if wire is None else Reduction(op, 1, wire_format(wire))
    if not isinstance(divisor, Tensor):
        refuse_divisor_out_of_range(divisor)
    before: float | Tensor = 1.0
    after: float | Tensor = 1.0
    if dtype in OVERFLOWING:
        room = room_for(num_ranks)
        divisor, before, after = 1, 1 / room, room / divisor
    form = None if wire is None else wire_format(wire, 1 if isinstance(divisor, Tensor) else divisor)
    return Reduction(op, divisor, form, before, after)


def room_for(num_terms: int) -> int:
    """Returns what so many terms are divided by, that their sum does not overflow: a power of two loses no digits."""
    return 1 << (num_terms - 1).bit_length()


def refuse_divisor_out_of_range(divide_by: int) -> None:
    """Raises ConfigError for a divisor that is not positive, or has more than 63 bits."""
    if not 1 <= divide_by < 1 << 63:
        raise ConfigError(f"divide_by={divide_by}: must be from 1 to {(1 << 63) - 1}")
