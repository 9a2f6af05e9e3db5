"""Sums and counts of a task, cut into any number of shares, give what torch's mean gives on the whole batch."""

import math
from functools import partial, wraps
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import ddp
from ddp.errors import ConfigError
from ddp.train.steps.task import IGNORE, Batch, ByteModel, Classification, LanguageModel, Regression, Task, as_task

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


def regression() -> Member:
    random = torch.Generator().manual_seed(0)
    model = nn.Linear(6, 1, dtype=torch.float64)
    return Regression(), model, (torch.randn(11, 6, dtype=torch.float64, generator=random), torch.arange(11.0))


MEMBERS = {
    "soft targets": soft_targets,
    "classification": classification,
    "smoothed": lambda: classification(0.1),
    "language model": language_model,
    "regression": regression,
}


@pytest.fixture(params=MEMBERS, ids=str)
def member(request: pytest.FixtureRequest) -> Member:
    torch.manual_seed(0)
    return MEMBERS[request.param]()


def torch_mean(task: Task, model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
    inputs, targets = batch
    if isinstance(task, Regression):
        return F.mse_loss(model(inputs)[:, 0], targets.double())
    return F.cross_entropy(model(inputs).movedim(-1, 1), targets, label_smoothing=label_smoothing)


@pytest.mark.parametrize("world_size", range(1, 9))
def test_shares_add_up_to_the_mean_of_the_whole(member: Member, world_size: int) -> None:
    task, model, batch = member
    expected = torch_mean(task, model, batch, label_smoothing=getattr(task, "label_smoothing", 0.0))
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
    assert metrics["loss"] == pytest.approx(torch_mean(task, model, batch).item(), rel=1e-12)  # never smoothed

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


WEIGHTS = torch.tensor([0.3, 1.7, 0.25, 2.9], dtype=torch.float64)
BY_WEIGHT = {
    "cross_entropy": F.cross_entropy,
    "of a module": nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2, label_smoothing=0.1),
    "of a partial function": partial(F.cross_entropy, ignore_index=1, weight=WEIGHTS),
    "nll_loss": nn.NLLLoss(weight=WEIGHTS),
    "probabilities": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "pixels": nn.CrossEntropyLoss(ignore_index=3),
}


@pytest.mark.parametrize("name", BY_WEIGHT)
@pytest.mark.parametrize("world_size", [1, 2, 3, 11])
def test_a_loss_of_torch_s_is_its_mean_by_weight_however_a_batch_is_shared(name: str, world_size: int) -> None:
    """Some shares have no label at all, of which torch's own mean is 0 ÷ 0."""
    torch.manual_seed(0)
    function: Any = BY_WEIGHT[name]
    model = nn.Sequential(nn.Linear(6, 4), nn.LogSoftmax(1)).double()
    inputs, targets = torch.randn(11, 6).double(), torch.randint(4, (11,))
    targets[4:] = getattr(function, "ignore_index", 1 if name == "of a partial function" else IGNORE)
    if name == "probabilities":
        targets = torch.randn(11, 4).double().softmax(1)
    elif name == "pixels":
        model, inputs = nn.Conv2d(2, 4, 1).double(), torch.randn(11, 2, 3, 5).double()
        targets = torch.randint(4, (11, 3, 5)).where(torch.rand(11, 3, 5) < 0.5, torch.tensor(3))
        targets[4:] = 3
    expected = function(model(inputs), targets)
    expected_gradient = torch.autograd.grad(expected, list(model.parameters()))
    task = as_task(function)
    shares = zip(inputs.tensor_split(world_size), targets.tensor_split(world_size), strict=True)
    sums, counts = zip(*(task.loss(model, share) for share in shares), strict=True)
    loss = torch.stack(sums).sum() / sum(counts)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_a_function_that_may_be_another_one_is_called_as_it_is() -> None:
    class Own(nn.CrossEntropyLoss):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return super().forward(input, target) * 2

    _, model, batch = classification()
    for function in (Own(), partial(F.cross_entropy, reduction="mean"), lambda out, y: F.cross_entropy(out, y)):
        loss, count = as_task(function).loss(model, batch)
        assert (loss, count) == (function(model(batch[0]), batch[1]) * 11, 11)


LABELS = torch.randint(3, (48,), generator=torch.Generator().manual_seed(1))
LABELS[4:8] = LABELS[16:24] = LABELS[33:40] = IGNORE  # all of one rank's share; all of a step; of parts of a share
ROWS = torch.randn(48, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
STRATEGIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "in parts": {"micro_size": 2},
    **{word: {"strategy": word} for word in ("sharded", "central_storage")},
    "same bits": {"same_bits": True},
    "rounds": {"strategy": ddp.LocalSGD(every=1)},
}


def tanh_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def without_labels() -> dict[str, Any]:
    """Returns by strategy the parameters at the end, and the loss of the last evaluation."""
    ddp.init(abort_s=20)
    found = {}
    for name, how in STRATEGIES.items():
        module, order = tanh_net(), ddp.data.Fixed(48)
        how = {"epochs": 1, "global_batch": 8, "folder": None, "progress": False, "curves": False, "order": order} | how
        data, optimizer = (ROWS, LABELS), SGD(module.parameters(), lr=0.1)
        state = ddp.fit(module, data, optimizer, **grouped(loss=F.cross_entropy, test_data=data, **how))
        found[name] = nn.utils.parameters_to_vector(module.parameters()).detach(), state.evaluation["test_loss"]
    comm, module = ddp.init(), tanh_net()
    model, optimizer = ddp.DistributedDataParallel(module), SGD(module.parameters(), lr=0.1)
    for rows, labels in zip(ROWS.split(8), LABELS.split(8), strict=True):  # as docs/drop-in.md says
        outputs, mine = model(rows.tensor_split(2)[comm.rank]), labels.tensor_split(2)[comm.rank]
        num_labels = comm.all_reduce((mine != IGNORE).sum()).clamp(min=1)
        optimizer.zero_grad()
        (F.cross_entropy(outputs, mine, reduction="sum") * comm.world_size / num_labels).backward()
        optimizer.step()
    found["by hand"] = nn.utils.parameters_to_vector(module.parameters()).detach(), float("nan")
    ddp.shutdown()
    return found


@pytest.mark.slow
def test_a_wrapper_is_called_by_its_own_signature() -> None:
    def weighted(outputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        return weight * F.mse_loss(outputs, targets)

    @wraps(weighted)
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return weighted(outputs, targets, 2.0)

    value, count = as_task(loss).loss(nn.Identity(), (torch.ones(3), torch.zeros(3)))
    assert value / count == 2.0


def test_a_share_without_a_label_adds_nothing_under_any_strategy() -> None:
    """torch's mean over no label is not a number, and one process that has the whole batch does not see it."""
    module = tanh_net()
    optimizer = SGD(module.parameters(), lr=0.1)
    for rows, labels in zip(ROWS.split(8), LABELS.split(8), strict=True):
        if (labels != IGNORE).any():
            optimizer.zero_grad()
            F.cross_entropy(module(rows), labels).backward()
            optimizer.step()
    expected = nn.utils.parameters_to_vector(module.parameters()).detach()
    for name, (parameters, loss) in run_ranks(without_labels, 2)[0].items():
        if name != "rounds":  # of which each rank's step has the mean of its own labels
            torch.testing.assert_close(parameters, expected, rtol=1e-13, atol=1e-14)
            assert name == "by hand" or loss == pytest.approx(F.cross_entropy(module(ROWS), LABELS).item(), rel=1e-13)
        assert parameters.isfinite().all()
