"""A task says how a model is trained and judged: the contract between a subject and the training loop.

A task never divides. It returns sums and their counts. The loop adds both over micro-batches and ranks and divides
once, by the global count:

    rank 0    loss_sum 13.1, count 5  ┐
    rank 1    loss_sum  9.2, count 4  ┴→  22.3 / 9         the mean over all samples, whatever the shares

The mean of the ranks' means would be another number as soon as the shares differ. A rank without samples returns
(0, 0), which adds nothing. A task holds no state and is the same object on every rank.

Read before: `models/gpt.py`. Read next: `classification.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # (inputs, targets), on the model's device


class Task(Protocol):
    """The methods that `fit`, `evaluate` and `predict` call."""

    @property
    def main_metric(self) -> str:
        """Returns the metric, among those of `finish`, that decides which checkpoint is the best."""

    @property
    def higher_is_better(self) -> bool:
        """Returns True if a larger `main_metric` is a better model."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Returns the loss to minimise: (its *sum*, a scalar with a gradient; the number of terms in the sum)."""

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, float]]:
        """Returns a sum and a count for each metric, without gradient. The caller adds both over ranks and divides."""

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns what `predict` keeps of each sample: [n, ...], without gradient, in the batch's order."""

    def finish(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics to report, from the global means of `metrics`."""


def at_least_float32(logits: Tensor) -> Tensor:
    """Returns half-precision logits as float32, because a sum of thousands of losses needs the digits; others as is."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
