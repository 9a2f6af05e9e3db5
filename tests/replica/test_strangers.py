"""Programs that were written for torch's DistributedDataParallel: what they catch, ask, call and look for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_cases, run_ranks
from torch import Tensor, nn

import ddp

Class = Callable[..., Any]
THEIRS = nn.parallel.DistributedDataParallel
BOTH: tuple[Class, Class] = ddp.DistributedDataParallel, THEIRS


class Net(nn.Module):
    """Has a buffer, and a layer that is used on request."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor, uses_spare: bool = True) -> Tensor:
        y: Tensor = self.body(x)
        return self.spare(y) if uses_spare else y


def batch(comm: ddp.Communicator, seed: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * seed + comm.rank))


# --- what they catch -------------------------------------------------------------------------------------------------


def unlike(comm: ddp.Communicator) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + comm.rank)))


def two_unused(comm: ddp.Communicator, wrap: Class) -> None:
    replica = wrap(Net())
    for _ in range(2):
        replica(batch(comm), uses_spare=False).sum().backward()


def early_end(comm: ddp.Communicator, wrap: Class) -> None:
    replica = wrap(Net())
    with replica.join(throw_on_early_termination=True):
        for number in range(1 + comm.rank):
            replica(batch(comm, number)).sum().backward()


MISUSES: list[tuple[Callable[[ddp.Communicator, Class], Any], type[Exception], str]] = [
    (lambda comm, wrap: wrap(nn.Linear(2, 2).requires_grad_(False)), RuntimeError, ""),
    (lambda comm, wrap: wrap(nn.LazyLinear(2)), RuntimeError, ""),
    (lambda comm, wrap: wrap(unlike(comm)), RuntimeError, ""),
    (
        lambda comm, wrap: wrap(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh(comm.world_size)),
        RuntimeError,
        "",
    ),
    (lambda comm, wrap: wrap(nn.Linear(2, 2), device_mesh=mesh(1, comm.world_size)), RuntimeError, ""),
    (lambda comm, wrap: wrap(nn.Linear(2, 2), device_ids=[0, 1]), ValueError, ""),
    (lambda comm, wrap: wrap(nn.Linear(2, 2), device_ids=[0]), ValueError, ""),
    (lambda comm, wrap: wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))), ValueError, ""),
    (lambda comm, wrap: wrap(nn.Linear(2, 2), bucket_size=3), TypeError, "unexpected keyword"),
    (lambda comm, wrap: wrap(nn.Linear(2, 2)).register_comm_hook(None, 3), TypeError, ""),
    (two_unused, RuntimeError, "Expected to have finished reduction in the prior iteration.*did not receive grad"),
    (early_end, RuntimeError, "(Detected at least one rank that exhausted|exhausted all) inputs"),
]


def mesh(*shape: int) -> Any:
    return dist.device_mesh.init_device_mesh("cpu", shape)


def errors_of_torch_s_class(comm: ddp.Communicator) -> None:
    for misuse, kind, phrase in MISUSES:
        for wrap in BOTH:
            with pytest.raises(kind, match=f"(?s){phrase}"):
                misuse(comm, wrap)
                raise AssertionError(f"{misuse} of {wrap}: nothing was wrong")


CASES = [errors_of_torch_s_class]


def all_cases(names: list[str]) -> None:
    comm = ddp.init(abort_s=20)
    run_cases(CASES, comm, names)
    ddp.shutdown()


def test_all_cases_on_two_ranks() -> None:
    run_ranks(all_cases, 2, [], timeout_s=120)
