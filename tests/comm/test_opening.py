"""A communicator is opened from a store, a generation, a rank and a world size; nothing else is remembered."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import collect, start_ranks, unfailed
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from ddp.comm.host_links import Settings
from ddp.comm.opening import open_communicator
from ddp.errors import CommunicatorBroken, PeerLost


def member(store: Store, generation: int, world_size: int, rank: int) -> tuple[int, list[float], str]:
    settings = Settings(generation=generation, abort_s=60, shared_memory=False)
    comm = open_communicator(store, rank, world_size, settings)
    total = comm.all_reduce(torch.full((3,), float(rank + 1)))
    comm.close()
    with pytest.raises(CommunicatorBroken) as refused:
        comm.barrier()
    return comm.generation, total.tolist(), str(refused.value)


def test_the_ranks_of_another_generation_meet_in_another_store() -> None:
    for generation, world_size in ((0, 3), (1, 2), (2, 3)):
        with ThreadPoolExecutor(world_size) as ranks:
            found = list(ranks.map(partial(member, HashStore(), generation, world_size), range(world_size)))
        total = world_size * (world_size + 1) / 2
        assert found == [(generation, [total] * 3, "the communicator is out of use since: it was closed")] * world_size
    assert not dist.is_initialized()


KILLED, STOPPED, WHOLE, ABSENT = range(1, 5)
ABORT_S, TIMES = 3.0, 6


def one_of_several() -> Any:
    """Rank 0 has a communicator of two ranks with each of the others, all at once; they have only that one."""
    me = int(os.environ["RANK"])
    store = TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=False)

    def opened(peer: int, rank: int, time_: int = 0, *, in_memory: bool) -> Any:
        part = PrefixStore(f"{peer}/{time_}", store.clone())
        return open_communicator(part, rank, 2, Settings(abort_s=ABORT_S, shared_memory=in_memory))

    def again_and_again(peer: int, rank: int) -> None:
        for time_ in range(1, TIMES + 1):
            comm = opened(peer, rank, time_, in_memory=time_ % 2 == 0)
            comm.all_reduce(torch.ones(1), async_op=True).wait()
            comm.close() if time_ % 3 else comm.abandon("it has seen enough")

    def peer() -> None:
        comm = opened(me, 1, in_memory=me == KILLED)
        for number in range(10**9):
            if comm.recv(torch.ones(1), 0) == 0:
                break
            comm.all_reduce(torch.ones(1))
            if number == 20 and me != WHOLE:
                os.kill(os.getpid(), signal.SIGKILL if me == KILLED else signal.SIGSTOP)
        again_and_again(me, 1)

    over = threading.Event()

    def use(peer: int) -> tuple[str, float, float]:
        """Returns what became of one, and how long opening it and its last call took; of the whole one, the longest."""
        began_s = now_s = time.monotonic()
        took_s = [0.0]
        try:
            comm = opened(peer, 0, in_memory=peer == KILLED)
        except PeerLost as lost:
            return str(lost), time.monotonic() - began_s, 0.0
        opening_s = time.monotonic() - began_s
        try:
            while not over.is_set():
                now_s = time.monotonic()
                comm.send(torch.ones(1), 1)
                comm.all_reduce(torch.ones(1))
                took_s.append(time.monotonic() - now_s)
            comm.send(torch.zeros(1), 1)
            comm.close()
            return "whole", opening_s, max(took_s)
        except PeerLost as lost:
            now_s = time.monotonic() - now_s
            comm.abandon("its peer is lost")
            return str(lost), opening_s, now_s

    if me != 0:
        return None if me == ABSENT else peer()
    with ThreadPoolExecutor(ABSENT) as threads:
        futures = {peer: threads.submit(use, peer) for peer in (ABSENT, KILLED, STOPPED, WHOLE)}
        found = {peer: futures[peer].result() for peer in (KILLED, STOPPED, ABSENT)}
        over.set()
        found[WHOLE] = futures[WHOLE].result()
    kept = what_is_kept()
    again_and_again(WHOLE, 0)
    return found, kept, what_is_kept(), dist.is_initialized()


def what_is_kept() -> tuple[list[str], int, list[str]]:
    """The kinds of this process's open files; its threads; the memory of its own that has a name."""
    for _ in range(20):  # a thread beside Gloo ends within a quarter of a second
        gc.collect()
        if not any(thread.name.startswith("ddp-gloo") for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    files = [str(file.readlink()).partition(":")[0] for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    named = [path.name for path in Path("/dev/shm").glob(f"ddp-{os.getpid()}-*")]
    return sorted(files), len(list(Path("/proc/self/task").iterdir())), named


@pytest.mark.slow
def test_a_lost_peer_leaves_all_other_communicators_whole_and_nothing_is_kept_of_closed_ones() -> None:
    started = start_ranks(one_of_several, 4)
    try:
        found, before, after, was_initialized = unfailed(collect([started[0], started[WHOLE]], timeout_s=30))[0]
    finally:
        for process, _ in started:
            process.kill()
    says, _, took_s = found[KILLED]
    assert "lost rank 1" in says
    assert "its process has ended" in says
    assert took_s < 1.5
    says, _, took_s = found[STOPPED]
    assert "lost rank 1" in says
    assert ABORT_S - 1 < took_s < ABORT_S + 2
    assert "lost rank 1" in found[ABSENT][0]
    assert "during collective #0 [start-up]: it shows no sign of life" in found[ABSENT][0]
    assert found[WHOLE][0] == "whole"
    assert all(opening_s < ABORT_S - 1 for peer, (_, opening_s, _) in found.items() if peer != ABSENT)
    assert found[WHOLE][2] < 1.5
    assert after == before
    assert before[2] == []
    assert not was_initialized
