"""The reducer: averages gradients over all ranks while backward is still running.

In the order of time, for every step that synchronises:

    begin      backward has reached the outputs (`sink.py`)
    arrival    a gradient is there (`arrangement.py` has the hooks). Once a bucket and all before it are full, its mean
               is taken: in one fixed order on every rank, or the ranks would wait for different ones
    finish     backward has ended: fill what is still empty, reduce the rest, wait

                 backward   ▓▓▓ fc ▓▓▓▓▓▓▓ conv4 ▓▓▓▓▓▓▓ conv3 ▓▓▓▓▓ conv2 ▓▓▓ conv1 ▓│ finish
                 wire              ░░ bucket 0 ░░░░░░░░░░░░░░ bucket 1 ░░░░░░░░░░░░░░░│░ last ░

Note "begin". A backward begins at the outputs of forward, with one exception: a loss made of gradients with respect to
inputs (`autograd.grad(…, create_graph=True)`) has a graph that leads past them. So the first gradient of a parameter
begins the step, too, if there was a forward in training mode that no backward has followed yet.

Note "foreground". Over a network, buckets travel in the background while backward goes on. In the memory of a host
whose processors are all busy with backward there is nothing to overlap with: another thread takes its time from the one
that computes, and changing threads costs more than it brings (MLP with 25M parameters, 2 workers on two cores: 208 ms a
step in the background, 190 ms in the foreground). There each bucket is reduced at once, by the thread that filled it.

Note "unused parameters". A parameter without a gradient contributes zeros (or what it had accumulated), so that no
rank ever waits for it. Whether any rank had such parameters rides in the tail of the last bucket; only then do the
ranks compare which (`unused.py`). With `find_unused_parameters` the graph is asked at `begin` which gradients will
never come, so that no bucket waits for them.

Note "static graph". Under re-entrant checkpointing a parameter that is used twice gets two gradients, in two backwards
inside the real one, and nothing in the graph announces that. If the graph is the same in every step, the first one
shows how many there are: it holds all buckets back until its end, and later steps know what to wait for.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor, nn

from ddp.clock import Stopwatch, now_s
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.work import Work
from ddp.errors import CommunicatorBroken, ConfigError
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.hook import CommHook
from ddp.gradients.totals import StepTotals
from ddp.replica.arrangement import Arrangement
from ddp.replica.higher_order import hand_out_differentiable
from ddp.replica.in_backward import StepsOfOthers, refusal
from ddp.replica.mean import Mean
from ddp.replica.sink import accumulates, call_at_end, check_engine, watch_backward, will_accumulate
from ddp.replica.sparse import SparseGradients
from ddp.replica.uncompiled import uncompiled
from ddp.replica.unused import Unused


class Phase(Enum):
    """Where in a step the reducer is."""

    IDLE = auto()  # gradients accumulate locally, nothing is sent
    BACKWARD = auto()  # between begin and finish: full buckets are reduced


IDLE = Phase.IDLE


class Reducer:
    """Averages the gradients of one replica, bucket by bucket.

    Args:
        named_parameters: those that need a gradient, in registration order, the same on every rank.
        strangers: the others, which are frozen.
        sparse: names of those whose gradient is sparse.
        limits: bytes at which bucket 0, 1, 2, … is closed; the last one holds for all that follow.
        find_unused_parameters: parameters may go without a gradient.
        static_graph: every step uses the same parameters equally often.
        overlap: reduce in the background; None: where that pays (note "foreground").

    Attributes:
        mean: how it is taken.
        hook: takes the place of the all-reduce, if one is registered (`use_hook`).
        is_expected: a forward that synchronises waits for its backward.
        on_begin: asked before a step begins; False: it does not.
        on_end: what to call when a backward has ended that no output has announced.
        on_stranger: told of a frozen parameter that has got a gradient: it was unfrozen inside a forward.
        on_prepare: gives the reducer for a backward that a program announces (`prepare_for_backward`).
        is_differentiable: this step's gradients stay out of place, and can be differentiated (create_graph).
        on_mean: told of every bucket that has its mean, in backward's thread.
        waited: time that backward's thread spent on reductions, or waiting for them.
        num_steps: steps that have synchronised.
        began_s, ended_s: when the last step's backward did.
    """

    def __init__(
        self,
        comm: Communicator,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        strangers: Iterable[nn.Parameter] = (),
        sparse: Iterable[str] = (),
        limits: Sequence[int] = (1 << 20, 25 << 20),
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        overlap: bool | None = None,
    ) -> None:
        self.comm, self._finds_unused = comm, find_unused_parameters and not static_graph
        self.overlap = comm.overlaps if overlap is None else overlap
        names = set(sparse)
        self.slots = [Slot(i, name, p, is_sparse=name in names) for i, (name, p) in enumerate(named_parameters)]
        tolerated = find_unused_parameters or static_graph
        self._unused = Unused(comm, self.slots, tolerated=tolerated, fixed=static_graph)
        self._steps_of_others = StepsOfOthers(self.slots)
        self.hook: CommHook | None = None
        self.is_expected = False
        self.on_begin: Callable[[Reducer], bool] | None = None
        self.on_end: Callable[[], None] | None = None
        self.on_stranger: Callable[[Tensor], None] | None = None
        self.on_prepare: Callable[[], Reducer] | None = None
        self.on_mean: Callable[[Bucket], None] | None = None
        self.waited, self.num_steps = Stopwatch(), 0
        self.began_s = self.ended_s = 0.0
        self._parameters = [slot.parameter for slot in self.slots]
        self._phase = Phase.IDLE
        self._works: list[tuple[Bucket, Work]] = []  # in flight
        self._num_launched = 0
        self.is_differentiable = False
        self._came: list[Tensor] | None = []  # in the order of their gradients; None once the order is known
        self._knows_graph = not static_graph
        dense = [slot for slot in self.slots if not slot.is_sparse]
        self._arrangement = Arrangement(
            comm,
            dense,
            limits=limits,
            hooks_of=partial(_hooks_of, weakref.ref(self)),
            strangers=strangers,
            on_stranger=_weakly(self._on_stranger_gradient),
        )
        self.mean = Mean(comm, self._arrangement)
        scattered = [slot for slot in self.slots if slot.is_sparse]
        self._sparse = SparseGradients(comm, scattered, on_gradient=_weakly(self._on_sparse_gradient))

    # --- the step, in the order of time ------------------------------------------------------------------------------

    def raise_pending(self) -> None:
        """Raises what the last step left behind.

        Raises:
            UnusedParameters: some parameters got no gradient, and that is not allowed.
            RuntimeError: the last backward broke off half-way, so that the ranks are out of step.
        """
        self._unused.raise_pending()
        if self._phase is Phase.BACKWARD:
            raise RuntimeError(
                f"the last backward through this replica broke off (step {self.num_steps}); the ranks are out of step: "
                "start anew, from the last checkpoint"
            )

    def ride_along(self, totals: StepTotals) -> None:
        """Sends this rank's part of the step's totals with the gradients; they are divided by the global count then."""
        self.mean.ride_along(totals)

    @uncompiled
    def begin(self, *, in_backward: bool = True, if_reached: bool = False) -> bool:
        """Backward has reached an output, or a rank without samples joins in. True for the first call of a step.

        Args:
            if_reached: it begins no step unless it will come to one of the parameters.

        Raises:
            ConfigError: it creates a graph, and parameters are to be stepped meanwhile.
        """
        if self._phase is Phase.BACKWARD:
            return False
        if in_backward and not (will_accumulate if if_reached else accumulates)(self._parameters):
            check_engine(in_backward=True)
            return False
        self.is_differentiable = in_backward and torch.is_grad_enabled()
        if self.is_differentiable and self.on_mean is not None:
            raise refusal("create_graph=True")
        if self.on_begin is not None and not self.on_begin(self):
            return False
        self._phase, self.began_s = Phase.BACKWARD, now_s()
        coming = None
        if self._came is None:
            self._make_memory()
            if self._finds_unused and in_backward:
                coming = frozenset(id(self._parameters[place]) for place in will_accumulate(self._parameters))
        self._arrangement.mend_views()
        self._steps_of_others.begin()
        for bucket in self.buckets:
            bucket.begin(coming)
            if len(bucket.awaited) < len(bucket.slots):
                for slot in bucket.slots:
                    if id(slot.parameter) not in bucket.awaited:
                        self._unused.keep(slot, slot.parameter.grad)
        self._reduce_full_buckets()
        return True

    def _make_memory(self) -> None:
        """Makes the buckets' memory, if it is not there yet, and writes what this rank knows already. Collective."""
        self._arrangement.allocate()
        self.mean.write_totals()

    @uncompiled
    def _on_sparse_gradient(self, parameter: Tensor) -> None:
        if self._phase is not IDLE or self._begins_here() or parameter.requires_grad:
            self._sparse.arrivals.append(parameter)

    def _on_stranger_gradient(self, parameter: Tensor) -> None:
        if self.on_stranger is not None:
            self.on_stranger(parameter)

    def note(self, parameter: Tensor) -> None:
        """Notes a gradient that another reducer was told of."""
        self._sparse.take_over(self._arrangement.take_over([parameter]))

    def _begins_here(self) -> bool:
        """Returns True if this gradient begins a step that no output has announced (note "begin")."""
        if self.is_expected and self.begin():
            call_at_end(self.on_end or self.finish)
            return True
        return False

    def _on_last(self, bucket: Bucket, parameter: Tensor) -> None:
        """A gradient has come with which its bucket may be full; or one that comes too late."""
        if bucket.index < self._num_launched:
            if not parameter.requires_grad:
                return  # it was frozen after its forward, and has got nothing
            name = next(slot.name for slot in bucket.slots if slot.parameter is parameter)
            raise RuntimeError(
                f"{name} got a gradient in step {self.num_steps} after {bucket.label} had been sent. "
                "Re-entrant checkpointing of a module that is used twice does this, or of one that "
                "find_unused_parameters=True takes for unused: pass use_reentrant=False to the checkpoint, or "
                "static_graph=True to the replica if all steps are alike"
            )
        if self._knows_graph and self._came is None and bucket.look(at_s=now_s()):
            self._reduce_full_buckets()

    def _reduce_full_buckets(self) -> None:
        """Reduces every bucket whose turn it is, except the last."""
        if self._came is not None:
            return  # the first step reduces when backward has ended, and buckets are known
        while self._num_launched < len(self.buckets) - 1 and self.buckets[self._num_launched].is_full:
            bucket = self.buckets[self._num_launched]
            self._fill(bucket)
            self._reduce(bucket)

    def _fill(self, bucket: Bucket) -> None:
        bucket.fill(keep=self.is_differentiable)
        for slot in bucket.undefined:
            self._unused.keep(slot, None)

    def _reduce(self, bucket: Bucket) -> None:
        """Takes a bucket's mean: in the background if anything is left to do meanwhile, else now."""
        self._num_launched += 1
        bucket.launched_s = now_s()
        if self.hook is not None:
            if bucket.slots:
                self.hook.launch(bucket, self.buckets, self.num_steps)
            return
        in_background = self.overlap and (bucket is not self.buckets[-1] or bool(self._works))
        try:
            with self.waited.running():
                label = f"step {self.num_steps}, {bucket.label}"
                work = self.mean.all_reduce(bucket, async_op=in_background, label=label)
        except CommunicatorBroken:
            self._retire(wait=True)  # a bucket in flight has failed: its error says whom it waited for
            raise
        if in_background:
            self._works.append((bucket, work))
            self._retire(wait=False)
        else:
            self._has_mean(bucket, now_s())

    def _retire(self, *, wait: bool) -> None:
        """Takes note of buckets that have come back, in order."""
        while self._works and (wait or self._works[0][1].is_completed()):
            bucket, work = self._works.pop(0)
            with self.waited.running():
                work.wait()
            self._has_mean(bucket, work.done_s)

    def _has_mean(self, bucket: Bucket, done_s: float) -> None:
        bucket.done_s = done_s
        if self.on_mean is not None:
            self.on_mean(bucket)

    @torch.no_grad()
    def finish(self, *, had_backward: bool = True) -> None:
        """Backward has ended: reduces what is left, and hands out the views.

        Args:
            had_backward: False on a rank that had nothing to compute; that is no error about unused parameters.
        """
        self.ended_s = now_s()
        self._learn(had_backward=had_backward)
        missing = self._find_missing()
        for slot in missing:
            self._unused.keep(slot, slot.parameter.grad)
        for bucket in self.buckets[self._num_launched :]:
            self._fill(bucket)
        undefined = {slot for bucket in self.buckets for slot in bucket.undefined}.difference(missing)
        if self.on_mean is None:
            self._steps_of_others.check(undefined)
        tail = self._arrangement.unused.zero_()
        if had_backward and missing:
            tail[0] = 1
        if had_backward and undefined:
            tail[1] = 1
        for bucket in self.buckets[self._num_launched :]:
            if not bucket.is_full or not bucket.slots:
                bucket.ready_s = self.ended_s
            self._reduce(bucket)
        self._retire(wait=True)
        if self.hook is not None:
            self._finish_hook(self.hook)
        self.mean.settle(by_hook=self.hook is not None)
        if self.is_differentiable:
            hand_out_differentiable(self._arrangement.slots, self.begin, self.on_end or self.finish)
        is_any_missing, is_any_undefined = (number > 0 for number in tail.tolist())
        if is_any_missing or is_any_undefined:
            self._unused.settle(missing, undefined, is_any_undefined=is_any_undefined, had_backward=had_backward)
        self._sparse.reduce(divide_by=self.mean.divisor())
        self._make_ready()

    def _make_ready(self) -> None:
        """For the next step."""
        self._phase, self._num_launched, self.is_expected = Phase.IDLE, 0, False
        self.num_steps += 1
        self.mean.forget()
        self._unused.forget()
        self._sparse.arrivals.clear()
        for bucket in self.buckets:
            bucket.arrivals.clear()
            bucket.undefined.clear()

    def _find_missing(self) -> list[Slot]:
        """Parameters that autograd has not come to since the last reduction, in the order of registration."""
        missing = [slot for bucket in self.buckets for slot in bucket.without_gradient()]
        missing += self._sparse.without_gradient()
        return sorted(missing, key=lambda slot: slot.index)

    def use_hook(self, hook: CommHook) -> None:
        """Lets a hook take the place of the all-reduce. Every rank calls it alike.

        Buckets are ordinary memory then, each one's gradients and nothing else: hooks may resize their buffers.
        """
        self.hook = hook
        self._arrangement.in_ordinary_memory = True
        self._arrangement.lay_out()

    def _finish_hook(self, hook: CommHook) -> None:
        """Waits for the hook's futures. Its buckets have no tails: those are a bucket of their own."""
        with self.waited.running():
            hook.finish()
            self.comm.all_reduce(self.buckets[-1].flat, label=f"step {self.num_steps}, totals")
        for bucket in self.buckets:
            self._has_mean(bucket, now_s())

    @property
    def totals(self) -> StepTotals:
        """What all ranks' totals added up to in the last step."""
        return self.mean.totals

    # --- buckets and their order -------------------------------------------------------------------------------------

    @property
    def buckets(self) -> list[Bucket]:
        """In the order of reduction."""
        return self._arrangement.buckets

    @property
    def layout(self) -> list[list[str]]:
        """Names of the gradients that are reduced together."""
        return self._arrangement.layout

    @property
    def order(self) -> list[str] | None:
        """Names in the order in which gradients come; None as long as that is not known."""
        return [slot.name for slot in self._arrangement.slots] if self._arrangement.is_learned else None

    def adopt_order(self, names: Sequence[str]) -> None:
        """Expects gradients in this order from now on. Every rank calls it alike."""
        self._came = None
        self._arrangement.adopt_order(names)

    def _learn(self, *, had_backward: bool) -> None:
        """From the first backward: how often gradients come, and in which order, as rank 0 saw it. Collective."""
        if had_backward and not self._knows_graph:
            self._knows_graph = True
            arrivals = (each for bucket in self.buckets for each in bucket.arrivals[bucket.num_before :])
            self._arrangement.expect(Counter(map(id, arrivals)))
        if self._came is not None:
            names = {id(slot.parameter): slot.name for slot in self.slots}
            seen = all_gather_object(self.comm, [names[id(each)] for each in self._came] if had_backward else None)
            self._came = []
            if (order := next((names for names in seen if names is not None), None)) is not None:
                self.adopt_order(order)
            self._make_memory()

    @property
    def is_in_backward(self) -> bool:
        """True between `begin` and the end of `finish`."""
        return self._phase is Phase.BACKWARD

    def covers(self, other: Reducer) -> bool:
        """Returns True if all parameters of another one are among these."""
        return {id(slot.parameter) for slot in other.slots} <= {id(slot.parameter) for slot in self.slots}

    def give_up(self) -> bool:
        """Ends a step that has sent nothing yet, so that another one can take over. False if it has."""
        if self._num_launched:
            return False
        self._phase, self.is_expected = Phase.IDLE, False
        self._came = None if self._came is None else []
        self._unused.forget()
        return True

    def suspend(self) -> list[Tensor]:
        """Hears of no gradients until `resume`. Returns the parameters that have one which has not been sent."""
        self._arrangement.unhook()
        self._sparse.unhook()
        waiting = [each for bucket in self.buckets for each in bucket.arrivals] + self._sparse.arrivals
        for bucket in self.buckets:
            bucket.arrivals.clear()
        self._sparse.arrivals.clear()
        return waiting

    def resume(self, former: Reducer) -> None:
        """Goes on in another one's place, after parameters were frozen or unfrozen.

        Raises:
            ConfigError: a parameter was frozen that has a gradient which has not been sent.
        """
        strangers = self._sparse.take_over(self._arrangement.take_over(former.suspend()))
        names = {id(slot.parameter): slot.name for slot in former.slots}
        if frozen := sorted({names[id(each)] for each in strangers}):
            raise ConfigError(
                f"{', '.join(frozen)}: frozen with a gradient from no_sync that has not been sent. Freeze parameters "
                "after a backward that synchronises"
            )
        self._arrangement.hook()
        self._sparse.hook()
        if former.hook is not None and self.hook is None:
            self.use_hook(former.hook)
        self.mean.take_over(former.mean)
        self.num_steps, self.waited = former.num_steps, former.waited

    # --- what other people's programs call of torch's reducer --------------------------------------------------------

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """Lets the next backward synchronise, also if its forward was in `no_sync`.

        Args:
            outputs: tensors that this backward goes through. If there are none, it is seen at the first gradient of a
                parameter, which must not be one inside a re-entrant checkpoint.
        """
        reducer = self if self.on_prepare is None else self.on_prepare()
        reducer.is_expected = True
        watch_backward(list(outputs), reducer.begin, reducer.on_end or reducer.finish)

    def _rebuild_buckets(self) -> bool:
        """Returns False: buckets change at the end of the first backward, and never before a forward."""
        return False

    def _delay_all_reduce(self) -> None:
        """Does nothing: autograd reports the end of the first backward over a static graph, too."""


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The method, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    @uncompiled
    def call(parameter: Tensor) -> None:
        if (found := reference()) is not None:
            found(parameter)

    return call


