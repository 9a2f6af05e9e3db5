"""Classification: which class is a sample of? The model returns [n, num_classes] scores.

    loss       Σ over samples of  −ln p(class),  p = softmax(scores)            in nats
    accuracy   the number of samples whose class has the highest score, of how many

Label smoothing ε makes p(class) = 1 − ε + ε/num_classes, and ε/num_classes elsewhere, the target. It belongs to
training, so the reported loss is without it. Source: Szegedy et al. 2015, section 7.

Read before: `loss_function.py`. Read next: `language_model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.errors import ConfigError
from ddp.tasks.task import IGNORE, Batch, Task, at_least_float32


@dataclass(frozen=True)
class Classification(Task):
    """Minimises the cross-entropy of the class; reports it with the accuracy.

    Batches are (inputs, classes), the classes [n] whole numbers from 0, or −100 for none; the model returns scores
    [n, num_classes]:

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

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """Returns (Σ cross-entropy over the samples, their number)."""
        inputs, classes = batch
        scores = at_least_float32(model(inputs))
        loss_sum = F.cross_entropy(scores, classes, reduction="sum", label_smoothing=self.label_smoothing)
        return loss_sum, _count(classes)

    @torch.no_grad()
    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, float]]:
        """Returns `loss` (without label smoothing) and `accuracy`."""
        inputs, classes = batch
        scores = at_least_float32(model(inputs))
        num_right = (scores.argmax(dim=1) == classes).sum()
        return {
            "loss": (F.cross_entropy(scores, classes, reduction="sum"), _count(classes)),
            "accuracy": (num_right, _count(classes)),
        }

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns log-probabilities [n, num_classes]; their argmax is the predicted class."""
        inputs, _ = batch
        return F.log_softmax(at_least_float32(model(inputs)), dim=1)


def _count(classes: Tensor) -> int:
    """Returns the number of samples that have a class."""
    return len(classes) if classes.is_floating_point() else int((classes != IGNORE).sum())
