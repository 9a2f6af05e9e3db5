"""Buffers (BatchNorm statistics and the like): kept equal before each forward in training mode.

    "broadcast"   everyone gets the values of one rank: rank 0, or under `join` the highest one that still has inputs
    "mean"        floating-point buffers become the mean over ranks; all others are broadcast
    "none"        every rank keeps its own

or a hook of the user's takes over: hook(state, {name: buffer}), which may return futures; they are awaited before
forward, or, if the hook runs after forward, when backward has ended.

Only a forward that leads to a synchronised backward does this. A forward in evaluation mode, without gradients, or
inside `no_sync` communicates nothing, so that one rank may evaluate alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.gradients.hook import await_future
from ddp.replica.broadcast import broadcast_tensors

Mode = Literal["broadcast", "mean", "none"]


class When(Enum):
    """Which side of forward a hook runs on. Names as in torch."""

    PRE_FORWARD = "before"
    POST_FORWARD = "after"


@dataclass
class BufferSync:
    """How one replica's buffers are kept equal.

    Args:
        ignored: names of buffers that are left alone.
    """

    comm: Communicator
    module: nn.Module
    mode: Mode
    ignored: Collection[str] = ()
    hook: Callable[[Any, dict[str, Tensor]], Any] | None = None
    state: Any = None
    when: When = When.POST_FORWARD
    _tables: list[tuple[str, dict[str, Tensor | None]]] = field(default_factory=list)  # every module's, with its name
    _futures: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"buffers={self.mode!r}: choose one of {', '.join(get_args(Mode))}")
        self.look_again()

    def look_again(self) -> None:
        """Modules came or went."""
        modules = self.module.named_modules()
        self._tables = [(f"{name}." if name else "", each._buffers) for name, each in modules if each._buffers]

    def named(self) -> dict[str, Tensor]:
        """The buffers as they are now: a module may have replaced some."""
        return {
            prefix + name: buffer
            for prefix, table in self._tables
            for name, buffer in table.items()
            if buffer is not None and prefix + name not in self.ignored
        }

    def run(self, when: When, *, root: int = 0) -> None:
        """What is due on this side of forward. Collective.

        Args:
            root: the rank that is right.
        """
        if self.mode == "none" or when is not (self.when if self.hook is not None else When.PRE_FORWARD):
            return
        buffers = self.named()
        if not buffers:
            return
        if self.hook is not None:
            futures = self.hook(self.state, buffers)
            if futures is not None:
                self._futures += futures if isinstance(futures, (list, tuple)) else [futures]
            if when is When.PRE_FORWARD:
                self.wait()
        elif self.mode == "mean":
            self.average(root)
        else:
            self.broadcast(root)

    def broadcast(self, root: int = 0) -> None:
        """Gives every rank the root's buffers."""
        self._broadcast(list(self.named().values()), root)

    def average(self, root: int = 0) -> None:
        """Gives every rank the mean of floating-point buffers, and the root's others."""
        buffers = [buffer.data for buffer in self.named().values()]
        real = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        if real:
            self.comm.all_reduce(real, "mean", label="mean of buffers")
        self._broadcast([buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())], root)

    def wait(self) -> None:
        """Waits for the futures of the hook."""
        while self._futures:
            await_future(self.comm, self._futures.pop(0), label="hook on buffers")

    def _broadcast(self, buffers: list[Tensor], root: int) -> None:
        # `.data` counts versions of its own: a graph that has saved the buffer in an earlier forward stays valid
        broadcast_tensors(self.comm, [buffer.data for buffer in buffers], root=root, label="buffers")
