"""Uneven inputs: a rank that has run out of them goes on taking part, with zeros.

    with model.join():
        for batch in my_batches:             every rank its own number of them
            loss(model(batch)).backward()
            optimizer.step()

Before each synchronised forward the ranks tell each other who still has inputs: one small message, under `join` only.
A rank that has none shadows the others' steps: it takes part in their collectives, with zeros for gradients, until no
rank has inputs. Then every rank gets the model of a rank that went on to the end.

The context keeps a copy of the rank's own gradients and restores it at the end: `p.grad` is then what the rank's own
last backward left. (Inside torch's `Join` with several joinables, `p.grad` is the others' mean until then, because an
optimizer among the joinables steps with it.)

Gradients are divided by the number of all ranks, or (divide_by_initial_world_size=False) of those that still had
inputs. With throw_on_early_termination every rank raises as soon as one has run out.

torch's own `Join` context works as well (several joinables: a ZeroRedundancyOptimizer, say): `TorchJoinHook`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from ddp.comm.communicator import Communicator
from ddp.replica.drop_in.torch_names import TorchNames


class Joining:
    """Knows which ranks still have inputs, inside `DistributedDataParallel.join`.

    Attributes:
        active: ranks that had inputs in the last step.
        divisor: divisor of the sums over ranks.
    """

    def __init__(self, comm: Communicator, *, divides_by_all: bool, throws: bool = False) -> None:
        self._comm, self._divides_by_all, self._throws = comm, divides_by_all, throws
        self.active, self.divisor = list(range(comm.world_size)), comm.world_size
        self._own_gradients: list[tuple[nn.Parameter, Tensor | None]] = []  # on a rank that has run out

    def find_active(self, *, has_inputs: bool) -> bool:
        """Finds out who still has inputs. Returns False if no rank has. Collective.

        Raises:
            RuntimeError: a rank has run out, and `throw_on_early_termination` was asked for.
        """
        flags = torch.zeros(self._comm.world_size, dtype=torch.uint8, device=self._comm.device)
        flags[self._comm.rank] = has_inputs
        active = self._comm.all_reduce(flags, "max", label="join: who has inputs").nonzero().flatten().tolist()
        if self._throws and 0 < len(active) < self._comm.world_size:
            exhausted = sorted(set(range(self._comm.world_size)) - set(active))
            what = f"Detected at least one rank that exhausted inputs: rank(s) {exhausted}"
            if not has_inputs:
                what = f"Rank {self._comm.rank} exhausted all inputs"
            raise RuntimeError(f"{what}; all ranks stop here")
        if active:
            self.active = active
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


class TorchJoinHook(JoinHook):
    """The hook that torch's `Join` context calls on a rank that has run out of inputs.

    Args:
        shadow: shadows a step of the other ranks.
        end: ends the context.
    """

    def __init__(self, shadow: Callable[[], object], end: Callable[[], None]) -> None:
        self._shadow, self._end = shadow, end

    def main_hook(self) -> None:
        """Shadows a step, because other ranks have inputs."""
        self._shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends the context, because no rank has inputs any more."""
        self._end()


class UnevenInputs(TorchNames, Joinable):
    """A replica whose ranks may have different numbers of inputs.

    Attributes:
        joining: who still has inputs, inside `join`; None outside.
    """

    joining: Joining | None
    _joining_of_torch: Joining | None

    def _before_synchronised_forward(self) -> None:
        if self._join_config.enable:  # torch's Join
            Join.notify_join_context(self)
            self.joining = self._joining_of_torch
        if self.joining is not None:
            self.joining.find_active(has_inputs=True)

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Opens a context in which ranks may have different numbers of inputs (`join.py`).

        Args:
            divide_by_initial_world_size: divide by the number of all ranks; else of those that still have inputs.
            enable: False: the context does nothing.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one has run out.
        """
        if not enable:
            yield
            return
        joining = Joining(self.comm, divides_by_all=divide_by_initial_world_size, throws=throw_on_early_termination)
        self.joining = joining
        try:
            yield
            while self._shadow_step(joining):
                pass
            self.broadcast_from(joining.active[-1])
        finally:
            joining.give_back_own_gradients()
            self._leave_join()

    def join_hook(self, **kwargs: Any) -> TorchJoinHook:
        """Returns the hook for torch's `Join` context, which calls this with divide_by_initial_world_size."""
        joining = Joining(self.comm, divides_by_all=kwargs.get("divide_by_initial_world_size", True))
        self._joining_of_torch = joining
        return TorchJoinHook(partial(self._shadow_step, joining), partial(self._leave_join_of_torch, joining))

    def _shadow_step(self, joining: Joining) -> bool:
        """Takes part in a step of the ranks that have inputs, with zeros. Returns False if no rank has."""
        self.joining = joining
        self.prepare()  # as the others do before they look who has inputs
        if not joining.find_active(has_inputs=False):
            return False
        joining.keep_own_gradients(self.parameters())
        self.zero_grad(set_to_none=True)  # its own last gradients must not be sent again
        self.reduce_without_backward()
        return True

    def _leave_join_of_torch(self, joining: Joining) -> None:
        self.broadcast_from(joining.active[-1])
        joining.give_back_own_gradients()
        self._leave_join()
        self._join_config = _JoinConfig.construct_disabled_join_config()

    def _leave_join(self) -> None:
        self.joining = self._joining_of_torch = None

    @property
    def join_device(self) -> torch.device:
        """The device of torch's `Join`."""
        return self.comm.device

    @property
    def join_process_group(self) -> Any:
        """The process group of torch's `Join`."""
        return self.process_group

    @property
    def _divisor(self) -> int:
        return super()._divisor if self.joining is None else self.joining.divisor

    @property
    def _all_make_steps(self) -> bool:
        return self.joining is None or len(self.joining.active) == self.comm.world_size

    @property
    def _is_joined(self) -> bool:
        return self.joining is not None or self._join_config.enable

    @property
    def _root(self) -> int:
        return self.joining.active[-1] if self.joining is not None else 0
