"""One worker's copy of a model, kept equal to the others': what any reducer needs around it.

`DistributedDataParallel` and `NaiveDataParallel` are replicas that differ in the reducer: the one's works in buckets,
while backward runs, the other's afterwards, one parameter at a time.

The *sum* form is for `ddp.fit`: `ride_along` sends loss and sample count with the gradients, which are then divided by
the global count. `state_dict` is that of torch's class: keys begin with "module."; loading takes them with and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ddp.clock import Stopwatch
from ddp.comm.communicator import Communicator
from ddp.gradients.totals import StepTotals
from ddp.replica.buffers import BufferSync, When
from ddp.replica.sink import watch_backward
from ddp.replica.uncompiled import uncompiled
from ddp.replica.verify import verify_replicas

PREFIX = "module."


class AnyReducer(Protocol):
    """What a replica needs of its reducer.

    Attributes:
        totals: what all ranks' totals added up to in the last step.
        waited: time that backward's thread spent on reductions, or waiting for them.
        num_steps: steps that have synchronised.
    """

    waited: Stopwatch
    num_steps: int

    @property
    def totals(self) -> StepTotals: ...
    @property
    def layout(self) -> list[list[str]]: ...
    @property
    def order(self) -> list[str] | None: ...
    def adopt_order(self, names: Sequence[str]) -> None: ...
    def raise_pending(self) -> None: ...
    def ride_along(self, totals: StepTotals) -> None: ...
    def begin(self, *, in_backward: bool = True) -> bool: ...
    def finish(self, *, had_backward: bool = True) -> None: ...


class Replica(nn.Module):
    """One worker's copy of a model, kept equal to the others by a reducer.

    Attributes:
        module: the model.
        comm: the ranks that have a copy.
        reducer: averages gradients.
        require_backward_grad_sync: False inside `no_sync`.
        require_forward_param_sync: the next forward synchronises buffers (`buffers.py`).
    """

    def __init__(self, module: nn.Module, comm: Communicator, reducer: AnyReducer, buffers: BufferSync) -> None:
        super().__init__()
        self.module, self.comm = module, comm
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.reducer, self._buffer_sync = reducer, buffers
        self._verifies: Verification | None = None
        self.register_load_state_dict_pre_hook(_accept_plain_keys)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; a backward through what it returns ends with equal gradients on all ranks."""
        synchronises = self._before_forward()
        return self._after_forward(self.module(*args, **kwargs), synchronises=synchronises)

    @uncompiled
    def _before_forward(self) -> bool:
        """Does what every rank does before a forward. Returns True if a backward through it synchronises gradients."""
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronises or self._syncs_buffers(synchronises=synchronises):
            self.prepare()
        if synchronises:
            self._meet()
        self._sync_buffers(When.PRE_FORWARD, synchronises=synchronises)
        return synchronises

    @uncompiled
    def _after_forward(self, outputs: Any, *, synchronises: bool) -> Any:
        self._sync_buffers(When.POST_FORWARD, synchronises=synchronises)
        if synchronises or not self._is_joined:
            # looked up again, because Lightning's manual optimization switches it off inside the forward
            self.require_forward_param_sync = synchronises and self.require_backward_grad_sync
        if synchronises:
            self._watch_outputs(outputs)
        return outputs

    def prepare(self) -> None:
        """Looks at what the last step left behind, before anything is communicated."""
        self.reducer.raise_pending()

    def _meet(self) -> None:
        """Lets the ranks tell each other who has inputs, where that may differ."""

    def _watch_outputs(self, outputs: Any) -> None:
        watch_backward(outputs, self.reducer.begin, self._finish)

    @property
    def _is_joined(self) -> bool:
        """True inside a context in which ranks may run out of inputs."""
        return False

    @property
    def _root(self) -> int:
        """The rank whose buffers are right."""
        return 0

    def _syncs_buffers(self, *, synchronises: bool) -> bool:
        """Returns True if buffers are synchronised around this forward (`buffers.py`)."""
        is_heard = synchronises or not self._is_joined  # a rank without inputs shadows only forwards that synchronise
        return self.require_forward_param_sync and is_heard and self._buffer_sync.is_active

    def _sync_buffers(self, when: When, *, synchronises: bool) -> None:
        if self._syncs_buffers(synchronises=synchronises):
            self._buffer_sync.run(when, root=self._root)

    @uncompiled
    def _finish(self, *, had_backward: bool = True) -> None:
        """Backward has ended."""
        self.reducer.finish(had_backward=had_backward)
        is_time = self._verifies is not None and self.reducer.num_steps % self._verifies.every == 0
        if self._verifies is not None and is_time and self._all_make_steps():
            self.verify_replicas(also=self._verifies.also)

    def _all_make_steps(self) -> bool:
        """Returns True if every rank has made the same number of optimizer steps."""
        return True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward inside add to this rank's gradients only; the next backward outside sends the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def sync_buffers(self) -> None:
        """Gives every rank rank 0's buffers (BatchNorm statistics and the like). Collective."""
        self._buffer_sync.broadcast()

    def verify_replicas(
        self, every: int | None = None, *, also: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
    ) -> None:
        """Compares the parameters of all ranks bit by bit: now, or from now on after every so many steps. Collective.

        Args:
            every: number of steps; 0 for never again.
            also: gives further tensors that must be equal, with names: rates, a loss scale, the optimizer's state.

        Raises:
            ReplicaMismatch: names the first tensor that differs, and the ranks in the minority.
            ValueError: `every` is negative.
        """
        if every is not None and every < 0:
            raise ValueError(f"every={every}: want a number of steps, or 0 for never again")
        if every is None:
            verify_replicas(self.comm, [*self._equal_parameters(), *also()])
        else:
            self._verifies = Verification(every, also) if every else None

    def _equal_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    # --- the sum form, for ddp.fit -----------------------------------------------------------------------------------

    def ride_along(self, totals: StepTotals) -> None:
        """Call before the step's last backward: gradients become global sums divided by the global count."""
        self.reducer.ride_along(totals)

    def reduce_without_backward(self) -> None:
        """Takes part in a step for which this rank has no samples (or none that needed a backward).

        It passes through everything that a forward and a backward of the other ranks pass through.
        """
        self.prepare()
        self._sync_buffers(When.PRE_FORWARD, synchronises=True)
        self._sync_buffers(When.POST_FORWARD, synchronises=True)
        self.require_forward_param_sync = True
        if self.reducer.begin(in_backward=False):
            self._finish(had_backward=False)

    def raise_pending(self) -> None:
        """Raises, on every rank alike, what the last backward found wrong (UnusedParameters)."""
        self.reducer.raise_pending()

    @property
    def bucket_layout(self) -> list[list[str]]:
        """Names of the gradients that are reduced together; the bits of a ring depend on it."""
        return self.reducer.layout

    @property
    def totals(self) -> StepTotals:
        """What the last step's totals added up to, over all ranks."""
        return self.reducer.totals

    @property
    def waited(self) -> Stopwatch:
        """Time that backward had to wait for the other ranks."""
        return self.reducer.waited


class Verification(NamedTuple):
    """What is compared, and when."""

    every: int
    also: Callable[[], Iterable[tuple[str, Tensor]]]


def _accept_plain_keys(replica: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Lets a checkpoint of the bare module load into its replica."""
    wanted = {prefix + key for key in replica.state_dict()}
    for key in [key for key in state_dict if key.startswith(prefix) and key not in wanted]:
        wrapped = prefix + PREFIX + key.removeprefix(prefix)
        if wrapped in wanted and wrapped not in state_dict:
            state_dict[wrapped] = state_dict.pop(key)
