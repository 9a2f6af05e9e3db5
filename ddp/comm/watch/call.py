"""A call: a collective or a message, its number, and the words that errors, warnings and comparisons use for it.

The words are put together only when someone reads them. On the path of a collective that takes microseconds, a
formatted string would be a tenth of the time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.autograd import profiler

Result = TypeVar("Result")

Direction = Literal["to", "from"]
LONGEST_KIND = 160  # characters; slices for many ranks have more


class Envelope(NamedTuple):
    """A message, as one of its two ranks sees it.

    Attributes:
        direction, peer: this rank sends it to that peer, or receives it from there.
        number: how many messages there have been from the one rank to the other, with this one.
        shape, dtype: of the tensor on this rank.
    """

    direction: Direction
    peer: int
    number: int
    shape: Sequence[int]
    dtype: str

    @property
    def route(self) -> str:
        """The other rank, and which way the message goes."""
        return f"{self.direction} rank {self.peer}"

    @property
    def kind(self) -> tuple[int, str]:
        """The number of elements and the dtype, which must agree between the two ranks."""
        return prod(self.shape), self.dtype

    def on_peer(self, rank: int) -> tuple[Direction, int, int]:
        """Returns direction, peer and number of the same message on the other rank; `rank` is this one."""
        return "to" if self.direction == "from" else "from", rank, self.number


class Call(NamedTuple):
    """One call on one rank. A collective's is equal on all ranks if they call the same.

    A message's has the number of the last collective before it: all collectives up to that one are complete.
    """

    sequence: int
    operation: str
    op: str = ""
    shape: tuple[int, ...] | None = None  # None: may differ by rank
    dtype: torch.dtype | None = None
    name: str = ""  # the caller's label
    how: tuple[object, ...] = ()  # whatever else must agree
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
        """The name in a profile of the wait for it, on the thread that needs the result."""
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
        """The words that must agree for ranks to do it together: operation, number of elements, dtype and the like."""
        words = self._words("" if self.shape is None else f"of {prod(self.shape)}")
        if len(words) <= LONGEST_KIND:
            return words
        return f"{words[:LONGEST_KIND]} … {zlib.crc32(words.encode()):08x}"

    def _words(self, size: str) -> str:
        how = (each for each in self.how if each not in ("auto", None))
        words = [self.operation, self.op, size, *map(str, (each for each in (self.dtype, *how) if each is not None))]
        return " ".join(word for word in words if word).replace("torch.", "")


def recorded(name: str, function: Callable[..., Result], *args: Any) -> Result:
    """Calls the function; its time is a range of this name in a profile."""
    with profiler.record_function(name):
        return function(*args)


def disagreement(descriptions: Sequence[bytes]) -> str:
    """Returns which rank called what, if they differ; else ""."""
    if len(set(descriptions)) <= 1:
        return ""
    lines = [f"  rank {rank}: {text.decode(errors='replace').strip()}" for rank, text in enumerate(descriptions)]
    return "the ranks called different collectives; all must call the same in the same order:\n" + "\n".join(lines)
