"""On one GPU: set-up with NCCL (one rank, which sends nothing), and Gloo with two ranks that share the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_standin import device
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.comm.nccl import NcclTransport
from ddp.comm.reduction import BLOCK, wire_format
from ddp.comm.transport.gloo import StagedGlooTransport
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import TrainSampler
from ddp.errors import ConfigError
from ddp.process import gpu


def begin(kind: str) -> None:
    """Puts the stand-in in the place of this machine's GPU, if it is to be."""
    if kind == "standin":
        device.install(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def gradients(kind: str) -> list[Tensor]:
    begin(kind)
    comm = ddp.init(device=kind, abort_s=30)
    if kind != "cpu":
        expected = NcclTransport if comm.world_size == 1 else StagedGlooTransport
        assert isinstance(comm._collectives.links.transport, expected)
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


def batch_norm_over_all_ranks(kind: str, layer: str) -> list[Tensor]:
    """Ours on both devices; torch's, which takes CUDA alone, inside our wrapper."""
    begin(kind)
    comm = ddp.init(device=kind, abort_s=30)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))
    convert = ddp.SyncBatchNorm.convert if layer == "ours" else nn.SyncBatchNorm.convert_sync_batchnorm
    replica = ddp.DistributedDataParallel(convert(plain.to(comm.device)))
    x = torch.randn(3 + comm.rank, 1, 8, 8, generator=torch.Generator().manual_seed(comm.rank))
    replica(x.to(comm.device)).square().sum().backward()
    values = [p.grad.cpu() for p in replica.parameters()] + [b.float().cpu() for b in replica.buffers()]
    ddp.shutdown()
    return values


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.slow
def test_batch_norm_over_all_ranks_equals_the_cpu_s_and_torch_s(kind: str, world_size: int) -> None:
    reference = run_ranks(batch_norm_over_all_ranks, world_size, "cpu", "ours")
    for layer in ("ours", "torch's") if kind == "cuda" else ("ours",):
        for mine, theirs in zip(run_ranks(batch_norm_over_all_ranks, world_size, kind, layer), reference, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def overlap_in_a_trace(kind: str, width: int) -> float:
    """Share of the time of the buckets' ranges, from launch to done, that lies before backward's end."""
    begin(kind)
    comm = ddp.init(device=kind, abort_s=30)
    deep = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).to(comm.device)
    cap_mb = 4 * width**2 / 2**20
    replica = ddp.DistributedDataParallel(deep, bucket_cap_mb=cap_mb, first_bucket_mb=cap_mb)
    x = torch.randn(256, width, device=comm.device)
    for _ in range(3):
        replica(x).sum().backward()
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=all_threads) as profile:
        replica(x).sum().backward()
        gpu.cuda.synchronize()
    ranges = {event.key for event in profile.key_averages() if event.key.startswith("ddp: bucket")}
    assert ranges == {f"ddp: {bucket.label}" for bucket in replica.reducer.buckets}
    overlap: float = replica.logging_data()["overlap"]
    ddp.shutdown()
    return overlap


def test_backward_hides_some_of_the_reductions(kind: str) -> None:
    overlaps = run_ranks(overlap_in_a_trace, 2, kind, 2048 if kind == "cuda" else 64)
    assert kind == "standin" or all(overlap > 0.2 for overlap in overlaps)  # commands of the stand-in take no time


def a_model_on_two_devices(kind: str) -> None:
    """One layer on the CPU, one on the GPU; its gradients go the way of the communicator's device."""
    begin(kind)
    comm = ddp.init(device=kind, abort_s=30)

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = nn.Linear(4, 4), nn.Linear(4, 2).to(comm.device)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.far(self.near(x).to(comm.device))
            return result

    replica = ddp.BucketedDataParallel(Split(), comm=comm)
    replica(torch.randn(3, 4) + comm.rank).sum().backward()
    replica.verify_replicas(also=lambda: [(n, p.grad) for n, p in replica.named_parameters()])
    ddp.shutdown()