def _hooks_of(of_reducer: weakref.ref[Reducer], bucket: Bucket) -> Iterator[Callable[[Tensor], None]]:
    """What autograd calls when it has accumulated a parameter's gradient, for each of the bucket's.

    This runs once per parameter and step: small gradients share one closure, which takes two thirds of the time of
    a bound method, and finds all that it touches in the cache. Parameters hold their hooks, and may live longer than
    the reducer, which is therefore held weakly.
    """
    arrivals, of_bucket = bucket.arrivals, weakref.ref(bucket)

    @uncompiled
    def on_gradient(parameter: Tensor) -> None:
        self, bucket = of_reducer(), of_bucket()
        if self is None or bucket is None:
            return
        if self._phase is IDLE and not self._begins_here():
            if parameter.requires_grad:  # else it was frozen after its forward, and has got nothing
                arrivals.append(parameter)
            return
        arrivals.append(parameter)
        if self._came is not None:
            self._came.append(parameter)
        if len(arrivals) >= bucket.full_at:
            self._on_last(bucket, parameter)

    @uncompiled
    def on_large_gradient(slot: Slot, parameter: Tensor) -> None:
        self = of_reducer()
        is_step = self is not None and (self._phase is not IDLE or self._begins_here())
        if self is not None and is_step and self._came is None and parameter.grad is not None:
            slot.move_in(keep=self.is_differentiable)
        on_gradient(parameter)

    for slot in bucket.slots:
        yield partial(on_large_gradient, slot) if slot.is_large else on_gradient
