"""A layout: which gradients share a bucket, in which order buckets are reduced, and the memory that they live in.

A layout is planned once and never changed. The first one has the parameters in the reverse order of registration,
because backward reaches the last layers first. The first backward shows in which order gradients really become ready.
At its end all ranks take the order of the first rank that had samples, and a layout in that order is the first one's
successor.

A layout is a function of the parameters, their order and the limits alone, never of the world size. Its memory is
allocated when the first bucket is about to be filled, and not before. So a replica can be made, copied and loaded
without the other ranks, and the first layout, which is replaced before it is used, takes no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.gradients.totals import NUM_TOTALS, NUM_VERDICTS

MIB = 1 << 20
Named = Sequence[tuple[str, nn.Parameter]]


class Layout:
    """The buckets of some parameters.

    Args:
        named: the parameters with their names, in the order of registration; the same on every rank.
        limits: bytes at which bucket 0, 1, 2, … is closed; the last one holds for all that follow.
        order: names in the order in which gradients become ready, as a backward has shown it; None: not known yet.
        sparse: names of the parameters whose gradients are sparse tensors, which live in no bucket.
        for_hook: a communication hook reduces the buckets. They are ordinary memory then, and hold gradients and
            nothing else, because a hook may resize them.
        tails_ride: totals and verdicts travel in buckets where they can, else apart. A wire format or a hook would
            round them.

    Attributes:
        slots: one for each parameter, in the order of registration.
        parameters: the same parameters, without their names.
        sparse: those slots that live in no bucket.
        slot_of: by the parameter's id, its slot.
        buckets: in the order of reduction.
        index_of: by the parameter's id, the index of its bucket.
        is_for_hook: a communication hook reduces the buckets.
        totals, verdicts: the tails that carry them, or tensors of their own; they exist from `allocate` on.
        totals_ride, verdicts_ride: a bucket carries them.
        has_memory: `allocate` has been called.
    """

    totals: Tensor
    verdicts: Tensor

    def __init__(
        self,
        comm: Communicator,
        named: Named,
        *,
        limits: Sequence[int],
        order: Sequence[str] | None = None,
        sparse: Collection[str] = (),
        for_hook: bool = False,
        tails_ride: bool = True,
    ) -> None:
        self._comm, self._named, self._limits = comm, named, limits
        self._sparse, self._tails_ride = sparse, tails_ride
        self.is_for_hook, self.is_learned = for_hook, order is not None
        self.slots = [Slot(index, name, parameter) for index, (name, parameter) in enumerate(named)]
        self.parameters = [parameter for _, parameter in named]
        self.sparse = [slot for slot in self.slots if slot.name in sparse]
        self.slot_of = {id(slot.parameter): slot for slot in self.slots}
        by_name = {slot.name: slot for slot in reversed(self.slots) if slot.name not in sparse}
        known = [by_name[name] for name in order or () if name in by_name]
        in_order = dict.fromkeys([*known, *by_name.values()])
        self._order = [slot.name for slot in in_order]
        groups = plan_buckets(in_order, limits=limits)
        may_ride = tails_ride and not for_hook and bool(groups)
        self.totals_ride = may_ride and self._is_wide(groups[0])
        self.verdicts_ride = may_ride and self._is_wide(groups[-1])
        num_tail = [0] * len(groups)
        if self.totals_ride:
            num_tail[0] += NUM_TOTALS
        if self.verdicts_ride:
            num_tail[-1] += NUM_VERDICTS
        self.buckets = [
            Bucket(index, group, num, is_last=index == len(groups) - 1)
            for index, (group, num) in enumerate(zip(groups, num_tail, strict=True))
        ]
        self.index_of = {each: bucket.index for bucket in self.buckets for each in bucket.ids}
        self.successor: Layout | None = None
        self.has_memory = False
        self._shared: list[Tensor] = []  # what belongs to the communicator
        self._release = weakref.finalize(self, _release, comm, self._shared)
        self._release.atexit = False

    @property
    def order(self) -> list[str] | None:
        """Names in the order in which gradients become ready; None as long as that is not known."""
        return self._order if self.is_learned else None

    @property
    def names(self) -> list[list[str]]:
        """Names of the gradients that are reduced together."""
        return [[slot.name for slot in bucket.slots] for bucket in self.buckets]

    def in_order(self, order: Sequence[str]) -> Layout:
        """Returns this layout's successor: the same parameters in another order."""
        return self._succeeded_by(order=order)

    def for_hooks(self) -> Layout:
        """Returns this layout's successor for a communication hook."""
        return self._succeeded_by(order=self.order, for_hook=True)

    @property
    def latest(self) -> Layout:
        """The last successor, or this layout if there is none."""
        layout = self
        while layout.successor is not None:
            layout = layout.successor
        return layout

    def _succeeded_by(self, **changed: Any) -> Layout:
        same: dict[str, Any] = {"limits": self._limits, "sparse": self._sparse, "for_hook": self.is_for_hook}
        self.successor = type(self)(self._comm, self._named, tails_ride=self._tails_ride, **(same | changed))
        return self.successor

    def allocate(self) -> None:
        """Allocates the buckets' memory, unless it exists already. Collective if it does not."""
        if self.has_memory:
            return
        for bucket in self.buckets:
            bucket.allocate(self._memory_for)
        apart = torch.zeros(NUM_TOTALS + NUM_VERDICTS, dtype=torch.float64, device=self._comm.device)
        self.totals = self.buckets[0].tail[:NUM_TOTALS] if self.totals_ride else apart[:NUM_TOTALS]
        self.verdicts = self.buckets[-1].tail[-NUM_VERDICTS:] if self.verdicts_ride else apart[NUM_TOTALS:]
        self.has_memory = True

    def _memory_for(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device != self._comm.device or self.is_for_hook:
            return torch.zeros(numel, dtype=dtype, device=device)
        self._shared.append(self._comm.allocate(numel, dtype))
        return self._shared[-1]

    def _is_wide(self, group: list[Slot]) -> bool:
        """Returns True if a bucket of these can carry a tail. Sums of counts are not exact in a narrow type."""
        like = group[0].parameter
        return like.dtype in (torch.float32, torch.float64) and like.device == self._comm.device


def plan_buckets(slots: Iterable[Slot], *, limits: Sequence[int]) -> list[list[Slot]]:
    """Returns the slots of each bucket.

    Each dtype and device has an open bucket of its own. The result is in the order in which buckets will be full.

    Args:
        slots: in the order in which gradients are expected.
        limits: bytes at which bucket 0, 1, 2, … is closed; the last one holds for all that follow.
    """
    groups: list[list[Slot]] = []
    completed_by: list[int] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}  # kind → its group, and bytes in it
    for position, slot in enumerate(slots):
        kind = slot.parameter.dtype, slot.parameter.device
        if kind not in open_groups:
            open_groups[kind] = len(groups), 0
            groups.append([])
            completed_by.append(0)
        number, num_bytes = open_groups[kind]
        groups[number].append(slot)
        completed_by[number] = position
        num_bytes += span(slot.parameter) * slot.parameter.element_size()
        open_groups[kind] = number, num_bytes
        if num_bytes >= limits[min(number, len(limits) - 1)]:
            del open_groups[kind]
    return [group for _, group in sorted(zip(completed_by, groups, strict=True), key=lambda pair: pair[0])]


def bucket_limits(
    bucket_cap_mb: float | None = None,
    bucket_cap_mb_list: Sequence[float] | None = None,
    *,
    first_bucket_mb: float | None = None,
) -> list[int]:
    """Returns the bytes at which bucket 0, 1, 2, … is closed, from MiB; 1 and 25 MiB where nothing is given.

    Raises:
        ValueError: both kinds of caps are given, or one is not positive.
    """
    if bucket_cap_mb is not None and bucket_cap_mb_list is not None:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb} and bucket_cap_mb_list={bucket_cap_mb_list} exclude each other; give one"
        )
    rest = 25.0 if bucket_cap_mb is None else bucket_cap_mb
    first = min(rest, 1.0 if first_bucket_mb is None else first_bucket_mb)
    caps = [first, rest] if bucket_cap_mb_list is None else list(map(float, bucket_cap_mb_list))
    if not caps or min(caps) <= 0:
        raise ValueError(f"bucket caps of {caps} MiB: give at least one, and positive ones")
    return [max(1, int(cap * MIB)) for cap in caps]


def _release(comm: Communicator, shared: list[Tensor]) -> None:
    """Gives the memory back when a layout is forgotten; the model may live on, under another replica."""
    for flat in shared:
        comm.free(flat)
