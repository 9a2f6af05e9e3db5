"""Names of torch's DistributedDataParallel: its keywords, and undocumented names that other programs use.

Lightning, Accelerate, mmcv and torch.distributed.pipelining reach into torch's class and into its reducer. Each name
here behaves as its callers expect; any other name is an AttributeError. A replica looks up names here that it does not
have itself.

Every keyword (torch 2.10 to 2.15), and what it means here:

module, device_ids, output_device, dim
init_sync, process_group, device_mesh
bucket_cap_mb, bucket_cap_mb_list
find_unused_parameters, static_graph
broadcast_buffers, forward_sync_buffers
                                 as in torch
gradient_as_bucket_view          as in torch; False costs no copy of gradients that no program keeps
batched_grad_copy                accepted; small gradients are always copied together
lazy_bucket_allocation           accepted; buckets keep their memory from one step to the next
check_reduction                  accepted; reductions are always checked (torch ignores it, too)
mixed_precision                  refused: the precision setting, or torch.autocast around forward
delay_all_reduce_named_params    refused: `bucket_cap_mb_list`, or parameters ignored by name
param_to_hook_all_reduce         refused: belongs to `delay_all_reduce_named_params`
skip_all_reduce_unused_params    refused: `static_graph=True` learns which parameters stay unused
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils.rnn import PackedSequence

from ddp.comm.communicator import Communicator
from ddp.comm.opening import device_of
from ddp.comm.session import communicator_of, current
from ddp.errors import ConfigError
from ddp.process import gpu
from ddp.process.terminal import log
from ddp.replica.autograd import uncompiled, watch_backward
from ddp.replica.broadcast import broadcast_tensors
from ddp.replica.step_finalizer import StaticGraph

Replica = Any  # a DistributedDataParallel; its module imports this one
BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


class ReducerNames:
    """The names of torch's reducer that programs use."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @property
    def num_steps(self) -> Any:
        """Returns the number of backwards that have synchronised."""
        return self._replica.num_steps

    @property
    def buckets(self) -> Any:
        """Returns the buckets in the order of reduction."""
        return self._replica.buckets

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """Lets the next backward synchronise, also if its forward was in `no_sync`.

        Args:
            outputs: tensors that this backward goes through. If there are none, the step begins at the first gradient
                of a parameter, which must not be inside a re-entrant checkpoint.
        """
        replica = self._replica
        replica._check_inside_forward()
        replica.waiting = replica.layout
        watch_backward(list(outputs), partial(replica._begin, replica.waiting), replica._finish)

    def _rebuild_buckets(self) -> bool:
        """Returns False: buckets change at the end of the first backward, and never before a forward."""
        return False

    def _delay_all_reduce(self) -> None:
        """Does nothing: autograd reports the end of the first backward over a static graph, too."""


def _device_ids(replica: Replica) -> list[int] | None:
    """Returns the CUDA device that inputs are moved to, as a list; None if inputs stay where they are."""
    device = replica.input_device
    return None if device is None or device.index is None else [device.index]


VALUES: dict[str, Callable[[Replica], Any]] = {  # attributes
    "reducer": ReducerNames,
    "device": lambda replica: next(replica.module.parameters()).device,
    "device_type": lambda replica: next(replica.module.parameters()).device.type,
    "device_ids": _device_ids,
    "output_device": lambda replica: next(iter(_device_ids(replica) or ()), None),  # its index; outputs are not moved
    "bucket_bytes_cap": lambda replica: replica._limits[-1],  # bytes at which a bucket is closed
    "join_device": lambda replica: replica.comm.device,  # of torch's `Join`, as the next one
    "join_process_group": lambda replica: replica.process_group,
    "_module_parameters": lambda replica: [parameter for _, parameter in replica._replicated_parameters()],
}


