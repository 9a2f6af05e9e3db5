"""A look at a task's first batch: does its loss add up, so that ranks and micro-batches may share a batch?

    whole batch of n       (L, c)            sum: L = L₁ + L₂         mean: L = (k·L₁ + (n−k)·L₂) / n
    its first k samples    (L₁, c₁)          counts: c = c₁ + c₂
    the other n − k        (L₂, c₂)

A task that returns a mean with the batch's length as its count would train with gradients that are too small by the
size of a micro-batch, and nothing else would show it. So the first batch of each rank is computed three times, once,
in evaluation mode and without gradients: there dropout and BatchNorm treat each sample alike, and the model is as
before. A model that cannot run like this, or a batch that cannot be cut, is not looked at.

Read before: `step.py`. Read next: `loop.py`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ddp.data.streams import preserved
from ddp.errors import ConfigError
from ddp.log import log
from ddp.replica.sync_batchnorm import SyncBatchNorm
from ddp.tasks.loss_function import LossFunction, name_of
from ddp.tasks.task import Task
from ddp.train.step import sum_and_count

TOLERANCE, NARROW_TOLERANCE = 2e-3, 5e-2  # relative; rounding differs with the size of a batch; half precision


class FirstLook:
    """Looks at the first batch of several samples that it is given, and at no other one."""

    def __init__(self, task: Task) -> None:
        self._task: Task | None = task

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Checks the loss of a batch on the bare model.

        Raises:
            ConfigError: the loss is a mean where a sum is expected, or the other way round; or the count does not fit.
        """
        if self._task is None or num_samples < 2:
            return
        task, self._task = self._task, None
        if _waits_for_others(module):
            return
        parts = _cut(batch, num_samples, num_samples // 2)
        if parts is None:
            return
        try:
            with _evaluating(module), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                (whole, count), *both = (_sum_and_count(task, module, each) for each in (batch, *parts))
        except ConfigError:
            raise
        except Exception as error:  # if training fails like this, too, the user sees it there
            log.debug("the loss of the first batch was not checked: %s", error)
            return
        _refuse_broadcast(task, [str(warning.message) for warning in caught])
        sums, counts = [loss for loss, _ in both], [number for _, number in both]
        narrow = any(p.dtype.itemsize < 4 for p in module.parameters() if p.is_floating_point())
        _judge(task, whole, sums, num_samples, tolerance=NARROW_TOLERANCE if narrow else TOLERANCE)
        if count != sum(counts):
            raise ConfigError(
                f"{name_of(task)}.loss returned the count {count} for {num_samples} samples, but {counts[0]} and "
                f"{counts[1]} for two parts of them: return how many terms are in the sum, such as len(targets)"
            )


def _sum_and_count(task: Task, module: nn.Module, batch: Any) -> tuple[float, int]:
    loss, count = sum_and_count(task, task.loss(module, batch))
    return float(loss), count


def _judge(task: Task, whole: float, parts: Sequence[float], num_samples: int, *, tolerance: float) -> None:
    """Raises ConfigError if the whole is the parts' mean instead of their sum, or a sum times the batch's length."""
    first = num_samples // 2
    if not all(map(math.isfinite, (whole, *parts))) or math.isclose(whole, sum(parts), rel_tol=tolerance, abs_tol=1e-6):
        return
    weights = first, num_samples - first
    mean = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / num_samples
    times_length = num_samples * sum(part / weight for weight, part in zip(weights, parts, strict=True))
    is_mean = math.isclose(whole, mean, rel_tol=tolerance)
    is_sum = math.isclose(whole, times_length, rel_tol=tolerance)
    if isinstance(task, LossFunction) and (is_mean if task.reduction == "sum" else is_sum):
        found, say = ("mean", "mean") if is_mean else ("sum", "sum")
        raise ConfigError(
            f'{name_of(task.function)} returns the {found} of a batch, but reduction="{task.reduction}" was taken: '
            f'say reduction="{say}"'
        )
    if is_mean:
        raise ConfigError(
            f"{name_of(task)}.loss returned {whole:.4g} for {num_samples} samples, and {parts[0]:.4g} and "
            f"{parts[1]:.4g} for two parts of them: a mean, where the sum is expected. Return the sum of the losses, "
            "such as F.cross_entropy(outputs, targets, reduction='sum'), and their number"
        )
    log.warning(
        "the loss of a batch (%.4g) is not the sum of its parts' losses (%.4g + %.4g), as with class weights, "
        "ignore_index, losses over pairs of samples, or outputs and targets of shapes that broadcast ([n, 1] and [n]). "
        "So the result depends on how ranks share a batch; a ddp.Task that returns a sum over samples would not",
        whole,
        *parts,
    )


def _refuse_broadcast(task: Task, messages: Sequence[str]) -> None:
    """Raises ConfigError if torch has warned of targets that it broadcasts, because such a loss is of all pairs."""
    for message in messages:
        if "target size" in message:
            sizes = message.partition(". ")[0].removeprefix("Using a ")
            raise ConfigError(
                f"in {name_of(getattr(task, 'function', task))} outputs and targets differ in shape: {sizes}. Make "
                "them equal, for example with outputs.squeeze(1)"
            )


def _waits_for_others(module: nn.Module) -> bool:
    """Returns True if a forward in evaluation mode is a collective, which ranks without a sample would not call."""
    kinds = (SyncBatchNorm, nn.SyncBatchNorm)
    return any(isinstance(layer, kinds) and layer.running_mean is None for layer in module.modules())


def _cut(batch: Any, num_samples: int, at: int) -> tuple[Any, Any] | None:
    """Returns the first `at` samples of a batch, and the others; None if one of its tensors is not over samples."""
    leaves, form = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or len(tensors) < len(leaves) or any(not t.dim() or len(t) != num_samples for t in tensors):
        return None
    return tree_unflatten([leaf[:at] for leaf in leaves], form), tree_unflatten([leaf[at:] for leaf in leaves], form)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode, without gradients and compilation; restores modes, buffers and generators."""
    modes = [(layer, layer.training) for layer in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    # A compiled model would be compiled again for the parts' sizes. To say so where nothing is compiled would import
    # the compiler, which takes seconds.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.no_grad(), preserved(), eager:
        module.eval()
        try:
            yield
        finally:
            for layer, training in modes:
                layer.training = training
            for buffer, content in buffers:
                buffer.copy_(content)
