"""Classification: which class is a sample of? The model returns [n, num_classes] scores.

    loss       Σ over samples of  −ln p(class),  p = softmax(scores)            in nats
    accuracy   the number of samples whose class has the highest score, of how many

Label smoothing ε makes p(class) = 1 − ε + ε/num_classes, and ε/num_classes elsewhere, the target. It belongs to
training, so the reported loss is without it. Source: Szegedy et al. 2015, section 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.errors import ConfigError
from ddp.train.tasks.task import IGNORE, Batch, Task, at_least_float32, pair_of, weight_of


@dataclass(frozen=True)
class Classification(Task):
    """Minimises the cross-entropy of the class; reports it with the accuracy.

    Batches are (inputs, classes), the classes [n] whole numbers from 0, or −100 for none; the model returns scores
    [n, num_classes]. Classes may also be one-hot, or a probability of each class, [n, num_classes]; the right class is
    then the likeliest:

        ddp.fit(model, data, optimizer, loss=ddp.Classification(), global_batch=64, epochs=3, test_data=test)

    Raises:
        ConfigError: `label_smoothing` is not within 0 … 1.
    """

    label_smoothing: float = 0.0
    main_metric: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} is no share of a label; choose 0 … 1, often 0.1")

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float | Tensor]:
        """Returns (Σ cross-entropy over the samples, their number)."""
        inputs, classes = pair_of(batch, self)
        scores = at_least_float32(model(inputs))
        targets = _targets(classes, scores)
        loss_sum = F.cross_entropy(scores, targets, reduction="sum", label_smoothing=self.label_smoothing)
        return loss_sum, weight_of(targets)

    @torch.no_grad()
    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[float | Tensor, float | Tensor]]:
        """Returns `loss` (without label smoothing) and `accuracy`."""
        inputs, classes = batch
        scores = at_least_float32(model(inputs))
        targets = _targets(classes, scores)
        num_right = (scores.argmax(dim=1) == (targets.argmax(dim=1) if targets.is_floating_point() else targets)).sum()
        return {
            "loss": (F.cross_entropy(scores, targets, reduction="sum"), weight_of(targets)),
            "accuracy": (num_right, weight_of(targets)),
        }

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns log-probabilities [n, num_classes]; their argmax is the predicted class."""
        inputs, _ = batch
        return F.log_softmax(at_least_float32(model(inputs)), dim=1)


def _targets(classes: Tensor, scores: Tensor) -> Tensor:
    """Returns classes as numbers; or as probabilities of the scores' type, if there is one for each score."""
    return classes.to(scores.dtype) if classes.shape == scores.shape else classes


# --- Which token is next? --------------------------------------------------------------------------------------------
#
#     loss            Σ over targets of  −ln p(target | everything before it)           in nats
#     bits per token  loss mean / ln 2; per byte, where a token is a byte               as a compressor would need
#
# A target of −100 (`IGNORE`, torch's own convention) is no target: neither in the sum nor in the count. So padded texts
# of uneven length weigh by what they hold, on every rank.


class LanguageModel(Task):
    """Minimises the cross-entropy of the next token; reports it as bits per token, too (`ByteModel`: per byte).

    Batches are (tokens, targets), both [n, time], where targets are the tokens one position later, or −100 for none;
    the model returns logits [n, time, vocabulary]:

        ddp.fit(model, data, optimizer, loss=ddp.LanguageModel(), global_batch=16, max_steps=2000, test_data=test)
    """

    main_metric: ClassVar[str] = "bits_per_token"

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, float | Tensor]:
        """Returns (Σ −ln p over the targets, their number)."""
        tokens, targets = batch
        logits = at_least_float32(model(tokens))  # [n, time, vocabulary]
        loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return loss_sum, weight_of(targets)

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
