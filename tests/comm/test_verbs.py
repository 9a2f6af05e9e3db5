"""Collectives that autograd differentiates: every rank has the gradient of one process that has all samples."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as all_gather_of_torch
from torch.nn import functional as F

import ddp
from ddp.comm import connect
from ddp.errors import ConfigError

X = torch.randn(12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TINY = {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}
REPLICAS: list[dict[str, Any]] = [{}, {"overlap": True, **TINY}, {"overlap": False, **TINY}]
WAYS = ("own rows", "all rows", "inside of the model")


class Views(nn.Module):
    """Embeds two views of each sample, where each row may see the mean of `everyone`."""

    def __init__(self, everyone: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 5)
        self.everyone = everyone
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.one(x[:, :4]).tanh()
        return self.last(rows + self.everyone(rows).mean(0)), self.last(self.other(x[:, 4:]))


def nobody(rows: Tensor) -> Tensor:
    return rows.new_zeros(1, 6)


def pairs(one: Tensor, other: Tensor, start: int = 0) -> Tensor:
    return F.cross_entropy(one @ other.T, torch.arange(start, start + len(one)), reduction="sum")


def gradient_of(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def by_hand(numbers: tuple[int, ...], on_hosts: bool) -> list[Tensor]:
    """Returns the gradients of a loss over the pairs of all ranks' samples, in each way and kind of replica."""
    if on_hosts:
        connect.boot_id = lambda: f"host {int(os.environ['RANK']) // 2}"
    comm, found, num = ddp.init(abort_s=20), list[Tensor](), sum(numbers)
    start = sum(numbers[: comm.rank])
    for way in WAYS:
        for replica in REPLICAS:
            inside = way == "inside of the model"
            module = Views((lambda rows: torch.cat(comm.all_gather(rows))) if inside else nobody)
            model = ddp.DistributedDataParallel(module, **replica)
            for _ in range(2):
                module.zero_grad()
                one, other = model(X[start : start + numbers[comm.rank]])
                everyone = torch.cat(comm.all_gather(other, label="views"))
                if way == "all rows":
                    loss = pairs(torch.cat(comm.all_gather(one)), everyone) / num
                else:
                    loss = pairs(one, everyone, start) * comm.world_size / num
                loss.backward()
            found.append(gradient_of(module))
    ddp.shutdown()
    return found


@pytest.mark.parametrize(
    ("numbers", "on_hosts"), [((6, 6), False), ((1, 11), False), ((0, 12), False), ((5, 3, 4), True)]
)
@pytest.mark.quick(1)
def test_a_loss_over_all_ranks_pairs_has_one_process_s_gradient(numbers: tuple[int, ...], on_hosts: bool) -> None:
    by_rank = run_ranks(by_hand, len(numbers), numbers, on_hosts)
    for number, found in enumerate(by_rank[0]):
        module = Views(nobody if number < 2 * len(REPLICAS) else lambda rows: rows)
        (pairs(*module(X)) / len(X)).backward()
        torch.testing.assert_close(found, gradient_of(module), rtol=1e-12, atol=1e-14)
        assert all(torch.equal(others[number], found) for others in by_rank), "bitwise equal on all ranks"


def values(comm: ddp.Communicator) -> list[Tensor]:
    return [torch.arange(1.0, 4).double() + rank for rank in range(comm.world_size)]


def mine(comm: ddp.Communicator) -> Tensor:
    return values(comm)[comm.rank].requires_grad_()


def sums(comm: ddp.Communicator) -> None:
    weight, weights = comm.rank + 1, sum(range(1, comm.world_size + 1))
    for how, share in (({}, 1.0), ({"op": "mean"}, 1 / comm.world_size), ({"divide_by": 4}, 0.25)):
        x = mine(comm)
        total = comm.all_reduce(2 * x, **how)
        (weight * total.square()).sum().backward()  # another loss on each rank
        all_of_it = sum(2 * each for each in values(comm)) * share
        assert torch.equal(total, all_of_it)
        torch.testing.assert_close(x.grad, weights * 2 * all_of_it * share * 2, rtol=1e-14, atol=0)


def several_at_once(comm: ddp.Communicator) -> None:
    x = mine(comm)
    one, other = comm.all_reduce([2 * x, x.sum() * 3])
    (one.sum() * other).backward()
    all_of_it = sum(values(comm))
    expected = comm.world_size * (2 * 3 * all_of_it.sum() + 3 * 2 * all_of_it.sum())
    torch.testing.assert_close(x.grad, expected.expand(3), rtol=1e-14, atol=0)


def as_torch_s_own(comm: ddp.Communicator) -> None:
    found = []
    for collective in (comm.all_gather, all_gather_of_torch):
        x = mine(comm)
        everyone = torch.cat([*collective(x.exp())])
        (everyone * torch.arange(len(everyone)) * (comm.rank + 1)).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-14, atol=0)


def a_scalar(comm: ddp.Communicator) -> None:
    x = mine(comm)
    torch.cat(comm.all_gather(x.sum())).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), float(comm.world_size)).double())


def what_has_no_gradient(comm: ddp.Communicator) -> None:
    x = mine(comm)
    for verb in (comm.all_gather, comm.all_reduce):
        with pytest.raises(ConfigError, match=r"async_op=True of a tensor that requires a gradient.* leave async_op"):
            verb(2 * x, async_op=True)
    for op in ("min", "max", "product"):
        with pytest.raises(ConfigError, match=f"op='{op}' of a tensor that requires a gradient: take sum or mean"):
            comm.all_reduce(2 * x, op)
    with torch.no_grad():
        assert not torch.cat(comm.all_gather(x)).requires_grad and not comm.all_reduce(2 * x, "max").requires_grad
    assert not comm.all_gather(x.detach(), async_op=True).wait()[0].requires_grad
    leaf = mine(comm)
    assert comm.all_reduce(leaf) is leaf and leaf.is_leaf, "a leaf gets a value"
    assert torch.equal(leaf, sum(values(comm)))
    saved = x.exp()  # whose backward needs it as it is
    comm.all_reduce(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def everything() -> None:
    comm = ddp.init(abort_s=20)
    for case in (sums, several_at_once, as_torch_s_own, a_scalar, what_has_no_gradient):
        case(comm)
    ddp.shutdown()
    assert not dist.is_initialized()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_gradient_is_that_of_the_sum_of_all_ranks_losses(world_size: int) -> None:
    run_ranks(everything, world_size)