def test_a_model_on_two_devices(kind: str) -> None:
    run_ranks(a_model_on_two_devices, 2, kind)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.quick(1)
def test_gradients_equal_those_on_the_cpu(kind: str, world_size: int) -> None:
    on_gpu, on_cpu = run_ranks(gradients, world_size, kind), run_ranks(gradients, world_size, "cpu")
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def each_model_where_it_is(kind: str) -> None:
    """README's "From Python", and then a model on the GPU in the same session."""
    begin(kind)
    comm = ddp.init(abort_s=30)
    assert comm.device.type == "cpu"
    for where in ("cpu", f"{kind}:0"):
        model = ddp.DistributedDataParallel(nn.Linear(4, 1).to(where))
        assert model.comm.device == torch.device(where)
        model(torch.full((8, 4), float(comm.rank), device=where)).sum().backward()
        model.verify_replicas(also=lambda model=model: [(n, p.grad) for n, p in model.named_parameters()])
    assert comm.all_reduce(torch.ones(1)).item() == comm.world_size
    with pytest.raises(ConfigError, match=f"on {kind}:0, and this communicator's are on cpu"):
        comm.all_reduce(torch.ones(1, device=kind))
    assert ddp.init(device=kind).all_reduce(torch.ones(1, device=kind)).item() == comm.world_size
    ddp.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_device_is_that_of_the_model(kind: str, world_size: int) -> None:
    run_ranks(each_model_where_it_is, world_size, kind)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((100_000,), float(index))}


def batches_copied_ahead(kind: str) -> None:
    begin(kind)
    for num_workers in (0, 1) if kind == "cuda" else (0,):  # a rank's process may have no children
        sampler = TrainSampler(100, global_batch=4, rank=0, world_size=1)
        loader = TrainLoader(Rows(), sampler, num_workers=num_workers, device=torch.device(kind))
        sums, expected = [], []
        for plan, batches in loader.epoch():
            for micro, batch in zip(plan.micros, batches, strict=True):
                gpu.cuda._sleep(5_000_000)  # so that the copies of the next batches go on meanwhile
                sums.append(batch["x"].mean(dim=1))
                expected.append(torch.tensor(micro.indices, dtype=torch.float32))
        loader.close()
        assert torch.equal(torch.cat(sums).cpu(), torch.cat(expected))


def test_batches_are_copied_ahead_and_whole(kind: str) -> None:
    if kind == "cuda":
        batches_copied_ahead(kind)
    else:
        run_ranks(batches_copied_ahead, 1, kind)


def wires_on_the_device(kind: str) -> None:
    begin(kind)
    peaks = torch.rand(1 << 14, 1, generator=torch.Generator().manual_seed(0)) + 1  # of one scale in 25, a rounded
    blocks = torch.cat([peaks, torch.linspace(-1, 1, BLOCK - 1).expand(len(peaks), -1)], dim=1)  # 1/127 loses a bit
    numbers = torch.cat([blocks.flatten(), torch.linspace(-1e-30, 1e-30, 77), torch.zeros(23)])
    for name in ("bf16", "fp16", "int8", "int8_stochastic"):
        wire, found = wire_format(name), []
        for where in ("cpu", kind):
            there = numbers.to(where, copy=True)
            once, again = (torch.zeros(wire.length(len(there)), dtype=wire.dtype, device=where) for _ in range(2))
            wire.encode(there, once)
            wire.decode(once, there)
            wire.encode(there, again)
            assert torch.equal(once, again), f"{name} on {where}"
            wire.add(again, there)
            found.append(there.cpu())
        off = (found[0] - found[1]).abs().max().item()
        assert off <= 2 * 2 / 127 * (1 + 1e-6), f"{name}: {off}"  # twice a whole number that was rounded elsewhere


def test_wires_change_no_bit_when_they_round_again(kind: str) -> None:
    run_ranks(wires_on_the_device, 1, kind)
