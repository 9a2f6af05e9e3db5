"""What cannot be compiled, or would be compiled into something else, is one sentence before the first step.

Tests: ddp/replica/compiled.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from computed import Watch, error_of, fitted, made, samples
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
    """Reads rows by an LSTM, which torchax cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.last(self.lstm(inputs.squeeze(1))[0][:, -1])
        return scores


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
    "an LSTM": (Reads, F.cross_entropy, "the step cannot be compiled (TracerArrayConversionError: The numpy"),
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
    module = mlp()
    try:
        fitted(module, samples("mlp"), torch.optim.SGD(module.parameters(), lr=0.1), max_steps=1, devices=10)
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
    words = "strategy=tpu: one process has all devices, and here are 2 ranks; start one"
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
