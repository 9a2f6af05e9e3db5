"""Refuses what no collective can do. Each function raises ConfigError, on every rank alike, before anything is sent.

Read before: `arithmetic.py`. Read next: `flat.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import index
from typing import SupportsIndex, SupportsInt

import torch
from torch import Tensor

from ddp.comm.arithmetic import COMBINE, SIGNED
from ddp.comm.wire_format import WireName, wire_format
from ddp.errors import ConfigError


def tensors(given: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the given tensors; accepts one, or a sequence."""
    if isinstance(given, Tensor):
        return (given,)
    if not isinstance(given, Sequence) or not all(isinstance(each, Tensor) for each in given):
        raise ConfigError(f"needs a tensor or a list of tensors, got {given!r}")
    return given


def one_tensor(given: object) -> None:
    """Refuses anything but one dense tensor."""
    if not isinstance(given, Tensor):
        raise ConfigError(f"a message is one tensor, got {given!r}: send each tensor by itself")
    dense(given)
    if given.is_meta or given.is_quantized:
        why = "on the meta device cannot be a message: it has no values"
        if given.is_quantized:
            why = "that is quantized cannot be a message: pass its .int_repr(), and its scale"
        raise ConfigError(f"a tensor {list(given.shape)} {why}")


def on(device: torch.device, tensor: Tensor) -> None:
    """Refuses a tensor that the communicator's transport and memory do not reach."""
    if tensor.device != device and tensor.device.type != device.type:  # the first comparison is the quick one
        raise ConfigError(
            f"a tensor {list(tensor.shape)} on {tensor.device}, and this communicator's are on {device}: pass its "
            f".to({str(device)!r}), or call that of ddp.init(device={tensor.device.type!r})"
        )


def dense(tensor: Tensor) -> None:
    """Refuses a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise ConfigError(f"a tensor with layout {tensor.layout}: collectives take dense ones; pass its .to_dense()")


def holds_result(tensor: Tensor) -> None:
    """Refuses a tensor that cannot hold a result: sparse, or with elements that share their memory."""
    dense(tensor)
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ConfigError(f"a tensor {list(tensor.shape)} that is expanded cannot hold a result: pass its .clone()")


def operation(op: str, dtype: torch.dtype) -> None:
    """Refuses an operation that is unknown, or that this dtype does not allow."""
    if not isinstance(op, str):
        raise ConfigError(f"op={op!r} is unknown; choose one of mean, {', '.join(COMBINE)}")
    _operation(op, dtype)


@cache  # asked at every call
def _operation(op: str, dtype: torch.dtype) -> None:
    if op not in ("mean", *COMBINE):
        raise ConfigError(f"op={op!r} is unknown; choose one of mean, {', '.join(COMBINE)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"op='mean' on {dtype}: use op='sum' and divide, or a floating point tensor")
    if op in ("min", "max") and dtype.is_complex:
        raise ConfigError(f"op={op!r} on {dtype}: complex numbers have no order")
    if op in ("min", "max") and dtype in SIGNED:
        raise ConfigError(f"op={op!r} on {dtype}: torch does not compare these; use a signed type")
    if dtype.is_floating_point and dtype.itemsize < 2:
        raise ConfigError(f"op={op!r} on {dtype}: torch does not add these; use float16 or bfloat16")


def divisor(divide_by: SupportsInt, op: str, dtype: torch.dtype) -> None:
    """Refuses a divisor that is out of range, or that this operation or dtype does not allow."""
    if divide_by == 1:
        return
    if op == "mean":
        raise ConfigError("divide_by and op='mean' both divide; use op='sum'")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"divide_by on {dtype}: use a floating point tensor")
    if isinstance(divide_by, float):
        raise ConfigError(f"divide_by={divide_by}: must be a whole number")
    if isinstance(divide_by, SupportsIndex):
        divisor_in_range(index(divide_by))


def divisor_in_range(divide_by: int) -> None:
    """Refuses a divisor that is out of range."""
    if not 1 <= divide_by < 1 << 63:
        raise ConfigError(f"divide_by={divide_by}: must be from 1 to {(1 << 63) - 1}")


def wire(name: WireName | None, op: str, dtype: torch.dtype) -> None:
    """Refuses a format that such a tensor may not travel in."""
    if name is None:
        return
    narrow = torch.float32 if name == "fp32" else wire_format(name).dtype
    if op not in ("sum", "mean"):
        raise ConfigError(f"wire={name!r} with op={op!r}: what travels is added up; take op='sum', or leave it out")
    if not dtype.is_floating_point:
        raise ConfigError(f"wire={name!r} with {dtype}: a wire format is for floating point tensors; leave it out")
    if name != "fp32" and dtype.itemsize < narrow.itemsize:
        raise ConfigError(f"wire={name!r} is wider than the tensor's {dtype}; leave it out")
    if narrow == torch.uint8 and dtype.itemsize < torch.float32.itemsize:
        raise ConfigError(f"wire={name!r} with {dtype}: takes float32 and float64; take wire='bf16', or leave it out")


def pieces(given: Sequence[Tensor] | None, world_size: int) -> None:
    """Refuses anything but one dense tensor per rank, all of one dtype."""
    if given is None or len(given) != world_size:
        have = "none" if given is None else str(len(given))
        raise ConfigError(f"needs a list of {world_size} tensors, one per rank; got {have}")
    for tensor in given:
        dense(tensor)
    if len({tensor.dtype for tensor in given}) > 1:
        raise ConfigError(f"the tensors differ in dtype: {', '.join(str(tensor.dtype) for tensor in given)}")


def rows(given: Sequence[Tensor]) -> None:
    """Refuses tensors that differ in another dimension than the first."""
    if len({tensor.shape[1:] for tensor in given}) > 1:
        shapes = [list(tensor.shape) for tensor in given]
        raise ConfigError(f"the tensors may differ in the first dimension only: {shapes}")


def root(rank: int, world_size: int) -> None:
    """Refuses a root that is no rank."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"root={rank} is no rank of a world of {world_size}")


def peer(name: str, rank: int, *, me: int, world_size: int) -> None:
    """Refuses a peer that is no other rank."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise ConfigError(f"{name}={rank!r}: must be a whole number, the rank at the other end of the message")
    if not 0 <= rank < world_size:
        raise ConfigError(f"{name}={rank} is no rank of a world of {world_size}")
    if rank == me:
        raise ConfigError(f"{name}={rank} is this rank itself: a message needs another one; copy the tensor instead")


def subgroup(ranks: Sequence[int], world_size: int) -> None:
    """Refuses anything but distinct ranks, at least one."""
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(world_size)) or not ranks:
        raise ConfigError(f"ranks={list(ranks)}: a subgroup needs distinct ranks from 0 to {world_size - 1}")


def size(nbytes: int) -> None:
    """Refuses a size that no tensor has."""
    if not isinstance(nbytes, int) or nbytes < 0:
        raise ConfigError(f"nbytes={nbytes!r}: a tensor has 0 bytes or more, a whole number")


def slices(flat: Tensor, bounds: Sequence[int], world_size: int) -> None:
    """Refuses anything but a flat tensor, cut into one slice per rank."""
    holds_result(flat)
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ConfigError(f"a tensor {list(flat.shape)} with strides {flat.stride()}: pass it flat and contiguous")
    cuts = list(bounds)
    if len(cuts) != world_size + 1 or cuts != sorted(cuts) or (cuts[0], cuts[-1]) != (0, flat.numel()):
        raise ConfigError(f"bounds={cuts}: must be {world_size + 1} ascending positions from 0 to {flat.numel()}")
