"""Turns a user's tensors into the flat buffers that collectives run on, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
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
