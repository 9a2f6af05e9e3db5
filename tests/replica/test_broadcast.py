"""Tensors that lie in one memory: found as NumPy finds them, trained as plain torch trains them, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError, ReplicaMismatch
from ddp.replica.broadcast import in_memory_of, move

X = torch.randn(48, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (48,), generator=torch.Generator().manual_seed(1))
HOW = {"tied": "b lies in the memory of a", "overlapping": "b lies in the memory of a", "buffer": "c lies in the memo"}


class Net(nn.Module):
    """Has two parameters, and a buffer, of which two lie in one memory; or the same values, none of which do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        flat = 0.5 * torch.randn(40, dtype=torch.float64)
        self.a = nn.Parameter(flat[:16].view(4, 4))
        start = {"tied": 0, "overlapping": 8}.get(how, 16)
        self.b = nn.Parameter(flat[start : start + 16].view(4, 4))
        self.register_buffer("c", self.a.data if how == "buffer" else flat[32:36])
        self.head = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.tanh(torch.tanh(x @ self.a.T) @ self.b.T) * self.c.flatten()[:4])
        return hidden


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def plain(how: str) -> dict[str, Tensor]:
    """Returns what plain torch trains."""
    net = Net(how)
    optimizer = adam(net)
    for step in range(6):
        part = slice(step % 3 * 16, step % 3 * 16 + 16)
        optimizer.zero_grad()
        F.cross_entropy(net(X[part]), Y[part]).backward()
        optimizer.step()
    return net.state_dict()


def fitted(how: str, **choice: Any) -> dict[str, Tensor] | str:
    """Returns what `ddp.fit` trains, or what it says."""
    net = Net(how)
    batches = ddp.Batches(order=ddp.data.Fixed(48))
    try:
        ddp.fit(net, (X, Y), adam(net), loss=F.cross_entropy, global_batch=16, max_steps=6, batches=batches,
                folder=ddp.Folder(None, progress=False), **choice)  # fmt: skip
    except ConfigError as error:
        return str(error)
    return net.state_dict()


CHOICES: dict[str, dict[str, Any]] = {  # by what a refusal begins with: how a run is told to train
    "mirrored": {},
    "averages": {"callbacks": [ddp.EMA(0.9)]},
    "same bits": {"same_bits": True},
    "Sharded": {"strategy": "sharded"},
    "CentralStorage": {"strategy": "central_storage"},
    "LocalSteps": {"strategy": ddp.LocalSGD(every=1)},
    "precision='bf16_pure'": {"precision": "bf16_pure"},
}


def on_a_rank() -> dict[tuple[str, str], dict[str, Tensor] | str]:
    ddp.init()
    found = {(name, how): fitted(how, **choice) for name, choice in CHOICES.items() for how in HOW}
    try:
        ddp.DistributedDataParallel(Net("tied" if ddp.init().rank else "none"))
    except ReplicaMismatch as error:
        found["one rank", "tied"] = str(error)
    return found


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[tuple[str, str], dict[str, Tensor] | str]]:
    return run_ranks(on_a_rank, 2)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.slow
def test_a_model_is_trained_as_by_torch_or_refused_by_name(on_ranks: list[dict[Any, Any]], name: str, how: str) -> None:
    right, parameters = plain(how), ("tied", "overlapping")
    keeps: dict[str, Any] = {"mirrored": HOW, "averages": parameters, "same bits": parameters}
    for found in on_ranks:
        trained = found[name, how]
        if how in keeps.get(name, ()):
            assert all((trained[key] - value).abs().max() < 1e-12 for key, value in right.items())
        else:
            told = {"averages": "EMA", "same bits": "num_shards"}.get(name, name)
            assert trained.startswith(f"{told}: {HOW[how]}") and "Register one nn.Parameter under both names" in trained


def test_ranks_tie_the_same_parameters(on_ranks: list[dict[Any, Any]]) -> None:
    for found in on_ranks:
        assert "b [4, 4] float64 on rank 0, b [4, 4] float64 in the memory of a on rank 1" in found["one rank", "tied"]


def test_a_model_that_moves_must_not_be_tied() -> None:
    here, there = torch.device("cpu"), torch.device("meta")
    for how, told in HOW.items():
        assert in_memory_of(move(Net(how), here).state_dict(keep_vars=True).items())
        with pytest.raises(ConfigError, match=f"a model that moves to meta: {told}"):
            move(Net(how), there)
    move(Net("none"), there)


def test_views_of_one_memory_share_it_where_numpy_says_so() -> None:
    draw = np.random.default_rng(0)
    memory = torch.arange(64.0)
    for _ in range(300):
        views = []
        for _ in range(4):
            dims = draw.integers(0, 4)
            shape, strides = draw.integers(1, 4, dims).tolist(), draw.integers(0, 7, dims).tolist()
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            views.append(memory.as_strided(shape, strides, int(draw.integers(0, 64 - last))))
        views[3] = views[3].view(torch.int32)
        arrays = [view.numpy() for view in views]
        first = {
            str(later): str(next(each for each in range(later) if np.shares_memory(arrays[each], arrays[later])))
            for later in range(4)
            if any(np.shares_memory(arrays[each], arrays[later]) for each in range(later))
        }
        assert in_memory_of([(str(number), view) for number, view in enumerate(views)]) == first


def test_what_lies_side_by_side_or_nowhere_is_not_tied() -> None:
    matrix, sparse = torch.zeros(6, 6), torch.eye(3).to_sparse()
    columns = [("left", matrix[:, :3]), ("right", matrix[:, 3:]), ("none", matrix[:0]), ("sparse", sparse)]
    assert not in_memory_of([*columns, ("left again", columns[0][1]), ("meta", torch.zeros(3, device="meta"))])
    assert not in_memory_of(nn.LSTM(3, 4).named_parameters())
    array = np.zeros(4)
    assert in_memory_of([("one", torch.from_numpy(array)), ("other", torch.from_numpy(array[3:]))]) == {"other": "one"}
