"""A drop-in for torch's DistributedDataParallel: the bucketed replica with the whole contract of that class.

    model = ddp.DistributedDataParallel(net)        # rank 0's parameters everywhere
    loss = criterion(model(x), y)                   # forward as usual; the outputs are watched
    loss.backward()                                 # gradients are averaged over all ranks meanwhile
    optimizer.step()                                # the same on every rank, so replicas stay bitwise equal

It has the same keywords (`torch_names.py` has the table), the same `state_dict` and the same errors. It is a
`BucketedDataParallel` that gives other objects to the same backward:

    usage        which parameters a backward uses: `find_unused_parameters`, `static_graph` (`step_finalizer.py`)
    reducer      a communication hook
    stepper      optimizers inside backward; as hooks, functions of the user (`in_backward.py`)
    inputs       `join`: the ranks that still have inputs (`join.py`)

Other programs check `isinstance(model, torch.nn.parallel.DistributedDataParallel)`, in order to unwrap the model, to
remove "module." from the keys of a checkpoint, or to use `no_sync`. The check succeeds: this class is a virtual
subclass of torch's (as `abc` calls it), which inherits nothing. Undocumented names that such programs use are in
`torch_names.py`.
"""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.nn.parallel import distributed
from torch.optim import Optimizer
from torch.profiler import record_function

from ddp.comm.communicator import Communicator
from ddp.comm.opening import device_of
from ddp.comm.session import current
from ddp.errors import ConfigError
from ddp.gradients.compression import Compression
from ddp.gradients.hook import Hook
from ddp.gradients.layout import Layout, bucket_limits
from ddp.gradients.totals import Totals
from ddp.replica.autograd import uncompiled
from ddp.replica.broadcast import BufferSync, Mode, broadcast_state, check_trainable, sending
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.drop_in import in_backward, torch_names
from ddp.replica.drop_in.join import Joining, TorchJoinHook
from ddp.replica.parameters import check_wire, managed
from ddp.replica.replica import Inputs, Replica
from ddp.replica.step_finalizer import StaticGraph, Usage
from ddp.replica.units import dissolve_units
from ddp.setting import WireName

IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's name for it, on the module
OF_THIS_PROCESS = frozenset(  # attributes that pickles and copies leave out
    {"backward", "collective", "comm", "device_mesh", "inputs", "riding", "settled", "waiting", "_buffer_sync"}
    | {"_direct", "_join_config", "_last", "_layouts", "_observers", "_process_group", "_reducer", "_stepper"}
    | {"_usage", "_verification", "_watch"}
)
TORCH_CLASS: Any = nn.parallel.DistributedDataParallel


