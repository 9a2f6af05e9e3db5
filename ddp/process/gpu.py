"""The GPU's name in this package, and torch's module for it.

The tests replace both by a stand-in (`tests/gpu_standin/`), so that the code for GPUs runs without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

KIND = "cuda"  # the type of its devices
cuda = torch.cuda


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on a device. The host does not wait for the copy to a GPU."""
    return (tensor.pin_memory() if device.type == KIND else tensor).to(device, non_blocking=True)


def leaving(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU. A copy from a GPU is complete once its current stream has been waited for."""
    if tensor.device.type != KIND:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def reduced(each: object) -> Any:
    """Returns the pickled form of a GPU tensor, as one on the CPU, so that no reader needs a GPU.

    For `reducer_override` of a pickler; NotImplemented for all other objects.
    """
    if not isinstance(each, Tensor) or each.device.type != KIND:
        return NotImplemented
    there = each.detach().cpu()
    is_parameter = isinstance(each, nn.Parameter)
    found = nn.Parameter(there, each.requires_grad) if is_parameter else there.requires_grad_(each.requires_grad)
    return found.__reduce_ex__(2)
