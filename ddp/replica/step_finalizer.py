"""Finalizes a step, once all its gradients have been reduced; `Division` is the one place that divides them.

    keep         keeps the gradient that a parameter had, before zeros or the mean are written over it
    filled       records which gradients of a full bucket are undefined, and on request its squared norm
    write_flags  writes this rank's findings about its own gradients (`StepFlags`) to where they travel
    settle       reads all ranks' totals and flags, and completes the division. If a hook has sent a non-finite
                 gradient, refuses the step. Parameters that no rank has used get back the gradient that they had

Note "parameters without a gradient". They contribute zeros (or what they had accumulated), so that no rank ever waits
for them. Each rank's *flags* say if it had such parameters. The flags travel last, in the tail of the last bucket or in
their own message. The ranks compare parameter by parameter only if a flag is set on any rank.

    used on another rank     gets the mean, to which this rank has contributed zeros (or what it had accumulated)
    used on no rank          keeps the gradient that it had: None stays None
    undefined                autograd reaches the parameter with an undefined gradient (a function's backward has
                             returned None): treated as unused, and always allowed
    not allowed              every rank raises UnusedParameters before the next forward, with names by rank

`Usage` expects every gradient, or, with `find_unused_parameters`, those that the graph of each backward leads to;
`StaticGraph` expects as many as in the first step.

Note "late". If collectives are enqueued on a GPU, the host does not wait for their results. The GPU divides by the
exact count. Totals and flags are copied to the host, and `read_flags` reads them: when the caller asks, or at the
latest at the end of the next backward. By then the optimizer has stepped. So an unused parameter is reported one step
later than on the CPU, and one whose gradient is undefined counts as zero for these two steps, as in torch's class. A
step that needs the flags before it continues (`find_unused_parameters`, a hook, sparse gradients) waits.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, SupportsInt

import torch
from torch import Tensor

from ddp.comm.objects import all_gather_object
from ddp.comm.reduction import OnDevice, scaled_
from ddp.errors import ConfigError, UnusedParameters
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.totals import Parts, Totals, global_count, sent
from ddp.replica.autograd import is_in_backward, will_accumulate

if TYPE_CHECKING:
    from ddp.comm.call_queue import HostCopy
    from ddp.comm.communicator import Communicator
    from ddp.gradients.layout import Layout
    from ddp.gradients.reducer import Reducer


class StepFlags(NamedTuple):
    """Findings of a rank about its own gradients; after the reduction, of all ranks together.

    Attributes:
        has_unused: backward has not reached a parameter.
        has_undefined: backward has reached a parameter, but computed no gradient for it.
        has_non_finite: a gradient was not finite, and the hook that has sent it may have hidden that.
        parts: the measured parts of the batch.
    """

    has_unused: bool = False
    has_undefined: bool = False
    has_non_finite: bool = False
    parts: Parts = Parts()

    def write(self, tail: Tensor) -> None:
        """Writes this rank's flags into a tail, [NUM_FLAGS]."""
        *found, (squares, *counts) = self
        if any((*found, *counts)):
            tail[:-1].copy_(sent([*found, *counts], tail))
            tail[-1] = squares
        else:
            tail.zero_()

    @classmethod
    def read(cls, tail: Sequence[float], *, divided_by: float) -> StepFlags:
        """Reads the flags that any rank has set from the numbers of a tail, [NUM_FLAGS].

        Args:
            divided_by: what the tail was divided by on its way.
        """
        unused, undefined, non_finite, *counts, squares = tail
        parts = Parts(squares * divided_by, *(count * divided_by for count in counts))
        return cls(unused > 0, undefined > 0, non_finite > 0, parts)

    @staticmethod
    def non_finite_in(tail: Tensor) -> Tensor:
        """Returns the element of a tail that is `has_non_finite`."""
        return tail[StepFlags._fields.index("has_non_finite")]


class Use(IntEnum):
    """The use that a backward has made of a parameter."""

    NONE = 0  # not reached
    UNDEFINED = 1  # reached with an undefined gradient
    GRADIENT = 2


