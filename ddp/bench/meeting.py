"""Where the ranks of a benchmark wait for each other before a repetition, without touching what is measured.

A barrier of one of the two rivals would warm that rival's sockets and caches, and let the ranks go one after another.
This one uses neither: the ranks of one machine share its kernel, whatever network namespace they stand in.

    as many cores as ranks     a counter per rank in one mapped file; each rank spins until it has seen all of them.
                               They leave within some 2 µs of each other.
    more ranks than cores      named pipes: rank 0 reads a byte from everyone, then writes one to each. Blocking, since
                               a spinning rank takes the core that another one needs, and the scheduler makes it pay
                               for that afterwards: behind a spinning meeting of 4 ranks on 2 cores Gloo's all-reduce
                               of 1 KB took 13 ms; behind this one, or behind none, 6 ms.
    ranks on several machines  a barrier of torch.distributed: there is nothing else.
"""

from __future__ import annotations

import mmap
import os
import select
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from ddp.clock import now_s

DEADLINE_S = 120.0
CACHE_LINE = 64


class Meeting(Protocol):
    """Returns once every rank has called it; the n-th call of one rank meets the n-th of the others."""

    def __call__(self) -> None: ...


@contextmanager
def open_meeting(rank: int, world_size: int, *, num_cores: int) -> Iterator[Meeting]:
    """The best kind for these ranks. Collective, inside an initialised torch.distributed.

    Args:
        num_cores: of the machine that all ranks share.
    """
    with ExitStack() as stack:
        name: list[str] = [_furnished(world_size) if rank == 0 else ""]
        dist.broadcast_object_list(name, src=0)
        folder = Path(name[0])
        seen: list[bool] = [False] * world_size
        dist.all_gather_object(seen, folder.exists())
        meet: Meeting = _by_torch
        if all(seen) and num_cores >= world_size:
            file = stack.enter_context((folder / "counters").open("r+b"))
            meet = _Spinning(rank, world_size, stack.enter_context(mmap.mmap(file.fileno(), 0)))
        elif all(seen):
            pipes = [os.open(folder / f"pipe-{other}", os.O_RDWR) for other in range(world_size)]
            for pipe in pipes:
                stack.callback(os.close, pipe)
            meet = _Blocking(rank, pipes)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)  # all have opened what they need; so nothing is left, however this ends
        yield meet


def _furnished(world_size: int) -> str:
    """A folder with what either kind needs."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-meeting-"))
    (folder / "counters").write_bytes(bytes(CACHE_LINE * world_size))
    for rank in range(world_size):
        os.mkfifo(folder / f"pipe-{rank}")
    return str(folder)


def _by_torch() -> None:
    dist.barrier()


class _Spinning:
    def __init__(self, rank: int, world_size: int, shared: mmap.mmap) -> None:
        self._shared, self._mine = shared, CACHE_LINE * rank
        self._others = [CACHE_LINE * other for other in range(world_size) if other != rank]
        self._num_calls = 0

    def __call__(self) -> None:
        self._num_calls += 1
        deadline_s = now_s() + DEADLINE_S
        # One aligned word, written by one rank alone: whoever reads it sees the old count or the new one.
        with memoryview(self._shared) as raw, raw.cast("q") as counters:
            counters[self._mine // 8] = self._num_calls
            for other in self._others:
                while counters[other // 8] < self._num_calls:
                    os.sched_yield()
                    if now_s() > deadline_s:
                        raise TimeoutError(f"a rank did not come to the meeting within {DEADLINE_S:g} s")


class _Blocking:
    def __init__(self, rank: int, pipes: list[int]) -> None:
        self._rank, self._pipes = rank, pipes

    def __call__(self) -> None:
        if self._rank == 0:
            num_missing = len(self._pipes) - 1
            while num_missing:
                num_missing -= len(self._read(self._pipes[0], num_missing))
            for pipe in self._pipes[1:]:
                os.write(pipe, b"x")
        else:
            os.write(self._pipes[0], b"x")
            self._read(self._pipes[self._rank], 1)

    def _read(self, pipe: int, num_bytes: int) -> bytes:
        if not select.select([pipe], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"a rank did not come to the meeting within {DEADLINE_S:g} s")
        return os.read(pipe, num_bytes)
