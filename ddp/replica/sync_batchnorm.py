"""Batch normalisation over the samples of all ranks: what one process computes from the whole batch.

    model = SyncBatchNorm.convert(model)            # every BatchNorm in it, before ddp.DistributedDataParallel(model)

For one channel, with n values on all ranks together (samples times positions), sums Σ over all of them, and learned
γ and β:

    forward     μ = Σx / n      σ² = Σ(x − μ)² / n      x̂ = (x − μ) / √(σ² + ε)      y = γ·x̂ + β
    backward    ∂γ = Σ dy·x̂     ∂β = Σ dy               dx = γ / √(σ² + ε) · (dy − ∂β / n − x̂·∂γ / n)

    step                what a rank does by itself                         what it does with the others
    summary             n_r, μ_r and M_r = Σ(x − μ_r)² of its batch        one all-reduce puts them in a table
    combine             n, μ and σ² from the table, in the same way        -
    forward             normalise with μ, σ² as if they were constants     -
    backward            its part of ∂γ, ∂β, as if they were constants      one all-reduce sums both, for dx alone
    (reducer)           -                                                  sums ∂γ, ∂β, as any parameter's gradient

Note "combining". Σx² − nμ² loses all digits if the mean is large compared with the deviation. Deviations from the
part's own mean do not, and parts of any size (0, too) are combined exactly:

    n = Σ n_r       μ = Σ n_r·μ_r / n       M = Σ M_r + Σ n_r·(μ_r − μ)²       σ² = M / n

All ranks apply it to the same table in the same order, so their statistics are bitwise equal, and so are the running
ones. The table is float64, because in float32 a mean of 10⁴ has only three correct decimals, which (μ_r − μ)² would
amplify.

Note "the pivot". A rank's own M takes deviations from a pivot p, the mean of its first block of samples, and needs no
second pass from memory: M = Σ(x − p)² − (Σ(x − p))² / n. That is safe here: if the block is a share f of the samples,
then σ² ≥ f·(p − μ)², so that even an odd first block costs M at most a factor 1 + 1 / f in rounding error.

Note "all ranks, always". In training, every rank must run the same layers in the same order, forward and backward. A
rank without samples must do so on an empty batch ([0, C, …]), because `reduce_without_backward` runs no layers. All
ranks need the same number of micro-batches. `no_sync` delays gradients, not statistics. In eval mode nothing is sent,
not even without running statistics (as in torch's class), so ranks may evaluate different numbers of batches.

Cost, for W ranks and C channels: per forward one all-reduce of W·(2C + 1) float64 numbers; per backward one of 2C
numbers (float32, or float64 for float64 input), none if the input needs no gradient. They are small, and layers wait
for them, so latency dominates. They run in their own group, which the first forward makes, because the order of layers
and that of gradient buckets are independent. (On GPUs with NCCL both are in the order in which autograd's thread
reaches them.)

Source: Ioffe and Szegedy, "Batch normalization" (arXiv 1502.03167), algorithm 1; Chan, Golub and LeVeque, "Algorithms
for computing the sample variance: analysis and recommendations" (1983).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ddp.comm.communicator import Communicator
from ddp.comm.session import current
from ddp.errors import ConfigError

BLOCK_BYTES = 512 << 10  # of a batch: stays in the cache between the passes over it


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d over the samples of all ranks, for inputs [N, C, …] of at least two dimensions.

    Running statistics, `momentum=None` and eval mode are as in torch's classes; with one rank, everything is. Ranks'
    batches may differ in size and be empty (note "all ranks, always").

    Args:
        num_features, arguments, keywords: as in torch's classes; bias=False also where torch's classes lack it.
        comm: the ranks whose samples count; None: those of the process's communicator at the time of each forward.
            Copies of the module share it; a pickle leaves it out.

    Raises:
        ConfigError: in forward, an input that does not fit, or one value per channel on all ranks together.
    """

    def __init__(
        self, num_features: int, *arguments: Any, comm: Communicator | None = None, bias: bool = True, **keywords: Any
    ) -> None:
        super().__init__(num_features, *arguments, **keywords)
        if not bias:  # a keyword that torch's classes do not have in 2.10
            self.register_parameter("bias", None)
        self._whose = _Whose(comm)

    @classmethod
    def convert(cls, module: nn.Module, *, comm: Communicator | None = None) -> nn.Module:
        """Puts a SyncBatchNorm in place of every BatchNorm in `module`, torch's SyncBatchNorm included.

        Parameters, buffers and hooks are the same objects as before, so optimizers and `state_dict`s stay valid. Layers
        of this class stay, and get `comm` if one is given. The `process_group` of torch's SyncBatchNorm is dropped.

        Returns:
            `module`; its replacement, if it is a BatchNorm itself.

        Raises:
            ConfigError: a BatchNorm that is lazy, or that does more than normalise; nothing has been replaced then.
        """
        replacements: dict[nn.Module, nn.Module] = {}  # a layer used twice has one replacement
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm):
                _check_convertible(name, layer)
                replacements[layer] = layer if isinstance(layer, cls) else cls._in_place_of(layer)
        for layer in replacements.values():
            assert isinstance(layer, cls)
            if comm is not None:
                layer._whose = _Whose(comm)
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in replacements:
                    setattr(parent, name, replacements[child])
        return replacements.get(module, module)

    convert_sync_batchnorm = convert

    @classmethod
    def _in_place_of(cls, layer: _BatchNorm) -> SyncBatchNorm:
        """Returns a layer with the state of `layer`, all of which is in its attributes."""
        replacement = cls.__new__(cls)
        replacement.__dict__.update(layer.__dict__)
        replacement.__dict__.pop("process_group", None)
        replacement._whose = _Whose()
        return replacement

    def forward(self, input: Tensor) -> Tensor:
        """Normalises; in training mode, by the statistics of all ranks' inputs."""
        if not self.training or (comm := self._whose.comm or current(input.device)).world_size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        group = _group_of(comm)
        x = input.contiguous(memory_format=_layout(input))
        count, mean, m2 = _split(_exchange(group, _summary(x.detach())).to(_wide(x)))
        if x.numel() <= self.num_features:  # else there are enough values; on a GPU, reading `count` means waiting
            if int(count) == 1:
                raise ConfigError(
                    f"expected more than 1 value per channel when training, got 1 on all {comm.world_size} ranks "
                    f"together (input {list(input.shape)} on this one); use a larger batch, or eval mode"
                )
            if int(count) == 0:
                return super().forward(input)  # all batches are empty: torch says what that means
        self._update_running_statistics(mean, m2 / (count - 1))
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, mean, m2 / count, count, self.eps, group
        )
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        shape = list(input.shape)
        if input.dim() < 2:
            raise ConfigError(f"input {shape}: SyncBatchNorm takes [N, C] or [N, C, …]; add the missing dimension")
        if input.shape[1] != self.num_features:
            raise ConfigError(
                f"input {shape} has {input.shape[1]} channels (dimension 1), but num_features={self.num_features}; "
                "they must be equal"
            )

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:  # the mean over all batches so far
                share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share or 0.0)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), share or 0.0)


