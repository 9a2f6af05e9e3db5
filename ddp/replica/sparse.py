"""Sparse gradients: an embedding's rows that this rank has touched, and no others.

They live outside buckets. Each rank sends its indices and values to all; everyone puts them side by side in the order
of the ranks and adds up equal indices, so that all come to the same bits. Bytes: those of all ranks' rows, to everyone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.gradients.bucket import Slot
from ddp.replica.arrangement import register_hook


def produces_sparse_gradient(module: nn.Module) -> bool:
    """Returns True if the gradient of the module's weight is a sparse tensor."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


class SparseGradients:
    """Those of one replica.

    Args:
        slots: of the parameters that have one.
        on_gradient: what autograd calls when it has accumulated one.

    Attributes:
        arrivals: parameters that got one since the last reduction.
    """

    def __init__(self, comm: Communicator, slots: Sequence[Slot], *, on_gradient: Callable[[Tensor], None]) -> None:
        self._comm, self._slots, self._on_gradient = comm, slots, on_gradient
        self._handles: list[Any] = []
        self.arrivals: list[Tensor] = []
        self.hook()

    def hook(self) -> None:
        """Lets autograd tell who has come."""
        self.unhook()
        self._handles = [register_hook(slot.parameter, self._on_gradient) for slot in self._slots]

    def unhook(self) -> None:
        """Autograd tells nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take_over(self, arrived: Sequence[Tensor]) -> list[Tensor]:
        """Notes parameters that got a gradient while others kept watch (in `no_sync`). Returns those it has not."""
        mine = {id(slot.parameter) for slot in self._slots}
        self.arrivals += [parameter for parameter in arrived if id(parameter) in mine]
        return [parameter for parameter in arrived if id(parameter) not in mine]

    def without_gradient(self) -> list[Slot]:
        """Slots whose parameter got none since the last reduction."""
        arrived = set(map(id, self.arrivals))
        return [slot for slot in self._slots if id(slot.parameter) not in arrived]

    def reduce(self, *, divide_by: int) -> None:
        """Makes each gradient the sum over all ranks, divided; left as it is if no rank has one. Collective."""
        for slot in self._slots:
            _reduce(self._comm, slot, divide_by=divide_by)


def _reduce(comm: Communicator, slot: Slot, *, divide_by: int) -> None:
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
