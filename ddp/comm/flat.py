"""From a user's tensors to the flat buffers that collectives run on, and back; and what a user may ask of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import SupportsInt

import torch
from torch import Tensor

from ddp.comm.arithmetic import COMBINE, SIGNED
from ddp.errors import ConfigError


def flatten(tensor: Tensor) -> Tensor:
    """[numel], contiguous: the tensor's own memory, or a copy where that is laid out otherwise.

    Wide unsigned integers, which torch hardly computes with, come as signed ones: sums and products have the same bits.
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


def write_back(flat: Tensor, tensor: Tensor) -> Tensor:
    """Copies what `flatten` gave to where it came from, unless it is still there."""
    if flat is tensor:
        return tensor
    if flat.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))
    return tensor


def in_place(run: Callable[[Tensor], None], tensor: Tensor) -> Tensor:
    """Runs over the tensor's memory, or over a flat copy that is written back."""
    flat = flatten(tensor)
    run(flat)
    return write_back(flat, tensor)


def together(run: Callable[[Tensor], None], tensors: list[Tensor]) -> list[Tensor]:
    """Runs over flat copies, one per dtype, and writes them back."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor.detach() for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([flatten(tensor) for tensor in alike])
        run(flat)
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
    return tensors


def with_rows(tensor: Tensor) -> Tensor:
    """[n, ...]: a scalar counts as one row."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def by_rank(flat: Tensor, rows: Sequence[int], like: Tensor) -> list[Tensor]:
    """A flat buffer's pieces, rank r's with rows[r] rows, in all else shaped like a tensor."""
    rest = like.shape[1:]
    bounds = bounds_of(rows, like)
    return [flat[a:b].view(n, *rest) for n, (a, b) in zip(rows, pairwise(bounds), strict=True)]


def bounds_of(rows: Sequence[int], like: Tensor) -> list[int]:
    """Where each rank's rows begin in a flat buffer, in elements; the last entry is its length."""
    return [0, *accumulate(n * like.shape[1:].numel() for n in rows)]


def sum_overflows(dtype: torch.dtype, wire_dtype: torch.dtype | None = None) -> bool:
    """True if values of this type may add up to infinity although their mean is far from it: 65504 is the largest."""
    return torch.float16 in (dtype, wire_dtype) or dtype is torch.complex32


def check_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Raises ConfigError unless it is a sequence of tensors."""
    if not isinstance(tensors, Sequence) or not all(isinstance(each, Tensor) for each in tensors):
        raise ConfigError(f"needs a tensor or a list of tensors, got {tensors!r}")
    return tensors


def check_in_place(tensor: Tensor) -> None:
    """Raises ConfigError for a tensor that cannot hold a result: sparse, or with elements that share their memory."""
    if tensor.layout is not torch.strided:
        raise ConfigError(f"a tensor with layout {tensor.layout}: collectives take dense ones; pass its .to_dense()")
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ConfigError(f"a tensor {list(tensor.shape)} that is expanded cannot hold a result: pass its .clone()")


def check_all_reduce(tensor: Tensor, op: str, wire_dtype: torch.dtype | None) -> None:
    """Raises ConfigError unless an all-reduce can combine it so, in place."""
    check_op(op, tensor.dtype)
    check_wire(wire_dtype, tensor.dtype)
    check_in_place(tensor)


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for an operation that is unknown, or that this dtype does not allow."""
    if not isinstance(op, str):
        raise ConfigError(f"op={op!r} is unknown; choose one of mean, {', '.join(COMBINE)}")
    _check_op(op, dtype)


@cache  # asked at every call
def _check_op(op: str, dtype: torch.dtype) -> None:
    if op not in ("mean", *COMBINE):
        raise ConfigError(f"op={op!r} is unknown; choose one of mean, {', '.join(COMBINE)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"op='mean' on {dtype}: use op='sum' and divide, or a floating point tensor")
    if op in ("min", "max") and dtype.is_complex:
        raise ConfigError(f"op={op!r} on {dtype}: complex numbers have no order")
    if op in ("min", "max") and dtype in SIGNED:
        raise ConfigError(f"op={op!r} on {dtype}: torch does not compare these; use a signed type")
    if dtype.is_floating_point and dtype.itemsize < 2:
        raise ConfigError(f"op={op!r} on {dtype}: torch does not add these; use float16 or bfloat16")


def check_divisor(divide_by: SupportsInt, op: str, dtype: torch.dtype) -> None:
    """Raises ConfigError for a division that is none, or that this operation or dtype does not allow."""
    if divide_by == 1:
        return
    if op == "mean":
        raise ConfigError("divide_by and op='mean' both divide; use op='sum'")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"divide_by on {dtype}: use a floating point tensor")
    if isinstance(divide_by, int) and not 1 <= divide_by < 1 << 63:
        raise ConfigError(f"divide_by={divide_by}: must be from 1 to {(1 << 63) - 1}")


def check_wire(wire_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Raises ConfigError unless such a tensor may travel in that type."""
    if wire_dtype is None:
        return
    if not isinstance(wire_dtype, torch.dtype):
        raise ConfigError(f"wire_dtype={wire_dtype!r}: must be a torch.dtype, as torch.bfloat16")
    if not (wire_dtype.is_floating_point and dtype.is_floating_point):
        raise ConfigError(f"wire_dtype={wire_dtype} with {dtype}: both must be floating point")
    if wire_dtype.itemsize > dtype.itemsize:
        raise ConfigError(f"wire_dtype={wire_dtype} is wider than the tensor's {dtype}; leave it out")
    if wire_dtype.itemsize < 2:
        raise ConfigError(f"wire_dtype={wire_dtype}: torch does not add these; use torch.bfloat16 or torch.float16")


def check_pieces(tensors: Sequence[Tensor] | None, world_size: int) -> None:
    """Raises ConfigError unless there is one tensor per rank, all of one dtype."""
    if tensors is None or len(tensors) != world_size:
        have = "none" if tensors is None else str(len(tensors))
        raise ConfigError(f"needs a list of {world_size} tensors, one per rank; got {have}")
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ConfigError(f"the tensors differ in dtype: {', '.join(str(t.dtype) for t in tensors)}")


def check_rows(tensors: Sequence[Tensor]) -> None:
    """Raises ConfigError unless the tensors agree in all dimensions but the first."""
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise ConfigError(f"the tensors may differ in the first dimension only: {[list(t.shape) for t in tensors]}")


def check_nbytes(nbytes: int) -> None:
    """Raises ConfigError for a size that no tensor has."""
    if nbytes < 0:
        raise ConfigError(f"nbytes={nbytes}: a tensor has 0 bytes or more")
