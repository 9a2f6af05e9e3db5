"""Holds what the threads of a server share: what workers have pushed, how far the updates are, and the ledger.

Note "two locks". `parameters_lock` guards parameters and buffers. The main thread holds it while it changes them,
evaluates or saves, and frees it while it waits for an update: a pull takes it, and so never sends half an update.
`changed` guards the rest where it is written, and is held only briefly. A thread that takes both takes
`parameters_lock` first.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ddp.process.clock import now_s
from ddp.strategies.parameter_server.ledger import Ledger


class Push(NamedTuple):
    """Holds what a worker has returned for a part of a step.

    Attributes:
        flats: mean gradients over the part's items, one for each dtype (`Edge.taken`).
        loss_sum, num_items: of the part.
        buffers: those of the model that have changed, by name.
        without: names of the parameters that got no gradient.
    """

    flats: Sequence[Tensor]
    loss_sum: float
    num_items: float
    buffers: Mapping[str, Tensor]
    without: Sequence[str]


class Shared:
    """Holds what the threads of a server share.

    Args:
        ledger: that of server 0; on the others it stays empty.

    Attributes:
        version: updates that are made.
        pushed: what is in no update yet, by step, part and worker.
        buffers: those of the model that workers have changed, by name.
        indices: of the workers that have come, by their numbers, which no two have.
        num_here: workers that are connected.
        empty_since_s: since when there is none.
        over: plain values of the run's end for workers, once it has ended.
        error: of a thread, for the main one.
        num_changes: how often `notify` was called.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.version = ledger, ledger.version
        self.pushed: dict[tuple[int, int, int], Push] = {}
        self.buffers: dict[str, Tensor] = {}
        self.indices: dict[int, int] = {}
        self.num_here, self.empty_since_s = 0, now_s()
        self.over: dict[str, Any] | None = None
        self.error: BaseException | None = None
        self.num_changes = 0
        self.changed, self.parameters_lock = threading.Condition(), threading.Lock()

    def notify(self) -> None:
        """Lets all threads look again; with `changed` held."""
        self.num_changes += 1
        self.changed.notify_all()

    def wait_for_change(self, num_changes: int, limit_s: float) -> None:
        """Waits until there have been more changes than these, or a worker is late; with `changed` held."""
        if self.num_changes == num_changes:
            late_s = self.ledger.next_late_s(now_s())
            self.changed.wait(limit_s if late_s is None else min(limit_s, late_s))
