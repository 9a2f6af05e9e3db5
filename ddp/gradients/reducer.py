"""Reducers: each makes of all ranks' buckets one mean, in its own way. Every backward is given one.

AllReduce         every rank gets the mean of the whole bucket
ReduceScatter     every rank gets the mean of its slice (`replica/sharded.py`)
Compression       a hook of this package sends less than all of it (`hooks/compression.py`)
CommHook          a user's function does what it likes (`replica/drop_in/comm_hook.py`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt

from torch import Tensor

from ddp.comm.call_queue import Work
from ddp.comm.verbs import Terms
from ddp.gradients.bucket import Bucket
from ddp.setting import WireName

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator


class InFlight(Protocol):
    """A reduction in flight; `Work` of the communicator is one.

    Attributes:
        done_s: when it ended.
    """

    done_s: float

    def wait(self) -> Any:
        """Waits until the bucket holds the mean."""

    def is_completed(self) -> bool:
        """Returns True once `wait` returns at once."""


class Reducer(ABC):
    """Makes of all ranks' buckets their mean.

    Attributes:
        tails_ride: totals and verdicts may travel in the buckets; a wire format or a hook would round them.
        may_resize: it may resize buckets, which are ordinary memory then, and hold gradients and nothing else.
        averages: it divides by the world size, whatever divisor it is given.
        may_hide: what it makes of numbers that are not finite may be finite.
        is_finite: all gradients that this rank has sent in this step were finite, as far as buckets do not show it; on
            a GPU a scalar there.
    """

    tails_ride = False
    may_resize = False
    averages = False
    may_hide = False
    is_finite: bool | Tensor = True

    @abstractmethod
    def reduce(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> InFlight | None:
        """Sums a bucket over the ranks and divides it. Returns the work if it is still in flight."""

    def take_back(self, name: str | None = None) -> None:  # noqa: B027 (nothing is remembered)
        """Forgets what the last step has left behind, of one parameter or of all, because it is not made."""


class AllReduce(Reducer):
    """Gives every rank the whole mean.

    Args:
        wire: the format in which buckets travel between hosts.
        num_shards: a bucket's rows are partial sums of this number of shards; None: it has one, this rank's sum.
    """

    def __init__(self, comm: Communicator, wire: WireName | None = None, num_shards: int | None = None) -> None:
        self._comm, self._wire, self.tails_ride, self._num_shards = comm, wire, wire is None, num_shards

    def reduce(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> InFlight | None:
        comm, flat = self._comm, bucket.flat
        if self._wire is not None and self._num_shards is None:
            bucket.clear_padding()
        if flat.device != comm.device:  # a model on several devices
            flat.copy_(comm.all_reduce(flat.to(comm.device), divide_by=divide_by, wire=self._wire, label=label))
            return None
        how: Terms = {"divide_by": divide_by, "wire": self._wire, "label": label}
        if self._num_shards is not None:
            flat, how = bucket.rows, {"divide_by": divide_by, "num_shards": self._num_shards, "label": label}
        work = comm.all_reduce(flat, async_op=async_op, **how)
        return work if isinstance(work, Work) else None
