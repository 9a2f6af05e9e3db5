"""A step that breaks off before its commit leaves no trace: buffers, hooks, loss scale and counters are as before it.

An error is raised in each phase of a step; then all is as after the last committed step. Without one, a step costs as
before: the copies of the buffers stay where they are.

Tests: ddp/train/steps/step.py, ddp/train/steps/state.py.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm import connect
from ddp.gradients import ErrorFeedback, PowerSGD
from ddp.replica.broadcast import BufferSnapshot, tensor_hash
from ddp.train import loop

X = torch.randn(24, 3, 6, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 5, (24,), generator=torch.Generator().manual_seed(1))
FATAL_STEP = 3


class Broken(BaseException):
    """Ends a step; no `except Exception` sees it."""


class Fragile(nn.Module):
    """Breaks, once it is armed, in its forward or in its backward."""

    armed, num_before = "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_before -= bool(self.armed)
        if self.num_before >= 0:
            return x
        if self.armed == "in forward":
            raise Broken
        if self.armed == "in backward":
            x.register_hook(self.broken)
        return x

    def broken(self, _: Tensor) -> None:
        raise Broken


def net() -> nn.Module:
    torch.manual_seed(1)
    first = nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), Fragile())
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(640, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))


class Breaks(ddp.Callback):
    """Lets a step break off, and keeps what was there before it."""

    def __init__(self, when: str, num_before: int) -> None:
        self.when, self.num_before, self.before = when, num_before, dict[str, Any]()

    def step_start(self, state: ddp.TrainState) -> None:
        if state.step + 1 != FATAL_STEP:
            return
        self.state, self.before = state, bits(state)
        for module in state.model.modules():
            if isinstance(module, Fragile):
                module.armed, module.num_before = self.when, self.num_before
        broken: Any = self._raised
        if self.when == "in agree":
            state.strategy.agree = broken
        if self.when == "before the update":
            state.strategy.update = broken
        if self.when == "after a smaller scale":
            usual, scale, value = state.strategy.agree, state.loss_scale, state.loss_scale.value

            def agree(step: int) -> Any:
                if scale.value < value:
                    raise Broken
                agreement = usual(step)
                scale.shrink()
                return agreement._replace(is_overflow=True)

            state.strategy.agree = agree

    def _raised(self, *_: Any) -> None:
        raise Broken


def bits(state: ddp.TrainState) -> dict[str, Any]:
    """Returns hashes of all that a step changes."""
    found: dict[str, Any] = {name: tensor_hash(value) for name, value in state.model.state_dict().items()}
    hook = state.model.compression
    if hook is not None:
        for kind, memory in hook.hook.memories().items():
            kept = {**memory.committed, **memory.pending} if hook._is_pending else memory.committed
            found |= {f"{kind} of {name}": tensor_hash(value) for name, value in kept.items() if value.numel()}
        found["steps of the hook"] = hook.num_steps + hook._is_pending
    scale = None if state.loss_scale is None else state.loss_scale.state_dict()
    return {
        **found,
        "scale": scale,
        "steps": (state.step, state.model.num_steps),
        "sampler": state.sampler.state_dict(),
    }


def broken_off(when: str, num_before: int = 0, **how: Any) -> dict[str, Any]:
    """Trains until a step breaks off, in this forward of it; returns what is different then."""
    module, breaks = net(), Breaks(when, num_before)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    given = {"global_batch": 8, "epochs": 2, "folder": None, "loss": F.cross_entropy, **how}
    with pytest.raises(Broken):
        ddp.fit(module, (X, CLASSES), optimizer, callbacks=[breaks], **given)
    now = bits(breaks.state)
    assert now.keys() == breaks.before.keys()
    return {name: (value, now[name]) for name, value in breaks.before.items() if now[name] != value}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "by shards": {"same_bits": True, "batches": ddp.Batches(num_shards=2)},
    "fp16": {"precision": "fp16"},
    "sharded": {"strategy": "sharded"},
    "hook": {"strategy": ddp.Averaging(hook=ErrorFeedback(PowerSGD(2)))},
    "rounds": {"strategy": ddp.LocalSGD(every=2), "num_before": 1},
}
MEMBER: Any = object()
PHASES = ("in forward", "in backward", "in agree", "before the update")


def in_each_phase(name: str) -> None:
    if name == "hook":
        connect.boot_id = lambda: f"host {os.environ['RANK']}"
    ddp.init(abort_s=20)
    loop.current_member = lambda: MEMBER  # type: ignore[assignment]  # of a launch in which the run may go on
    for when in PHASES:
        assert broken_off(when, **CASES[name]) == {}, when
    if name == "fp16":
        assert broken_off("after a smaller scale", **CASES[name]) == {}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_step_leaves_no_trace(name: str) -> None:
    run_ranks(in_each_phase, 2, name)


def test_a_snapshot_takes_the_memory_of_the_former_one() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(3))
    first = BufferSnapshot(module)
    addresses = {name: value.data_ptr() for name, value in first.values.items()}
    module[0](torch.randn(5, 4))
    module[1].running_mean = torch.zeros(7)
    second = BufferSnapshot(module, first)
    kept = {name for name, value in second.values.items() if value.data_ptr() == addresses[name]}
    assert kept == addresses.keys() - {"1.running_mean"}
    mean = module[0].running_mean.clone()
    module[0](torch.randn(5, 4))
    module[1].running_mean = torch.zeros(2)
    second.restore()
    assert torch.equal(module[0].running_mean, mean)
    assert module[0].num_batches_tracked == 1 and module[1].running_mean.shape == (7,)
