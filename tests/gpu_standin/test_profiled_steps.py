"""A profile on GPUs: its moments are events, and the host waits once for each step that is measured."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from gpu_standin import device
from ranks import run_ranks
from torch import nn

import ddp
from ddp.train.reports.profile import read_profile

SLOW_S = 0.02


class Slow(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        until_s = time.perf_counter() + SLOW_S * self.training
        while time.perf_counter() < until_s:
            pass
        return super().forward(inputs)


class Waits(ddp.Callback):
    """Counts the host's waits for the device that the profile makes in each step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        waits = device.host_waits().items()
        self.found.append(sum(number for each, number in waits if "reports/profiler.py" in str(each)))
        device.reset()


def profiled(folder: Path) -> list[int]:
    device.install(int(os.environ["WORLD_SIZE"]))
    comm = ddp.init(device="standin", abort_s=30)
    data = torch.randn(28, 4), torch.randint(0, 2, (28,))
    model = nn.Sequential(nn.BatchNorm1d(4), Slow(4, 8), nn.Linear(8, 2)).to(comm.device)
    optimizer, waits = torch.optim.SGD(model.parameters(), lr=0.01), Waits()
    how: dict[str, Any] = {"loss": nn.functional.cross_entropy, "global_batch": 4, "epochs": 1}
    run = ddp.Folder(folder, progress=False, curves=False)
    device.late()
    ddp.fit(model, data, optimizer, folder=run, callbacks=[ddp.Profiler(steps=9), waits], **how)
    device.late(False)
    ddp.shutdown()
    return waits.found


def test_moments_are_events_of_the_stream(tmp_path: Path) -> None:
    assert run_ranks(profiled, 2, tmp_path) == [[0, 0, 0, 0, 0, 3, 1]] * 2  # the first two say when an event was
    profile = read_profile(tmp_path)
    assert profile.device.startswith("standin") and [step[0].step for step in profile.steps] == [6, 7]
    for step in profile.steps:
        for mine in step:
            parts = mine.parts
            assert parts["forward"] >= SLOW_S and parts["backward"] > 0 and parts["update"] > 0
            assert mine.num_samples == 2
            assert mine.step_s < 1 and parts["communication"] + parts["wait"] > 0
