"""Sparse gradients: an embedding's rows that this rank has touched, and no others.

They live outside buckets. Each rank sends its indices and values to all; everyone puts them side by side in the order
of the ranks and adds up equal indices, so that all get the same bits. Cost: every rank receives the rows of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.gradients.bucket import Slot


def produces_sparse_gradient(module: nn.Module) -> bool:
    """Returns True if the gradient of the module's weight is a sparse tensor."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def reduce_sparse(comm: Communicator, slot: Slot, *, divide_by: float) -> None:
    """Makes a gradient the sum over all ranks, divided; leaves it as it is if no rank has one. Collective."""
    parameter, gradient = slot.parameter, slot.parameter.grad
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
            parameter.new_empty(0, *parameter.shape[1:]),
            parameter.shape,
            check_invariants=False,
        )
    if gradient.layout is not torch.sparse_coo:
        raise RuntimeError(
            f"{slot.name} got a dense gradient, though its layer has sparse=True: the parameter is used elsewhere, "
            "too. Make the layer with sparse=False"
        )
    gradient = gradient.detach().coalesce()
    indices = torch.cat(comm.all_gather(gradient.indices().t().contiguous()))  # [touched rows of all, 1]
    values = torch.cat(comm.all_gather(gradient.values()))  # [touched rows of all, …]
    if len(indices) or parameter.grad is not None:
        parameter.grad = _added_up(indices.t(), values, parameter).div_(divide_by)


def _added_up(indices: Tensor, values: Tensor, parameter: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()
