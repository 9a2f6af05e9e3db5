"""A rank on a GPU is lost: NCCL's communicators end, and a spare takes its GPU, or the others go on without it.

Tests: ddp/train/survive.py.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from gpu_standin import device
from torch import Tensor, nn

import ddp

STEPS = 8


class Loss(ddp.Callback):
    """A loss in which a rank of the first generation ends: its backward, and NCCL's sums, never begin."""

    def __init__(self, kill: int) -> None:
        self.kill = kill

    def fit_start(self, state: ddp.TrainState) -> None:
        self.state = state

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        state = self.state
        if (state.comm.generation, state.comm.rank, state.step) == (0, self.kill, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, targets)


def train(kill: int) -> tuple[int, int, int, int | None, list[Tensor]]:
    device.install(2)
    ddp.init(device="standin", abort_s=30)  # first, because a program that uses a GPU already keeps to that one
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)).to("standin"), Loss(kill)
    data = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    labels, optimizer = data.sum(1).gt(0).long(), torch.optim.AdamW(model.parameters(), lr=0.01)
    how: dict[str, Any] = {"loss": loss, "callbacks": [loss], "global_batch": 12, "max_steps": STEPS, "folder": None}
    state = ddp.fit(model, (data, labels), optimizer, **how)
    weights = [each.detach().cpu() for each in model.parameters()]
    return state.step, state.comm.world_size, state.comm.generation, state.comm.device.index, weights


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("spares", [1, 0])
@pytest.mark.quick(1)
def test_a_rank_on_a_gpu_is_lost(rank: int, spares: int) -> None:
    whole = ddp.launch(train, -1, workers=2, timeout_s=60)
    found = ddp.launch(train, rank, workers=2, spares=spares, min_workers=1, restarts=0, timeout_s=60)
    gpus = [0, 1] if spares else [1 - rank]  # the spare takes that of the lost one, and the other keeps its own
    assert [each[:4] for each in found] == [(STEPS, 1 + spares, 1, gpu) for gpu in gpus]
    for each in found:
        for ours, theirs in zip(each[4], whole[0][4], strict=True):
            if spares:
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs)
