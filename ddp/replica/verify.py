"""Checks that replicas are still equal, by a hash of every tensor on every rank; names the first that differs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import ReplicaMismatch


def tensor_hash(tensor: Tensor) -> str:
    """Returns a hash of the tensor's bits: 0.0 and -0.0 differ, equal NaNs do not."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()


def verify_replicas(comm: Communicator, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ReplicaMismatch, on every rank, unless all tensors are bitwise equal on all ranks.

    The message names the first tensor that differs and the ranks in the minority.
    """
    mine = {name: tensor_hash(tensor) for name, tensor in named_tensors}
    everyone = all_gather_object(comm, mine)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        hashes = [theirs.get(name, "missing") for theirs in everyone]
        majority, votes = Counter(hashes).most_common(1)[0]
        if votes < comm.world_size:
            minority = [rank for rank, value in enumerate(hashes) if value != majority]
            raise ReplicaMismatch(
                f"{name} is not the same on all ranks: rank(s) {minority} differ from the other {votes}. "
                "Something changed it outside the optimizer step, or a random number depended on the rank"
            )
