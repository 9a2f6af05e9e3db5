"""The choices of a communicator, made when it begins: its settings, where its tensors are, and how they travel.

    device            what was asked for; or where a replica's parameters are; or a GPU if the program has begun to use
                      one; or the CPU. One communicator for each kind of device, over the same ranks
    backend "auto"    NCCL where every local rank has a GPU of its own, else Gloo (CUDA tensors staged through the host)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ddp import gpu
from ddp.collectives.simulate import SEGMENT_BYTES
from ddp.errors import ConfigError
from ddp.setting import Additions

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choices of one communicator, which its subgroups inherit. The same on all ranks, but for `device`.

    Attributes:
        device: where this rank's tensors live.
        generation: version of the membership.
        algorithm: what `algorithm="auto"` in a call stands for; "auto" here: the route that takes least time.
        order: "canonical" lets "auto" take only routes whose additions follow the canonical binary tree over the ranks.
        shared_memory: let CPU tensors go through the memory of a host where its ranks share it.
        segment_bytes: size of a pipelining piece of a chunk.
        abort_s: longest wait for a neighbour, in seconds.
        debug: compare what the ranks call before every collective.
    """

    device: torch.device = CPU
    generation: int = 0
    algorithm: str = "auto"
    order: Additions = "any"
    shared_memory: bool = True
    segment_bytes: int = SEGMENT_BYTES
    abort_s: float = 60.0
    debug: bool = False


def device_of(module: nn.Module) -> torch.device | None:
    """Returns where a replica's gradients are reduced: on a GPU if any parameter is there; None without parameters."""
    devices = [parameter.device for parameter in module.parameters()]
    kinds = (gpu.KIND, "cpu")
    return next((each for kind in kinds for each in devices if each.type == kind), None)


def choose_device(
    device: str | torch.device | None, backend: str, local_rank: int, local_world_size: int
) -> tuple[torch.device, str]:
    """Returns the device and the backend; a GPU without a number is the rank's own, or the one that is current.

    Raises:
        ConfigError: the device or the backend is not possible here.
    """
    if device is None:
        device = gpu.KIND if torch.get_default_device().type == gpu.KIND or gpu.cuda.is_initialized() else "cpu"
    num_gpus = gpu.cuda.device_count()
    kind = (gpu.KIND if num_gpus else "cpu") if str(device) == "auto" else torch.device(device).type
    if kind == gpu.KIND and not num_gpus:
        raise ConfigError("device=cuda, but torch sees no GPU here; use device=cpu, or install torch's CUDA build")
    if kind not in ("cpu", gpu.KIND):
        raise ConfigError(f"device={device} is not supported; use auto, cpu or cuda")
    own_gpu = kind == gpu.KIND and local_world_size <= num_gpus
    if backend == "auto":
        backend = "nccl" if own_gpu else "gloo"
    if backend == "nccl" and not own_gpu:
        reason = f"{local_world_size} ranks share {num_gpus} GPUs" if kind == gpu.KIND else "tensors are on the CPU"
        raise ConfigError(f"backend=nccl needs a GPU for each rank, but {reason}; use backend=gloo")
    if backend not in ("gloo", "nccl"):
        raise ConfigError(f"backend={backend!r} is unknown; use auto, gloo or nccl")
    if kind == "cpu":
        return torch.device("cpu"), backend
    index = None if str(device) == "auto" else torch.device(device).index
    if index is None and gpu.cuda.is_initialized():  # asking would begin it
        index = gpu.cuda.current_device() or None  # 0 is also what it is before anyone sets it
    return torch.device(gpu.KIND, local_rank % num_gpus if index is None else index), backend
