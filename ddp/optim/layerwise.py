"""The base of LARS and LAMB: optimizers that measure whole tensors, and then step.

    step     for each group, for each unit of tensors:
                 measure    read the gradients (LAMB: update the moments); find ‖w‖ and ‖update‖ of every tensor
                 ratios     one short vector for the unit (`norms.py`)
                 apply      change the weights

Note "units and stretches". A phase is several passes over memory. On a CPU each one is faster if the cache still holds
the output of the last one. So a large tensor, of several blocks (`norms.py`), goes through all passes of a phase
stretch by stretch. Much shorter stretches would lose more to Python calls than they gain. Small tensors are taken
together, as many as fit a stretch, by torch's multi-tensor ("foreach") functions, for the same reason. A *unit* is one
large tensor, or such a batch of small ones. On a GPU all tensors are one unit.

Gradients are never written to: they are views of buckets. `parameter_groups` says which tensors have a ratio.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.errors import ConfigError
from ddp.optim.norms import BLOCK_NUMEL, Norms, block_norms, in_memory_order, num_blocks, total_norm, whole_norms
from ddp.process import gpu
from ddp.process.memory import is_dense
from ddp.setting import FromZero, refusal

# --- Choices of LARS and LAMB, by preset -----------------------------------------------------------------------------
#
# The choices of an optimizer are a preset's, some of them replaced. Each is checked.


UNBOUNDED = ("norm_bounds", "max_ratio")


def with_preset(
    kind: str, preset: str, presets: Mapping[str, Mapping[str, Any]], choices: Mapping[str, Any], types: type
) -> dict[str, Any]:
    """Returns a preset's choices, with the given ones in place of its own.

    Args:
        types: says by annotations what each choice may be.

    Raises:
        ConfigError: there is no such preset or choice, or it may not be this.
    """
    if preset not in presets:
        raise ConfigError(f"preset={preset!r}: {kind} has {', '.join(presets)}")
    known, allowed = presets[preset], get_type_hints(types, include_extras=True)
    for name, value in choices.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(known)}"
            raise ConfigError(f"{kind}() has no argument {name!r}. {hint}")
        is_pair = isinstance(known[name], tuple)
        if is_pair and not (isinstance(value, (tuple, list)) and len(value) == 2):
            raise ConfigError(f"{name}={value!r}: must be two numbers")
        for each, of in zip(value, get_args(allowed[name]), strict=True) if is_pair else [(value, allowed[name])]:
            may_be = name in UNBOUNDED and each == math.inf
            if not may_be and (why := refusal(each, of)):
                raise ConfigError(f"{name}={each!r}: {why}")
    return {**known, **choices}


STRETCH_NUMEL = 4 * BLOCK_NUMEL  # of float32: 2 MB, of which a few fit a cache
Adapt = Literal["always", "with_decay", "never"]
"""Which tensors of a group have a trust ratio: all, all if the group has a decay, or none."""
Ratios = float | list[float] | Tensor
"""A trust ratio, or those of several tensors; a tensor, [num_tensors], on a GPU, where reading it would be a wait."""
Factor = float | Tensor
"""A factor on gradients; a scalar on a GPU if it depends on them."""
Row = tuple[Tensor, ...]
"""Weights, gradient, and the optimizer's states of one tensor, or of a stretch of it."""