@TORCH_CLASS.register
@Joinable.register
class DistributedDataParallel(BucketedDataParallel):
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
        gradient_as_bucket_view: gradients that a program keeps may be overwritten by the next backward.
        static_graph: every step uses the same parameters equally often; some may be used by none.
        forward_sync_buffers: False: as `buffers="none"`.
        buffers: "broadcast" rank 0's before each forward in training mode, take their "mean", or "none".
        overlap: reduce in the background of backward; None: if that is faster (`backward.py`, note "foreground").
        direct_gradients: compute gradients of large weights in their buckets (`replica/direct.py`); None: on CPUs.
        wire, hook: as in `ddp.BucketedDataParallel`.
        comm: the ranks that take part, as `ddp.init` or `subgroup` gave them.
        others: further keywords of torch's class (`torch_names.py`).

    Raises:
        ReplicaMismatch: the ranks' models differ in a name, shape, dtype, memory format, or in what is frozen.
        ConfigError: no parameter needs a gradient; the ranks are given in two ways.
        ValueError: keywords exclude each other.
        TypeError: a keyword has no meaning here; the message names a replacement.
    """

    # these use only their arguments, `self.dim` and `register_comm_hook`
    scatter, gather = TORCH_CLASS.scatter, TORCH_CLASS.gather
    _register_fused_optim = TORCH_CLASS._register_fused_optim
    _get_data_parallel_params = staticmethod(TORCH_CLASS._get_data_parallel_params)
    _set_params_and_buffers_to_ignore_for_model = staticmethod(TORCH_CLASS._set_params_and_buffers_to_ignore_for_model)

    _active_ddp_module = None  # torch's own class sets it at the name that ours may have (`take_over`)

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
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        device_mesh: Any = None,
        bucket_cap_mb_list: list[int] | None = None,
        forward_sync_buffers: bool | None = None,
        first_bucket_mb: float | None = None,
        buffers: Mode | None = None,
        overlap: bool | None = None,
        direct_gradients: bool | None = None,
        wire: WireName | None = None,
        hook: Hook | None = None,
        comm: Communicator | None = None,
        **others: Any,
    ) -> None:
        torch_names.check_keywords(others)
        torch_names.warn_of_deprecated(broadcast_buffers, forward_sync_buffers)
        limits = bucket_limits(bucket_cap_mb, bucket_cap_mb_list, first_bucket_mb=first_bucket_mb)
        comm = torch_names.choose_communicator(comm, process_group, device_mesh, module)
        dissolve_units(module)
        self.parameters_to_ignore = set(getattr(module, IGNORED, ()))
        named = _not_ignored(module, self.parameters_to_ignore)
        check_trainable(named, has_inner=any(isinstance(child, Replica) for child in module.modules()))
        check_wire(named, wire, hook)
        torch_names.check_devices(named, device_ids, output_device)
        in_backward.check_own_optimizers(named)
        keeps_buffers = broadcast_buffers is False if forward_sync_buffers is None else not forward_sync_buffers
        if buffers is not None and keeps_buffers and buffers != "none":
            raise ValueError(f"buffers={buffers!r} excludes broadcast_buffers=False and forward_sync_buffers=False")
        mode = buffers or ("none" if keeps_buffers else "broadcast")
        sync = BufferSync(comm, module, mode, frozenset(self.parameters_to_ignore))
        if init_sync:
            with_buffers = broadcast_buffers is not False or forward_sync_buffers is not None
            tensors = [*named, *(sync.named().items() if with_buffers else ())]
            broadcast_state(comm, tensors, sending=sending(wire, hook))
        Replica.__init__(self, module, comm, sync)
        self._limits, self._overlap, self.wire, self.direct_gradients = limits, overlap, wire, direct_gradients
        self.find_unused_parameters, self.static_graph, self.dim = find_unused_parameters, static_graph, dim
        self.gradient_as_bucket_view, self.device_mesh = gradient_as_bucket_view, device_mesh
        self.input_device = torch_names.input_device(device_ids)
        self.compression = None if hook is None else Compression(hook, comm, named)
        self._process_group = process_group if device_mesh is None else device_mesh.get_group(0)
        self._begin_in_this_process()

    def _begin_in_this_process(self) -> None:
        """Makes everything that pickles and copies leave out."""
        self._join_config = _JoinConfig.construct_disabled_join_config()  # torch's `Join` sets it
        usual = Usage(self.comm, finds_unused=self.find_unused_parameters)
        self._start(StaticGraph(self.comm) if self.static_graph else usual, in_backward.StepsOfOthers())

    # --- a step ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; a backward through what it returns ends with equal gradients on all ranks.

        Raises:
            UnusedParameters: the last step left some without a gradient, and that is not allowed.
            ConfigError: parameters were added, removed or replaced.
        """
        torch_names.check_engine()
        if self.input_device is not None:
            args, kwargs = torch_names.moved((args, kwargs), self.input_device)
        with record_function("DistributedDataParallel.forward") if _profiler_enabled() else nullcontext():
            return super().forward(*args, **kwargs)

    @uncompiled
    def _begin(self, layout: Layout, adds_to_all: bool, *, if_reached: bool = False) -> bool:
        has_begun = super()._begin(layout, adds_to_all, if_reached=if_reached)
        if not has_begun and not self.backward.is_running:
            torch_names.check_engine(in_backward=True)
        return has_begun

    def _choose_layout(self) -> None:
        if self.steps_in_backward and not self._layouts.is_current:
            raise in_backward.refusal("freezing, unfreezing or converting parameters")
        super()._choose_layout()

    def _replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return _not_ignored(self.module, self.parameters_to_ignore)

    def ride_along(self, totals: Totals) -> None:
        """Sends this rank's part of the step's totals with the gradients (see `Replica`)."""
        if self.steps_in_backward:
            raise in_backward.refusal(
                "a step that may be refused (ddp.fit clips, vetoes infinite values, and rolls steps back)"
            )
        super().ride_along(totals)

    # --- uneven inputs -----------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """Opens a context in which ranks may have different numbers of inputs (`join.py`).

        Args:
            divide_by_initial_world_size: divide by the number of all ranks; else of those that still have inputs.
            enable: False: the context does nothing.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one has run out.
        """
        if not enable:
            return nullcontext()
        throws = throw_on_early_termination
        return Joining(self.comm, divides_by_all=divide_by_initial_world_size, throws=throws).around(self)

    def join_hook(self, **keywords: Any) -> TorchJoinHook:
        """Returns the hook for torch's `Join` context."""
        return TorchJoinHook(self, keywords)

    # --- hooks, and the optimizer in backward ------------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: in_backward.HookFunction, *, overlap: bool = False) -> None:
        """Lets `hook(state, bucket)` take the place of the all-reduce (`in_backward.py`). Once, on every rank.

        Args:
            overlap: the hook starts all its collectives when it is called, so it may be called again before its last
                future is done. The same holds for a hook whose attribute `overlap` is true.

        Raises:
            TypeError: it cannot be called.
            RuntimeError: there is one already.
        """
        in_backward.check_hook(hook)
        if self.steps_in_backward:
            raise in_backward.refusal("a communication hook that is registered after it")
        for keyword, given in (("wire", self.wire), ("hook", self.compression and self.compression.hook)):
            if given is not None:
                raise ConfigError(
                    f"{keyword}={given!r} with a registered communication hook, which sends gradients: leave one out"
                )
        if isinstance(self._reducer, in_backward.CommHook):
            raise RuntimeError(f"the communication hook {self._reducer.name} is registered already; there can be one")
        self._reducer = in_backward.CommHook(hook, state, self.comm, overlap=overlap or getattr(hook, "overlap", False))
        self.backward.reducer = self._reducer
        self._layouts.change_to(self._reducer)

    def register_buffer_hook(
        self, state: Any, hook: in_backward.BufferHook, *, when: in_backward.When = in_backward.When.POST_FORWARD
    ) -> None:
        """Lets `hook(state, {name: buffer})` keep buffers equal, before or after forward (`in_backward.py`)."""
        self._buffer_sync = in_backward.HookedBuffers(self._buffer_sync, hook, state, in_backward.When[when.name])

    def step_in_backward(self, make_optimizer: in_backward.MakeOptimizer) -> None:
        """Steps every bucket's parameters as soon as it holds the mean, and drops the gradients (`in_backward.py`).

        Args:
            make_optimizer: makes an optimizer of the parameters that it is given; called once per bucket.

        Raises:
            ConfigError: gradients may be missing or sparse, or there is such an optimizer already.
            TypeError: `make_optimizer` cannot be called.
        """
        if self.steps_in_backward:
            raise in_backward.refusal("another optimizer")
        if self.find_unused_parameters or self.static_graph:
            raise in_backward.refusal("find_unused_parameters or static_graph")
        if self.layout.sparse:
            raise in_backward.refusal("a sparse gradient")
        if self.compression is not None:
            raise in_backward.refusal(f"hook={self.compression.hook!r}")
        self._stepper = self.backward.stepper = in_backward.StepInBackward(make_optimizer)

    @property
    def steps_in_backward(self) -> bool:  # type: ignore[override]
        """Returns True once `step_in_backward` was called."""
        return isinstance(self._stepper, in_backward.StepInBackward)

    @property
    def optimizers_in_backward(self) -> list[Optimizer]:
        """The optimizers that `step_in_backward` has made so far, one for each bucket."""
        return list(self._stepper.optimizers.values()) if isinstance(self._stepper, in_backward.StepInBackward) else []

    # --- looking at it -----------------------------------------------------------------------------------------------

    def logging_data(self) -> dict[str, Any]:
        """Returns how long the last step's reductions took, bucket by bucket (`bucketed.py`)."""
        reducer = self._reducer
        return super().logging_data() | {
            "comm_hook": reducer.name if isinstance(reducer, in_backward.CommHook) else None
        }

    def __getattr__(self, name: str) -> Any:
        """Returns the attribute of this name that torch's class has (`torch_names.py`), or a submodule."""
        if name in torch_names.VALUES:
            return torch_names.VALUES[name](self)
        return getattr(torch_names.TorchNames(self), name) if name in torch_names.NAMES else super().__getattr__(name)

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Returns None: torch.compile need not split its graphs at the edges of our buckets."""

    @property
    def process_group(self) -> Any:
        """torch's process group of the ranks that take part."""
        return self._process_group if self._process_group is not None else dist.group.WORLD

    @property
    def broadcast_buffers(self) -> bool:
        """Returns True if buffers are kept equal. Programs also change it after the replica was made."""
        return self._buffer_sync.mode != "none"

    @broadcast_buffers.setter
    def broadcast_buffers(self, keeps_equal: bool) -> None:
        if keeps_equal != self.broadcast_buffers:
            self._buffer_sync.mode = "broadcast" if keeps_equal else "none"

    forward_sync_buffers = broadcast_buffers

    # --- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that can go to another process."""
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError("a replica over its own process group cannot be pickled; pickle its .module")
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
        """Returns the attributes that do not belong to this process alone."""
        return {name: value for name, value in self.__dict__.items() if name not in OF_THIS_PROCESS} | {
            "buffer_mode": self._buffer_sync.mode
        }

    def _connect(self, state: dict[str, Any], comm: Communicator, group: dist.ProcessGroup | None = None) -> None:
        mode = state.pop("buffer_mode")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.comm, self._process_group, self.device_mesh, self._verification = comm, group, None, None
        self._buffer_sync = BufferSync(comm, self.module, mode, self.parameters_to_ignore)
        if self.compression is not None:
            self.compression.comm = comm
        self.inputs, self.riding = Inputs(comm), None
        self._begin_in_this_process()


