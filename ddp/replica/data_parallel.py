"""The module around a model that keeps its replicas equal: `DistributedDataParallel`.

    model = ddp.DistributedDataParallel(net)        # rank 0's parameters everywhere
    loss = criterion(model(x), y)                   # forward as ever; the outputs are watched
    loss.backward()                                 # gradients are averaged over all ranks meanwhile
    optimizer.step()                                # the same on every rank, so replicas stay bitwise equal

It is `torch.nn.parallel.DistributedDataParallel` to its users: the same keywords (`arguments.py` has the table) and the
same `state_dict`.

    forward     `parameters.py` are they still the same?   `join.py` who has inputs?   `buffers.py` equal buffers
    backward    `sink.py` when it begins and ends          `reducer.py` everything else
    and         `replica.py` what any replica has
                `broadcast.py` equal at the start          `in_backward.py` the optimizer inside backward
                `verify.py` proof                          `timeline.py` what it took
                `torch_names.py` what else programs call
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.setup import current
from ddp.errors import CollectiveMismatch, ConfigError, ReplicaMismatch
from ddp.gradients.hook import CommHook, Hook, check_hook
from ddp.gradients.totals import StepTotals
from ddp.replica import timeline
from ddp.replica.arguments import bucket_limits, check_devices, check_keywords, choose_communicator, input_device, moved
from ddp.replica.broadcast import broadcast_state, check_same_layout
from ddp.replica.buffers import BufferSync, Mode, When
from ddp.replica.in_backward import MakeOptimizer, StepInBackward, check_own_optimizers, refusal
from ddp.replica.join import Joining, TorchJoinHook
from ddp.replica.parameters import Change, ParameterWatch, managed, trainable
from ddp.replica.reducer import Reducer
from ddp.replica.replica import Replica
from ddp.replica.sink import call_at_end, check_engine, watch_backward
from ddp.replica.sparse import produces_sparse_gradient
from ddp.replica.sync_batchnorm import SyncBatchNorm
from ddp.replica.torch_names import TorchNames
from ddp.replica.uncompiled import uncompiled

BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's name for it, on the module


class DistributedDataParallel(TorchNames, Joinable):
    """Averages gradients over all ranks in buckets, while backward runs. Drop-in for torch's class of this name.

    Args:
        module: at least one parameter must need a gradient. Its parameters and buffers become rank 0's.
        device_ids, output_device: one device at most, which must be the module's; there is one device per process.
            With `device_ids`, inputs are moved there.
        broadcast_buffers: False: as `buffers="none"`, and buffers stay as they are at the start, too.
        init_sync: compare and broadcast parameters and buffers now.
        process_group, device_mesh: the ranks that take part: torch's process group, or a mesh of one dimension.
        bucket_cap_mb: size at which a bucket is closed, in MiB.
        bucket_cap_mb_list: the same for bucket 0, 1, 2, …; the last one holds for all that follow.
        first_bucket_mb: the size for bucket 0, which goes first; 1 MiB.
        find_unused_parameters: parameters may go without a gradient.
        static_graph: every step uses the same parameters equally often; some may be used by none.
        forward_sync_buffers: False: as `buffers="none"`.
        buffers: "broadcast" rank 0's before each forward in training mode, take their "mean", or "none" (`buffers.py`).
        overlap: reduce in the background of backward; None: where that pays (`reducer.py`, note "foreground").
        comm: the ranks that take part, as `ddp.init` or `subgroup` gave them.
        others: further keywords of torch's class (`arguments.py`).

    Which reducer a gradient belongs to is decided at its forward, and programs freeze and unfreeze parameters:

        name                 meaning                                                changed by
        reducer              autograd's hooks report to this one                    `prepare` of a forward, for the
                                                                                    parameters that need a gradient;
                                                                                    `_may_begin`, for a backward through
                                                                                    an earlier forward
        _reducers            those of the last forwards, by which parameters needed `_find_reducer`
                             a gradient
        reducer.is_expected  the next gradient begins a step, if no output does     the two ends of a forward, `_finish`
        _is_in_forward       a forward is running, and may run backward itself      the two ends of a forward
        _is_borrowed         torch.func.functional_call has put other tensors in    `prepare`
                             the parameters' places for this forward

    A reducer calls back: `on_begin` is `_may_begin`, which makes the reducer that is to begin the present one, or says
    no; `on_end` is `_finish`; `on_stranger` and `on_prepare` notice parameters that were unfrozen inside a forward.

    Raises:
        ReplicaMismatch: the ranks' models differ in a name, shape or dtype.
        ConfigError: no parameter needs a gradient; the ranks are given twice.
        ValueError: keywords exclude each other.
        TypeError: a keyword that means nothing here; says what to use.
    """

    reducer: Reducer
    _reducers: dict[tuple[bool, ...], Reducer]

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        *,
        static_graph: bool = False,
        device_mesh: Any = None,
        bucket_cap_mb_list: list[int] | None = None,
        forward_sync_buffers: bool | None = None,
        first_bucket_mb: float | None = None,
        buffers: Mode | None = None,
        overlap: bool | None = None,
        comm: Communicator | None = None,
        **others: Any,
    ) -> None:
        check_keywords(others)
        limits = bucket_limits(bucket_cap_mb, bucket_cap_mb_list, first_bucket_mb)
        comm = choose_communicator(comm, process_group, device_mesh)
        ignored = frozenset(getattr(module, IGNORED, ()))
        named = managed(module, ignored, Replica)
        trainable(named, has_inner=_has_inner(module))
        check_devices(named, device_ids, output_device)
        check_own_optimizers(named)
        keeps_buffers = broadcast_buffers is False if forward_sync_buffers is None else not forward_sync_buffers
        if buffers is not None and keeps_buffers and buffers != "none":
            raise ValueError(f"buffers={buffers!r} excludes broadcast_buffers=False and forward_sync_buffers=False")
        sync = BufferSync(comm, module, buffers or ("none" if keeps_buffers else "broadcast"), ignored)
        if init_sync:
            with_buffers = broadcast_buffers is not False or forward_sync_buffers is not None
            broadcast_state(comm, [*named, *(sync.named().items() if with_buffers else ())])
        settings = {
            "limits": limits,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "overlap": overlap if not _communicates(module) else True,  # else a rank could wait in two places at once
        }
        super().__init__(module, comm, _reducer(comm, module, ignored, settings), sync)
        Joinable.__init__(self)
        self.find_unused_parameters, self.static_graph, self.dim = find_unused_parameters, static_graph, dim
        self.gradient_as_bucket_view, self.parameters_to_ignore = True, set(ignored)
        self.device_mesh = device_mesh
        self.joining: Joining | None = None
        self._joining_of_torch: Joining | None = None
        self._settings, self._device = settings, input_device(device_ids)
        self._process_group = process_group if device_mesh is None else device_mesh.get_group(0)
        self._stepper: StepInBackward | None = None
        self._watch_parameters()

    # --- a step ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; a backward through what it returns ends with equal gradients on all ranks.

        Raises:
            UnusedParameters: the last step left some without a gradient, and that is not allowed.
            ConfigError: parameters were added, removed or replaced.
        """
        check_engine()
        if self._device is not None:
            args, kwargs = moved((args, kwargs), self._device)
        try:
            return super().forward(*args, **kwargs)
        except BaseException:
            self._is_in_forward = self.reducer.is_expected = False
            raise

    @uncompiled
    def _before_forward(self) -> bool:
        synchronises = super()._before_forward()
        if torch.is_grad_enabled():
            self._is_in_forward = self.reducer.is_expected = synchronises and not self._is_borrowed
        return synchronises

    def prepare(self) -> None:
        for reducer in {self.reducer, *self._reducers.values()}:
            reducer.raise_pending()
        while (change := self._watch.look()) is Change.MODULES:
            self._buffer_sync.look_again()
        self._is_borrowed = change is Change.BORROWED
        if change is Change.KINDS:
            self._reducers.clear()  # their buckets are of other types
        self._choose_reducer()

    def _meet(self) -> None:
        if self._join_config.enable:  # torch's Join
            Join.notify_join_context(self)
            self.joining = self._joining_of_torch
        if self.joining is not None:
            self.joining.meet(has_inputs=True)

    def _watch_outputs(self, outputs: Any) -> None:
        self._look_inside()
        self._is_in_forward = False
        is_seen = watch_backward(outputs, partial(self.reducer.begin, if_reached=self._is_borrowed), self._finish)
        self.reducer.is_expected = (self.training or not is_seen) and not self._is_borrowed

    def _look_inside(self) -> Reducer:
        """Returns the reducer for a backward in or through this forward: another one if it has unfrozen parameters."""
        if self._is_in_forward and self._watch.look_inside():
            self._choose_reducer()
        return self.reducer

    @uncompiled
    def _on_stranger(self, parameter: Tensor) -> None:
        """A parameter that was frozen when the forward began may have got a gradient.

        Raises:
            RuntimeError: it has, and buckets of this backward have been sent without it.
        """
        is_in_step = self.reducer.is_in_backward or (self._is_in_forward and self.require_backward_grad_sync)
        if is_in_step and parameter.requires_grad:
            self._watch.look_inside()
            reducer = self._find_reducer()
            if reducer.begin():
                call_at_end(self._finish)
            reducer.note(parameter)

    def _may_begin(self, reducer: Reducer) -> bool:
        """Makes `reducer` the present one, because a backward has reached outputs of its forward.

        Returns:
            False if it must not begin: in `no_sync`, or the present one is in the same backward and does its work.

        Raises:
            RuntimeError: another one is in the midst of this backward, and neither could do the other's work.
        """
        if self._is_in_forward and not self.require_backward_grad_sync:
            return False  # no_sync inside a forward that runs backward itself
        current = self.reducer
        if reducer is current:
            return True
        if current.is_in_backward:
            if current.covers(reducer):
                return False
            if not reducer.covers(current) or not current.give_up():
                raise RuntimeError(
                    "one backward goes through two forwards, between which other parameters were frozen or unfrozen, "
                    "or through one that unfreezes: run a backward for each of them, or freeze after the backward and "
                    "unfreeze before the forward"
                )
        self._switch_to(reducer)
        return True

    @uncompiled
    def _finish(self, *, had_backward: bool = True) -> None:
        """Backward has ended."""
        if not self.reducer.is_in_backward:
            return  # another reducer has taken over in the midst of it, and has finished
        super()._finish(had_backward=had_backward)
        self._buffer_sync.wait()
        self.reducer.is_expected = self._is_in_forward  # a forward that runs backward itself may do so again

    def _all_make_steps(self) -> bool:
        return self.joining is None or len(self.joining.active) == self.comm.world_size

    @property
    def _is_joined(self) -> bool:
        return self.joining is not None or self._join_config.enable

    @property
    def _root(self) -> int:
        return self.joining.active[-1] if self.joining is not None else 0

    # --- uneven inputs -----------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """A context in which ranks may have different numbers of inputs (`join.py`).

        Args:
            divide_by_initial_world_size: divide by the number of all ranks; else of those that still have inputs.
            enable: False: the context does nothing.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one has run out.
        """
        if not enable:
            return nullcontext()
        return Joining(
            self,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> TorchJoinHook:
        """Returns the hook for torch's `Join` context, which calls this with divide_by_initial_world_size."""
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        self._joining_of_torch = Joining(self, divide_by_initial_world_size=divides_by_all)
        return TorchJoinHook(self._joining_of_torch)

    @property
    def join_device(self) -> torch.device:
        """For torch's `Join`."""
        return self.comm.device

    @property
    def join_process_group(self) -> Any:
        """For torch's `Join`."""
        return self.process_group

    def broadcast_from(self, root: int) -> None:
        """Gives every rank the root's parameters, and its buffers where they are kept equal. Collective."""
        buffers = self._buffer_sync.named().items() if self.broadcast_buffers else ()
        broadcast_state(self.comm, [*self._equal_parameters(), *buffers], root=root)

    def _equal_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return managed(self.module, self.parameters_to_ignore, Replica)

    # --- hooks, and the optimizer in backward ------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Hook, *, overlap: bool = False) -> None:
        """Lets `hook(state, bucket)` take the place of the all-reduce (`gradients/hook.py`). Once, on every rank.

        Args:
            overlap: the hook makes all its collectives when it is called, and may be called before its last future is
                done. So may one that has an attribute `overlap` which is true.

        Raises:
            TypeError: it cannot be called.
            RuntimeError: there is one already.
        """
        check_hook(hook)
        if self._stepper is not None:
            raise refusal("a communication hook that is registered after it")
        if self.reducer.hook is not None:
            raise RuntimeError(
                f"the communication hook {self.reducer.hook.name} is registered already; there can be one"
            )
        self.reducer.use_hook(CommHook(hook, state, self.comm, overlap=overlap or getattr(hook, "overlap", False)))

    def register_buffer_hook(
        self, state: Any, hook: Callable[[Any, dict[str, Tensor]], Any], *, when: When = When.POST_FORWARD
    ) -> None:
        """Lets `hook(state, {name: buffer})` keep buffers equal, before or after forward (`buffers.py`)."""
        check_hook(hook)
        self._buffer_sync.hook, self._buffer_sync.state, self._buffer_sync.when = hook, state, When[when.name]

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[[Any, dict[str, Tensor]], Any], comm_hook_location: Any = When.POST_FORWARD
    ) -> None:
        """torch's name for it."""
        self.register_buffer_hook(state, hook, when=comm_hook_location)

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Registers the hook of torch that does the same as one of its hooks in C++, and is written in Python."""
        self.register_comm_hook(self.process_group, BUILTIN_HOOKS[kind])

    def step_in_backward(self, make_optimizer: MakeOptimizer) -> None:
        """Steps every bucket's parameters as soon as its mean is there (`in_backward.py`); gradients are gone then.

        Args:
            make_optimizer: makes an optimizer of the parameters that it is given; called once per bucket.

        Raises:
            ConfigError: a gradient may never come, or comes sparse; or there is such an optimizer already.
            TypeError: `make_optimizer` cannot be called.
        """
        if self._stepper is not None:
            raise refusal("another optimizer")
        if self.find_unused_parameters or self.static_graph:
            raise refusal("find_unused_parameters or static_graph")
        if any(slot.is_sparse for slot in self.reducer.slots):
            raise refusal("a sparse gradient")
        self._stepper = StepInBackward(self.reducer, make_optimizer)
        self.reducer.on_mean = self._stepper.on_mean

    @property
    def steps_in_backward(self) -> bool:
        """True once `step_in_backward` was called."""
        return self._stepper is not None

    @property
    def optimizers_in_backward(self) -> list[Optimizer]:
        """Those that `step_in_backward` has made so far, one for each bucket: for their rates and their state."""
        return [] if self._stepper is None else list(self._stepper.optimizers.values())

    def ride_along(self, totals: StepTotals) -> None:
        """Call before the step's last backward: gradients become global sums divided by the global count."""
        if self._stepper is not None:
            raise refusal(
                "a step that may be refused (ddp.fit clips, vetoes values that are not finite, and takes back)"
            )
        super().ride_along(totals)

    # --- looking at it -----------------------------------------------------------------------------------------------

    def logging_data(self) -> dict[str, Any]:
        """Returns how long the last step's reductions took, bucket by bucket (`timeline.py`)."""
        return timeline.describe(self.reducer)

    # --- which reducer -----------------------------------------------------------------------------------------------

    def _set_static_graph(self) -> None:
        """Does what `static_graph=True` does; before the first step, on every rank.

        Raises:
            ConfigError: there was a step, or the optimizer steps in backward.
        """
        if self.static_graph:
            return
        if self.reducer.num_steps or self.steps_in_backward:
            what = "after the first step" if self.reducer.num_steps else "beside step_in_backward"
            raise ConfigError(f"_set_static_graph {what}: pass static_graph=True when you make the replica")
        self.static_graph = self._settings["static_graph"] = True
        self._reducers.clear()
        self._choose_reducer()

    def _find_reducer(self) -> Reducer:
        """Returns the reducer for the parameters that need a gradient now.

        Makes it, and that is collective, unless the same parameters were trained before (as in a GAN). One that is
        forgotten here lives on as long as the outputs of a forward that it was made for.
        """
        if self._stepper is not None:
            raise refusal("freezing, unfreezing or converting parameters")
        former, needed = self.reducer, self._watch.needed
        if needed not in self._reducers:
            reducer = _reducer(
                self.comm, self.module, self.parameters_to_ignore, self._settings, needed=self._watch.needed_ids
            )
            try:
                check_same_layout(self.comm, [(slot.name, slot.parameter) for slot in reducer.slots])
            except CollectiveMismatch as mismatch:
                changed = {slot.name for slot in former.slots} ^ {slot.name for slot in reducer.slots}
                what = f"{', '.join(sorted(changed))}: frozen or unfrozen" if changed else "parameters were converted"
                raise ReplicaMismatch(
                    f"{what} on rank {self.comm.rank}, and not on another one. Change requires_grad, types and devices "
                    "on every rank, between the same two steps"
                ) from mismatch
            while len(self._reducers) >= KEPT_REDUCERS:
                self._reducers.pop(next(iter(self._reducers)))
            self._reducers[needed] = self._connected(reducer)
        found = self._reducers[needed] = self._reducers.pop(needed)  # the latest ones are kept
        return found

    def _choose_reducer(self) -> None:
        """Makes the reducer for the parameters that need a gradient now the present one."""
        if self._reducers.get(self._watch.needed) is not self.reducer:
            self._switch_to(self._find_reducer())

    def _switch_to(self, reducer: Reducer) -> None:
        former, self.reducer = self.reducer, reducer
        reducer.resume(former)

    def _connected(self, reducer: Reducer) -> Reducer:
        """Returns the reducer, which lets this replica know when a backward begins and ends."""
        reducer.on_begin, reducer.on_end = self._may_begin, self._finish
        reducer.on_stranger, reducer.on_prepare = self._on_stranger, self._look_inside
        return reducer

    def _watch_parameters(self) -> None:
        self._watch = ParameterWatch(self.module)
        self._reducers = {self._watch.needed: self._connected(self.reducer)}
        self._is_in_forward = self._is_borrowed = False

    # --- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that can go to another process."""
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError("a replica over a process group of its own cannot be pickled; pickle its .module")
        return self._state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Over this process's communicator, without hooks and optimizers of the user. Not collective."""
        self._connect(state, current())

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A replica of its own over the same ranks, without hooks; for an average of weights. Not collective."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._connect(copy.deepcopy(self._state(), memo), self.comm, self._process_group)
        return twin

    def _state(self) -> dict[str, Any]:
        """Without what belongs to this process: communicator, reducer, hooks."""
        return {name: value for name, value in self.__dict__.items() if name not in OF_THIS_PROCESS} | {
            "buffer_mode": self._buffer_sync.mode
        }

    def _connect(self, state: dict[str, Any], comm: Communicator, group: dist.ProcessGroup | None = None) -> None:
        mode = state.pop("buffer_mode")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.comm, self._process_group, self.device_mesh = comm, group, None
        self.joining = self._joining_of_torch = self._stepper = self._verifies = None
        self.reducer = _reducer(comm, self.module, self.parameters_to_ignore, self._settings)
        self._buffer_sync = BufferSync(comm, self.module, mode, self.parameters_to_ignore)
        self._watch_parameters()


