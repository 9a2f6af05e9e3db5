"""Names that torch's DistributedDataParallel does not document, and that other people's programs use all the same.

Lightning, Accelerate, mmcv and torch.distributed.pipelining reach into torch's class and into its reducer. Each name
here does what its callers want of it, with our class (the reducer's are at the end of `reducer.py`); a name that is not
here is an AttributeError.

They also ask `isinstance(model, torch.nn.parallel.DistributedDataParallel)`, in order to unwrap the model, to remove
"module." from the keys of a checkpoint, or to use `no_sync`. The answer is True: our class is a virtual subclass of
torch's (as `abc` calls it), which inherits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp.errors import ConfigError
from ddp.gradients.hook import Hook
from ddp.replica.arguments import moved
from ddp.replica.broadcast import broadcast_tensors
from ddp.replica.replica import Replica

if TYPE_CHECKING:
    from ddp.replica.reducer import Reducer

THEIRS: Any = nn.parallel.DistributedDataParallel
BUILTIN_HOOKS = {
    BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


@THEIRS.register
class ModuleNames(Replica):
    """Names of the module."""

    reducer: Reducer
    _device: torch.device | None
    _settings: dict[str, Any]

    if TYPE_CHECKING:
        dim: int
        find_unused_parameters: bool
        static_graph: bool
        _reducers: dict[tuple[bool, ...], Reducer]

        @property
        def steps_in_backward(self) -> bool: ...
        @property
        def process_group(self) -> Any: ...
        def register_comm_hook(self, state: Any, hook: Hook) -> None: ...
        def _change_reducer(self) -> None: ...

    # these use nothing but what they are given, `self.dim` and `register_comm_hook`
    scatter, gather = THEIRS.scatter, THEIRS.gather
    _register_fused_optim = THEIRS._register_fused_optim
    _get_data_parallel_params = staticmethod(THEIRS._get_data_parallel_params)
    _set_params_and_buffers_to_ignore_for_model = staticmethod(THEIRS._set_params_and_buffers_to_ignore_for_model)

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """Its type."""
        return self.device.type

    @property
    def device_ids(self) -> list[int] | None:
        """The CUDA device that inputs are moved to, as a list; None if inputs stay where they are."""
        return None if self._device is None or self._device.index is None else [self._device.index]

    @property
    def output_device(self) -> int | None:
        """The same device; outputs are not moved."""
        return None if self.device_ids is None else self.device_ids[0]

    @property
    def bucket_bytes_cap(self) -> int:
        """Bytes at which a bucket is closed."""
        return int(self._settings["limits"][-1])

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._equal_parameters()]

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Returns None: torch.compile need not split its graphs at the edges of our buckets."""

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """What torch's class would call the same things; `logging_data` has times."""
        slots, buckets = self.reducer.slots, [bucket for bucket in self.reducer.buckets if bucket.slots]
        return {
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(self.process_group),
            "world_size": self.comm.world_size,
            "rank": self.comm.rank,
            "iteration": self.reducer.num_steps,
            "num_parameter_tensors": len(slots),
            "total_parameter_size_bytes": sum(slot.parameter.nbytes for slot in slots),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": ", ".join(str(sum(slot.parameter.nbytes for slot in bucket.slots)) for bucket in buckets),
            "has_rebuilt_buckets": int(self.reducer.order is not None),
            "comm_hook": self.reducer.hook.name if self.reducer.hook is not None else "",
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "static_graph": int(self.static_graph),
            "gradient_as_bucket_view": 1,
        }

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are kept equal; programs also change it after the replica was made."""
        return self._buffer_sync.mode != "none"

    @broadcast_buffers.setter
    def broadcast_buffers(self, keeps_equal: bool) -> None:
        if keeps_equal != self.broadcast_buffers:
            self._buffer_sync.mode = "broadcast" if keeps_equal else "none"

    forward_sync_buffers = broadcast_buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes buffers equal first."""
        return self.require_forward_param_sync and self._buffer_sync.is_active

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Inputs on a device, as `scatter` gives them for several."""
        device = torch.device(self.device_type, device_id)
        return (moved(inputs, device),), (moved(kwargs, device),)

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward alone; mmcv calls it between steps that it takes itself."""
        return self.module(*args, **kwargs)

    def _register_builtin_comm_hook(self, kind: Any) -> None:
        """Registers the hook of torch that does the same, written in Python."""
        self.register_comm_hook(self.process_group, BUILTIN_HOOKS[kind])

    def _set_static_graph(self) -> None:
        """As `static_graph=True`. Before the first step, on every rank.

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
        self._change_reducer()

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Overwrites tensors with those of one rank. Collective."""
        broadcast_tensors(self.comm, [tensor.detach() for tensor in tensors], root=authoritative_rank)

    def _check_reducer_finalized(self) -> None:
        """Raises what the last backward found wrong."""
        self.raise_pending()
