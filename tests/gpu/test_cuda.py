"""On a GPU: set-up with NCCL (one rank, which sends nothing), and Gloo with two ranks that share the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.transport.process_group import NcclTransport, StagedGlooTransport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def gradients(device: str) -> list[Tensor]:
    comm = ddp.init(device=device, abort_s=30)
    if device == "cuda":
        expected = NcclTransport if comm.world_size == 1 else StagedGlooTransport
        assert isinstance(comm._transport, expected)
    assert torch.equal(
        comm.all_reduce(torch.ones(1000, device=comm.device)).cpu(), torch.full((1000,), float(comm.world_size))
    )
    replica = ddp.DistributedDataParallel(net().to(comm.device), first_bucket_mb=0.0001, bucket_cap_mb=0.001)
    generator = torch.Generator().manual_seed(comm.rank)
    x, y = torch.randn(4, 1, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)
    for _ in range(3):
        replica.zero_grad()
        F.cross_entropy(replica(x.to(comm.device)), y.to(comm.device)).backward()
    result = [parameter.grad.cpu() for parameter in replica.parameters() if parameter.grad is not None]
    ddp.shutdown()
    return result


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_equal_those_on_the_cpu(world_size: int) -> None:
    on_gpu, on_cpu = run_ranks(gradients, world_size, "cuda"), run_ranks(gradients, world_size, "cpu")
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
