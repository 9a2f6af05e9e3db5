"""Whole runs on devices of JAX: programs, checkpoints, stops, averages, readers, and batches of many kinds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from computed import NUM_SAMPLES, Watch, error_of, fitted, flat, made, samples
from jaxed import jaxed, needs_jax
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError, Diverged, UnusedParameters

pytestmark = needs_jax

ROOT = Path(__file__).parents[2]
BOUND = 1e-13

# --- programs --------------------------------------------------------------------------------------------------------


class Warnings:
    """Keeps what the library warns of."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, text: str, *values: object) -> None:
        self.said.append(text % values)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def programs_of_digits() -> int:
    """Returns the number of programs in an epoch of the digits recipe, whose last batch is smaller."""
    from ddp.data.sets.image_sets import load_digits
    from ddp.models import CNN

    module = CNN(in_channels=1, image_size=8, num_classes=10, width=2)
    data = load_digits().train
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.002)
    how: dict[str, Any] = {"global_batch": 256, "epochs": 1, "devices": 2}
    state = fitted(module, data, optimizer, **how)
    assert len(data) % 256 and state.step == 6
    return len(state.model._programs)


def test_a_run_of_the_digits_recipe_has_two_programs() -> None:
    assert jaxed(programs_of_digits) == 2


def growing_batches() -> tuple[list[str], Tensor, Tensor]:
    """Returns the warnings of a run with batches of three sizes, where one is many; and trajectories, also torch's."""
    from ddp.replica import compiled

    said, found = Warnings(), list[Tensor]()
    ways: tuple[dict[str, Any], ...] = {"devices": 3}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "MANY_PROGRAMS", 1)
        patch.setattr(compiled, "log", said)
        for how in ways:
            module, optimizer = made("mlp", "sgd")
            how |= {"global_batch": ddp.BatchWarmup(3, 9, 20), "epochs": 1, "callbacks": [watch := Watch()]}
            fitted(module, samples("mlp"), optimizer, **how)
            found.append(torch.stack(watch.seen))
    return said.said, *found


def test_more_programs_than_a_few_are_told_once_and_batches_may_grow() -> None:
    said, found, expected = jaxed(growing_batches)
    assert len(said) == 1 and said[0].startswith("more than 1 programs have been compiled")
    assert error_of(found, expected) <= BOUND


# --- checkpoints -----------------------------------------------------------------------------------------------------


