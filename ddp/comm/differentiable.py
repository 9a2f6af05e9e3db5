"""Collectives in a graph of autograd: an all-gather and an all-reduce whose gradient comes from all ranks.

    forward                          backward, of a loss Lᵣ on each rank r
    all_gather   every rank has zᵣ   reduce-scatter   ∂/∂zᵣ = Σₛ ∂Lₛ/∂zᵣ
    all_reduce   y = Σ xᵣ            all-reduce       ∂/∂xᵣ = Σₛ ∂Lₛ/∂y

So each rank gets the gradient of the *sum* of all ranks' losses. `ddp.fit` divides it by the global count, and
`DistributedDataParallel` by the world size, whereby it becomes the gradient of the mean of the losses.

Every rank's loss must depend on the result, because the backward is a collective, too. What is computed after the
model's forward is differentiated before the model, so no bucket of gradients is in flight yet. Inside of a model it
takes its turn among them, which is the same on all ranks if their graphs are identical.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ddp.errors import ConfigError

Verbs = Any  # of a communicator, which call the functions here
_REQUIRES_GRAD = attrgetter("requires_grad")


def is_differentiated(tensors: Sequence[Tensor], *, in_place: bool, async_op: bool) -> bool:
    """Returns True if autograd is to differentiate a collective of these tensors.

    Args:
        in_place: the result takes their place, so that a leaf gets no more than a value.

    Raises:
        ConfigError: it cannot, because the result is not waited for.
    """
    needing = list(filter(_REQUIRES_GRAD, tensors))  # none in most calls, which shall lose no microsecond here
    if not needing or not torch.is_grad_enabled() or (in_place and all(x.is_leaf for x in needing)):
        return False
    if async_op:
        raise ConfigError(
            "async_op=True of a tensor that requires a gradient, and autograd does not wait for it: leave async_op "
            "out, or pass its .detach()"
        )
    return True


def all_gather(comm: Verbs, tensor: Tensor, label: str) -> list[Tensor]:
    """Returns every rank's tensor, each with a gradient."""
    return list(_AllGather.apply(comm, label, tensor))  # type: ignore[no-untyped-call]


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, comm: Verbs, label: str, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.label, ctx.shape = comm, label, tensor.shape
        return tuple(comm.all_gather(tensor, label=label))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        by_slice = sorted(range(len(gradients)), key=ctx.comm.slices.__getitem__)  # ranks in the order of slices
        flat = torch.cat([gradients[rank].reshape(-1) for rank in by_slice])
        bounds = [0, *accumulate(gradients[rank].numel() for rank in by_slice)]
        mine = ctx.comm.reduce_scatter_(flat, bounds, label=f"{ctx.label or 'all_gather'}, backward")
        return None, None, mine.view(ctx.shape)


def all_reduce(comm: Verbs, tensors: Sequence[Tensor], op: str, how: dict[str, Any]) -> None:
    """Sums or averages tensors over all ranks, in place; each has a gradient then.

    Raises:
        ConfigError: another operation, which has no gradient here.
    """
    if op not in ("sum", "mean") or how["num_shards"] is not None:
        raise ConfigError(f"op={op!r} of a tensor that requires a gradient: take sum or mean, or pass its .detach()")
    _AllReduce.apply(comm, op, how, *tensors)  # type: ignore[no-untyped-call]


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, comm: Verbs, op: Any, how: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.op, ctx.how = comm, op, how
        ctx.mark_dirty(*tensors)
        comm.all_reduce(tensors[0] if len(tensors) == 1 else list(tensors), op, **how)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        label = f"{ctx.how['label'] or 'all_reduce'}, backward"
        mine = [each.clone() for each in gradients]  # which may be others' memory
        return None, None, None, *ctx.comm.all_reduce(mine, ctx.op, **{**ctx.how, "label": label})
