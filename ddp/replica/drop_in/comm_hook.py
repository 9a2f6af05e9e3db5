"""Communication hooks: a user's functions that average a bucket in place of the all-reduce.

    def hook(state, bucket) -> Future[Tensor]        the protocol of torch's `register_comm_hook`
        bucket.buffer()                              [numel], the gradients of this rank; not divided by anything
        bucket.gradients(), bucket.parameters()      views of the buffer, and whose they are
        bucket.index(), bucket.is_last()             in the order of reduction
        bucket.set_buffer(tensor)                    another tensor as the buffer
                                                     the future's value, shaped like the buffer, is the result

torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) run unchanged. They communicate over process groups of
torch.distributed; this project's collectives have a process group of their own, so neither can take the other's
messages.

Order. The hook is called for a bucket once its future for the bucket before is done. A hook whose steps are chained
futures (PowerSGD) starts its second collective whenever its first one ends. With two buckets in flight, that order
could differ from rank to rank, and the ranks would hang. A hook that starts all its collectives when it is called may
be registered with `overlap=True`; then its futures are awaited only when backward has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.errors import HookFailed, PeerLost
from ddp.gradients.bucket import Bucket

HookFunction = Callable[[Any, Any], "torch.futures.Future[Tensor]"]


class GradBucket:
    """A bucket as hooks see it: the verbs of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket, self._is_last, self._buffer = bucket, is_last, bucket.gradients

    def index(self) -> int:
        """Returns the bucket's number in the order of reduction."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Returns the gradients side by side, [numel], with zeros between them."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Takes another tensor as the buffer."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Returns the parameters' gradients, as views of the present buffer."""
        return self._bucket.views_of(self._buffer)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters, in the order of their gradients."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Returns True for the last bucket of a step."""
        return self._is_last


@dataclass
class CommHook:
    """A hook, and those of its futures that nobody has waited for yet.

    Args:
        overlap: the hook may be called before the last future is done.
        comm: gives waits their deadline and says who is missing.

    Raises (all methods):
        HookFailed: the hook raised, or returned something other than promised; the message names the bucket.
        PeerLost: the others did not do their part within the deadline.
    """

    hook: HookFunction
    state: Any
    comm: Communicator
    overlap: bool = False
    _pending: list[tuple[Bucket, torch.futures.Future[Tensor], str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The hook's name in messages."""
        return getattr(self.hook, "__qualname__", type(self.hook).__qualname__)

    def launch(self, bucket: Bucket, buckets: Sequence[Bucket], step: int) -> None:
        """Calls the hook for a bucket, once the future before it is done unless the hook overlaps."""
        if not self.overlap:
            self.finish()
        where = f"step {step}, {bucket.label}"
        seen = GradBucket(bucket, is_last=bucket is buckets[-1])
        try:
            future = self.hook(self.state, seen)
        except Exception as error:
            hook = f"communication hook {self.name}"
            raise _failure(self.comm, f"the {hook} raised {error!r} ({where})", f"{hook}, {where}") from error
        if not isinstance(future, torch._C.Future):  # a Work's future is one, but no torch.futures.Future
            raise HookFailed(
                f"the communication hook {self.name} returned a {type(future).__name__} ({where}); "
                "it must return a torch.futures.Future with the reduced buffer, also where it communicates nothing"
            )
        self._pending.append((bucket, future, where))

    def finish(self) -> None:
        """Waits for the futures, and puts what they hold into their buckets."""
        while self._pending:
            bucket, future, where = self._pending.pop(0)
            self._put(bucket, result_of(self.comm, future, hook=f"communication hook {self.name}", where=where), where)

    def _put(self, bucket: Bucket, result: Any, where: str) -> None:
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]  # what a Work's own future holds
        gradients = bucket.gradients
        if not isinstance(result, Tensor) or result.numel() != gradients.numel():
            found = f"{list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise HookFailed(
                f"the future of the communication hook {self.name} holds {found} ({where}); "
                f"it must hold one tensor like the bucket's buffer, [{gradients.numel()}]"
            )
        if result.data_ptr() != gradients.data_ptr() or result.dtype != gradients.dtype:
            gradients.copy_(result.detach().view(-1))


def result_of(comm: Communicator, future: torch.futures.Future[Any], *, hook: str, where: str) -> Any:
    """Waits for the result of a hook's future; on CUDA, makes the current stream wait for it. Collective.

    Raises:
        HookFailed: the future holds an error.
        PeerLost: the others did not do their part within the communicator's deadline, or a rank is lost.
    """
    arrived, label = threading.Event(), f"{hook}, {where}"
    future.add_done_callback(lambda _: arrived.set())
    comm.peers.wait_for(arrived.wait, label=label)  # even if it is done: all ranks must number their waits alike
    try:
        return future.wait() if comm.device.type == "cuda" else future.value()
    except Exception as error:
        raise _failure(comm, f"the future of the {hook} failed: {error} ({where})", label) from error


def _failure(comm: Communicator, message: str, label: str) -> HookFailed | PeerLost:
    """Returns PeerLost if a rank is lost, because that breaks the process group's connections; else HookFailed."""
    return comm.peers.find_lost(label) or HookFailed(message)


def check_hook(hook: Any) -> None:
    """Raises TypeError unless it can be called with a state and a bucket."""
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable as hook(state, bucket), got {hook!r}")
