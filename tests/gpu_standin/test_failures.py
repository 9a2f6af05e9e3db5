"""A rank that fails, dies, stops or does not come is named by the others within the deadline, though no host waits."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
from gpu_standin import cuda, device, nccl
from ranks import RankFailed, collect, start_ranks
from torch import nn

import ddp
from ddp.errors import CommunicatorBroken, PeerLost

ABORT_S = 8.0


def train(how: str) -> tuple[float, str]:
    """Returns how long rank 0 took to notice, and what it was told."""
    device.install(2)
    comm = ddp.init(device="standin", abort_s=ABORT_S)
    model = ddp.DistributedDataParallel(nn.Linear(20, 30).to(comm.device))
    x, began_s = torch.randn(8, 20, device=comm.device), 0.0
    with pytest.raises(PeerLost) as lost:
        for step in range(10_000):
            if step == 3:
                began_s = time.monotonic()
                if how.startswith("nobody comes"):
                    cuda.synchronize()  # so that the step before has ended
                    nccl.FAULTS.peer_never_comes = True
                elif how == "NCCL fails" and comm.rank == 0:
                    nccl.FAULTS.error = "unhandled system error"
                elif comm.rank == 1:
                    be_lost(how)
            loss = model(x).square().mean()
            loss.backward()
            if how in ("dies", "nobody comes"):
                loss.item()
            elif how == "nobody comes, and that was all" and step == 3:
                ddp.shutdown()
    took_s = time.monotonic() - began_s
    with pytest.raises(CommunicatorBroken):
        comm.all_reduce(torch.ones(3, device=comm.device))
    ddp.shutdown(failed="it was told")
    return took_s, str(lost.value)


def be_lost(how: str) -> None:
    match how:
        case "dies":
            os._exit(3)
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleeps":
            time.sleep(3 * ABORT_S)
        case "raises":
            ddp.shutdown(failed="ValueError: mine")
            os._exit(1)


TOGETHER = [  # they wait, and too many at once would be late
    {
        "dies": "lost rank 1 .*: its process has ended",
        "stops": "lost rank 1 .*: it shows no sign of life for 8 s",
        "nobody comes": "the GPU has waited for 8 s",
    },
    {
        "raises": "lost rank 1 .*: it failed: ValueError: mine",
        "sleeps": "lost rank 1 .*: it is alive, but has not reached this collective",
        "nobody comes, and that was all": "the GPU has waited for 8 s",
    "NCCL fails": "unhandled system error",
    },
]


@pytest.mark.parametrize("cases", TOGETHER, ids=", ".join)
@pytest.mark.quick(1)
def test_who_is_missing_is_named_within_the_deadline(cases: dict[str, str]) -> None:
    started = {how: start_ranks(train, 2, how) for how in cases}
    try:
        results = {how: collect(ranks[:1], timeout_s=50)[0] for how, ranks in started.items()}
    finally:
        for ranks in started.values():
            ranks[1][0].kill()
            collect(ranks[1:], timeout_s=5)
    for how, result in results.items():
        assert not isinstance(result, RankFailed), f"{how}: {result}"
        took_s, told = result
        assert re.search(cases[how], told), f"{how}: {told}"
        assert took_s < 2 * ABORT_S + 4, how
