"""Losses that are no sums are found in the first batch, and layers that would wait for ever before the first step."""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.data.loading.loader import EvaluationLoader
from ddp.errors import ConfigError
from ddp.train.batch_checks import FirstBatchCheck, check_waiting, try_one_sample
from ddp.train.evaluate import check_evaluation
from ddp.train.steps.task import as_task

RANDOM = torch.Generator().manual_seed(0)
X, CLASSES = torch.randn(12, 6, generator=RANDOM), torch.randint(4, (12,), generator=RANDOM)
VALUES, ONES = torch.randn(12, 4, generator=RANDOM), torch.randint(2, (12, 4), generator=RANDOM).float()
WORDS, NEXT = torch.randint(9, (2, 12, 7), generator=RANDOM)
for _row, _length in enumerate(torch.randint(1, 8, (12,), generator=RANDOM).tolist()):
    NEXT[_row, _length:] = -100  # texts of uneven length


def fresh(*last: nn.Module, of: nn.Module | None = None) -> nn.Module:
    """Returns a model whose outputs are nearly the same for all samples, as many models begin."""
    model = nn.Sequential(of or nn.Linear(6, 5), nn.Linear(5, 4), *last)
    nn.init.normal_(model[1].weight, std=1e-5), nn.init.zeros_(model[1].bias)
    return model


class Named(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.net, self.kind = fresh(of=nn.Embedding(9, 5)), kind

    def forward(self, words: Tensor) -> Any:
        return self.kind(self.net(words))


class Pair(NamedTuple):
    scores: Tensor
    number: int


class Twins(ddp.Task):
    """Calls the model twice for one loss."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return (model(batch[0]) - model(-batch[0]) - batch[1]).square().sum(), len(batch[0])


class Returned(ddp.Task):
    """Takes the losses that the model itself returns."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return sum(losses.sum() for losses in model(batch[0])), len(batch[0])


class Told(ddp.Task):
    """Returns as a metric what it is told."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), batch[1].numel()

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch), "own": self.metric(model(batch[0]), batch[1])}


def tokens(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten() % 4 - 100 * (targets.flatten() < 0))


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Is the mean over the elements that count."""
    return ((outputs - targets).abs() * (targets > 0)).sum() / (targets > 0).sum()


def contrastive(outputs: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class Own(nn.CrossEntropyLoss):
    """May do what it likes."""


IN_PARTS: dict[str, tuple[Any, nn.Module, Any, Any]] = {
    "tokens": (tokens, fresh(of=nn.Embedding(9, 5)), WORDS, NEXT),
    "tokens of a dict": (lambda out, y: tokens(out["a"], y), Named(lambda out: OrderedDict(a=out)), WORDS, NEXT),
    "tokens of a tuple": (lambda out, y: tokens(out.scores, y), Named(lambda out: Pair(out, 3)), WORDS, NEXT),
    "a mask": (masked, fresh(), X, VALUES),
    "a mask over probabilities": (masked, fresh(nn.Sigmoid()), X, ONES),
    "class weights": (Own(weight=torch.tensor([1.0, 5.0, 0.1, 2.0])), fresh(), X, CLASSES),
    "pairs of samples": (contrastive, fresh(), X, CLASSES),
    "one half without a label": (Own(ignore_index=0), fresh(), X, CLASSES * (torch.arange(12) < 6)),
}
SUMS: dict[str, tuple[Any, nn.Module, Any, Any]] = {
    "classes": (F.cross_entropy, fresh(), X, CLASSES),
    "classes, some of them none": (nn.CrossEntropyLoss(ignore_index=2), fresh(), X, CLASSES),
    "by weight": (partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.1, 2.0])), fresh(), X, CLASSES),
    "logarithms": (F.nll_loss, fresh(nn.LogSoftmax(1)), X, CLASSES),
    "texts": (ddp.LanguageModel(), fresh(of=nn.Embedding(9, 5)), WORDS, NEXT % 4 - 100 * (NEXT < 0)),
    "squares": (F.mse_loss, fresh(), X, VALUES),
    "in a function": (lambda outputs, targets: (outputs - targets).abs().mean(), fresh(), X, VALUES),
    "bits": (F.binary_cross_entropy_with_logits, fresh(), X, ONES),
    "probabilities": (F.binary_cross_entropy, fresh(nn.Sigmoid()), X, ONES),
    "distributions": (nn.KLDivLoss(reduction="batchmean"), fresh(nn.LogSoftmax(1)), X, VALUES.softmax(1)),
    "rates": (partial(F.poisson_nll_loss, log_input=False), fresh(nn.Softplus()), X, ONES),
    "logarithms of rates": (F.poisson_nll_loss, fresh(), X, ONES),
    "a constant model": (F.mse_loss, Named(lambda out: out.new_zeros(12, 4)[: len(out)]), WORDS, VALUES),
    "two calls of the model": (Twins(), fresh(), X, VALUES),
    "a sum of the model's": (Returned(), Named(lambda out: [out.exp().sum()]), WORDS, VALUES),
    "a sum of the model's, with a dimension": (Returned(), Named(lambda out: [out.exp().sum()[None]]), WORDS, VALUES),
    "a metric": (Told(lambda out, y: ((out - y).abs().sum(), y.numel())), fresh(), X, VALUES),
    "a metric that counts few": (Told(lambda out, y: (out[y > 0].sum(), (y > 0).sum())), fresh(), X, VALUES),
    "a constant": (Told(lambda out, y: (0.5, 1)), fresh(), X, VALUES),
}


