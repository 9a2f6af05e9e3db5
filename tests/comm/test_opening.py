"""A communicator is opened from a store, a generation, a rank and a world size; nothing else is remembered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from ddp.comm.opening import open_communicator
from ddp.comm.settings import Settings
from ddp.errors import CommunicatorBroken


def member(store: Store, generation: int, world_size: int, rank: int) -> tuple[int, list[float], str]:
    comm = open_communicator(store, generation, rank, world_size, Settings(abort_s=60, shared_memory=False))
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
