"""What the ranks are fed is checked: an epoch against its order's promise, first batches against each other."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import nn
from torch.utils.data import Dataset

import ddp
from ddp.data.orders.order import Order
from ddp.errors import ConfigError

INPUTS, TARGETS = torch.randn(47, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(47, dtype=torch.int64)


class Careless(Order):
    """Has a sample twice, and another one never."""

    num_samples = length = 47

    def samples(self, positions, *, seed, epoch):
        return np.where(positions == 5, 6, positions)


class Own(Careless):
    """Returns what it was given."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def samples(self, positions, *, seed, epoch):
        return self.returned(positions)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": Own(lambda positions: positions[:-1])}, r"the order \(own\) returned int64 \[46\] for 47 positions"),
        ({"order": Own(lambda positions: positions / 2)}, "returned float64 .* return one whole number for each"),
        ({"order": Own(lambda positions: positions - 1)}, "returned sample -1, and the data have samples 0 … 46"),
        ({"order": Own(lambda positions: positions + 1)}, "returned sample 47"),
        ({"order": "permutation"}, "order='permutation': give an order of ddp.data"),
        ({"order": ddp.data.Permutation}, "give an order of ddp.data"),
        ({"skip_steps": (5,)}, r"skip_steps=\(5,\): takes the first and the last step"),
        ({"skip_steps": 5}, "skip_steps=5: takes"),
        ({"skip_steps": (1.5, 2.5)}, "takes the first and the last step"),
        ({"skip_steps": (3, 2)}, "takes the first and the last step"),
        ({"skip_steps": (1, 99)}, r"skip_steps=\[1, 99\]: leaves out all steps of the run"),
        ({"debug": "no"}, "debug='no': must be True or False"),
    ],
)
def test_wrong_orders_and_steps(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trained(**changes)


@pytest.mark.parametrize("kind", [np.int32, np.uint64, list, torch.as_tensor])
def test_an_own_order_may_return_whole_numbers_of_any_kind(kind: Any, tmp_path: Path) -> None:
    returned = Own(
        lambda positions: kind(positions) if not isinstance(kind, type) or kind is list else positions.astype(kind)
    )
    trained(order=returned, folder=tmp_path / "run", skip_steps=(2, 3))
    assert summary(tmp_path / "run") == [3, 3]


class Deaf(Dataset[Any]):
    """Does not look at the index."""

    def __len__(self) -> int:
        return 47

    def __getitem__(self, index: int) -> Any:
        return INPUTS[0], TARGETS[0]


def trained(model_: nn.Module | None = None, **changes: Any) -> Any:
    model = model_ or nn.Linear(3, 2)
    return ddp.fit(
        model,
        **grouped(
            **{
                "data": (INPUTS, TARGETS),
                "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
                "loss": ddp.Classification(),
                "global_batch": 10,
                "epochs": 3,
                "progress": False,
                "curves": False,
                "folder": None,
                **changes,
            }
        ),
    )


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())["epochs_as_promised"]


CHOICES: list[dict[str, Any]] = [
    {},
    {"order": ddp.data.Stratified(np.arange(47) % 3), "skip_steps": (4, 7)},
    {"sharding": "off", "global_batch": 12},
    {"sharding": lambda shard, num_shards: range(shard, 47, num_shards), "num_shards": 2},
    {"global_batch": ddp.data.TokenBudget(30, np.arange(47) % 5)},
]


def in_three_parts(folder: str) -> list[Any]:
    """Epochs that are broken off twice, inside: each is checked by the run that ends it."""
    ddp.init(abort_s=20)
    found: list[Any] = []
    for number, choices in enumerate(CHOICES):
        run = Path(folder) / str(number)
        for max_steps in (2, 8, None):
            trained(folder=run, resume="auto", max_steps=max_steps, **choices)
            if ddp.init().rank == 0:
                found.append(summary(run))
    return found


@pytest.mark.slow
def test_epochs_are_as_promised_also_when_they_are_resumed(tmp_path: Path) -> None:
    found = run_ranks(in_three_parts, 2, str(tmp_path))[0]
    assert found[:3] == [[0, 0], [1, 1], [2, 2]]
    for number in range(len(CHOICES)):
        parts = found[3 * number : 3 * number + 3]
        assert sum(checked for _, checked in parts) == 3 and all(good == checked for good, checked in parts)


def test_an_order_that_breaks_its_promise_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trained(order=Careless(), folder=tmp_path / "run")
    assert summary(tmp_path / "run") == [0, 3]
    assert "epoch 2 was not what its order (careless) promises" in caplog.text