def look(loss: Any, model: nn.Module, inputs: Any, targets: Any) -> None:
    FirstBatchCheck(as_task(loss))(model, (inputs, targets), len(inputs))


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_loss_that_is_no_sum_is_told_of_a_fresh_model(name: str, caplog: pytest.LogCaptureFixture) -> None:
    look(*IN_PARTS[name])
    assert [record.message.split(" (")[0] for record in caplog.records] == ["the loss of a batch"]
    assert "is not the sum of its parts' losses" in caplog.text and "ignore_index" in caplog.text


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_not_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_rng_state()
    look(*SUMS[name])
    assert not caplog.text and torch.equal(before, torch.get_rng_state())
    assert not SUMS[name][1]._forward_hooks


METRICS: dict[str, tuple[Any, str]] = {
    "mean": (lambda out, y: (F.l1_loss(out, y), len(y)), r"metrics\['own'\] returned .* a mean, where the sum"),
    "mean and 1": (lambda out, y: (F.l1_loss(out, y), 1), r"metrics\['own'\] returned .* a mean, where the sum"),
    "of equal outputs": (lambda out, y: (out.sigmoid().mean(), 1), r"metrics\['own'\] returned .* a mean, where"),
    "sum and 1": (lambda out, y: ((out - y).abs().sum(), 1), r"metrics\['own'\] returned the count 1 for 12 samples"),
    "vector": (lambda out, y: ((out - y).abs().sum(1), len(y)), r"metrics returned \(tensor\(\[.* for 'own': return"),
    "None": (lambda out, y: (None, 1), r"metrics returned \(None, 1\) for 'own': return a sum"),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_that_is_no_sum_is_refused_by_its_name(name: str) -> None:
    metric, told = METRICS[name]
    with pytest.raises(ConfigError, match=f"Told.{told}"):
        look(Told(metric), fresh(), X, VALUES)
    if name in ("vector", "None"):  # an evaluation by itself, and a batch that cannot be cut
        with pytest.raises(ConfigError, match=f"Told.{told}"):
            ddp.evaluate(fresh(), (X, VALUES), loss=Told(metric))
        with pytest.raises(ConfigError, match=f"Told.{told}"):
            FirstBatchCheck(Told(metric))(fresh(), (X, VALUES, torch.zeros(3)), 12)


def test_a_metric_over_pairs_is_told_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    look(Told(lambda out, y: ((out @ out.T).sum(), len(y))), fresh(), X, VALUES)
    assert "the metric 'own' of a batch" in caplog.text and "is not the sum of its parts' values" in caplog.text


class Centres(nn.Module):
    """Is a loss with weights of its own."""

    def __init__(self, *, is_trained: bool = True) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 4), requires_grad=is_trained)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs @ self.centres.T, targets, reduction="sum") / len(outputs)


