"""A rank that is lost in the middle of training: every survivor's backward ends in time and says whom it waited for.

    killed, stopped, stuck, failed      in its forward, so that the others wait in the first bucket
    killed in backward                  after some buckets: the others wait in a later one
    under a communication hook          the others wait for the hook's future

Several at once: ranks that wait cost no time.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import NamedTuple

import pytest
import torch
from ranks import collect, start_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddp
from ddp.errors import CommunicatorBroken, PeerLost

WARN_S, ABORT_S = 1.0, 3.5
WORLD_SIZE, CULPRIT, FATAL_STEP = 3, 1, 3
TINY = {"first_bucket_mb": 1e-6, "bucket_cap_mb": 1e-6}  # a bucket for every parameter


class Report(NamedTuple):
    """How a survivor fared."""

    text: str
    took_s: float  # from the beginning of the step in which the culprit was lost
    again: str  # what a second step says
    other: str  # what another collective says
    num_threads: int  # those left that would keep the process from ending


class Fragile(nn.Module):
    """The layer in which the culprit is lost."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.is_armed = how, False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_armed and self.how.endswith("in backward"):
            x.register_hook(lambda _: misbehave(self.how))
        elif self.is_armed:
            misbehave(self.how)
        return x


def misbehave(how: str) -> None:
    if how.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif how.startswith("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how.startswith("stuck"):
        blocked_by_the_user()
    else:
        raise ValueError("bad pixel")


def blocked_by_the_user() -> None:
    threading.Event().wait(60)  # nobody sets it


def train_until_lost(how: str, overlap: bool) -> Report:
    comm = ddp.init(warn_s=WARN_S, abort_s=ABORT_S)
    torch.manual_seed(0)
    fragile = Fragile(how)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), fragile, nn.Linear(8, 8), nn.Linear(8, 4))
    replica = ddp.DistributedDataParallel(net, overlap=overlap, **TINY)
    if "hook" in how:
        replica.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(1, FATAL_STEP + 1):
        fragile.is_armed = comm.rank == CULPRIT and step == FATAL_STEP
        start_s = time.monotonic()
        try:
            replica.zero_grad()
            replica(torch.randn(4, 8)).square().mean().backward()
        except PeerLost as error:
            return report(comm, replica, error, time.monotonic() - start_s)
        except Exception as error:
            ddp.shutdown(failed=f"{type(error).__name__}: {error}")
            raise
    return Report("nothing happened", 0.0, "", "", 0)


def report(comm: ddp.Communicator, replica: nn.Module, error: PeerLost, took_s: float) -> Report:
    with pytest.raises(RuntimeError) as again:
        replica(torch.randn(4, 8)).sum().backward()
    with pytest.raises(CommunicatorBroken) as broken:
        comm.barrier()
    ddp.shutdown(failed=str(error))
    threads = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    return Report(str(error), took_s, str(again.value), str(broken.value), len(threads))


class Case(NamedTuple):
    how: str
    overlap: bool
    bucket: int  # the last one that survivors can send without the culprit
    says: str  # some survivor


SILENT = "it shows no sign of life"
CASES = {
    "silent": [Case(how, overlap, 0, SILENT) for how in ("killed", "stopped") for overlap in (False, True)],
    "alive": [
        Case(how, overlap, 0, says)
        for how, says in (("stuck", "blocked_by_the_user"), ("failed", "it failed: ValueError: bad pixel"))
        for overlap in (False, True)
    ],
    "later": [
        Case("killed in backward", False, 4, SILENT),
        Case("killed in backward", True, 4, SILENT),
        Case("killed under a hook", False, 0, "communication hook allreduce_hook"),
        Case("stopped under a hook", False, 0, "communication hook allreduce_hook"),
    ],
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
@pytest.mark.quick(1)
def test_survivors_end_in_time_and_name_the_lost_rank_the_step_and_the_bucket(cases: list[Case]) -> None:
    groups = [(case, start_ranks(train_until_lost, WORLD_SIZE, case.how, case.overlap)) for case in cases]
    try:
        for case, ranks in groups:
            survivors = [started for rank, started in enumerate(ranks) if rank != CULPRIT]
            check(case, collect(survivors, timeout_s=30))
            assert [process.exitcode for process, _ in survivors] == [0, 0]
    finally:
        for _, ranks in groups:
            ranks[CULPRIT][0].kill()


def check(case: Case, reports: list[Report]) -> None:
    for each in reports:
        assert isinstance(each, Report), f"{case}: {each}"
        assert each.took_s < 2 * ABORT_S, (case, each)
        assert f"lost rank {CULPRIT}" in each.text, (case, each)
        named = re.search(rf"step {FATAL_STEP}, bucket (\d) \(1 gradients: \d\.(weight|bias)\)", each.text)
        assert named, (case, each)
        if case.overlap:  # buckets before it may still be on their way
            assert int(named[1]) <= case.bucket, (case, each)
        else:
            assert int(named[1]) == case.bucket, (case, each)
        assert f"the last backward through this replica broke off (step {FATAL_STEP})" in each.again, (case, each)
        assert f"out of use since: lost rank {CULPRIT}" in each.other, (case, each)
        assert each.num_threads == 0, (case, each)
    assert any(case.says in each.text for each in reports), (case, reports)
