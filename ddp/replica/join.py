"""Uneven inputs: a rank that has run out of them goes on taking part, with zeros.

    with model.join():
        for batch in my_batches:             every rank its own number of them
            loss(model(batch)).backward()
            optimizer.step()

Before each synchronised forward the ranks tell each other who still has inputs: one small message, under `join` only.
Whoever has none shadows the others' steps, buffers and buckets, contributing zeros, until nobody has. Then everyone
gets the model of a rank that went on to the end.

The context keeps a copy of the rank's own gradients and gives it back at the end: `p.grad` is then what the rank's own
last backward left. (Beside other joinables of torch's `Join`, `p.grad` is the mean of the others until then, because an
optimizer among them steps with it.)

Gradients are divided by the number of all ranks, or (divide_by_initial_world_size=False) of those that still had
inputs. With throw_on_early_termination every rank raises as soon as one has run out.

torch's own `Join` context works as well (several joinables: a ZeroRedundancyOptimizer, say): `TorchJoinHook`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

if TYPE_CHECKING:
    from ddp.replica.data_parallel import DistributedDataParallel


class Joining:
    """The context of `DistributedDataParallel.join`.

    Attributes:
        active: ranks that had inputs in the last step.
    """

    def __init__(
        self,
        replica: DistributedDataParallel,
        *,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool = False,
    ) -> None:
        self.replica, self._comm = replica, replica.comm
        self._divides_by_all, self._throws = divide_by_initial_world_size, throw_on_early_termination
        self.active = list(range(self._comm.world_size))
        self._own_gradients: list[tuple[nn.Parameter, Tensor | None]] = []  # on a rank that has run out

    def __enter__(self) -> None:
        self.replica.joining = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                while self.step_of_others():
                    pass
                self.give_everyone_the_last_model()
        finally:
            self.end()

    def end(self) -> None:
        """Gives back the rank's own gradients, and leaves the context."""
        for parameter, gradient in self._own_gradients:
            parameter.grad = gradient
        self._own_gradients.clear()
        self.replica.joining = None
        self.replica.reducer.mean.divide_by = self._comm.world_size

    def meet(self, *, has_inputs: bool) -> None:
        """Finds out who still has inputs. Collective.

        Raises:
            RuntimeError: one rank has none, and that is to end the loop on all.
        """
        flags = torch.zeros(self._comm.world_size, dtype=torch.uint8, device=self._comm.device)
        flags[self._comm.rank] = has_inputs
        active = self._comm.all_reduce(flags, "max", label="join: who has inputs").nonzero().flatten().tolist()
        if self._throws and 0 < len(active) < self._comm.world_size:
            exhausted = sorted(set(range(self._comm.world_size)) - set(active))
            raise RuntimeError(
                f"Detected at least one rank that exhausted inputs: rank(s) {exhausted}; all ranks stop here"
            )
        if active:
            self.active = active
            self.replica.reducer.mean.divide_by = self._comm.world_size if self._divides_by_all else len(active)

    def step_of_others(self) -> bool:
        """Shadows a step of the ranks that have inputs. False if none has."""
        before = self.active
        self.active = []
        self.replica.joining = self
        self.replica.prepare()  # as the others do before they meet
        self.meet(has_inputs=False)
        if not self.active:
            self.active = before
            return False
        if not self._own_gradients:  # copies, because the means of the others are written over them
            gradients = ((each, each.grad) for each in self.replica.parameters())
            self._own_gradients = [(each, None if had is None else had.clone()) for each, had in gradients]
        self.replica.zero_grad(set_to_none=True)  # what is left of its own last step counts no more
        self.replica.reduce_without_backward()
        return True

    def give_everyone_the_last_model(self) -> None:
        """Parameters and buffers of a rank that made every step."""
        self.replica.broadcast_from(self.active[-1])


class TorchJoinHook(JoinHook):
    """The hook that torch's `Join` context calls on a rank that has run out of inputs."""

    def __init__(self, joining: Joining) -> None:
        self._joining = joining

    def main_hook(self) -> None:
        """Others have inputs: shadows their step."""
        self._joining.step_of_others()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Nobody has."""
        self._joining.give_everyone_the_last_model()
        self._joining.end()
        self._joining.replica._join_config = _JoinConfig.construct_disabled_join_config()