def _not_ignored(module: nn.Module, ignored: set[str]) -> list[tuple[str, nn.Parameter]]:
    """Returns names and parameters that a replica keeps equal, without those ignored by name."""
    return [(name, parameter) for name, parameter in managed(module, inner=Replica) if name not in ignored]


# --- Our class in place of torch's, for libraries that wrap models by torch's class themselves ------------------------
#
#     ddp.drop_in.take_over()
#     model = ray.train.torch.prepare_model(model)        # a ddp.DistributedDataParallel


_KEEP = {"torch", "ddp"}  # torch's `replicate` needs its own class, and so do we
_NAMESPACE = vars(ModuleType)["__dict__"].__get__  # any other access would load a lazy module


def take_over() -> None:
    """Replaces torch's DistributedDataParallel by ours where torch has it, and in each module that has imported it.

    So it works before or after a library is imported; a second call does nothing. Models that are wrapped already, and
    classes that are derived from torch's already, stay as they are. Call it on every rank.
    """
    documented = (distributed.__name__, "torch.nn.parallel")
    for module in list(sys.modules.values()):
        namespace = _NAMESPACE(module) if issubclass(type(module), ModuleType) else {}
        module_name = str(namespace.get("__name__"))
        if module_name in documented or module_name.partition(".")[0] not in _KEEP:
            for name in [name for name, value in list(namespace.items()) if value is TORCH_CLASS]:
                namespace[name] = DistributedDataParallel
