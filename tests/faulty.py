"""A transport that fails on script: `Faulty(inner, fail_at={rank: round})`.

The scripted rank raises in the given round (counted from 0 over the transport's life) instead of posting it, or goes
silent (`how="silent"`): it posts nothing and its wait never completes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

from ddp.comm.transport.edge import GiveUpCheck, Pending, Transfer, Transport, TransportError


class Faulty:
    """Wraps a transport and fails at the scripted round."""

    def __init__(
        self, inner: Transport, *, fail_at: Mapping[int, int], how: Literal["raise", "silent"] = "raise"
    ) -> None:
        self.rank, self.world_size, self.has_tags = inner.rank, inner.world_size, inner.has_tags
        self._inner, self._how = inner, how
        self._fail_round = fail_at.get(inner.rank)
        self._round = 0

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        this_round, self._round = self._round, self._round + 1
        if this_round != self._fail_round:
            return self._inner.post(sends, receives)
        peer = (*sends, *receives)[0].peer
        if self._how == "raise":
            raise TransportError(peer, f"scripted to fail in round {this_round}")
        return _Silence(peer)

    def for_collective(self, kind: Hashable) -> Transport:
        """Returns itself: faults are scripted by round, whatever it is for."""
        return self

    def for_message(self, number: int, kind: tuple[int, str]) -> Transport:
        """Returns the inner transport's: faults are scripted by round of the whole group."""
        return self._inner.for_message(number, kind)

    def among(self, ranks: Sequence[int], channel: int, hopeless_because: GiveUpCheck) -> Transport:
        """Returns the inner transport's: faults are scripted by round of the whole group."""
        return self._inner.among(ranks, channel, hopeless_because)


class _Silence:
    def __init__(self, peer: int) -> None:
        self._peer = peer

    def wait(self, timeout_s: float) -> None:
        raise TransportError(self._peer, "scripted silence", timed_out=True)
