"""Stands in for `torch.distributed._symmetric_memory`: memory of one GPU that its neighbours' kernels read and write.

It is the host's, and every rank maps everyone's. A barrier lies on the current stream like any command, and is done
when all ranks have come to it. Whoever never comes lets the others spin, or, with a timeout, break the device.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_standin import cuda
from gpu_standin.build import load
from torch import Tensor

CHANNELS = 64
POLL_S = 0.0002


class Group(NamedTuple):
    rank: int
    world_size: int
    store: dist.Store


GROUPS: dict[str, Group] = {}
_num_rendezvous: defaultdict[str, int] = defaultdict(int)
_files: dict[int, tuple[int, int]] = {}  # (descriptor, bytes) by the address of what was allocated


def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    dtype, index = dtype or torch.get_default_dtype(), cuda._index(device)
    num_bytes = math.prod(shape) * dtype.itemsize
    descriptor = os.memfd_create("symmetric")
    os.ftruncate(descriptor, max(1, num_bytes))
    tensor = _mapped(descriptor, num_bytes, index)
    _files[tensor.data_ptr()] = descriptor, num_bytes
    return tensor.view(dtype).view(shape)


def set_group_info(group_name: str, rank: int, world_size: int, store: dist.Store) -> None:
    GROUPS[group_name] = Group(rank, world_size, store)


def rendezvous(tensor: Tensor, group: str | dist.ProcessGroup) -> Handle:
    """Collective; blocks the host."""
    name = group if isinstance(group, str) else group.group_name
    if name not in GROUPS:
        known = dist.distributed_c10d._resolve_process_group(name)
        GROUPS[name] = Group(known.rank(), known.size(), dist.distributed_c10d._world.pg_map[known][1])
    if tensor.data_ptr() not in _files:
        raise RuntimeError("rendezvous: the tensor was not allocated by symmetric memory's empty")
    descriptor, num_bytes = _files[tensor.data_ptr()]
    _num_rendezvous[name] += 1
    mine, store = GROUPS[name], dist.PrefixStore(f"symmetric {_num_rendezvous[name]}", GROUPS[name].store)
    pad = os.memfd_create("signals")
    os.ftruncate(pad, CHANNELS * mine.world_size * 8)
    device = cuda.first_device + tensor.device.index
    files = [f"/proc/{os.getpid()}/fd/{each}" for each in (descriptor, pad)]
    store.set(str(mine.rank), json.dumps([*files, num_bytes, device]))
    everyone = [json.loads(store.get(str(rank))) for rank in range(mine.world_size)]
    if len({size for *_, size, _ in everyone}) > 1:
        raise RuntimeError(f"rendezvous: ranks allocated {[size for *_, size, _ in everyone]} bytes")
    devices = [device for *_, device in everyone]
    if len(set(devices)) < len(devices) and os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") != "1":
        raise RuntimeError(f"rendezvous: ranks are on overlapping devices {devices}")
    buffers, pads = [], []
    for rank, (memory, signals, _, _) in enumerate(everyone):
        opened = [os.open(each, os.O_RDWR) for each in (memory, signals)]
        own = rank == mine.rank
        buffers.append(tensor.view(-1).view(torch.uint8) if own else _mapped(opened[0], num_bytes, tensor.device.index))
        pads.append(torch.frombuffer(mmap.mmap(opened[1], 0), dtype=torch.int64).view(CHANNELS, mine.world_size))
        for each in opened:
            os.close(each)
    store.set(f"{mine.rank} has mapped", "")
    store.wait([f"{rank} has mapped" for rank in range(mine.world_size)])
    return Handle(mine.rank, buffers, pads)


class Handle:
    """Everyone's memory, and barriers among them.

    Attributes:
        rank, world_size: in the group.
        buffer_size: bytes of each rank.
    """

    def __init__(self, rank: int, buffers: list[Tensor], pads: list[Tensor]) -> None:
        self.rank, self.world_size, self.buffer_size = rank, len(buffers), buffers[0].numel()
        self._buffers, self._pads = buffers, pads
        self._num_barriers = [0] * CHANNELS
        self._barriers: queue.SimpleQueue[tuple[int, int, int, int]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="symmetric", daemon=True).start()

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        begin, numel = storage_offset * dtype.itemsize, math.prod(sizes)
        if begin + numel * dtype.itemsize > self.buffer_size:
            raise RuntimeError(f"get_buffer: {numel} × {dtype} from {storage_offset} on are more than was allocated")
        return self._buffers[rank][begin : begin + numel * dtype.itemsize].view(dtype).view(*sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Lies on the current stream. All ranks come to the barriers of a channel in one order."""
        index = self._buffers[self.rank].device.index
        number = load().batch(index, load().stream(index), b"barrier", 0, None, None, None)
        self._num_barriers[channel] += 1
        self._barriers.put((number, channel, self._num_barriers[channel], timeout_ms))

    def _run(self) -> None:
        while True:
            number, channel, turn, timeout_ms = self._barriers.get()
            load().before_batch(number)
            for pad in self._pads:
                pad[channel, self.rank] = turn
            began = time.monotonic()
            while (self._pads[self.rank][channel] < turn).any():
                if timeout_ms and time.monotonic() - began > timeout_ms / 1000:
                    load().fail(b"CUDA error: unspecified launch failure (symmetric memory's barrier timed out)")
                    break
                time.sleep(POLL_S)
            load().end_batch(number)
            load().forget_batch(number)


def _mapped(descriptor: int, num_bytes: int, device: int) -> Tensor:
    host = torch.frombuffer(mmap.mmap(descriptor, max(1, num_bytes)), dtype=torch.uint8)
    return torch.ops.standin.adopt(host[:num_bytes], device)
