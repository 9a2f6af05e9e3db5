"""A task of a plain loss function of outputs and targets.

Read before: `language_model.py`. Read next: `ngram.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp.tasks.task import Batch


class LossFunction:
    """Minimises the mean of a function of outputs and targets."""

    main_metric = "loss"
    higher_is_better = False

    def __init__(self, function: Callable[[Any, Any], Tensor], *, reduction: Literal["mean", "sum"] = "mean") -> None:
        self.function, self.reduction = function, reduction

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Returns the sum over the batch, and its length."""
        inputs, targets = batch
        value = self.function(model(inputs), targets)
        return value * (len(inputs) if self.reduction == "mean" else 1), len(inputs)

    @torch.no_grad()
    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, float]]:
        """Returns the loss."""
        return {"loss": self.loss(model, batch)}

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the model's outputs."""
        outputs: Tensor = model(batch[0])
        return outputs

    def finish(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns the means as they are."""
        return dict(means)
