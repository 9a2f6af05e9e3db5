"""User functions inside a step: hooks in place of collectives, and optimizers that step in backward.

    def hook(state, bucket) -> Future[Tensor]        the protocol of torch's `register_comm_hook`
        bucket.buffer()                              [numel], the gradients of this rank; not divided by anything
        bucket.gradients(), bucket.parameters()      views of the buffer, and their parameters
        bucket.index(), bucket.is_last()             in the order of reduction
        bucket.set_buffer(tensor)                    another tensor as the buffer
                                                     the future's value, shaped like the buffer, is the result

    def hook(state, {name: buffer})                  of `register_buffer_hook`; may return futures, which are awaited
                                                     before forward, or, if the hook runs after forward, when backward
                                                     has ended

    model.step_in_backward(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) run unchanged. They communicate over process groups of
torch.distributed; this project's collectives have their own process group, so neither can receive the other's messages.

Note "order". The hook is called for a bucket once its future for the bucket before is done. A hook whose steps are
chained futures (PowerSGD) starts its second collective whenever its first one ends. With two buckets in flight, that
order could differ from rank to rank, and the ranks would hang. A hook that starts all its collectives when it is called
may be registered with `overlap=True`; then its futures are awaited only when backward has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, SupportsInt

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError, HookFailed, PeerLost
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.layout import Layout
from ddp.gradients.reducer import Reducer
from ddp.process import gpu
from ddp.process.clock import now_s
from ddp.replica.backward import Stepper
from ddp.replica.broadcast import BufferSync

# --- An optimizer inside backward ------------------------------------------------------------------------------------
#
# A bucket's parameters are stepped as soon as their mean is complete. The step overlaps with the rest of backward, and
# `p.grad` is None again once it has been used. Each bucket has its own optimizer, which is made when the bucket has its
# first mean, because then the order of gradients is known.
#
# The cost: a step is no longer a transaction. Once the first bucket has been stepped, the step cannot be rolled back,
# and no code can see all gradients first. So it is refused with `ddp.fit` (which clips by the global norm, and rolls
# back a step whose values are not finite), with create_graph, and where gradients may be missing. If one is missing
# nevertheless, its parameter is stepped with zeros before the error is raised.


MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class StepInBackward(Stepper):
    """Steps each bucket's parameters when it holds the mean.

    Args:
        make_optimizer: called with some of the parameters; the same settings each time.

    Attributes:
        optimizers: by bucket.

    Raises:
        TypeError: `make_optimizer` cannot be called.
    """

    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        if not callable(make_optimizer):
            raise TypeError(
                f"make_optimizer={make_optimizer!r}: want a function of parameters, e.g. lambda p: SGD(p, 0.1)"
            )
        self._make = make_optimizer
        self.optimizers: dict[Bucket, Optimizer] = {}

    def begin(self, layout: Layout, *, creates_graph: bool) -> None:
        """Raises ConfigError for a backward that creates a graph, in which parameters must not change meanwhile."""
        if creates_graph:
            raise refusal("create_graph=True")

    @torch.no_grad()
    def complete(self, bucket: Bucket) -> None:
        """Steps the bucket's parameters, and drops their gradients."""
        if bucket not in self.optimizers:
            self.optimizers[bucket] = self._make([slot.parameter for slot in bucket.slots])
        self.optimizers[bucket].step()
        self.optimizers[bucket].zero_grad(set_to_none=True)


