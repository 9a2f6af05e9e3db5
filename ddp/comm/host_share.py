"""Memory that all ranks of a host see, and the processes that they fork: for central storage.

It has no name, so it ends with the last process that has mapped it, however that ends. Unlike the memory of
`Communicator.allocate`, it is one region for all. No collective looks after it: its users agree who writes what.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.host_memory import tried
from ddp.comm.objects import all_gather_object
from ddp.comm.transport.shared_memory import KINDS, Kind, SharedMemory
from ddp.process.terminal import log


def shared_by_host(comm: Communicator, num_bytes: int) -> Tensor:
    """Returns [num_bytes] zero bytes, the same memory in all ranks of a host. Collective.

    Where they cannot share, each rank has its own memory, which its child processes share with it.
    """
    if (memory := memory_of_host(comm, num_bytes)) is None:
        log.warning("the workers of a host cannot share memory, so each of them has its own memory")
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    memory.forget()
    return memory.bytes


def memory_of_host(comm: Communicator, num_bytes: int) -> SharedMemory | None:
    """Returns zeroed memory that all ranks of a host map; None on all ranks if those of one cannot. Collective."""
    for kind in KINDS:
        memory = _mapped(comm, kind, num_bytes)
        if not comm.agree_any(memory is None):
            return memory
        if memory is not None:
            memory.forget()  # a neighbour could not map it
    return None


def _mapped(comm: Communicator, kind: Kind, num_bytes: int) -> SharedMemory | None:
    """Returns memory that the first rank of the host has made; None if this rank has none."""
    first = next(host[0] for host in comm.hosts if comm.rank in host)
    memory, problem = None, ""
    if comm.rank == first:
        memory, problem = tried(lambda: SharedMemory.create(kind, num_bytes))
    path = all_gather_object(comm, None if memory is None else memory.path)[first]
    if comm.rank != first and path is not None:
        memory, problem = tried(lambda: SharedMemory.attach(path, num_bytes))
    if problem:
        log.info("no %s of %d bytes: %s", kind, num_bytes, problem)
    return memory
