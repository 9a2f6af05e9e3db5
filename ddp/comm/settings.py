"""The settings of a communicator, which its subgroups inherit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddp.collectives.schedule import SEGMENT_BYTES
from ddp.setting import Additions

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choices of one communicator, which its subgroups inherit. The same on all ranks, but for `device`.

    Attributes:
        device: where this rank's tensors live.
        backend: "gloo", "nccl", or "auto": what `agreed_backend` finds.
        generation: version of the membership.
        algorithm: what `algorithm="auto"` in a call stands for; "auto" here: the route that takes least time.
        order: "canonical" lets "auto" take only routes whose additions follow the canonical binary tree over the ranks.
        shared_memory: let CPU tensors go through the memory of a host where its ranks share it.
        segment_bytes: size of a pipelining piece of a chunk.
        abort_s: longest wait for a neighbour, in seconds.
        debug: compare what the ranks call before every collective.
    """

    device: torch.device = CPU
    backend: str = "auto"
    generation: int = 0
    algorithm: str = "auto"
    order: Additions = "any"
    shared_memory: bool = True
    segment_bytes: int = SEGMENT_BYTES
    abort_s: float = 60.0
    debug: bool = False
