"""Error feedback: what one step did not send is added to what the next one sends.

    outgoing = gradient + residual         the hook inside sends a part of it
    residual = outgoing − what was sent

So nothing is lost, only late: sent + kept = there, on every rank. Without it a biased hook such as `sign` goes astray.
So the hooks of this package have it around them unless they are made with `error_feedback=False`.
The residual is in units of the mean gradient, as is everything that hooks see; so one from a large batch weighs no more
in a small one.

It takes two tensors of this rank's part of the gradients (`hook.py`).

Source: Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv 1901.09847, algorithm 2; the idea is from Seide et
al., "1-Bit Stochastic Gradient Descent", Interspeech 2014.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ddp.errors import ConfigError
from ddp.gradients.hooks.hook import Around, Hook, Memory, Parcel, is_whole, wide


def corrected(hook: Hook) -> Hook:
    """Returns the hook with error feedback, unless it has it already or does without."""
    if isinstance(hook, ErrorFeedback):
        return hook
    if isinstance(hook, Around):
        around = copy.copy(hook)
        around.hook = corrected(hook.hook)
        return around
    return ErrorFeedback(hook) if hook.error_feedback else hook


class ErrorFeedback(Around):
    """Adds to each gradient what the last steps have not sent of it.

    Args:
        hook: sends a part of what it gets.
    """

    def __init__(self, hook: Hook) -> None:
        super().__init__(hook)
        self._residual = Memory("summed")
        self.is_corrected = True

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.hook!r})"

    def enter(self, parcel: Parcel) -> None:
        super().enter(parcel)
        residual = self._residual.committed.get(parcel.name)
        if residual is None and parcel.is_dense:
            return
        room = self._residual.buffer_for(parcel.name, parcel.outgoing, wide(parcel.outgoing.dtype))
        if residual is None or residual.shape != room.shape:
            parcel.outgoing = room.copy_(parcel.outgoing)
        else:
            parcel.outgoing = torch.add(residual, parcel.outgoing, out=room)

    def leave(self, parcel: Parcel) -> None:
        super().leave(parcel)
        if parcel.is_dense and parcel.name in self._residual.pending:
            self._residual.forget(parcel.name)

    def memories(self) -> dict[str, Memory]:
        return {**super().memories(), "residual": self._residual}


# --- A dense start ---------------------------------------------------------------------------------------------------
#
# Dense start: the first steps send every gradient as it is.
#
# While weights change fast, what is kept back is out of date when it is sent. So the first steps send all of it.


class DenseStart(Around):
    """Sends gradients as they are for some steps, and then by another hook.

    Args:
        hook: sends from then on.
        steps: so many steps, counted from the first one with this hook, also if the run is resumed.

    Raises:
        ConfigError: `steps` is negative.
    """

    def __init__(self, hook: Hook, steps: int) -> None:
        if not (is_whole(steps) and steps >= 0):
            raise ConfigError(f"DenseStart(steps={steps!r}): must be a number of steps, from 0 up")
        super().__init__(hook)
        self.steps = steps

    def __repr__(self) -> str:
        return f"DenseStart({self.hook!r}, {self.steps})"

    def takes(self, gradient: Tensor, shape: tuple[int, int], step: int) -> bool:
        return step >= self.steps and super().takes(gradient, shape, step)
