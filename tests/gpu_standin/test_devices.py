"""Each way into the package works on the GPU of the model, by NCCL or by Gloo, and leaves the current one as it is."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_standin import cuda, device
from ranks import run_ranks
from torch import nn

import ddp
from ddp.comm.nccl import NcclTransport
from ddp.comm.session import current
from ddp.comm.transport.gloo import StagedGlooTransport
from ddp.errors import ConfigError


def transport_of(comm: ddp.Communicator) -> type[Any]:
    return type(comm._collectives.links.transport)


def take_the_only_one_that_is_shown() -> tuple[str, bool, list[float]]:
    """As under `srun --gpus-per-task=1`: two ranks on this host, and each sees one GPU, its first."""
    device.install(1, first_device=int(os.environ["RANK"]))
    comm = ddp.init(device="auto", abort_s=20)
    total = comm.all_reduce(torch.ones(3, device="standin")).tolist()
    found = str(comm.device), transport_of(comm) is NcclTransport, total
    ddp.shutdown()
    return found


def test_one_visible_gpu_for_each_rank_is_one_of_its_own() -> None:
    assert run_ranks(take_the_only_one_that_is_shown, 2) == [("standin:0", True, [2.0] * 3)] * 2


def layers(*devices: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2, 2).to(each) for each in devices])


def go_in_by(way: str, own: torch.device) -> ddp.Communicator:
    """Begins with a model on a device; returns the communicator by which it has met the other ranks."""
    model, x = layers(own), torch.ones(4, 2)
    match way:
        case "fit":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = x, torch.zeros(4, dtype=torch.long)
            ddp.fit(model, data, optimizer, loss=F.cross_entropy, global_batch=4, max_steps=2, folder=None)
        case "evaluate":
            ddp.evaluate(model, (x, torch.zeros(4, dtype=torch.long)), loss=F.cross_entropy)
        case "predict":
            ddp.predict(model, x)
        case "SyncBatchNorm":
            ddp.SyncBatchNorm(2).to(own)(x.to(own))
        case "process_group":
            torch.distributed.init_process_group("gloo")
            ddp.DistributedDataParallel(model, process_group=torch.distributed.group.WORLD)(x.to(own)).sum().backward()
        case _:
            getattr(ddp, way)(model)(x.to(own)).sum().backward()
    assert next(model.parameters()).device == own
    return current(own)


WAYS = (
    *("DistributedDataParallel", "BucketedDataParallel", "NaiveDataParallel", "fit", "evaluate", "predict"),
    *("SyncBatchNorm", "process_group"),
)


def go_in_by_all_ways(shared: bool) -> list[tuple[str, str, bool, int]]:
    device.install(2)
    own = torch.device("standin", 1 if shared else 1 - int(os.environ["RANK"]))
    found = []
    for way in WAYS:
        comm = go_in_by(way, own)
        found.append((way, str(comm.device), transport_of(comm) is NcclTransport, cuda.current_device()))
        ddp.shutdown()
        if way == "process_group":
            torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.quick(1)
def test_all_ways_in_take_the_device_of_the_model_and_leave_the_current_one(shared: bool) -> None:
    by_rank = run_ranks(go_in_by_all_ways, 2, shared)
    for found, index in zip(by_rank, [1, 1] if shared else [1, 0], strict=True):
        assert found == [(way, f"standin:{index}", not shared, 0) for way in WAYS]


class OnTwoDevices(nn.Module):
    """Normalises on the second device, over all ranks."""

    def __init__(self, near: torch.device, far: torch.device) -> None:
        super().__init__()
        self.near, self.far = layers(near), layers(far)
        self.norm = ddp.SyncBatchNorm(2).to(far)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.far(self.near(x).to(self.norm.weight.device)))


def train_on_two_devices(kind: str) -> list[list[float]]:
    """The gradients of a model whose layers are on two GPUs, or all on the CPU."""
    near = far = torch.device("cpu")
    if kind != "cpu":
        device.install(4)
        first = 2 * int(os.environ["RANK"])
        near, far = torch.device("standin", first), torch.device("standin", first + 1)
    model = OnTwoDevices(near, far)
    replica = ddp.DistributedDataParallel(model)
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(replica.comm.rank))
    F.mse_loss(replica(x.to(near)), x.exp().to(far), reduction="sum").backward()
    gradients = [parameter.grad.cpu().flatten().tolist() for parameter in model.parameters()]  # type: ignore[union-attr]
    if kind != "cpu":
        assert transport_of(replica.comm) is NcclTransport
        with pytest.raises(ConfigError, match=f"on {far}, and this communicator's are on {near}: pass its .to"):
            replica.comm.all_reduce(torch.ones(3, device=far))
    ddp.shutdown()
    return gradients


def test_a_model_on_two_gpus_of_each_process_has_the_gradients_of_the_cpu() -> None:
    on_gpus, on_cpu = (run_ranks(train_on_two_devices, 2, kind) for kind in ("gpu", "cpu"))
    for ours, theirs in zip(on_gpus, on_cpu, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def share_one_by_order() -> tuple[bool, str]:
    device.install(1)
    with pytest.raises(ConfigError, match="but ranks 0 and 1 share a GPU; fix that, or use backend=gloo") as refused:
        ddp.init(device=0, backend="nccl", abort_s=20)
    comm = ddp.init(device="standin", abort_s=20)
    assert comm.all_reduce(torch.ones(3, device=comm.device)).tolist() == [2.0] * 3
    found = transport_of(comm) is StagedGlooTransport, str(refused.value)
    ddp.shutdown()
    return found


def test_ranks_that_share_a_gpu_are_refused_nccl_and_take_gloo() -> None:
    (by_gloo, said), other = run_ranks(share_one_by_order, 2)
    assert by_gloo and other == (True, said)
