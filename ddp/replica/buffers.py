"""Buffers (BatchNorm statistics and the like): kept equal before forwards.

    "broadcast"   everyone gets the values of one rank: rank 0, or under `join` the highest one that still has inputs
    "mean"        floating-point buffers become the mean over ranks; all others are broadcast
    "none"        every rank keeps its own

Buffers are synchronised when torch's class does it. A forward that synchronises gradients changes buffers, so the next
forward synchronises the buffers first, whatever its mode. A forward without gradients, or inside `no_sync`, does so
only if it is that next one (`require_forward_param_sync` of the replica). So the first forward of an evaluation takes
rank 0's statistics on every rank. A rank that evaluates alone would wait for the others there; let it call
`replica.module`, or choose buffers="none". Under `join`, only forwards that synchronise gradients synchronise buffers,
because a rank without inputs takes part in no others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, get_args

from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.errors import CollectiveMismatch
from ddp.replica.broadcast import broadcast_tensors

Mode = Literal["broadcast", "mean", "none"]
BEFORE_FORWARD = "buffers before a forward; a rank that evaluates alone calls model.module, or passes buffers='none'"


class BufferSync:
    """Keeps one replica's buffers equal.

    Args:
        ignored: names of buffers that are left alone.

    Attributes:
        is_hooked: a function of the user's keeps them equal (`replica/drop_in/comm_hook.py`).
    """

    is_hooked = False

    def __init__(self, comm: Communicator, module: nn.Module, mode: Mode, ignored: Collection[str] = ()) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"buffers={mode!r}: choose one of {', '.join(get_args(Mode))}")
        self.comm, self.module, self.mode, self.ignored = comm, module, mode, ignored
        self.refresh()

    def refresh(self) -> None:
        """Finds the buffers anew, because modules were added or removed."""
        modules = self.module.named_modules()
        self._tables = [(f"{name}." if name else "", each._buffers) for name, each in modules if each._buffers]

    def named(self) -> dict[str, Tensor]:
        """Returns the buffers as they are now: a module may have replaced some."""
        return dict(self._found())

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, table in self._tables:
            for name, buffer in table.items():
                if buffer is not None and prefix + name not in self.ignored:
                    yield prefix + name, buffer

    @property
    def is_active(self) -> bool:
        """Returns True if there are buffers, and they are to be kept equal."""
        return self.mode != "none" and any(True for _ in self._found())

    def before_forward(self, root: int) -> None:
        """Makes the buffers equal. Collective.

        Args:
            root: the rank whose buffers are right.
        """
        try:
            if self.mode == "mean":
                self._average(root)
            else:
                self.broadcast(root, label=BEFORE_FORWARD)
        except CollectiveMismatch as mismatch:
            raise CollectiveMismatch(f"{BEFORE_FORWARD}: {mismatch}") from mismatch

    def after_forward(self) -> None:
        """Is called where `is_hooked`."""

    def after_backward(self) -> None:
        """Is called where `is_hooked`."""

    def broadcast(self, root: int = 0, *, label: str = "buffers") -> None:
        """Gives every rank the root's buffers."""
        self._broadcast(list(self.named().values()), root, label)

    def _average(self, root: int) -> None:
        """Gives every rank the mean of floating-point buffers, and the root's others."""
        buffers = [buffer.data for buffer in self.named().values()]
        real = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        if real:
            self.comm.all_reduce(real, "mean", label=BEFORE_FORWARD)
        others = [buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())]
        self._broadcast(others, root, BEFORE_FORWARD)

    def _broadcast(self, buffers: list[Tensor], root: int, label: str) -> None:
        # `.data` counts versions of its own: a graph that has saved the buffer in an earlier forward stays valid
        broadcast_tensors(self.comm, [buffer.data for buffer in buffers], root=root, label=label)
