"""One synchronised backward: how gradients that become ready on this rank turn into the mean over all ranks.

    expected        no synchronised backward is running. Gradients that become ready (in `no_sync`) only accumulate
       │ begin          autograd has reached an output of the forward (`autograd.py`), or this rank has no samples
    is_running      `note`: a gradient is ready. When all of a bucket are ready, they are copied side by side
       │            `_launch_full`: a full bucket is reduced, after all buckets before it. This order is the same on
       │            every rank; otherwise the ranks would wait for different buckets
       │ end, finish    backward has ended: fill and reduce the rest, wait for what is in flight
    done            every gradient is the mean over the ranks; `finish` has returned the step's totals

                 backward   ▓▓▓ fc ▓▓▓▓▓▓▓ conv4 ▓▓▓▓▓▓▓ conv3 ▓▓▓▓▓ conv2 ▓▓▓ conv1 ▓│ finish
                 wire              ░░ bucket 0 ░░░░░░░░░░░░░░ bucket 1 ░░░░░░░░░░░░░░░│░ last ░

The first backward cannot do this, because the order in which gradients become ready is unknown. It only records the
order, and reduces all buckets at its end. Each step has its own `Backward`, so nothing is reset by hand. A backward
that breaks off is running forever, and the replica refuses to continue.

A backward delegates to four objects:

    accumulation    adds up this rank's micro-batches: in `p.grad`, or by shards of the batch (`by_shards.py`). By
                    shards, this is the backward of the last shard, and a full bucket holds the sums of all shards
    reducer         makes one mean of all ranks' buckets (`gradients/reducer.py`)
    usage           decides which gradients are expected, and what follows if one is missing (`step_finalizer.py`)
    stepper         runs optimizers that step inside backward (`drop_in/in_backward.py`)

Once all buckets hold the mean, a `StepFinalizer` does the rest (`step_finalizer.py`).

Note "foreground". Over a network, buckets are reduced in the background during backward. When all ranks share
one host, and its cores are busy with backward, a background thread would only take time from the thread that computes,
and switching between the two would cost more than the overlap saves (MLP with 25M parameters, 2 workers on two cores:
208 ms a step in the background, 190 ms in the foreground). There, the thread that has filled a bucket reduces it at
once, and backward pauses meanwhile.

Note "create_graph". After `loss.backward(create_graph=True)`, `p.grad` is part of a graph, and stays out of its bucket,
because the next all-reduce in place would change what the graph has saved (`autograd.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsInt

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp.comm.objects import all_gather_object
from ddp.errors import CommunicatorBroken, ConfigError, UnusedParameters
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.totals import Rider, Totals
from ddp.process import gpu
from ddp.process.clock import Stopwatch, now_s
from ddp.replica.autograd import is_in_backward, uncompiled
from ddp.replica.broadcast import check_same_layout
from ddp.replica.step_finalizer import Division, Share, StepFinalizer, Usage

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator
    from ddp.gradients.layout import Layout
    from ddp.gradients.reducer import InFlight, Reducer
    from ddp.replica.parameters import Layouts


class BucketReduction:
    """One bucket in one backward.

    Args:
        divide_by: the divisor of its sum.
        before: parameters with gradients from before this backward began.
        counts: by the parameter's id, the number of gradients that this backward will compute; None: one of each.

    Attributes:
        ready: parameters whose gradients are ready, in this order; listed twice if autograd has added to one twice.
        num_before_begin: number of entries of `ready` from before this backward began.
        expected: ids of the parameters whose gradients this backward will compute.
        check_at: the bucket may be full once `ready` has this many entries.
        is_full: every expected gradient is ready.
        ready_s, launched_s: when the bucket became full, and was launched.
        waited_s, work: when it was complete; or the reduction in flight, which has that time later.
    """

    def __init__(
        self, bucket: Bucket, divide_by: SupportsInt, before: Iterable[Tensor], counts: Mapping[int, int] | None
    ) -> None:
        self.bucket, self.divide_by, self.expected, num_expected = bucket, divide_by, bucket.ids, len(bucket.ids)
        if counts is not None:
            self.expected = frozenset(each for each in bucket.ids if counts.get(each))
            num_expected = sum(counts[each] for each in self.expected)
        self.ready = [parameter for parameter in before if id(parameter) in bucket.ids]
        self.num_before_begin, self.is_full = len(self.ready), not self.expected
        self.check_at = self.num_before_begin + num_expected
        self.ready_s = self.launched_s = self.waited_s = 0.0
        self.work: InFlight | None = None

    @property
    def done_s(self) -> float:
        """Returns when the reduction was complete, as far as the host has seen."""
        return max(self.launched_s, self.waited_s if self.work is None else self.work.done_s)

    def check(self) -> bool:
        """Finds out whether the bucket is full. If it is not, it may be full at the next gradient."""
        self.is_full = self.expected <= set(map(id, self.ready[self.num_before_begin :]))
        self.check_at = len(self.ready) + 1
        return self.is_full

    @property
    def is_launched(self) -> bool:
        """Returns True once the reduction has been launched."""
        return self.launched_s > 0

    def without_gradient(self) -> list[Slot]:
        """Returns the slots whose gradient has not become ready since the last reduction."""
        ready, slots = set(map(id, self.ready)), self.bucket.slots
        return [slot for slot in slots if id(slot.parameter) not in ready] if len(ready) < len(slots) else []


class Accumulation:
    """Adds up a rank's micro-batches in `p.grad`, as autograd does. Its methods stand in the order of a backward.

    Attributes:
        num_shards: the number of shards of a batch by which gradients are added up; None: they are added up by ranks.
        shards: this rank's shards of each batch.
        running: the shard in whose block the program is; None: it is in no block.
        may_unfreeze: a forward may unfreeze parameters.
        buffers_at_start: the buffers with which the running step, or the last one, began, if they may have changed.
    """

    num_shards: int | None = None
    shards = range(0)
    running: int | None = None
    may_unfreeze = True
    buffers_at_start: Mapping[str, Tensor] = MappingProxyType({})

    before: Callable[[Tensor], None] | None = None
    """Called before autograd adds to the gradient of a parameter."""

    def connect(self, layouts: Layouts) -> None:
        """Receives the layouts of its replica, once there are some."""

    def block(self, replica: Any, shard: int) -> AbstractContextManager[None]:
        """Makes forward and backward inside those of one shard (`Replica.shard`)."""
        raise ConfigError(f"shard({shard}): this replica adds up by ranks; give it num_shards")

    def begin(self, layout: Layout, share: Share) -> Share:
        """Begins the backward that ends a step. Returns the rank's contribution to that step."""
        return share

    def write_totals(self, layout: Layout, totals: Totals) -> None:
        """Writes this rank's totals to where they travel."""
        totals.write(layout.totals.numbers)

    def has_gradient(self, parameter: Tensor) -> bool:
        """Returns True if this rank has a gradient of a parameter in this step."""
        return parameter.grad is not None

    def fill(self, bucket: Bucket) -> list[Slot]:
        """Puts the gradients of a bucket in their places. Returns the slots without one, which hold zeros."""
        return bucket.fill()

    def divisor(self, bucket: Bucket, divide_by: SupportsInt) -> SupportsInt:
        """Returns what a reduction divides by, which is about to be launched."""
        return divide_by

    def complete(self, bucket: Bucket) -> None:
        """Hands out the mean that a bucket holds."""
        bucket.hand_out()

    def write_parts(self, layout: Layout) -> None:
        """Writes the measurements of parts of the batch to the step flags."""

    def note_early(self, parameter: Tensor) -> None:
        """Records a gradient of a micro-batch that is not the last."""


