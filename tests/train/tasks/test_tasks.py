"""Sums and counts of a task, cut into any number of shares, give what torch's mean gives on the whole batch."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp.errors import ConfigError
from ddp.train.tasks.cross_entropy import IGNORE, ByteModel, Classification, LanguageModel
from ddp.train.tasks.task import Batch, Task

Member = tuple[Task, nn.Module, Batch]


def classification(label_smoothing: float = 0.0) -> Member:
    random = torch.Generator().manual_seed(0)
    model = nn.Linear(6, 4, dtype=torch.float64)
    batch = torch.randn(11, 6, dtype=torch.float64, generator=random), torch.randint(4, (11,), generator=random)
    return Classification(label_smoothing=label_smoothing), model, batch


def language_model() -> Member:
    """Texts of uneven length: the last targets are none."""
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)).double()
    tokens, targets = torch.randint(9, (2, 11, 7), generator=random)
    for row, length in enumerate(torch.randint(1, 8, (11,), generator=random).tolist()):
        targets[row, length:] = IGNORE
    return LanguageModel(), model, (tokens, targets)


def soft_targets() -> Member:
    """Each sample has a probability of each class."""
    task, model, (inputs, _) = classification(0.1)
    return task, model, (inputs, torch.randn(11, 4, generator=torch.Generator().manual_seed(1)).double().softmax(1))


MEMBERS = {
    "soft targets": soft_targets,
    "classification": classification,
    "smoothed": lambda: classification(0.1),
    "language model": language_model,
}


@pytest.fixture(params=MEMBERS, ids=str)
def member(request: pytest.FixtureRequest) -> Member:
    torch.manual_seed(0)
    return MEMBERS[request.param]()


def torch_mean(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    logits = model(inputs).movedim(-1, 1)
    return F.cross_entropy(logits, targets, label_smoothing=getattr(task, "label_smoothing", 0.0))


@pytest.mark.parametrize("world_size", range(1, 9))
def test_shares_add_up_to_the_mean_of_the_whole(member: Member, world_size: int) -> None:
    task, model, batch = member
    expected = torch_mean(task, model, batch)
    expected_gradient = torch.autograd.grad(expected, list(model.parameters()))
    shares = [(inputs, targets) for inputs, targets in zip(*(x.tensor_split(world_size) for x in batch), strict=True)]
    results = [task.loss(model, share) for share in shares]
    count = sum(count for _, count in results)
    loss = torch.stack([loss_sum for loss_sum, _ in results]).sum() / count
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)

    sums: dict[str, list[float]] = {}
    for share in shares:
        for name, (value, share_count) in task.metrics(model, share).items():
            assert not isinstance(value, Tensor) or not value.requires_grad
            sums.setdefault(name, [0.0, 0.0])
            sums[name][0] += float(value)
            sums[name][1] += share_count
    metrics = task.finish({name: total / n for name, (total, n) in sums.items()})
    assert task.main_metric in metrics
    plain_loss = F.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1]).item()  # never smoothed
    assert metrics["loss"] == pytest.approx(plain_loss, rel=1e-12)

    together = torch.cat([task.outputs(model, share) for share in shares])
    torch.testing.assert_close(together, task.outputs(model, batch))
    assert not together.requires_grad
    assert len(together) == len(batch[0])


def test_an_empty_share_adds_nothing(member: Member) -> None:
    task, model, (inputs, targets) = member
    loss_sum, count = task.loss(model, (inputs[:0], targets[:0]))
    assert (loss_sum.item(), count) == (0.0, 0)
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss_sum, list(model.parameters())))


def test_half_precision_scores_are_summed_in_float32(member: Member) -> None:
    task, model, (inputs, targets) = member
    model = model.bfloat16()
    inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    loss_sum, _ = task.loss(model, (inputs, targets))
    assert loss_sum.dtype == torch.float32


def test_accuracy_counts_the_right_ones() -> None:
    scores = torch.tensor([[3.0, 1.0], [0.0, 2.0], [5.0, 4.0]])
    metrics = Classification().metrics(nn.Identity(), (scores, torch.tensor([0, 0, 0])))
    value, count = metrics["accuracy"]
    assert (float(value), count) == (2, 3)
    assert Classification().higher_is_better


@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.float64, torch.bool])
def test_one_hot_targets_are_classes(kind: torch.dtype) -> None:
    one_hot, task = torch.eye(10), Classification()
    found = {"right": one_hot, "wrong": one_hot.roll(1, 1), "always 1": one_hot[[1] * 10]}
    for name, num_right in {"right": 10, "wrong": 0, "always 1": 1}.items():
        metrics = task.metrics(nn.Identity(), (found[name], one_hot.to(kind)))
        numbered = task.metrics(nn.Identity(), (found[name], torch.arange(10)))
        assert (float(metrics["accuracy"][0]), metrics["accuracy"][1]) == (num_right, 10)
        assert metrics["loss"][0] == pytest.approx(float(numbered["loss"][0])) and metrics["loss"][1] == 10
        loss, count = task.loss(nn.Identity(), (found[name], one_hot.to(kind)))
        assert loss == numbered["loss"][0] and count == 10


def test_soft_targets_of_pixels_count_pixels() -> None:
    scores, targets = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5).softmax(1)
    loss, count = Classification().loss(nn.Identity(), (scores, targets))
    torch.testing.assert_close(loss / count, F.cross_entropy(scores, targets))


def test_classification_outputs_are_log_probabilities() -> None:
    task, model, batch = classification()
    torch.testing.assert_close(task.outputs(model, batch).exp(), model(batch[0]).softmax(1).detach())


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_impossible_smoothing_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"label_smoothing={value}"):
        Classification(label_smoothing=value)


def test_ignorance_of_a_byte_is_eight_bits() -> None:
    """A model that says the same of every byte needs 8 bits for each."""
    task = LanguageModel()
    tokens = torch.zeros(2, 5, dtype=torch.int64)

    class Ignorant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros(*x.shape, 256)

    loss_sum, count = task.metrics(Ignorant(), (tokens, tokens))["loss"]
    means = {"loss": float(loss_sum) / count}
    assert task.finish(means) == {**means, "bits_per_token": pytest.approx(8)}
    assert ByteModel().finish(means) == {**means, "bits_per_byte": pytest.approx(8)}
    assert not task.higher_is_better


def test_language_model_outputs_are_the_terms_of_its_loss() -> None:
    task, model, batch = language_model()
    outputs = task.outputs(model, batch)
    assert outputs.shape == batch[1].shape
    assert not outputs[batch[1] == IGNORE].any()
    torch.testing.assert_close(outputs.sum(), task.loss(model, batch)[0].detach())


def test_a_sample_without_a_class_is_not_counted() -> None:
    task, model, (inputs, classes) = classification()
    classes[3:6] = IGNORE
    loss_sum, count = task.loss(model, (inputs, classes))
    assert count == 8
    torch.testing.assert_close(loss_sum / count, F.cross_entropy(model(inputs), classes))
