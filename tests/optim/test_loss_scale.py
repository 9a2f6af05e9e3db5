"""precision="fp16": the loss scale finds its size, repeats steps exactly, and changes nothing else.

Tests: ddp/optim/precision.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import Diverged
from ddp.gradients import ErrorFeedback, Sign
from ddp.optim import precision as precision
from ddp.replica.broadcast import tensor_hash
from ddp.replica.naive import NaiveDataParallel

X = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))


class RootOfNothing(nn.Module):
    """Has a finite loss, and a gradient that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight.abs().sqrt()


def made(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(12, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Dropout(dropout), nn.Linear(100, 100), nn.Linear(100, 3)
    )


def fitted(precision: Any = "fp16", *, model: nn.Module | None = None, **how: Any) -> tuple[Any, Tensor, list[str]]:
    """The state, the parameters in one vector, and hashes of parameters and buffers."""
    model = model or made()
    module = model.module if isinstance(model, NaiveDataParallel) else model
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    settings: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 8, "max_steps": 7, "seed": 3, "micro_size": 3}
    settings |= {"folder": None, "progress": False, "precision": precision, "noise_scale_every": 2, **how}
    state = ddp.fit(model, (X, CLASSES), optimizer, **grouped(**settings))
    state.model.verify_replicas()
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    return state, vector, [tensor_hash(each) for each in module.state_dict().values()]


class Counts(nn.Module):
    """Changes its input in place, counts its forwards in a buffer that it makes anew, and notes what it has seen."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", None)
        self.layer, self.seen = nn.Linear(12, 3), list[float]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        self.seen.append(float(inputs.sub_(0.5).sum()))
        outputs: Tensor = self.layer(inputs)
        return outputs


def repeated_exactly() -> None:
    """A step that is repeated begins from the same batch and the same buffers."""
    model = Counts()
    state, _, _ = fitted(model=model, micro_size=None, noise_scale_every=0)
    assert len(model.seen) > 7  # some steps were repeated
    assert int(model.count) == state.step == 7
    plain = Counts()
    fitted("fp32", model=plain, micro_size=None, noise_scale_every=0)
    assert list(dict.fromkeys(model.seen)) == plain.seen


def near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= 0.05 * other.norm())


def everything(folder: str) -> None:
    ddp.init(abort_s=30, shared_memory=False, algorithm="ring")  # without trials of the others
    state, plain, _ = fitted("fp32", model=made(0.0))
    assert state.strategy.loss_scale is None

    precision.FIRST = precision.LARGEST = 1 << 40
    assert near(fitted(model=made(0.0))[1], plain)
    repeated_exactly()
    state, vector, repeated = fitted()
    scale = state.strategy.loss_scale.value
    assert 1 < scale < precision.FIRST
    assert (state.step, state.model.num_steps) == (7, 7)
    precision.FIRST = scale
    assert fitted()[2] == repeated  # as if the scale had been right from the start: batches, noise, buffers, count
    assert fitted(strategy="sharded")[2] == repeated
    naive = fitted(model=NaiveDataParallel(made()))[1]
    assert near(naive, vector)

    precision.GROW_AFTER = 2  # grows, is too large, shrinks: with what a hook has kept, too
    state, grown, _ = fitted()
    assert near(grown, vector)
    precision.FIRST = scale >> 5
    state, hooked, _ = fitted(hook=ErrorFeedback(Sign()))
    assert state.strategy.loss_scale.value == scale >> 2
    precision.GROW_AFTER = 2000
    assert near(hooked, fitted(hook=ErrorFeedback(Sign()))[1])

    precision.GROW_AFTER = 3  # in two parts, the scale goes on where it was
    how: dict[str, Any] = {"resume": "auto", "curves": False, "num_shards": 2}
    whole, _, bits = fitted(folder=f"{folder}/whole", **how)
    fitted(folder=f"{folder}/parts", **how, max_steps=4)
    parts, _, same = fitted(folder=f"{folder}/parts", **how)
    assert bits == same
    for state in (whole, parts):
        assert state.strategy.loss_scale.state_dict() == {"value": scale >> 3, "num_good": 1}

    with pytest.raises(Diverged, match=r"gradient of step 1 is not finite, even with a loss scale of 1; param"):
        fitted(model=RootOfNothing())
    with pytest.raises(Diverged, match=r"the loss of step 1 is nan"):
        fitted(loss=lambda scores, classes: F.cross_entropy(scores, classes) * torch.nan)
    ddp.shutdown()


@pytest.mark.slow
def test_the_scale_finds_its_size_and_changes_nothing_else(tmp_path: Path) -> None:
    run_ranks(everything, 2, str(tmp_path))
