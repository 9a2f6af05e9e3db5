"""A loss over the pairs of the whole batch, gathered from all workers, is one process's; or is refused in time."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError, Diverged

X = torch.randn(31, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rows_of(comm: ddp.Communicator, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of all ranks, and the numbers of this rank's rows among them."""
    everyone = comm.all_gather(rows)
    start = sum(map(len, everyone[: comm.rank]))
    return torch.cat(everyone), torch.arange(start, start + len(rows))


class Pairs(ddp.Task):
    """Each row of one view finds its own row of the other view."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        one, other = model(batch)
        everyone, own = rows_of(ddp.init(), other)
        return F.cross_entropy(one @ everyone.T, own, reduction="sum"), len(one)


class Apart(Pairs):
    """Has metrics that are a worker's own."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": (sum(outputs.square().sum() for outputs in model(batch)), len(batch))}


def as_function(outputs: Tensor, _: Tensor) -> Tensor:
    everyone, own = rows_of(ddp.init(), outputs)
    return F.cross_entropy(outputs @ everyone.T, own)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 5).double(), nn.Linear(4, 5).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x[:, :4]), self.other(x[:, 4:])


def trained(loss: Any = None, *, module: nn.Module | None = None, data: Any = X, **how: Any) -> tuple[Tensor, Any]:
    module = module or Views()
    given = {"order": ddp.data.Fixed(len(X)), "global_batch": 8, "epochs": 1, "folder": None, "progress": False, **how}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    state = ddp.fit(module, data, optimizer, **grouped(loss=loss or Pairs(), **given))
    return nn.utils.parameters_to_vector(module.parameters()).detach(), state.evaluation


def exact() -> list[Any]:
    """Returns the parameters at the end by strategy, and by another form of the loss, and what was warned of."""
    ddp.init(abort_s=20)
    told: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logging.getLogger("ddp").addHandler(Keep(logging.WARNING))
    found = [trained(strategy=word)[0] for word in ("auto", "sharded", "central_storage")]
    found.append(trained(strategy=ddp.Averaging(bucket_cap_mb=1e-6, first_bucket_mb=1e-6), test_data=X)[0])
    targets = X, torch.zeros(len(X))
    function = trained(as_function, module=nn.Linear(8, 4).double(), data=targets, test_data=targets)
    ddp.shutdown()
    return [found, function, told]


@pytest.mark.slow
def test_a_run_is_that_of_one_process_with_unequal_shares() -> None:
    module = Views()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for x in X.split(8):  # of 8, 8, 8 and 7
        optimizer.zero_grad()
        one, other = module(x)
        F.cross_entropy(one @ other.T, torch.arange(len(x))).backward()
        optimizer.step()
    expected = nn.utils.parameters_to_vector(module.parameters()).detach()
    alone = run_ranks(exact, 1)[0]
    (found, (parameters, evaluation), told), *_ = run_ranks(exact, 2)
    for each in (*found, *alone[0]):
        torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parameters, alone[1][0], rtol=1e-12, atol=1e-14)
    assert evaluation["test_loss"] == pytest.approx(alone[1][1]["test_loss"], rel=1e-12) and told == alone[2] == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rank without samples": (
        {"global_batch": 10},
        "Pairs.loss waits in each forward for all ranks, but in some steps they have different numbers of",
    ),
    "rounds": ({"strategy": "local_sgd"}, "with strategy='local_sgd' a worker computes alone: take strategy='auto'"),
    "same bits": ({"same_bits": True, "num_shards": 4}, "with same_bits=True a worker computes alone"),
    "an evaluation": (
        {"test_data": X[:3], "batch": 1},
        "Pairs.metrics waits in each forward for all workers, and in an evaluation of 3 samples, 1 at once, 2 ",
    ),
}


def refused() -> list[str]:
    ddp.init(abort_s=20)
    said = []
    for how, _ in REFUSED.values():
        try:
            trained(**how)
        except ConfigError as error:
            said.append(str(error))
    trained(Apart(), test_data=X[:3], batch=1)
    try:
        trained(data=X.clone().index_fill_(0, torch.tensor([12]), float("nan")))
    except Diverged as error:
        said.append(str(error))
    ddp.shutdown()
    return said


def test_what_would_wait_for_ever_is_refused_before_the_first_step() -> None:
    for said in run_ranks(refused, 2):
        for told, (_, wanted) in zip(said, REFUSED.values(), strict=False):
            assert re.search(wanted, told)
        assert len(said) == len(REFUSED) + 1
        assert "It is not computed again, because layers wait for other ranks in each forward" in said[-1]