class TorchNames:
    """The methods of torch's class that programs call, for one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Returns a description of the replica with the keys of torch's class; `logging_data` has times."""
        replica = self._replica
        parameters = [slot.parameter for bucket in replica.buckets for slot in bucket.slots]
        parameters += [slot.parameter for slot in replica.layout.sparse]
        return {
            "module_name": type(replica.module).__name__,
            "backend_name": dist.get_backend(replica.process_group),
            "world_size": replica.comm.world_size,
            "rank": replica.comm.rank,
            "iteration": replica.num_steps,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
            "bucket_cap_bytes": replica._limits[-1],
            "bucket_sizes": ", ".join(
                str(sum(slot.parameter.nbytes for slot in bucket.slots)) for bucket in replica.buckets
            ),
            "has_rebuilt_buckets": int(replica.gradient_order is not None),
            "comm_hook": replica.logging_data()["comm_hook"] or "",
            "broadcast_buffers": int(replica.broadcast_buffers),
            "find_unused_parameters": int(replica.find_unused_parameters),
            "static_graph": int(replica.static_graph),
            "gradient_as_bucket_view": int(replica.gradient_as_bucket_view),
            "has_error": int(replica._last.error is not None),
            "error": str(replica._last.error or ""),
        }

    def will_sync_module_buffers(self) -> Any:
        """Returns True if the next forward makes buffers equal first."""
        return self._replica.require_forward_param_sync and self._replica._buffer_sync.is_active

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Returns the inputs on a device, in the form in which `scatter` gives them for several."""
        device = torch.device(VALUES["device_type"](self._replica), device_id)
        return (moved(inputs, device),), (moved(kwargs, device),)

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward alone; mmcv calls it between steps that it takes itself."""
        return self._replica.module(*args, **kwargs)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Overwrites tensors with those of one rank. Collective."""
        broadcast_tensors(self._replica.comm, [tensor.detach() for tensor in tensors], root=authoritative_rank)

    def _check_reducer_finalized(self) -> None:
        """Raises the error of the last backward, if there was one."""
        self._replica.raise_pending()

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        """Does what `register_buffer_hook` does, by torch's name."""
        where = {} if comm_hook_location is None else {"when": comm_hook_location}
        self._replica.register_buffer_hook(state, hook, **where)

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Registers torch's Python hook that is equivalent to one of its C++ hooks."""
        self._replica.register_comm_hook(self._replica.process_group, BUILTIN_HOOKS[kind])

    def _set_static_graph(self) -> None:
        """Does what `static_graph=True` does; before the first step, on every rank.

        Raises:
            ConfigError: there was a step, or the optimizer steps in backward.
        """
        replica = self._replica
        if replica.static_graph:
            return
        if replica.num_steps or replica.steps_in_backward:
            what = "after the first step" if replica.num_steps else "with step_in_backward"
            raise ConfigError(f"_set_static_graph {what}: pass static_graph=True when you make the replica")
        replica.static_graph, replica._usage = True, StaticGraph(replica.comm)
        replica.backward.usage = replica._usage


NAMES = frozenset(vars(TorchNames)) - frozenset(dir(object))


# --- Keywords --------------------------------------------------------------------------------------------------------


ACCEPTED = frozenset({"batched_grad_copy", "check_reduction", "lazy_bucket_allocation"})
USE_INSTEAD = {
    "mixed_precision": "precision=bf16 of ddp.fit, or torch.autocast around forward",
    "delay_all_reduce_named_params": "bucket_cap_mb_list for when buckets are closed, or "
    "module._ddp_params_and_buffers_to_ignore for parameters that you reduce yourself",
    "param_to_hook_all_reduce": "nothing: it belongs to delay_all_reduce_named_params",
    "skip_all_reduce_unused_params": "static_graph=True: the first step shows which parameters stay unused",
}


def check_keywords(others: Mapping[str, Any]) -> None:
    """Raises TypeError for a keyword that is unknown, or is set and has no meaning here; names a replacement."""
    for keyword, value in others.items():
        if keyword in ACCEPTED:
            continue
        if keyword not in USE_INSTEAD:
            raise TypeError(f"DistributedDataParallel got an unexpected keyword {keyword!r}")
        if value is not None and value is not False:
            raise TypeError(
                f"DistributedDataParallel does not take {keyword}={value!r}; instead: {USE_INSTEAD[keyword]}"
            )


