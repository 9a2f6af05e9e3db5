"""Sends small Python objects over a communicator: pickled into bytes, carried by the ordinary collectives.

This is for rare and small things: names in an error, random states of a checkpoint. Use it only between the ranks of
one job, which trust each other, because unpickling runs code.

Read before: `communicator.py`. Read next: `host_share.py`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator

Result = TypeVar("Result")


def all_gather_object(comm: Communicator, value: Any) -> list[Any]:
    """Returns every rank's object, by rank."""
    return [_unpacked(data) for data in comm.all_gather(_packed(comm, value))]


def broadcast_object(comm: Communicator, value: Any, root: int = 0) -> Any:
    """Returns the root's object on every rank; what the others pass is ignored."""
    data = _packed(comm, value if comm.rank == root else None)
    size = comm.broadcast(torch.tensor([data.numel()], device=comm.device), root, label="size of an object")
    if comm.rank != root:
        data = torch.empty(int(size), dtype=torch.uint8, device=comm.device)
    return _unpacked(comm.broadcast(data, root, label="an object"))


def on_rank_zero(comm: Communicator, work: Callable[[], Result], *, label: str) -> Result:
    """Does `work` on rank 0 while the others wait, for as long as rank 0 lives. Returns its result on every rank.

    For what one rank does for all and may take long: writing or reading a checkpoint. A collective's deadline would end
    the run over a slow disk. An exception of `work` is raised on every rank, so that none waits in vain.
    """
    outcome: tuple[bool, Any] = (True, None)
    if comm.rank == 0:
        try:
            outcome = (True, work())
        except Exception as error:
            outcome = (False, error)
    comm.wait_for_rank_zero(label)
    succeeded, value = broadcast_object(comm, outcome)
    if not succeeded:
        raise value
    result: Result = value
    return result


def _packed(comm: Communicator, value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(comm.device)


def _unpacked(data: Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
