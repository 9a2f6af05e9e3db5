"""The module around a model that keeps its replicas equal: `DistributedDataParallel`.

    model = ddp.DistributedDataParallel(net)        # rank 0's parameters everywhere
    loss = criterion(model(x), y)                   # forward as ever; the outputs are watched
    loss.backward()                                 # gradients are averaged over all ranks meanwhile
    optimizer.step()                                # the same on every rank, so replicas stay bitwise equal

It is `torch.nn.parallel.DistributedDataParallel` to its users: the same keywords where they mean something here,
and the same `state_dict` (keys begin with "module."; loading takes them with and without). What it adds is the
*sum* form for `ddp.fit`: `ride_along` sends loss and sample count with the gradients, which are then divided by the
global count.

`Replica` is the part that any reducer needs; the bucketed and the naive one differ in the reducer alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddp.clock import Stopwatch
from ddp.comm.communicator import Communicator
from ddp.comm.setup import current
from ddp.gradients.totals import StepTotals
from ddp.replica.broadcast import broadcast_module, broadcast_tensors
from ddp.replica.naive import NaiveReducer
from ddp.replica.reducer import Reducer
from ddp.replica.sink import watch_backward

MIB = 1 << 20
PREFIX = "module."
USE_INSTEAD = {
    "process_group": "ddp.init() decides who takes part; call it before",
    "device_mesh": "ddp.init() decides who takes part; call it before",
    "mixed_precision": "precision=bf16 of ddp.fit, or torch.autocast around forward",
    "static_graph": "find_unused_parameters=True handles graphs with and without change",
    "check_reduction": "nothing: the reduction is always checked",
    "delay_all_reduce_named_params": "a parameter that needs no reduction gets requires_grad=False",
    "param_to_hook_all_reduce": "a parameter that needs no reduction gets requires_grad=False",
}


class Replica(nn.Module):
    """One worker's copy of a model, kept equal to the others by a reducer."""

    def __init__(
        self, module: nn.Module, comm: Communicator, reducer: Reducer | NaiveReducer, *, broadcast_buffers: bool
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._comm, self._reducer = comm, reducer
        self.register_load_state_dict_pre_hook(_accept_plain_keys)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; a backward through what it returns ends with equal gradients on all ranks."""
        synchronise = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronise:
            self._prepare_step()
        outputs = self.module(*args, **kwargs)
        if synchronise:
            watch_backward(outputs, self._reducer.begin, self._reducer.finish)
        return outputs

    def _prepare_step(self) -> None:
        """What every rank does at the start of a step, also one that has nothing to compute."""
        self._reducer.raise_pending()
        if self.broadcast_buffers and self.training:
            self.sync_buffers()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward and backward inside add to this rank's gradients only; the next backward outside sends the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def sync_buffers(self) -> None:
        """Gives every rank rank 0's buffers (BatchNorm statistics and the like)."""
        buffers = list(self.module.buffers())
        if buffers:
            broadcast_tensors(self._comm, buffers, label="buffers")

    # --- the sum form, for ddp.fit -----------------------------------------------------------------------------------

    def ride_along(self, totals: StepTotals) -> None:
        """Call before the step's last backward: gradients become global sums divided by the global count."""
        self._reducer.ride_along(totals)

    def reduce_without_backward(self) -> None:
        """Takes part in a step for which this rank has no samples (or none that needed a backward)."""
        self._prepare_step()
        if self._reducer.begin():
            self._reducer.finish(had_backward=False)

    def raise_pending(self) -> None:
        """Raises, on every rank alike, what the last backward found wrong (UnusedParameters)."""
        self._reducer.raise_pending()

    @property
    def bucket_layout(self) -> list[list[str]]:
        """Names of the gradients that are reduced together; the bits of a ring depend on it."""
        return self._reducer.layout

    @property
    def totals(self) -> StepTotals:
        """What the last step's totals added up to, over all ranks."""
        return self._reducer.totals

    @property
    def waited(self) -> Stopwatch:
        """Time that backward had to wait for the other ranks."""
        return self._reducer.waited


class DistributedDataParallel(Replica):
    """Averages gradients over all ranks in buckets, while backward runs. Drop-in for torch's class of this name.

    Args:
        module: at least one parameter must need a gradient. Its parameters and buffers become rank 0's.
        device_ids, output_device: one device at most, which must be the module's; there is one device per process.
        broadcast_buffers: send rank 0's buffers to all before each forward in training mode.
        init_sync: compare and broadcast parameters and buffers now.
        bucket_cap_mb: size at which a bucket is closed, in MiB; the first one at 1 MiB.
        find_unused_parameters: parameters may go without a gradient.
        gradient_as_bucket_view: gradients always are views of their buckets; False is accepted and means the same.

    Raises:
        ReplicaMismatch: the ranks' models differ in a name, shape or dtype.
        ValueError: no parameter needs a gradient.
        TypeError: a keyword that means nothing here; says what to use.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        *,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float = 1.0,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        comm: Communicator | None = None,
        **others: Any,
    ) -> None:
        _refuse(others)
        comm = comm or current()
        _check_devices(module, device_ids, output_device)
        if init_sync:
            broadcast_module(comm, module)
        reducer = Reducer(
            comm,
            trainable(module),
            first_bucket_bytes=int(first_bucket_mb * MIB),
            bucket_bytes=int((25 if bucket_cap_mb is None else bucket_cap_mb) * MIB),
            find_unused_parameters=find_unused_parameters,
        )
        super().__init__(module, comm, reducer, broadcast_buffers=broadcast_buffers)


class NaiveDataParallel(Replica):
    """One all-reduce per parameter after backward: slow and plain. The baseline, and the first lesson."""

    def __init__(self, module: nn.Module, *, broadcast_buffers: bool = True, comm: Communicator | None = None) -> None:
        comm = comm or current()
        broadcast_module(comm, module)
        super().__init__(module, comm, NaiveReducer(comm, trainable(module)), broadcast_buffers=broadcast_buffers)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that need a gradient, each once even if shared, in registration order.

    Raises:
        ValueError: there are none.
    """
    found = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not found:
        raise ValueError("no parameter of the module needs a gradient: there is nothing to keep equal; use it as it is")
    return found


def _refuse(others: dict[str, Any]) -> None:
    for keyword, value in others.items():
        if keyword not in USE_INSTEAD:
            raise TypeError(f"DistributedDataParallel got an unexpected keyword {keyword!r}")
        if value:
            raise TypeError(
                f"DistributedDataParallel does not take {keyword}={value!r}; instead: {USE_INSTEAD[keyword]}"
            )


def _check_devices(module: nn.Module, device_ids: Any, output_device: Any) -> None:
    devices = {parameter.device for parameter in module.parameters()}
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids={device_ids}: one process drives one device; start one worker per device")
    for given in (*(device_ids or ()), *(() if output_device is None else (output_device,))):
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
        if devices != {device}:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"device {device} was given, but the module's parameters are on {found}; move it first")


def _accept_plain_keys(replica: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Lets a checkpoint of the bare module load into its replica."""
    wanted = {prefix + key for key in replica.state_dict()}
    for key in [key for key in state_dict if key.startswith(prefix) and key not in wanted]:
        wrapped = prefix + PREFIX + key.removeprefix(prefix)
        if wrapped in wanted and wrapped not in state_dict:
            state_dict[wrapped] = state_dict.pop(key)
