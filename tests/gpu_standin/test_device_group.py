"""In the memory of GPUs, sums have the bits of the host's memory, no host waits, and who stays away is named."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import pytest
import torch
from gpu_standin import cuda, device, symmetric_memory
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.collectives.schedule import offsets
from ddp.comm.communicator import Communicator
from ddp.comm.device_group import DeviceGroup
from ddp.comm.reduction import OnDevice
from ddp.comm.session import communicator_of
from ddp.errors import ConfigError, PeerLost
from ddp.process.log import log

LENGTHS = (1, 3, 5, 2049)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def begun(share: bool = False, **how: Any) -> Communicator:
    """A communicator of ranks with a GPU each, or of ranks that share one."""
    device.install(1 if share else int(os.environ["WORLD_SIZE"]))
    symmetric_memory.install()
    return ddp.init(device="standin", algorithm="shared_memory", **{"abort_s": 30, **how})


def values(comm: Communicator, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * comm.rank + numel)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 20).to(dtype)


class Given(OnDevice):
    def __init__(self, number: int) -> None:
        self._number = torch.full((), float(number), dtype=torch.float64, device="standin")

    def __int__(self) -> int:
        raise AssertionError("the host must not wait for it")

    def on_device(self) -> Tensor:
        return self._number


# ---- numbers


def all_verbs(comm: Communicator, flat: Tensor, divisor: Any) -> list[Tensor]:
    """The results of every verb that goes through memory, on one tensor."""
    given, found, n = flat.clone(), [], comm.world_size
    bounds = [0, *(flat.numel() * (rank + 1) // (2 * n) for rank in range(n - 1)), flat.numel()]

    def took(result: Tensor) -> None:
        found.append(result.clone())
        flat.copy_(given)

    for op in ("sum", "max", "product"):
        took(comm.all_reduce(flat, op))
    if flat.is_floating_point():
        took(comm.all_reduce(flat, "mean"))
        took(comm.all_reduce(flat, divide_by=divisor))
        took(comm.reduce_scatter_(flat, bounds, divide_by=4))
    took(comm.all_reduce(flat[flat.numel() // 2 :], async_op=True).wait())
    took(comm.reduce_scatter_(flat, bounds))
    took(comm.all_gather_(flat, bounds))
    took(comm.broadcast(flat, n - 1))
    return found


def bits(share: bool) -> None:
    comm = begun(share)
    assert isinstance(comm._collectives.device_group, DeviceGroup)
    assert comm.enqueues is not share
    cpu = communicator_of(torch.distributed.group.WORLD, torch.device("cpu"))
    assert cpu._collectives.group is not None
    for dtype in DTYPES:
        whole, like = comm.allocate(5000, dtype), cpu.allocate(5000, dtype)
        assert not whole.any()
        for numel in LENGTHS:
            given, place = values(comm, numel, dtype), slice(numel, 2 * numel)
            ours = all_verbs(comm, whole[place].copy_(given), Given(3))
            theirs = all_verbs(cpu, like[place].copy_(given), 3)
            for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                assert torch.equal(one.cpu(), other), (dtype, numel, number)
        comm.free(whole)
    with pytest.raises(ConfigError, match="free takes a tensor that allocate has given, once"):
        comm.free(whole)
    late = comm.allocate(10, torch.float32)
    ddp.shutdown()
    comm.free(late)  # as a finalizer does, at any time
    assert late.add_(1).tolist() == [1.0] * 10


@pytest.mark.parametrize(("size", "share"), [(2, False), (3, False), (4, False), (2, True)])
def test_sums_have_the_bits_of_the_host_s_memory(size: int, share: bool) -> None:
    run_ranks(bits, size, share)


def what_is_not_allocated() -> str:
    comm = begun(order="canonical")
    n = comm.world_size
    total = [n * (n + 1) / 2] * 10
    assert comm.all_reduce(torch.full((10,), comm.rank + 1.0, device=comm.device)).tolist() == total
    assert not comm.allocate(0, torch.float32).numel()
    group = comm.subgroup([0, 1])
    assert group is None or group.settings.algorithm == "auto"
    symmetric_memory.FAULTS.no_memory = comm.rank == 1
    flat = comm.allocate(10, torch.float32).fill_(comm.rank + 1)
    assert comm.plan.route(flat, "auto").name != "shared_memory"
    assert comm.all_reduce(flat).tolist() == total
    comm.free(flat)
    symmetric_memory.FAULTS.no_memory = False
    assert comm.plan.route(comm.allocate(10, torch.float32), "auto").name == "shared_memory"
    return comm.plan.explain(1 << 10)


def test_what_is_not_allocated_goes_another_way() -> None:
    for table in run_ranks(what_is_not_allocated, 3):
        assert "auto takes shared_memory" in table


# ---- commands and their order


def commands() -> dict[str, int]:
    comm = begun()
    flat = comm.allocate(25 << 18, torch.float32)
    device.reset()
    comm.all_reduce(flat, "mean")
    cuda.synchronize()
    return device.commands()


def test_commands_of_25_mib() -> None:
    for found in run_ranks(commands, 2):
        assert found == {"barrier": 2, "add": 1, "mul": 1, "copy_": 1}


def one_rank_is_late() -> None:
    """Nobody reads what is not there yet, overwrites what is still read, or waits on the host."""
    comm = begun()
    flat, bounds = comm.allocate(1000, torch.float32), offsets(1000, comm.world_size)
    everyone = range(1, comm.world_size + 1)
    device.reset()
    device.detect()
    results = []
    for verb in ("all_reduce", "reduce_scatter_", "all_gather_"):
        if comm.rank == 1:
            cuda._sleep(200_000_000)
        flat.fill_(comm.rank + 1)
        result = getattr(comm, verb)(flat, *[bounds] * (verb != "all_reduce"))
        results.append(torch.empty(result.numel(), device=comm.device).copy_(result))
        flat.fill_(-1)
    assert not device.host_waits() and not device.races(), (device.host_waits(), device.races())
    device.detect(False)
    reduced, mine, gathered = (result.tolist() for result in results)
    assert reduced == [sum(everyone)] * 1000 and set(mine) == {sum(everyone)}
    assert gathered == [rank for rank in everyone for _ in range(bounds[rank] - bounds[rank - 1])]


def test_one_rank_is_late() -> None:
    run_ranks(one_rank_is_late, 3)


def steps() -> None:
    comm = begun()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 7)).to(comm.device)
    alone, replica = copy.deepcopy(net), ddp.DistributedDataParallel(net, bucket_cap_mb=0.03)
    everyone = torch.randn(comm.world_size * 8, 40, device=comm.device)
    x = everyone.view(comm.world_size, 8, 40)[comm.rank]
    for _ in range(3):
        replica.zero_grad()
        device.reset()
        device.detect()
        replica(x).square().mean().backward()
        found = device.commands(), device.host_waits(), device.races()
        device.detect(False)
    assert found[0]["barrier"] and "nccl batch" not in found[0], found[0]
    assert not found[1] and not found[2], found
    alone(everyone).square().mean().backward()
    for one, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_backward_waits_for_nothing_on_the_host_and_needs_no_nccl() -> None:
    run_ranks(steps, 2)


# ---- when it fails


def a_rank_stays_away(share: bool) -> str:
    comm = begun(share, abort_s=2)
    store = torch.distributed.distributed_c10d._get_default_store()
    flat, n = comm.allocate(1000, torch.float32), comm.world_size
    comm.all_reduce(flat)
    if comm.rank == n - 1:
        while not store.check([f"over/{rank}" for rank in range(n - 1)]):
            time.sleep(0.01)
        return ""
    begin_s = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        for _ in range(5):  # all are enqueued, and the GPU must get through all
            comm.all_reduce(flat)
        comm.to_host(flat.sum()).read()
    assert 1.9 < time.monotonic() - begin_s < 15  # the deadline, and time to find out who it was
    cuda.synchronize()
    store.set(f"over/{comm.rank}", "")
    return str(caught.value)


@pytest.mark.parametrize(("size", "share"), [(3, False), (2, True)])
def test_a_rank_that_stays_away_is_named_within_the_deadline(size: int, share: bool) -> None:
    *found, _ = run_ranks(a_rank_stays_away, size, share)
    assert all(f"rank {size - 1}" in said and "all_reduce" in said for said in found), found


def refused(rank: int, fault: str, value: Any) -> list[str]:
    if rank in (-1, int(os.environ["RANK"])):
        setattr(symmetric_memory.FAULTS, fault, value)
    warnings: list[str] = []
    log.addFilter(lambda record: bool(warnings.append(record.getMessage())))
    with pytest.raises(ConfigError, match=r"algorithm='shared_memory' is not possible here\. Choose one of auto, ring"):
        begun(abort_s=3)
    return warnings


REFUSED = [
    (1, "backend", "NVSHMEM", "rank 1: torch's symmetric memory is NVSHMEM, and not CUDA"),
    (1, "no_memory", True, "rank 1: 2 int64: CUDA out of memory"),
    (-1, "rendezvous_fails", True, "rank 0: CUDA driver error: invalid device ordinal; rank 1: CUDA driver error"),
    (1, "no_reach", True, "rank 1: an all-reduce in the others' memory comes out wrong"),
    (1, "no_signals", True, "rank 0: transfer with rank 1 timed out: the GPU has waited for 1.5 s"),
]


@pytest.mark.parametrize(("rank", "fault", "value", "said"), REFUSED)
def test_where_it_does_not_work_all_ranks_know(rank: int, fault: str, value: Any, said: str) -> None:
    (warning,), others = run_ranks(refused, 2, rank, fault, value)
    assert warning.startswith("collectives do not go through the memory of the GPUs: ") and said in warning
    assert not others