@pytest.mark.slow
def test_equal_first_batches_are_refused() -> None:
    assert run_ranks(refused_on_two_ranks, 2) == [True] * 2
    with pytest.raises(ConfigError, match="rank 0, loader process 0 and rank 0, loader process 1 have"):
        trained(data=Deaf(), num_workers=2, debug=True)
    trained(data=Deaf(), num_workers=1, debug=True)  # nobody to compare with
    trained(data=(INPUTS, TARGETS), num_workers=2, debug=True)


def refused_on_two_ranks() -> bool:
    ddp.init(abort_s=20)
    trained(debug=True)
    with pytest.raises(ConfigError, match="rank 0 and rank 1 have begun with equal batches"):
        trained(data=Deaf(), debug=True)
    return True


class Damaged(Dataset[Any]):
    """Every fifth sample cannot be read."""

    def __len__(self) -> int:
        return 47

    def __getitem__(self, index: int) -> Any:
        if index % 5 == 3:
            raise ddp.data.UnreadableSample(f"shard.tar, member {index}")
        return INPUTS[index].double(), TARGETS[index]


class Whole(Dataset[Any]):
    """The others."""

    indices = tuple(index for index in range(47) if index % 5 != 3)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return INPUTS[self.indices[index]].double(), TARGETS[self.indices[index]]


def losses_of(data: Any, **changes: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = trained(data=data, model_=model, optimizer=optimizer, **changes)
    return [len(state.unreadable), state.step], model.weight.detach().clone()


def without_the_unreadable(micro_size: int) -> list[Any]:
    """One step over everything: leaving samples out, whole micro-batches too, equals data without them."""
    ddp.init(abort_s=20)
    choices = {"global_batch": 47, "epochs": 1, "micro_size": micro_size}
    numbers, found = losses_of(Damaged(), max_unreadable=9, **choices)
    _, expected = losses_of(Whole(), **{**choices, "global_batch": len(Whole())})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    return numbers


@pytest.mark.parametrize("micro_size", [1, 4, 47])
@pytest.mark.quick(1)
def test_what_is_left_out_changes_nothing_else(micro_size: int) -> None:
    assert run_ranks(without_the_unreadable, 3, micro_size) == [[9, 1]] * 3


class Late(Dataset[Any]):
    """The last half of the samples cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index >= 20:
            raise OSError("the disk is gone")
        return INPUTS[index].double(), TARGETS[index]


def steps_without_a_sample() -> None:
    """Are no steps of the optimizer: neither momentum nor decay moves a parameter, and Adam does not count them."""
    ddp.init(abort_s=20)
    for sharded in (False, True):
        found, positions = [], []
        for steps in (2, 4):
            torch.manual_seed(0)
            model = nn.Linear(3, 2).double()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
            how: dict[str, Any] = {"order": ddp.data.Fixed(40), "global_batch": 10, "max_steps": steps, "epochs": None}
            how |= {"schedule": lambda done, of: 10 / (done + 10), "max_unreadable": 20, "sharded": sharded}
            state = trained(data=Late(), model_=model, optimizer=optimizer, **how)
            positions.append((state.step, state.sampler.position, state.rates.last))
            found.append([*model.parameters(), *(v for p in model.parameters() for v in optimizer.state[p].values())])
        assert all(map(torch.equal, *found))
        assert [each[:2] for each in positions] == [(2, 20), (4, 40)] and positions[0][2] != positions[1][2]
    ddp.shutdown()


def test_a_step_none_of_whose_samples_can_be_read_moves_nothing() -> None:
    run_ranks(steps_without_a_sample, 2)


def test_a_sample_counts_once_however_often_it_is_left_out(tmp_path: Path) -> None:
    """Nine samples cannot be read; in another epoch, and after a resume, they are known."""
    torch.manual_seed(0)
    whole = trained(data=(Damaged()), model_=nn.Linear(3, 2).double(), max_unreadable=9)
    assert whole.unreadable == {index for index in range(47) if index % 5 == 3}
    for max_steps, left_out in ((3, 6), (6, 9), (15, 9)):
        choices = {
            "folder": tmp_path / "run",
            "resume": "auto",
            "max_steps": max_steps,
            "max_unreadable": left_out,
        }
        state = trained(data=Damaged(), model_=nn.Linear(3, 2).double(), **choices)
        assert len(state.unreadable) <= left_out
    assert state.unreadable == whole.unreadable
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["unreadable_samples"] == 9