class Centred(ddp.Task):
    def __init__(self) -> None:
        self.part = Centres()

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return self.part(model(batch[0]), batch[1]) * len(batch[1]), len(batch[1])


def test_a_loss_with_weights_of_its_own_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, hidden, fixed = fresh(), Centres(), Centres(is_trained=False)
    for loss, named in (
        (Centres(), r"Centres has its own weights \(centres\)"),
        (Centred(), r"Centred has its own weights \(centres\)"),
        (lambda out, y: hidden(out, y), r"has its own weights \(of shape \[4, 4\]\)"),
        (fixed, None),
        (lambda out, y: F.cross_entropy(out, y) + 0.1 * model[0].weight.square().sum() / 12, None),  # of the model
    ):
        caplog.clear()
        look(loss, model, X, CLASSES)
        assert ("has its own weights" in caplog.text) == (named is not None)
        assert named is None or re.search(f"the loss .*{named}, and fit trains those of the model alone", caplog.text)
    everything = [*model.parameters(), *hidden.parameters()]
    with pytest.raises(ConfigError, match=r"1 parameter.* if they are weights of a loss, put the loss into the model"):
        ddp.fit(
            model, (X, CLASSES), torch.optim.SGD(everything, lr=0.1), loss=hidden, global_batch=4, max_steps=1,
            folder=None,
        )  # fmt: skip


# Batch statistics


def model(**options: Any) -> nn.Module:
    return ddp.SyncBatchNorm.convert(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, **options)))


@pytest.mark.parametrize(
    ("num_samples", "num_shards", "batch_size", "is_refused"),
    [
        *((5, None, 2, True), (1, None, 2, True), (8, None, 4, False)),
        *((5, 4, 2, False), (8, 3, 4, True), (8, 1, 4, True), (12, 4, 2, False), (6, 3, 1, True)),
    ],
)
def test_an_evaluation_by_the_batch_needs_as_many_forwards_on_every_rank(
    num_samples, num_shards, batch_size, is_refused
):
    cut = {"batch_size": batch_size, "num_shards": num_shards}
    loaders = [EvaluationLoader(range(num_samples), rank=rank, world_size=2, **cut) for rank in range(2)]
    assert is_refused == (len(loaders[0]) != len(loaders[1]))
    check_evaluation(model(), num_samples, world_size=2, **cut)  # by running statistics
    check_evaluation(model(track_running_stats=False), num_samples, world_size=1, **cut)
    told = f"of {num_samples} samples, {batch_size} at once, 2 workers .* another num_shards than {num_shards or 2}"
    with pytest.raises(ConfigError, match=told) if is_refused else nullcontext():
        check_evaluation(model(track_running_stats=False), num_samples, world_size=2, **cut)


def test_samples_that_cannot_be_read_do_not_go_with_layers_that_wait():
    state = SimpleNamespace(comm=SimpleNamespace(world_size=2), model=model(), sampler=None)
    with pytest.raises(ConfigError, match="max_unreadable=3 with SyncBatchNorm, which waits in each forward"):
        check_waiting(cast(Any, state), "join", 3)


def test_one_sample_is_tried_where_a_step_may_have_it():
    flat, image = nn.BatchNorm1d(3), nn.BatchNorm2d(3)
    try_one_sample(flat, torch.zeros(1, 3), [])
    try_one_sample(image, (torch.zeros(1, 3, 4, 4), torch.zeros(1)), [33])  # an image has many values per channel
    with pytest.raises(ConfigError, match="in a step of size 33 or 35 a worker has a share of one sample"):
        try_one_sample(flat, (torch.zeros(1, 3), torch.zeros(1)), [33, 35])
    try_one_sample(flat.eval(), (torch.zeros(1, 3), torch.zeros(1)), [33, 35])  # frozen, also while others are trained
