"""The GPU's one name in this package, and torch's module for it.

The tests put a stand-in in the place of both (`tests/gpu_standin/`), so that what is done on a GPU runs without one.
"""

from __future__ import annotations

import torch
from torch import Tensor

KIND = "cuda"  # the type of its devices
cuda = torch.cuda


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the CPU's on a device. The host does not wait until a GPU has it."""
    return (tensor.pin_memory() if device.type == KIND else tensor).to(device, non_blocking=True)


def leaving(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU. That of a GPU's is there once the GPU's current stream has been waited for."""
    if tensor.device.type != KIND:
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
