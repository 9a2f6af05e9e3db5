"""The contract between a model's subject and the training loop.

A task never divides. It returns sums and what they are sums over; the loop adds both over micro-batches and ranks and
divides once, by the global count:

    rank 0    loss_sum 13.1, count 5  ┐
    rank 1    loss_sum  9.2, count 4  ┴→  22.3 / 9         the mean over all samples, whatever the shares

The mean of the ranks' means would be another number as soon as the shares differ. A rank that has nothing returns
(0, 0), which adds nothing. A task holds no state and is the same object on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # (inputs, targets), on the model's device


class Task(Protocol):
    """What `fit`, `evaluate` and `predict` ask of a task."""

    @property
    def main_metric(self) -> str:
        """The metric, among those that `finish` returns, by which the best checkpoint is chosen."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger `main_metric` is a better model."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """The loss to minimise: (its *sum*, a scalar with a gradient; the number of terms in the sum)."""

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, float]]:
        """Per metric a sum and a count, without gradient. The caller adds both over all ranks, then divides."""

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """What `predict` keeps of each sample: [n, ...], without gradient, in the batch's order."""

    def finish(self, means: Mapping[str, float]) -> dict[str, float]:
        """The metrics to report, from the global means of `metrics`."""


def at_least_float32(logits: Tensor) -> Tensor:
    """Half-precision logits as float32, others as they are: a sum of thousands of losses needs the digits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