class Loaded(ddp.Callback):
    """Compares what a run begins with and what torch alone reads of its newest checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.is_same = folder, False

    def fit_start(self, state: ddp.TrainState) -> None:
        files = sorted(self._folder.rglob("model.pt"), key=lambda file: int(file.parent.name.split("-")[-1]))
        weights, held = (torch.load(files[-1].with_name(f"{name}.pt")) for name in ("model", "optimizer"))
        here = state.model.module.state_dict()
        same = [torch.equal(here[name], value) for name, value in weights.items()]
        for number, values in held["state"].items():
            mine = state.optimizer.state_dict()["state"][number]
            same += [torch.equal(mine[name], value) for name, value in values.items()]
        self.is_same = len(same) > 20 and all(same)


def goes_on(folder: str, word: str, num_steps: int) -> tuple[bool, Tensor]:
    """Goes on to a step, on two devices or as ranks; returns whether it has the bits of the file first, and its end."""
    module, optimizer = made("norms", "adamw")
    callbacks: list[Any] = [watch := Watch()]
    if Path(folder).exists() and word in ("mirrored", "tpu"):  # where a rank has all
        callbacks.append(Loaded(Path(folder)))
    how: dict[str, Any] = {"devices": 2} if word == "tpu" else {"strategy": word}
    how |= {"folder": Path(folder), "resume": "auto", "curves": False, "max_steps": num_steps}
    fitted(module, samples("norms"), optimizer, callbacks=callbacks, **how)
    ddp.shutdown()
    return all(each.is_same for each in callbacks[1:]), watch.seen[-1]


@pytest.mark.parametrize("word", ["mirrored", "sharded", "fully_sharded", "central_storage"])
@pytest.mark.quick(1)
def test_a_strategy_becomes_tpu_and_then_itself_again(word: str, tmp_path: Path) -> None:
    alone, run = str(tmp_path / "alone"), str(tmp_path / "run")
    expected = run_ranks(goes_on, 2, alone, "mirrored", 7)[0][1]
    run_ranks(goes_on, 2, run, word, 2)
    loaded_there, _ = jaxed(goes_on, run, "tpu", 5)
    loaded_back, found = run_ranks(goes_on, 2, run, word, 7)[0]
    assert loaded_there and loaded_back
    assert error_of(found[None], expected[None]) <= BOUND


# --- steps that are not made -----------------------------------------------------------------------------------------


class Before(ddp.Callback):
    """Keeps all there is before each step."""

    def step_start(self, state: ddp.TrainState) -> None:
        self.seen = everything(state)


def everything(state: ddp.TrainState) -> list[Tensor]:
    held = [value for each in state.optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in (*state.model.module.state_dict().values(), *held)]


def diverges() -> tuple[str, bool]:
    """Returns what is said of a loss that is not finite, and whether all is as before that step."""
    module, optimizer = made("norms", "adamw")
    inputs, targets = samples("norms")
    sampler = ddp.TrainSampler(NUM_SAMPLES, global_batch=13, rank=0, world_size=1, seed=5)
    _, last = sampler.plans()
    inputs[last.micros[0].indices[-1]] = float("nan")
    before = Before()
    held: list[ddp.TrainState] = []

    class Keeps(ddp.Callback):
        def fit_start(self, state: ddp.TrainState) -> None:
            held.append(state)

    try:
        fitted(module, (inputs, targets), optimizer, global_batch=13, epochs=1, devices=2, callbacks=[before, Keeps()])
    except Diverged as error:
        return str(error), all(map(torch.equal, before.seen, everything(held[0])))
    return "", False


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    said, is_same = jaxed(diverges)
    assert "step 2" in said and is_same


class Signals(ddp.Callback):
    """Sends this process a signal in its second step."""

    def step_end(self, state: ddp.TrainState, report: Any) -> None:
        if state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped(folder: str) -> tuple[str, int]:
    """Returns by what a run has been stopped, and after which step."""
    module, optimizer = made("mlp", "sgd")
    how: dict[str, Any] = {"max_steps": 9, "folder": Path(folder), "curves": False, "strategy": "tpu"}
    state = fitted(module, samples("mlp"), optimizer, callbacks=[Signals()], **how)
    return state.stopped_by, state.step


def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    (found,) = run_ranks(stopped, 1, str(tmp_path))
    assert found[0] == "SIGTERM" and found[1] < 9
    assert [int(file.parent.name.split("-")[-1]) for file in tmp_path.rglob("model.pt")] == [found[1]]


@pytest.mark.slow
@pytest.mark.engine
def test_sigterm_ends_a_run_of_the_command_line_with_a_checkpoint(tmp_path: Path) -> None:
    words = ["train", "strategy=tpu", "cluster.workers=2", "model.width=2", "run.name=mine", "epochs=1000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ddp", *words], cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True
    )
    run = tmp_path / "runs" / "mine"
    try:
        deadline_s = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() and process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, err
    assert "stopped by SIGTERM; continue with" in err
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "SIGTERM"
    assert list(run.rglob("model.pt"))
    assert "2 devices of JAX (cpu), because it finds no TPU" in out + err


# --- models ----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Has a frozen layer, tied weights, a scalar, and a weight that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 12).requires_grad_(False)
        self.one, self.norm, self.two = nn.Linear(12, 9), nn.LayerNorm(9), nn.Linear(9, 12, bias=False)
        self.tied = nn.Linear(12, 9)
        self.tied.weight = self.one.weight
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.ignored = nn.Parameter(torch.full((12,), 1.1))
        self.last = nn.Linear(9, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.frozen(images.flatten(1)))
        hidden = self.two(self.norm(torch.tanh(self.one(hidden)))) * self.scale
        scores: Tensor = self.last(torch.tanh(self.tied(hidden)))
        return scores


def odd(**how: Any) -> tuple[Tensor, Tensor]:
    """Returns weights, and their averages, of a model that has what models have now and then."""
    torch.manual_seed(4)
    module, ema = Odd().double(), ddp.EMA(0.5)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    strategy = ddp.Averaging(find_unused_parameters=True, **how)
    fitted(module, samples("odd"), optimizer, max_steps=2, clip_norm=0.3, callbacks=[ema], strategy=strategy)
    assert module.tied.weight is module.one.weight
    assert not any(state for parameter, state in optimizer.state.items() if parameter is module.ignored)
    assert ema.averaged is not None
    return flat(module), flat(ema.averaged.module)


def odd_on_devices() -> Sequence[Tensor]:
    return odd(strategy="tpu")


def odd_alone() -> Sequence[Tensor]:
    found = odd()
    ddp.shutdown()
    return found


def test_tied_frozen_and_unused_parameters_and_averages_are_those_of_one_process() -> None:
    found, (expected,) = jaxed(odd_on_devices), run_ranks(odd_alone, 1)
    assert error_of(torch.stack(list(found)), torch.stack(list(expected))) <= BOUND


def unused() -> str:
    module = Odd().double()
    try:
        fitted(module, samples("odd"), torch.optim.SGD(module.parameters(), lr=0.1), max_steps=1, strategy="tpu")
    except UnusedParameters as error:
        return str(error)
    return ""


def test_parameters_that_get_no_gradient_are_named() -> None:
    assert jaxed(unused).startswith("no gradient for ignored: ")


# --- data ------------------------------------------------------------------------------------------------------------


class Pairs(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples, some of which cannot be read."""

    def __init__(self, damaged: Sequence[int] = ()) -> None:
        self._inputs, self._targets = samples("mlp")
        self._damaged = set(damaged)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self._damaged:
            raise OSError(f"sample {index} is damaged")
        return self._inputs[index], self._targets[index]


