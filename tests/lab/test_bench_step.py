"""Tests the benchmark of training steps: what its models are, and its shortest run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

from ddp.errors import ConfigError
from ddp.lab.bench.step import VARIANTS, StepCell, TimeSteps, make
from ddp.lab.bench.workloads import WORKLOADS, TinyLayers, loss_of, try_own

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


# ---------------------------------------------------------------------------------------------------------------- runs


def steps() -> list[StepCell]:
    return TimeSteps("digits-cnn", tuple(VARIANTS), num_turns=1)()


def test_the_shortest_run_has_every_figure_and_the_same_on_all_ranks() -> None:
    (cell,), same = run_ranks(steps, 2)
    assert [cell] == same
    assert cell.turns_s.keys() == VARIANTS.keys()
    assert all(len(turns) == 1 and turns[0] > 0 for turns in cell.turns_s.values())
    assert (cell.name, cell.num_parameters) == ("digits-cnn", 8)
    assert cell.place.startswith("2 ranks on one host")
    assert cell.wait_s is not None and cell.wait_s > 0