class Usage:
    """Expects one gradient of every parameter. Its methods stand in the order of a backward.

    Args:
        finds_unused: expects the gradients that the graph of each backward leads to; a parameter without one is no
            error.

    Attributes:
        never: names of the parameters that are known to be used on no rank.
        protocol_error: an error of this rank that all ranks are to raise; "": there is none.
        looks_ahead: the graph of a backward may show which gradients to expect.
        varies: the set of gradients may differ from step to step, so that each step must wait for the flags.
    """

    never: Set[str] = frozenset()
    protocol_error, looks_ahead = "", True

    def __init__(self, comm: Communicator, *, finds_unused: bool = False) -> None:
        self._comm, self._finds_unused, self.varies = comm, finds_unused, finds_unused

    def begin(self, layout: Layout) -> Usage:
        """Begins a backward. Returns the usage of this backward, valid also after the next one begins (note "late")."""
        return self

    def expected(self, layout: Layout) -> Mapping[int, int] | None:
        """Returns how many gradients the running backward will compute, by the parameter's id; None: one of each."""
        finds = self.looks_ahead and self._finds_unused and is_in_backward()
        return {id(each): 1 for each in will_accumulate(layout.parameters)} if finds else None

    def must_compare(self, layout: Layout, missing: Sequence[Slot], computed: Callable[[], Iterable[Tensor]]) -> bool:
        """Returns True if the ranks must compare which parameters they have used.

        Args:
            missing: slots that this rank's backward has not reached.
            computed: returns the parameters of which it has computed gradients, once for each gradient.
        """
        return bool(missing or self.protocol_error)

    def used_by_none(
        self, layout: Layout, missing: Collection[Slot], undefined: Collection[Slot], flags: StepFlags
    ) -> list[Slot]:
        """Returns the slots for which no rank has a gradient, once a flag shows that some rank lacks some. Collective.

        Args:
            missing: slots that this rank's backward has not reached.
            undefined: slots that it has reached with an undefined gradient.
            flags: of all ranks.
        """
        uses = self._greatest_uses(layout.slots, missing, undefined)
        return [slot for slot, use in zip(layout.slots, uses, strict=True) if use is not Use.GRADIENT]

    def unused_error(self, missing: Sequence[Slot] | None) -> UnusedParameters | ConfigError | None:
        """Returns the error that names the missing parameters of every rank; None if they are none. Collective.

        Args:
            missing: of this rank, in the order of registration; None: it had no backward, so that they are no error.
        """
        if self._finds_unused:
            return None
        mine = None if missing is None else [f"{slot.name} ({slot.index})" for slot in missing]
        everyone = all_gather_object(self._comm, mine)
        if not any(everyone):
            return None
        lines = [f"  rank {rank}: {', '.join(n) or 'none'}" for rank, n in enumerate(everyone) if n is not None]
        return UnusedParameters(
            "Expected to have finished reduction in the prior iteration: these parameters (and their numbers in the "
            "order of registration) did not receive grad in it:\n"
            + "\n".join(lines)
            + "\nLet every parameter take part in the loss, set requires_grad=False on those that do not, or allow it: "
            "in ddp.fit by strategy=ddp.Averaging(find_unused_parameters=True), on the command line by "
            "replica.find_unused_parameters=true, in your own loop by find_unused_parameters=True of "
            "ddp.DistributedDataParallel (static_graph=True, if they are the same in every step)"
        )

    def _greatest_uses(
        self, slots: Sequence[Slot], missing: Collection[Slot], undefined: Collection[Slot]
    ) -> list[Use]:
        """Returns the greatest use that any rank has made of each slot. Collective."""
        uses = torch.full((len(slots),), Use.GRADIENT, dtype=torch.uint8, device=self._comm.device)
        uses[[slot.index for slot in undefined]] = Use.UNDEFINED
        uses[[slot.index for slot in missing]] = Use.NONE
        self._comm.all_reduce(uses, "max", label="parameters used by any rank")
        return [Use(int(use)) for use in self._comm.to_host(uses).read()[0]]


class Share(NamedTuple):
    """A rank's contribution to a step.

    Attributes:
        totals: its part of the step's totals, if they ride along.
        divide_by: the divisor of sums over ranks; with totals, it is replaced by their count.
        has_samples: False on a rank that has nothing to compute; then missing gradients are no error.
    """

    totals: Totals | None
    divide_by: SupportsInt
    has_samples: bool = True


