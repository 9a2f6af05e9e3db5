"""Undocumented names of torch's DistributedDataParallel that other people's programs use.

Lightning, Accelerate, mmcv and torch.distributed.pipelining reach into torch's class and into its reducer. Each name
here does what its callers expect; any other name is an AttributeError.

They also ask `isinstance(model, torch.nn.parallel.DistributedDataParallel)`, in order to unwrap the model, to remove
"module." from the keys of a checkpoint, or to use `no_sync`. The answer is True: our class is a virtual subclass of
torch's (as `abc` calls it), which inherits nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.gradients.bucket import Bucket
from ddp.replica.broadcast import broadcast_tensors
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.drop_in.arguments import moved
from ddp.replica.drop_in.backward import Wishes

TORCH_CLASS: Any = nn.parallel.DistributedDataParallel


class ReducerNames:
    """The names that programs use of torch's reducer."""

    def __init__(self, replica: TorchNames) -> None:
        self._replica = replica

    @property
    def num_steps(self) -> int:
        """Returns the number of backwards that have synchronised."""
        return self._replica.num_steps

    @property
    def buckets(self) -> list[Bucket]:
        """Returns the buckets in the order of reduction."""
        return self._replica.buckets

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """Lets the next backward synchronise, also if its forward was in `no_sync`.

        Args:
            outputs: tensors that this backward goes through. If there are none, the step begins at the first gradient
                of a parameter, which must not be inside a re-entrant checkpoint.
        """
        self._replica.announce_backward(outputs)

    def _rebuild_buckets(self) -> bool:
        """Returns False: buckets change at the end of the first backward, and never before a forward."""
        return False

    def _delay_all_reduce(self) -> None:
        """Does nothing: autograd reports the end of the first backward over a static graph, too."""


@TORCH_CLASS.register
class TorchNames(BucketedDataParallel):
    """A replica with the names that programs use of torch's class.

    Attributes:
        dim, find_unused_parameters, static_graph: the keywords of these names.
    """

    dim: int
    find_unused_parameters: bool
    static_graph: bool
    _device: torch.device | None
    _wishes: Wishes
    _process_group: dist.ProcessGroup | None

    @abstractmethod
    def announce_backward(self, outputs: Iterable[Tensor]) -> None:
        """Lets the next backward synchronise, also if its forward was in `no_sync`."""

    @property
    def reducer(self) -> ReducerNames:
        """The names of torch's reducer."""
        return ReducerNames(self)

    # these use nothing but what they are given, `self.dim` and `register_comm_hook`
    scatter, gather = TORCH_CLASS.scatter, TORCH_CLASS.gather
    _register_fused_optim = TORCH_CLASS._register_fused_optim
    _get_data_parallel_params = staticmethod(TORCH_CLASS._get_data_parallel_params)
    _set_params_and_buffers_to_ignore_for_model = staticmethod(TORCH_CLASS._set_params_and_buffers_to_ignore_for_model)

    @property
    def process_group(self) -> Any:
        """torch's process group of the ranks that take part."""
        return self._process_group if self._process_group is not None else dist.group.WORLD

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """The type of that device, "cpu" or "cuda"."""
        return self.device.type

    @property
    def device_ids(self) -> list[int] | None:
        """The CUDA device that inputs are moved to, as a list; None if inputs stay where they are."""
        return None if self._device is None or self._device.index is None else [self._device.index]

    @property
    def output_device(self) -> int | None:
        """The index of that device; outputs are not moved."""
        return None if self.device_ids is None else self.device_ids[0]

    @property
    def bucket_bytes_cap(self) -> int:
        """Returns the number of bytes at which a bucket is closed."""
        return self._limits[-1]

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._replicated_parameters()]

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Returns None: torch.compile need not split its graphs at the edges of our buckets."""

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Describes the replica in the words of torch's class; `logging_data` has times."""
        sizes = [sum(slot.parameter.nbytes for slot in bucket.slots) for bucket in self.buckets]
        return {
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(self.process_group),
            "world_size": self.comm.world_size,
            "rank": self.comm.rank,
            "iteration": self.num_steps,
            "num_parameter_tensors": len(self._layouts.current.parameters),
            "total_parameter_size_bytes": sum(parameter.nbytes for parameter in self._layouts.current.parameters),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": ", ".join(map(str, sizes)),
            "has_rebuilt_buckets": int(self.gradient_order is not None),
            "comm_hook": self._wishes.hook.name if self._wishes.hook is not None else "",
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "static_graph": int(self.static_graph),
            "gradient_as_bucket_view": 1,
            "has_error": int(self._last.error is not None),
        }

    @property
    def broadcast_buffers(self) -> bool:
        """Returns True if buffers are kept equal. Programs also change it after the replica was made."""
        return self._buffer_sync.mode != "none"

    @broadcast_buffers.setter
    def broadcast_buffers(self, keeps_equal: bool) -> None:
        if keeps_equal != self.broadcast_buffers:
            self._buffer_sync.mode = "broadcast" if keeps_equal else "none"

    forward_sync_buffers = broadcast_buffers

    def will_sync_module_buffers(self) -> bool:
        """Returns True if the next forward makes buffers equal first."""
        return self.require_forward_param_sync and self._buffer_sync.is_active

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Returns the inputs on a device, in the form in which `scatter` gives them for several."""
        device = torch.device(self.device_type, device_id)
        return (moved(inputs, device),), (moved(kwargs, device),)

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward alone; mmcv calls it between steps that it takes itself."""
        return self.module(*args, **kwargs)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Overwrites tensors with those of one rank. Collective."""
        broadcast_tensors(self.comm, [tensor.detach() for tensor in tensors], root=authoritative_rank)

    def _check_reducer_finalized(self) -> None:
        """Raises what the last backward found wrong."""
        self.raise_pending()