KEPT_REDUCERS = 2  # for as many choices of trained parameters at a time, buckets are kept
OF_THIS_PROCESS = frozenset(
    {"comm", "reducer", "_reducers", "joining", "device_mesh", "_buffer_sync", "_joining_of_torch", "_process_group"}
    | {"_stepper", "_verifies", "_watch"}
)


def _reducer(
    comm: Communicator,
    module: nn.Module,
    ignored: Collection[str],
    settings: dict[str, Any],
    needed: Collection[int] | None = None,
) -> Reducer:
    """Returns a reducer of a module's parameters.

    Args:
        needed: ids of those that need a gradient; None: as they are now.
    """
    sparse = {id(child.weight) for child in module.modules() if produces_sparse_gradient(child)}
    named, strangers = [], []
    for name, parameter in managed(module, ignored, Replica):
        if parameter.requires_grad if needed is None else id(parameter) in needed:
            named.append((name, parameter))
        else:
            strangers.append(parameter)
    names = [name for name, parameter in named if id(parameter) in sparse]
    return Reducer(comm, named, strangers=strangers, sparse=names, **settings)


def _has_inner(module: nn.Module) -> bool:
    return any(isinstance(child, Replica) for child in module.modules())


def _communicates(module: nn.Module) -> bool:
    """Returns True if a layer makes collectives of its own in backward."""
    return any(isinstance(child, (SyncBatchNorm, nn.SyncBatchNorm)) for child in module.modules())
