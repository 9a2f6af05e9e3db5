"""The base of LARS and LAMB: optimizers that measure whole tensors, and then step.

    step     for each group, for each unit of tensors:
                 measure    read the gradients (LAMB: update the moments); find ‖w‖ and ‖update‖ of every tensor
                 ratios     one short vector for the unit (`trust_ratio.py`)
                 apply      change the weights

Note "units and blocks". A phase is several passes over memory. On a CPU each one is faster if the cache still holds
what the last one has written. So a large tensor is cut into blocks that fit the cache, and goes through all passes of a
phase block by block. Much smaller blocks lose more to Python calls than they win. Small tensors are taken together, as
many as fit a block, by torch's multi-tensor ("foreach") functions, for the same reason. A *unit* is one large tensor,
or such a batch of small ones. On a GPU all tensors are one unit.

Note "norms". A norm is made of the norms of fixed blocks, in one order. So its bits depend on the tensor alone, and are
the same on every rank.

Gradients are never written to: they are views of buckets.

Read before: `choices.py`. Read next: `lars.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp.dense import is_dense
from ddp.errors import ConfigError
from ddp.optim.choices import check_range

BLOCK_NUMEL = 1 << 18  # of one column; five columns of float32 are 5 MB

Adapt = Literal["always", "with_decay", "never"]
"""Which tensors of a group have a trust ratio: all, all if the group has a decay, or none."""
Row = tuple[Tensor, ...]
"""Weights, gradient, and the optimizer's states of one tensor, or of a block of it."""


class Batch(NamedTuple):
    """Several tensors or blocks, as columns.

    Attributes:
        states: a column for each of `Layerwise.STATES`.
        updates: room for what the weights will be changed by.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[list[Tensor]]
    updates: list[Tensor]


class Unit(NamedTuple):
    """Tensors that are measured and changed together.

    Attributes:
        whole: all of them.
        is_one: they are one tensor, [numel] in each column.
    """

    whole: Batch
    is_one: bool

    def batches(self) -> Iterator[Batch]:
        """Yields what goes through a phase together: the blocks of the one tensor, or all tensors."""
        if not self.is_one:
            yield self.whole
            return
        (weights,), (gradient,), states, (update,) = self.whole
        for start in range(0, weights.numel(), BLOCK_NUMEL):
            block = slice(start, start + BLOCK_NUMEL)
            yield Batch([weights[block]], [gradient[block]], [[state[block]] for (state,) in states], [update[block]])


class Layerwise(Optimizer, ABC):
    """An optimizer that multiplies the rate of each tensor by a trust ratio.

    Every group has lr, weight_decay, maximize and `adapt`. Tensors without a ratio are treated as if it were 1.
    """

    STATES: tuple[str, ...]
    """Names of the optimizer's states of a tensor, which have the tensor's shape."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "eps"):
            check_range(name, defaults[name], least=0)
        if defaults["adapt"] not in get_args(Adapt):
            raise ConfigError(f"adapt={defaults['adapt']!r}: take one of {', '.join(get_args(Adapt))}")
        if defaults["clip_norm"] is not None and not defaults["clip_norm"] > 0:
            raise ConfigError(f"clip_norm={defaults['clip_norm']!r}: must be above 0; None for no clipping")
        super().__init__(params, defaults)

    @property
    def clip_norm(self) -> float | None:
        """Returns the largest norm of the gradient of all parameters together; None for no clipping."""
        norm: float | None = self.defaults["clip_norm"]
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, gradient_factor: float | None = None) -> Any:
        """Makes one step.

        Args:
            closure: computes the gradients, and returns the loss.
            gradient_factor: what gradients are multiplied by; None: what `clip_norm` asks for.

        Returns:
            What the closure has returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if gradient_factor is None:
            gradient_factor = self._clipping()
        for group in self.param_groups:
            sign = -1.0 if group["maximize"] else 1.0
            for (num_steps, *_), rows in self._rows(group).items():
                for unit in units(rows):
                    self._step(unit, group, num_steps, sign * gradient_factor)
        return loss

    def _step(self, unit: Unit, group: Mapping[str, Any], num_steps: int, factor: float) -> None:
        adapts = group["adapt"] == "always" or (group["adapt"] == "with_decay" and group["weight_decay"])
        norms: list[Tensor] = []
        for batch in unit.batches():
            self._measure(batch, group, num_steps, factor)
            if adapts:
                norms += torch._foreach_norm(batch.weights + batch.updates, 2, _wide(batch.updates[0].dtype))
        ratios = [1.0] * len(unit.whole.weights)
        if adapts:
            of_both = torch.stack(norms)
            of_both = torch.linalg.vector_norm(of_both.view(-1, 2), dim=0) if unit.is_one else of_both
            weight_norms, update_norms = of_both.chunk(2)
            ratios = self._ratios(weight_norms, update_norms, group).tolist()
        for batch in unit.batches():
            self._apply(batch, group, ratios)

    @abstractmethod
    def _measure(self, batch: Batch, group: Mapping[str, Any], num_steps: int, factor: float) -> None:
        """Computes the updates, whose norms the ratios need.

        Args:
            num_steps: of these tensors, with this one.
            factor: what their gradients are multiplied by.
        """

    @abstractmethod
    def _ratios(self, weight_norms: Tensor, update_norms: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Returns the trust ratio of each tensor, [num_tensors]."""

    @abstractmethod
    def _apply(self, batch: Batch, group: Mapping[str, Any], ratios: list[float]) -> None:
        """Changes the weights.

        Args:
            ratios: one for each row; or a single one, for all.
        """

    def _rows(self, group: Mapping[str, Any]) -> dict[tuple[int, torch.dtype, torch.device], list[Row]]:
        """Returns the row of every tensor that has a gradient, by its number of steps, type and device."""
        rows: dict[tuple[int, torch.dtype, torch.device], list[Row]] = defaultdict(list)
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError(f"{type(self).__name__} needs dense gradients; take torch.optim.SparseAdam")
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                for name in self.STATES:
                    state[name] = torch.zeros_like(parameter)
            state["step"] += 1
            for name in self.STATES:
                state[name] = laid_out_like(parameter, state[name])
            row = (parameter.detach(), laid_out_like(parameter, gradient), *[state[name] for name in self.STATES])
            if parameter.is_complex():
                row = tuple(map(torch.view_as_real, row))
            rows[state["step"], parameter.dtype, parameter.device].append(row)
        return rows

    def _clipping(self) -> float:
        """Returns the factor that makes the norm of all gradients together at most `clip_norm`."""
        if self.clip_norm is None:
            return 1.0
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return clip_factor(float(torch.nn.utils.get_total_norm(gradients)), self.clip_norm)


