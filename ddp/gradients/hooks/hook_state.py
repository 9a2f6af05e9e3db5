"""The memory of a hook in a checkpoint: gathered on rank 0, and given out again, at this world size or another one.

    saved      for each memory ("residual", "velocity", "factor") and each parameter
                   [hosts, numel]   what each host has kept, put together from its ranks' parts
                   the factor       where all ranks have the same
    resumed    on as many hosts each gets its own again; else each gets an equal part of the sum. What counts is the
               sum over hosts, so nothing is lost

A model's worth of numbers for each host goes to rank 0 alone, one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.flat_collectives import HostPartition
from ddp.comm.objects import all_gather_object, broadcast_object
from ddp.gradients.hooks.compression import Compression
from ddp.gradients.hooks.hook import Memory


def gathered(compression: Compression, comm: Communicator) -> dict[str, Any]:
    """Returns the hook's state as of the last step, on rank 0; elsewhere nothing of use. Collective."""
    compression.commit()
    memories = compression.hook.memories()
    mine = {what: sorted(memory.committed) for what, memory in memories.items()}
    names = all_gather_object(comm, mine)
    found: dict[str, Any] = {"num_steps": compression.num_steps, "memories": {what: {} for what in memories}}
    for what, memory in memories.items():
        for name in sorted({name for of_rank in names for name in of_rank[what]}):
            tensor = _on_rank_zero(memory, name, compression, comm)
            if tensor is not None:
                found["memories"][what][name] = tensor.cpu()
    return found


def _on_rank_zero(memory: Memory, name: str, compression: Compression, comm: Communicator) -> Tensor | None:
    """Returns what all hosts remember of a parameter, on rank 0."""
    mine = memory.committed.get(name)
    if memory.kind == "same":
        return mine if comm.rank == 0 else None
    part = compression.part_of(name)
    if mine is None:
        mine = torch.zeros(part.stop - part.start, dtype=compression.dtype_of(name), device=comm.device)
    pieces = comm.gather(mine, 0)
    if comm.rank != 0:
        return None
    whole = torch.zeros(comm.host_partition.num_hosts, compression.numels[name], dtype=mine.dtype, device=comm.device)
    for rank, piece in enumerate(pieces):
        whole[comm.host_partition.hosts[rank], compression.part_of(name, rank)] = piece
    return whole


def give_out(stored: Mapping[str, Any] | None, compression: Compression, comm: Communicator) -> None:
    """Lets the hook go on from a state that rank 0 has. Collective.

    Args:
        stored: what `gathered` returned there; ignored elsewhere.
    """
    about: Any = None
    if stored is not None and comm.rank == 0:
        about = stored["num_steps"], {what: sorted(tensors) for what, tensors in stored["memories"].items()}
    compression.num_steps, names = broadcast_object(comm, about)
    for what, memory in compression.hook.memories().items():
        for name in names.get(what, ()):
            if name not in compression.numels:
                continue
            tensor = stored["memories"][what][name] if stored is not None and comm.rank == 0 else None
            if memory.kind == "same":
                memory.committed[name] = broadcast_object(comm, tensor).to(comm.device)
                continue
            pieces = None if tensor is None else _pieces(tensor, name, compression, comm)
            piece = comm.scatter(pieces, 0)
            if len(piece):
                memory.committed[name] = piece
            compression.is_owed = True


def _pieces(stored: Tensor, name: str, compression: Compression, comm: Communicator) -> Sequence[Tensor]:
    """Returns every rank's part of what all hosts have kept, [hosts, numel]."""
    host_partition: HostPartition = comm.host_partition
    if len(stored) != host_partition.num_hosts:
        stored = (stored.sum(0, keepdim=True) / host_partition.num_hosts).expand(host_partition.num_hosts, -1)
    return [
        stored[host_partition.hosts[rank], compression.part_of(name, rank)].to(comm.device)
        for rank in range(comm.world_size)
    ]