class Division:
    """The one division of a step's sums, by the number of ranks or by the global count, and its completion.

    Args:
        mine: this rank's part of the totals, if they ride along.
        divide_by: the divisor if they do not.
        averages: the reducer divides by the world size, whatever divisor it is given.

    Attributes:
        divisors: for the all-reduce of each bucket; 1 for the one that carries the count.
    """

    def __init__(
        self, comm: Communicator, layout: Layout, mine: Totals | None, divide_by: SupportsInt, *, averages: bool
    ) -> None:
        self._totals, self._flags, self._buckets, self._mine = layout.totals, layout.flags, layout.buckets, mine
        self._averaged_by = comm.world_size if averages else 0
        self._divide_by = divide_by if mine is None else global_count(comm, layout.totals.numbers, mine.loss_scale)
        self.divisors = [1 if self._is_later(bucket) else self._divide_by for bucket in layout.buckets]

    def _is_later(self, bucket: Bucket | None) -> bool:
        return self._mine is not None and bucket is not None and bucket is self._totals.carrier

    def complete(self) -> Totals:
        """Completes the division of all buckets, on the host; returns the totals of all ranks."""
        if self._mine is None:
            return Totals()
        divisor = int(self._divide_by)
        if self._totals.carrier is not None:
            self._totals.carrier.gradients.div_(divisor)
        totals = Totals.read(self._totals.numbers.tolist())
        for factor in (totals.fraction_correction, self._averaged_by / divisor or 1):
            if factor != 1:
                for bucket in self._buckets:
                    bucket.gradients.mul_(factor)
        return totals

    def complete_on_device(self) -> None:
        """Completes the division on the GPU, if the count is there and unknown to the host."""
        if isinstance(self._divide_by, OnDevice) and (count := self._divide_by.on_device()) is not None:
            if self._totals.carrier is not None:
                self._totals.carrier.gradients.div_(count)
            for bucket in self._buckets if self._averaged_by else ():
                scaled_(bucket.gradients, self._averaged_by / count)

    def read(self, of_totals: Sequence[float]) -> Totals:
        """Returns the totals of all ranks from their numbers, after `complete_on_device`."""
        return Totals() if self._mine is None else Totals.read(of_totals)

    def of_flags(self, totals: Totals | None = None) -> float:
        """Returns what the step flags were divided by, together with the bucket that carried them.

        Args:
            totals: of all ranks, if the division was made on a GPU, by the exact count.
        """
        if self._flags.carrier is None or self._is_later(self._flags.carrier):
            return 1
        if totals is not None and self._mine is not None:
            return (totals.items_on_host or 1) * self._mine.loss_scale
        return int(self._divide_by)

    def of_sparse(self, totals: Totals) -> float:
        """Returns the divisor for gradients that no bucket holds."""
        return int(self._divide_by) / totals.fraction_correction


