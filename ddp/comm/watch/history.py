"""Remembers the last calls of a communicator, for whoever looks into a run that has failed, or profiles one.

A call is noted when it begins to run, and once more when it has ended. So of a run that fails, the calls without an end
are those that it has failed in. That takes less than a microsecond a call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ddp.comm.watch.call import Call
from ddp.process.clock import now_s

NUM_CALLS = 1000


class Noted:
    """A call, and when it ran on this rank.

    Attributes:
        thread: the number of the thread in which it ran.
        began_s, done_s: on this process's clock; `done_s` is 0 unless it has ended well. On a GPU the host has begun to
            enqueue it, and has seen that the GPU is through with it.
    """

    __slots__ = ("began_s", "call", "done_s", "thread")

    def __init__(self, call: Call) -> None:
        self.call, self.thread, self.began_s, self.done_s = call, threading.get_ident(), now_s(), 0.0


class Recorder(Protocol):
    """Measures a communicator: each method is called in the thread, and on a GPU for the stream, that it is about."""

    def began(self, noted: Noted) -> None:
        """Takes note that a call begins."""

    def ended(self, noted: Noted) -> None:
        """Takes note that a call has ended well."""

    def waiting(self) -> AbstractContextManager[None]:
        """Begins a block that waits for a call."""


class History:
    """The last calls of a communicator, in the order in which they began.

    Attributes:
        recorder: told of each call; None: nobody measures.
    """

    def __init__(self) -> None:
        self._noted: deque[Noted] = deque(maxlen=NUM_CALLS)
        self.recorder: Recorder | None = None

    def note(self, call: Call) -> Noted:
        """Notes that a call begins to run in this thread."""
        noted = Noted(call)
        self._noted.append(noted)
        if self.recorder is not None:
            self.recorder.began(noted)
        return noted

    def since(self, moment_s: float = 0.0) -> list[Noted]:
        """Returns the calls that have begun since a moment."""
        return [noted for noted in self._noted.copy() if noted.began_s >= moment_s]


def plain_calls(noted: Iterable[Noted], **more: Any) -> list[dict[str, Any]]:
    """Returns calls as plain values, with times in seconds since 1970, as far as the clocks of the hosts agree.

    Args:
        more: said of each call.
    """
    since_1970_s = time.time() - now_s()
    lines = []
    for each in noted:
        call = each.call
        facts = {
            "number": call.sequence if call.message is None else call.message.number,
            "operation": call.operation,
            "op": call.op,
            "to" if call.message is None else call.message.direction: call.message and call.message.peer,
            "shape": call.shape and list(call.shape),
            "dtype": call.dtype and str(call.dtype).removeprefix("torch."),
            "label": call.name,
            **more,
        }
        times = {"began_s": since_1970_s + each.began_s, "done_s": since_1970_s + each.done_s if each.done_s else None}
        lines.append({key: value for key, value in facts.items() if value not in (None, "")} | times)
    return lines
