"""The bucketed replica: gradients are averaged in buckets, while backward is still running. This is the core of DDP.

    made         parameters and buffers become rank 0's; every parameter gets an observer
    forward      `prepare` finds the layout, which says which bucket each gradient goes to; outputs are watched
    backward     `_begin` when autograd reaches an output, an observer for each gradient, `_finish` at the end. Each
                 calls the current `Backward`, which does the work (`backward.py`)
    step         the optimizer finds the mean in `p.grad`, which is a view of a bucket

A program may freeze and unfreeze parameters inside a forward, run backward in there, or borrow other tensors for it
(`torch.func.functional_call`).

Note "begin". A backward normally enters the model through the outputs of its forward. A loss computed from gradients
with respect to inputs (`autograd.grad(…, create_graph=True)`) can bypass them. So while a forward in training mode, or
one whose outputs hold no tensor with a graph, still waits for its backward, the first gradient of a parameter begins
the step instead.

Note "errors". If a rank is lost, the collective in progress raises `PeerLost`, in `prepare`, `_begin`, an observer or
`_finish`. If a gradient becomes ready whose bucket has been sent, or that has no bucket, the observer raises
RuntimeError. If a parameter got no gradient, the next `prepare` raises `UnusedParameters`, and so does `raise_pending`,
which can be called before the optimizer's step. After a backward that broke off, `prepare` raises RuntimeError. If
parameters were added, or frozen or converted in a wrong way, it raises `ConfigError` or `ReplicaMismatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.comm.opening import device_of
from ddp.comm.session import current
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket
from ddp.gradients.compression import Compression
from ddp.gradients.hook import Hook
from ddp.gradients.layout import BySize, Grouping, Layout, bucket_limits
from ddp.gradients.reducer import AllReduce, Collective, Reducer
from ddp.gradients.totals import Totals
from ddp.replica.autograd import (
    accumulates,
    adds_to_all,
    hand_out_differentiable,
    uncompiled,
    watch_backward,
    will_accumulate,
)
from ddp.replica.backward import Accumulation, Backward, BucketReduction, Observers, Stepper
from ddp.replica.broadcast import BufferSync, broadcast_state, check_trainable, sending
from ddp.replica.by_shards import ByShards, check_shards
from ddp.replica.direct import is_compiler_used, mode_for
from ddp.replica.parameters import Change, Layouts, ParameterWatch, check_wire, managed, sparse_weights
from ddp.replica.replica import Replica
from ddp.replica.step_finalizer import Share, Usage
from ddp.replica.sync_batchnorm import waits
from ddp.replica.units import dissolve_units
from ddp.setting import WireName


class BucketedDataParallel(Replica):
    """Averages gradients over all ranks in buckets, while backward runs.

    Args:
        module: at least one parameter must need a gradient. Its parameters and buffers become rank 0's.
        bucket_cap_mb: size at which a bucket is closed, in MiB; 25 by default.
        first_bucket_mb: the size for bucket 0, which is launched first; 1 by default.
        overlap: reduce in the background of backward; by default, only if that is faster (`backward.py`, note
            "foreground").
        wire: "bf16", "fp16", "int8" or "int8_stochastic": the format in which gradients travel between hosts
            (`comm/reduction.py`). "fp32": narrower gradients are added up as float32.
        hook: sends a part of the gradients between hosts (`gradients/hook.py`); the replica takes a copy.
        num_shards: gradients are added up by this number of shards of the batch, each in its own block (`shard`). Then
            the result has the same bits at any world size.
        reducer: averages a bucket, unless a hook does: an all-reduce gives each rank the mean of all of it; a strategy
            may need only a slice (`ddp.strategies.Sharded.reducer`).
        find_unused_parameters: parameters may go without a gradient; each backward finds those that it will reach.
        direct_gradients: compute gradients of large weights in their buckets (`direct.py`); by default, on CPUs.
        broadcast_buffers: before each forward in training mode, buffers become rank 0's. With shards, they become the
            shards' mean at the end of the step instead.
        comm: the ranks that take part; all by default.

    Attributes:
        waiting: the layout of a forward that waits for its backward (note "begin").

    Raises:
        ReplicaMismatch: the ranks' models differ in a name, shape, dtype, memory format, or in what is frozen.
        ConfigError: no parameter needs a gradient; the wire format is wider than a gradient; there are more ranks than
            shards.
    """

    gradient_as_bucket_view = False  # gradients that a program keeps belong to it (`gradients/bucket.py`, note "kept")
    collective: Collective
    waiting: Layout | None = None
    in_slices = False  # see `check_trainable`
    _is_released = False

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        overlap: bool | None = None,
        wire: WireName | None = None,
        hook: Hook | None = None,
        num_shards: int | None = None,
        reducer: type[Collective] = AllReduce,
        find_unused_parameters: bool = False,
        direct_gradients: bool | None = None,
        broadcast_buffers: bool = True,
        comm: Communicator | None = None,
    ) -> None:
        comm = comm or current(device_of(module))
        if not (isinstance(reducer, type) and issubclass(reducer, Collective)):
            raise ConfigError(f"reducer={reducer!r:.60}: give a class of ddp.gradients.reducer, such as ReduceScatter")
        dissolve_units(module)
        check_trainable(list(module.named_parameters()), in_slices=self.in_slices)
        check_wire(module.named_parameters(), wire, hook)
        collective, how = reducer(comm, wire, num_shards), sending(wire, hook, num_shards)
        self._take_weights(comm, module, collective, how)
        broadcasts = broadcast_buffers and num_shards is None
        super().__init__(module, comm, BufferSync(comm, module, "broadcast" if broadcasts else "none"))
        usage = Usage(comm, finds_unused=find_unused_parameters)
        if num_shards is not None:
            check_shards(module, comm, num_shards, wire, hook)
            given = self._buffer_sync, num_shards, None if wire == "fp32" else wire
            by_shards = self.accumulation = self._by_shards(comm, *given, finds_unused=find_unused_parameters)
            usage, self.gradient_as_bucket_view = by_shards.usage, True
            self.register_forward_pre_hook(by_shards.before_forward)
        self._limits = bucket_limits(bucket_cap_mb, first_bucket_mb=first_bucket_mb)
        self._overlap, self.wire = overlap, wire
        self.direct_gradients = direct_gradients if num_shards is None else False
        self.compression = None if hook is None else Compression(hook, comm, self._replicated_parameters())
        self._start(usage, Stepper(), collective)
        self.gradient_as_bucket_view |= self.collective.is_sliced

    def _take_weights(self, comm: Communicator, module: nn.Module, collective: Collective, how: str) -> None:
        """Makes parameters and buffers rank 0's. Collective.

        Args:
            how: gradients are sent, for all ranks to compare.
        """
        broadcast_state(comm, [*module.named_parameters(), *module.named_buffers()], sending=how)

    def _by_shards(self, *given: Any, **how: Any) -> ByShards:
        """Returns what adds up gradients by shards."""
        return ByShards(*given, **how)

    def _grouping(self) -> Grouping:
        """Returns what chooses which gradients share a bucket."""
        return BySize(self._limits)

    def _start(self, usage: Usage, stepper: Stepper, collective: Collective | None = None) -> None:
        """Plans the first layout, and registers the observers by which autograd reports each gradient."""
        if waits(self.module):
            self._overlap = True  # its layers wait in backward, too, and a rank must be able to wait for both at once
        self.collective = collective or AllReduce(self.comm, self.wire, self.num_shards)
        self._reducer: Reducer = self.compression or self.collective
        self._usage, self._stepper = usage, stepper
        self._watch = ParameterWatch(self.module)
        self._has_layout = True
        given = self._replicated_parameters(), self._reducer
        grouping = self._grouping()
        self._layouts = Layouts(self.comm, self._watch, *given, grouping=grouping, num_shards=self.num_shards)
        self._direct = mode_for(self.place_of, self.module, self._layouts.current, is_on=self.direct_gradients)
        self.accumulation.connect(self._layouts)
        self.backward = self._new_backward()
        self._last = self.backward  # the last one that has ended, once there is one
        observed = (parameter for _, parameter in self._replicated_parameters())
        self._observers = Observers(self, observed, before=self.accumulation.before)

    # --- a step, in the order of time --------------------------------------------------------------------------------

    def prepare(self, *, in_forward: bool = False) -> None:
        """Raises any error that the last step has recorded, and finds the layout for this step.

        Args:
            in_forward: a forward that synchronises follows. While it runs, any gradient may begin a step.

        Raises:
            UnusedParameters: some parameters got no gradient in the last step, and that is not allowed.
            RuntimeError: the last backward broke off half-way, so that the ranks are out of step.
            ConfigError: parameters were added, removed or replaced, or frozen with a gradient that was not sent.
            ReplicaMismatch: parameters were frozen or converted on some ranks only.
        """
        self._raise_known()
        if self._is_released:
            self._observers.renew()
            self._is_released = False
        while (change := self._watch.check()) is Change.MODULES:  # checks again, for other changes
            self._buffer_sync.refresh()
        if change is Change.KINDS:
            self._observers.renew()
            self._layouts.forget()
        if change is not Change.NONE or not self._has_layout:
            self._has_layout = False  # stays so if choosing one fails
            self._choose_layout()
            self._has_layout = True
        if in_forward:
            self._is_in_forward = not self._watch.is_borrowed and self.accumulation.may_unfreeze
            self.waiting = self._layouts.current if self._is_in_forward else None

    def raise_pending(self) -> None:
        """Raises the error that the last backward has recorded, or RuntimeError if a backward broke off."""
        self._read()
        self._raise_known()

    @property
    def totals(self) -> Totals:
        self._read()
        return self._totals

    def _read(self) -> None:
        """Reads the flags of the last step, unless that was done already."""
        if self._last.is_unread:
            with torch.no_grad():
                self._totals = self._last.read_flags()

    def release(self) -> None:
        super().release()
        self._observers.remove()
        self.backward.early.clear()
        self._is_released = True

    def _raise_known(self) -> None:
        if self._last.error is not None:
            raise self._last.error
        if self.backward.is_running:
            raise RuntimeError(
                f"the last backward through this replica broke off (step {self.backward.step}); "
                "the ranks are out of step: restart from the last checkpoint"
            )

    @property
    def _awaits_backward(self) -> bool:
        return self.waiting is not None or self.backward.is_running

    def _around_forward(self) -> AbstractContextManager[Any] | None:
        is_direct = self._direct is not None and torch.is_grad_enabled() and not is_compiler_used()
        return self._direct if is_direct else None

    def _watch_outputs(self, outputs: Any) -> None:
        if self._watch.has_frozen:
            self._check_inside_forward()
        self._is_in_forward, is_borrowed, layout = False, self._watch.is_borrowed, self._layouts.current
        has_outputs = watch_backward(outputs, partial(self._begin, layout, if_reached=is_borrowed), self._finish)
        self.waiting = layout if (self.training or not has_outputs) and not is_borrowed else None

    def _check_inside_forward(self) -> None:
        """Takes another layout if the forward that is running, or has just ended, has unfrozen parameters."""
        if self._is_in_forward and self._watch.check_inside():
            self._choose_layout()

    @uncompiled
    def _begin(self, layout: Layout, adds_to_all: bool, *, if_reached: bool = False) -> bool:
        """Begins the step when backward first reaches an output or a parameter. Returns True if it did.

        Args:
            layout: of the forward that backward goes through.
            adds_to_all: returned by the function of this name.
            if_reached: begin only if backward will reach one of the parameters.
        """
        if self._is_released:
            raise RuntimeError(
                "backward goes through a forward of a replica that has been released, because an error has ended its "
                "training: call the module, or a new replica of it, and run backward through what that returns"
            )
        is_running = self.backward.is_running
        if is_running and layout is self.backward.layout:
            return False
        if not (will_accumulate(layout.parameters) if if_reached else adds_to_all or accumulates(layout.parameters)):
            return False
        if self._is_in_forward and not self.require_backward_grad_sync:
            return False  # no_sync inside a forward that runs backward itself
        if is_running:
            self.backward.widen(layout)
            return False
        self._begin_step(layout)
        return True

    def place_of(self, parameter: Tensor) -> Tensor | None:
        """Returns the place in its bucket where a gradient may be computed now; None if there is none."""
        if not self.backward.is_running and self.gradient_as_bucket_view:
            return None  # a program may keep what a micro-batch leaves, and such a bucket cannot move out of its way
        layout = self.backward.layout if self.backward.is_running else self._layouts.current
        index = layout.index_of.get(id(parameter)) if layout.has_memory else None
        if index is None or self.backward.is_launched(index):
            return None
        return layout.buckets[index].place_for(layout.slot_of[id(parameter)])

    def _begin_step(self, layout: Layout, *, has_samples: bool = True) -> None:
        layout.may_move = not self.gradient_as_bucket_view
        layout.settle(layout.buckets)
        if self.compression is not None:
            self.compression.begin()
        mine, self.riding = self.riding, None
        share = self.accumulation.begin(layout, Share(mine, self.inputs.divisor, has_samples))
        self.backward.begin(layout, self.num_steps + 1, share)

    def _begin_without_samples(self) -> None:
        self._begin_step(self._layouts.current, has_samples=False)

    def on_other_gradient(self, parameter: Tensor) -> None:
        """Handles a gradient that no bucket is waiting for."""
        is_running = self.backward.is_running
        layout = self.backward.layout if is_running else self._layouts.current
        is_in_step = is_running or (self._is_in_forward and self.require_backward_grad_sync)
        is_unknown = parameter.requires_grad and id(parameter) not in layout.slot_of
        if is_in_step and is_unknown and self.accumulation.may_unfreeze:
            self._watch.check_inside()  # it was frozen when the forward began
            self._choose_layout()
            self.waiting = self._layouts.current
            if is_running:
                self.backward.widen(self.waiting)
        waiting = None if self.backward.is_running else self.waiting
        if waiting is not None and self._begin(waiting, adds_to_all()):
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        # once more, because the backward that has just begun may have a bucket for it
        is_known = self.backward.note(parameter) or self.backward.note_other(parameter)
        if not is_known and parameter.requires_grad:  # else autograd has reached it without a gradient
            name = self._watch.names_of({id(parameter)})[0]
            raise RuntimeError(
                f"{name} was unfrozen after its forward began, or one backward goes through two forwards with other "
                "frozen parameters, so no bucket has a place for its gradient: unfreeze before the forward"
            )

    @uncompiled
    def _finish(self) -> None:
        ended, former = self.backward, self._last
        for parameter in () if ended.is_complete else self._observers.renew():  # converted and back, unobserved
            if self.accumulation.has_gradient(parameter):
                self.on_other_gradient(parameter)
        with torch.no_grad():
            for reduction in ended.end():
                ended.launch(reduction)
            totals = ended.finish()
            if ended.layout.kept and not self.gradient_as_bucket_view:
                ended.layout.hand_out_copies()
            if former is not ended and former.is_unread:
                former.read_flags(is_late=True)
                ended.error = ended.error or former.error
        self._last, self.backward = ended, ended.next()
        self.waiting = self._layouts.current if self._is_in_forward else None
        if ended.creates_graph:
            hand_out_differentiable(ended.layout.slots, partial(self._begin, ended.layout), self._finish)
        self._end_step(totals)

    def average_gradients(self) -> None:
        """Averages the gradients that parameters have, however they were computed, and ends the step. Collective."""
        self.prepare()
        for parameter in self._layouts.current.parameters:
            self.backward.note_other(parameter)
        self._begin_step(self._layouts.current)
        self._finish()

    def end_step(self, totals: Totals) -> None:
        """Ends a step whose gradients were averaged elsewhere, or used by this rank alone.

        Args:
            totals: of all ranks.
        """
        self.riding = None
        self.backward.early.clear()
        self._end_step(totals)

    def _new_backward(self) -> Backward:
        given = self._reducer, self._usage, self._stepper, self.accumulation
        return Backward(self.comm, *given, overlap=self._overlap, waited=self.waited)

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        running, accumulation = self.backward, self.accumulation
        self.accumulation = Accumulation()
        self.backward = self._new_backward()
        try:
            yield
        finally:
            self.backward, self.accumulation = running, accumulation

    # --- which gradients live where ----------------------------------------------------------------------------------

    def _choose_layout(self) -> None:
        self._layouts.choose(early=self.backward.early)
        self._direct = mode_for(self.place_of, self.module, self._layouts.current, is_on=self.direct_gradients)

    def _replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return managed(self.module, inner=Replica)

    # --- looking at it -----------------------------------------------------------------------------------------------

    @property
    def overlaps(self) -> bool:
        return self.comm.plan.overlaps if self._overlap is None else self._overlap

    @property
    def layout(self) -> Layout:
        """The buckets of the parameters that needed a gradient when the last step was prepared."""
        return self._layouts.current

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the next step, in the order of reduction."""
        return self._layouts.current.buckets

    @property
    def measures_parts(self) -> bool:
        # read before the forward, which would be the first to see that a sparse layer was unfrozen
        return self.compression is None and not any(weight.requires_grad for weight in sparse_weights(self.module))

    @property
    def gradient_order(self) -> list[str] | None:
        """Names in the order in which gradients become ready; None as long as that is not known."""
        return self._layouts.current.order

    def adopt_gradient_order(self, names: Sequence[str]) -> None:
        self._layouts.adopt_order(list(names))

    def logging_data(self) -> dict[str, Any]:
        """Returns how long the last step's reductions took, bucket by bucket (`describe`)."""
        return describe(self._last, self.num_steps, self._layouts.current)