class Stepper:
    """Base of objects that step parameters while backward runs (`drop_in/in_backward.py`); does nothing itself."""

    def begin(self, layout: Layout, *, creates_graph: bool) -> None:
        """Begins a backward."""

    def complete(self, bucket: Bucket) -> None:
        """Records that a bucket holds the mean."""

    def check(self, gone: Callable[[], Sequence[Slot]]) -> None:
        """Raises ConfigError if other code has stepped the parameters whose gradients are gone when backward ends."""


class Backward:
    """One synchronised backward of a replica.

    Args:
        reducer, usage, stepper, accumulation: see above.
        overlap: reduce in the background; None: if that is faster (note "foreground").
        waited: measures the time that backward's thread spends on reductions, or waiting for them.

    Attributes:
        is_running: from `begin` until the end of `finish`; forever, if it broke off.
        early: parameters that have accumulated gradients (in `no_sync`) which no backward has reduced yet, by id.
        layout: where the gradients live; from `begin` on.
        step: its number, from 1, for messages; from `begin` on.
        creates_graph: gradients can be differentiated (note "create_graph"); from `begin` on.
        reductions: one for each bucket, in order; empty until the order of gradients is known.
        index_of: by a parameter's id, the reduction that its gradient belongs to.
        error: found by this backward; every rank raises it before its next forward.
        is_unread: it has ended, and `read_flags` was not called.
        streams: those of a GPU on which gradients have become ready.
        began_s, ended_s: when backward began and ended.
    """

    layout: Layout
    step: int

    def __init__(
        self,
        comm: Communicator,
        reducer: Reducer,
        usage: Usage,
        stepper: Stepper,
        accumulation: Accumulation,
        *,
        overlap: bool | None,
        waited: Stopwatch,
    ) -> None:
        self.comm, self.is_running, self._accumulation = comm, False, accumulation
        self._overlap, self.overlap = overlap, comm.plan.overlaps if overlap is None else overlap
        self.reducer, self.usage, self.stepper = reducer, usage, stepper
        self.early: dict[int, Tensor] = {}
        self.reductions: list[BucketReduction] = []
        self.index_of: dict[int, int] = {}
        self.creates_graph = False
        self.error: UnusedParameters | ConfigError | None = None
        self.is_unread = False
        self.streams: set[torch.cuda.Stream] = set()
        self._waited, self.began_s, self.ended_s = waited, 0.0, 0.0
        self._seen: list[Tensor] = []  # parameters in the order of their gradients, as long as no order is known
        self._sparse_ready: dict[int, Tensor] = {}  # parameters that live in no bucket, by id
        self._num_launched = 0
        self._in_flight: list[tuple[BucketReduction, InFlight]] = []

    # --- in the order of time ----------------------------------------------------------------------------------------

    def begin(self, layout: Layout, step: int, share: Share) -> None:
        """Starts, because autograd has reached an output, or because this rank takes part without samples.

        Raises:
            ConfigError: backward creates a graph, but an optimizer inside backward would change the parameters
                meanwhile.
        """
        if self.reducer.may_resize and not layout.is_for_hook:
            layout.plan(layout.order, for_hook=True)  # of a forward from before the hook was registered
        self.is_running, self.began_s = True, now_s()
        self.layout, self.step, self._share = layout, step, share
        self.creates_graph = torch.is_grad_enabled() and is_in_backward()
        self.stepper.begin(layout, creates_graph=self.creates_graph)
        if layout.is_learned:
            self._set_up()
            self._launch_full()

    def _set_up(self, *, has_ended: bool = False) -> None:
        """Allocates the buckets, if need be; writes the totals, and sends them if no bucket does. Collective.

        Args:
            has_ended: backward has ended, so that no further gradient is expected.
        """
        layout, share = self.layout, self._share
        if not layout.has_memory:
            layout.allocate()
        if share.totals is not None:
            self._accumulation.write_totals(layout, share.totals)
            self._send(layout.totals, "totals")
        given = share.totals, share.divide_by
        division = Division(self.comm, layout, *given, averages=self.reducer.averages)
        self._finalizer = StepFinalizer(self.comm, layout, share, division, self.reducer, self.usage)
        expected, early = None if has_ended else self._finalizer.usage.expected(layout), self.early.values()
        if expected is not None:  # a bucket may be sent before backward has ended
            slots = (slot for bucket in layout.buckets for slot in bucket.slots)
            self._finalizer.keep(slot for slot in slots if not expected.get(id(slot.parameter)))
        self.reductions = [
            BucketReduction(bucket, divide_by, early, expected)
            for bucket, divide_by in zip(layout.buckets, division.divisors, strict=True)
        ]
        self.index_of = layout.index_of
        for parameter in self._seen:
            self.reductions[self.index_of[id(parameter)]].ready.append(parameter)
        self._seen = []

    def _send(self, rider: Rider, what: str) -> None:
        """Adds up what travels apart from gradients, if no bucket carries it. Collective."""
        if rider.carrier is None:
            with self._waited.running():
                rider.send(label=f"step {self.step}, {what}")

    def is_launched(self, index: int) -> bool:
        """Returns True once the reduction of a bucket has been launched."""
        return index < self._num_launched

    def note(self, parameter: Tensor) -> bool:
        """Records that a gradient is ready. Returns False if no bucket waits for it; then `note_other` takes it."""
        index = self.index_of.get(id(parameter))
        if index is None:
            return False
        reduction = self.reductions[index]
        # exercise 07: add the parameter to those that are ready; once there are enough, `_launch_if_full` looks closer
        reduction.ready.append(parameter)
        if len(reduction.ready) >= reduction.check_at:
            self._launch_if_full(reduction, parameter)
        return True

    def note_other(self, parameter: Tensor) -> bool:
        """Records a gradient while no synchronised backward is running, or one that no bucket waits for.

        Returns:
            False if the parameter has no place in this backward.
        """
        if not self.is_running:
            if parameter.requires_grad:  # frozen after its forward: autograd calls the observer, without a gradient
                self.early[id(parameter)] = parameter
                self._accumulation.note_early(parameter)
        elif not self.reductions and id(parameter) in self.layout.index_of:
            self._seen.append(parameter)
        elif id(parameter) in self.layout.slot_of:
            self._sparse_ready[id(parameter)] = parameter
        else:
            return False
        return True

    def _launch_if_full(self, reduction: BucketReduction, parameter: Tensor) -> None:
        """Launches the buckets that this gradient makes full.

        Raises:
            RuntimeError: the bucket has been sent without it.
        """
        if not reduction.is_launched:
            if not reduction.is_full and reduction.check():
                reduction.ready_s = now_s()
                self._launch_full()
        elif parameter.requires_grad:  # one that was frozen after its forward has no gradient, so none is too late
            raise RuntimeError(
                f"{self.layout.slot_of[id(parameter)].name} got a gradient in step {self.step} after "
                f"{reduction.bucket.label} had been sent. Re-entrant checkpointing of a module that is used twice does "
                "this, or of one that find_unused_parameters=True takes for unused: pass use_reentrant=False to the "
                "checkpoint, or static_graph=True to ddp.DistributedDataParallel if all steps are equal"
            )

    def _launch_full(self) -> None:
        """Launches every full bucket whose turn it is; the one that carries the step flags waits for the end."""
        # exercise 07: fill and launch one bucket after another, from the first not launched to the first not full
        for reduction in self.reductions[self._num_launched :]:
            if reduction.bucket is self.layout.flags.carrier or not reduction.is_full:
                return
            self._fill(reduction)
            self.launch(reduction)

    def launch_next(self) -> None:
        """Launches the next bucket, to which this rank contributes zeros, because the others do."""
        self._fill(reduction := self.reductions[self._num_launched])
        self.launch(reduction)

    def _fill(self, reduction: BucketReduction) -> None:
        """Copies a bucket's gradients to their places, once they are computed."""
        bucket, device = reduction.bucket, reduction.bucket.slots[0].parameter.device
        if self.streams and device.type == gpu.KIND:
            here = gpu.cuda.current_stream(device)
            others = [stream for stream in self.streams if stream != here]
            for stream in others:
                here.wait_stream(stream)
            for slot in bucket.slots if others else []:
                if (gradient := slot.parameter.grad) is not None and gradient.device == here.device:
                    gradient.record_stream(here)  # its memory may belong to another stream, and is read on this one
        if bucket.direct:
            self.layout.settle([bucket])
        self._finalizer.filled(bucket, without=self._accumulation.fill(bucket))

    def launch(self, reduction: BucketReduction) -> None:
        """Launches a bucket's reduction.

        It runs in the background if reductions overlap. The last one would be waited for at once anyway, so it runs in
        the foreground, unless others are still in flight, because they must complete before it.
        """
        bucket = reduction.bucket
        self._num_launched += 1
        reduction.launched_s = now_s()
        reduction.ready_s = reduction.ready_s or reduction.launched_s
        in_background = self.overlap and (not bucket.is_last or bool(self._in_flight))
        label = f"step {self.step}, {bucket.label}"
        try:
            with self._waited.running():
                divide_by = self._accumulation.divisor(bucket, reduction.divide_by)
                work = self.reducer.reduce(bucket, divide_by=divide_by, async_op=in_background, label=label)
        except CommunicatorBroken:
            self._collect(wait=True)  # a bucket in flight has failed, and its error names the rank that it waited for
            raise
        if work is None:
            reduction.waited_s = now_s()
            self._complete(bucket)
        else:
            reduction.work = work
            self._in_flight.append((reduction, work))
            self._collect(wait=False)

    def _collect(self, *, wait: bool) -> None:
        """Completes the reductions that have ended, in order; waits for all of them if `wait`."""
        while self._in_flight and (wait or self._in_flight[0][1].is_completed()):
            reduction, work = self._in_flight.pop(0)
            with self._waited.running():
                work.wait()
            self._complete(reduction.bucket)

    def _complete(self, bucket: Bucket) -> None:
        """Hands out the mean that a bucket holds."""
        if not self.creates_graph:
            self._accumulation.complete(bucket)
        if self.layout.is_learned:  # before that, buckets are not final
            self.stepper.complete(bucket)

    @property
    def is_complete(self) -> bool:
        """Returns True if all gradients that this backward was to compute are ready."""
        are_full = bool(self.reductions) and all(reduction.is_full for reduction in self.reductions)
        return are_full and len(self._sparse_ready) == len(self.layout.sparse)

    def end(self) -> list[BucketReduction]:
        """Fills the remaining buckets, because backward has ended. Returns what is left to launch. Collective."""
        self.ended_s = now_s()
        if not self.layout.is_learned:
            self._learn()
        if missing := self._missing():
            self._finalizer.keep(missing)
        for reduction in self.reductions[self._num_launched :]:
            self._fill(reduction)  # all of them first: filling shows which gradients are undefined
        self._finalizer.write_flags(missing, self._computed)
        self._accumulation.write_parts(self.layout)
        return self.reductions[self._num_launched :]

    def finish(self) -> Totals | None:
        """Ends the step: waits for what is in flight, and gives every parameter its mean. Collective.

        Returns:
            The sum of the totals of all ranks; None if the host has not waited for it (`step_finalizer.py`,
            note "late").
        """
        if self._in_flight:
            self._collect(wait=True)
        if self.reducer.may_hide:
            self._finalizer.write_hidden_flags()
        self._send(self.layout.flags, "flags")
        self.stepper.check(self._finalizer.gone)
        totals = self._finalizer.settle(creates_graph=self.creates_graph)
        self.is_running, self.is_unread, self.error = False, totals is None, self._finalizer.error
        return totals

    def read_flags(self, *, is_late: bool = False) -> Totals:
        """Reads the flags of all ranks and acts on them, as `StepFinalizer.read_flags` does. Collective."""
        self.is_unread = False
        totals = self._finalizer.read_flags(is_late=is_late)
        self.error = self.error or self._finalizer.error
        return totals

    def next(self) -> Backward:
        """Returns the backward of the next step."""
        given = self.reducer, self.usage, self.stepper, self._accumulation
        following = Backward(self.comm, *given, overlap=self._overlap, waited=self._waited)
        if self.early:  # gradients that this one had no place for: frozen in its forward
            following.early = {each: p for each, p in self.early.items() if each not in self.layout.slot_of}
        return following

    def _learn(self) -> None:
        """Changes to a layout in the order in which gradients have become ready. Collective.

        All ranks take the order of the first rank that has gradients.

        Raises:
            ReplicaMismatch: the ranks' gradients differ, which was not checked if `init_sync` was off.
        """
        check_same_layout(self.comm, [(slot.name, slot.parameter) for slot in self.layout.slots])
        names = [self.layout.slot_of[id(parameter)].name for parameter in self._seen]
        has_seen = self._share.has_samples and bool(names)  # the last of several shards may have none
        seen = all_gather_object(self.comm, names if has_seen else None)
        if (order := next((names for names in seen if names is not None), None)) is not None:
            self.layout.plan(order, for_hook=self.layout.is_for_hook)
        self._set_up(has_ended=True)

    def _missing(self) -> list[Slot]:
        """Returns the slots that backward has not reached since the last reduction, in the order of registration."""
        missing = [slot for reduction in self.reductions for slot in reduction.without_gradient()]
        if self.layout.sparse:
            ready = self._sparse_ready.keys() | self.early.keys()
            missing += [slot for slot in self.layout.sparse if id(slot.parameter) not in ready]
        return sorted(missing, key=lambda slot: slot.index)

    def _computed(self) -> list[Tensor]:
        """Returns the parameters whose gradients this backward has computed, once for each gradient."""
        in_buckets = (each for reduction in self.reductions for each in reduction.ready[reduction.num_before_begin :])
        return [*self._sparse_ready.values(), *self._seen, *in_buckets]

    def widen(self, layout: Layout) -> None:
        """Continues with more parameters, because backward has reached a forward that needs them.

        Raises:
            RuntimeError: the layouts are for other parameters, or buckets have been sent.
        """
        if self.layout.slot_of.keys() >= layout.slot_of.keys():
            return
        if self._num_launched or not layout.slot_of.keys() >= self.layout.slot_of.keys():
            raise RuntimeError(
                "one backward goes through two forwards, between which other parameters were frozen or unfrozen, "
                "or through one that unfreezes: run a backward for each of them, or freeze after the backward and "
                "unfreeze before the forward"
            )
        computed, began_s = self._computed(), self.began_s
        self.reductions, self.index_of, self._seen = [], {}, []
        self.begin(layout, self.step, self._share)
        self.began_s = began_s
        for parameter in computed:
            _ = self.note(parameter) or self.note_other(parameter)


