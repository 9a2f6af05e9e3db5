"""A call: a collective or a message, its number, its description in errors, and the history of the last calls.

A description is formatted only when it is read, because for a collective of a few microseconds, formatting a string
would take a tenth of the time.

The history serves for post-mortems and profiles. A call is recorded when it begins to run, and when it has ended. So
the calls without an end are those in which a run has failed. Recording takes less than a microsecond per call.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch.autograd import profiler

from ddp.process.clock import now_s

Result = TypeVar("Result")

Direction = Literal["to", "from"]
LONGEST_KIND = 160  # characters; the slices of many ranks take more


class Envelope(NamedTuple):
    """A message as seen by one of its two ranks.

    Attributes:
        direction, peer: this rank sends it to that peer, or receives it from there.
        number: the message's number among those in this direction, from 1.
        shape, dtype: of the tensor on this rank.
    """

    direction: Direction
    peer: int
    number: int
    shape: Sequence[int]
    dtype: str

    @property
    def route(self) -> str:
        """The direction and the other rank."""
        return f"{self.direction} rank {self.peer}"

    @property
    def kind(self) -> tuple[int, str]:
        """The number of elements and the dtype, which must agree between the two ranks."""
        return prod(self.shape), self.dtype

    def on_peer(self, rank: int) -> tuple[Direction, int, int]:
        """Returns direction, peer and number of the same message on the other rank; `rank` is this one."""
        return "to" if self.direction == "from" else "from", rank, self.number


class Call(NamedTuple):
    """One call on one rank. For a collective, it is equal on all ranks if they make the same call.

    A message's call has the number of the last collective before it: all collectives up to that one are complete.
    """

    sequence: int
    operation: str
    op: str = ""
    shape: tuple[int, ...] | None = None  # None: may differ by rank
    dtype: torch.dtype | None = None
    name: str = ""  # the caller's label
    how: tuple[object, ...] = ()  # other properties that must agree
    message: Envelope | None = None  # None: it is a collective

    @property
    def label(self) -> str:
        """The caller's label; else the operation and the shape."""
        if self.name:
            return self.name
        return self.operation if self.shape is None else f"{self.operation} of {list(self.shape)}"

    @property
    def title(self) -> str:
        """The number and the label."""
        if self.message is None:
            return f"collective #{self.sequence} [{self.label}]"
        return f"message #{self.message.number} {self.message.route} [{self.label}]"

    @property
    def range(self) -> str:
        """The name in a profile: the label without its "step 12, ", so that the steps add up, and its "; remedy"."""
        return f"ddp: {self._what}"

    @property
    def wait_range(self) -> str:
        """The name in a profile of the wait for it, on the thread that waits."""
        return f"ddp: wait for {self._what}"

    @property
    def _what(self) -> str:
        label = self.label.partition("; ")[0]
        step, comma, what = label.partition(", ")
        return what if comma and step.startswith("step ") else label

    def describe(self) -> str:
        """Returns all that must agree between ranks, the label and the shape included."""
        shape = "" if self.shape is None else f"of {list(self.shape)}"
        return f"#{self.sequence} {self._words(shape)}" + (f" [{self.name}]" if self.name else "")

    @property
    def kind(self) -> str:
        """The properties that must agree on all ranks, as text: operation, number of elements, dtype and the like."""
        words = self._words("" if self.shape is None else f"of {prod(self.shape)}")
        if len(words) <= LONGEST_KIND:
            return words
        return f"{words[:LONGEST_KIND]} … {zlib.crc32(words.encode()):08x}"

    def _words(self, size: str) -> str:
        how = (each for each in self.how if each not in ("auto", None))
        words = [self.operation, self.op, size, *map(str, (each for each in (self.dtype, *how) if each is not None))]
        return " ".join(word for word in words if word).replace("torch.", "")


def recorded(name: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function, which runs inside a range of this name if a profile is running."""
    return profiler.record_function(name)(function) if profiler._is_profiler_enabled else function


def disagreement(descriptions: Sequence[bytes]) -> str:
    """Returns every rank's call as text, if they differ; else ""."""
    if len(set(descriptions)) <= 1:
        return ""
    lines = [f"  rank {rank}: {text.decode(errors='replace').strip()}" for rank, text in enumerate(descriptions)]
    return "the ranks called different collectives; all must call the same in the same order:\n" + "\n".join(lines)


# --- the history of the last calls ------------------------------------------------------------------------------------


NUM_CALLS = 1000


class CallRecord:
    """A call, and when it ran on this rank.

    Attributes:
        thread: the number of the thread in which it ran.
        began_s, done_s: on this process's clock; `done_s` is 0 unless the call has completed. On a GPU, from when the
            host begins to enqueue it until it sees the completion.
    """

    __slots__ = ("began_s", "call", "done_s", "thread")

    def __init__(self, call: Call) -> None:
        self.call, self.thread, self.began_s, self.done_s = call, threading.get_ident(), now_s(), 0.0


class Recorder(Protocol):
    """Measures a communicator; each method is called in the thread, and on the stream, that it measures."""

    def began(self, record: CallRecord) -> None:
        """Records that a call begins."""

    def ended(self, record: CallRecord) -> None:
        """Records that a call has completed."""

    def waiting(self) -> AbstractContextManager[None]:
        """Begins a block that waits for a call."""


class History:
    """The last calls of a communicator, in the order in which they began.

    Attributes:
        recorder: notified of each call; None: nothing is measured.
    """

    def __init__(self) -> None:
        self._records: deque[CallRecord] = deque(maxlen=NUM_CALLS)
        self.recorder: Recorder | None = None

    def note(self, call: Call) -> CallRecord:
        """Records that a call begins to run in this thread."""
        record = CallRecord(call)
        self._records.append(record)
        if self.recorder is not None:
            self.recorder.began(record)
        return record

    def waiting(self) -> AbstractContextManager[None]:
        """Begins a block that waits for a call, and measures it if there is a recorder."""
        return nullcontext() if self.recorder is None else self.recorder.waiting()

    def since(self, moment_s: float = 0.0) -> list[CallRecord]:
        """Returns the calls that have begun since this moment."""
        return [record for record in self._records.copy() if record.began_s >= moment_s]


def plain_calls(records: Iterable[CallRecord], **more: Any) -> list[dict[str, Any]]:
    """Returns calls as plain values, with times in seconds since 1970, as exact as the hosts' clocks agree.

    Args:
        more: added to each call.
    """
    since_1970_s = time.time() - now_s()
    lines = []
    for each in records:
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