def check_own_optimizers(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises ConfigError if torch steps one of these in backward: by this rank's gradient, before there is a mean."""
    if found := [name for name, parameter in named if hasattr(parameter, "_in_backward_optimizers")]:
        raise ConfigError(
            f"{', '.join(found)}: _apply_optimizer_in_backward of torch.distributed.optim steps these parameters by "
            "this rank's gradient, before there is a mean, and replicas would differ. Leave it out, and call "
            "step_in_backward(lambda parameters: SGD(parameters, lr=0.1)), say, of the replica"
        )


class StepsOfOthers(Stepper):
    """Finds parameters that other code has stepped in backward, by this rank's gradient, before there is a mean.

    A gradient that is gone when backward has ended proves nothing, because autograd also reaches parameters with
    undefined gradients. But a step of a parameter writes to it, and torch counts that. The counts are recorded in the
    first step, and in each step after one with undefined gradients: the others have no overhead.
    """

    def __init__(self) -> None:
        self._is_suspicious = True
        self._versions: dict[str, int] = {}

    def begin(self, layout: Layout, *, creates_graph: bool) -> None:
        """Records how often each parameter was written to, if this step is to be checked."""
        self._versions = {slot.name: slot.parameter._version for slot in layout.slots} if self._is_suspicious else {}

    def check(self, gone: Callable[[], Sequence[Slot]]) -> None:
        """Raises ConfigError if one of the parameters whose gradient is gone was written to since `begin`."""
        slots = gone()
        self._is_suspicious = bool(slots)
        versions = ((slot, self._versions.get(slot.name)) for slot in sorted(slots, key=lambda slot: slot.index))
        if found := [slot.name for slot, before in versions if before not in (None, slot.parameter._version)]:
            raise ConfigError(
                f"{', '.join(found)}: a hook (yours, or that of _apply_optimizer_in_backward) has stepped these "
                "parameters by this rank's gradient, before there is a mean, and replicas differ now. Leave it out, "
                "and call step_in_backward(lambda parameters: SGD(parameters, lr=0.1)), say, of the replica"
            )


def refusal(of: str) -> ConfigError:
    """Returns the error for a feature that is incompatible with a step inside backward."""
    return ConfigError(
        f"{of} does not go with step_in_backward: once the first bucket is stepped, a step cannot be rolled back, and "
        "no code can see all gradients first. Call optimizer.step() after backward instead"
    )


# --- Hooks on buckets, and on buffers --------------------------------------------------------------------------------


HookFunction = Callable[[Any, Any], "torch.futures.Future[Tensor]"]
BufferHook = Callable[[Any, dict[str, Tensor]], Any]


class GradBucket:
    """A bucket as hooks see it: the verbs of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._buffer = bucket, bucket.gradients

    def index(self) -> int:
        """Returns the bucket's number in the order of reduction."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """Returns the gradients one after another, [numel], with zeros between them."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Takes another tensor as the buffer."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Returns the parameters' gradients, as views of the present buffer."""
        return self._bucket.views_of(self._buffer)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters, in the order of their gradients."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Returns True for the last bucket of a step."""
        return self._bucket.is_last


class CommHook(Reducer):
    """A user's hook as a reducer; it averages over the ranks.

    Args:
        overlap: the hook may be called before the last future is done.
        comm: gives waits their deadline, and names missing ranks.

    Raises (all methods):
        HookFailed: the hook raised, or returned something other than promised; the message names the bucket.
        PeerLost: the others did not do their part within the deadline.
        TypeError: the hook cannot be called.
    """

    may_resize = averages = True

    def __init__(self, hook: HookFunction, state: Any, comm: Communicator, *, overlap: bool = False) -> None:
        check_hook(hook)
        self.comm, self.name = comm, getattr(hook, "__qualname__", type(hook).__qualname__)
        self._hook, self._state, self._overlap = hook, state, overlap
        self._last: PendingBucket | None = None

    def reduce(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> PendingBucket:
        """Calls the hook for a bucket, once the future before it is done unless the hook overlaps."""
        if self._last is not None and not self._overlap:
            self._last.wait()
        try:
            future = self._hook(self._state, GradBucket(bucket))
        except Exception as error:
            hook = f"communication hook {self.name}"
            raise _failure(self.comm, f"the {hook} raised {error!r} ({label})", f"{hook}, {label}") from error
        if not isinstance(future, torch._C.Future):  # a Work's future is one, but no torch.futures.Future
            raise HookFailed(
                f"the communication hook {self.name} returned a {type(future).__name__} ({label}); "
                "it must return a torch.futures.Future with the reduced buffer, also where it communicates nothing"
            )
        self._last = PendingBucket(self, bucket, future, label)
        return self._last


class PendingBucket:
    """A bucket whose future was not awaited yet."""

    done_s = 0.0

    def __init__(self, hook: CommHook, bucket: Bucket, future: torch.futures.Future[Tensor], label: str) -> None:
        self._hook, self._bucket, self._label = hook, bucket, label
        self._future: torch.futures.Future[Tensor] | None = future

    def is_completed(self) -> bool:
        """Returns False: all ranks must wait for the same future at the same time, so none polls."""
        return False

    def wait(self) -> None:
        """Waits for the future, and copies its value to the bucket."""
        future, self._future = self._future, None
        if future is None:
            return
        name, gradients = f"communication hook {self._hook.name}", self._bucket.gradients
        result = result_of(self._hook.comm, future, hook=name, where=self._label)
        if isinstance(result, (list, tuple)) and len(result) == 1:
            result = result[0]  # the value of a Work's own future
        if not isinstance(result, Tensor) or result.numel() != gradients.numel():
            found = f"{list(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise HookFailed(
                f"the future of the {name} holds {found} ({self._label}); "
                f"it must hold one tensor like the bucket's buffer, [{gradients.numel()}]"
            )
        if result.data_ptr() != gradients.data_ptr() or result.dtype != gradients.dtype:
            gradients.copy_(result.detach().view(-1))
        self.done_s = now_s()


class When(Enum):
    """The side of forward on which a hook on buffers runs; the names are torch's."""

    PRE_FORWARD = "before"
    POST_FORWARD = "after"


class HookedBuffers(BufferSync):
    """Buffers that a hook keeps equal.

    Args:
        of: the same buffers, without the hook.
    """

    def __init__(self, of: BufferSync, hook: BufferHook, state: Any, when: When) -> None:
        super().__init__(of.comm, of.module, of.mode, of.ignored)
        check_hook(hook)
        self._hook, self._state, self._when = hook, state, when
        self.in_flight: list[Any] = []

    def before_forward(self, root: int) -> None:
        if self._when is When.PRE_FORWARD:
            self._call()
            self.finish()

    def after_forward(self) -> None:
        if self._when is When.POST_FORWARD:
            self._call()

    def finish(self) -> None:
        """Waits for the hook's futures, whose results are ignored: the hook has changed the buffers itself."""
        while self.in_flight:
            result_of(self.comm, self.in_flight.pop(0), hook="hook on buffers", where=f"{self._when.value} a forward")

    def _call(self) -> None:
        futures = self._hook(self._state, self.named())
        if futures is not None:
            self.in_flight += futures if isinstance(futures, (list, tuple)) else [futures]


def result_of(comm: Communicator, future: torch.futures.Future[Any], *, hook: str, where: str) -> Any:
    """Waits for the result of a hook's future; on CUDA, makes the current stream wait for it. Collective.

    Raises:
        HookFailed: the future holds an error.
        PeerLost: the others did not do their part within the communicator's deadline, or a rank is lost.
    """
    arrived, label = threading.Event(), f"{hook}, {where}"
    future.add_done_callback(lambda _: arrived.set())
    comm.peers.wait_for(arrived.wait, label=label)  # even if it is done: the numbers of waits must agree between ranks
    try:
        return future.wait() if comm.device.type == gpu.KIND else future.value()
    except Exception as error:
        raise _failure(comm, f"the future of the {hook} failed: {error} ({where})", label) from error


def _failure(comm: Communicator, message: str, label: str) -> HookFailed | PeerLost:
    """Returns PeerLost if a rank is lost, because that breaks the process group's connections; else HookFailed."""
    return comm.peers.find_lost(label) or HookFailed(message)


def check_hook(hook: Any) -> None:
    """Raises TypeError unless it can be called with a state and a bucket."""
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable as hook(state, bucket), got {hook!r}")
