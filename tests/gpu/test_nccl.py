"""Two ranks of NCCL on one GPU, which NCCL allows if it takes them for two hosts.

Tests: ddp/comm/nccl.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from gpu_standin import device
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore

import ddp
from ddp.collectives.catalog import ALL_REDUCE
from ddp.comm import nccl
from ddp.comm.communicator import Communicator
from ddp.comm.host_links import Settings
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import CommunicatorBroken, PeerLost
from ddp.process import gpu

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.complex64),
]


def connected(kind: str, abort_s: float = 30.0) -> Communicator:
    if kind == "standin":
        device.install(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["NCCL_HOSTID"] = f"host of rank {rank}"
    store, where = TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=False), torch.device(kind, 0)
    watchdog = Watchdog(store, rank, world_size, generation=0, warn_s=10, abort_s=abort_s)
    transport = nccl.NcclTransport(PrefixStore("nccl", store), rank, world_size, where)
    return Communicator(transport, Settings(device=where, abort_s=abort_s), watchdog=watchdog)


def every_way_and_type(kind: str) -> None:
    comm = connected(kind)
    for algorithm in ALL_REDUCE:
        for numel in (1, 1001, 1 << 20):
            total = comm.all_reduce(torch.full((numel,), comm.rank + 1.0, device=comm.device), algorithm=algorithm)
            assert torch.equal(total.cpu(), torch.full((numel,), 3.0)), algorithm
    for dtype in DTYPES:
        mine = torch.full((comm.rank + 1,), comm.rank, device=comm.device).to(dtype)
        assert [each.cpu().tolist() for each in comm.all_gather(mine)] == [
            torch.full((rank + 1,), rank).to(dtype).tolist() for rank in range(2)
        ]
    side = gpu.cuda.Stream()
    with gpu.cuda.stream(side):
        works = [comm.all_reduce(torch.full((1000,), float(k), device=comm.device), async_op=True) for k in range(20)]
        assert [work.wait()[0].item() for work in works] == [2.0 * k for k in range(20)]
    message = torch.full((100,), float(comm.rank), device=comm.device)
    if comm.rank == 0:
        comm.send(message, 1)
    else:
        assert comm.recv(message, 0)[0].item() == 0
    assert comm.agree_any(comm.rank == 1)
    comm.barrier()
    comm.close()


def gradients(kind: str, make: Callable[[nn.Module, Communicator], nn.Module]) -> list[Tensor]:
    comm = connected(kind)
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.ReLU(), nn.BatchNorm1d(512), *[nn.Linear(512, 512) for _ in range(6)]]
    model = ddp.SyncBatchNorm.convert(nn.Sequential(*layers), comm=comm).to(comm.device)
    replica = make(model, comm)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(4):
        optimizer.zero_grad()
        replica(torch.randn(16, 512, generator=generator).to(comm.device)).square().mean().backward()
        optimizer.step()
    result = [parameter.detach().cpu() for parameter in model.parameters()]
    comm.close()
    return result


def bucketed(model: nn.Module, comm: Communicator) -> nn.Module:
    return ddp.BucketedDataParallel(model, bucket_cap_mb=1, comm=comm)


def naive(model: nn.Module, comm: Communicator) -> nn.Module:
    return ddp.NaiveDataParallel(model, comm=comm)


def lose_the_other(kind: str, abort_s: float) -> str:
    comm = connected(kind, abort_s)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(2 * abort_s)
        return ""
    began_s = time.monotonic()
    with pytest.raises((PeerLost, CommunicatorBroken)) as lost:
        comm.all_reduce(torch.ones(10, device=comm.device))
        comm.barrier()
    assert time.monotonic() - began_s < 2 * abort_s
    with pytest.raises(CommunicatorBroken):
        comm.all_reduce(torch.ones(10, device=comm.device))
    return str(lost.value)


@pytest.fixture
def has_nccl(kind: str) -> None:
    if kind == "cuda" and nccl.ProcessGroupNCCL is None:
        pytest.skip("needs torch with NCCL")


@pytest.mark.usefixtures("has_nccl")
@pytest.mark.slow
def test_every_way_and_type(kind: str) -> None:
    run_ranks(every_way_and_type, 2, kind)


@pytest.mark.usefixtures("has_nccl")
@pytest.mark.slow
def test_buckets_beside_synchronised_layers_equal_one_message_for_each_gradient(kind: str) -> None:
    one, other = run_ranks(gradients, 2, kind, bucketed)
    naively, _ = run_ranks(gradients, 2, kind, naive)
    assert all(map(torch.equal, one, other))
    for a, b in zip(one, naively, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("has_nccl")
@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_within_the_deadline(kind: str) -> None:
    assert "lost rank 1" in run_ranks(lose_the_other, 2, kind, 5.0 if kind == "cuda" else 2.0)[0]
