"""A task says how a model is trained and judged: the contract between a subject and the training loop.

A task never divides. It returns sums and their counts. The loop adds both over micro-batches and ranks and divides
once, by the global count:

    rank 0    loss_sum 13.1, count 5  ┐
    rank 1    loss_sum  9.2, count 4  ┴→  22.3 / 9         the mean over all samples, whatever the shares

The mean of the ranks' means would be another number as soon as the shares differ. A rank without samples returns
(0, 0), which adds nothing. A task holds no state and is the same object on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

IGNORE = -100
"""A target that is none: neither in the sum nor in the count. It is torch's own convention."""

Batch = Any  # what the data set's samples were collated to, on the model's device: mostly (inputs, targets)


class Task(ABC):
    """A way to train a model and to judge it. `loss` is all that a task must have.

    For a loss that is the mean over samples no task is needed: give `ddp.fit` the function. This one predicts a price
    from a table and the text beside it, weighs some samples more, and reports the share of good guesses:

        class Price(ddp.Task):
            main_metric, higher_is_better = "within_ten_percent", True

            def loss(self, model, batch):
                errors = self.errors(model, batch)
                return (batch["weight"] * errors.square()).sum(), len(errors)      # a sum, and how many are in it

            def metrics(self, model, batch):
                errors = self.errors(model, batch).abs()
                return {"loss": self.loss(model, batch), "within_ten_percent": ((errors < 0.1).sum(), len(errors))}

            def outputs(self, model, batch):
                return model(batch["table"], batch["text"])

            def errors(self, model, batch):
                return self.outputs(model, batch) - batch["price"]

        ddp.fit(model, data, optimizer, loss=Price(), global_batch=64, epochs=3, test_data=test)

    Attributes:
        main_metric: the metric, among those of `finish`, that decides which checkpoint is the best.
        higher_is_better: True if a larger `main_metric` is a better model.
    """

    main_metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        """Returns the loss to minimise: (its *sum*, a scalar with a gradient; the number of terms in the sum).

        Where terms have weights and the mean is one by weight, as that of torch's CrossEntropyLoss(weight=…), the
        second is the sum of the weights. It need not be whole.
        """

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, float]]:
        """Returns a sum and a count for each metric, without gradient. The caller adds both over ranks and divides."""
        return {"loss": self.loss(model, batch)}

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the outputs that `predict` keeps: [n, ...], without gradient, in the batch's order."""
        return outputs_of(model, batch)

    def finish(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics to report, from the global means of `metrics`."""
        return dict(means)


def outputs_of(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the model's outputs for the inputs of a batch: its first part, or all of it if it has no parts."""
    outputs: Tensor = model(batch[0] if isinstance(batch, (tuple, list)) else batch)
    return outputs


def at_least_float32(logits: Tensor) -> Tensor:
    """Returns half-precision logits as float32, because a sum of thousands of losses needs the digits; others as is."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