class Batch(NamedTuple):
    """Several tensors or a stretch of one, as columns.

    Attributes:
        states: a column for each of `Layerwise.STATES`.
        updates: memory for the changes of the weights.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[list[Tensor]]
    updates: list[Tensor]


class Unit(NamedTuple):
    """Tensors that are measured and changed together.

    Attributes:
        weights: all of them.
        batches: they go through a phase one by one: the stretches of one tensor, or all tensors at once.
        is_one: the unit is one tensor.
    """

    weights: list[Tensor]
    batches: list[Batch]
    is_one: bool


class Measured(NamedTuple):
    """A unit between the two phases.

    Attributes:
        norms: [num_blocks, 2]: ‖w‖ and ‖update‖ of each block of all its tensors; None if the unit has no ratio.
    """

    unit: Unit
    group: Mapping[str, Any]
    norms: Tensor | None


Exchange = Callable[[Sequence[Measured]], Sequence[Tensor | None]]
"""Returns the norms of whole tensors for each unit, [num_tensors, 2]; other ranks may have other blocks of them."""


class Layerwise(Optimizer, ABC):
    """An optimizer that multiplies the rate of each tensor by a trust ratio.

    Every group has lr, weight_decay, maximize and `adapt`. Tensors without a ratio are treated as if it were 1.

    Args:
        params, lr, maximize: as in `LARS`.
        preset: a key of `PRESETS`.
        choices: they replace some of the preset's.

    Raises:
        ConfigError: there is no such preset or choice, or a value is out of its range.

    Attributes:
        STATES: names of the optimizer's states of a tensor, which have the tensor's shape.
        CHOICES: the types of the choices.
        exchange: set if the parameters are parts of tensors; finds the norms of whole ones (`strategies/sharded.py`).
        is_large: returns True for a tensor that is a unit by itself; a part of such a tensor is one, too.
    """

    STATES: tuple[str, ...]
    PRESETS: Mapping[str, Mapping[str, Any]]
    CHOICES: type
    exchange: Exchange | None = None

    @staticmethod
    def is_large(weights: Tensor) -> bool:
        return weights.numel() > BLOCK_NUMEL and is_dense(weights) and weights.device.type == "cpu"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        *,
        preset: str,
        maximize: bool,
        choices: Mapping[str, Any],
    ) -> None:
        chosen = with_preset(type(self).__name__, preset, self.PRESETS, choices, self.CHOICES)
        self._check(chosen)
        defaults = {**chosen, "lr": lr, "maximize": maximize}
        if why := refusal(float(lr) if isinstance(lr, Tensor) else lr, FromZero):
            raise ConfigError(f"lr={lr!r}: {why}")
        least, most = defaults["norm_bounds"]
        if least > most:
            raise ConfigError(f"norm_bounds={defaults['norm_bounds']!r}: want two ascending numbers from 0 up")
        super().__init__(params, defaults)

    def _check(self, choices: Mapping[str, Any]) -> None:
        """Raises ConfigError for choices with which no step can be made."""

    @property
    def clip_norm(self) -> float | None:
        """Returns the largest norm of the gradient of all parameters together; None for no clipping."""
        norm: float | None = self.defaults["clip_norm"]
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, gradient_factor: Factor | None = None) -> Any:
        """Makes one step.

        Args:
            closure: computes the gradients, and returns the loss.
            gradient_factor: factor on the gradients; None: the one that clips them to `clip_norm`.

        Returns:
            The closure's result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise RuntimeError(f"{type(self).__name__} needs dense gradients; leave sparse=True out")
        if gradient_factor is None:
            norm = torch.zeros(()) if self.clip_norm is None else total_norm(block_norms(gradients))
            gradient_factor = clip_factor(norm, self.clip_norm)
        waiting: list[Measured] = []
        for group in self.param_groups:
            sign = -1.0 if group["maximize"] else 1.0
            for (num_steps, *_), rows in self._rows(group).items():
                for unit in self._units(rows):
                    measured = self._measure_unit(unit, group, num_steps, sign * gradient_factor)
                    if self.exchange is None:
                        self._apply_to_unit(measured, _of_tensors(measured))
                    else:
                        waiting.append(measured)
        if self.exchange is not None:
            for measured, norms in zip(waiting, self.exchange(waiting), strict=True):
                self._apply_to_unit(measured, norms)
        return loss

    def _measure_unit(self, unit: Unit, group: Mapping[str, Any], num_steps: int, factor: Factor) -> Measured:
        adapts = group["adapt"] == "always" or (group["adapt"] == "with_decay" and group["weight_decay"])
        norms: list[Tensor] = []
        for batch in unit.batches:
            self._measure(batch, group, num_steps, factor)
            if adapts:
                norms.append(block_norms(batch.weights + batch.updates).view(2, -1).T)
        return Measured(unit, group, torch.cat(norms) if adapts else None)

    def _apply_to_unit(self, measured: Measured, norms: Tensor | None) -> None:
        unit, group, _ = measured
        ratios: Any = [1.0] * len(unit.weights)
        if norms is not None:
            of_weights, of_updates = norms.T if norms.device.type == gpu.KIND else norms.T.numpy(force=True)
            found = self._ratios(of_weights, of_updates, group)
            ratios = found if isinstance(found, Tensor) else found.tolist()
        for batch in unit.batches:
            self._apply(batch, group, ratios[0] if unit.is_one else ratios)

    @abstractmethod
    def _measure(self, batch: Batch, group: Mapping[str, Any], num_steps: int, factor: Factor) -> None:
        """Computes the updates, whose norms the ratios need.

        Args:
            num_steps: of these tensors, including this step.
            factor: on their gradients.
        """

    @abstractmethod
    def _ratios(self, weight_norms: Norms, update_norms: Norms, group: Mapping[str, Any]) -> Norms:
        """Returns the trust ratio of each tensor, [num_tensors]."""

    @abstractmethod
    def _apply(self, batch: Batch, group: Mapping[str, Any], ratios: Ratios) -> None:
        """Changes the weights.

        Args:
            ratios: one for each row; a number where the batch is a stretch of one tensor.
        """

    def _rows(self, group: Mapping[str, Any]) -> dict[tuple[int, torch.dtype, torch.device], list[Row]]:
        """Returns the row of every tensor that has a gradient, by its number of steps, type and device."""
        rows: dict[tuple[int, torch.dtype, torch.device], list[Row]] = defaultdict(list)
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                for name in self.STATES:
                    state[name] = torch.zeros_like(parameter)
            state["step"] += 1
            others = [gradient, *[state[name] for name in self.STATES]]
            order = parameter.stride()
            if any(tensor.stride() != order for tensor in others):
                others = [laid_out_like(parameter, tensor) for tensor in others]
                state.update(zip(self.STATES, others[1:], strict=True))
            row = (parameter, *others)
            if parameter.is_complex():
                row = tuple(map(torch.view_as_real, row))
            rows[state["step"], parameter.dtype, parameter.device].append(row)
        return rows

    # --- units and stretches -----------------------------------------------------------------------------------------

    def _units(self, rows: Sequence[Row]) -> Iterator[Unit]:
        """Yields the units of a step (note "units and stretches")."""
        together: list[Row] = []
        numel = 0
        for row in rows:
            weights = row[0]
            on_cpu = weights.device.type == "cpu"
            if on_cpu and self.is_large(weights):
                columns = [in_memory_order(each).split(STRETCH_NUMEL) for each in (*self._memory([weights]), *row)]
                blocks = [_batch([block], [update]) for update, *block in zip(*columns, strict=True)]
                yield Unit([weights], blocks, is_one=True)
                continue
            if together and on_cpu and numel + weights.numel() > STRETCH_NUMEL:
                yield self._small(together)
                together, numel = [], 0
            together.append(row)
            numel += weights.numel()
        if together:
            yield self._small(together)

    def _small(self, rows: Sequence[Row]) -> Unit:
        weights = [row[0] for row in rows]
        return Unit(weights, [_batch(rows, self._memory(weights))], is_one=False)

    def _memory(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Returns memory for the updates of a unit.

        On a CPU it is kept, because writing to new memory costs twice as much: one memory for all units, or one for
        each if they wait for other ranks.
        """
        first = weights[0]
        if first.device.type != "cpu" or not all(each.is_contiguous() for each in weights):
            return list(map(torch.empty_like, weights))
        key = first.dtype, None if self.exchange is None else first.data_ptr()
        memories: dict[Any, Tensor] = self.__dict__.setdefault("_memories", {})  # a copied optimizer has none
        numel = sum(each.numel() for each in weights)
        if key not in memories or memories[key].numel() < numel:
            memories[key] = first.new_empty(numel)
        return list(torch._C._nn.unflatten_dense_tensors(memories[key][:numel], list(weights)))


def _batch(rows: Sequence[Sequence[Tensor]], updates: list[Tensor]) -> Batch:
    weights, gradients, *states = map(list, zip(*rows, strict=True))
    return Batch(weights, gradients, states, updates)


def _of_tensors(measured: Measured) -> Tensor | None:
    """Returns the norms of a unit's tensors, [num_tensors, 2], if it has all of their blocks."""
    counts = [num_blocks(weights.numel()) for weights in measured.unit.weights]
    if measured.norms is None or max(counts) == 1:
        return measured.norms
    return torch.stack([whole_norms(column, counts) for column in measured.norms.unbind(1)], dim=1)


def laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of it, in the parameter's order of elements and without gaps between them.

    They differ if the model has changed its memory format since.
    """
    has_layout = tensor.stride() == parameter.stride() and is_dense(tensor)
    return tensor if has_layout else torch.empty_like(parameter, device=tensor.device).copy_(tensor)


def clip_factor(norm: Tensor, clip_norm: float | None) -> Factor:
    """Returns the factor of `torch.nn.utils.clip_grad_norm_`; on a GPU as a tensor, so that the host need not wait."""
    if clip_norm is None:
        return 1.0
    factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    return factor if factor.device.type == gpu.KIND else float(factor)


def is_identity(factor: Factor) -> bool:
    """Returns True if a factor is known to be 1; never for one on a GPU."""
    return not isinstance(factor, Tensor) and factor == 1.0


def scaled(ratios: Ratios, by: float) -> Any:
    """Returns ratios times a number, in a form that torch's foreach functions accept."""
    if isinstance(ratios, Tensor):
        return list((by * ratios).unbind())
    return by * ratios if isinstance(ratios, float) else [by * ratio for ratio in ratios]


def clipped_step(optimizer: Optimizer, parameters: Iterable[Tensor], norm: Tensor, clip_norm: float | None) -> None:
    """Clips gradients of this norm, and steps. LARS and LAMB clip inside their step, and write to no gradient."""
    if isinstance(optimizer, Layerwise):
        optimizer.step(gradient_factor=clip_factor(norm, clip_norm or optimizer.clip_norm))
        return
    if clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    optimizer.step()


# --- Parameter groups: which parameters decay, and which get a trust ratio --------------------------------------------
#
# Biases and the weights of normalisation layers are left out of both. Decaying them towards zero makes no function
# smoother; and their norms say little about the step that they tolerate, so such ratios hurt (LARS at batch 8,192: 74.3
# % with, 76.1 % without them, PaddlePaddle/Paddle#26733). They are found by their shape: they have one dimension.
# Further parameters to leave out, such as position embeddings, are given by name.
#
# Only names and shapes are read, so it works for a model on the meta device.


def parameter_groups(
    module: nn.Module, *, weight_decay: float | None, exclude: Sequence[str] = (), **of_excluded: Any
) -> list[dict[str, Any]]:
    """Returns the parameters that need a gradient as groups for an optimizer: those that decay, then those left out.

    Args:
        weight_decay: of the first group; None: the optimizer's default.
        exclude: names of further parameters to leave out, such as "position.weight" or "encoder.embed.*".
        of_excluded: further settings of the group that is left out.

    Raises:
        ConfigError: a name in `exclude` matches no parameter.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            some = ", ".join(name for name, _ in named[:5])
            raise ConfigError(
                f"optim.exclude: no trained parameter is called {pattern!r}; names are like {some}, and * stands for "
                "any characters"
            )
    is_out = [p.dim() <= 1 or any(fnmatchcase(name, pattern) for pattern in exclude) for name, p in named]
    decaying = [parameter for (_, parameter), out in zip(named, is_out, strict=True) if not out]
    excluded = [parameter for (_, parameter), out in zip(named, is_out, strict=True) if out]
    of_decaying = {} if weight_decay is None else {"weight_decay": weight_decay}
    groups = [
        {"params": decaying, **of_decaying},
        {"params": excluded, "weight_decay": 0.0, **of_excluded},
    ]
    return [group for group in groups if group["params"]]