class StepFinalizer:
    """Finalizer of one backward.

    Attributes:
        usage: decides which gradients this backward must have.
        error: found by `read_flags`; every rank raises it before its next forward.
    """

    def __init__(
        self, comm: Communicator, layout: Layout, share: Share, division: Division, reducer: Reducer, usage: Usage
    ) -> None:
        self._comm, self._layout, self._reducer, self.usage = comm, layout, reducer, usage.begin(layout)
        self._totals, self._has_samples, self._division = share.totals, share.has_samples, division
        self._numbers: HostCopy | None = None  # totals and flags, if the host has not waited for them
        self._measures = share.totals is not None and share.totals.measure and share.has_samples
        self._square = torch.zeros((), device=comm.device)  # of this rank's own gradient, on request
        self._kept: dict[Slot, Tensor | None] = {}  # what `p.grad` was before its slot was overwritten
        self._undefined: list[Slot] = []  # reached by autograd, but without a gradient
        self._missing: Sequence[Slot] = ()
        self.error: UnusedParameters | ConfigError | None = None

    def keep(self, slots: Iterable[Slot]) -> None:
        """Keeps the gradients that parameters had, before zeros or the mean are written over them."""
        for slot in slots:
            if slot not in self._kept:
                had = slot.parameter.grad
                self._kept[slot] = had.clone() if had is not None and had is slot.view else had

    def filled(self, bucket: Bucket, without: Iterable[Slot]) -> None:
        """Records that a bucket holds this rank's gradients, except for the slots `without` one."""
        for slot in without:
            self._undefined.append(slot)
            self._kept.setdefault(slot, None)
        if self._measures:
            self._square = self._square + bucket.square()

    def write_flags(self, missing: Sequence[Slot], computed: Callable[[], Iterable[Tensor]]) -> None:
        """Writes this rank's flags to where they travel, except what a hook may have hidden.

        Args:
            missing: slots that backward has not reached, in the order of registration.
            computed: returns the parameters of which it has computed gradients, once for each gradient.
        """
        self._missing, self._undefined = missing, [slot for slot in self._undefined if slot not in set(missing)]
        mine = StepFlags()
        if self._has_samples:
            has_unused = self.usage.must_compare(self._layout, missing, computed)
            mine = StepFlags(has_unused, bool(self._undefined), parts=self._parts())
        mine.write(self._layout.flags.numbers)

    def _parts(self) -> Parts:
        """Returns this rank's measured part of the batch."""
        if self._totals is None:
            return Parts()
        if not self._measures:
            return self._totals.parts or Parts()
        return Parts.of(self._square / self._totals.loss_scale**2, self._totals.items_on_host)

    def write_hidden_flags(self) -> None:
        """Sets the flag for a non-finite gradient that a hook may have hidden. With one, flags travel separately."""
        StepFlags.non_finite_in(self._layout.flags.numbers).add_(self._reducer.is_finite.logical_not())

    def gone(self) -> list[Slot]:
        """Returns the slots whose gradient is gone when backward ends."""
        return [*self._undefined, *(each for each in self._layout.sparse if each.parameter.grad is None)]

    def settle(self, *, creates_graph: bool) -> Totals | None:
        """Settles the step, because every bucket holds the mean, and all flags have been reduced. Collective.

        Args:
            creates_graph: gradients are not in their buckets.

        Returns:
            The result of `read_flags`; None if that is to be called later (note "late").
        """
        layout = self._layout
        if creates_graph:
            for slot in layout.slots:
                if slot.parameter.grad is None:
                    slot.parameter.grad = slot.view
        if not self._comm.is_stream_ordered:
            return self.read_flags()
        self._division.complete_on_device()
        if self._reducer.may_hide:
            hidden = StepFlags.non_finite_in(layout.flags.numbers) > 0
            for bucket in layout.buckets:
                bucket.gradients.mul_(torch.where(hidden, torch.nan, 1.0))
        self._numbers = self._comm.to_host(layout.totals.numbers, layout.flags.numbers)
        if self.usage.never:
            self._give_back(slot for slot in layout.slots if slot.name in self.usage.never)
        varies = self._totals is None and (self.usage.varies or self._reducer.may_hide)
        return self.read_flags() if varies or creates_graph or layout.sparse else None

    def read_flags(self, *, is_late: bool = False) -> Totals:
        """Reads totals and flags, and acts on them. Collective.

        Args:
            is_late: the gradients have been used already.

        Returns:
            The sum of the totals of all ranks; zeros if none rode along.
        """
        layout = self._layout
        if self._numbers is None:
            totals, divided_by = self._division.complete(), self._division.of_flags()
            flags = StepFlags.read(layout.flags.numbers.tolist(), divided_by=divided_by)
        else:
            of_totals, of_flags = self._numbers.read()
            totals = self._division.read(of_totals)
            flags = StepFlags.read(of_flags, divided_by=self._division.of_flags(totals))
        if flags.has_non_finite:
            self._refuse()
        if flags.has_unused or flags.has_undefined:
            used_by_none = self.usage.used_by_none(layout, self._missing, self._undefined, flags)
            if is_late:
                self.usage.varies = True
            else:
                self._give_back(used_by_none)
        elif self.usage.never and not is_late:
            self._give_back(slot for slot in layout.slots if slot.name in self.usage.never)
        if flags.has_unused:
            self.error = self.usage.unused_error(self._missing if self._has_samples else None)
        for slot in layout.sparse:
            reduce_sparse(self._comm, slot, divide_by=self._division.of_sparse(totals))
        self._kept.clear()
        return totals._replace(parts=flags.parts if any(flags.parts) else None)

    def _refuse(self) -> None:
        """Makes all gradients NaN, because a hook may have hidden that one was not finite; rolls the hook back."""
        self._reducer.take_back()
        for slot in self._layout.slots:
            if slot.view is not None and self._numbers is None:
                slot.view.fill_(torch.nan)

    def _give_back(self, slots: Iterable[Slot]) -> None:
        """Gives parameters that no rank has used the gradients that they had."""
        for slot in slots:
            if slot in self._kept:
                had = self._kept[slot]
                slot.parameter.grad = had if had is None or slot.view is None else slot.view.copy_(had)
                self._reducer.take_back(slot.name)  # the result is dropped


# --- Sparse gradients ------------------------------------------------------------------------------------------------
#
# They live outside buckets. Each rank sends its indices and values to all. Every rank concatenates them in the order of
# the ranks and adds up equal indices, so that all get the same bits. Cost: every rank receives the rows of all ranks.


