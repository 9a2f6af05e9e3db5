"""The protocol of hooks, which make the sum of all hosts' gradients while sending less than all of them.

A hook gets *parcels*: the gradients of a bucket, one for each parameter, after the ranks of each host have added up in
memory (`comm/carrier.py`), and after the one division by the global count. So a parcel is the host's part of the mean.
Each rank sends what it carries of it. For every bucket, in this order, on every rank alike:

    takes      is this tensor worth encoding? Small ones and those of one dimension go dense, that is as they are
    enter      for each parcel: the gradient becomes what should be sent (a velocity, a residual is added, …)
    reduce     sends `outgoing`; leaves in it what was not sent; writes the sum over all hosts to `gradient`
    leave      for each parcel: what was not sent is remembered

All of it runs as one collective of the communicator (`Communicator.chain`), so that the collectives of two buckets
cannot get into each other's way.

Read before: `memory.py`, `comm/communicator.py`. Read next: `error_feedback.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.gradients.memory import Memory

FEW = 1024  # elements that are not worth encoding


@dataclass(eq=False)
class Parcel:
    """A parameter's gradient on its way.

    Attributes:
        name: of the parameter.
        gradient: [numel], in the order of memory: first the host's part of the mean, at last the mean.
        shape: rows and columns, if it is a matrix; of more dimensions the first one in memory makes the rows.
        mine: what this rank carries of it.
        outgoing: [mine], what this rank has to send of it; then what it did not send.
        is_dense: it is sent as it is.
    """

    name: str
    gradient: Tensor
    shape: tuple[int, int]
    mine: slice
    outgoing: Tensor
    is_dense: bool


class Hook(ABC):
    """Makes the sum of all hosts' gradients, while sending less than all of them.

    Attributes:
        carries_whole: a tensor is carried by one rank of a host, and not by all, each a part.
        is_corrected: error feedback stands around it.
        momentum: that of a velocity which it sends in the place of the gradient.
    """

    carries_whole = False
    is_corrected = False
    momentum = 0.0

    def check(self) -> None:  # noqa: B027 (it has nothing to complain of)
        """Raises ConfigError if it cannot work as it is."""

    def takes(self, gradient: Tensor, shape: tuple[int, int], step: int) -> bool:
        """Returns True if it encodes a gradient, [numel], of this shape.

        Args:
            step: committed steps with this hook; the same on every rank.
        """
        return min(shape) > 1 and gradient.numel() >= FEW and gradient.is_floating_point()

    def enter(self, parcel: Parcel) -> None:  # noqa: B027 (the gradient itself is sent)
        """Makes of `outgoing` what should be sent, in memory of its own or in place."""

    @abstractmethod
    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        """Sends, and writes the sums. Runs the same collectives on every rank; `parcels` are alike but for `mine`."""

    def leave(self, parcel: Parcel) -> None:  # noqa: B027 (nothing is remembered)
        """Remembers what was not sent, once `gradient` is the sum."""

    def memories(self) -> dict[str, Memory]:
        """Returns everything that it remembers from step to step, by a name for each kind of memory."""
        return {}


class Around(Hook):
    """A hook around another one, which it lets do everything."""

    def __init__(self, hook: Hook) -> None:
        self.hook, self.carries_whole, self.momentum = hook, hook.carries_whole, hook.momentum

    def check(self) -> None:
        self.hook.is_corrected = self.hook.is_corrected or self.is_corrected
        self.hook.check()

    def takes(self, gradient: Tensor, shape: tuple[int, int], step: int) -> bool:
        return self.hook.takes(gradient, shape, step)

    def enter(self, parcel: Parcel) -> None:
        self.hook.enter(parcel)

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        self.hook.reduce(parcels, comm, step)

    def leave(self, parcel: Parcel) -> None:
        self.hook.leave(parcel)

    def memories(self) -> dict[str, Memory]:
        return self.hook.memories()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that sums of such gradients are kept in."""
    return torch.promote_types(dtype, torch.float32)


def all_gather(payload: Tensor, comm: Communicator) -> list[Tensor]:
    """Returns every rank's payload, [numel], by rank; all are of one length."""
    length = len(payload)
    everything = payload.new_zeros(comm.world_size * length)
    everything[comm.slices[comm.rank] * length :][:length] = payload
    comm.all_gather_(everything, [number * length for number in range(comm.world_size + 1)])
    return [everything[comm.slices[rank] * length :][:length] for rank in range(comm.world_size)]


def aligned(numels: Iterable[int], multiple: int = 16) -> list[int]:
    """Returns where pieces of so many elements begin, each at a multiple, and where the last one ends."""
    bounds = [0]
    for numel in numels:
        bounds.append(bounds[-1] + -(-numel // multiple) * multiple)
    return bounds
