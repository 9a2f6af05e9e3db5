"""Tests the benchmark of training steps: its models, its variants, its figures, and its shortest run.

Tests: ddp/lab/bench/step.py, ddp/lab/bench/variants.py, ddp/lab/bench/workloads.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from ddp.__main__ import main
from ddp.errors import ConfigError
from ddp.lab.bench.command import from_json, to_json
from ddp.lab.bench.step import MIB, MeasureMemory, StepCell, TimeSteps, merged
from ddp.lab.bench.turns import session, with_ours
from ddp.lab.bench.variants import OPTIMIZERS, VARIANTS, Training
from ddp.lab.bench.workloads import WORKLOADS, TinyLayers, loss_of, make, try_own
from ddp.optim.norms import BLOCK_NUMEL

# ----------------------------------------------------------------------------------------------------------- workloads


def test_models_have_as_many_parameters_as_their_names_say() -> None:
    with torch.device("meta"):
        sizes = {name: [p.numel() for p in workload.make().parameters()] for name, workload in WORKLOADS.items()}
    assert round(sum(sizes["mlp-25m"]) / 1e6) == 25
    assert round(sum(sizes["gpt-10m"]) / 1e6) in (10, 11)
    assert sizes["gpt-10m"] == sizes["gpt-10m-b1"]
    assert len(sizes["tiny-1000"]) == 1000
    stem, small_stem = sizes["resnet18-32px"][0], sizes["resnet18-small-stem"][0]
    assert (stem, small_stem) == (64 * 3 * 7 * 7, 64 * 3 * 3 * 3)


def test_the_deep_model_of_tiny_layers_has_gradients_everywhere() -> None:
    model, x = TinyLayers(500), torch.randn(8, 4)
    model(x).square().sum().backward()
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert len(norms) == 1000
    assert norms.isfinite().all()
    assert norms.min() > 0


OWN = """
import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def example_batch(self):
        return torch.ones(4, 3), torch.zeros(4, dtype=torch.long)


class Bare(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)


class One(Net):
    def example_batch(self):
        return torch.ones(4, 3)


class Raising(Net):
    def example_batch(self):
        return self.missing


class Narrow(Net):
    def example_batch(self):
        return torch.ones(4, 2), torch.zeros(4)


class Pair(Net):
    def forward(self, x):
        return x, x


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
"""


def test_a_model_of_ones_own_is_timed_or_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's command runs one on two ranks (`tests/test_readme.py`)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models.py").write_text(OWN)
    try_own("own_models:Net")
    (module, batch), (other, _) = (make("own_models:Net", rank=rank) for rank in (0, 1))
    assert torch.equal(module.weight, other.weight) and batch[0].shape == (4, 3)
    assert torch.equal(loss_of(module(batch[0]), batch[1]), nn.functional.cross_entropy(module(batch[0]), batch[1]))
    assert loss_of(torch.ones(2, 3), torch.zeros(2, 3)) == 1, "the mean square where targets are numbers"
    for name, said in {
        "Nat": "has no Nat. Did you mean own_models:Net?",
        "OrderedDict": "has no OrderedDict",
        "torch": "is <module 'torch'",
        "Bare": r"has no example_batch\(\); give it a method that returns one worker's \(inputs, targets\)",
        "One": r"example_batch\(\) returned tensor",
        "Raising": "example_batch.. failed: .*own_models.py, line 25: AttributeError",
        "Narrow": "a step on its example_batch.. failed: RuntimeError: .*mat1 and mat2",
        "Pair": "the model returned an object of type tuple; return a tensor",
        "Frozen": "give it a parameter that needs a gradient",
    }.items():
        with pytest.raises(ConfigError, match=f"^--models=own_models:{name}: .*{said}"):
            try_own(f"own_models:{name}")


# ------------------------------------------------------------------------------------------------------------- figures


def cell_of(**figures: Any) -> StepCell:
    fields = {"place": "here", "name": "job", "turns_s": {}, "num_parameters": 10, "gradient_bytes": 2 * MIB}
    return StepCell(**fields | {"wire_s": None} | figures)


def test_figures_of_a_model_are_put_together_and_compared() -> None:
    """`sharded` takes 1.5 × alone in the median of three turns, and torch's class twice as long as that."""
    turns_s = {"sharded": [0.15, 0.3, 0.12], "torch": [0.3, 0.3, 0.36], "alone": [0.1, 0.2, 0.1]}
    held, sent, over = {"sharded": 3 * MIB}, {"torch": 1234.5}, ["sharded"]
    timed = cell_of(turns_s=turns_s, held=held, sent=sent, over=over, wait_s={"sharded": 0.01, "torch": 0.0})
    peaks = [
        cell_of(peak={name: n * MIB}, worker={name: (n - 1) * MIB}) for name, n in (("sharded", 6), ("mirrored", 8))
    ]
    other = cell_of(place="there", peak={"alone": MIB})
    cell, apart = merged([timed, *peaks, other])
    assert apart == other
    assert (cell.turns_s, cell.peak) == (turns_s, {"sharded": 6 * MIB, "mirrored": 8 * MIB})
    assert from_json(to_json([cell]), StepCell) == [cell]
    sharded, torch_s, alone, mirrored = cell.rows()
    assert all(cell.meaning(title) for row in cell.rows() for title in row)
    assert (sharded["step"], sharded["÷ sharded"], sharded["over alone"]) == ("150", "", "+50.0%")
    assert (sharded["µs per parameter"], sharded["wait"], torch_s["wait"]) == ("5000", "10.0", "")
    assert (torch_s["÷ sharded"], torch_s["sent"]) == ("2.000 (1.00 – 3.00)", "1,234") and alone["over alone"] == ""
    assert (sharded["peak"], sharded["worker"], sharded["gradients"]) == ("6.0", "5.0", "2.50")
    assert (sharded["held"], sharded["sent"]) == ("3.0", "")
    assert (mirrored["variant"], mirrored["step"], mirrored["peak"]) == ("mirrored", "", "8.0")


