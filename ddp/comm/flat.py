"""Turns a user's tensors into the flat buffers that collectives run on, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ddp.comm.reduction import SIGNED


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


def write_back(flat: Tensor, tensor: Tensor) -> Tensor:
    """Copies what `flatten` returned back into `tensor`, unless both are the same memory."""
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


def sum_overflows(dtype: torch.dtype) -> bool:
    """Returns True if values of this type may add up to infinity although their mean is far from it."""
    return dtype in (torch.float16, torch.complex32)  # 65504 is the largest