# --- The times of the last step --------------------------------------------------------------------------------------
#
#     began                          when backward began, on the clock of the process (`time.perf_counter`)
#     ready ── launched ── done      seconds after that
#     overlap                        share of (launched … done) that lies before backward ended; 0 in the foreground,
#                                    where backward pauses meanwhile
#
# The slowest rank's buckets are ready late; all other ranks' buckets are ready early, and done late. So the two times
# together show which rank waited for which.
#
# In a profile, every bucket's reduction is a range on the thread that runs it, and inside of it the algorithm ("ddp:
# ring"). With overlap that is a background thread; on the thread of backward the wait for the bucket is a range.
# torch's profiler records the background thread only with this option:
#
#     torch.profiler.profile(experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True))


def describe(backward: Backward, num_steps: int, layout: Layout) -> dict[str, Any]:
    """Returns the last step in numbers; plain values, for a log.

    Args:
        num_steps: number of backwards that have synchronised so far.
        layout: that of the next step; after a first backward it has the order that was learned.
    """
    buckets = [_describe(reduction, backward) for reduction in backward.reductions]
    in_flight_s = sum(each["done_s"] - each["launched_s"] for each in buckets)
    hidden_s = sum(each["overlap"] * (each["done_s"] - each["launched_s"]) for each in buckets)
    return {
        "num_steps": num_steps,
        "world_size": backward.comm.world_size,
        "num_parameters": len(layout.slots),
        "order_is_learned": layout.is_learned,
        "runs": "in the background" if backward.overlap else "in the foreground",
        "began_s": backward.began_s,
        "bytes": sum(each["bytes"] for each in buckets),
        "backward_s": backward.ended_s - backward.began_s,
        "overlap": hidden_s / in_flight_s if in_flight_s > 0 else 0.0,
        "buckets": buckets,
    }


def _describe(reduction: BucketReduction, backward: Backward) -> dict[str, Any]:
    bucket, backward_s = reduction.bucket, backward.ended_s - backward.began_s
    ready_s, launched_s, done_s = (
        at_s - backward.began_s for at_s in (reduction.ready_s, reduction.launched_s, reduction.done_s)
    )
    hidden_s = max(0.0, min(done_s, backward_s) - launched_s) if backward.overlap else 0.0
    return {
        "index": bucket.index,
        "parameters": [slot.name for slot in bucket.slots],
        "shapes": [list(slot.parameter.shape) for slot in bucket.slots],
        "numel": sum(slot.parameter.numel() for slot in bucket.slots),
        "bytes": bucket.num_bytes,
        "dtype": str(bucket.slots[0].parameter.dtype).removeprefix("torch."),
        "ready_s": ready_s,
        "launched_s": launched_s,
        "done_s": done_s,
        "overlap": hidden_s / (done_s - launched_s) if done_s > launched_s else 0.0,
    }
