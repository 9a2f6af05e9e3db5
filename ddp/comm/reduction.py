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


class Reduction(NamedTuple):
    """An operation on the ranks' tensors, and what happens to its result on the way.

    Attributes:
        divide_by: what every sum is divided by, once; a whole number, but where a wire format has shrunk the terms.
        wire: how numbers travel between hosts, if not in the tensors' own type.
        before, after: what terms and results are multiplied by, where sums would overflow and a mean does not.
    """

    op: str = "sum"
    divide_by: float = 1
    wire: WireFormat | None = None
    before: float = 1.0
    after: float = 1.0


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
    divisor = int(divide_by)
    if divisor == 1:
        return _PLAIN[op] if wire is None else Reduction(op, 1, wire_format(wire))
    refuse_divisor_out_of_range(divisor)
    before = after = 1.0
    if dtype in OVERFLOWING:
        room = 1 << (num_ranks - 1).bit_length()  # a power of two, by which dividing loses no digits
        divisor, before, after = 1, 1 / room, room / divisor
    return Reduction(op, divisor, None if wire is None else wire_format(wire, divisor), before, after)


def refuse_divisor_out_of_range(divide_by: int) -> None:
    """Raises ConfigError for a divisor that is not positive, or has more than 63 bits."""
    if not 1 <= divide_by < 1 << 63:
        raise ConfigError(f"divide_by={divide_by}: must be from 1 to {(1 << 63) - 1}")
