"""What is lost while nobody waits comes out in the end, and set-up that blocks has a deadline.

Tests: ddp/comm/nccl.py.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import pytest
import torch
from gpu_standin import device
from ranks import RankFailed, collect, start_ranks
from torch import nn

import ddp
from ddp.comm import nccl
from ddp.errors import PeerLost

ABORT_S = 6.0


def lose_the_last_step() -> str:
    """A peer dies in the last step. The user takes the weights, and shuts down."""
    device.install(2)
    comm = ddp.init(device="standin", abort_s=ABORT_S)
    model = ddp.DistributedDataParallel(nn.Linear(20, 30).to(comm.device))
    for step in range(4):
        if step == 3:
            comm.barrier()  # what was enqueued has ended
            if comm.rank == 1:
                os._exit(3)
        model(torch.ones(8, 20, device=comm.device)).square().mean().backward()
    model.module.weight.detach().cpu()
    with pytest.raises(PeerLost) as lost:
        ddp.shutdown()
    return str(lost.value)


def make_a_subgroup() -> str:
    device.install(2)
    comm = ddp.init(device="standin", abort_s=ABORT_S)
    if comm.rank == 1:
        nccl.NcclTransport.among = lambda *_: os._exit(3)  # type: ignore[method-assign]
    with pytest.raises(PeerLost) as lost:
        comm.subgroup([0, 1])
    ddp.shutdown(failed="a rank is lost")
    return str(lost.value)


def connect_where_the_other_cannot() -> str:
    device.install(2)

    def refuse(*_: object) -> None:
        raise RuntimeError("NCCL error: out of memory")

    if os.environ["RANK"] == "1":
        nccl.ProcessGroupNCCL = type("Refusing", (), {"Options": nccl.ProcessGroupNCCL.Options, "__new__": refuse})
        with pytest.raises(RuntimeError, match="out of memory"):
            ddp.init(device="standin", abort_s=60)
        time.sleep(10)
    began_s = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        ddp.init(device="standin", abort_s=60)
    assert time.monotonic() - began_s < 30
    return str(lost.value)


def fail_while_a_collective_is_on_its_way() -> str:
    """Rank 0, for which rank 1 waits by other means than a collective; the GPU of rank 1 goes on then."""
    device.install(2)
    comm = ddp.init(device="standin", abort_s=60)
    x = torch.ones(3, device=comm.device)
    if comm.rank == 1:
        work = comm.all_reduce(x, async_op=True)
        with pytest.raises(PeerLost) as lost:
            comm.peers.wait_for_rank_zero("z")
        work.wait()
        x.cpu()
        return str(lost.value)
    time.sleep(1)
    ddp.shutdown(failed="ValueError: mine")
    return "lost rank 1"


CASES = {
    lose_the_last_step: "lost rank 1 .*: its process has ended",
    make_a_subgroup: "lost rank 1",
    connect_where_the_other_cannot: "lost rank 1 .*out of memory",
    fail_while_a_collective_is_on_its_way: "lost rank",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.quick(1)
def test_it_is_told(case: Callable[[], str]) -> None:
    which = 1 if case is fail_while_a_collective_is_on_its_way else 0
    started = start_ranks(case, 2)
    try:
        found = collect(started[which : which + 1], timeout_s=50)[0]
    finally:
        started[1 - which][0].kill()
        collect(started[1 - which : 2 - which], timeout_s=5)
    assert not isinstance(found, RankFailed), found
    assert re.search(CASES[case], found), found
