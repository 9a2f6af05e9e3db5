"""What cannot be compiled, or would be compiled into something else, is one sentence before the first step.

Tests: ddp/replica/compiled.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from computed import NUM_SAMPLES, Watch, error_of, fitted, made, samples
from jaxed import jaxed, needs_jax
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError
from ddp.run.settings import checks
from ddp.run.settings.reader import from_plain

FILE = str(Path(__file__))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5))


def with_a_hook_on_a_layer() -> nn.Module:
    module = mlp()
    module[1].register_forward_hook(lambda *_: None)
    return module


def with_a_hook_on_a_parameter() -> nn.Module:
    module = mlp()
    module[1].weight.register_hook(lambda gradient: gradient * 2)
    return module


def with_a_hook_after_accumulation() -> nn.Module:
    module = mlp()
    module[3].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


class Tracks(nn.Module):
    """Keeps statistics by a layer whose updates torchax does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.InstanceNorm2d(1, track_running_stats=True), mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(self.norm(inputs))
        return scores


class Reads(nn.Module):
    """Reads rows by an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.lstm(inputs.squeeze(1))[0][:, -1])
        return scores


class Drops(nn.Module):
    """Drops half of what another module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        return F.dropout(self.inner(inputs), 0.5, self.training)


class Targets(nn.Module):
    """Has a factor without a gradient, as long as it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(inputs)
        with torch.set_grad_enabled(not self.training and torch.is_grad_enabled()):
            factor = torch.sigmoid(self.inner(inputs))
        return scores * factor


class Noises(nn.Module):
    """Adds noise while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(inputs)
        return scores + torch.rand(5) if self.training else scores


class Turns(nn.Module):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.ones(64, 5, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.flatten(1).to(torch.complex64) @ self.phases).abs()


class Counts(nn.Module):
    """Counts its forwards in buffers, in each of the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        for way in ("in_place", "by_data", "replaced"):
            self.register_buffer(way, torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.in_place += 1
        self.by_data.data = self.by_data.data + 1
        self.replaced = self.replaced + 1
        scores: Tensor = self.inner(inputs)
        return scores


class Singular(nn.Module):
    """Has an operation that torchax does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(inputs)
        return scores + torch.special.airy_ai(scores.detach())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(inputs)
        if scores.mean() > 0:
            scores = scores * 2
        return scores


def asks_for_an_item(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    return loss * loss.item()


def branches(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    return loss if loss > 1 else loss * 2


def mixed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) * random.random()


def drawn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs + torch.rand(5), targets)


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.detach(), targets)


def one_for_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class ThreeValues(ddp.Task):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).sum(), 1, 2


def line_of(words: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(words))


NO_VALUE = "model and loss ask for a value ({}, line {}: {}), and a compiled step has none: leave item(), int() an"
ITEM, IF, IN_MODEL = "return loss * loss.item()", "return loss if loss > 1 else loss * 2", "if scores.mean() > 0:"
CASES: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "a hook on a layer": (with_a_hook_on_a_layer, F.cross_entropy, "1 (Linear) has a hook, which a compiled step wo"),
    "a hook on a parameter": (with_a_hook_on_a_parameter, F.cross_entropy, "1.weight has a hook, which a compiled"),
    "a hook on a gradient": (with_a_hook_after_accumulation, F.cross_entropy, "3.bias has a hook, which a compiled st"),
    "item": (mlp, asks_for_an_item, NO_VALUE.format(FILE, line_of(ITEM), ITEM)),
    "if": (mlp, branches, NO_VALUE.format(FILE, line_of(IF), IF)),
    "if in the model": (Branches, F.cross_entropy, NO_VALUE.format(FILE, line_of(IN_MODEL), IN_MODEL)),
    "an unknown operation": (Singular, F.cross_entropy, "airy_ai"),
    "statistics": (Tracks, F.cross_entropy, "the buffer norm.running_mean differs by 1e+00 from what torch"),
    "statistics beside dropout": (lambda: Drops(Tracks()), F.cross_entropy, "inner.norm.running_mean differs by 1e+00"),
    "no gradient in training": (lambda: Drops(Targets()), F.cross_entropy, "the gradient of inner.inner.1.weight dif"),
    "a number of Python's": (mlp, mixed, "draws random numbers on the host, which would be the same in each"),
    "a number of torch's": (mlp, drawn, "draws random numbers on the host, which would be the same in each"),
    "noise in training": (lambda: Drops(Noises()), F.cross_entropy, "draws random numbers on the host, which would be"),
    "a complex parameter": (Turns, F.cross_entropy, "phases is complex, and a compiled step adds up real numbers: tak"),
    "torch.compile": (lambda: torch.compile(mlp(), backend="eager"), F.cross_entropy, "(OptimizedModule) is compiled"),
    "a loss without the model": (mlp, detached, "depends on no parameter that is trained"),
    "a loss for each sample": (mlp, one_for_each, "one_for_each returned a tensor [5] of float32, not a tensor of on"),
    "three values": (mlp, ThreeValues(), "returned 3 values: return two"),
}


