"""A layout: which gradients share a bucket, in which order buckets are reduced, and the memory that they live in.

A layout is first planned with the parameters in the reverse order of registration, because backward reaches the last
layers first. The first backward shows in which order gradients really become ready. At its end all ranks take the order
of the first rank that had samples, and the layout is planned again, in that order.

A layout is a function of the parameters, their order and the grouping alone, never of the world size. Its memory is
allocated when the first bucket is about to be filled, and not before. So a replica can be made, copied and loaded
without the other ranks, and the first plan, which is replaced before it is used, takes no memory.

A strategy may give the groups (`replica/units.py`). They are not planned again, and only their order changes; and if
gradients are added up by ranks, a bucket has memory only while it is reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from ddp.collectives.shards import most_nodes
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.gradients.totals import NUM_FLAGS, NUM_TOTALS, Rider

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator
    from ddp.gradients.reducer import Reducer

MIB = 1 << 20
Named = Sequence[tuple[str, nn.Parameter]]


class Grouping(Protocol):
    """Chooses the gradients that share a bucket.

    Attributes:
        is_fixed: the groups do not depend on the order in which gradients become ready.
    """

    is_fixed: bool

    def groups(self, slots: Iterable[Slot]) -> list[list[Slot]]:
        """Returns the slots of each bucket, in the order of reduction.

        Args:
            slots: in the order in which gradients are expected.
        """


class BySize:
    """Closes a bucket once it has reached a size.

    Args:
        limits: bytes at which bucket 0, 1, 2, … is closed; the last one holds for all that follow.
    """

    is_fixed = False

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = limits

    def groups(self, slots: Iterable[Slot]) -> list[list[Slot]]:
        return plan_buckets(slots, limits=self._limits)


class Layout:
    """The buckets of some parameters.

    Args:
        named: the parameters with their names, in the order of registration; the same on every rank.
        reducer: of the buckets; tells whether they may carry tails, or be resized.
        grouping: chooses which gradients share a bucket.
        sparse: names of the parameters whose gradients are sparse tensors, which live in no bucket.
        num_shards: gradients are added up by this number of shards of the batch; None: by ranks. With shards, totals
            and step flags travel separately.

    Attributes:
        slots: one for each parameter, in the order of registration.
        parameters: the same parameters, without their names.
        sparse: those slots that live in no bucket.
        slot_of: by the parameter's id, its slot.
        buckets: in the order of reduction.
        index_of: by the parameter's id, the index of its bucket.
        order: names in the order in which gradients become ready; None as long as that is not known.
        is_learned: the order is known, or the groups are fixed.
        is_for_hook: a communication hook reduces the buckets.
        totals, flags: how the totals and the step flags travel.
        num_rows: rows of each bucket: the most partial sums of shards that a rank may end with, or 1.
        kept: slots of which the program keeps gradients (`bucket.py`, note "kept"); from `allocate` on.
        may_move: buckets may move out of memory in which the program keeps gradients.
        has_memory: `allocate` has been called.
        lends: a bucket has memory only while it is reduced.
    """

    kept: Sequence[Slot] = ()
    may_move = False

    def __init__(
        self,
        comm: Communicator,
        named: Named,
        reducer: Reducer,
        *,
        grouping: Grouping,
        sparse: Collection[str],
        num_shards: int | None = None,
    ) -> None:
        self._comm, self._grouping, self._tails_ride = comm, grouping, reducer.tails_ride and num_shards is None
        self.lends = grouping.is_fixed and num_shards is None
        self._num_shards = num_shards
        self.num_rows = 1 if num_shards is None else most_nodes(comm.world_size, num_shards)
        self.slots = [Slot(index, name, parameter) for index, (name, parameter) in enumerate(named)]
        self.parameters = [parameter for _, parameter in named]
        self.sparse = [slot for slot in self.slots if slot.name in sparse]
        self.slot_of = {id(slot.parameter): slot for slot in self.slots}
        self.plan(None, for_hook=reducer.may_resize)

    def plan(self, order: Sequence[str] | None, *, for_hook: bool) -> None:
        """Plans the buckets, which have no memory yet.

        Args:
            order: names in the order in which gradients become ready, as a backward has shown it; None: not known yet.
            for_hook: a communication hook reduces the buckets. They are ordinary memory then, and hold gradients and
                nothing else, because a hook may resize them.
        """
        sparse = {slot.name for slot in self.sparse}
        by_name = {slot.name: slot for slot in reversed(self.slots) if slot.name not in sparse}
        known = [by_name[name] for name in order or () if name in by_name]
        in_order = dict.fromkeys([*known, *by_name.values()])
        self.order = None if order is None else [slot.name for slot in in_order]
        self.is_learned = order is not None or self._grouping.is_fixed
        self.is_for_hook, self.has_memory = for_hook, False
        groups = self._grouping.groups(in_order)
        may_ride = self._tails_ride and not for_hook and bool(groups)
        totals_ride = may_ride and self._is_wide(groups[0])
        flags_ride = may_ride and self._is_wide(groups[-1])
        num_tail = [0] * len(groups)
        if totals_ride:
            num_tail[0] += NUM_TOTALS
        if flags_ride:
            num_tail[-1] += NUM_FLAGS
        self.buckets = [
            Bucket(index, group, num, is_last=index == len(groups) - 1)
            for index, (group, num) in enumerate(zip(groups, num_tail, strict=True))
        ]
        self.index_of = {each: bucket.index for bucket in self.buckets for each in bucket.ids}
        first, last = (self.buckets[0], self.buckets[-1]) if self.buckets else (None, None)
        self.totals, self.flags = (
            Rider(self._comm, carrier, place, (self.num_rows, numel), self._num_shards)
            for carrier, place, numel in (
                (first if totals_ride else None, slice(NUM_TOTALS), NUM_TOTALS),
                (last if flags_ride else None, slice(-NUM_FLAGS, None), NUM_FLAGS),
            )
        )

    def allocate(self) -> None:
        """Allocates the buckets' memory, unless they have it already. Collective if they have none."""
        if self.has_memory:
            return
        for bucket in () if self.lends else self.buckets:
            like = bucket.slots[0].parameter
            if like.device != self._comm.device or self.is_for_hook:
                bucket.allocate(torch.zeros(bucket.numel, dtype=like.dtype, device=like.device))
                continue
            memory = self._comm.allocate(self.num_rows * bucket.numel, like.dtype)
            bucket.allocate(memory, num_rows=self.num_rows)
            # given back with the bucket, because the model may live on, under another replica
            weakref.finalize(bucket, self._comm.free, memory).atexit = False
        for rider in (self.totals, self.flags):
            rider.allocate()
        self._find_tails()
        self.has_memory = True

    def reorder(self, buckets: Sequence[Bucket]) -> None:
        """Reduces the buckets in this order from now on. They carry no tails."""
        self.buckets[:] = buckets
        for index, bucket in enumerate(buckets):
            bucket.number(index, is_last=index == len(buckets) - 1)
        self.index_of = {each: bucket.index for bucket in buckets for each in bucket.ids}

    def _find_tails(self) -> None:
        self.kept = [slot for slot in self.slots if slot.is_kept]
        for rider in (self.totals, self.flags):
            rider.find()

    def settle(self, buckets: Sequence[Bucket]) -> None:
        """Makes gradients in their places those places, and moves buckets out of memory that the program uses."""
        for bucket in buckets:
            bucket.adopt()
        if self.may_move and self.has_memory and sum(map(Bucket.spare_kept, buckets)):
            self._find_tails()

    def hand_out_copies(self) -> None:
        """Gives parameters whose gradients the program keeps their means in their own memory."""
        for slot in self.kept:
            if slot.parameter.grad is slot.view and slot.view is not None:
                slot.parameter.grad = slot.view.clone()

    def _is_wide(self, group: list[Slot]) -> bool:
        """Returns True if a bucket of these can carry a tail. Sums of counts are not exact in a narrow type."""
        like = group[0].parameter
        return like.dtype in (torch.float32, torch.float64) and like.device == self._comm.device


def plan_buckets(slots: Iterable[Slot], *, limits: Sequence[int]) -> list[list[Slot]]:
    """Returns the slots of each bucket.

    Each dtype and device has its own open bucket. The result is in the order in which buckets will be full.

    Args:
        slots: in the order in which gradients are expected.
        limits: bytes at which bucket 0, 1, 2, … is closed; the last one holds for all that follow.
    """
    groups: dict[int, list[Slot]] = {}  # in the order of their last slots
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[int, int]] = {}  # kind → its group, and bytes in it
    for slot in slots:
        kind = slot.parameter.dtype, slot.parameter.device
        number, num_bytes = open_groups.get(kind, (len(groups), 0))
        group = groups.pop(number, [])
        group.append(slot)
        groups[number] = group
        num_bytes += span(slot.parameter) * slot.parameter.element_size()
        open_groups[kind] = number, num_bytes
        if num_bytes >= limits[min(number, len(limits) - 1)]:
            del open_groups[kind]
    return list(groups.values())


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
