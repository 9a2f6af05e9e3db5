"""The memory of central storage: one copy of the parameters, and of each large state of the optimizer, on a host.

    parameters    ┌ weight ────┬ bias ┬ weight ─────────┬ … ┐    one memory, mapped by all ranks of the host
    exp_avg       ┌ weight ────┬ bias ┬ weight ─────────┬ … ┐    another one, laid out the same
    exp_avg_sq    ┌ weight ────┬ bias ┬ weight ─────────┬ … ┐

Each parameter has the same place in all of them, in the order of registration, so no place depends on a bucket or on
the number of ranks. Pages that are never written, such as the states of frozen parameters, take no memory.

At the end every rank maps the same memory privately, in the place of the shared mapping. Then its tensors are its own,
as they would be after a copy, and yet only the pages that it writes to are copied, by the system.
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
from ddp.comm.host_share import memory_of_host
from ddp.comm.transport.shared_memory import SharedMemory
from ddp.errors import ConfigError
from ddp.gradients.bucket import ALIGNMENT_BYTES, strides_in_bucket
from ddp.process.memory import give_back_free_blocks

PARAMETERS = "parameters"

_MMAP = ctypes.CDLL(None, use_errno=True).mmap
_MMAP.restype = ctypes.c_void_p
_MMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE_AND_FIXED = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED


class HostStore:
    """Tensors that are laid out like the parameters. Collective to make, and to be given another name.

    Args:
        parameters: on the CPU; equal on all ranks. They lie in the store then.

    Attributes:
        is_first: this rank is the first one of its host.

    Raises:
        ConfigError: there is no such memory.
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
        comm.agree_any(False)  # they are there
        for parameter in self.parameters:
            parameter.data = self.view(PARAMETERS, parameter)
        give_back_free_blocks()  # where they lay before

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
        comm.agree_any(False)  # all have opened it
        memory.forget()
        self._memories[name] = memory

    def view(self, name: str, parameter: Tensor) -> Tensor:
        """Returns a parameter's place, shaped like it, with its own storage."""
        key = name, id(parameter)
        if key not in self._views:
            self._views[key] = self._laid_out(self._memories[name].buffer, parameter)
        return self._views[key]

    def moved_out(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that somebody has given other memory."""
        for parameter in self.parameters:
            view = self.view(PARAMETERS, parameter)
            if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                yield parameter

    def make_private(self) -> None:
        """Makes the memory this rank's own, to be called by all ranks when none will write to it any more.

        The same addresses map the same pages then, and the system copies a page that is written to. So every tensor in
        them stays where it is, also those that only the user's program still holds.
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