# --- units and blocks ------------------------------------------------------------------------------------------------


def units(rows: Sequence[Row]) -> Iterator[Unit]:
    """Yields the units of a step (note "units and blocks"). Large tensors share the memory of their updates."""
    together: list[Row] = []
    numel, scratch = 0, rows[0][0].new_empty(0)
    for row in rows:
        weights = row[0]
        on_cpu = weights.device.type == "cpu"
        if on_cpu and weights.numel() > BLOCK_NUMEL and is_dense(weights):
            if scratch.numel() < weights.numel():
                scratch = weights.new_empty(weights.numel())
            flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in row]  # all in the weights' order
            yield Unit(_batch([flat], [scratch[: weights.numel()]]), is_one=True)
            continue
        if together and on_cpu and numel + weights.numel() > BLOCK_NUMEL:
            yield _small(together)
            together, numel = [], 0
        together.append(row)
        numel += weights.numel()
    if together:
        yield _small(together)


def _small(rows: Sequence[Row]) -> Unit:
    return Unit(_batch(rows, [torch.empty_like(row[0]) for row in rows]), is_one=False)


def _batch(rows: Sequence[Sequence[Tensor]], updates: list[Tensor]) -> Batch:
    weights, gradients, *states = map(list, zip(*rows, strict=True))
    return Batch(weights, gradients, states, updates)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of norms of tensors of this type."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of it, in the parameter's order of elements: a model may have changed it since."""
    return tensor if tensor.stride() == parameter.stride() else torch.empty_like(parameter).copy_(tensor)


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """Returns what gradients of this norm are multiplied by, so that it is at most `clip_norm`."""
    return 1.0 if clip_norm is None else 1.0 / max(1.0, norm / clip_norm)
