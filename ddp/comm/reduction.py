"""Combines two tensors into one, as `op=` says. (The mean is a sum that is divided once, at the end.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ddp.comm.wire_format import WireFormat


class Combination(NamedTuple):
    """An operation on two tensors, in two forms: into the first one, or into a third."""

    into: Callable[[Tensor, Tensor], Tensor]
    to: Callable[..., Tensor]


COMBINE = {
    "sum": Combination(Tensor.add_, torch.add),
    "product": Combination(Tensor.mul_, torch.mul),
    "min": Combination(lambda here, other: torch.minimum(here, other, out=here), torch.minimum),
    "max": Combination(lambda here, other: torch.maximum(here, other, out=here), torch.maximum),
}


class Reduction(NamedTuple):
    """An operation on the ranks' tensors, and what happens to its result on the way."""

    op: str = "sum"
    divide_by: float = 1  # of every sum, once; a whole number, but where a wire format has shrunk the terms
    wire: WireFormat | None = None  # how numbers travel between hosts, if not in the tensors' own type


SUM = Reduction()

SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types that torch hardly computes with, and those whose sums and products have the same bits."""
