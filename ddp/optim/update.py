"""The update of a step: the norm of the gradient, then clipping and the optimizer's step.

A replica whose ranks each update a part of the parameters has an update of its own (`replica/sharded.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.optim.layerwise import Layerwise, clip_factor
from ddp.optim.norms import block_norms, total_norm


class Update:
    """Updates all parameters of a model.

    Args:
        module: the model.
        optimizer: over its parameters.

    Attributes:
        is_collective: all ranks must call each method.
    """

    is_collective = False

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module, self.optimizer = module, optimizer

    def gradient_norm(self) -> Tensor:
        """Returns the norm of the gradients of all parameters together."""
        return gradient_norm(self._module.parameters())

    def step(self, norm: Tensor, clip_norm: float | None) -> None:
        """Clips the gradients, whose norm is `norm`, and steps."""
        clipped_step(self.optimizer, self._module.parameters(), norm, clip_norm)

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state, as torch's optimizers do; what ranks other than 0 get may be incomplete."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` has returned on rank 0."""
        self.optimizer.load_state_dict(state)

    def finish(self) -> None:
        """Leaves the whole state in the optimizer."""


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Returns the norm of all gradients together."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return total_norm(block_norms(_values(gradient) for gradient in gradients))


def clipped_step(optimizer: Optimizer, parameters: Iterable[Tensor], norm: Tensor, clip_norm: float | None) -> None:
    """Clips gradients of this norm, and steps. LARS and LAMB multiply gradients on their way, and write to none."""
    if isinstance(optimizer, Layerwise):
        optimizer.step(gradient_factor=clip_factor(float(norm), clip_norm or optimizer.clip_norm))
        return
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    optimizer.step()


def _values(gradient: Tensor) -> Tensor:
    """Returns the values of a gradient; a sparse one is coalesced, so that each row occurs once."""
    return gradient.values() if gradient.is_sparse else gradient