def said(name: str) -> tuple[str, str]:
    """Returns the type and the text of what a fit raises."""
    make, loss, _ = CASES[name]
    module = make()
    before = [each.clone() for each in module.state_dict().values()]
    data = samples("mlp", torch.float32)
    try:
        fitted(module, data, torch.optim.SGD(module.parameters(), lr=0.1), loss=loss, max_steps=1, devices=2)
    except Exception as error:
        assert all(map(torch.equal, before, module.state_dict().values()))
        return type(error).__name__, str(error)
    return "", ""


@needs_jax
@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_compiled_is_one_sentence(name: str) -> None:
    kind, text = jaxed(said, name)
    assert CASES[name][2].replace("…", "") in text, text
    assert kind == "ConfigError" and "\n" not in text


def of_ten() -> str:
    return of_devices(devices=10)


def of_devices(**how: Any) -> str:
    module = mlp()
    try:
        fitted(module, samples("mlp"), torch.optim.SGD(module.parameters(), lr=0.1), max_steps=1, **how)
    except ConfigError as error:
        return str(error)
    return ""


@needs_jax
def test_more_workers_than_devices() -> None:
    words = "a worker of strategy=tpu is a device, and JAX finds 8 devices (cpu): take at most 8"
    assert jaxed(of_ten) == f"cluster.workers=10: {words}"


def annealed() -> str:
    """Returns what a fit raises whose loss reads a number that a callback changes."""
    rate = [1.0]

    class Anneals(ddp.Callback):
        def step_start(self, state: Any) -> None:
            rate[0] = 2.0**state.step

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) * rate[0]

    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    try:
        how = {"loss": loss, "max_steps": 2, "devices": 2, "callbacks": [Anneals()]}
        fitted(module, samples("mlp", torch.float32), optimizer, **how)
    except ConfigError as error:
        return str(error)
    return ""


@needs_jax
def test_a_number_that_changes_after_it_was_compiled_is_found() -> None:
    assert "the loss differs by 5e-01 from what torch computes on the host in step 2" in jaxed(annealed)


# --- what works ------------------------------------------------------------------------------------------------------


def counted() -> list[float]:
    module = Counts()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fitted(module, samples("mlp", torch.float32), optimizer, max_steps=2, devices=2)
    return [float(each) for each in module.buffers()]


@needs_jax
def test_a_buffer_may_be_changed_in_each_way() -> None:
    assert jaxed(counted) == [2, 2, 2]


class Noisy(nn.Module):
    """Has a bias before a BatchNorm, whose gradient is rounding errors alone, and draws noise in each mode."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.scale = nn.Linear(64, 7), nn.BatchNorm1d(7), nn.Linear(7, 5), scale

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs.flatten(1)))
        noise = torch.randn_like(hidden) * self.scale if self.scale else 0
        scores: Tensor = self.last(hidden + noise)
        return scores


def noisy(scale: float) -> float:
    module = Noisy(scale)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return float(fitted(module, samples("mlp", torch.float32), optimizer, max_steps=4, devices=2).train_loss)


@needs_jax
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_noise_is_no_difference(scale: float) -> None:
    assert jaxed(noisy, scale) > 0


class Doubles(nn.Module):
    """Changes its inputs; keeps how exactly it multiplies; and has a layer for training alone, beside dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other, self.modes = Drops(mlp()), mlp(), set[str | None]()

    def forward(self, inputs: Tensor) -> Tensor:
        import jax

        if isinstance(inputs, jax.Array) or type(inputs) is not Tensor:
            self.modes.add(jax.config.jax_default_matmul_precision)
        inputs.mul_(2)
        scores: Tensor = self.inner(inputs)
        return scores + self.other(inputs) if self.training else scores


def doubled() -> tuple[set[str | None], bool]:
    """Returns in which precisions a step multiplies, and whether the layer has been trained."""
    module = Doubles()
    before = module.other[1].weight.clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fitted(module, samples("mlp", torch.float32), optimizer, max_steps=2, devices=2)
    return module.modes, not torch.equal(module.other[1].weight, before)


