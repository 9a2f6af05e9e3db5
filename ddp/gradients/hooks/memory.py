"""The memory of a hook, by parameter name: what it had before a step, and what it has after it.

A step may be rolled back, because a gradient was not finite, say. So a hook reads from the memory of the last committed
step, and writes into another one, until the step is committed or rolled back. That doubles the memory: two tensors for
each that is kept.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["summed", "same"]


class Memory:
    """Tensors of a hook, by parameter name.

    Args:
        kind: "summed": each rank has its own, of what it carries, and what counts is their sum over hosts; "same":
            every rank has the same.

    Attributes:
        committed: those of the last committed step.
        pending: those of the step that is not yet committed.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.committed: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}

    def buffer_for(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns memory of this shape for what is pending, with anything in it."""
        spare = self._spare.pop(name, None)
        if spare is None or (spare.shape, spare.dtype, spare.device) != (like.shape, dtype, like.device):
            spare = torch.empty_like(like, dtype=dtype)
        self.pending[name] = spare
        return spare

    def forget(self, name: str) -> None:
        """Keeps nothing of this parameter once the step is committed."""
        self.pending[name] = torch.empty(0)

    def commit(self) -> None:
        """Commits what is pending."""
        for name, tensor in self.pending.items():
            if (former := self.committed.pop(name, None)) is not None:
                self._spare[name] = former
            if tensor.numel():
                self.committed[name] = tensor
        self.pending.clear()

    def roll_back(self, name: str | None = None) -> None:
        """Drops what is pending, of one parameter or of all."""
        for each in list(self.pending) if name is None else [name]:
            if (tensor := self.pending.pop(each, None)) is not None:
                self._spare[each] = tensor
