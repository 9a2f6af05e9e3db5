"""Checks of the first batches: does the loss add up, so that ranks and micro-batches may share a batch?

    whole batch of n       (L, c)            sum: L = L₁ + L₂         mean: L = (k·L₁ + (n−k)·L₂) / n
    its first k samples    (L₁, c₁)          counts: c = c₁ + c₂
    the other n − k        (L₂, c₂)

A task that returns a mean with the batch's length as its count would train with gradients that are too small by the
size of a micro-batch, and nothing else would show it. So the first batch of each rank is computed three times, once,
by a copy of the model in evaluation mode, because there dropout and BatchNorm treat each sample alike. A model that
cannot run like this, or a batch that cannot be cut, is not looked at.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ddp.comm.objects import all_gather_object
from ddp.data.loading.source import digest_of
from ddp.errors import CollectiveMismatch, CommunicatorBroken, ConfigError, PeerLost
from ddp.gradients.totals import count_of
from ddp.process.log import log
from ddp.replica.sync_batchnorm import SyncBatchNorm
from ddp.streams import preserved
from ddp.train.batch_statistics import try_one_sample, waits_in_evaluation
from ddp.train.callbacks import Callback
from ddp.train.kept import loss_modules
from ddp.train.state import StepReport, TrainState
from ddp.train.step import sum_and_count
from ddp.train.tasks.cross_entropy import Classification, LanguageModel
from ddp.train.tasks.task import LossFunction, Task, length_of, name_of, outputs_of

# --- Probabilities in the place of logits ----------------------------------------------------------------------------
#
# Finds models whose outputs are probabilities, where the loss takes scores and makes probabilities of them itself.
#
#     scores ─ softmax ─→ probabilities ─ cross_entropy's own softmax ─→ between 1/n and e/n: gradients nearly vanish
#
# Such a model learns, but less well, and nothing else would show it. Rows that are ≥ 0 and sum to 1 come of a softmax.
# Numbers from 0 to 1 may be scores, too, so a sigmoid must be seen in the graph of autograd.
#
# Log-probabilities are no mistake: the softmax of them is what they are the logarithms of.


_SUM_OFF_BY = 1e-2  # of a row of probabilities in half precision
_SHAPES_ONLY = ("View", "UnsafeView", "Squeeze", "Unsqueeze", "Reshape", "Transpose", "Permute", "Select", "ToCopy")
_REMEDY = "leave the last layer out, and take softmax or sigmoid where you read probabilities"


def warn_of_probabilities(task: Task, module: nn.Module, batch: Any) -> None:
    """Warns if the model returns probabilities, and the loss takes them for something else.

    Args:
        module: a copy, which may be changed.
    """
    (name, takes), classes_dim = _expected(task), -1 if isinstance(task, LanguageModel) else 1
    if not takes or not (found := _found(module, batch, classes_dim)):
        return
    waits = any(isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) for layer in module.modules())
    if not waits and not _found(module.train(), batch, classes_dim):
        return  # it returns probabilities in an evaluation alone
    if takes == "log-probabilities":
        log.warning(
            "the model returns probabilities (%s), but %s takes log-probabilities: end the model in LogSoftmax, or "
            "give cross_entropy the scores",
            *(found, name),
        )
    else:
        log.warning(
            "the model returns probabilities (%s), but %s takes scores, and makes probabilities of them itself: the "
            "model will learn less well. In the model, %s",
            *(found, name, _REMEDY),
        )


def _expected(task: Task) -> tuple[str, str]:
    """Returns the name of a loss, and what it takes: "scores", "log-probabilities", or "" for anything else."""
    if isinstance(task, (Classification, LanguageModel)):
        return name_of(task), "scores"
    function = task.function if isinstance(task, LossFunction) else None
    function = function.func if isinstance(function, partial) else function
    scores = (F.cross_entropy, F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss)
    modules = (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
    if function in scores or isinstance(function, modules):
        return name_of(function), "scores"
    if function in (F.nll_loss, F.kl_div) or isinstance(function, (nn.NLLLoss, nn.KLDivLoss)):
        return name_of(function), "log-probabilities"
    return "", ""


def _found(module: nn.Module, batch: Any, classes_dim: int) -> str:
    """Returns the name of the probabilities that the model returns for the inputs of a batch; "" for none."""
    with torch.enable_grad():
        outputs = outputs_of(module, batch)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or not outputs.numel():
        return ""
    numbers = outputs.detach().float()
    if numbers.min() < 0 or numbers.max() > 1 + _SUM_OFF_BY:
        return ""
    if outputs.dim() > 1 and outputs.shape[classes_dim] > 1:
        sums = numbers.sum(classes_dim)
        if (sums - 1).abs().max() < _SUM_OFF_BY:
            return "rows that are at least 0 and sum to 1"
    return "from a sigmoid" if _is_from_sigmoid(outputs) else ""


def _is_from_sigmoid(outputs: Tensor) -> bool:
    """Returns True if a sigmoid was the last computation, but for a change of the shape."""
    node = outputs.grad_fn
    while node is not None and node.name().startswith(_SHAPES_ONLY):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith("Sigmoid")


class FirstLook:
    """Looks at the first batch that it is given, and at no other one.

    Args:
        wanted: False for no look at all. All ranks want it or none, because a model or a loss may call collectives.
        with_one: sizes of the steps in which some rank has a share of one sample.
    """

    def __init__(self, task: Task, *, wanted: bool, with_one: list[int] | None = None) -> None:
        self._task, self._with_one = task if wanted else None, with_one or []

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Checks the loss and the metrics of a batch of two samples or more on the bare model.

        Raises:
            ConfigError: the loss is a mean where a sum is expected, or the other way round; its count does not fit;
                outputs and targets have shapes that broadcast; metrics have another form, or lack the main one.
        """
        task, self._task = self._task, None
        if task is None or waits_in_evaluation(module):
            return
        if isinstance(task, LossFunction) and (length := length_of(batch)) != num_samples:
            raise ConfigError(
                f"a batch of {num_samples} samples has {length} as its first dimension: collate samples along the "
                "first dimension, or give a ddp.Task, which may have batches of any form"
            )
        try:
            parts = _cut(batch, num_samples, num_samples // 2)
            if parts is None:
                log.info("the first batch was not looked at, because its parts are not all over samples")
                return
            # Copies, because a forward or a loss may count, draw, keep something of what it has seen, or change it.
            module, task = copy.deepcopy((module, task))
            for each in (module, *loss_modules(task)):
                each.eval()
            with _evaluating():
                _refuse_broadcast(task, module, copy.deepcopy(batch))
                (whole, count), *both = (
                    sum_and_count(task, task.loss(module, copy.deepcopy(each))) for each in (batch, *parts)
                )
                count, *counts = (count_of(float(number)) for number in (count, *(number for _, number in both)))
                _check_metrics(task, module, copy.deepcopy(batch))
                warn_of_probabilities(task, copy.deepcopy(module), copy.deepcopy(batch))
                if (first := _cut(batch, num_samples, 1)) is not None:
                    try_one_sample(module, copy.deepcopy(first[0]), self._with_one)
        except (ConfigError, PeerLost, CommunicatorBroken, CollectiveMismatch):
            raise
        except Exception as error:  # if training fails like this, too, the user sees it there
            log.info("the first batch was not looked at: %s", error)
            return
        losses = [float(loss) for loss, _ in both]
        _judge(task, float(whole), losses, num_samples, counts, tolerance=_tolerance(module))
        is_whole = all(isinstance(each, int) for each in (count, *counts))
        if not math.isclose(count, sum(counts), rel_tol=0 if is_whole else _tolerance(module)):
            raise ConfigError(
                f"{name_of(task)}.loss returned the count {count} for {num_samples} samples, but {counts[0]} and "
                f"{counts[1]} for two parts of them: return how many terms are in the sum, such as len(targets)"
            )


def _check_metrics(task: Task, module: nn.Module, batch: Any) -> None:
    """Raises ConfigError unless the task's metrics are sums and counts, and the main one is among them."""
    found = task.metrics(module, batch)
    for name, pair in found.items() if isinstance(found, Mapping) else [("", found)]:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigError(
                f"{name_of(task)}.metrics returned {pair!r:.60} for {name!r}: return a sum and its count for each, "
                'such as {"accuracy": (right.sum(), len(right))}'
            )
    means = task.finish({name: float(total) / (float(count) or 1.0) for name, (total, count) in found.items()})
    if task.main_metric not in means:
        raise ConfigError(
            f"{name_of(task)}.main_metric={task.main_metric!r} is not among its metrics, {', '.join(means)}: make them "
            "fit, because it decides which checkpoint is the best"
        )


def _judge(
    task: Task, whole: float, parts: Sequence[float], num_samples: int, counts: Sequence[float], *, tolerance: float
) -> None:
    """Raises ConfigError if the whole is the parts' mean instead of their sum, or a sum times the batch's length."""
    close = partial(math.isclose, rel_tol=tolerance, abs_tol=1e-6)
    weighs = isinstance(task, LossFunction) and getattr(task.function, "weight", None) is not None
    weighs = weighs and getattr(task, "reduction", "") == "mean"  # a sum of weighed losses is a sum
    if not all(map(math.isfinite, (whole, *parts))) or (close(whole, sum(parts)) and not weighs):
        return
    sizes = num_samples // 2, num_samples - num_samples // 2

    def mean(weights: Sequence[float]) -> float:
        return sum(weight * part for weight, part in zip(weights, parts, strict=True)) / (sum(weights) or 1)

    times_length = num_samples * sum(part / size for size, part in zip(sizes, parts, strict=True))
    is_mean = close(whole, mean(sizes)) or close(whole, mean(counts))
    is_sum = close(whole, times_length)
    if isinstance(task, LossFunction) and (is_mean if task.reduction == "sum" else is_sum):
        found = "mean" if is_mean else "sum"
        raise ConfigError(
            f'{name_of(task.function)} returns the {found} of a batch, but reduction="{task.reduction}" was taken: '
            f'say reduction="{found}" (or give the function an attribute `reduction`)'
        )
    if is_mean and not weighs:
        raise ConfigError(
            f"{name_of(task)}.loss returned {whole:.4g} for {num_samples} samples, and {parts[0]:.4g} and "
            f"{parts[1]:.4g} for two parts of them: a mean, where the sum is expected. Return the sum of the losses, "
            "such as F.cross_entropy(outputs, targets, reduction='sum'), and their number"
        )
    log.warning(
        "the loss of a batch (%.4g) is not the sum of its parts' losses (%.4g + %.4g), as with class weights, "
        "ignore_index, or losses over pairs of samples. So the result depends on how a batch is cut; to be exact, "
        "give a ddp.Task that returns a sum over samples and its count (with class weights, weight[targets].sum())",
        whole,
        *parts,
    )


def _refuse_broadcast(task: Task, module: nn.Module, batch: Any) -> None:
    """Raises ConfigError if a loss function takes all pairs of [n, 1] outputs and [n] targets, say."""
    if not isinstance(task, LossFunction) or not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return
    inputs, targets = batch
    outputs = module(inputs)
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return
    if outputs.shape == targets.shape or outputs.numel() != targets.numel() or not targets.is_floating_point():
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, which this error replaces
            given, aligned = (float(task.function(each, targets)) for each in (outputs, outputs.reshape(targets.shape)))
    except Exception:  # the function itself aligns them
        return
    if not math.isclose(given, aligned, rel_tol=1e-4, abs_tol=1e-9):
        raise ConfigError(
            f"in {name_of(task.function)} outputs {list(outputs.shape)} and targets {list(targets.shape)} broadcast to "
            "all pairs of them: make their shapes equal, for example with outputs.squeeze(1)"
        )


def _tolerance(module: nn.Module) -> float:
    """Returns by how much sums may differ that were added in another order, relatively."""
    kinds = {(p.dtype.itemsize, p.device.type) for p in module.parameters() if p.is_floating_point()}
    if any(size < 4 for size, _ in kinds):
        return 5e-2
    return 1e-4 if all(device == "cpu" for _, device in kinds) else 2e-3  # GPUs multiply in TF32


def _cut(batch: Any, num_samples: int, at: int) -> tuple[Any, Any] | None:
    """Returns the first `at` samples of a batch, and the others; None if a part of it is not over samples."""
    parts = _part(batch, slice(None, at), num_samples), _part(batch, slice(at, None), num_samples)
    return None if _WHOLE in tree_leaves(parts[0]) else parts


_WHOLE = object()
"""Stands for what cannot be cut."""


def _part(value: Any, which: slice, num_samples: int) -> Any:
    """Returns some samples of a batch, or of a part of it."""
    if isinstance(value, Tensor):
        return value[which] if value.dim() and len(value) == num_samples else _WHOLE
    if isinstance(value, Mapping):
        return {key: _part(each, which, num_samples) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        if len(value) == num_samples and not any(isinstance(each, (Tensor, Mapping, tuple, list)) for each in value):
            return value[which]
        parts = [_part(each, which, num_samples) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value if value is None or isinstance(value, (str, int, float, bool)) else _WHOLE


@contextmanager
def _evaluating() -> Iterator[None]:
    """Computes without gradients and compilation; restores the generators."""
    # A compiled model would be compiled again for the parts' sizes. To say so where nothing is compiled would import
    # the compiler, which takes seconds.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with torch.no_grad(), preserved(), eager:
        yield


class EqualBatches(Callback):
    """Refuses ranks or loader processes that begin with equal batches, because each of them reads all the data then.

    Args:
        rank: this one.
        num_processes: loader processes of a rank, which take turns; 0: the rank itself loads.
    """

    def __init__(self, rank: int, num_processes: int) -> None:
        self._rank, self._num_processes = rank, num_processes
        self._num_steps = max(1, num_processes)
        self._mine: list[tuple[str, str]] = []  # (digest, who)
        self._seen: dict[str, str] = {}
        self._num_batches = 0

    def __call__(self, module: nn.Module, batch: Any, num_samples: int) -> None:
        """Takes note of a batch of this rank."""
        if self._num_steps:
            process = f", loader process {self._num_batches % self._num_processes}" if self._num_processes else ""
            if (digest := digest_of(batch)) is not None:
                self._mine.append((digest, f"rank {self._rank}{process}"))
            self._num_batches += 1

    def step_end(self, state: TrainState, report: StepReport) -> None:
        if not self._num_steps:
            return
        self._num_steps -= 1
        mine, self._mine = self._mine, []
        for digest, who in (each for theirs in all_gather_object(state.comm, mine) for each in theirs):
            other = self._seen.setdefault(digest, who)
            if other != who:
                raise ConfigError(
                    f"debug: {other} and {who} have begun with equal batches: do all of them read the whole "
                    "stream, or does a sample not depend on its index?"
                )
