"""Checks of arguments. Each function raises ConfigError, on every rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import index
from typing import SupportsIndex, SupportsInt

import torch
from torch import Tensor

from ddp.collectives.shards import most_nodes
from ddp.comm.reduction import COMBINE, SIGNED, refuse_divisor_out_of_range, wire_format
from ddp.errors import ConfigError, did_you_mean
from ddp.setting import WireName

OPERATIONS = ("mean", *COMBINE)
QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def tensors(given: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the given tensor or tensors as a sequence."""
    if isinstance(given, Tensor):
        return (given,)
    if not isinstance(given, Sequence) or not all(isinstance(each, Tensor) for each in given):
        raise ConfigError(f"needs a tensor or a list of tensors, got {given!r}")
    return given


def on(device: torch.device, tensor: Tensor) -> None:
    """Refuses a tensor that the communicator's transport and memory do not reach, or that is not dense."""
    dense(tensor)
    if tensor.device != device:
        kind = tensor.device.type
        other = f", or call that of ddp.init(device={kind!r})" if kind != device.type else ""
        raise ConfigError(
            f"a tensor {list(tensor.shape)} on {tensor.device}, and this communicator's are on {device}: pass its "
            f".to({str(device)!r}){other}"
        )


def dense(tensor: Tensor) -> None:
    """Refuses anything but a tensor whose elements are plain numbers in memory."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"needs a tensor, got {tensor!r:.60}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "that is nested" if tensor.is_nested else f"with layout {tensor.layout}"
        remedy = "each of its .unbind()" if tensor.is_nested else "its .to_dense()"
        raise ConfigError(f"a tensor {kind}: collectives take dense ones; pass {remedy}")
    if tensor.is_meta:
        raise ConfigError(f"a tensor {list(tensor.shape)} on the meta device has no values: move the model first")
    if tensor.dtype in QUANTIZED:
        raise ConfigError(f"a tensor {list(tensor.shape)} that is quantized: pass its .int_repr(), and its scale")


def result_on(device: torch.device, tensor: Tensor) -> None:
    """Refuses a tensor that the communicator does not reach, or that cannot hold a result."""
    on(device, tensor)
    holds_result(tensor)


def holds_result(tensor: Tensor) -> None:
    """Refuses a tensor that cannot hold a result."""
    if not tensor.is_contiguous() and _overlaps(tensor):
        raise ConfigError(
            f"a tensor {list(tensor.shape)} with strides {tensor.stride()} cannot hold a result, because elements "
            "share their memory (it is expanded, say): pass its .clone()"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ConfigError(f"a tensor {list(tensor.shape)} from torch.inference_mode() cannot change: pass its .clone()")


def _overlaps(tensor: Tensor) -> bool:
    """Returns True unless each stride is longer than the span of all shorter ones."""
    spanned = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= spanned:
            return True
        spanned += stride * (size - 1)
    return False


def memory(numel: int, dtype: torch.dtype) -> None:
    """Refuses an impossible number of elements, and a dtype that is not of plain numbers."""
    if not isinstance(numel, int) or isinstance(numel, bool) or numel < 0:
        raise ConfigError(f"numel={numel!r}: must be a whole number, at least 0")
    if not isinstance(dtype, torch.dtype) or dtype in QUANTIZED:
        raise ConfigError(f"dtype={dtype!r}: must be a dtype of plain numbers, such as torch.float32")
    if numel * dtype.itemsize >= 1 << 62:
        raise ConfigError(f"numel={numel} of {dtype}: no machine has that much memory")


@cache  # asked at every call
def operation(op: str, dtype: torch.dtype) -> None:
    """Refuses an operation that this dtype does not allow."""
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"op='mean' on {dtype}: use op='sum' and divide, or a floating point tensor")
    if op in ("min", "max") and dtype.is_complex:
        raise ConfigError(f"op={op!r} on {dtype}: complex numbers have no order")
    if op in ("min", "max") and dtype in SIGNED:
        raise ConfigError(f"op={op!r} on {dtype}: torch does not compare these; use a signed type")
    if dtype.is_floating_point and dtype.itemsize < 2:
        raise ConfigError(f"op={op!r} on {dtype}: torch does not add these; use float16 or bfloat16")


def reduction(op: str, dtype: torch.dtype, divide_by: SupportsInt = 1, wire_name: WireName | None = None) -> None:
    """Refuses an operation, a divisor or a wire format that is unknown, or incompatible with the others."""
    if op not in OPERATIONS:
        hint = did_you_mean(str(op).rpartition(".")[2], OPERATIONS)  # of torch's ReduceOp, too
        raise ConfigError(f"op={op!r} is unknown; choose one of {', '.join(OPERATIONS)}.{hint}".removesuffix("."))
    operation(op, dtype)
    wire(wire_name, op, dtype)
    if divide_by == 1:
        return
    if op == "mean":
        raise ConfigError("divide_by and op='mean' both divide; use op='sum'")
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"divide_by on {dtype}: use a floating point tensor")
    if isinstance(divide_by, float):
        raise ConfigError(f"divide_by={divide_by}: must be a whole number")
    if isinstance(divide_by, SupportsIndex):
        refuse_divisor_out_of_range(index(divide_by))


def wire(name: WireName | None, op: str, dtype: torch.dtype) -> None:
    """Refuses a wire format that this tensor cannot travel in."""
    if name is None:
        return
    narrow = torch.float32 if name == "fp32" else wire_format(name).dtype
    if op not in ("sum", "mean"):
        raise ConfigError(f"wire={name!r} with op={op!r}: only sums can travel in it; take op='sum', or leave it out")
    if not dtype.is_floating_point:
        raise ConfigError(f"wire={name!r} with {dtype}: a wire format is for floating point tensors; leave it out")
    if name != "fp32" and dtype.itemsize < narrow.itemsize:
        raise ConfigError(f"wire={name!r} is wider than the tensor's {dtype}; leave it out")
    if narrow == torch.uint8 and dtype.itemsize < torch.float32.itemsize:
        raise ConfigError(f"wire={name!r} with {dtype}: takes float32 and float64; take wire='bf16', or leave it out")


def pieces(given: Sequence[Tensor] | None, world_size: int, device: torch.device) -> None:
    """Refuses anything but one dense tensor per rank, all of one dtype, on this device."""
    if given is None or len(given) != world_size:
        have = "none" if given is None else str(len(given))
        raise ConfigError(f"needs a list of {world_size} tensors, one per rank; got {have}")
    for tensor in given:
        on(device, tensor)
    if len({tensor.dtype for tensor in given}) > 1:
        raise ConfigError(f"the tensors differ in dtype: {', '.join(str(tensor.dtype) for tensor in given)}")


def rows(given: Sequence[Tensor]) -> None:
    """Refuses tensors that differ in any dimension but the first."""
    if len({tensor.shape[1:] for tensor in given}) > 1:
        shapes = [list(tensor.shape) for tensor in given]
        raise ConfigError(f"the tensors may differ in the first dimension only: {shapes}")


def root(rank: int, world_size: int) -> None:
    """Refuses a root that is not a rank."""
    if not 0 <= rank < world_size:
        raise ConfigError(f"root={rank} is no rank of a world of {world_size}")


def message(device: torch.device, tensor: object, name: str, rank: int, *, me: int, world_size: int) -> None:
    """Refuses anything but one dense tensor, and a peer that is not another rank."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"a message is one tensor, got {tensor!r}: send each tensor by itself")
    on(device, tensor)
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
    """Refuses an impossible size."""
    if not isinstance(nbytes, int) or nbytes < 0:
        raise ConfigError(f"nbytes={nbytes!r}: a tensor has 0 bytes or more, a whole number")


