"""The protocol of hooks, which sum all hosts' gradients while sending less than all of them.

A hook gets *parcels*: the gradients of a bucket, one for each parameter, after the ranks of each host have added up in
memory (`HostPartition`), and after the one division by the global count. So a parcel is the host's part of the mean.
Each rank sends what it carries of it. For every bucket, in this order, on every rank:

    takes      decides if a tensor is worth encoding; small ones and those of one dimension are sent dense (as they are)
    enter      for each parcel: turns the gradient into what should be sent (a velocity, plus a residual, …)
    reduce     sends `outgoing`; leaves in it what was not sent; writes the sum over all hosts to `gradient`
    leave      for each parcel: remembers what was not sent

All of it runs as one collective of the communicator (`Communicator.chain`), so that the collectives of two buckets
cannot interleave.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Self

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError
from ddp.setting import Whole, checked

# --- The memory of a hook --------------------------------------------------------------------------------------------
#
# A step may be rolled back, because a gradient was not finite, say. So a hook reads the memory of the last committed
# step, and writes to another one, until the step is committed or rolled back. That doubles the memory: two tensors for
# each that is kept.


Kind = Literal["summed", "same"]


class Memory:
    """Tensors of a hook, by parameter name.

    Args:
        kind: "summed": each rank has its own, of what it carries, and only their sum over hosts counts; "same": every
            rank has the same.

    Attributes:
        committed: those of the last committed step.
        pending: those of the step that is not yet committed.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.committed: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}

    def buffer_for(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns uninitialized memory of this shape for a pending tensor."""
        spare = self._spare.pop(name, None)
        if spare is None or (spare.shape, spare.dtype, spare.device) != (like.shape, dtype, like.device):
            spare = torch.empty_like(like, dtype=dtype)
        self.pending[name] = spare
        return spare

    def add_to(self, tensor: Tensor, name: str, *, factor: float = 1.0) -> Tensor:
        """Returns the tensor plus `factor` times the committed one, if shapes agree; the sum is pending."""
        pending, committed = self.buffer_for(name, tensor, wide(tensor.dtype)), self.committed.get(name)
        if committed is None or committed.shape != pending.shape:
            return pending.copy_(tensor)
        return torch.add(tensor, committed, alpha=factor, out=pending)

    def forget(self, name: str) -> None:
        """Keeps nothing of this parameter once the step is committed."""
        self.pending[name] = torch.empty(0)

    def commit(self) -> None:
        """Commits the pending tensors."""
        for name, tensor in self.pending.items():
            if (former := self.committed.pop(name, None)) is not None:
                self._spare[name] = former
            if tensor.numel():
                self.committed[name] = tensor
        self.pending.clear()

    def roll_back(self, name: str | None = None) -> None:
        """Drops the pending tensors, of one parameter or of all."""
        for each in list(self.pending) if name is None else [name]:
            if (tensor := self.pending.pop(each, None)) is not None:
                self._spare[each] = tensor


FEW = 1024  # elements that are not worth encoding


@dataclass(eq=False)
class Parcel:
    """A parameter's gradient in transit.

    Attributes:
        name: of the parameter.
        gradient: [numel], in the order of memory: first the host's part of the mean, finally the mean.
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
    """Sums all hosts' gradients, while sending less than all of them.

    Attributes:
        carries_whole: a tensor is carried by one rank of a host, and not by all, each a part.
        error_feedback: it loses the same part of a gradient again and again, so error feedback is put around it
            (`ErrorFeedback`). Hooks that need it have it by default.
        is_corrected: error feedback is put around it.
        momentum: of the velocity that it sends in place of the gradient.
    """

    carries_whole = False
    error_feedback = False
    is_corrected = False
    momentum = 0.0

    def check(self) -> None:  # noqa: B027 (nothing to refuse)
        """Raises ConfigError if it cannot work as it is."""

    def takes(self, gradient: Tensor, shape: tuple[int, int], step: int) -> bool:
        """Returns True if it encodes a gradient, [numel], of this shape.

        Args:
            step: committed steps with this hook; the same on every rank.
        """
        return min(shape) > 1 and gradient.numel() >= FEW and gradient.is_floating_point()

    def enter(self, parcel: Parcel) -> None:  # noqa: B027 (the gradient itself is sent)
        """Turns `outgoing` into what should be sent, in its own memory or in place."""

    @abstractmethod
    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        """Sends, and writes the sums. Ranks run the same collectives; their `parcels` differ in what is theirs."""

    def leave(self, parcel: Parcel) -> None:  # noqa: B027 (nothing is remembered)
        """Remembers what was not sent, once `gradient` is the sum."""

    def memories(self) -> dict[str, Memory]:
        """Returns all state that is kept from step to step, by a name for each kind of memory."""
        return {}


class Around(Hook):
    """A hook around another one, to which it delegates everything.

    Raises:
        ConfigError: the inner object is no hook.
    """

    def __init__(self, hook: Hook) -> None:
        if not isinstance(hook, Hook):
            raise ConfigError(f"{type(self).__name__}({hook!r:.60}): give a hook of ddp.gradients, such as Sign()")
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
    """Returns the type in which gradients of this type are summed."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def summing(gradient: Tensor) -> Iterator[Tensor]:
    """Yields zeros of a wide type to add to; copies the sum to the gradient afterwards."""
    is_wide = gradient.dtype == wide(gradient.dtype)
    total = gradient.zero_() if is_wide else torch.zeros_like(gradient, dtype=wide(gradient.dtype))
    yield total
    if not is_wide:
        gradient.copy_(total)


class Gathering:
    """An all-gather of payloads.

    Args:
        lengths: bytes of each rank's payload.
        like: of the same device.

    Attributes:
        mine: this rank's payload, to be filled before `start`.
    """

    def __init__(self, lengths: Sequence[int], like: Tensor, comm: Communicator) -> None:
        self._comm, in_order = comm, [0] * comm.world_size
        for rank, length in enumerate(lengths):
            in_order[comm.slices[rank]] = length
        self._bounds = [0, *accumulate(in_order)]
        self._everything = like.new_zeros(self._bounds[-1], dtype=torch.uint8)
        self.mine = self._of(comm.rank)

    def start(self) -> Self:
        """Sends, in the background of the chain."""
        self._work = self._comm.all_gather_(self._everything, self._bounds, async_op=True)
        return self

    def wait(self) -> list[Tensor]:
        """Returns every rank's payload, by rank."""
        self._work.wait()
        return list(map(self._of, range(self._comm.world_size)))

    def _of(self, rank: int) -> Tensor:
        number = self._comm.slices[rank]
        return self._everything[self._bounds[number] : self._bounds[number + 1]]


def aligned(numels: Iterable[int], multiple: int = 16) -> list[int]:
    """Returns where pieces of these sizes begin, each at a multiple, and where the last one ends."""
    return [0, *accumulate(-(-numel // multiple) * multiple for numel in numels)]


# --- Error feedback --------------------------------------------------------------------------------------------------
#
#     outgoing = gradient + residual         the hook inside sends a part of it
#     residual = outgoing − what was sent
#
# So nothing is lost, only late: sent + kept = outgoing, on every rank. Without it a biased hook such as `Sign`
# diverges. So the hooks of this package have it around them unless they are made with `error_feedback=False`. The
# residual is in units of the mean gradient, as is everything that hooks see; so one from a large batch weighs no more
# in a small one.
#
# It takes two tensors of this rank's part of the gradients (`Memory`).
#
# Source: Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv 1901.09847, algorithm 2; the idea is from Seide et
# al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.


def corrected(hook: Hook) -> Hook:
    """Returns the hook with error feedback around it, unless that is there already or switched off."""
    if isinstance(hook, ErrorFeedback):
        return hook
    if isinstance(hook, Around):
        around = copy.copy(hook)
        around.hook = corrected(hook.hook)
        return around
    return ErrorFeedback(hook) if hook.error_feedback else hook


class ErrorFeedback(Around):
    """Adds to each gradient the part that earlier steps have not sent.

    Args:
        hook: sends a part of what it gets.
    """

    def __init__(self, hook: Hook) -> None:
        super().__init__(hook)
        self._residual = Memory("summed")
        self.is_corrected = True

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.hook!r})"

    def enter(self, parcel: Parcel) -> None:
        super().enter(parcel)
        if parcel.is_dense and parcel.name not in self._residual.committed:
            return
        parcel.outgoing = self._residual.add_to(parcel.outgoing, parcel.name)

    def leave(self, parcel: Parcel) -> None:
        super().leave(parcel)
        if parcel.is_dense and parcel.name in self._residual.pending:
            self._residual.forget(parcel.name)

    def memories(self) -> dict[str, Memory]:
        return {**super().memories(), "residual": self._residual}


# --- A dense start ---------------------------------------------------------------------------------------------------
#
# While weights change fast, a residual is out of date when it is sent. So the first steps send every gradient dense.


class DenseStart(Around):
    """Sends gradients as they are for some steps, and then by another hook.

    Args:
        hook: sends from then on.
        steps: number of dense steps, counted from the first step with this hook, also across resumes.

    Raises:
        ConfigError: `steps` is negative.
    """

    @checked
    def __init__(self, hook: Hook, steps: Whole) -> None:
        super().__init__(hook)
        self.steps = steps

    def __repr__(self) -> str:
        return f"DenseStart({self.hook!r}, {self.steps})"

    def takes(self, gradient: Tensor, shape: tuple[int, int], step: int) -> bool:
        return step >= self.steps and super().takes(gradient, shape, step)
