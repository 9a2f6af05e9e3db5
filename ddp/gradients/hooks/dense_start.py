"""Dense start: the first steps send every gradient as it is.

While weights change fast, what is kept back is out of date when it is sent. So the first steps send all of it.
"""

from __future__ import annotations

from torch import Tensor

from ddp.errors import ConfigError
from ddp.gradients.hooks.hook import Around, Hook, is_whole


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