def reduce_sparse(comm: Communicator, slot: Slot, *, divide_by: float) -> None:
    """Makes a gradient the sum over all ranks, divided; leaves it unchanged if no rank has one. Collective."""
    parameter, gradient = slot.parameter, slot.parameter.grad
    if gradient is None:
        gradient = torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
            parameter.new_empty(0, *parameter.shape[1:]),
            parameter.shape,
            check_invariants=False,
        )
    if gradient.layout is not torch.sparse_coo:
        raise RuntimeError(
            f"{slot.name} got a dense gradient, though its layer has sparse=True: the parameter is used elsewhere, "
            "too. Make the layer with sparse=False"
        )
    gradient = gradient.detach().coalesce()
    indices = torch.cat(comm.all_gather(gradient.indices().t().contiguous()))  # [touched rows of all, 1]
    values = torch.cat(comm.all_gather(gradient.values()))  # [touched rows of all, …]
    if len(indices) or parameter.grad is not None:
        summed = torch.sparse_coo_tensor(indices.t(), values, parameter.shape, check_invariants=False).coalesce()
        parameter.grad = summed.div_(divide_by)


# --- A static graph --------------------------------------------------------------------------------------------------
#
# Note "static graph". Under re-entrant checkpointing a parameter that is used twice gets two gradients, in two
# backwards inside the real one, and nothing in the graph announces that. If the graph is the same in every step, the
# first step shows how many there are: it launches all buckets at its end, and later steps know how many gradients to
# wait for.


@dataclass
class _Graph:
    """Remembers the first step over a graph. Each set of parameters that are trained together has its own.

    Attributes:
        times: by the parameter's id, how many gradients every backward computes; None before the first one.
        never: names of the parameters that no rank has used; None as long as none was missing.
    """

    times: Counter[int] | None = None
    never: frozenset[str] | None = None


class StaticGraph(Usage):
    """Expects in every step as many gradients of each parameter as in the first one (note "static graph")."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        self._graphs: dict[frozenset[int], _Graph] = {}  # by the ids of the parameters
        self.never: Set[str] = frozenset()
        self._graph, self._is_first = _Graph(), False
        self._changed: list[str] = []

    def begin(self, layout: Layout) -> StaticGraph:
        step = copy.copy(self)
        step._graph = self._graphs.setdefault(frozenset(layout.slot_of), _Graph())
        step.never, step._is_first = step._graph.never or frozenset(), False
        step._changed = []  # differences from the first step
        return step

    def expected(self, layout: Layout) -> Mapping[int, int]:
        times = self._graph.times
        return dict.fromkeys(layout.slot_of, sys.maxsize) if times is None else times

    def must_compare(self, layout: Layout, missing: Sequence[Slot], computed: Callable[[], Iterable[Tensor]]) -> bool:
        times = Counter(map(id, computed()))
        if self._graph.times is None:
            self._graph.times, self._is_first = times, True
        self.varies = self._is_first
        self._changed = [
            f"{slot.name} ({slot.index}) got {times[each]} gradients, and {self._graph.times[each]} in the first step"
            for each, slot in layout.slot_of.items()
            if times[each] != self._graph.times[each]
        ]
        return bool(missing if self._is_first else self._changed)  # parameters missing since the first step are known

    def used_by_none(
        self, layout: Layout, missing: Collection[Slot], undefined: Collection[Slot], flags: StepFlags
    ) -> list[Slot]:
        if self._graph.never is not None and not flags.has_undefined:
            return [slot for slot in layout.slots if slot.name in self._graph.never]
        uses = self._greatest_uses(layout.slots, missing, undefined)
        if self._graph.never is None:
            self._graph.never = frozenset(slot.name for slot in layout.slots if uses[slot.index] is Use.NONE)
        return [slot for slot in layout.slots if uses[slot.index] is not Use.GRADIENT]

    def unused_error(self, missing: Sequence[Slot] | None) -> None:
        """Raises UnusedParameters, on every rank, if the graph of any rank differs from that of the first step."""
        everyone = all_gather_object(self._comm, self._changed)
        if any(everyone):
            lines = [f"  rank {rank}: {', '.join(each) or 'none'}" for rank, each in enumerate(everyone)]
            raise UnusedParameters(
                "Your training graph has changed in this iteration. With static_graph=True every step must use the "
                "same parameters equally often:\n" + "\n".join(lines) + "\nPass find_unused_parameters=True instead"
            )
