"""A drop-in for torch's DistributedDataParallel: the bucketed replica with the whole contract of that class.

    model = ddp.DistributedDataParallel(net)        # rank 0's parameters everywhere
    loss = criterion(model(x), y)                   # forward as ever; the outputs are watched
    loss.backward()                                 # gradients are averaged over all ranks meanwhile
    optimizer.step()                                # the same on every rank, so replicas stay bitwise equal

It has the same keywords (`arguments.py` has the table), the same `state_dict` and the same errors. It changes
`BucketedDataParallel` at a handful of named moments (those of `join` are in `join.py`):

    prepare, _begin          programs freeze and unfreeze parameters, also inside a forward; functional calls
    _new_watch               parameters that are borrowed for a forward (`parameter_watch.py`)
    _make_layout             parameters that are ignored by name; sparse gradients
    _new_backward            unused parameters, static graphs, hooks, … (`backward.py` has the moments inside one)
    _on_other_gradient, …    parameters unfrozen inside a forward; `create_graph`
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.devices import device_of
from ddp.comm.session import current
from ddp.errors import ConfigError
from ddp.gradients.hooks.compression import Compression
from ddp.gradients.hooks.hook import Hook
from ddp.gradients.layout import Layout, bucket_limits
from ddp.gradients.totals import Totals
from ddp.replica.backward import Backward, State
from ddp.replica.broadcast import broadcast_state, sending
from ddp.replica.buffers import BufferSync, Mode
from ddp.replica.drop_in.arguments import (
    check_devices,
    check_engine,
    check_keywords,
    choose_communicator,
    input_device,
    moved,
    warn_of_deprecated,
)
from ddp.replica.drop_in.backward import TorchBackward, Wishes
from ddp.replica.drop_in.buffer_hook import BufferHook, HookedBuffers, When
from ddp.replica.drop_in.comm_hook import CommHook, HookFunction, check_hook
from ddp.replica.drop_in.higher_order import hand_out_differentiable
from ddp.replica.drop_in.in_backward import MakeOptimizer, StepInBackward, check_own_optimizers, refusal
from ddp.replica.drop_in.join import UnevenInputs
from ddp.replica.drop_in.parameter_watch import TorchParameterWatch
from ddp.replica.drop_in.sparse import produces_sparse_gradient
from ddp.replica.parameters import check_trainable, check_wire, managed
from ddp.replica.replica import Replica
from ddp.replica.sink import accumulates, watch_backward, will_accumulate
from ddp.replica.uncompiled import uncompiled
from ddp.setting import WireName

BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}
IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's name for it, on the module
OF_THIS_PROCESS = frozenset(  # attributes that pickles and copies leave out
    {"comm", "device_mesh", "joining", "_backward", "_buffer_sync", "_waiting", "_joining_of_torch", "_last"}
    | {"_layouts", "_process_group", "_verification", "_watch", "_wishes"}
)


class DistributedDataParallel(UnevenInputs):
    """Averages gradients over all ranks in buckets, while backward runs. Drop-in for torch's class of this name.

    Args:
        module: at least one parameter must need a gradient. Its parameters and buffers become rank 0's.
        device_ids, output_device: one device at most, which must be the module's; there is one device per process.
            With `device_ids`, inputs are moved there.
        broadcast_buffers: False means `buffers="none"`, and that buffers are not made equal at the start either.
        init_sync: compare and broadcast parameters and buffers now.
        process_group, device_mesh: the ranks that take part: torch's process group, or a mesh of one dimension.
        bucket_cap_mb: size at which a bucket is closed, in MiB.
        bucket_cap_mb_list: the same for bucket 0, 1, 2, …; the last one holds for all that follow.
        first_bucket_mb: the size for bucket 0, which is launched first; 1 MiB.
        find_unused_parameters: parameters may go without a gradient.
        static_graph: every step uses the same parameters equally often; some may be used by none.
        forward_sync_buffers: False: as `buffers="none"`.
        buffers: "broadcast" rank 0's before each forward in training mode, take their "mean", or "none" (`buffers.py`).
        overlap: reduce in the background of backward; None: where that pays (`backward.py`, note "foreground").
        wire, hook: as in `ddp.BucketedDataParallel`.
        comm: the ranks that take part, as `ddp.init` or `subgroup` gave them.
        others: further keywords of torch's class (`arguments.py`).

    Raises:
        ReplicaMismatch: the ranks' models differ in a name, shape, dtype, memory format, or in what is frozen.
        ConfigError: no parameter needs a gradient; the ranks are given in two ways.
        ValueError: keywords exclude each other.
        TypeError: a keyword that means nothing here; the message says what to use instead.
    """

    _watch: TorchParameterWatch
    _backward: TorchBackward
    _last: TorchBackward

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
        wire: WireName | None = None,
        hook: Hook | None = None,
        comm: Communicator | None = None,
        **others: Any,
    ) -> None:
        check_keywords(others)
        warn_of_deprecated(broadcast_buffers, forward_sync_buffers)
        limits = bucket_limits(bucket_cap_mb, bucket_cap_mb_list, first_bucket_mb=first_bucket_mb)
        comm = choose_communicator(comm, process_group, device_mesh, module)
        ignored = frozenset(getattr(module, IGNORED, ()))
        named = _not_ignored(module, ignored)
        check_trainable(named, has_inner=any(isinstance(child, Replica) for child in module.modules()))
        check_wire(named, wire, hook)
        check_devices(named, device_ids, output_device)
        check_own_optimizers(named)
        keeps_buffers = broadcast_buffers is False if forward_sync_buffers is None else not forward_sync_buffers
        if buffers is not None and keeps_buffers and buffers != "none":
            raise ValueError(f"buffers={buffers!r} excludes broadcast_buffers=False and forward_sync_buffers=False")
        sync = BufferSync(comm, module, buffers or ("none" if keeps_buffers else "broadcast"), ignored)
        if init_sync:
            with_buffers = broadcast_buffers is not False or forward_sync_buffers is not None
            tensors = [*named, *(sync.named().items() if with_buffers else ())]
            broadcast_state(comm, tensors, sending=sending(wire, hook))
        Replica.__init__(self, module, comm, sync)
        Joinable.__init__(self)
        self._limits, self._overlap, self.wire, self.parameters_to_ignore = limits, overlap, wire, set(ignored)
        self.find_unused_parameters, self.static_graph, self.dim = find_unused_parameters, static_graph, dim
        self.gradient_as_bucket_view, self.device_mesh, self._device = True, device_mesh, input_device(device_ids)
        self.compression = None if hook is None else Compression(hook, comm, named)
        self._process_group = process_group if device_mesh is None else device_mesh.get_group(0)
        self._begin_in_this_process()

    def _begin_in_this_process(self) -> None:
        """Makes everything that pickles and copies leave out."""
        self._leave_join()
        self._is_in_forward = False  # a forward is running that synchronises; it may run backward itself
        self._wishes = Wishes(
            finds_unused=self.find_unused_parameters and not self.static_graph,
            static_graphs={} if self.static_graph else None,
        )
        self._start()

    # --- a step ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; a backward through what it returns ends with equal gradients on all ranks.

        Raises:
            UnusedParameters: the last step left some without a gradient, and that is not allowed.
            ConfigError: parameters were added, removed or replaced.
        """
        check_engine()
        if self._device is not None:
            args, kwargs = moved((args, kwargs), self._device)
        return super().forward(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(*args, **kwargs)
        except BaseException:
            self._is_in_forward, self._waiting = False, None
            raise

    @uncompiled
    def _before_forward(self) -> bool:
        synchronises = super()._before_forward()
        if torch.is_grad_enabled():
            self._is_in_forward = synchronises and not self._watch.is_borrowed
            self._waiting = self._layouts.current if self._is_in_forward else None
        return synchronises

    def _watch_outputs(self, outputs: Any) -> None:
        self._look_inside_forward()
        self._is_in_forward, is_borrowed = False, self._watch.is_borrowed
        layout = self._layouts.current
        has_outputs = watch_backward(outputs, partial(self._begin, layout, if_reached=is_borrowed), self._finish)
        self._waiting = layout if (self.training or not has_outputs) and not is_borrowed else None

    def _look_inside_forward(self) -> None:
        """Takes another layout if the forward that is running, or has just ended, has unfrozen parameters."""
        if self._is_in_forward and self._watch.look_inside():
            self._choose_layout()

    def announce_backward(self, outputs: Iterable[Tensor]) -> None:
        """Lets the next backward synchronise, even if its forward was in `no_sync`."""
        self._look_inside_forward()
        self._waiting = self._layouts.current
        watch_backward(list(outputs), partial(self._begin, self._waiting), self._finish)

    @uncompiled
    def _begin(self, layout: Layout, *, if_reached: bool = False) -> bool:
        """Begins the step when backward first reaches an output or a parameter. Returns True if it did.

        Args:
            layout: for the parameters that needed a gradient in the forward that backward goes through.
            if_reached: begin only if backward will reach one of the parameters.
        """
        layout = layout.latest
        is_running = self._backward.state is State.RUNNING
        if is_running and layout is self._backward.layout:
            return False
        if not (will_accumulate if if_reached else accumulates)(layout.parameters):
            check_engine(in_backward=True)
            return False
        if self._is_in_forward and not self.require_backward_grad_sync:
            return False  # no_sync inside a forward that runs backward itself
        if is_running:
            self._backward.widen(layout)
            return False
        return super()._begin(layout)

    def _on_other_gradient(self, parameter: Tensor) -> None:
        is_running = self._backward.state is State.RUNNING
        layout = self._backward.layout if is_running else self._layouts.current
        is_in_step = is_running or (self._is_in_forward and self.require_backward_grad_sync)
        if is_in_step and parameter.requires_grad and id(parameter) not in layout.slot_of:
            self._watch.look_inside()  # it was frozen when the forward began
            self._choose_layout()
            self._waiting = self._layouts.current
            if is_running:
                self._backward.widen(self._waiting)
        super()._on_other_gradient(parameter)

    def _average(self) -> Totals:
        totals = super()._average()
        self._waiting = self._layouts.current if self._is_in_forward else None  # it may run another backward
        if self._last.is_differentiable:
            layout = self._last.layout
            hand_out_differentiable(layout.slots, partial(self._begin, layout), self._finish)
        return totals

    def _new_backward(self, former: Backward | None = None) -> TorchBackward:
        return TorchBackward(self.comm, former=former, wishes=self._wishes, **self._how())

    def _new_watch(self) -> TorchParameterWatch:
        return TorchParameterWatch(self.module)

    def _replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return _not_ignored(self.module, self.parameters_to_ignore)

    def _make_layout(self) -> Layout:
        sparse = {id(child.weight) for child in self.module.modules() if produces_sparse_gradient(child)}
        needed = self._watch.needed_ids
        named = [(name, parameter) for name, parameter in self._replicated_parameters() if id(parameter) in needed]
        return Layout(
            self.comm,
            named,
            limits=self._limits,
            sparse=[name for name, parameter in named if id(parameter) in sparse],
            for_hook=self._wishes.hook is not None,
            tails_ride=self._tails_ride,
        )

    @property
    def all_reduced_buckets(self) -> list[list[nn.Parameter]]:
        return super().all_reduced_buckets if self._wishes.hook is None else []

    @property
    def measures_parts(self) -> bool:
        # asked before the forward, which alone would find out that a sparse layer was unfrozen
        sparse = (child.weight for child in self.module.modules() if produces_sparse_gradient(child))
        return self.compression is None and not any(weight.requires_grad for weight in sparse)

    def _choose_layout(self) -> None:
        if self._wishes.stepper is not None and not self._layouts.is_current:
            raise refusal("freezing, unfreezing or converting parameters")
        super()._choose_layout()

    def ride_along(self, totals: Totals) -> None:
        """Sends this rank's part of the step's totals with the gradients (see `Replica`)."""
        if self._wishes.stepper is not None:
            raise refusal(
                "a step that may be refused (ddp.fit clips, vetoes values that are not finite, and takes back)"
            )
        super().ride_along(totals)

    # --- hooks, and the optimizer in backward ------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: HookFunction, *, overlap: bool = False) -> None:
        """Lets `hook(state, bucket)` take the place of the all-reduce (`comm_hook.py`). Once, on every rank.

        Args:
            overlap: the hook starts all its collectives when it is called, so it may be called again before its last
                future is done. The same holds for a hook whose attribute `overlap` is true.

        Raises:
            TypeError: it cannot be called.
            RuntimeError: there is one already.
        """
        check_hook(hook)
        if self._wishes.stepper is not None:
            raise refusal("a communication hook that is registered after it")
        for keyword, given in (("wire", self.wire), ("hook", self.compression and self.compression.hook)):
            if given is not None:
                raise ConfigError(
                    f"{keyword}={given!r} beside a registered communication hook, which does the sending: leave one out"
                )
        if self._wishes.hook is not None:
            raise RuntimeError(
                f"the communication hook {self._wishes.hook.name} is registered already; there can be one"
            )
        self._wishes.hook = CommHook(hook, state, self.comm, overlap=overlap or getattr(hook, "overlap", False))
        self._layouts.prepare_for_hook()

    def register_buffer_hook(self, state: Any, hook: BufferHook, *, when: When = When.POST_FORWARD) -> None:
        """Lets `hook(state, {name: buffer})` keep buffers equal, before or after forward (`buffer_hook.py`)."""
        self._buffer_sync = HookedBuffers(self._buffer_sync, hook, state, When[when.name])

    def _register_buffer_comm_hook(
        self, state: Any, hook: BufferHook, comm_hook_location: Any = When.POST_FORWARD
    ) -> None:
        """Does what `register_buffer_hook` does, by torch's name."""
        self.register_buffer_hook(state, hook, when=comm_hook_location)

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Registers the hook of torch that does the same as one of its hooks in C++, and is written in Python."""
        self.register_comm_hook(self.process_group, BUILTIN_HOOKS[kind])

    def step_in_backward(self, make_optimizer: MakeOptimizer) -> None:
        """Steps every bucket's parameters as soon as it holds the mean, and drops the gradients (`in_backward.py`).

        Args:
            make_optimizer: makes an optimizer of the parameters that it is given; called once per bucket.

        Raises:
            ConfigError: gradients may be missing or sparse, or there is such an optimizer already.
            TypeError: `make_optimizer` cannot be called.
        """
        if self._wishes.stepper is not None:
            raise refusal("another optimizer")
        if self.find_unused_parameters or self.static_graph:
            raise refusal("find_unused_parameters or static_graph")
        if self._layouts.current.sparse:
            raise refusal("a sparse gradient")
        if self.compression is not None:
            raise refusal(f"hook={self.compression.hook!r}")
        self._wishes.stepper = StepInBackward(make_optimizer)

    @property
    def steps_in_backward(self) -> bool:
        """Returns True once `step_in_backward` was called."""
        return self._wishes.stepper is not None

    @property
    def optimizers_in_backward(self) -> list[Optimizer]:
        """The optimizers that `step_in_backward` has made so far, one for each bucket."""
        return [] if self._wishes.stepper is None else list(self._wishes.stepper.optimizers.values())

    def logging_data(self) -> dict[str, Any]:
        """Returns how long the last step's reductions took, bucket by bucket (`timeline.py`)."""
        hook = self._wishes.hook
        return super().logging_data() | {"comm_hook": hook.name if hook is not None else None}

    def _set_static_graph(self) -> None:
        """Does what `static_graph=True` does; before the first step, on every rank.

        Raises:
            ConfigError: there was a step, or the optimizer steps in backward.
        """
        if self.static_graph:
            return
        if self.num_steps or self.steps_in_backward:
            what = "after the first step" if self.num_steps else "beside step_in_backward"
            raise ConfigError(f"_set_static_graph {what}: pass static_graph=True when you make the replica")
        self.static_graph, self._wishes.static_graphs, self._wishes.finds_unused = True, {}, False

    # --- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that can go to another process."""
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError("a replica over a process group of its own cannot be pickled; pickle its .module")
        return self._state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connects a pickled replica to this process's communicator, without hooks and optimizers. Not collective."""
        self._connect(state, current(device_of(state["_modules"]["module"])))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Returns another replica over the same ranks, without hooks; for an average of weights. Not collective."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._connect(copy.deepcopy(self._state(), memo), self.comm, self._process_group)
        return twin

    def _state(self) -> dict[str, Any]:
        """Returns what does not belong to this process alone."""
        return {name: value for name, value in self.__dict__.items() if name not in OF_THIS_PROCESS} | {
            "buffer_mode": self._buffer_sync.mode
        }

    def _connect(self, state: dict[str, Any], comm: Communicator, group: dist.ProcessGroup | None = None) -> None:
        mode = state.pop("buffer_mode")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.comm, self._process_group, self.device_mesh, self._verification = comm, group, None, None
        self._buffer_sync = BufferSync(comm, self.module, mode, self.parameters_to_ignore)
        self._begin_in_this_process()


def _not_ignored(module: nn.Module, ignored: Collection[str]) -> list[tuple[str, nn.Parameter]]:
    """Returns names and parameters that a replica keeps equal, without those ignored by name."""
    return [(name, parameter) for name, parameter in managed(module, inner=Replica) if name not in ignored]
