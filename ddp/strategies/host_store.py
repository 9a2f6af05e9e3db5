"""The memory of central storage: one copy of the parameters, and of each large state of the optimizer, on a host.

    parameters    ┌ weight ────┬ bias ┬ weight ─────────┬ … ┐    one memory, mapped by all ranks of the host
    exp_avg       ┌ weight ────┬ bias ┬ weight ─────────┬ … ┐    another one, laid out the same
    exp_avg_sq    ┌ weight ────┬ bias ┬ weight ─────────┬ … ┐

Each parameter has the same place in all of them, in the order of registration, independent of buckets and of the number
of ranks. Pages that are never written, such as the states of frozen parameters, take no memory.

At the end every rank maps the same memory privately, in place of the shared mapping. Then its tensors are its own, as
after a copy, but the system copies only the pages that the rank writes to.

The memory has no name, so it ends with the last process that has mapped it, however that ends; processes that a rank
forks see it, too. Unlike the memory of `Communicator.allocate`, it is one region for all. No collective synchronises
it: its users agree on which rank writes where.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.comm.host_memory import tried
from ddp.comm.objects import all_gather_object
from ddp.comm.transport.shared_memory import KINDS, Kind, SharedMemory
from ddp.errors import ConfigError
from ddp.gradients.bucket import ALIGNMENT_BYTES, strides_in_bucket
from ddp.process.memory import give_back_free_blocks
from ddp.process.terminal import log

PARAMETERS = "parameters"

_MMAP = ctypes.CDLL(None, use_errno=True).mmap
_MMAP.restype = ctypes.c_void_p
_MMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE_AND_FIXED = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED


class HostStore:
    """Tensors that are laid out like the parameters. Collective to make.

    Args:
        parameters: on the CPU; equal on all ranks. They are moved to the store.

    Attributes:
        is_first: this rank is the first one of its host.

    Raises:
        ConfigError: the ranks cannot share such memory.
    """

    def __init__(self, comm: Communicator, parameters: Sequence[nn.Parameter]) -> None:
        self._comm, self.parameters = comm, list(parameters)
        sizes = [-(-each.numel() * each.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in parameters]
        starts = [0, *accumulate(sizes)]
        forms = [(strides_in_bucket(each), each.dtype) for each in self.parameters]
        self._places = dict(zip(map(id, self.parameters), zip(starts, forms, strict=False), strict=True))
        self._num_bytes = max(starts[-1], ALIGNMENT_BYTES)
        self._memories: dict[str, SharedMemory] = {}
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        self._views: dict[tuple[str, int], Tensor] = {}
        self.is_first = any(host[0] == comm.rank for host in comm.hosts)
        self.add(PARAMETERS)
        if self.is_first:
            with torch.no_grad():
                for parameter in self.parameters:
                    self.view(PARAMETERS, parameter).copy_(parameter)
        comm.agree_any(False)  # a barrier: the store has the parameters
        for parameter in self.parameters:
            parameter.data = self.view(PARAMETERS, parameter)
        give_back_free_blocks()  # the parameters' former memory

    @property
    def names(self) -> list[str]:
        """Returns the names that have a memory: `PARAMETERS`, and the states that were added."""
        return list(self._memories)

    def add(self, name: str) -> None:
        """Makes zeros for a state of this name. Collective."""
        comm, memory = self._comm, memory_of_host(self._comm, self._num_bytes)
        if memory is None:
            raise ConfigError(
                f"strategy='central_storage': there are no {self._num_bytes} bytes for {name} of all workers of a host "
                "(the log says why); take strategy='sharded', or a smaller model"
            )
        self._descriptors[name] = os.open(memory.path, os.O_RDWR | os.O_CLOEXEC)
        comm.agree_any(False)  # a barrier: all ranks have opened it
        memory.forget()
        self._memories[name] = memory

    def view(self, name: str, parameter: Tensor) -> Tensor:
        """Returns a parameter's place, shaped like it, with its own storage."""
        key = name, id(parameter)
        if key not in self._views:
            self._views[key] = self._laid_out(self._memories[name].buffer, parameter)
        return self._views[key]

    def moved_out(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that the program has moved to other memory."""
        for parameter in self.parameters:
            view = self.view(PARAMETERS, parameter)
            if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                yield parameter

    def make_private(self) -> None:
        """Makes the memory private to this rank; all ranks call this once none will write to it any more.

        The same addresses then map the same pages, and the system copies a page that is written to. So every tensor in
        them keeps its address, also those that only the user's program still holds.
        """
        for name, descriptor in self._descriptors.items():
            address = self._memories[name].address
            if _MMAP(address, self._num_bytes, _READ_WRITE, _PRIVATE_AND_FIXED, descriptor, 0) != address:
                raise OSError(ctypes.get_errno(), f"{name} cannot be mapped privately")
        _close(self._descriptors)

    def _laid_out(self, buffer: mmap.mmap, parameter: Tensor) -> Tensor:
        with torch.inference_mode(False):
            if not parameter.numel():
                return torch.empty_like(parameter).detach()
            start, (strides, dtype) = self._places[id(parameter)]
            flat = torch.frombuffer(buffer, dtype=dtype, count=parameter.numel(), offset=start)
            return flat.as_strided(parameter.shape, strides)


def _close(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


# --- one memory for all ranks of a host ------------------------------------------------------------------------------


def shared_by_host(comm: Communicator, num_bytes: int) -> Tensor:
    """Returns [num_bytes] zero bytes, the same memory in all ranks of a host. Collective.

    If they cannot share, each rank has its own memory, which its child processes share with it.
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
