"""A step breaks off, and the program goes on: `finish(alone=True)` gives module and optimizer back, by every strategy.

Afterwards the module alone computes this rank's gradients, the optimizer makes a step with them, another replica
averages, and the first one, if it is used again, says what has happened.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from members import cnn, flat, samples
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.policies import Rounds
from ddp.replica.naive import NaiveDataParallel
from ddp.strategies import CentralStorage, LocalSteps, Replicated, Sharded, step
from ddp.strategies.strategy import Strategy

X, CLASSES = samples("cnn", torch.float32)
Make = Callable[[nn.Module, torch.optim.Optimizer], Strategy]
MAKE: dict[str, Make] = {
    "replicated": Replicated,
    "naive": lambda net, optimizer: Replicated(NaiveDataParallel(net), optimizer),
    "drop-in": lambda net, optimizer: Replicated(ddp.DistributedDataParallel(net, bucket_cap_mb=1e-4), optimizer),
    "by shards": lambda net, optimizer: Replicated(ddp.BucketedDataParallel(net, num_shards=2), optimizer),
    "bf16_pure": lambda net, optimizer: Replicated(net, optimizer, precision="bf16_pure"),
    "sharded": Sharded,
    "central_storage": CentralStorage,
    "local_sgd": lambda net, optimizer: LocalSteps(net, optimizer, Rounds(every=1)),
}
BROADCAST = ("replicated", "naive", "drop-in", "bf16_pure", "sharded", "central_storage")


class Broken(Exception):
    """The user's own."""


def breaks(_: Tensor) -> None:
    raise Broken


def loss_of(model: nn.Module, *, rank: int, broken: str = "") -> Tensor:
    inputs, classes = X[rank::2].to(next(model.parameters()).dtype), CLASSES[rank::2]
    outputs = model(inputs)
    if broken == "after forward":
        raise Broken
    if broken == "in backward":  # the last layer's gradients are ready then
        layer = outputs.grad_fn.next_functions[1][0]
        layer.register_hook(lambda *_: breaks(outputs))
    return F.cross_entropy(outputs, classes)


def computed(strategy: Strategy, *, rank: int, broken: str = "") -> Tensor:
    """Computes the gradients of a step, and returns its loss."""
    shards = strategy.model.shards or (None,)
    for shard in shards:
        if shard is not None:
            with strategy.model.shard(shard):
                loss = loss_of(strategy.model, rank=rank, broken=broken)
                loss.backward()
            continue
        with strategy.micro_batch():
            loss = loss_of(strategy.model, rank=rank, broken=broken)
            loss.backward()
    return loss


def broken_off(name: str, when: str) -> None:
    comm = ddp.init(abort_s=20)
    torch.manual_seed(1)
    module = cnn()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    strategy = MAKE[name](module, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        computed(strategy, rank=comm.rank)
        step(strategy)
    optimizer.zero_grad()
    with pytest.raises(Broken):
        computed(strategy, rank=comm.rank, broken=when)
    strategy.finish(alone=True)
    if name == "local_sgd":  # each rank has its own state
        optimizer.state.clear()

    assert all(each.grad is None and each.dtype == torch.float32 for each in module.parameters())
    twin = copy.deepcopy(module)
    for net in (module, twin):
        loss_of(net, rank=comm.rank).backward()
    for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    for each in module.parameters():
        comm.all_reduce(each.grad, "mean")
    optimizer.step()

    again = Replicated(module, optimizer)
    optimizer.zero_grad()
    computed(again, rank=comm.rank)
    expected = [comm.all_reduce(gradient, "mean") for gradient in gradients_of(module, rank=comm.rank)]
    torch.testing.assert_close([each.grad for each in module.parameters()], expected, rtol=1e-4, atol=1e-6)
    step(again)
    again.model.verify_replicas()
    if when == "in backward" and name not in ("naive", "local_sgd"):
        with pytest.raises((RuntimeError, ddp.errors.ConfigError), match=r"broke off|an error has left the block"):
            computed(strategy, rank=comm.rank)


def gradients_of(module: nn.Module, *, rank: int) -> list[Tensor]:
    """Returns this rank's gradients, which a copy computes."""
    twin = copy.deepcopy(module)
    twin.zero_grad()
    loss_of(twin, rank=rank).backward()
    return [each.grad for each in twin.parameters() if each.grad is not None]


@pytest.mark.parametrize("name", MAKE)
def test_module_and_optimizer_work_alone_and_in_another_replica(name: str) -> None:
    run_ranks(broken_off, 2, name, "in backward")
    run_ranks(broken_off, 2, name, "after forward")


def old_outputs() -> None:
    ddp.init(abort_s=20)
    module = cnn()
    strategy: Any = Replicated(module, torch.optim.SGD(module.parameters(), lr=0.1))
    loss = F.cross_entropy(strategy.model(X), CLASSES)
    strategy.finish(alone=True)
    with pytest.raises(RuntimeError, match="a replica that has been released"):
        loss.backward()
    for _ in range(2):
        strategy.optimizer.zero_grad()
        F.cross_entropy(strategy.model(X), CLASSES).backward()  # nothing has broken off in it, so that it goes on
        before = flat(module)
        step(strategy)
        assert not torch.equal(flat(module), before)
    strategy.model.verify_replicas()


def test_a_released_replica_goes_on_and_refuses_what_was_computed_before() -> None:
    run_ranks(old_outputs, 2)
