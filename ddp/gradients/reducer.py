"""Reducers: each makes one mean of all ranks' buckets, in its own way. Every backward is given one.

AllReduce         every rank gets the mean of the whole bucket
ReduceScatter     every rank gets the mean of its slice
HostReduceScatter every rank gets the mean of the slice that its place on its host stands for
Compression       a hook of this package sends less than all of it (`compression.py`)
CommHook          a user's function does what it likes (`replica/drop_in/in_backward.py`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt, Unpack
from weakref import WeakKeyDictionary

from torch import Tensor

from ddp.comm.call_queue import Work
from ddp.comm.verbs import Eventual, Terms
from ddp.gradients.bucket import Bucket, span
from ddp.optim.norms import BLOCK_NUMEL
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
        tails_ride: totals and step flags may travel in the buckets; a wire format or a hook would round them.
        may_resize: it may resize buckets; then they are ordinary memory, and hold only gradients.
        averages: it divides by the world size, whatever divisor it is given.
        may_hide: its result may be finite though its input is not.
        is_finite: scalar; False if this rank has sent a non-finite gradient in this step. Only if `may_hide`.
    """

    tails_ride = False
    may_resize = False
    averages = False
    may_hide = False
    is_finite: Tensor

    @abstractmethod
    def reduce(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> InFlight | None:
        """Sums a bucket over the ranks and divides it. Returns the work if it is still in flight."""

    def take_back(self, name: str | None = None) -> None:  # noqa: B027 (nothing is remembered)
        """Rolls back the reducer's state of the last step, of one parameter or of all, because the step is not made."""


class Collective(Reducer):
    """A reducer that is one collective of the communicator. A rank may get only the mean of one slice of each bucket.

    Args:
        wire: the format in which buckets travel between hosts.
        num_shards: a bucket's rows are partial sums of this number of shards; None: it has one, this rank's sum.

    Attributes:
        is_sliced: the slice is used in place, in the bucket, and the rest of `p.grad` is undefined.
    """

    is_sliced = False

    def __init__(self, comm: Communicator, wire: WireName | None = None, num_shards: int | None = None) -> None:
        self._comm, self._wire, self._num_shards = comm, wire, num_shards

    def slice_of(self, bucket: Bucket) -> tuple[int, int]:
        """Returns where this rank's slice of a bucket begins, and where it ends: here, the whole bucket."""
        return 0, len(bucket.gradients)

    def reduce(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> InFlight | None:
        memory, terms = bucket.flat, Terms(divide_by=divide_by, wire=self._wire, label=label)
        if self._num_shards is not None:
            memory, terms = bucket.rows, Terms(divide_by=divide_by, num_shards=self._num_shards, label=label)
        elif self._wire is not None:
            bucket.clear_padding()
        work = self._verb_for(bucket)(memory, async_op=async_op, **terms)
        return work if isinstance(work, Work) else None

    @abstractmethod
    def _verb_for(self, bucket: Bucket) -> Callable[..., Eventual[Tensor]]:
        """Returns the collective for a bucket. It takes the memory, one row or rows of partial sums, and `Terms`."""


class AllReduce(Collective):
    """Gives every rank the whole mean."""

    def __init__(self, comm: Communicator, wire: WireName | None = None, num_shards: int | None = None) -> None:
        super().__init__(comm, wire, num_shards)
        self.tails_ride = wire is None

    def _verb_for(self, bucket: Bucket) -> Callable[..., Eventual[Tensor]]:
        return self._comm.all_reduce if bucket.flat.device == self._comm.device else self._through_other_device

    def _through_other_device(self, memory: Tensor, *, async_op: bool, **terms: Unpack[Terms]) -> Tensor:
        """All-reduces in the foreground, in a model on several devices."""
        return memory.copy_(self._comm.all_reduce(memory.to(self._comm.device), **terms))


class ReduceScatter(Collective):
    """Gives every rank the mean of its slice. Since no rank gets a whole bucket, none carries a tail.

    Slices begin at tensors, or at blocks of large ones (`optim/norms.py`). So every norm has the same bits as without
    slices.
    """

    is_sliced = True

    def __init__(self, comm: Communicator, wire: WireName | None = None, num_shards: int | None = None) -> None:
        super().__init__(comm, wire, num_shards)
        self._bounds: WeakKeyDictionary[Bucket, list[int]] = WeakKeyDictionary()

    def bounds_of(self, bucket: Bucket) -> list[int]:
        """Returns where each rank's slice of a bucket begins, in the order of slices, and where the last one ends."""
        if bucket not in self._bounds:
            self._bounds[bucket] = slice_bounds(bucket, self._comm.world_size)
        return self._bounds[bucket]

    def cut(self, bucket: Bucket, bounds: list[int]) -> None:
        """Cuts a bucket at these bounds."""
        self._bounds[bucket] = bounds

    def slice_of(self, bucket: Bucket) -> tuple[int, int]:
        bounds, number = self.bounds_of(bucket), self._comm.slices[self._comm.rank]
        return bounds[number], bounds[number + 1]

    def _verb_for(self, bucket: Bucket) -> Callable[..., Eventual[Tensor]]:
        return partial(self._comm.reduce_scatter_, bounds=self.bounds_of(bucket))


class HostReduceScatter(ReduceScatter):
    """Gives every rank the mean of a slice, which the ranks in the same place on other hosts get, too.

    If hosts have different numbers of ranks, or gradients travel in a wire format, it is an all-reduce.
    """

    def __init__(self, comm: Communicator, wire: WireName | None = None, num_shards: int | None = None) -> None:
        super().__init__(comm, wire, num_shards)
        self._are_equal_hosts = len({len(host) for host in comm.hosts}) == 1
        self._scatters = self._are_equal_hosts and wire is None
        self.tails_ride = not self._scatters and wire is None

    def slice_of(self, bucket: Bucket) -> tuple[int, int]:
        hosts, place = self._comm.host_partition, self._comm.host_partition.places[self._comm.rank]
        if self._are_equal_hosts:
            bounds = self.bounds_of(bucket)[:: hosts.num_hosts]
        else:  # ranks without a counterpart on the smallest host have no slice
            bounds = slice_bounds(bucket, hosts.num_places)
            bounds += [bounds[-1]] * (max(hosts.places) + 2 - len(bounds))
        return bounds[place], bounds[place + 1]

    def _verb_for(self, bucket: Bucket) -> Callable[..., Eventual[Tensor]]:
        return partial(super()._verb_for(bucket), on_hosts=True) if self._scatters else self._comm.all_reduce


def slice_bounds(bucket: Bucket, num_slices: int, held: Sequence[int] = ()) -> list[int]:
    """Returns where the slices of a bucket begin, and where the last one ends.

    Args:
        held: by slice, the elements of other buckets, with which they should be about equally long; none: alone.
    """
    starts = [0, *accumulate(span(slot.parameter) for slot in bucket.slots)]
    blocks = [
        begin
        for slot, start in zip(bucket.slots, starts, strict=False)
        for begin in range(start, start + slot.parameter.numel(), BLOCK_NUMEL)
    ]
    borders, bounds = [*blocks, starts[-1]], [0]
    level = (sum(held) + starts[-1]) / num_slices
    wants = [max(0.0, level - each) for each in held] or [1.0] * num_slices
    for before in accumulate(wants[:-1]):
        wanted = min(starts[-1], starts[-1] * before / (sum(wants) or 1))  # not beyond it by rounding
        right = bisect_left(borders, wanted)
        bounds.append(min(borders[right - 1], borders[right], key=lambda border: abs(border - wanted)))
    return [*bounds, starts[-1]]
