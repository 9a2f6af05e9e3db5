"""Uneven inputs: a rank that has run out of them continues to take part, with zeros.

    with model.join():
        for batch in my_batches:             any number of batches on each rank
            loss(model(batch)).backward()
            optimizer.step()

Before each synchronised forward the ranks exchange which of them have inputs: one small message, under `join` only. A
rank that has none shadows the others' steps: it takes part in their collectives, with zeros for gradients, until no
rank has inputs. Then every rank gets the model of a rank that continued to the end.

The context keeps a copy of the rank's own gradients and restores it at the end: `p.grad` is then the result of the
rank's own last backward. (Inside torch's `Join` with several joinables, `p.grad` is the others' mean until then,
because an optimizer among the joinables steps with it.)

Gradients are divided by the number of all ranks, or (divide_by_initial_world_size=False) of those that still had
inputs. With throw_on_early_termination every rank raises as soon as one has run out.

torch's own `Join` context works as well (several joinables: a ZeroRedundancyOptimizer, say): `TorchJoinHook`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, JoinHook

from ddp.comm.communicator import Communicator
from ddp.replica.replica import Inputs, Replica


class Joining(Inputs):
    """The ranks that still have inputs, inside a context.

    Args:
        divides_by_all: divide by the number of all ranks; else of those that still have inputs.
        throws: raise RuntimeError on every rank as soon as one has run out.
    """

    may_end = True

    def __init__(self, comm: Communicator, *, divides_by_all: bool, throws: bool = False) -> None:
        super().__init__(comm)
        self._comm, self._divides_by_all, self._throws = comm, divides_by_all, throws
        self._own_gradients: list[tuple[nn.Parameter, Tensor | None]] = []  # on a rank that has run out

    @contextmanager
    def around(self, replica: Replica) -> Iterator[None]:
        """Opens the context for a replica."""
        replica.inputs = self
        try:
            yield
            while self.shadow_step(replica):
                pass
            replica.broadcast_from(self.root)
        finally:
            self.give_back_own_gradients()
            replica.inputs = Inputs(replica.comm)

    def shadow_step(self, replica: Replica) -> bool:
        """Takes part in a step of the ranks that have inputs, with zeros. Returns False if no rank has."""
        replica.inputs = self
        replica.prepare()  # as the others do before they exchange which ranks have inputs
        if not self.find_active(has_inputs=False):
            return False
        self.keep_own_gradients(replica.parameters())
        replica.zero_grad(set_to_none=True)  # its own last gradients must not be sent again
        replica.reduce_without_backward()
        return True

    def announce(self) -> None:
        self.find_active(has_inputs=True)

    def find_active(self, *, has_inputs: bool) -> bool:
        """Finds out which ranks still have inputs. Returns False if no rank has. Collective.

        Raises:
            RuntimeError: a rank has run out, and `throw_on_early_termination` was asked for.
        """
        flags = torch.zeros(self._comm.world_size, dtype=torch.uint8, device=self._comm.device)
        flags[self._comm.rank] = has_inputs
        self._comm.all_reduce(flags, "max", label="join: who has inputs")
        active = [rank for rank, is_active in enumerate(self._comm.to_host(flags).read()[0]) if is_active]
        if self._throws and 0 < len(active) < self._comm.world_size:
            exhausted = sorted(set(range(self._comm.world_size)) - set(active))
            what = f"Detected at least one rank that exhausted inputs: rank(s) {exhausted}"
            if not has_inputs:
                what = f"Rank {self._comm.rank} exhausted all inputs"
            raise RuntimeError(f"{what}; all ranks stop here")
        if active:
            self.root, self.all_step = active[-1], len(active) == self._comm.world_size
            self.divisor = self._comm.world_size if self._divides_by_all else len(active)
        return bool(active)

    def keep_own_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copies the gradients of the rank's own last backward, because the means of others are written over them."""
        if not self._own_gradients:
            gradients = ((each, each.grad) for each in parameters)
            self._own_gradients = [(each, None if had is None else had.clone()) for each, had in gradients]

    def give_back_own_gradients(self) -> None:
        """Ends the context: gradients are the rank's own again."""
        for parameter, gradient in self._own_gradients:
            parameter.grad = gradient


class TorchJoining(Joining):
    """The ranks that still have inputs, inside torch's `Join` context, which may be switched off."""

    def __init__(self, replica: Replica, *, divides_by_all: bool) -> None:
        super().__init__(replica.comm, divides_by_all=divides_by_all)
        self._replica = replica

    @property
    def may_end(self) -> bool:  # type: ignore[override]
        return bool(self._replica._join_config.enable)  # type: ignore[union-attr]

    def announce(self) -> None:
        Join.notify_join_context(self._replica)  # type: ignore[arg-type]  # a virtual subclass of it
        super().announce()


class TorchJoinHook(JoinHook):
    """The hook that torch's `Join` context calls on a rank that has run out of inputs.

    Args:
        keywords: those of torch's context.
    """

    def __init__(self, replica: Replica, keywords: dict[str, Any]) -> None:
        self._replica = replica
        divides_by_all = keywords.get("divide_by_initial_world_size", True)
        self.joining = replica.inputs = TorchJoining(replica, divides_by_all=divides_by_all)

    def main_hook(self) -> None:
        """Shadows a step, because other ranks have inputs."""
        self.joining.shadow_step(self._replica)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends the context, because no rank has inputs any more."""
        self._replica.broadcast_from(self.joining.root)
        self.joining.give_back_own_gradients()
        self._replica.inputs = Inputs(self._replica.comm)
