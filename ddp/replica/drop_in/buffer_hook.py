"""A hook of the user that keeps buffers equal: `DistributedDataParallel.register_buffer_hook`.

    hook(state, {name: buffer})      may return futures; they are awaited before forward, or, if the hook runs after
                                     forward, when backward has ended
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor

from ddp.replica.buffers import BufferSync
from ddp.replica.drop_in.comm_hook import check_hook, result_of

BufferHook = Callable[[Any, dict[str, Tensor]], Any]


class When(Enum):
    """Says on which side of forward a hook runs; the names are torch's."""

    PRE_FORWARD = "before"
    POST_FORWARD = "after"


class HookedBuffers(BufferSync):
    """Buffers that a hook keeps equal.

    Args:
        of: the same buffers, without the hook.
    """

    def __init__(self, of: BufferSync, hook: BufferHook, state: Any, when: When) -> None:
        super().__init__(of.comm, of.module, of.mode, of.ignored)
        check_hook(hook)
        self._hook, self._state, self._when = hook, state, when
        self._futures: list[Any] = []

    def before_forward(self, root: int) -> None:
        if self._when is When.PRE_FORWARD:
            self._call()
            self._wait()

    def after_forward(self) -> None:
        if self._when is When.POST_FORWARD:
            self._call()

    def after_backward(self) -> None:
        self._wait()

    def _wait(self) -> None:
        """Waits for the hook's futures, whose results are of no interest: the hook has changed the buffers itself."""
        while self._futures:
            result_of(self.comm, self._futures.pop(0), hook="hook on buffers", where=f"{self._when.value} a forward")

    def _call(self) -> None:
        futures = self._hook(self._state, self.named())
        if futures is not None:
            self._futures += futures if isinstance(futures, (list, tuple)) else [futures]
