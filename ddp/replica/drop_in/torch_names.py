"""Undocumented names of torch's DistributedDataParallel that other people's programs use.

Lightning, Accelerate, mmcv and torch.distributed.pipelining reach into torch's class and into its reducer. Each name
here does what its callers expect; any other name is an AttributeError. A replica looks here for names that it does not
have itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp.errors import ConfigError
from ddp.replica.autograd import watch_backward
from ddp.replica.broadcast import broadcast_tensors
from ddp.replica.drop_in.arguments import moved
from ddp.replica.drop_in.usage import StaticGraph

Replica = Any  # a DistributedDataParallel; its module imports this one
BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


class ReducerNames:
    """The names that programs use of torch's reducer."""

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
        """Describes the replica in the words of torch's class; `logging_data` has times."""
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
        """Raises what the last backward found wrong."""
        self._replica.raise_pending()

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> None:
        """Does what `register_buffer_hook` does, by torch's name."""
        where = {} if comm_hook_location is None else {"when": comm_hook_location}
        self._replica.register_buffer_hook(state, hook, **where)

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Registers the hook of torch that does the same as one of its hooks in C++, and is written in Python."""
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
            what = "after the first step" if replica.num_steps else "beside step_in_backward"
            raise ConfigError(f"_set_static_graph {what}: pass static_graph=True when you make the replica")
        replica.static_graph, replica._usage = True, StaticGraph(replica.comm)
        replica.backward.usage = replica._usage


NAMES = frozenset(vars(TorchNames)) - frozenset(dir(object))
