"""Strategies in a loop of one's own make bitwise what `ddp.fit` does.

Tests: ddp/strategies/strategy.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from flat import fit_over
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError, Diverged
from ddp.optim.precision import forward_precision
from ddp.replica.broadcast import tensor_hash
from ddp.strategies import CentralStorage, FullySharded, Replicated, Sharded, Strategy, step

X = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
NUM_STEPS = 5  # an epoch


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(12, 50), nn.LayerNorm(50), nn.ReLU(), nn.Linear(50, 3))
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def sampler_of(comm: ddp.Communicator) -> ddp.TrainSampler:
    return ddp.TrainSampler(40, global_batch=8, rank=comm.rank, world_size=comm.world_size, seed=3, micro_size=2)


def bits(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    values = [value for p in module.parameters() for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    return [tensor_hash(value.detach().reshape(-1)) for value in (*module.parameters(), *values)]


def fitted(comm: ddp.Communicator, **how: Any) -> list[str]:
    module, optimizer = made()
    settings: dict[str, Any] = {"loss": F.cross_entropy, "global_batch": 8, "micro_size": 2, "seed": 3}
    settings |= {"epochs": 1, "folder": None, "progress": False, **how}
    fit_over(comm, module, data=(X, CLASSES), optimizer=optimizer, **settings)
    return bits(module, optimizer)


def by_hand(comm: ddp.Communicator, kind: type[Replicated], precision: Any = "fp32", **how: Any) -> list[str]:
    """Makes the same steps with totals, in a loop as docs/coming-from.md has it."""
    module, optimizer = made()
    strategy = kind(module, optimizer, precision=precision, **how)
    num_repeated = 0
    for plan in sampler_of(comm).plans():
        is_done = False
        while not is_done:
            optimizer.zero_grad()
            totals = ddp.Totals()
            for micro in plan.micros:
                mine = list(micro.indices)
                with strategy.micro_batch(is_last=micro is plan.micros[-1]) as scale:
                    with forward_precision(precision, comm.device):
                        outputs = strategy.model(X[mine])
                        loss = F.cross_entropy(outputs, CLASSES[mine]) * len(mine)
                    totals = ddp.Totals(totals.loss_sum + loss.detach(), totals.num_items + len(mine))
                    strategy.model.ride_along(totals._replace(loss_scale=scale))
                    (loss * scale).backward()
            agreement = step(strategy)
            assert agreement.totals.num_items == 8
            is_done = not agreement.is_overflow
            num_repeated += agreement.is_overflow
    assert precision != "fp16" or num_repeated
    strategy.finish()
    return bits(module, optimizer)


def plain_loop(comm: ddp.Communicator) -> list[str]:
    """Needs neither totals nor blocks: gradients of means are averaged, by powers of two."""
    module, optimizer = made()
    strategy: Strategy = Replicated(module, optimizer)
    for plan in sampler_of(comm).plans():
        mine = torch.tensor([index for micro in plan.micros for index in micro.indices])
        optimizer.zero_grad()
        F.cross_entropy(strategy.model(X[mine]), CLASSES[mine]).backward()
        step(strategy)
    return bits(module, optimizer)


class Overflows(nn.Module):
    """Multiplies by a weight of infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(torch.inf))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.weight


class Scaled(nn.Module):
    """Has a scalar of a narrower type than the norm of all gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.scale = nn.Parameter(torch.randn(3, 12).double()), nn.Parameter(torch.tensor(0.9))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs.double(), self.weight) * self.scale


def with_a_scalar(kind: type[Replicated]) -> list[str]:
    """Returns the bits after some steps, whose gradients are clipped."""
    module = Scaled()
    strategy = kind(module, torch.optim.AdamW(module.parameters(), lr=0.05), clip_norm=0.05)
    for _ in range(8 * NUM_STEPS):
        strategy.optimizer.zero_grad()
        F.cross_entropy(strategy.model(X[:8]), CLASSES[:8]).backward()
        step(strategy)
    strategy.finish()
    return bits(module, strategy.optimizer)


def loops() -> None:
    comm = ddp.init(abort_s=60)
    expected = fitted(comm)
    for kind in (Replicated, Sharded, CentralStorage):
        replica = partial(ddp.BucketedDataParallel, reducer=kind.reducer)
        assert by_hand(comm, kind) == expected
        clipped = fitted(comm, clip_norm=0.3, replica=replica)
        assert by_hand(comm, kind, clip_norm=0.3) == clipped != expected
        assert by_hand(comm, kind, "fp16") == fitted(comm, precision="fp16", replica=replica)
    assert by_hand(comm, Replicated, "bf16_pure") == fitted(comm, precision="bf16_pure")
    assert plain_loop(comm) == fitted(comm, micro_size=None)
    assert with_a_scalar(Replicated) == with_a_scalar(Sharded) == with_a_scalar(CentralStorage)

    module = Overflows()
    strategy = Replicated(module, torch.optim.SGD(module.parameters(), lr=0.1))
    strategy.model(torch.ones(2)).sum().backward()  # no totals: the loss is not known, the gradient is finite
    step(strategy)
    (strategy.model(torch.ones(2)).sum() * torch.inf).backward()
    with pytest.raises(Diverged, match="the gradient norm of step 2 is inf on every rank; parameters are still those"):
        step(strategy)
    with pytest.raises(ConfigError, match="with a model in a BucketedDataParallel: give the bare module"):
        Sharded(ddp.BucketedDataParallel(*made()[:1]), strategy.optimizer)
    with pytest.raises(ConfigError, match="strategy='sharded': precision='bf16_pure' has master weights, which"):
        Sharded(*made(), precision="bf16_pure")
    ddp.shutdown()


def test_a_loop_of_ones_own_makes_what_fit_makes() -> None:
    run_ranks(loops, 2)


def habits() -> None:
    """What other libraries' loops do: ranks would update with gradients that were not averaged, or not theirs."""
    ddp.init(abort_s=20)
    for kind in (Replicated, Sharded, CentralStorage, FullySharded):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        strategy: Strategy = kind(module, optimizer)
        for number in range(2):
            if number or kind is not FullySharded:
                with strategy.model.whole():
                    module(torch.ones(1, 2)).sum().backward()
            with pytest.raises(RuntimeError, match=r"no backward has averaged gradients .* by strategy.model\(…\), no"):
                step(strategy)
            optimizer.zero_grad()
            strategy.model(torch.ones(1, 2)).sum().backward()
            if kind is not Replicated:
                with pytest.raises(ConfigError, match=r"optimizer.step\(\) while .*: call ddp.strategies.step\(strate"):
                    optimizer.step()
            step(strategy)
        kind(strategy.model, optimizer)  # before the other one has finished
        strategy.finish()
        if kind is not FullySharded:
            optimizer.step()


def test_habits_from_other_loops_are_refused() -> None:
    run_ranks(habits, 2)
