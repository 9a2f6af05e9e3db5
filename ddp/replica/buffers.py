"""Buffers (BatchNorm statistics and the like): kept equal before forwards.

    "broadcast"   everyone gets the values of one rank: rank 0, or under `join` the highest one that still has inputs
    "mean"        floating-point buffers become the mean over ranks; all others are broadcast
    "none"        every rank keeps its own

or a hook of the user's takes over: hook(state, {name: buffer}), which may return futures; they are awaited before
forward, or, if the hook runs after forward, when backward has ended.

When: as torch's class does it. A forward that synchronises gradients changes buffers, so the next forward synchronises
them first, whatever its mode; a forward without gradients, or inside `no_sync`, does so only if it is that next one
(`require_forward_param_sync` of the replica). So the first forward of an evaluation takes rank 0's statistics, on every
rank, and a rank that evaluates alone would wait for the others: it calls `replica.module`, or keeps buffers="none".
Under `join` only forwards that synchronise gradients do it, because no others are shadowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.errors import CollectiveMismatch
from ddp.gradients.hook import await_future
from ddp.replica.broadcast import broadcast_tensors

Mode = Literal["broadcast", "mean", "none"]
BEFORE_FORWARD = "buffers before a forward (a rank that evaluates alone calls model.module, or passes buffers='none')"


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
        return dict(self._found())

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, table in self._tables:
            for name, buffer in table.items():
                if buffer is not None and prefix + name not in self.ignored:
                    yield prefix + name, buffer

    @property
    def is_active(self) -> bool:
        """True if there are buffers, and they are to be kept equal."""
        return self.mode != "none" and any(True for _ in self._found())

    def run(self, when: When, *, root: int = 0) -> None:
        """What is due on this side of forward. Collective.

        Args:
            root: the rank that is right.
        """
        if when is not (self.when if self.hook is not None else When.PRE_FORWARD):
            return
        try:
            self._run(when, root)
        except CollectiveMismatch as mismatch:
            raise CollectiveMismatch(f"{BEFORE_FORWARD}: {mismatch}") from mismatch

    def _run(self, when: When, root: int) -> None:
        if self.hook is not None:
            futures = self.hook(self.state, self.named())
            if futures is not None:
                self._futures += futures if isinstance(futures, (list, tuple)) else [futures]
            if when is When.PRE_FORWARD:
                self.wait()
        elif self.mode == "mean":
            self.average(root)
        else:
            self.broadcast(root, label=BEFORE_FORWARD)

    def broadcast(self, root: int = 0, *, label: str = "buffers") -> None:
        """Gives every rank the root's buffers."""
        self._broadcast(list(self.named().values()), root, label)

    def average(self, root: int = 0) -> None:
        """Gives every rank the mean of floating-point buffers, and the root's others."""
        buffers = [buffer.data for buffer in self.named().values()]
        real = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        if real:
            self.comm.all_reduce(real, "mean", label=BEFORE_FORWARD)
        others = [buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())]
        self._broadcast(others, root, BEFORE_FORWARD)

    def wait(self) -> None:
        """Waits for the futures of the hook."""
        while self._futures:
            await_future(self.comm, self._futures.pop(0), label="hook on buffers")

    def _broadcast(self, buffers: list[Tensor], root: int, label: str) -> None:
        # `.data` counts versions of its own: a graph that has saved the buffer in an earlier forward stays valid
        broadcast_tensors(self.comm, [buffer.data for buffer in buffers], root=root, label=label)
