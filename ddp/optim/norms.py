"""Norms of tensors, block by block, so that ranks with some blocks each find the same bits as one rank with all.

A large tensor is cut into blocks of `BLOCK_NUMEL` elements, in the order in which they lie in memory; a smaller one is
one block. The norm of several blocks is the root of the sum of their squares, added in this order. Nothing else, such
as the division of blocks among ranks, changes its bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp.process.memory import is_dense

BLOCK_NUMEL = 1 << 17


def num_blocks(numel: int) -> int:
    """Returns the number of blocks of a tensor of this size."""
    return max(1, -(-numel // BLOCK_NUMEL))


def in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements as they lie in memory, [numel]; a copy if there are gaps between them."""
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.reshape(-1)


def block_norms(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Returns the norms of all blocks of all tensors, one after the other, [num_blocks].

    Args:
        dtype: of the computation; None for `wide` of the tensors' types.
    """
    blocks = list(tensors)
    if any(tensor.numel() > BLOCK_NUMEL or tensor.is_complex() for tensor in blocks):
        blocks = [block for tensor in blocks for block in _blocks(tensor)]
    if not blocks:
        return torch.zeros(0)
    norms = list(torch._foreach_norm(blocks, 2, dtype or wide({block.dtype for block in blocks})))
    if len({norm.device for norm in norms}) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    return torch.stack(norms)


def wide(dtypes: Collection[torch.dtype]) -> torch.dtype:
    """Returns the type in which norms of tensors of these types are computed together."""
    return torch.float64 if torch.float64 in dtypes or torch.complex128 in dtypes else torch.float32


def total_norm(norms: Tensor) -> Tensor:
    """Returns the norm of all blocks together, from their norms."""
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Returns the norm of all gradients together."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # a sparse gradient is coalesced, so that each row occurs once
    return total_norm(block_norms(each.coalesce().values() if each.is_sparse else each for each in gradients))


def whole_norms(norms: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns the norm of each tensor, [num_tensors], from the norms of all blocks.

    Args:
        norms: [num_blocks].
        counts: the number of blocks of each tensor.
    """
    parts = norms.split(list(counts))
    return torch.stack([part[0] if len(part) == 1 else total_norm(part) for part in parts])


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return (tensor,) if tensor.numel() <= BLOCK_NUMEL else in_memory_order(tensor).split(BLOCK_NUMEL)


Norms = Any  # [num_tensors], an array of NumPy's; on a GPU a tensor, which the host does not wait for


def functions_for(norms: Norms) -> Any:
    """Returns the module whose functions take such norms."""
    return torch if isinstance(norms, Tensor) else np