def warn_of_deprecated(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> None:
    """Warns of `broadcast_buffers`, as torch's class does, on behalf of the caller that makes the replica."""
    if broadcast_buffers is None:
        return
    meaning = (
        "Use `forward_sync_buffers` instead, which makes buffers equal at the start in any case; keep "
        "broadcast_buffers=False for buffers that are each rank's own"
    )
    if forward_sync_buffers is not None:
        meaning = "its value is ignored if `forward_sync_buffers` is given"
    warnings.warn(f"`broadcast_buffers` is deprecated. {meaning}", FutureWarning, stacklevel=3)


def choose_communicator(
    comm: Communicator | None, process_group: dist.ProcessGroup | None, device_mesh: Any, module: nn.Module
) -> Communicator:
    """Returns the ranks that take part: those that were given, in any of three ways, or all.

    Raises:
        ConfigError: they were given in two ways, or the mesh has several dimensions.
    """
    given = [each for each in (comm, process_group, device_mesh) if each is not None]
    if len(given) > 1:
        if comm is None:  # in torch's words, as scripts may look for them
            raise ConfigError("Cannot specify both process_group and device_mesh arguments. Give one of them")
        raise ConfigError("comm excludes process_group and device_mesh; give one of them")
    if device_mesh is not None and device_mesh.ndim != 1:
        raise ConfigError(
            f"Only 1D device mesh is supported, but got {device_mesh}. Pass one dimension of it: mesh['replicate'], say"
        )
    if comm is not None:
        return comm
    group = device_mesh.get_group(0) if device_mesh is not None else process_group
    device = device_of(module)
    return current(device) if group is None else communicator_of(group, device)


def input_device(device_ids: Sequence[int | torch.device] | None) -> torch.device | None:
    """Returns the device that inputs are moved to; None: they stay where they are."""
    if not device_ids:
        return None
    return _device(device_ids[0])


def moved(value: Any, device: torch.device) -> Any:
    """Returns the value with its tensors on a device: those in tuples, lists and dicts, as torch's class does it.

    The lengths of a packed sequence stay on the CPU.
    """
    if isinstance(value, (Tensor, PackedSequence)):
        movable: Any = value
        return movable.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(each, device) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(moved(each, device) for each in value)
    if isinstance(value, dict):
        result = copy(value)  # also of a defaultdict
        result.update({name: moved(each, device) for name, each in value.items()})
        return result
    return value


def check_devices(named: Sequence[tuple[str, nn.Parameter]], device_ids: Any, output_device: Any) -> None:
    """Raises ValueError unless parameters are on devices of one type, and the device given, if any, is theirs."""
    devices = {parameter.device for _, parameter in named}
    if len(types := {device.type for device in devices}) > 1 or "meta" in types:
        raise ValueError(
            f"the module's parameters are on {' and '.join(sorted(types))}: want one type of device, and not meta, "
            "where tensors have no values; move the module first"
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids={device_ids}: one process drives one device; start one worker per device")
    for given in (*(device_ids or ()), *(() if output_device is None else (output_device,))):
        device = _device(given)
        if devices != {device}:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"device {device} was given, but the module's parameters are on {found}; move it first")


def _device(given: int | torch.device | str) -> torch.device:
    """Returns the device that a number or a name means: a CUDA device without a number is the current one."""
    device = torch.device(gpu.KIND, given) if isinstance(given, int) else torch.device(given)
    is_current = device.type == gpu.KIND and device.index is None
    return torch.device(gpu.KIND, gpu.cuda.current_device()) if is_current else device


@uncompiled
def check_engine(*, in_backward: bool = False) -> None:
    """Raises RuntimeError in a context of torch.distributed.autograd, where gradients never reach the parameters.

    Args:
        in_backward: this is a thread of the engine, which is in no context itself, so any open one counts.
    """
    if not (dist.rpc.is_available() and dist.rpc._is_current_rpc_agent_set()):  # type: ignore[attr-defined]
        return
    autograd = torch._C._distributed_autograd
    try:
        if not in_backward:
            autograd._current_context()
        elif int(autograd._get_debug_info()["num_current_dist_autograd_contexts"]) == 0:
            return
    except RuntimeError:  # there is none
        return
    message = (
        "torch.distributed.autograd keeps gradients in its context, where a replica cannot average them. Run forward "
        "and loss.backward() outside of the context, or keep torch's DistributedDataParallel for a model that spans "
        "hosts by RPC"
    )
    if in_backward:
        log.error(message)  # because that engine does not report the message
    raise RuntimeError(message)