WAITING = SyncBatchNorm, TorchSyncBatchNorm


def waits(module: nn.Module, *, in_evaluation: bool = False) -> bool:
    """Returns True if a forward of the module in training mode is a collective; or in evaluation mode.

    Ranks without a sample would not call it.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, WAITING)]
    return any(not in_evaluation or layer.running_mean is None for layer in layers)


class _Whose:
    """Refers to a communicator that a module uses but does not own: copies share it, pickles leave it out."""

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm

    def __deepcopy__(self, memo: dict[int, object]) -> _Whose:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Whose, ()


# --- statistics: [2C + 1] numbers, n | μ | M, of one rank's batch or of all ------------------------------------------


def _summary(x: Tensor) -> Tensor:
    """Returns [2C + 1], float64: count, mean and squared deviations of every channel of x [N, C, …]."""
    if x.numel() == 0:
        return torch.zeros(2 * x.shape[1] + 1, dtype=torch.float64, device=x.device)
    count = x.numel() // x.shape[1]
    mean, m2 = _moments_by_blocks(x, count) if x.device.type == "cpu" else _moments(x, count)
    return torch.cat([mean.new_full((1,), count), mean, m2])


def _moments(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns μ and M [C], in one pass. On the CPU, `var_mean` takes ten times as long as going by blocks."""
    variance, mean = torch.var_mean(x.to(_wide(x)), _dims(x), correction=0)
    return mean.double(), variance.double() * count