# --- Observers of parameters -----------------------------------------------------------------------------------------
#
# A gradient is ready once all hooks on its parameter have run, because a hook may change it: clip it, say. Those hooks
# run in the order of their registration, and a program may register one at any time. So an observer is a hook on the
# node of the graph that adds to `p.grad`, as in torch's Reducer: it runs after the hooks on the parameter.
#
# A conversion (`model.double()`, or `model.cpu()` and back) gives a parameter another node, which has no observer. The
# next forward detects most conversions. One without a trace (there and back) makes gradients seem to be missing at the
# end of a backward: then the nodes are compared, which is slow.


class Listener(Protocol):
    """A replica, as observers of parameters see it."""

    @property
    def backward(self) -> Backward:
        """The backward that is expected, or is running."""

    @property
    def waiting(self) -> object:
        """A forward that waits for its backward; None: there is none, or it is unknown."""

    def on_other_gradient(self, parameter: Tensor) -> None:
        """Handles a gradient that no bucket is waiting for, and that may begin a backward."""


class Observers:
    """Lets autograd call a replica whenever the gradient of one of these parameters is ready.

    Parameters hold their observers, and may live longer than the replica: the model may be used by itself, or in
    another replica. So observers hold the replica weakly, and are removed with it. Those of a replica whose backward
    broke off are removed once another replica observes the same parameters, because a program may still hold the first.
    """

    _all: ClassVar[weakref.WeakSet[Observers]] = weakref.WeakSet()

    def __init__(
        self, replica: Listener, parameters: Iterable[nn.Parameter], before: Callable[[Tensor], None] | None = None
    ) -> None:
        self._of_replica, self._lock, self._before = weakref.ref(replica), threading.RLock(), before
        self._parameters = [p for p in parameters if (p.is_floating_point() or p.is_complex()) and not p.is_inference()]
        self._nodes: dict[nn.Parameter, Any] = {}  # holds them, because a parameter does not
        self._handles: list[RemovableHandle] = []
        for others in list(self._all):
            if others.are_useless and not others._nodes.keys().isdisjoint(self._parameters):
                others.remove()
        self._all.add(self)
        self.renew()
        weakref.finalize(replica, self.remove).atexit = False  # at exit parameters go, too

    @property
    def are_useless(self) -> bool:
        """Returns True if the replica no longer exists, or makes no further step."""
        return (replica := self._of_replica()) is None or replica.backward.is_running

    def renew(self) -> Sequence[nn.Parameter]:
        """Registers an observer on each node that has none. Returns the parameters of these nodes."""
        has_gpu = any(parameter.device.type == gpu.KIND for parameter in self._parameters)
        observer_of = self._locking_observer_of if has_gpu else self._observer_of
        renewed = list[nn.Parameter]()
        for parameter in self._parameters:
            with _needing_gradient(parameter):
                node = get_gradient_edge(parameter).node
            if self._nodes.get(parameter) is not node:
                self._nodes[parameter] = node
                self._handles.append(node.register_hook(observer_of(parameter)))
                if (before := self._before) is not None:
                    self._handles.append(node.register_prehook(partial(_call, before, parameter)))
                renewed.append(parameter)
        return renewed

    def _observer_of(self, parameter: nn.Parameter) -> Callable[[Any, Any], None]:
        of_replica = self._of_replica

        @uncompiled
        def observe(_inputs: Any, _outputs: Any) -> None:
            if (replica := of_replica()) is None or replica.backward.note(parameter):
                return
            if replica.waiting is not None or not replica.backward.note_other(parameter):
                replica.on_other_gradient(parameter)

        return observe

    def _locking_observer_of(self, parameter: nn.Parameter) -> Callable[[Any, Any], None]:
        observe = self._observer_of(parameter)

        @uncompiled
        def observe_alone(inputs: Any, outputs: Any) -> None:
            with self._lock:  # autograd has a thread for each GPU, and one for the CPU
                if parameter.device.type == gpu.KIND and (replica := self._of_replica()) is not None:
                    replica.backward.streams.add(gpu.cuda.current_stream(parameter.device))
                observe(inputs, outputs)

        return observe_alone

    def remove(self) -> None:
        """Removes all observers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


def _call(before: Callable[[Tensor], None], parameter: Tensor, _gradients: Any) -> None:
    before(parameter)


@contextmanager
def _needing_gradient(parameter: nn.Parameter) -> Iterator[None]:
    """Unfreezes a parameter for a block, so that it can be observed: it may be unfrozen later."""
    needs_gradient = parameter.requires_grad
    with torch.inference_mode(False):
        parameter.requires_grad_(True)
        try:
            yield
        finally:
            parameter.requires_grad_(needs_gradient)
