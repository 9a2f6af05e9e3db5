"""Language modelling: which token is next? The model returns [n, time, vocabulary] logits for [n, time] tokens.

    loss            Σ over targets of  −ln p(target | everything before it)           in nats
    bits per token  loss mean / ln 2; per byte, where a token is a byte               as a compressor would need

A target of −100 (`IGNORE`, torch's own convention) is no target: neither in the sum nor in the count. So padded texts
of uneven length weigh by what they hold, on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.train.tasks.task import IGNORE as IGNORE
from ddp.train.tasks.task import Batch, Task, at_least_float32


class LanguageModel(Task):
    """Minimises the cross-entropy of the next token; reports it as bits per token, too (`ByteModel`: per byte).

    Batches are (tokens, targets), both [n, time], where targets are the tokens one position later, or −100 for none;
    the model returns logits [n, time, vocabulary]:

        ddp.fit(model, data, optimizer, loss=ddp.LanguageModel(), global_batch=16, max_steps=2000, test_data=test)
    """

    main_metric: ClassVar[str] = "bits_per_token"

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Returns (Σ −ln p over the targets, their number)."""
        tokens, targets = batch
        logits = at_least_float32(model(tokens))  # [n, time, vocabulary]
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return loss_sum, int((targets != IGNORE).sum())

    @torch.no_grad()
    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, float]]:
        """Returns the loss alone; bits per token are a multiple of its mean, see `finish`."""
        return {"loss": self.loss(model, batch)}

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the nats of every target, [n, time]; 0 where the target is `IGNORE`."""
        tokens, targets = batch
        logits = at_least_float32(model(tokens))
        return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE, reduction="none")

    def finish(self, means: Mapping[str, float]) -> dict[str, float]:
        """Adds bits per token, or per byte."""
        return {**means, self.main_metric: means["loss"] / math.log(2)}


class ByteModel(LanguageModel):
    """A `LanguageModel` whose tokens are bytes: reports bits per byte."""

    main_metric: ClassVar[str] = "bits_per_byte"
