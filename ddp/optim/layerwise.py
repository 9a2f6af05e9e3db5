"""The base of LARS and LAMB: optimizers that measure whole tensors, and then step.

    step     for each group, for each unit of tensors:
                 measure    read the gradients (LAMB: update the moments); find ‖w‖ and ‖update‖ of every tensor
                 ratios     one short vector for the unit (`trust_ratio.py`)
                 apply      change the weights

Note "units and blocks". A phase is several passes over memory. On a CPU each one is faster if the cache still holds
what the last one has written. So a large tensor is cut into blocks that fit the cache, and goes through all passes of a
phase block by block (LAMB, 25M parameters in 60 tensors on one core: 43 ms; 71 ms with several tensors in every pass).
Much smaller blocks lose more to Python calls than they win. Small tensors are taken together, as many as fit a block,
by torch's multi-tensor ("foreach") functions, for the same reason. A *unit* is one large tensor, or such a batch of
small ones. On a GPU all tensors are one unit.

Note "norms". A norm is made of the norms of fixed blocks, in one order. So its bits depend on the tensor alone, and are
the same on every rank.

Gradients are never written to: they are views of buckets.

Read before: `groups.py`. Read next: `lars.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp.dense import is_dense
from ddp.errors import ConfigError

BLOCK_NUMEL = 1 << 18  # of one column; five columns of float32 are 5 MB

Adapt = Literal["always", "with_decay", "never"]
"""Which tensors of a group have a trust ratio: all, all if the group has a decay, or none."""
Choices = TypeVar("Choices")
Row = tuple[Tensor, ...]
"""Weights, gradient, and the optimizer's states of one tensor, or of a block of it."""
Columns = tuple[list[Tensor], ...]
"""The same of several tensors or blocks: all weights, all gradients, …, and room for their updates."""


class Unit(NamedTuple):
    """Tensors that are measured and changed together.

    Attributes:
        columns: weights, gradients, the optimizer's states, and room for the updates.
        is_one: they are one tensor, [numel] each.
    """

    columns: Columns
    is_one: bool

    def batches(self) -> Iterator[Columns]:
        """Yields what goes through a phase together: the blocks of the one tensor, or all tensors."""
        if not self.is_one:
            yield self.columns
            return
        for start in range(0, self.columns[0][0].numel(), BLOCK_NUMEL):
            yield tuple([column[start : start + BLOCK_NUMEL]] for (column,) in self.columns)


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
        for weights, gradients, *states, updates in unit.batches():
            self._measure(weights, gradients, states, updates, group, num_steps, factor)
            if adapts:
                norms += torch._foreach_norm(weights + updates, 2, _wide(updates[0].dtype))
        ratios = [1.0] * len(unit.columns[0])
        if adapts:
            of_both = torch.stack(norms)
            of_both = torch.linalg.vector_norm(of_both.view(-1, 2), dim=0) if unit.is_one else of_both
            weight_norms, update_norms = of_both.chunk(2)
            ratios = self._ratios(weight_norms, update_norms, group).tolist()
        for weights, _, *states, updates in unit.batches():
            self._apply(weights, states, updates, group, ratios)

    @abstractmethod
    def _measure(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: list[list[Tensor]],
        updates: list[Tensor],
        group: Mapping[str, Any],
        num_steps: int,
        factor: float,
    ) -> None:
        """Computes `updates`, whose norms the ratios need.

        Args:
            states: a column for each of `STATES`.
            num_steps: of these tensors, with this one.
            factor: what their gradients are multiplied by.
        """

    @abstractmethod
    def _ratios(self, weight_norms: Tensor, update_norms: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Returns the trust ratio of each tensor, [num_tensors]."""

    @abstractmethod
    def _apply(
        self,
        weights: list[Tensor],
        states: list[list[Tensor]],
        updates: list[Tensor],
        group: Mapping[str, Any],
        ratios: list[float],
    ) -> None:
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
        if on_cpu and weights.numel() > BLOCK_NUMEL and (flat := flattened(row)) is not None:
            if scratch.numel() < weights.numel():
                scratch = weights.new_empty(weights.numel())
            yield Unit(tuple([column] for column in (*flat, scratch[: weights.numel()])), is_one=True)
            continue
        if together and on_cpu and numel + weights.numel() > BLOCK_NUMEL:
            yield _small(together)
            together, numel = [], 0
        together.append(row)
        numel += weights.numel()
    if together:
        yield _small(together)


def _small(rows: Sequence[Row]) -> Unit:
    columns = tuple(map(list, zip(*rows, strict=True)))
    return Unit((*columns, [torch.empty_like(weights) for weights in columns[0]]), is_one=False)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of norms of tensors of this type."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of it, in the parameter's order of elements: a model may have changed it since."""
    return tensor if tensor.stride() == parameter.stride() else torch.empty_like(parameter).copy_(tensor)


def flattened(row: Row) -> list[Tensor] | None:
    """Returns the tensors in one dimension, in the order of memory; None if they are not laid out alike, densely."""
    first = row[0]
    if not all(tensor.stride() == first.stride() for tensor in row) or not is_dense(first):
        return None
    return [tensor.as_strided((tensor.numel(),), (1,)) for tensor in row]


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """Returns what gradients of this norm are multiplied by, so that it is at most `clip_norm`."""
    return 1.0 if clip_norm is None else 1.0 / max(1.0, norm / clip_norm)


# --- arguments -------------------------------------------------------------------------------------------------------


def with_preset(kind: str, preset: str, presets: Mapping[str, Choices], choices: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a preset's choices, some of them replaced.

    Raises:
        ConfigError: there is no such preset or choice.
    """
    if preset not in presets:
        raise ConfigError(f"preset={preset!r}: {kind} has {', '.join(presets)}")
    known = cast(Mapping[str, Any], presets[preset])
    for name in choices:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known)}"
            raise ConfigError(f"{kind}() has no argument {name!r}. {hint}")
        _check_kind(name, choices[name], known[name])
    return {**known, **choices}


def _check_kind(name: str, value: Any, like: Any) -> None:
    """Raises ConfigError unless the value of a choice is of the kind of the preset's."""

    def is_number(each: Any) -> bool:
        return isinstance(each, (int, float)) and not isinstance(each, bool)

    if isinstance(like, bool):
        right, wanted = isinstance(value, bool), "True or False"
    elif isinstance(like, tuple):
        right = isinstance(value, (tuple, list)) and len(value) == 2 and all(map(is_number, value))
        wanted = "two numbers"
    elif isinstance(like, str):
        right, wanted = isinstance(value, str), "a word"
    else:
        right, wanted = is_number(value) or (name == "clip_norm" and value is None), "a number"
    if not right:
        raise ConfigError(f"{name}={value!r}: must be {wanted}")


def check_range(name: str, value: Any, *, least: float, below: float = math.inf) -> None:
    """Raises ConfigError unless a number, or a tensor of one, is within its range."""
    number = float(value) if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool) else math.nan
    if not least <= number < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(f"{name}={value!r}: must be a number from {least:g} up{limit}")
