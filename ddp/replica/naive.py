"""The naive replica: one all-reduce per parameter, once backward has ended. It is the whole idea of data parallelism.

    every rank has a copy of the model, and its own part of the batch
    forward, backward      each rank by itself: the gradients of its own part
    all-reduce, divide     each gradient becomes the mean over all ranks; where totals ride along, over all samples
    optimizer step         the same everywhere, so the copies stay equal

Nothing overlaps, and every parameter costs the latency of a message, so it is slow. But it is simple enough to check by
eye. It is the first lesson, and both the reference and the baseline for the bucketed replica.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddp.gradients.totals import Totals, count_of
from ddp.replica.autograd import accumulates, uncompiled, watch_backward
from ddp.replica.broadcast import BufferSync, broadcast_state, check_trainable
from ddp.replica.replica import Replica

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator


class NaiveDataParallel(Replica):
    """Averages gradients by one all-reduce per parameter after backward.

    A parameter that has no gradient on any rank, or is frozen on all, is left alone.

    Args:
        module: at least one parameter must need a gradient. Its parameters and buffers become rank 0's.
        broadcast_buffers: before each forward in training mode, buffers become rank 0's.
        comm: the ranks that take part; all by default.

    Raises:
        ReplicaMismatch: the ranks' models differ in a name, shape, dtype, memory format, or in what is frozen.
        ConfigError: no parameter needs a gradient.
    """

    def __init__(self, module: nn.Module, *, broadcast_buffers: bool = True, comm: Communicator | None = None) -> None:
        if comm is None:
            from ddp.comm.opening import device_of
            from ddp.comm.session import current  # which imports all parts of a communicator

            comm = current(device_of(module))
        check_trainable(list(module.named_parameters()))
        broadcast_state(comm, [*module.named_parameters(), *module.named_buffers()])
        super().__init__(module, comm, BufferSync(comm, module, "broadcast" if broadcast_buffers else "none"))
        self._is_in_backward = False

    def prepare(self, *, in_forward: bool = False) -> None:
        """Forgets a backward that broke off. It left nothing in flight, because averaging begins at its end."""
        self._is_in_backward = False

    @property
    def _awaits_backward(self) -> bool:
        return self._is_in_backward

    def _watch_outputs(self, outputs: Any) -> None:
        watch_backward(outputs, self._begin, self._finish)

    def _begin(self, adds_to_all: bool) -> bool:
        """Records that backward has reached an output. Returns True for the first one, if parameters get gradients."""
        if self._is_in_backward or not (adds_to_all or accumulates(list(self.module.parameters()))):
            return False
        self._is_in_backward = True
        return True

    @torch.no_grad()
    @uncompiled
    def _finish(self) -> None:
        """All-reduces the totals, then a flag for each parameter that has a gradient, then each gradient."""
        mine, self.riding = self.riding, None
        named = list(self.module.named_parameters())
        sums = torch.tensor((mine or Totals())[:4], dtype=torch.float64, device=self.comm.device)
        has_gradient = torch.tensor([p.requires_grad and p.grad is not None for _, p in named], device=self.comm.device)
        with self.waited.running():
            self.comm.all_reduce(sums, label="totals")
            self.comm.all_reduce(has_gradient, "max", label="who has a gradient")
        (loss_sum, num_items, stopping, ending), anyone_has = self.comm.to_host(sums, has_gradient).read()
        totals = Totals(loss_sum, count_of(num_items), int(stopping), int(ending))
        divisor = self.comm.world_size if mine is None else (totals.num_items or 1) * mine.loss_scale
        for (name, parameter), anyone in zip(named, anyone_has, strict=True):
            # exercise 06: if any rank has this gradient, every rank gets the sum over all ranks, divided
            if anyone:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                with self.waited.running():
                    self.comm.all_reduce(gradient, label=name)
                parameter.grad = gradient.div_(divisor)
        self._is_in_backward = False
        self._end_step(totals)