def with_readers(num_workers: int, damaged: Sequence[int], how: dict[str, Any]) -> Tensor:
    """Returns the trajectory of a run with loader processes, or with samples that cannot be read."""
    module, optimizer = made("mlp", "sgd")
    how = {"epochs": 1, "num_workers": num_workers, "max_unreadable": len(damaged), **how}
    fitted(module, Pairs(damaged), optimizer, callbacks=[watch := Watch()], **how)
    ddp.shutdown()
    return torch.stack(watch.seen)


def test_loader_processes_and_samples_that_cannot_be_read() -> None:
    sampler = ddp.TrainSampler(NUM_SAMPLES, global_batch=4, rank=0, world_size=1, seed=5)
    first, second, *_ = sampler.plans()
    lost = [*first.micros[0].indices[2:], *second.micros[0].indices]  # a device's share, and a whole step
    found = jaxed(with_readers, 2, lost, {"devices": 2, "global_batch": 4})
    (expected,) = run_ranks(with_readers, 1, 0, lost, {"global_batch": 4})
    assert error_of(found, expected) <= BOUND
    assert torch.equal(found[0], found[1])


LENGTHS = [3, 3, 6, 3, 6, 6, 3, 6, 3, 6, 3, 6]


class Texts(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Texts of unequal lengths."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        text = samples("gpt")[0][index][: LENGTHS[index]]
        return text, text.roll(-1)


def padded(texts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*texts, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(inputs, batch_first=True), pad(targets, batch_first=True, padding_value=-100)


def by_tokens(how: dict[str, Any]) -> Tensor:
    """Returns the trajectory of a run with a budget of tokens, in which devices have shares of unequal lengths."""
    module, optimizer = made("gpt", "sgd")
    budget = ddp.data.TokenBudget(24, LENGTHS)
    how = {"epochs": 1, "global_batch": budget, "loss": ddp.LanguageModel(), "collate": padded, **how}
    fitted(module, Texts(), optimizer, callbacks=[watch := Watch()], **how)
    ddp.shutdown()
    return torch.stack(watch.seen)


def test_a_budget_of_tokens() -> None:
    found, (expected,) = jaxed(by_tokens, {"devices": 2}), run_ranks(by_tokens, 1, {})
    assert error_of(found, expected) <= BOUND


# --- a word of guides ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["xla", "TPUStrategy"])
def test_words_of_others_name_the_word(word: str) -> None:
    with pytest.raises(ConfigError, match="strategy=tpu"):
        ddp.Averaging(strategy=word)  # type: ignore[arg-type]
