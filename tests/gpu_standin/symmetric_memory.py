"""Stands in for `torch.distributed._symmetric_memory`, with the calls of it that the package makes.

Memory is a file without a name that all ranks map. A barrier is a command on the current stream that ends once the
signals have come, as in torch: 1 from each peer, which it takes back, and 0 where it puts a 1 for a peer.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_standin.build import load
from torch import Tensor

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
SIGNALS = mmap.PAGESIZE  # bytes of them, before the numbers
GARBAGE = 0xA5


@dataclass
class Faults:
    """Test switches."""

    backend: str = "CUDA"
    no_memory: bool = False
    rendezvous_fails: bool = False
    no_reach: bool = False  # what should be the others' memory is not
    no_signals: bool = False  # nor are their signals


FAULTS = Faults()
_files: dict[int, tuple[int, int]] = {}  # by the address of this rank's numbers: the file, and their bytes
_rendezvous = itertools.count()


def install() -> None:
    """Puts the stand-in in the place of torch's, in this process."""
    import torch.distributed._symmetric_memory as symmetric

    symmetric._SymmetricMemory, symmetric.rendezvous = _SymmetricMemory, rendezvous


def _mapped(file: int, start: int, num_bytes: int, device: int) -> tuple[Tensor, Tensor]:
    """Returns a part of a file as bytes of the host's, and of the device's."""
    host = torch.frombuffer(mmap.mmap(file, num_bytes, offset=start), dtype=torch.uint8)
    return host, torch.ops.standin.adopt(host, device)


def rendezvous(tensor: Tensor, group: Any) -> _SymmetricMemory:
    assert group is dist.group.WORLD
    if FAULTS.rendezvous_fails:
        raise RuntimeError("CUDA driver error: invalid device ordinal\nmore of it")
    file, num_bytes = _files[tensor.data_ptr()]
    store = dist.PrefixStore(f"rendezvous/{next(_rendezvous)}", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), json.dumps([os.getpid(), file, num_bytes, tensor.device.index]))
    told = [json.loads(store.get(str(rank))) for rank in range(dist.get_world_size())]
    if len({device for *_, device in told}) < len(told) and os.environ.get(OVERLAPPING) != "1":
        raise RuntimeError("rendezvous: detected allocations from overlapping devices from different ranks.")
    assert all(each[2] == num_bytes for each in told)
    files = [os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR) for pid, file, *_ in told]
    store.add("mapped", 1)
    while store.add("mapped", 0) < len(told):
        time.sleep(0.001)
    try:
        return _SymmetricMemory(tensor, files, num_bytes)
    finally:
        for each in files:
            os.close(each)


class _SymmetricMemory:
    @staticmethod
    def get_backend(device: torch.device) -> str:
        return FAULTS.backend

    @staticmethod
    def empty_strided_p2p(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        assert stride == (1,) and numel
        if FAULTS.no_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        file, num_bytes = os.memfd_create("standin"), numel * dtype.itemsize
        os.ftruncate(file, SIGNALS + num_bytes)
        host, found = _mapped(file, SIGNALS, num_bytes, device.index)
        host.fill_(GARBAGE)
        _files[found.data_ptr()] = file, num_bytes
        return found.view(dtype)

    def __init__(self, tensor: Tensor, files: list[int], num_bytes: int) -> None:
        self.device, self.rank, self.world_size = tensor.device.index, dist.get_rank(), len(files)
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        mine = empty.set_(tensor.untyped_storage(), 0, (num_bytes,), (1,))
        own = [FAULTS.no_reach, FAULTS.no_signals]
        here, there = ([files[self.rank] if is_own else file for file in files] for is_own in own)
        self._numbers = [_mapped(file, SIGNALS, num_bytes, self.device)[1] for file in here]
        self._numbers[self.rank] = mine
        both = [_mapped(file, 0, SIGNALS, self.device) for file in there]
        self._signals, self._pads = [host.view(torch.int32) for host, _ in both], [pad for _, pad in both]
        os.close(_files.pop(tensor.data_ptr())[0])

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        return _part(self._numbers[rank], sizes, dtype, storage_offset)

    def get_signal_pad(self, rank: int, sizes: Any = (), dtype: Any = None, storage_offset: int = 0) -> Tensor:
        return _part(self._pads[rank], sizes, dtype or torch.int32, storage_offset)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms > 0
        number = load().batch(self.device, load().stream(self.device), b"barrier", 0, None, None, None)
        threading.Thread(target=self._spin, args=(number, self.world_size * channel), daemon=True).start()

    def _spin(self, number: int, first: int) -> None:
        load().before_batch(number)
        for value, taken in ((0, 1), (1, 0)):  # what it waits for, and what it writes then
            for peer in range(self.world_size):
                if peer != self.rank:
                    at, place = (peer, self.rank) if taken else (self.rank, peer)
                    while self._signals[at][first + place] != value:
                        time.sleep(0.0002)
                    self._signals[at][first + place] = taken
        load().end_batch(number)
        load().forget_batch(number)


def _part(memory: Tensor, sizes: Any, dtype: torch.dtype, offset: int) -> Tensor:
    (numel,) = sizes
    return memory.view(dtype)[offset : offset + numel]
