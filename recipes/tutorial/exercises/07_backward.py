"""Exercise 07: write `Backward.note` and `Backward._launch_full`, where it says `NotImplementedError`.

    cp recipes/tutorial/exercises/07_backward.py .    makes a copy of your own, in any folder
    python -m ddp exercise 07                         finds it there, and says what is wrong with it

The rest of this file is a copy of ddp/replica/backward.py, which is the solution.

One synchronised backward: how gradients that become ready on this rank turn into the mean over all ranks.

    EXPECTED        no synchronised backward is running. Gradients that become ready (in `no_sync`) only accumulate
       │ begin          autograd has reached an output of the forward (`sink.py`), or this rank has no samples
    RUNNING         `note`: a gradient is ready. When all of a bucket are ready, they are copied side by side
       │            `_launch_full`: a full bucket is reduced, after all buckets before it. This order is the same on
       │            every rank; otherwise the ranks would wait for different buckets
       │ finish         backward has ended: fill and reduce the rest, wait for what is in flight
    DONE            every gradient is the mean over the ranks; `finish` has returned the step's totals

                 backward   ▓▓▓ fc ▓▓▓▓▓▓▓ conv4 ▓▓▓▓▓▓▓ conv3 ▓▓▓▓▓ conv2 ▓▓▓ conv1 ▓│ finish
                 wire              ░░ bucket 0 ░░░░░░░░░░░░░░ bucket 1 ░░░░░░░░░░░░░░░│░ last ░

The first backward cannot do this, because nobody knows yet in which order gradients become ready. It only records the
order, and reduces all buckets at its end. Each step has a `Backward` of its own, so nothing is reset by hand. A
backward that breaks off stays RUNNING, and the replica refuses to go on.

Note "foreground". Over a network, buckets are reduced in the background while backward goes on. When all ranks share
one host, and its cores are busy with backward, a background thread would only take time from the thread that computes,
and switching between the two would cost more than the overlap saves (MLP with 25M parameters, 2 workers on two cores:
208 ms a step in the background, 190 ms in the foreground). There, the thread that has filled a bucket reduces it at
once, and backward pauses meanwhile.

Note "parameters without a gradient". They contribute zeros (or what they had accumulated), so that no rank ever waits
for them. Each rank's *verdicts* say whether it had such parameters. The verdicts travel last, in the tail of the last
bucket or by themselves. The ranks compare parameter by parameter only if a verdict is true on any rank (`unused.py`).

Note "divisor". Sums over ranks are divided by the world size or, where totals ride along, by the global count of
samples or tokens. The count travels first, in the tail of bucket 0 or by itself. Every later bucket is divided as a
part of its all-reduce, because by then the count is known. If bucket 0 carried the count, it is divided at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum, auto
from typing import SupportsInt

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.setting import WireName
from ddp.comm.work import Work
from ddp.errors import CommunicatorBroken, UnusedParameters
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.hooks.compression import Compression
from ddp.gradients.layout import Layout
from ddp.gradients.totals import GlobalCount, Parts, Totals, Verdicts
from ddp.process.clock import Stopwatch, now_s
from ddp.replica.broadcast import check_same_layout
from ddp.replica.unused import Use, complaint, greatest_uses


class State(Enum):
    """The states of a backward."""

    EXPECTED = auto()  # until begin: gradients accumulate on this rank, nothing is sent
    RUNNING = auto()  # until the end of finish: full buckets are launched
    DONE = auto()


class BucketReduction:
    """One bucket in one backward.

    Attributes:
        ready: parameters whose gradients are ready, in this order; listed twice if autograd has added to one twice.
        num_early: number of entries of `ready` from before this backward began.
        awaited: ids of the parameters whose gradients this backward will compute.
        enough: the bucket may be full once `ready` has this many entries.
        is_full: every awaited gradient is ready.
        ready_s, launched_s, done_s: when the bucket became full, was launched, and was complete.
    """

    __slots__ = ("awaited", "bucket", "done_s", "enough", "is_full", "launched_s", "num_early", "ready", "ready_s")

    def __init__(self, bucket: Bucket) -> None:
        self.bucket, self.awaited = bucket, bucket.ids
        self.ready: list[Tensor] = []
        self.num_early, self.enough, self.is_full = 0, 0, False
        self.ready_s = self.launched_s = self.done_s = 0.0

    def await_gradients(self, awaited: frozenset[int], num_awaited: int) -> None:
        """Notes which gradients this backward will compute, and how many. Those in `ready` are from before it."""
        self.awaited, self.num_early, self.is_full = awaited, len(self.ready), not awaited
        self.enough = self.num_early + num_awaited

    def look(self) -> bool:
        """Finds out whether the bucket is full. If it is not, it may be full at the next gradient."""
        self.is_full = self.awaited <= set(map(id, self.ready[self.num_early :]))
        self.enough = len(self.ready) + 1
        return self.is_full

    @property
    def is_launched(self) -> bool:
        """Returns True once the reduction has been launched."""
        return self.launched_s > 0

    def without_gradient(self) -> list[Slot]:
        """Returns the slots whose gradient has not become ready since the last reduction."""
        ready, slots = set(map(id, self.ready)), self.bucket.slots
        return [slot for slot in slots if id(slot.parameter) not in ready] if len(ready) < len(slots) else []


class Backward:
    """One synchronised backward of a replica. `replica/drop_in/backward.py` overrides some of its methods.

    Args:
        overlap: reduce in the background (note "foreground").
        waited: measures the time that backward's thread spends on reductions, or waiting for them.
        former: the backward before this one.
        wire: the format in which buckets travel between hosts.
        compression: makes the sums of buckets by a hook.

    Attributes:
        early: parameters that have accumulated gradients (in `no_sync`) which no backward has reduced yet, by id.
        layout: where the gradients live; from `begin` on.
        step: its number, from 1, for messages; from `begin` on.
        reductions: one for each bucket, in order; empty until the order of gradients is known.
        index_of: by a parameter's id, the reduction that its gradient belongs to.
        error: found by this backward; every rank raises it before its next forward.
        began_s, ended_s: when backward began and ended.
    """

    layout: Layout
    step: int

    def __init__(
        self,
        comm: Communicator,
        *,
        overlap: bool,
        waited: Stopwatch,
        former: Backward | None = None,
        wire: WireName | None = None,
        compression: Compression | None = None,
    ) -> None:
        self.comm, self.overlap, self.state = comm, overlap, State.EXPECTED
        self._wire, self._compression = wire, compression
        self.early: dict[int, Tensor] = {} if former is None else former.left_over
        self.reductions: list[BucketReduction] = []
        self.index_of: dict[int, int] = {}
        self.error: UnusedParameters | None = None
        self._waited, self.began_s, self.ended_s = waited, 0.0, 0.0
        self._seen: list[Tensor] = []  # parameters in the order of their gradients, as long as no order is known
        self._kept: dict[Slot, Tensor | None] = {}  # what `p.grad` was before its slot was overwritten
        self._undefined: list[Slot] = []  # reached by autograd, but without a gradient
        self._square = torch.zeros((), device=comm.device)  # of this rank's own gradient, where that is asked for
        self._num_launched = 0
        self._in_flight: list[tuple[BucketReduction, Work]] = []

    # --- in the order of time ----------------------------------------------------------------------------------------

    def begin(
        self, layout: Layout, step: int, *, totals: Totals | None, divide_by: SupportsInt, has_samples: bool = True
    ) -> None:
        """Starts, because autograd has reached an output, or because this rank takes part without samples.

        Args:
            totals: this rank's part of the step's totals, if they ride along.
            divide_by: divisor of the sums over ranks where no totals ride along.
            has_samples: False on a rank that has nothing to compute; then missing gradients are no error.
        """
        self.state, self.began_s = State.RUNNING, now_s()
        self.layout, self.step, self._totals, self._divide_by = layout, step, totals, divide_by
        self._has_samples = has_samples
        self._measures = totals is not None and totals.measure and has_samples
        if self._compression is not None:
            self._compression.begin()
        if layout.is_learned:
            self._set_up()
            for reduction in self.reductions:
                reduction.await_gradients(*self._awaited(reduction.bucket))
            self._launch_full()

    def _set_up(self) -> None:
        """Allocates the buckets, if need be; writes the totals, and sends them if they travel apart. Collective."""
        layout = self.layout
        layout.allocate()
        if self._totals is not None:
            self._totals.write(layout.totals)
            self._divide_by = GlobalCount(layout.totals, self._totals.loss_scale)
            if not layout.totals_ride:
                self._all_reduce(layout.totals, label=f"step {self.step}, totals")
        self.reductions, self.index_of = [BucketReduction(bucket) for bucket in layout.buckets], layout.index_of
        for parameter in (*self.early.values(), *self._seen):
            if (index := self.index_of.get(id(parameter))) is not None:
                self.reductions[index].ready.append(parameter)

    def _awaited(self, bucket: Bucket) -> tuple[frozenset[int], int]:
        """Returns the ids of the bucket's parameters that will get a gradient, and how many gradients to wait for."""
        return bucket.ids, len(bucket.slots)

    def note(self, parameter: Tensor) -> bool:
        """Notes that a gradient is ready. Returns False if no bucket waits for it; then `note_other` takes it."""
        index = self.index_of.get(id(parameter))
        if index is None:
            return False
        reduction = self.reductions[index]
        # exercise 07: add the parameter to those that are ready; once there are enough, `_launch_if_full` looks closer
        raise NotImplementedError("note")

    def note_other(self, parameter: Tensor) -> bool:
        """Notes a gradient while no synchronised backward is running, or while the order of gradients is not known.

        Returns:
            False if the parameter has no place in this backward.
        """
        if self.state is State.EXPECTED:
            if parameter.requires_grad:  # frozen after its forward: autograd calls the observer, without a gradient
                self.early[id(parameter)] = parameter
        elif not self.reductions and id(parameter) in self.layout.index_of:
            self._seen.append(parameter)
        else:
            return False
        return True

    @property
    def left_over(self) -> dict[int, Tensor]:
        """The parameters in `early` that this backward had no place for, because they were frozen in its forward."""
        return {each: parameter for each, parameter in self.early.items() if each not in self.layout.slot_of}

    def move_in(self, parameter: Tensor) -> None:
        """Moves a large gradient into its bucket as soon as it is ready."""
        index = self.index_of.get(id(parameter))
        if index is not None and parameter.grad is not None and not self.reductions[index].is_launched:
            self.layout.slot_of[id(parameter)].move_in()

    def _launch_if_full(self, reduction: BucketReduction, parameter: Tensor) -> None:
        """Launches the buckets that this gradient makes full.

        Raises:
            RuntimeError: the bucket has been sent without it.
        """
        if not reduction.is_launched:
            if not reduction.is_full and reduction.look():
                reduction.ready_s = now_s()
                self._launch_full()
        elif parameter.requires_grad:  # one that was frozen after its forward has no gradient, so none is too late
            raise RuntimeError(
                f"{self.layout.slot_of[id(parameter)].name} got a gradient in step {self.step} after "
                f"{reduction.bucket.label} had been sent. Re-entrant checkpointing of a module that is used twice does "
                "this, or of one that find_unused_parameters=True takes for unused: pass use_reentrant=False to the "
                "checkpoint, or static_graph=True to ddp.DistributedDataParallel if all steps are alike"
            )

    def _launch_full(self) -> None:
        """Launches every full bucket whose turn it is; the one that carries the verdicts waits for the end."""
        # exercise 07: fill and launch one bucket after another, from the first not launched to the first not full
        raise NotImplementedError("_launch_full")

    def _fill(self, bucket: Bucket) -> None:
        """Moves a bucket's gradients to their places in it, and measures them there if that is asked for."""
        self._move_into(bucket)
        if self._measures:
            self._square = self._square + bucket.square()

    def _move_into(self, bucket: Bucket) -> None:
        for slot in bucket.fill():
            self._note_undefined(slot)

    def _note_undefined(self, slot: Slot) -> None:
        self._undefined.append(slot)
        self._kept.setdefault(slot, None)

    def _launch(self, reduction: BucketReduction) -> None:
        """Launches a bucket's reduction.

        It runs in the background if reductions overlap. The last one would be waited for at once anyway, so it runs in
        the foreground, unless others are still in flight, because they must complete before it.
        """
        self._num_launched += 1
        reduction.launched_s = now_s()
        reduction.ready_s = reduction.ready_s or reduction.launched_s
        if self._wire is not None:
            reduction.bucket.clear_padding()
        is_last = reduction.bucket is self.layout.buckets[-1]
        self._reduce(reduction, in_background=self.overlap and (not is_last or bool(self._in_flight)))

    def _reduce(self, reduction: BucketReduction, *, in_background: bool) -> None:
        """Sums a bucket over the ranks and divides it."""
        bucket = reduction.bucket
        carries_divisor = self._totals is not None and self.layout.totals_ride and bucket.index == 0
        divide_by: SupportsInt = 1 if carries_divisor else self._divide_by
        try:
            label = f"step {self.step}, {bucket.label}"
            work = self._combine(bucket, divide_by=divide_by, async_op=in_background, label=label)
        except CommunicatorBroken:
            self._wait()  # a bucket in flight has failed, and its error names the rank that it waited for
            raise
        if work is not None:
            self._in_flight.append((reduction, work))
            self._collect(wait=False)
        else:
            self._complete(reduction, now_s())

    def _combine(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> Work | None:
        """Makes the sum of all ranks' buckets, divided. Returns the work if it is still in flight."""
        if self._compression is not None:
            with self._waited.running():
                return self._compression.reduce(bucket, self.comm, divide_by=divide_by, async_op=async_op, label=label)
        return self._all_reduce(bucket.flat, divide_by=divide_by, wire=self._wire, async_op=async_op, label=label)

    def _all_reduce(
        self,
        flat: Tensor,
        *,
        divide_by: SupportsInt = 1,
        wire: WireName | None = None,
        async_op: bool = False,
        label: str,
    ) -> Work | None:
        """Sums over the ranks and divides. Returns the work if it is still in flight."""
        with self._waited.running():
            if flat.device != self.comm.device:  # a model on several devices
                staged = flat.to(self.comm.device)
                flat.copy_(self.comm.all_reduce(staged, divide_by=divide_by, wire=wire, label=label))
            elif async_op:
                work: Work = self.comm.all_reduce(flat, divide_by=divide_by, wire=wire, async_op=True, label=label)
                return work
            else:
                self.comm.all_reduce(flat, divide_by=divide_by, wire=wire, label=label)
        return None

    def _collect(self, *, wait: bool) -> None:
        """Completes the reductions that have ended, in order; waits for all of them if told to."""
        while self._in_flight and (wait or self._in_flight[0][1].is_completed()):
            reduction, work = self._in_flight.pop(0)
            with self._waited.running():
                work.wait()
            self._complete(reduction, work.done_s)

    def _wait(self) -> None:
        """Waits until all that was launched is complete."""
        self._collect(wait=True)

    def _complete(self, reduction: BucketReduction, done_s: float) -> None:
        """Notes that a bucket's reduction is complete."""
        reduction.done_s = done_s

    @torch.no_grad()
    def finish(self) -> Totals:
        """Ends the step: reduces the remaining buckets, and gives every parameter its mean. Collective.

        Returns:
            What the totals of all ranks add up to; zeros if none rode along.
        """
        self.ended_s = now_s()
        if not self.layout.is_learned:
            self._learn()
        missing = self._missing()
        for slot in missing:
            self._keep(slot)
        for reduction in self.reductions[self._num_launched :]:
            self._fill(reduction.bucket)  # all of them first: filling shows which gradients are undefined
        undefined = set(self._undefined).difference(missing)
        mine = Verdicts()
        if self._has_samples:
            mine = Verdicts(self._has_unused(missing), bool(undefined), parts=self._parts())
        mine.write(self.layout.verdicts)
        for reduction in self.reductions[self._num_launched :]:
            self._launch(reduction)
        self._wait()
        if not self.layout.verdicts_ride:
            if self._compression is not None:
                mine._replace(has_non_finite=not self._compression.is_finite).write(self.layout.verdicts)
            self._all_reduce(self.layout.verdicts, label=f"step {self.step}, verdicts")
        totals = self._settle_totals()
        verdicts = Verdicts.read(self.layout.verdicts, divided_by=self._verdicts_divided_by())
        if verdicts.has_non_finite:
            self._refuse()
        self._settle(missing, undefined, verdicts)
        self.state = State.DONE
        self._kept.clear()
        return totals._replace(parts=verdicts.parts if any(verdicts.parts) else None)

    def _parts(self) -> Parts:
        """Returns this rank's measured part of the batch."""
        if self._totals is None:
            return Parts()
        if not self._measures:
            return self._totals.parts or Parts()
        return Parts.of(self._square / self._totals.loss_scale**2, self._totals.num_items)

    def _verdicts_divided_by(self) -> int:
        """Returns what the verdicts were divided by, together with the bucket that carried them."""
        has_count = self._totals is not None and self.layout.totals_ride and len(self.layout.buckets) == 1
        return int(self._divide_by) if self.layout.verdicts_ride and not has_count else 1

    def _learn(self) -> None:
        """Changes to a layout in the order in which gradients have become ready. Collective.

        All ranks take the order of the first rank that had a backward.

        Raises:
            ReplicaMismatch: the ranks' gradients differ, which nobody has looked for if `init_sync` was off.
        """
        check_same_layout(self.comm, [(slot.name, slot.parameter) for slot in self.layout.slots])
        names = [self.layout.slot_of[id(parameter)].name for parameter in self._seen]
        seen = all_gather_object(self.comm, names if self._has_samples else None)
        if (order := next((names for names in seen if names is not None), None)) is not None:
            self.layout = self.layout.in_order(order)
        self._set_up()

    def _missing(self) -> list[Slot]:
        """Returns the slots that backward has not reached since the last reduction, in the order of registration."""
        missing = [slot for reduction in self.reductions for slot in reduction.without_gradient()]
        return sorted(missing, key=lambda slot: slot.index)

    def _has_unused(self, missing: Sequence[Slot]) -> bool:
        """Returns True if the ranks must compare which parameters they have used."""
        return bool(missing)

    def _keep(self, slot: Slot) -> None:
        """Keeps the gradient that a parameter had, before zeros or the mean are written over it."""
        if slot not in self._kept:
            had = slot.parameter.grad
            self._kept[slot] = had.clone() if had is not None and had is slot.view else had

    def _settle_totals(self) -> Totals:
        """Reads the totals, and completes the division: of the bucket that carried them, and by a fraction."""
        if self._totals is None:
            return Totals()
        if self.layout.totals_ride:
            self.layout.buckets[0].gradients.div_(int(self._divide_by))
        totals = Totals.read(self.layout.totals)
        if totals.rest != 1:
            for bucket in self.layout.buckets:
                bucket.gradients.mul_(totals.rest)
        return totals

    def _refuse(self) -> None:
        """Shows in all gradients what a hook may have hidden on its way, that one was not finite; forgets it."""
        assert self._compression is not None
        self._compression.take_back()
        for slot in self.layout.slots:
            if slot.view is not None:
                slot.view.fill_(torch.nan)

    def _settle(self, missing: Sequence[Slot], undefined: Collection[Slot], verdicts: Verdicts) -> None:
        """Restores the old gradients of parameters that no rank has used; records an error if any went unused."""
        if verdicts.has_unused or verdicts.has_undefined:
            self._give_back(self._used_by_none(missing, undefined, verdicts))
            if verdicts.has_unused:
                self._complain(missing if self._has_samples else None)

    def _used_by_none(self, missing: Sequence[Slot], undefined: Collection[Slot], verdicts: Verdicts) -> Iterable[Slot]:
        """Returns the slots that no rank has a gradient of. Collective."""
        uses = greatest_uses(self.comm, self.layout.slots, missing, undefined)
        return [slot for slot, use in zip(self.layout.slots, uses, strict=True) if use is not Use.GRADIENT]

    def _complain(self, missing: Sequence[Slot] | None) -> None:
        """Records the error about parameters that backward has not reached. Collective.

        Args:
            missing: this rank's; None: it had no backward.
        """
        self.error = complaint(self.comm, missing)

    def _give_back(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            had = self._kept[slot]
            slot.parameter.grad = had if had is None or slot.view is None else slot.view.copy_(had)
            if self._compression is not None:
                self._compression.take_back(slot.name)  # what came of it is thrown away
