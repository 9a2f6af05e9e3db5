"""The update of a step: the norm of the gradient, then clipping and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp.optim.layerwise import Layerwise, clip_factor
from ddp.optim.norms import block_norms, total_norm


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
