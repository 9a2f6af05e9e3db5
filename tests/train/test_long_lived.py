"""Runs one after another in processes that live on: a notebook's kernel, a worker of Dask, an actor, a service."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import ddp
from ddp.comm.meeting.place import FIRST_PORT, NUM_PORTS
from ddp.comm.watch import watchdog


def train(folder: Path, *, fails: bool = False) -> tuple[int, int]:
    """One run, as a program would have it."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("scripted")
        return torch.nn.functional.mse_loss(outputs, targets)

    model, data = torch.nn.Linear(2, 1), (torch.arange(16.0).view(8, 2), torch.ones(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    keeps = ddp.Folder(folder, progress=False, curves=False)
    try:
        comm = ddp.init(abort_s=20)
        ddp.fit(model, data, optimizer, loss=loss, global_batch=4, epochs=1, folder=keeps)
        return comm.rank, comm.world_size
    finally:
        ddp.shutdown()


def held() -> Counter[str]:
    """Everything that this process holds: descriptors, threads, mappings of files and of shared memory; by kind."""
    gc.collect()
    found = Counter({"threads": len(list(Path("/proc/self/task").iterdir()))})
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            found[f"descriptor of {re.sub(r'[0-9]+', '', str(descriptor.readlink()))}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, rights, _, _, _, *path = line.split(maxsplit=5)
        if path or rights.endswith("s"):
            found[f"mapping {rights} {''.join(path)}"] += 1
    return found


def settled(limit: Counter[str] | None = None) -> Counter[str]:
    """What is held once threads that were told to end have done so: if all is well, nothing beyond the limit."""
    until_s = time.monotonic() + 5
    while (found := held()) and limit is not None and found - limit and time.monotonic() < until_s:
        time.sleep(0.05)
    return found


def rounds(port: int, folder: Path, num_rounds: int) -> tuple[Counter[str], Counter[str], bool]:
    """Rounds of runs, each another way; returns what was held after the first one, and after the last one."""
    watchdog.INTERVAL_S, watchdog.STALE_S, watchdog.SEARCH_S = 0.05, 0.3, 0.3  # until a lost rank is given up
    first = int(os.environ["RANK"])
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        del os.environ[name]  # so that the ranks count who is on this host, and rank 0 serves the store
    paths = (folder / f"{number}-{first}" for number in range(sys.maxsize))

    def as_rank(rank: int, port: int, *, fails: bool = False) -> tuple[int, int]:
        os.environ.update(RANK=str(rank), MASTER_PORT=str(port), MASTER_ADDR="127.0.0.1", WORLD_SIZE="2")
        return train(next(paths), fails=fails)

    def alone() -> tuple[int, int]:
        os.environ.update(RANK="0", WORLD_SIZE="1")
        return train(next(paths))

    counts: list[Counter[str]] = []
    for _ in range(num_rounds):
        assert as_rank(first, port) == (first, 2)
        assert as_rank(1 - first, port) == (1 - first, 2)
        assert alone() == (0, 1)
        with pytest.raises((RuntimeError, ddp.PeerLost)):
            as_rank(first, port, fails=first == 1)
        assert as_rank(first, port + 1) == (first, 2)
        counts.append(settled(counts[0] if counts else None))
    return counts[0], counts[-1], sys.excepthook is sys.__excepthook__


@pytest.mark.slow
def test_runs_one_after_another_leave_nothing_in_the_process(tmp_path: Path) -> None:
    """After success, an error, with other ranks, another world size, another port."""
    port = random.randrange(FIRST_PORT, FIRST_PORT + NUM_PORTS)
    for after_first, after_last, is_as_before in run_ranks(rounds, 2, port, tmp_path, 2):
        assert after_last - after_first == Counter()
        assert is_as_before, "torch's hook for exceptions, one for each session"