def is_flat(flat: Tensor) -> None:
    """Refuses anything but a flat, contiguous tensor that can hold a result, outside of any graph."""
    holds_result(flat)
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ConfigError(f"a tensor {list(flat.shape)} with strides {flat.stride()}: pass it flat and contiguous")
    if flat.requires_grad:
        raise ConfigError(f"a tensor {list(flat.shape)} that requires a gradient: pass its .detach()")
    if (signed := SIGNED.get(flat.dtype)) is not None:
        raise ConfigError(f"a tensor of {flat.dtype}, which torch does not add: pass its .view({signed})")


def slices(flat: Tensor, bounds: Sequence[int], world_size: int) -> None:
    """Refuses anything but a flat tensor, cut into one slice per rank."""
    is_flat(flat)
    cuts = list(bounds)
    if len(cuts) != world_size + 1 or cuts != sorted(cuts) or (cuts[0], cuts[-1]) != (0, flat.numel()):
        raise ConfigError(f"bounds={cuts}: must be {world_size + 1} ascending positions from 0 to {flat.numel()}")


def rows_of_shards(given: Tensor | Sequence[Tensor], num_shards: int, world_size: int, op: str, wire: object) -> None:
    """Refuses anything but a row for each of this rank's nodes of the tree over shards."""
    if num_shards < world_size:
        raise ConfigError(f"num_shards={num_shards} for {world_size} ranks: give at least as many shards as ranks")
    num_rows = most_nodes(world_size, num_shards)
    if not isinstance(given, Tensor) or given.dim() < 2 or len(given) != num_rows or not given.is_contiguous():
        shape = list(given.shape) if isinstance(given, Tensor) else "a list"
        raise ConfigError(
            f"num_shards={num_shards} with {shape}: of {world_size} ranks, one has {num_rows} node(s) of the tree over "
            f"shards, so give a contiguous tensor [{num_rows}, …]"
        )
    if not (given.is_floating_point() or given.is_complex()):
        raise ConfigError(f"num_shards={num_shards} with {given.dtype}: sums of whole numbers have no order")
    if op != "sum" or wire is not None:
        raise ConfigError(f"num_shards={num_shards} with op={op!r}, wire={wire!r}: take op='sum' without a wire format")
