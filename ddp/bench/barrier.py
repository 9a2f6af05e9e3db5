"""Lets ranks wait for each other between repetitions, without touching either of the rivals.

A barrier of one rival would warm that rival's sockets and caches, and its ranks would leave one after another. This one
uses neither rival: all ranks of one machine map the same small file, whatever network namespace they are in. Each rank
counts its calls in a cache line of its own and waits until the other counters have reached its own.

    a core for every rank        A waiting rank spins. All ranks leave within some 2 µs of each other.
    more ranks than cores        A waiting rank naps between two looks, because a spinning rank takes the core that
                                 another one needs, and the scheduler makes it pay for that afterwards: behind a
                                 spinning barrier of 4 ranks on 2 cores, Gloo's all-reduce of 1 KB took twice as long.
    ranks on several machines    A barrier of torch.distributed, because there is nothing else.

A rank that died is waited for until the launcher, which sees every death, ends the others.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

NAP_S = 50e-6
NAME_BYTES = 4096

Barrier = Callable[[], None]
"""Returns once every rank has called it as many times as this one."""


@contextmanager
def open_barrier(rank: int, world_size: int, *, is_crowded: bool) -> Iterator[Barrier]:
    """Yields the best barrier for these ranks. Collective, inside an initialised torch.distributed."""
    name = torch.zeros(NAME_BYTES, dtype=torch.uint8)  # as a tensor, because torch would unpickle an object
    if rank == 0:
        descriptor, made = tempfile.mkstemp(prefix="ddp-barrier-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(bytes(64 * world_size))
        name[: len(os.fsencode(made))] = torch.tensor(list(os.fsencode(made)), dtype=torch.uint8)
    dist.broadcast(name, src=0)
    path = Path(os.fsdecode(bytes(name.tolist()).rstrip(b"\0")))
    is_shared = torch.tensor([path.exists()], dtype=torch.uint8)
    dist.all_reduce(is_shared, dist.ReduceOp.MIN)
    counters = np.memmap(path, np.int64, "r+", shape=(world_size, 8)) if is_shared else None
    dist.barrier()
    if rank == 0:
        path.unlink()  # all ranks have mapped it; so nothing is left, however this ends
    yield dist.barrier if counters is None else _Counting(rank, counters, is_crowded=is_crowded)


class _Counting:
    """Is a barrier of counters [world_size, 8]; the first number of each row counts a rank's calls."""

    def __init__(
        self, rank: int, counters: np.ndarray[tuple[int, int], np.dtype[np.int64]], *, is_crowded: bool
    ) -> None:
        self._rank, self._counters, self._is_crowded = rank, counters, is_crowded
        self._num_calls = 0

    def __call__(self) -> None:
        self._num_calls += 1
        # One aligned word, written by one rank alone: whoever reads it finds the old count or the new one.
        self._counters[self._rank, 0] = self._num_calls
        for other in range(len(self._counters)):
            while self._counters[other, 0] < self._num_calls:
                if self._is_crowded:
                    time.sleep(NAP_S)
                else:
                    os.sched_yield()
