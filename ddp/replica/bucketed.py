"""The bucketed replica: gradients are averaged in buckets, while backward is still running. This is what DDP is.

    made         rank 0's parameters everywhere; a hook on every parameter
    forward      which parameters need a gradient now? Their layout says which bucket each gradient goes to
    backward     `_begin` at the outputs; `_on_gradient` for each parameter; `_finish` at the end. Between them a
                 `Backward` does the work (`backward.py`)
    step         the optimizer finds the mean in `p.grad`, which is a view of a bucket

Note "begin". A backward begins at the outputs of forward, with one exception: a loss made of gradients with respect to
inputs (`autograd.grad(…, create_graph=True)`) has a graph that leads past them. So the first gradient of a parameter
begins the step, too, if there was a forward in training mode that no backward has followed yet.

Note "frozen parameters". A layout belongs to the parameters that need a gradient. Who freezes or unfreezes some gets
another layout at the next forward, on every rank alike; the last two are kept, because GANs alternate between two.

Where it may fail: a rank is lost (`PeerLost`, out of a collective in `_on_gradient`, `_finish` or `prepare`), a
parameter got no gradient (`UnusedParameters`, in the next `prepare`), or a backward broke off half-way (RuntimeError,
likewise).

Read before: `timeline.py`. Read next: `sync_batchnorm.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.comm.setup import current
from ddp.errors import CollectiveMismatch, ConfigError, ReplicaMismatch
from ddp.gradients.bucket import LARGE_BYTES, Bucket
from ddp.gradients.layout import Layout, bucket_limits
from ddp.gradients.totals import Totals
from ddp.replica.backward import Backward, State
from ddp.replica.broadcast import broadcast_state, check_same_layout
from ddp.replica.buffers import BufferSync
from ddp.replica.parameters import Change, ParameterWatch, managed, trainable
from ddp.replica.replica import Replica
from ddp.replica.sink import accumulates, call_at_end, watch_backward
from ddp.replica.sync_batchnorm import SyncBatchNorm
from ddp.replica.timeline import describe
from ddp.replica.uncompiled import uncompiled

KEPT_LAYOUTS = 2


class BucketedDataParallel(Replica):
    """Averages gradients over all ranks in buckets, while backward runs.

    Args:
        module: at least one parameter must need a gradient. Its parameters and buffers become rank 0's.
        bucket_cap_mb: size at which a bucket is closed, in MiB; 25.
        first_bucket_mb: the size for bucket 0, which is launched first; 1.
        overlap: reduce in the background of backward; None: where that pays (`backward.py`, note "foreground").
        broadcast_buffers: before each forward in training mode, buffers become rank 0's.
        comm: the ranks that take part; None: all.

    Raises:
        ReplicaMismatch: the ranks' models differ in a name, shape or dtype.
        ConfigError: no parameter needs a gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        overlap: bool | None = None,
        broadcast_buffers: bool = True,
        comm: Communicator | None = None,
    ) -> None:
        comm = comm or current()
        trainable(list(module.named_parameters()))
        buffers = BufferSync(comm, module, "broadcast" if broadcast_buffers else "none")
        broadcast_state(comm, [*module.named_parameters(), *module.named_buffers()])
        super().__init__(module, comm, buffers)
        self._limits, self._overlap = bucket_limits(bucket_cap_mb, None, first_bucket_mb), overlap
        self._listen()

    def _listen(self, ignored: Collection[str] = ()) -> None:
        """Lets autograd tell this replica of each gradient, and plans the first layout.

        Args:
            ignored: names of parameters that are left alone.
        """
        if any(isinstance(child, (SyncBatchNorm, nn.SyncBatchNorm)) for child in self.module.modules()):
            self._overlap = True  # its layers communicate in backward: else a rank could wait in two places at once
        self._ignored = frozenset(ignored)
        self._watch = ParameterWatch(self.module)
        self._layout = self._new_layout()  # for the parameters that needed a gradient when `prepare` looked last
        self._layouts = {self._watch.needed: self._layout}
        self._last = self._backward = self._new_backward()
        self._announced: Layout | None = None  # of a forward whose backward may begin at a parameter (note "begin")
        on_gradient, on_large_gradient = _hooks(weakref.ref(self))
        handles = [
            _register(parameter, on_large_gradient if parameter.nbytes >= LARGE_BYTES else on_gradient)
            for _, parameter in self._equal_parameters()
            if _can_need_gradient(parameter)
        ]
        weakref.finalize(self, _remove, handles).atexit = False  # the model may live on, under another replica

    # --- a step, in the order of time --------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Raises what the last step left behind, and finds the layout for the parameters that need a gradient now.

        Raises:
            UnusedParameters: some parameters got no gradient in the last step, and that is not allowed.
            RuntimeError: the last backward broke off half-way, so that the ranks are out of step.
            ConfigError: parameters were added, removed or replaced, or frozen with a gradient that was not sent.
            ReplicaMismatch: parameters were frozen or converted on some ranks only.
        """
        self.raise_pending()
        while (change := self._watch.look()) is Change.MODULES:
            self._buffer_sync.look_again()
        if change is Change.KINDS:
            self._layouts.clear()  # their buckets are of other types
        if change is not Change.NONE:
            self._choose_layout()

    def raise_pending(self) -> None:
        """Raises, on every rank alike, what the last backward has found wrong."""
        if self._last.error is not None:
            raise self._last.error
        if self._backward.state is State.RUNNING:
            raise RuntimeError(
                f"the last backward through this replica broke off (step {self.num_steps}); the ranks are out of step: "
                "start anew, from the last checkpoint"
            )

    @uncompiled
    def _before_forward(self) -> bool:
        if torch.is_grad_enabled():
            self._announced = None
        return super()._before_forward()

    def _watch_outputs(self, outputs: Any) -> None:
        is_seen = watch_backward(outputs, partial(self._begin, self._layout), self._finish)
        self._announced = self._layout if self.training or not is_seen else None

    @uncompiled
    def _begin(self, layout: Layout | None = None) -> bool:
        """Backward has reached an output, or a parameter. Returns True if that begins the step.

        Args:
            layout: for the parameters that needed a gradient in the forward that it goes through.
        """
        layout = (layout or self._layout).latest
        if self._backward.state is State.RUNNING or not accumulates(layout.parameters):
            return False
        self._backward.begin(layout, totals=self._take_totals(), divide_by=self._divisor)
        return True

    def _begin_without_backward(self) -> None:
        self._backward.begin(self._layout.latest, totals=self._take_totals(), divide_by=self._divisor)

    @property
    def _divisor(self) -> int:
        """Divisor of the sums over ranks where no totals ride along."""
        return self.comm.world_size

    @uncompiled
    def _on_gradient(self, parameter: Tensor) -> None:
        """Autograd has added to a gradient that belongs to no bucket yet."""
        if self._announced is not None and self._backward.state is not State.RUNNING and self._begin(self._announced):
            call_at_end(self._finish)
        is_known = self._backward.note(parameter) or self._backward.note_other(parameter)
        if not is_known and parameter.requires_grad:  # else it was frozen after its forward, and has got nothing
            name = next(name for name, each in self._equal_parameters() if each is parameter)
            raise RuntimeError(
                f"{name} was unfrozen after its forward began, so no bucket has a place for its gradient: unfreeze "
                "parameters before the forward, or use ddp.DistributedDataParallel"
            )

    def _average(self, *, had_backward: bool) -> Totals:
        self._announced = None
        totals = self._backward.finish(had_backward=had_backward)
        self.waited.total_s += self._backward.waited.total_s
        self._last, self._backward = self._backward, self._new_backward(self.num_steps + 1)
        return totals

    def _new_backward(self, step: int = 0) -> Backward:
        return Backward(self.comm, step, overlap=self.overlaps)

    @property
    def overlaps(self) -> bool:
        """True if buckets are reduced in the background of backward."""
        return self.comm.overlaps if self._overlap is None else self._overlap

    # --- layouts -----------------------------------------------------------------------------------------------------

    def _new_layout(self) -> Layout:
        """Returns a layout of the parameters that need a gradient now."""
        needed = self._watch.needed_ids
        named = [(name, parameter) for name, parameter in self._equal_parameters() if id(parameter) in needed]
        return Layout(self.comm, named, limits=self._limits)

    def _choose_layout(self) -> None:
        """Finds the layout for the parameters that need a gradient now, or makes one, which is collective."""
        former, needed = self._layout, self._watch.needed
        if needed not in self._layouts:
            layout = self._new_layout()
            self._check_same_on_every_rank(layout, former)
            while len(self._layouts) >= KEPT_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[needed] = layout
        self._layout = self._layouts[needed] = self._layouts.pop(needed).latest  # the latest ones are kept
        if frozen := {id(p) for p in self._backward.early}.difference(self._layout.slot_of):
            names = sorted(name for name, parameter in self._equal_parameters() if id(parameter) in frozen)
            raise ConfigError(
                f"{', '.join(names)}: frozen with a gradient from no_sync that has not been sent. Freeze parameters "
                "after a backward that synchronises"
            )

    def _check_same_on_every_rank(self, layout: Layout, former: Layout) -> None:
        try:
            check_same_layout(self.comm, [(slot.name, slot.parameter) for slot in layout.slots])
        except CollectiveMismatch as mismatch:
            changed = {slot.name for slot in former.slots} ^ {slot.name for slot in layout.slots}
            what = f"{', '.join(sorted(changed))}: frozen or unfrozen" if changed else "parameters were converted"
            raise ReplicaMismatch(
                f"{what} on rank {self.comm.rank}, and not on another one. Change requires_grad, types and devices "
                "on every rank, between the same two steps"
            ) from mismatch

    @property
    def buckets(self) -> list[Bucket]:
        """The present buckets, in the order of reduction."""
        return self._layout.latest.buckets

    @property
    def bucket_layout(self) -> list[list[str]]:
        return self._layout.latest.names

    @property
    def gradient_order(self) -> list[str] | None:
        return self._layout.latest.order

    def adopt_gradient_order(self, names: Sequence[str]) -> None:
        self._layout = self._layout.latest.in_order(names)

    def _equal_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return managed(self.module, self._ignored, Replica)

    def logging_data(self) -> dict[str, Any]:
        """Returns how long the last step's reductions took, bucket by bucket (`timeline.py`)."""
        return describe(self._last, self.num_steps, self._layout.latest)


Hook = Callable[[Tensor], None]


def _hooks(of_replica: weakref.ref[BucketedDataParallel]) -> tuple[Hook, Hook]:
    """Returns what autograd calls when it has added to a small gradient, and to a large one.

    Parameters hold their hooks and may live longer than the replica, which is therefore held weakly.
    """

    @uncompiled
    def on_gradient(parameter: Tensor) -> None:
        replica = of_replica()
        if replica is not None and not replica._backward.note(parameter):
            replica._on_gradient(parameter)

    @uncompiled
    def on_large_gradient(parameter: Tensor) -> None:
        if (replica := of_replica()) is not None:
            replica._backward.move_in(parameter)
        on_gradient(parameter)

    return on_gradient, on_large_gradient


def _register(parameter: nn.Parameter, hook: Hook) -> Any:
    """Lets autograd call the hook after it has added to the parameter's gradient. Returns the handle.

    torch refuses a parameter that is frozen at the moment. But it may be unfrozen later.
    """
    needs_gradient = parameter.requires_grad
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(needs_gradient)


def _can_need_gradient(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
