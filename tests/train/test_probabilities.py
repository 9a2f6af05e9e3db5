"""Models that return probabilities where the loss takes scores are warned of, and no others."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.train.checks.batch_checks import FirstBatchCheck
from ddp.train.tasks.task import as_task

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
CLASSES, ONE = torch.arange(6) % 3, (torch.arange(6) % 2).float()[:, None]


class InEvaluationAlone(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scores = super().forward(input)
        return scores if self.training else scores.softmax(1)


class Tokens(nn.Sequential):
    def __init__(self, *last: nn.Module) -> None:
        super().__init__(nn.Embedding(5, 4), nn.Linear(4, 5), *last)


def with_end(*last: nn.Module, num: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, num), *last)


def small() -> nn.Module:
    """Scores that are from 0 to 1 by chance."""
    model = with_end(num=1)
    nn.init.constant_(model[0].weight, 0.0)
    nn.init.constant_(model[0].bias, 0.5)
    return model


def words() -> Any:
    return torch.arange(10).view(2, 5) % 5


WARNED = {
    "softmax": (F.cross_entropy, with_end(nn.Softmax(1)), CLASSES, "rows that are at least 0 and sum to 1"),
    "of a module": (nn.CrossEntropyLoss(), with_end(nn.Softmax(1)), CLASSES, "CrossEntropyLoss takes scores"),
    "smoothed": (partial(F.cross_entropy, label_smoothing=0.1), with_end(nn.Softmax(1)), CLASSES, "takes scores"),
    "task": (ddp.Classification(), with_end(nn.Softmax(1), nn.Dropout(0.0)), CLASSES, "Classification takes scores"),
    "sigmoid": (
        F.binary_cross_entropy_with_logits,
        with_end(nn.Sigmoid(), num=1),
        ONE,
        r"from a sigmoid\), but",
    ),
    "flat sigmoid": (nn.BCEWithLogitsLoss(), with_end(nn.Sigmoid(), nn.Flatten(0), num=1), ONE[:, 0], "from a sigmoid"),
    "of classes": (F.cross_entropy, with_end(nn.Sigmoid()), CLASSES, "from a sigmoid"),
    "of their logarithms": (
        F.nll_loss,
        with_end(nn.Softmax(1)),
        CLASSES,
        "nll_loss takes log-prob.* in LogSoftmax",
    ),
}
FINE = {
    "scores": (F.cross_entropy, with_end(), CLASSES),
    "log-probabilities": (F.cross_entropy, with_end(nn.LogSoftmax(1)), CLASSES),
    "their loss": (F.nll_loss, with_end(nn.LogSoftmax(1)), CLASSES),
    "small scores": (F.binary_cross_entropy_with_logits, small(), ONE),
    "probabilities": (F.binary_cross_entropy, with_end(nn.Sigmoid(), num=1), ONE),
    "softmax elsewhere": (F.mse_loss, with_end(nn.Softmax(1)), torch.rand(6, 3)),
    "in evaluation": (F.cross_entropy, InEvaluationAlone(8, 3), CLASSES),
}


def look(loss: Any, model: nn.Module, inputs: Any, targets: Any) -> None:
    FirstBatchCheck(as_task(loss))(model, (inputs, targets), len(inputs))


@pytest.mark.parametrize("name", WARNED)
def test_probabilities_in_the_place_of_scores_are_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, model, targets, told = WARNED[name]
    look(loss, model, X, targets)
    assert caplog.text.count("the model returns probabilities") == 1 and model.training
    assert re.search(told, caplog.text)


@pytest.mark.parametrize("name", FINE)
def test_what_a_loss_takes_is_not_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, model, targets = FINE[name]
    look(loss, model, X, targets)
    assert not caplog.text


def test_a_language_model_s_words_are_in_the_last_dimension(caplog: pytest.LogCaptureFixture) -> None:
    look(ddp.LanguageModel(), Tokens(), words(), words())
    assert not caplog.text
    look(ddp.LanguageModel(), Tokens(nn.Softmax(2)), words(), words())
    assert "LanguageModel takes scores" in caplog.text