def _moments_by_blocks(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns μ and M [C]; reads x from memory once, and each block again from the cache (note "the pivot")."""
    dims, wide = _dims(x), _wide(x)
    blocks = x.split(max(1, BLOCK_BYTES * len(x) // (x.numel() * wide.itemsize)))
    pivot = blocks[0].mean(dims, keepdim=True, dtype=wide)  # [1, C, 1, …]
    sums = squares = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for block in blocks:
        deviations = block - pivot
        sums = sums + deviations.sum(dims)
        squares = squares + deviations.square_().sum(dims)
    from_pivot = sums / count
    return pivot.view(-1) + from_pivot, squares - sums * from_pivot


def _exchange(group: Communicator, mine: Tensor) -> Tensor:
    """Combines all ranks' summaries [2C + 1] into one.

    It all-reduces a table in which the others' rows are zero. `all_gather` would move half as much, but it exchanges
    every rank's number of rows first; the cost is the number of exchanges, and that would be two.
    """
    table = mine.new_zeros(group.world_size * len(mine), device=group.device)  # flat, so that it is not copied
    rows = table.view(group.world_size, -1)  # [W, 2C + 1]
    rows[group.rank] = mine
    group.all_reduce(table, label="SyncBatchNorm forward")
    return _combine(rows).to(mine.device)  # a copy only in a model on several devices


def _combine(rows: Tensor) -> Tensor:
    """[R, 2C + 1] → [2C + 1]: the summary of all parts together (note "combining"); NaN if all are empty."""
    counts, means, m2s = _split(rows)  # [R, 1], [R, C], [R, C]
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    return torch.cat([count, mean, m2])


def _split(summary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[…, 2C + 1] → […, 1], […, C], […, C]: n, μ, M."""
    num_channels = summary.shape[-1] // 2
    count, mean, m2 = summary.split([1, num_channels, num_channels], dim=-1)
    return count, mean, m2


def _dims(x: Tensor) -> list[int]:
    """Returns all dimensions but the channels."""
    return [0, *range(2, x.dim())]


def _wide(x: Tensor) -> torch.dtype:
    """Returns the type that statistics are computed in: float32, or float64 for float64 input."""
    return torch.promote_types(x.dtype, torch.float32)


# --- the layer, for autograd -----------------------------------------------------------------------------------------


class _Normalise(Function):
    """y = γ·x̂ + β, with the gradient of one process on the whole batch.

    torch's kernels for eval mode take mean and variance as constants, in one pass each. Forward is no more than that;
    in backward they give this rank's ∂γ and ∂β. That μ and σ² depend on every rank's x is what `_input_gradient` adds.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [N, C, …]
        weight: Tensor | None,  # [C]
        bias: Tensor | None,  # [C]
        mean: Tensor,  # [C], of all ranks' x, as are the next two
        variance: Tensor,  # [C], biased
        count: Tensor,  # [1]
        eps: float,
        group: Communicator,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.group = eps, group
        weight, bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        dy = dy.contiguous(memory_format=_layout(x))  # torch's kernel takes 20 times as long if layouts differ
        if x.numel() == 0:  # torch's kernel divides by the number of positions
            dweight, dbias = torch.zeros_like(mean), torch.zeros_like(mean)
        else:
            _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dy, x, None, mean, variance, None, None, False, ctx.eps, [False, True, True]
            )
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([dweight, dbias])  # [2C], a copy: what the parameters get stays this rank's part
            sums = ctx.group.all_reduce(sums.to(ctx.group.device), label="SyncBatchNorm backward").to(x.device)
            inverse_deviation = (variance + ctx.eps).rsqrt()
            scale = inverse_deviation if weight is None else weight * inverse_deviation
            dx = _input_gradient(dy, x, mean, sums / count, scale, inverse_deviation)
        return (
            dx,
            dweight if ctx.needs_input_grad[1] else None,
            dbias if ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )


def _input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, means: Tensor, scale: Tensor, inverse_deviation: Tensor
) -> Tensor:
    """Returns dx as in the module's table, with x̂ multiplied out: dy·scale + x·slope + offset, in three passes.

    Args:
        means: [2C], of dy·x̂ and of dy, over all ranks.
        scale: [C], γ / √(σ² + ε).
    """
    mean_dy_xhat, mean_dy = means.chunk(2)
    slope = -scale * inverse_deviation * mean_dy_xhat
    offset = -scale * mean_dy - slope * mean
    per_channel = [1, -1] + [1] * (x.dim() - 2)
    dx = dy * scale.view(per_channel)
    return dx.addcmul_(x, slope.view(per_channel)).add_(offset.view(per_channel)).to(x.dtype)


def _layout(x: Tensor) -> torch.memory_format:
    """Returns the memory layout of x, if it is one that torch's kernels are fast with; else the contiguous one."""
    if not x.is_contiguous():
        for layout in (torch.channels_last, torch.channels_last_3d):
            if x.is_contiguous(memory_format=layout):
                return layout
    return torch.contiguous_format


# --- around it -------------------------------------------------------------------------------------------------------


_GROUPS: WeakKeyDictionary[Communicator, Communicator] = WeakKeyDictionary()


def _group_of(comm: Communicator) -> Communicator:
    """Returns a group of all ranks of `comm`, for the collectives of these layers. The first call is collective.

    Where collectives are enqueued, it is `comm` itself: NCCL wants those of two communicators in one order everywhere.
    """
    if comm.is_stream_ordered:
        return comm
    group = _GROUPS.get(comm)
    if group is None:
        group = comm.subgroup(range(comm.world_size))
        assert group is not None
        _GROUPS[comm] = group
    return group


def _check_convertible(name: str, layer: _BatchNorm) -> None:
    kind, where = type(layer).__name__, f"module {name!r}" if name else "the module"
    if isinstance(layer, LazyModuleMixin):
        raise ConfigError(f"{where} is a {kind} without a size yet; run one forward of the model, or give num_features")
    if type(layer).forward not in (_BatchNorm.forward, TorchSyncBatchNorm.forward, SyncBatchNorm.forward):
        raise ConfigError(
            f"{where} is a {kind} with its own forward, which would be lost; "
            "build it from ddp's SyncBatchNorm and a module for the rest"
        )
