"""The contract of a transport: post a round, wait for it.

A *round* is everything that a rank has in flight together. `post` starts all of it and returns at once.
`Pending.wait` returns when every transfer of the round is complete, or raises `TransportError`. Tensors are contiguous
and flat, and the caller must not touch them in between. Messages between two ranks arrive in the order in which they
were posted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from torch import Tensor

NO_DEADLINE = timedelta(days=3650)  # for a library's own wait, when another thread enforces the deadline

Gather = Callable[[bytes], list[bytes]]
"""An all-gather of bytes: returns those of all ranks, by rank."""


def gathered(gather: Gather, value: Any) -> list[Any]:
    """Returns every rank's value, by rank; values must be JSON."""
    return [json.loads(payload) for payload in gather(json.dumps(value).encode())]


GiveUpCheck = Callable[[], "tuple[int, str] | None"]
"""Returns the rank that will never arrive, and why, once no wait can succeed any more."""


def never_hopeless() -> None:
    """A `GiveUpCheck` that never gives up."""


class Transfer(NamedTuple):
    """One message of a round."""

    peer: int
    data: Tensor  # [numel], contiguous


@dataclass(eq=False)
class TransportError(RuntimeError):
    """A round failed. Names the peer of the transfer, which need not be the culprit (see `comm/watch/watchdog.py`)."""

    peer: int
    reason: str
    timed_out: bool = False

    def __str__(self) -> str:
        return f"transfer with rank {self.peer} {'timed out' if self.timed_out else 'failed'}: {self.reason}"


class Pending(Protocol):
    """A round in flight."""

    def wait(self, timeout_s: float) -> None:
        """Returns once every transfer is complete; raises TransportError after `timeout_s` seconds without one."""


class Transport(Protocol):
    """Carries rounds between the ranks of one group."""

    rank: int
    world_size: int
    has_tags: bool  # False: all transfers in flight with a peer must be posted together, in the peer's order

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Starts every transfer of one round."""

    def for_collective(self, kind: Hashable) -> Transport:
        """Returns edges whose messages match only within one kind of collective; without tags, returns itself.

        Args:
            kind: the properties that must agree on all ranks, so that every message fits its receive. Equal kinds have
                an equal `str` in every process.
        """
        return self

    def for_message(self, number: int, kind: tuple[int, str]) -> Transport:
        """Returns edges for one message between two ranks, which matches only its other end; without tags, returns
        itself.

        Args:
            number: of the message, among those in its direction.
            kind: the properties that must agree on both ends; otherwise they never match.
        """
        return self

    def among(self, ranks: Sequence[int], channel: int, hopeless_because: GiveUpCheck) -> Transport:
        """Returns the edges between some of the ranks, numbered from 0 in the order given. Each of them calls it.

        Args:
            channel: a number that no other group with a common rank has, so that messages of two groups never mix.
            hopeless_because: a wait in progress calls it from time to time, and raises a TransportError for its result.
        """
