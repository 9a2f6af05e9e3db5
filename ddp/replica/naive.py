"""The naive reducer: when backward has ended, one all-reduce per parameter. The whole idea of data parallelism.

Nothing overlaps and every parameter pays the latency of a message, so it is slow; it is also so plain that it can
be seen to be right. It is the first lesson, the oracle of the bucketed reducer, and its baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ddp.clock import Stopwatch
from ddp.comm.communicator import Communicator
from ddp.comm.setup import current
from ddp.gradients.totals import StepTotals
from ddp.replica.broadcast import broadcast_state
from ddp.replica.buffers import BufferSync
from ddp.replica.parameters import trainable
from ddp.replica.replica import Replica
from ddp.replica.sink import accumulates


class NaiveReducer:
    """An `AnyReducer`; a parameter that is frozen, or that no rank used, keeps the gradient that it had."""

    def __init__(self, comm: Communicator, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.comm, self.parameters = comm, dict(named_parameters)
        self.totals = StepTotals()
        self.waited, self.num_steps = Stopwatch(), 0
        self._in_backward = False
        self._mine: StepTotals | None = None

    def raise_pending(self) -> None:
        """Raises nothing: a step leaves nothing behind that could be wrong. One that broke off is forgotten."""
        self._in_backward = False

    @property
    def layout(self) -> list[list[str]]:
        """Each gradient travels alone."""
        return [[name] for name in self.parameters]

    @property
    def order(self) -> list[str] | None:
        """Of no importance here."""
        return None

    def adopt_order(self, names: Sequence[str]) -> None:
        """Of no importance here."""

    def ride_along(self, totals: StepTotals) -> None:
        """Adds this rank's part of the step's totals to the others'; gradients are divided by the global count then."""
        self._mine = totals

    def begin(self, *, in_backward: bool = True) -> bool:
        """Backward has reached an output, or a rank without samples joins in. True for the first call of a step."""
        if in_backward and not accumulates(list(self.parameters.values())):
            return False
        first, self._in_backward = not self._in_backward, True
        return first

    @torch.no_grad()
    def finish(self, *, had_backward: bool = True) -> None:
        """Backward has ended: one all-reduce for the totals, one for who has a gradient, one per gradient."""
        loss_sum, num_items, num_stopping = self._mine or StepTotals()
        sums = torch.tensor([loss_sum, num_items, num_stopping], dtype=torch.float64, device=self.comm.device)
        has_gradient = torch.tensor(
            [p.requires_grad and p.grad is not None for p in self.parameters.values()], device=self.comm.device
        )
        with self.waited.running():
            self.comm.all_reduce(sums, label="totals")
            self.comm.all_reduce(has_gradient, "max", label="who has a gradient")
        self.totals = StepTotals(sums[0].item(), int(sums[1]), int(sums[2]))
        divisor = self.comm.world_size if self._mine is None else max(1, self.totals.num_items)
        for (name, parameter), anyone in zip(self.parameters.items(), has_gradient.tolist(), strict=True):
            if anyone:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                with self.waited.running():
                    self.comm.all_reduce(gradient, label=name)
                parameter.grad = gradient.div_(divisor)
        self._mine, self._in_backward = None, False
        self.num_steps += 1


class NaiveDataParallel(Replica):
    """One all-reduce per parameter after backward: slow and plain. The baseline, and the first lesson."""

    def __init__(self, module: nn.Module, *, broadcast_buffers: bool = True, comm: Communicator | None = None) -> None:
        comm = comm or current()
        broadcast_state(comm, [*module.named_parameters(), *module.named_buffers()])
        trainable(list(module.named_parameters()))
        reducer = NaiveReducer(comm, module.named_parameters())  # also frozen ones, which may be unfrozen later
        super().__init__(module, comm, reducer, BufferSync(comm, module, "broadcast" if broadcast_buffers else "none"))