@needs_jax
def test_a_layer_for_training_alone_is_trained_beside_dropout_and_inputs_may_change() -> None:
    assert jaxed(doubled) == ({"highest"}, True)


def draws_without_dropout() -> bool:
    from ddp.replica.compiled import WithoutDropout

    attention, rows = nn.MultiheadAttention(4, 2, dropout=0.5), torch.ones(3, 2, 4)
    before = torch.get_rng_state()
    with WithoutDropout():
        attention(rows, rows, rows), attention(rows, rows, rows, need_weights=False)
        F.scaled_dot_product_attention(rows, rows, rows, None, 0.5)
        for layer in (nn.Dropout(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Dropout1d()):
            layer(rows)
        torch.dropout(rows, 0.5, True)
    return not torch.equal(torch.get_rng_state(), before)


@needs_jax
def test_dropout_can_be_left_out() -> None:
    assert not jaxed(draws_without_dropout)


def scaled(factor: float, outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) * factor


def second_loss() -> list[float]:
    """Returns the losses of two fits of one replica, the second of which has another loss; parameters stay."""
    from ddp.strategies.strategy import Compiled

    module, found = mlp(), list[float]()
    replica = Compiled.replica_of(module, num_devices=2)
    for factor in (1, 100):
        data, optimizer = samples("mlp", torch.float32), torch.optim.SGD(module.parameters(), lr=0.0)
        loss = partial(scaled, factor)
        found.append(fitted(replica, data, optimizer, max_steps=3, global_batch=NUM_SAMPLES, loss=loss).train_loss)
    return found


@needs_jax
def test_a_second_fit_of_a_replica_has_its_own_loss() -> None:
    first, second = jaxed(second_loss)
    assert second == pytest.approx(100 * first, rel=1e-5)


class Masked(nn.Module):
    """Has a buffer of infinities, and an extra layer of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(inputs)
        return scores + torch.softmax(scores[:, None] + self.mask, -1).sum(1)


def masked(bad: bool) -> tuple[str, float]:
    """Returns the error, and the loss, where the first share has no sample that counts, or one that is not finite."""
    module, (inputs, targets) = Masked(), samples("mlp", torch.float32)
    (plan, *_) = ddp.TrainSampler(len(inputs), global_batch=10, rank=0, world_size=1, seed=5, num_shards=2).plans()
    first = list(plan.micros[0].indices)
    if bad:
        inputs[first[0]] = torch.nan
    targets[first] = -100
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss()
    try:
        return "", fitted(module, (inputs, targets), optimizer, loss=loss, max_steps=1, devices=2).train_loss
    except ConfigError as error:
        return str(error), 0.0
    except ddp.errors.Diverged:
        return "diverged", 0.0


@needs_jax
@pytest.mark.parametrize("bad", [False, True])
def test_shares_without_a_sample_that_counts_and_bad_ones_are_no_difference(bad: bool) -> None:
    text, loss = jaxed(masked, bad)
    assert (text, loss > 0) == (("diverged", False) if bad else ("", True))


class Pair:
    """A batch that can be compared with others, and so has no hash."""

    def __init__(self, pairs: Any) -> None:
        self.inputs, self.targets = map(torch.stack, zip(*pairs, strict=True))

    def __eq__(self, other: object) -> bool:
        return self is other


class OfPairs(ddp.Task):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum"), len(batch.targets)


def of_pairs() -> str:
    module, data = mlp(), samples("mlp", torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    try:
        fitted(module, data, optimizer, loss=OfPairs(), collate=Pair, max_steps=1, devices=2)
    except ConfigError as error:
        return str(error)
    return ""


@needs_jax
def test_a_batch_of_another_class_is_one_sentence() -> None:
    assert jaxed(of_pairs).startswith("a batch has a Pair, which a compiled step cannot take: make it tensors in")


class Uneven(nn.Module):
    """Asks for a value where it gets three samples, which are not the first share."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(inputs)
        return scores * float(scores.sum()) if len(inputs) == 3 else scores


def uneven() -> str:
    module, data = Uneven(), samples("mlp", torch.float32)
    try:
        fitted(module, data, torch.optim.SGD(module.parameters(), lr=0.1), max_steps=1, devices=2, global_batch=5)
    except ConfigError as error:
        return str(error)
    return ""


@needs_jax
def test_a_later_share_that_cannot_be_computed_is_one_sentence() -> None:
    assert jaxed(uneven).startswith("model and loss ask for a value (")


class Views(nn.Module):
    """Computes with parts of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        scores, rows = self.inner(inputs), inputs.flatten(1)
        larger = F.interpolate(scores[:, None], scale_factor=2.0)[:, 0]
        return torch.einsum("bi,bi->bi", scores * rows[:, :5] + rows[:, 5:10], larger[:, 3:8])


def viewed(kind: type[nn.Module], how: dict[str, Any]) -> Tensor:
    torch.manual_seed(3)
    module = kind().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fitted(module, samples("mlp"), optimizer, max_steps=2, callbacks=[watch := Watch()], **how)
    ddp.shutdown()
    return torch.stack(watch.seen)


@needs_jax
@pytest.mark.parametrize("kind", [Views, Reads])
def test_parts_of_tensors_may_meet_tensors(kind: type[nn.Module]) -> None:
    found, (expected,) = jaxed(viewed, kind, {"devices": 2}), run_ranks(viewed, 1, kind, {})
    assert error_of(found, expected) <= 1e-13


def weighed(how: dict[str, Any]) -> Tensor:
    """Returns the trajectory of a loss that weighs classes, and leaves one out."""
    module, optimizer = made("mlp", "sgd")
    weight = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=weight, ignore_index=3, label_smoothing=0.1)
    fitted(module, samples("mlp"), optimizer, loss=loss, max_steps=2, callbacks=[watch := Watch()], **how)
    ddp.shutdown()
    return torch.stack(watch.seen)


@needs_jax
def test_a_loss_may_have_weights_of_classes() -> None:
    found, (expected,) = jaxed(weighed, {"devices": 2}), run_ranks(weighed, 1, {})
    assert error_of(found, expected) <= 1e-13


def own_loss(how: dict[str, Any]) -> Tensor:
    """Returns the trajectory of a loss that holds a tensor by itself."""
    module, optimizer = made("mlp", "sgd")
    scale = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * scale, targets)

    fitted(module, samples("mlp"), optimizer, loss=loss, max_steps=2, callbacks=[watch := Watch()], **how)
    ddp.shutdown()
    return torch.stack(watch.seen)


@needs_jax
def test_a_loss_may_hold_a_tensor_of_its_own() -> None:
    found, (expected,) = jaxed(own_loss, {"devices": 2}), run_ranks(own_loss, 1, {})
    assert error_of(found, expected) <= 1e-13


def with_more_shares() -> str:
    return of_devices(devices=2, num_shards=4)


@needs_jax
def test_each_device_has_one_share() -> None:
    said = "num_shards=4: with strategy='tpu' each of 2 devices has one; leave it out"
    assert jaxed(with_more_shares) == said


# --- what needs no JAX -----------------------------------------------------------------------------------------------


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jax", "torchax"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ddp.replica.compiled", raising=False)
    module = mlp()
    with pytest.raises(ConfigError, match=r"^strategy=tpu needs JAX and torchax \(.*\): pip install '\.\[tpu\]'$"):
        fitted(module, samples("mlp"), torch.optim.SGD(module.parameters(), lr=0.1), max_steps=1, strategy="tpu")


def refused(word: str) -> str:
    module = mlp()
    try:
        fitted(module, samples("mlp"), torch.optim.SGD(module.parameters(), lr=0.1), max_steps=1, strategy=word)
    except ConfigError as error:
        ddp.shutdown()
        return str(error)
    return ""


def test_several_ranks_are_refused() -> None:
    words = "strategy=tpu: one process has all devices, and there are 2; start one"
    assert run_ranks(refused, 2, "tpu") == [words, words]


def bf16_by_hand() -> str:
    module = mlp()
    try:
        fitted(
            *(module, samples("mlp", torch.float32), torch.optim.SGD(module.parameters(), lr=0.1)),
            precision="bf16",
            max_steps=1,
            devices=2,
        )
    except ConfigError as error:
        return str(error)
    return ""


@needs_jax
def test_a_replica_made_by_hand_is_refused_what_the_word_is() -> None:
    assert jaxed(bf16_by_hand).startswith("strategy='tpu': a compiled step computes in the types of its parame")


def test_the_command_line_says_so_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^strategy=tpu needs JAX and torchax: pip install '\.\[tpu\]'$"):
        checks.check_strategy(from_plain({"strategy": {"name": "tpu"}}))


def test_a_run_of_more_workers_goes_on_with_a_share_for_each_device() -> None:
    config = from_plain({"strategy": {"name": "tpu"}, "cluster": {"workers": 2}})
    checks.resolve(config, num_shards=4)
    assert (config.batch.num_shards, config.device) == (2, "cpu")
