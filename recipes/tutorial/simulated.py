"""Ranks as threads of one process: the transport that tests and tutorials run collectives on, without any network.

    network = SimulatedNetwork(4)
    network.run(lambda transport: ...)      # called once per rank, each in a thread of its own

A send waits on its edge for a receive, or a receive waits there for a send; both come in order. Whichever comes last
copies the tensor. So a send completes only when it has met its receive, as on the strictest real transport: a schedule
that would deadlock there deadlocks here (until its deadline), and a tensor that is changed in flight arrives changed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from torch import Tensor

from ddp.comm.transport.edge import GiveUpCheck, Pending, Transfer, TransportError

Result = TypeVar("Result")


class SimulatedNetwork:
    """The edges between `world_size` ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._edges: dict[Hashable, deque[_End]] = {}  # what waits on each edge: sends only, or receives only
        self._lock = threading.Lock()

    def transport(self, rank: int) -> SimulatedTransport:
        """Returns this rank's end of every edge."""
        return SimulatedTransport(self, range(self.world_size), rank, channel=0)

    def put(self, edge: Hashable, end: _End) -> None:
        """Puts a send or a receive on an edge, where it meets the other one, or waits for it."""
        with self._lock:
            waiting = self._edges.setdefault(edge, deque())
            if not waiting or waiting[0].is_send == end.is_send:
                waiting.append(end)
                return
            other = waiting.popleft()
            if not waiting:
                del self._edges[edge]
        end.meet(other) if other.is_send else other.meet(end)

    def run(self, program: Callable[[SimulatedTransport], Result]) -> list[Result]:
        """Runs `program` on all ranks at once and returns its results by rank. Raises the error that came first."""
        with ThreadPoolExecutor(self.world_size) as threads:
            runs = [threads.submit(program, self.transport(rank)) for rank in range(self.world_size)]
            for run in as_completed(runs):
                run.result()
        return [run.result() for run in runs]


class _End:
    """A message on the rank that sends it, or on the rank that receives it."""

    def __init__(self, data: Tensor, *, is_send: bool) -> None:
        self.data, self.is_send = data, is_send
        self.has_met = threading.Event()
        self._wrong_numel: int | None = None

    def meet(self, send: _End) -> None:
        """Lets a receive take what was sent. A send of another length never completes."""
        if send.data.numel() == self.data.numel():
            self.data.copy_(send.data)
            send.has_met.set()
        else:
            self._wrong_numel = send.data.numel()
        self.has_met.set()

    def wait(self, peer: int, timeout_s: float) -> None:
        """Returns once a send has been taken, or what was sent is in a receive's tensor."""
        if not self.has_met.wait(timeout_s):
            what = "did not take its message" if self.is_send else "sent nothing"
            raise TransportError(peer, f"{what} within {timeout_s:g} s", timed_out=True)
        if self._wrong_numel is not None:
            raise TransportError(peer, f"sent {self._wrong_numel} elements, expected {self.data.numel()}")


class SimulatedTransport:
    """One rank of a `SimulatedNetwork`, or of some of its ranks.

    Args:
        ranks: the group's ranks, in the network's numbers.
        rank: this one's place among them.
        channel: tells this group's messages from those of others.
    """

    has_tags = True

    def __init__(self, network: SimulatedNetwork, ranks: Sequence[int], rank: int, *, channel: Hashable) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self._network, self._ranks, self._channel = network, ranks, channel

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        assert all(data.is_contiguous() for _, data in (*sends, *receives)), "as every real transport demands"
        coming = [(peer, _End(data, is_send=False)) for peer, data in receives]
        going = [(peer, _End(data, is_send=True)) for peer, data in sends]
        for peer, end in coming:
            self._network.put((self._ranks[peer], self._ranks[self.rank], self._channel), end)
        for peer, end in going:
            self._network.put((self._ranks[self.rank], self._ranks[peer], self._channel), end)
        return _SimulatedRound([*coming, *going])

    def for_collective(self, kind: Hashable) -> SimulatedTransport:
        """Returns the same edges on a channel of this kind's own."""
        return SimulatedTransport(self._network, self._ranks, self.rank, channel=(self._channel, kind))

    def for_message(self, number: int, kind: tuple[int, str]) -> SimulatedTransport:
        """Returns the same edges on a channel of the message's own."""
        channel = (self._channel, number, kind)
        return SimulatedTransport(self._network, self._ranks, self.rank, channel=channel)

    def among(self, ranks: Sequence[int], channel: int, hopeless_because: GiveUpCheck) -> SimulatedTransport:
        """Returns the edges between some of the ranks."""
        names = [self._ranks[rank] for rank in ranks]
        return SimulatedTransport(self._network, names, list(ranks).index(self.rank), channel=channel)


class _SimulatedRound:
    def __init__(self, ends: Sequence[tuple[int, _End]]) -> None:
        self._ends = ends

    def wait(self, timeout_s: float) -> None:
        for peer, end in self._ends:
            end.wait(peer, timeout_s)
