"""A rank that is killed in the middle of an update of central storage is named, and nothing half-updated is saved.

For each rank as the one that is lost: before the first block, between two, and when all of its own are done. Several at
once: ranks that wait cost no time.

Tests: ddp/strategies/central_storage.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from members import OPTIMIZERS, fitted, groups_of, mlp, samples, small_blocks
from ranks import collect, start_ranks

import ddp
from ddp.errors import CommunicatorBroken, PeerLost
from ddp.replica.broadcast import tensor_hash
from ddp.strategies import central_storage
from ddp.train.checkpoints.checkpoint_store import steps

WARN_S, ABORT_S = 1.0, 3.5
WORLD_SIZE, FATAL_STEP = 3, 4
CASES = {"fused": (0, 0), "adam": (1, 1), "lamb": (2, -1)}  # optimizer → culprit, and after how many stretches


class Report(NamedTuple):
    """How a survivor fared."""

    text: str
    took_s: float
    refusal: str  # of a state that may be half updated
    weights: dict[str, str]  # hashes of what was trained by the step before


class Arms(ddp.Callback):
    """Makes the culprit's update of the fatal step deadly, and keeps what was there before it."""

    def __init__(self, *, is_culprit: bool, after: int) -> None:
        self._is_culprit, self._after = is_culprit, after
        self.strategy: Any = None
        self.start_s, self.weights = 0.0, dict[str, str]()

    def step_start(self, state: ddp.TrainState) -> None:
        if state.step + 1 != FATAL_STEP:
            return
        self.start_s, self.strategy = time.monotonic(), state.strategy
        weights = state.model.module.state_dict()
        self.weights = {name: tensor_hash(value.detach().reshape(-1)) for name, value in weights.items()}
        if self._is_culprit:
            arm(state.strategy, self._after)


def arm(strategy: Any, after: int) -> None:
    """Kills this process after so many stretches of its next update; -1: after all."""
    usual, left = central_storage.clipped_step, len(strategy._stretches) if after < 0 else after
    assert left < len(strategy._stretches) or after < 0

    def deadly(*given: Any) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        usual(*given)

    central_storage.clipped_step = deadly  # type: ignore[assignment]
    if after < 0:
        strategy._update_user_state = lambda: os.kill(os.getpid(), signal.SIGKILL)


def trained(kind: str, folder: str) -> Report:
    comm = ddp.init(warn_s=WARN_S, abort_s=ABORT_S)
    culprit, after = CASES[kind]
    torch.manual_seed(3)
    module = mlp()
    optimizer = OPTIMIZERS[kind](groups_of(module))
    arms = Arms(is_culprit=comm.rank == culprit, after=after)
    how: dict[str, Any] = {"folder": folder, "checkpoint_every_steps": 1, "max_steps": 9, "curves": False}
    with small_blocks(stretch=64), pytest.raises(PeerLost) as lost:
        fitted(module, samples("mlp", torch.float32), optimizer, strategy="central_storage", callbacks=[arms], **how)
    took_s = time.monotonic() - arms.start_s
    with pytest.raises(CommunicatorBroken) as refused:
        arms.strategy.state_dict()
    ddp.shutdown(failed=str(lost.value))
    return Report(str(lost.value), took_s, str(refused.value), arms.weights)


@pytest.mark.slow
def test_survivors_name_the_lost_rank_and_save_nothing_of_half_an_update(tmp_path: Path) -> None:
    groups = {kind: start_ranks(trained, WORLD_SIZE, kind, str(tmp_path / kind)) for kind in CASES}
    pids = [process.pid for ranks in groups.values() for process, _ in ranks]
    for kind, ranks in groups.items():
        culprit, _ = CASES[kind]
        reports = collect([started for rank, started in enumerate(ranks) if rank != culprit], timeout_s=40)
        ranks[culprit][0].join(5)
        assert ranks[culprit][0].exitcode == -signal.SIGKILL
        for each in reports:
            assert isinstance(each, Report), (kind, each)
            assert each.took_s < 2 * ABORT_S, (kind, each)
            assert f"lost rank {culprit}" in each.text and f"step {FATAL_STEP}" in each.text, (kind, each)
            assert f"the update of step {FATAL_STEP} broke off" in each.refusal, (kind, each)
        last = max(steps(tmp_path / kind / "checkpoints"))
        assert last == FATAL_STEP - 1
        weights = ddp.load(tmp_path / kind).weights
        found = {name: tensor_hash(value.reshape(-1)) for name, value in weights.items()}
        assert found == reports[0].weights == reports[1].weights
    left = [path for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in pids)]
    assert left == []
