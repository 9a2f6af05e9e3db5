"""Tests the benchmark of training steps: how memory is counted, what its models are, and its shortest runs."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

from ddp.bench.hooks import METHODS, HookCell, TimeHooks
from ddp.bench.memory import MeasureMemory, MemoryCell
from ddp.bench.pss import sampling
from ddp.bench.step import VARIANTS, StepCell, TimeSteps, make
from ddp.bench.workloads import WORKLOADS, TinyLayers, loss_of, try_own
from ddp.comm.transport import topology
from ddp.errors import ConfigError

MIB = 1 << 20

# -------------------------------------------------------------------------------------------------------------- memory


def test_an_allocation_is_seen_also_after_its_end() -> None:
    with sampling(os.getpid()) as take:
        before = take()
        with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages[:: mmap.PAGESIZE] = b"\1" * (64 * MIB // mmap.PAGESIZE)
            seen = take() - before
        assert 60 * MIB <= seen <= 72 * MIB
        take()  # may begin with a sample from before the end
        assert take() - before <= 8 * MIB


NEIGHBOUR = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
    pages[:: mmap.PAGESIZE] = b"x" * (len(pages) // mmap.PAGESIZE)
    print("mapped", flush=True)
    sys.stdin.read()
"""


def test_a_shared_mapping_is_counted_in_part() -> None:
    with os.fdopen(os.memfd_create("shared"), "w+b") as file, sampling(os.getpid()) as take:
        file.truncate(64 * MIB)
        before = take()
        with mmap.mmap(file.fileno(), 0) as pages:
            pages[:: mmap.PAGESIZE] = b"\1" * (64 * MIB // mmap.PAGESIZE)
            assert 48 * MIB <= take() - before <= 72 * MIB  # the kernel may have taken some back
            command = [sys.executable, "-I", "-S", "-c", NEIGHBOUR, f"/proc/{os.getpid()}/fd/{file.fileno()}"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
                assert neighbour.stdout is not None
                assert neighbour.stdout.readline() == b"mapped\n"
                take()  # what came before the neighbour
                assert 20 * MIB <= take() - before <= 40 * MIB
                neighbour.communicate()


def test_who_cannot_be_looked_into_is_an_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError, match=f"/proc/{ended.pid}/smaps_rollup"), sampling(ended.pid):
        pass


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


SOME_METHODS = ("plain", "int8", "sign", "powersgd1", "torch_fp16", "torch_powersgd1")


def hooked() -> list[HookCell]:
    topology._boot_id = lambda: f"host of rank {os.environ['RANK']}"
    return TimeHooks("small-mlp", SOME_METHODS, num_turns=1)()


def test_methods_of_sending_less_are_timed() -> None:
    cells, same = run_ranks(hooked, 2, timeout_s=100)
    assert cells == same
    assert [cell.name for cell in cells] == list(SOME_METHODS)
    assert set(SOME_METHODS) <= METHODS.keys()
    for cell in cells:
        assert cell.place.startswith("2 ranks on 2 hosts")
        assert cell.ratio is not None and cell.ratio > 0 and cell.step_s[0] > 0
        assert cell.link_bytes is None  # the interface of this machine carries other things, too
        assert (cell.encoding_s is not None) == (cell.name in ("sign", "powersgd1"))


def memory_of(variant: str) -> list[MemoryCell]:
    return MeasureMemory("digits-cnn", variant)()


@pytest.mark.parametrize("variant", ["ours", "torch"])
def test_the_memory_of_a_variant_is_that_of_the_highest_rank(variant: str) -> None:
    (cell,), same = run_ranks(memory_of, 2, variant)
    assert [cell] == same
    assert (cell.name, cell.variant) == ("digits-cnn", variant)
    num_bytes = 4 * sum(p.numel() for p in WORKLOADS["digits-cnn"].make().parameters())
    assert cell.peak >= 3 * num_bytes  # parameters, gradients, momentum