def test_a_round_is_its_steps_and_the_one_that_ends_it() -> None:
    """Also where one step in six has been delayed by something else."""
    training = Training.__new__(Training)
    assert training.of_turn([3.0, 1.0, 2.0]) == 2.0
    training.every = 3
    assert training.of_turn([1.0, 1.0, 4.0, 1.0, 9.0, 4.0]) == 2.0


# ---------------------------------------------------------------------------------------------------------------- runs

WITH_SHARDS = ("same_bits", "accumulated", "torch_accumulated")


def trained() -> dict[str, list[Tensor]]:
    """Returns the parameters after three steps of the variants that find the same mean."""
    with session(with_ours) as comm:
        module, batch = make("small-mlp", rank=comm.rank)
        found = {}
        for name in ("bucketed", *WITH_SHARDS):
            training = VARIANTS[name](copy.deepcopy(module), batch, OPTIMIZERS["sgd"])
            for group in training.optimizers[0].param_groups:
                group["lr"] = 0.1
            training.steps_s(3)
            found[name] = [p.detach().clone() for p in training.replica.parameters()]
            del training
        return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_train_as_one_forward_does(world_size: int) -> None:
    """On three workers shards have unequal sizes, so that one forward has another mean."""
    found = run_ranks(trained, world_size)
    for name in WITH_SHARDS if world_size == 3 else ("bucketed", *WITH_SHARDS):
        for of_rank in found:
            torch.testing.assert_close(of_rank[name], found[0]["same_bits"])


def everything() -> tuple[StepCell, StepCell]:
    timed = TimeSteps("digits-cnn", tuple(VARIANTS), "adamw", num_turns=1)()[0]
    return timed, MeasureMemory("digits-cnn", "sharded", "lamb")()[0]


ONCE = {"sharded", "torch_zero", "central_storage", "fully_sharded", "fully_shard"}
"""Variants that hold the optimizer's state once; the last three parameters, too."""


def test_every_variant_is_timed_and_counted_and_the_same_on_all_ranks() -> None:
    (timed, measured), same = run_ranks(everything, 2, timeout_s=200)
    assert (timed, measured) == same
    assert timed.turns_s.keys() == timed.held.keys() == VARIANTS.keys()
    assert all(len(turns) == 1 and turns[0] > 0 for turns in timed.turns_s.values())
    assert (timed.name, timed.num_parameters) == ("digits-cnn, adamw", 8)
    assert timed.place.startswith("2 ranks on one host")
    assert timed.wait_s["ours"] > 0 and timed.wait_s["torch"] == 0
    num_bytes = 4 * sum(p.numel() for p in WORKLOADS["digits-cnn"].make().parameters())
    whole, steps = 2 * 3 * num_bytes, 2 * 4 * 8  # AdamW's state, with a number of steps for each of eight tensors
    excess = {name: held - whole - steps for name, held in timed.held.items() if name not in ONCE}
    assert excess == dict.fromkeys(VARIANTS.keys() - ONCE, 0)
    assert abs(timed.held["sharded"] - 4 * num_bytes) <= 2 * 4 * BLOCK_NUMEL + 2 * steps
    for name in ("central_storage", "fully_sharded"):
        assert 0 <= timed.held[name] - 3 * num_bytes <= 2 * steps, "all parameters and all state, once"
    assert timed.held["fully_shard"] >= 3 * num_bytes
    assert timed.held["torch_zero"] == 4 * num_bytes + steps // 2
    assert measured.name == "digits-cnn, lamb" and measured.gradient_bytes == num_bytes
    assert measured.peak["sharded"] > 4 * num_bytes and measured.worker["sharded"] > 2 * num_bytes


def forked(job: Callable[[], Any], *, workers: int, threads_per_worker: int = 1) -> list[Any]:
    """Does what `ddp.launch` does, within a tenth of its time."""
    results: list[Any] = run_ranks(called, workers, job)
    return results


def called(job: Callable[[], Any]) -> Any:
    return job()


def test_the_shortest_run_reports_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, picture = tmp_path / "cells.json", tmp_path / "steps.png"
    monkeypatch.setattr("ddp.lab.bench.command.launch", forked)
    words = ["--models", "small-mlp", "--turns", "1", "--json", str(kept), "--plot", str(picture)]
    assert main(["bench", "step", *words, "--variants", "alone,same_bits", "--memory"]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks on one host" in printed and "same_bits" in printed and "÷ alone" in printed
    (cell,) = json.loads(kept.read_text())
    assert list(cell["turns_s"]) == list(cell["peak"]) == list(cell["held"]) == ["alone", "same_bits"]
    assert picture.read_bytes().startswith(b"\x89PNG")
