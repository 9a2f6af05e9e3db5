"""The contract of a transport: post a round, wait for it.

A *round* is everything that a rank has in flight together. `post` starts all of it and returns at once;
`Pending.wait` returns when every transfer of the round is done, or raises `TransportError`. Tensors are contiguous
and flat; the caller leaves them alone in between. Messages between two ranks arrive in the order in which they were
posted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


class Transfer(NamedTuple):
    """One message of a round."""

    peer: int
    data: Tensor  # [numel], contiguous


@dataclass(eq=False)
class TransportError(RuntimeError):
    """A round did not end. Says with whom, never who is guilty: a transport cannot know (see `comm/watchdog.py`)."""

    peer: int
    reason: str
    timed_out: bool = False

    def __str__(self) -> str:
        return f"transfer with rank {self.peer} {'timed out' if self.timed_out else 'failed'}: {self.reason}"


class Pending(Protocol):
    """A round in flight."""

    def wait(self, timeout_s: float) -> None:
        """Returns once every transfer is done; TransportError after `timeout_s` seconds of silence from one peer."""


class Transport(Protocol):
    """Carries rounds between the ranks of one group."""

    rank: int
    world_size: int

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Starts every transfer of one round."""

    def among(self, ranks: Sequence[int], channel: int) -> Transport | None:
        """The edges between some of the ranks, renumbered from 0 in the order given; None on a rank outside.

        Every rank of the transport calls it with the same `ranks`.

        Args:
            channel: a number that no other group with a rank in common has: messages of two groups never mix.
        """

    def interrupt(self, reason: str) -> None:
        """Ends the waits of this process with a TransportError, also those that begin later. From any thread."""

    def close(self) -> None:
        """Gives up what it holds; no transfer may be in flight."""
