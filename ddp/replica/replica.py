"""The base of all replicas: everything that does not depend on how gradients are averaged.

A replica is one worker's copy of a model, kept equal to the copies of the other workers.

    forward      `prepare` raises the error of the last step, if there was one; buffers are made equal; the module's
                 forward runs; its outputs are watched
    backward     averages the gradients, by its end at the latest, and then `_end_step`

`NaiveDataParallel` averages them after backward, one parameter at a time; `BucketedDataParallel` averages them in
buckets, while backward runs.

`ride_along` sends the step's loss and sample count along with the gradients, which are then divided by the global count
instead of the world size. `ddp.fit` uses it. As in torch's class, the keys of `state_dict` begin with "module.";
loading accepts keys with and without that prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp.gradients.bucket import Bucket
from ddp.gradients.totals import Totals
from ddp.process.clock import Stopwatch
from ddp.process.streams import preserved
from ddp.replica.autograd import uncompiled
from ddp.replica.backward import Accumulation
from ddp.replica.broadcast import BufferSnapshot, BufferSync, broadcast_state, verify_replicas
from ddp.setting import WireName

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator
    from ddp.gradients.compression import Compression
    from ddp.gradients.reducer import Collective
    from ddp.replica.units import Units

PREFIX = "module."


class Inputs:
    """The ranks that have inputs: all of them. Under `join` some may run out (`drop_in/join.py`).

    Attributes:
        divisor: divisor of the sums over ranks in a step without totals.
        root: a rank whose buffers are right.
        may_end: ranks may run out of inputs.
        all_step: every rank has made the same number of optimizer steps.
    """

    may_end, all_step = False, True

    def __init__(self, comm: Communicator) -> None:
        self.divisor, self.root = comm.world_size, 0

    def announce(self) -> None:
        """Announces to all ranks, before a forward that synchronises, that this rank has inputs."""


class Replica(nn.Module, ABC):
    """One worker's copy of a model, kept equal to the others.

    Attributes:
        module: the model.
        comm: the ranks that have a copy.
        inputs: the ranks that have inputs.
        accumulation: adds up this rank's micro-batches.
        steps_in_backward: an optimizer steps in backward, so that no step can be rolled back.
        compute: makes whole steps (`compiled.py`); None: the loop calls forward and backward.
        num_devices: on which this process computes the shards of a step.
        collective: averages a bucket if no hook does; None: gradients are averaged one by one.
        units: the parts that are gathered as one, if parameters are in slices.
        wire: the format in which gradients travel between hosts, if not their own.
        compression: the hook that averages gradients, if there is one.
        riding: this rank's part of the running step's totals, as `ride_along` was given it.
        settled: makes the ranks' parameters equal for a block, if they differ under a strategy. Collective.
        waited: time that backward's thread has spent on averaging, or waiting for it.
        num_steps: number of backwards that have synchronised; those before a checkpoint that the run continued from
            count.
        num_ended: that number in the last call of `ddp.strategies.step`.
        num_verified: number of times that a request to `verify_replicas(every=…)` found all replicas equal.
        require_backward_grad_sync: False inside `no_sync`.
        require_forward_param_sync: the next forward synchronises buffers (`broadcast.py`).
    """

    collective: Collective | None = None
    units: Units | None = None
    wire: WireName | None = None
    compression: Compression | None = None
    settled: Callable[[], AbstractContextManager[Any]] = nullcontext
    inputs: Inputs
    steps_in_backward = False
    num_devices = 1
    compute: Callable[[Any, Sequence[Sequence[tuple[Any, int] | None]], Totals], None] | None = None
    accumulation = Accumulation()
    num_ended = 0
    _is_in_forward = False  # a forward is running that may run backward itself

    def __init__(self, module: nn.Module, comm: Communicator, buffers: BufferSync) -> None:
        super().__init__()
        self.module, self.comm, self.inputs = module, comm, Inputs(comm)
        self._totals, self.waited, self.num_steps, self.num_verified = Totals(), Stopwatch(), 0, 0
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._buffer_sync = buffers
        self.riding: Totals | None = None
        self.waiting: object = None  # the layout of a forward that waits for its backward, if that must be known
        self._verification: Verification | None = None
        self.register_load_state_dict_pre_hook(_accept_plain_keys)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; a backward through what it returns ends with equal gradients on all ranks."""
        try:
            if self._is_no_step():
                with self._around_repeated() or nullcontext():
                    return self.module(*args, **kwargs)
            *moment, around = self._before_forward()
            with around or nullcontext():
                outputs = self.module(*args, **kwargs)
            return self._after_forward(outputs, *moment)
        except BaseException:
            self._is_in_forward, self.waiting = False, None
            raise

    @uncompiled
    def _before_forward(self) -> tuple[bool, bool, AbstractContextManager[Any] | None]:
        """Prepares a step and synchronises buffers, as far as this forward needs it.

        Returns:
            True if its backward synchronises gradients; True if buffers are synchronised around it; `_around_forward`.
        """
        if torch.is_grad_enabled():
            self._is_in_forward, self.waiting = False, None
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        # a rank without inputs takes part only in forwards that synchronise gradients
        may_sync = self.require_forward_param_sync and (synchronises or not self.inputs.may_end)
        if synchronises or (may_sync and self._buffer_sync.is_active):
            self.prepare(in_forward=synchronises)
        if synchronises and self.inputs.may_end:
            self.inputs.announce()
        syncs_buffers = may_sync and self._buffer_sync.is_active
        if syncs_buffers:
            self._buffer_sync.before_forward(self.inputs.root)
        return synchronises, syncs_buffers, self._around_forward()

    def _around_forward(self) -> AbstractContextManager[Any] | None:
        """Returns a block in which the module's forward runs, if it needs one."""
        return None

    def _around_repeated(self) -> AbstractContextManager[Any] | None:
        """Returns a block in which a forward runs that is local to this rank, if it needs one."""
        return None

    @uncompiled
    def _after_forward(self, outputs: Any, synchronises: bool, syncs_buffers: bool) -> Any:
        if syncs_buffers:
            self._buffer_sync.after_forward()
        if synchronises or not self.inputs.may_end:
            # read again, because Lightning's manual optimization switches it off inside the forward
            self.require_forward_param_sync = synchronises and self.require_backward_grad_sync
        if synchronises:
            self._watch_outputs(outputs)
        return outputs

    def _end_step(self, totals: Totals | None) -> None:
        """Ends a step, because every gradient is the mean. Collective.

        Args:
            totals: of all ranks; None if they are to be read later.
        """
        self._totals = totals or self._totals
        if self._buffer_sync.in_flight:
            self._buffer_sync.finish()
        self.num_steps += 1
        due = self._verification
        if due is not None and self.num_steps % due.every == 0 and self.inputs.all_step:
            self.verify_replicas(also=due.also)
            self.num_verified += 1

    @uncompiled
    def _is_no_step(self) -> bool:
        """Returns True if a forward is local to this rank: it sends no buffers, and no backward is awaited.

        Activation checkpointing around the replica repeats a forward, for a backward that runs. A transform of
        torch.func returns this rank's gradients, and adds to no parameter's.
        """
        is_repeated = torch._C._current_graph_task_id() != -1 and self._awaits_backward
        return is_repeated or torch._C._are_functorch_transforms_active()

    # --- how gradients are averaged: each kind of replica has its own ------------------------------------------------

    @property
    def num_shards(self) -> int | None:
        """The number of shards of a batch by which gradients are added up; None: they are added up by ranks."""
        return self.accumulation.num_shards

    @property
    def shards(self) -> range:
        """This rank's shards of each batch; none if gradients are added up by ranks."""
        return self.accumulation.shards

    def shard(self, number: int) -> AbstractContextManager[None]:
        """Makes forward and backward inside those of one shard. The last block of a rank ends the step. Collective.

            for number in model.shards:
                with model.shard(number):
                    loss_of(model(inputs[number]), targets[number]).backward()
            optimizer.step()

        Each block has its own random numbers, derived from rank 0's seed (`torch.manual_seed`) when this was made; so
        has the update after the last block. Inside of a block `p.grad` is the gradient of that shard, until the last
        backward of the step.

        Every rank's shards are marked once in each step, in their order; a shard without samples has an empty block. A
        shard may be computed in parts: put all backwards but the last into `no_sync`.

        Raises:
            ConfigError: on all ranks: a rank has marked a shard twice, left one out, or does not have this one; or
                gradients are added up by ranks.
        """
        return self.accumulation.block(self, number)

    @abstractmethod
    def prepare(self, *, in_forward: bool = False) -> None:
        """Prepares a step: raises the error of the last one, if there was one, and checks the model for changes.

        Args:
            in_forward: a forward that synchronises follows.
        """

    @property
    @abstractmethod
    def _awaits_backward(self) -> bool:
        """Returns True from a forward that synchronises to the end of its backward, if that is known."""

    @abstractmethod
    def _watch_outputs(self, outputs: Any) -> None:
        """Arranges that `_finish` is called when a backward through these outputs has ended (`autograd.py`)."""

    def _begin_without_samples(self) -> None:
        """Begins a step for which this rank has no samples."""

    @abstractmethod
    def _finish(self) -> None:
        """Makes every gradient the mean over the ranks, after backward, and ends the step. Collective."""

    def raise_pending(self) -> None:
        """Raises the error that the last backward has recorded, on every rank. On a GPU it may wait. Collective."""

    @property
    def totals(self) -> Totals:
        """The last step's totals, summed over all ranks. On a GPU the host may wait for them. Collective."""
        return self._totals

    def release(self) -> None:
        """Takes off the module all that this replica has put there, because an error has ended the training here.

        So the module can be used alone, or in another replica. Gradients are dropped, because they may be those of half
        a step. If this replica is used again, `prepare` puts everything back, unless a backward broke off.
        """
        self._is_in_forward, self.waiting, self.riding, self.settled = False, None, None, nullcontext
        self.module.zero_grad(set_to_none=True)

    def commit(self) -> None:
        """Keeps the hook's state of the last step, so that `take_back` does not reach it."""
        if self.compression is not None:
            self.compression.commit()

    def take_back(self) -> None:
        """Rolls back the hook's state of the running step, because the step will not be made."""
        if self.compression is not None:
            self.compression.take_back()

    def ride_along(self, totals: Totals) -> None:
        """Sends this rank's part of the step's totals with the gradients, which are then divided by the global count.

        Call it between a forward and its backward; in several micro-batches the last call counts.
        """
        self.riding = totals

    @property
    def measures_parts(self) -> bool:
        """Returns True if this kind of replica can measure the parts of a batch (`Totals.parts`)."""
        return False

    def in_words(self) -> list[str]:
        """Returns lines for the user on how the model is held, if that is not as usual."""
        return []

    @property
    def is_whole(self) -> bool:
        """Returns True if this rank has all parameters outside of a forward, so that it can compute alone."""
        return self.units is None

    @property
    def overlaps(self) -> bool:
        """Returns True if buckets are reduced in the background of backward."""
        return False

    def logging_data(self) -> dict[str, Any]:
        """Returns how long the last step's reductions took, bucket by bucket, if there are buckets."""
        return {"num_steps": self.num_steps, "buckets": []}

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of the next step, in the order of reduction; none if gradients are reduced one by one."""
        return []

    @property
    def bucket_layout(self) -> list[list[str]]:
        """Names of the gradients that are reduced together; the bits of a ring depend on it."""
        in_buckets = [[slot.name for slot in bucket.slots] for bucket in self.buckets]
        return in_buckets or [[name] for name, _ in self.module.named_parameters()]

    @property
    def gradient_order(self) -> list[str] | None:
        """Names in the order in which gradients become ready; None if that is unknown, or does not matter."""
        return None

    def adopt_gradient_order(self, names: Sequence[str]) -> None:
        """Expects gradients in this order from now on. Every rank must call it with the same names."""

    # --- what users call ---------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Makes backward inside only accumulate this rank's gradients; the next backward outside sends the sums."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def without_buffer_sync(self) -> Iterator[None]:
        """Makes forwards inside leave buffers as they are, until one that synchronises gradients has run."""
        before, self.require_forward_param_sync = self.require_forward_param_sync, False
        try:
            yield
        finally:
            self.require_forward_param_sync = before

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Isolates forwards and backwards inside from the training: afterwards all state is restored.

        Gradients begin empty. Buffers begin as those of the running step, or of the last one, if these are known.
        """
        parameters = list(self.module.parameters())
        gradients, waiting = [parameter.grad for parameter in parameters], self.waiting
        before = BufferSnapshot(self.module)
        with torch.no_grad():
            for name, start in self.accumulation.buffers_at_start.items():
                self.module.get_buffer(name).copy_(start)
        for parameter in parameters:
            parameter.grad = None
        try:
            with preserved(), self.no_sync(), self.without_buffer_sync(), self._unobserved():
                yield
        finally:
            before.restore()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            self.waiting = waiting

    def _unobserved(self) -> AbstractContextManager[None]:
        """Disables the observers of gradients inside."""
        return nullcontext()

    def reduce_without_backward(self) -> None:
        """Takes part in a step for which this rank has no samples (or none that needed a backward).

        It runs the same collectives as a forward and a backward on the other ranks: none inside `no_sync`.
        """
        if not self.require_backward_grad_sync:
            self._follow_micro_batch()
            return
        self.prepare()
        if self.require_forward_param_sync and self._buffer_sync.is_active:
            self._buffer_sync.before_forward(self.inputs.root)
            self._buffer_sync.after_forward()
        self.require_forward_param_sync = True
        self._begin_without_samples()
        self._finish()

    def most_micros(self, mine: int) -> int:
        """Returns how many micro-batches a step has, if this rank has some for itself. Collective if forwards are."""
        return max(1, mine)

    def _follow_micro_batch(self) -> None:
        """Takes part in a micro-batch that is not the last, and for which this rank has no samples."""

    def follow_evaluation(self) -> None:
        """Takes part in a forward of an evaluation for which this rank has no samples, if it is collective."""

    def sync_buffers(self) -> None:
        """Gives every rank rank 0's buffers (BatchNorm statistics and the like). Collective."""
        self._buffer_sync.broadcast()

    @property
    def syncs_buffers(self) -> bool:
        """Returns True if there are buffers, and the ranks keep them equal."""
        return self._buffer_sync.is_active

    @property
    def keeps_own_buffers(self) -> bool:
        """Returns True if buffers of other ranks than 0 count in training."""
        return self._buffer_sync.mode != "broadcast" and self.num_shards is None

    @contextmanager
    def buffers_of_rank_zero(self) -> Iterator[BufferSnapshot]:
        """Gives every rank rank 0's buffers for a block, and its own again afterwards. Collective.

        No forward inside synchronises buffers.

        Yields:
            This rank's own.
        """
        own = BufferSnapshot(self.module)
        try:
            self.sync_buffers()
            with self.without_buffer_sync():
                yield own
        finally:
            own.restore()

    def whole(self) -> AbstractContextManager[None]:
        """Makes all parameters whole for a block, to read and to write them: on all ranks, if they are in slices.

        Collective. A program writes the same values on all ranks.
        """
        return nullcontext()

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Loads a state of the bare module; only rank 0 needs its values, if parameters are in slices. Collective then.

        Raises:
            RuntimeError: it is of another model.
        """
        self.module.load_state_dict(state)

    def broadcast_from(self, root: int) -> None:
        """Gives every rank the root's parameters, and its buffers where they are kept equal. Collective."""
        buffers = self._buffer_sync.named().items() if self._buffer_sync.mode != "none" else ()
        broadcast_state(self.comm, [*self._replicated_parameters(), *buffers], root=root)

    def verify_replicas(
        self, every: int | None = None, *, also: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
    ) -> None:
        """Compares the parameters of all ranks bit by bit: once, now, or from now on every n steps. Collective.

        Args:
            every: number of steps from one comparison to the next; 0: no more; None: compare once, now.
            also: returns further tensors that must be equal, with names: rates, a loss scale, the optimizer's state.

        Raises:
            ReplicaMismatch: names the first tensor that differs, and the ranks in the minority.
            ValueError: `every` is negative.
        """
        if every is not None and every < 0:
            raise ValueError(f"every={every}: want a number of steps, or 0 for never again")
        if every is None:
            verify_replicas(self.comm, [*self._replicated_parameters(), *also()])
        else:
            self._verification = Verification(every, also) if every else None

    def _replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())


def replicas_in(model: nn.Module) -> list[Replica]:
    """Returns the replicas among a model and all modules in it."""
    return [each for each in model.modules() if isinstance(each, Replica)]


class Verification(NamedTuple):
    """A request to compare the replicas, and further tensors, every `every` steps."""

    every: int
    also: Callable[[], Iterable[tuple[str, Tensor]]]


def _accept_plain_keys(replica: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Lets a checkpoint of the bare module load into its replica."""
    wanted = {prefix + key for key in nn.Module.state_dict(replica)}  # also if a replica's own is collective
    for key in [key for key in state_dict if key.startswith(prefix) and key not in wanted]:
        wrapped = prefix + PREFIX + key.removeprefix(prefix)
        if wrapped in wanted and wrapped not in state_dict:
            state_dict[wrapped] = state_dict.pop(key)
