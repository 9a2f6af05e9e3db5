"""Finds models whose outputs are probabilities, where the loss takes scores and makes probabilities of them itself.

    scores ─ softmax ─→ probabilities ─ cross_entropy's own softmax ─→ between 1/n and e/n: gradients nearly vanish

Such a model learns, but less well, and nothing else would show it. Rows that are ≥ 0 and sum to 1 come of a softmax.
Numbers from 0 to 1 may be scores, too, so a sigmoid must be seen in the graph of autograd.

Log-probabilities are no mistake: the softmax of them is what they are the logarithms of.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.process.log import log
from ddp.replica.sync_batchnorm import SyncBatchNorm
from ddp.train.tasks.classification import Classification
from ddp.train.tasks.language_model import LanguageModel
from ddp.train.tasks.loss_function import LossFunction, name_of
from ddp.train.tasks.task import Task, outputs_of

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
