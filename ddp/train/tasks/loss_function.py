"""A task from a plain function `loss(outputs, targets)`, such as `torch.nn.functional.cross_entropy`.

    reduction="mean"    the function returns the mean over the samples of a batch; times their number it is the sum
    reduction="sum"     the function returns the sum over the samples

Either way `fit` adds sums over micro-batches and ranks and divides by the global number of samples. A mean in which
samples weigh unequally (class weights, `ignore_index`) cannot be taken apart like this; it needs a `Task`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp.errors import ConfigError
from ddp.train.tasks.task import Batch, Task

Reduction = Literal["mean", "sum"]


class LossFunction(Task):
    """Minimises `function(model(inputs), targets)` over batches (inputs, targets); reports it as `loss`.

    Args:
        function: of the model's outputs and the targets; returns a scalar.
        reduction: what the scalar is. None: the function's own attribute `reduction`, which torch's loss modules have,
            or else "mean".

    Raises:
        ConfigError: another reduction, or one that contradicts the function's own.
    """

    def __init__(self, function: Callable[[Any, Any], Tensor], *, reduction: Reduction | None = None) -> None:
        own = getattr(function, "reduction", None)
        own = "mean" if own == "batchmean" else own  # of KLDivLoss: the mean over samples
        chosen = reduction or own or "mean"
        if chosen not in ("mean", "sum"):
            raise ConfigError(f'reduction={chosen!r} of {name_of(function)}: take "mean" or "sum"')
        if own is not None and own != chosen:
            raise ConfigError(f"reduction={chosen!r}: but {name_of(function)} has reduction={own!r}; make them equal")
        self.function, self.reduction = function, chosen

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Returns (the sum over the samples, their number)."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ConfigError(
                f"{name_of(self.function)} needs batches (inputs, targets), but the data give {_form(batch)}: give "
                "samples of two parts, or a ddp.Task, which may have batches of any form"
            )
        inputs, targets = batch
        outputs = model(inputs)
        try:
            loss = self.function(outputs, targets)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            error.add_note(f"{name_of(self.function)} was given outputs, {_form(outputs)}")
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(
                f"{name_of(self.function)} returned {_form(loss)}, not a tensor of one number: return the mean over "
                'the samples, or their sum with ddp.LossFunction(…, reduction="sum")'
            )
        count = length_of(batch)
        return (loss * count if self.reduction == "mean" else loss).squeeze(), count


def as_task(loss: Task | Callable[[Any, Any], Tensor]) -> Task:
    """Returns the task that a user's `loss` stands for.

    Raises:
        ConfigError: it is neither a task nor a function.
    """
    if isinstance(loss, type):
        raise ConfigError(f"loss={loss.__name__} is a class: give an object of it, {loss.__name__}()")
    if isinstance(loss, Task):
        return loss
    if hasattr(loss, "loss"):
        raise ConfigError(f"loss={name_of(loss)} has a method `loss` but is no task: derive its class from ddp.Task")
    if not callable(loss):
        raise ConfigError(f"loss={loss!r}: give a function loss(outputs, targets), or a ddp.Task")
    return LossFunction(loss)


def length_of(batch: Batch) -> int:
    """Returns the length of the batch's first tensor, or of its first list."""
    leaf = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
    return len(leaf if leaf is not None else batch[0])


def name_of(loss: object) -> str:
    """Returns the name of a function, or of an object's class, as its author knows it."""
    loss = getattr(loss, "function", loss)
    return getattr(loss, "__name__", type(loss).__name__)


def _form(value: object) -> str:
    """Returns the type and shape of a value, for a message."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
