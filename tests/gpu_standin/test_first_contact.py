"""A GPU that is late: whoever does not wait for it has other numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_standin import cuda, device
from ranks import run_cases, run_ranks
from torch import Tensor, nn

import ddp
from ddp.comm.communicator import Communicator
from ddp.errors import UnusedParameters

SLEEP = 4_000_000  # clock cycles: some 2 ms
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


class Late(nn.Module):
    """What comes before it is late on the GPU, in forward and in backward."""

    def forward(self, x: Tensor) -> Tensor:
        cuda._sleep(SLEEP)
        y = x.clone()
        if y.requires_grad:
            y.register_hook(lambda _: cuda._sleep(SLEEP))
        return y


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.here, self.side = net(), net(), cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        current = cuda.current_stream()
        self.side.wait_stream(current)
        with cuda.stream(self.side):
            there = self.there(x)
        here = self.here(x)
        current.wait_stream(self.side)
        return here + there


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), Late(), nn.Linear(256, 256), Late(), nn.ReLU(), nn.Linear(256, 8)]
    return nn.Sequential(*layers).to("standin")


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank)).to("standin")


def collectives_wait_for_what_they_read(comm: Communicator) -> None:
    for numel in (1, 9, 10_000):
        for dtype in DTYPES:
            numbers = torch.zeros(numel, dtype=dtype, device=comm.device)
            cuda._sleep(SLEEP)
            numbers.fill_(1)
            total = comm.all_reduce(numbers, async_op=True).wait().to("cpu", torch.complex128)
            assert (total == (1 if dtype == torch.bool else comm.world_size)).all(), (dtype, numel)
    for wire in ("bf16", "int8"):
        cuda._sleep(SLEEP)
        total = comm.all_reduce(torch.ones(5000, device=comm.device), wire=wire)
        assert (total - comm.world_size).abs().max() < 0.1
    own = torch.zeros(2, device=comm.device)
    cuda._sleep(SLEEP)
    own.fill_(comm.rank)
    everyone = [each.tolist() for each in comm.all_gather(own)]
    assert everyone == [[float(rank)] * 2 for rank in range(comm.world_size)]


def two_streams_share_no_scratch(comm: Communicator) -> None:
    one, side = torch.ones(1000, device=comm.device), cuda.Stream()
    other = one * 50
    side.wait_stream(cuda.current_stream())
    cuda._sleep(SLEEP)
    comm.all_reduce(one, algorithm="recursive_doubling")
    with cuda.stream(side):
        comm.all_reduce(other, algorithm="recursive_doubling")
    cuda.current_stream().wait_stream(side)
    assert one.eq(2).all() and other.eq(100).all()


def gradients_are_the_mean(comm: Communicator) -> None:
    """Against the mean over all ranks, computed here without any communication."""
    small = {"bucket_cap_mb": 0.1, "first_bucket_mb": 0.1}
    replicas: list[tuple[nn.Module, nn.Module]] = [
        (ddp.DistributedDataParallel(net(), **small), net()),
        (ddp.DistributedDataParallel(net(), overlap=False, **small), net()),
        (ddp.DistributedDataParallel(TwoStreams(), bucket_cap_mb=0.3, first_bucket_mb=0.3), TwoStreams()),
    ]
    for replica, plain in replicas:
        for step in range(2):
            replica.zero_grad()
            replica(batch(comm.rank, step)).square().sum().backward()
            plain.zero_grad()
            for rank in range(comm.world_size):
                (plain(batch(rank, step)).square().sum() / comm.world_size).backward()
            for ours, theirs in zip(replica.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.mostly = nn.Linear(64, 8), nn.Linear(64, 8)
        self.takes_both = True

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.mostly(x) if self.takes_both else self.always(x)


def another_graph_in_one_step_alone_is_told(comm: Communicator) -> None:
    model = Branches().to(comm.device)
    replica = ddp.DistributedDataParallel(model, static_graph=True)
    with pytest.raises(UnusedParameters, match=r"rank 0: none\n  rank 1: mostly\.weight"):
        for step in range(5):
            model.takes_both = comm.rank == 0 or step != 2
            replica(batch(comm.rank, step)).square().sum().backward()
    assert step == (3 if comm.is_stream_ordered else 2)


class GivesNoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.without = nn.Linear(64, 2), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return GivesNoGradient.apply(self.linear(x), self.without)  # type: ignore[no-any-return]


def what_has_no_gradient_does_not_decay(comm: Communicator) -> None:
    for precision in ("fp32", "bf16_pure"):
        model = WithoutGradient().to(comm.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)
        how = {"loss": nn.functional.cross_entropy, "global_batch": 4, "max_steps": 2, "precision": precision}
        ddp.fit(model, (torch.ones(8, 64), torch.ones(8).long()), optimizer, folder=None, **how)
        assert model.without.eq(1).all(), precision


def groups_may_overlap(comm: Communicator) -> None:
    comm.subgroup([0])
    both = comm.subgroup([0, 1])
    assert both is not None and both.all_reduce(torch.ones(3, device=comm.device)).tolist() == [2.0] * 3


def a_rank_may_be_late(comm: Communicator) -> None:
    time.sleep(0.5 * comm.rank)
    assert comm.all_reduce(torch.ones(3, device=comm.device)).tolist() == [2.0] * 3


CASES: list[Callable[[Communicator], None]] = [
    *(collectives_wait_for_what_they_read, two_streams_share_no_scratch, gradients_are_the_mean),
    *(another_graph_in_one_step_alone_is_told, what_has_no_gradient_does_not_decay),
    *(groups_may_overlap, a_rank_may_be_late),
]


def on_a_late_gpu(own: bool) -> None:
    device.install(int(os.environ["WORLD_SIZE"]) if own else 1)
    comm = ddp.init(device="standin", abort_s=30)
    run_cases(CASES, comm, [])
    ddp.shutdown()


@pytest.mark.slow
def test_a_late_gpu_changes_no_number_over_nccl() -> None:
    run_ranks(on_a_late_gpu, 2, True)


@pytest.mark.slow
def test_a_late_gpu_changes_no_number_where_ranks_share_it() -> None:
    run_ranks(on_a_late_gpu, 2, False)


def weights(kind: str, folder: Path, *, dropout: float = 0.0, resume: str | None = None, **how: Any) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Dropout(dropout), nn.Linear(8, 2)).to(kind)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    how |= {"loss": nn.functional.cross_entropy, "global_batch": 32}
    how["folder"] = ddp.Folder(folder, resume=resume, progress=False)
    ddp.fit(model, (x, x.sum(1).gt(0).long()), torch.optim.AdamW(model.parameters(), lr=0.01), **how)
    return torch.cat([each.detach().cpu().flatten() for each in model.parameters()])


def fit_and_resume(kind: str, folder: Path) -> list[Tensor]:
    if kind == "standin":
        device.install(2)
    ddp.init(device=kind, abort_s=30)
    whole = weights(kind, folder / "whole", max_steps=6, dropout=0.5)
    weights(kind, folder / "half", max_steps=3, dropout=0.5)
    assert torch.equal(whole, weights(kind, folder / "half", max_steps=6, dropout=0.5, resume="auto"))
    found = [weights(kind, folder / each, max_steps=4, precision=each) for each in ("fp32", "fp16")]
    ddp.shutdown()
    return found


@pytest.mark.slow
def test_fit_has_the_bits_of_the_cpu_and_goes_on(tmp_path: Path) -> None:
    on_gpu, _ = run_ranks(fit_and_resume, 2, "standin", tmp_path / "standin")
    on_cpu, _ = run_ranks(fit_and_resume, 2, "cpu", tmp_path / "cpu")
    assert torch.equal(on_gpu[0], on_cpu[0])
    for ours, theirs in zip(on_gpu[1:], on_cpu[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
