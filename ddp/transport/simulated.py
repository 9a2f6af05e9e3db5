"""Ranks as threads of one process: the transport that tests and tutorials run collectives on, without any network.

    network = SimulatedNetwork(4)
    network.run(lambda transport: ...)      # called once per rank, each in a thread of its own

Every directed edge is a first-in first-out queue of copied tensors. A send completes only when its receiver has taken
it, as on the strictest real transport, so a schedule that would deadlock there deadlocks here (until its deadline).

Read before: `edge.py`. Read next: `process_group.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from ddp.transport.edge import InVain, Pending, Transfer, TransportError

Result = TypeVar("Result")


class SimulatedNetwork:
    """The edges between `world_size` ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._edges: dict[tuple[int, int, int], queue.SimpleQueue[_Message]] = {}
        self._lock = threading.Lock()

    def transport(self, rank: int) -> SimulatedTransport:
        """Returns this rank's end of every edge."""
        return SimulatedTransport(self, range(self.world_size), rank, channel=0)

    def edge(self, source: int, target: int, channel: int) -> queue.SimpleQueue[_Message]:
        """Returns the messages on their way from one rank to another."""
        with self._lock:
            return self._edges.setdefault((source, target, channel), queue.SimpleQueue())

    def run(self, program: Callable[[SimulatedTransport], Result]) -> list[Result]:
        """Runs `program` on all ranks at once and returns its results by rank. Raises the first rank's error."""
        with ThreadPoolExecutor(self.world_size) as threads:
            runs = [threads.submit(program, self.transport(rank)) for rank in range(self.world_size)]
            return [run.result() for run in runs]


class _Message:
    def __init__(self, data: Tensor) -> None:
        self.data, self.taken = data.clone(), threading.Event()


class SimulatedTransport:
    """One rank of a `SimulatedNetwork`, or of some of its ranks.

    Args:
        ranks: the group's ranks, in the network's numbers.
        rank: this one's place among them.
    """

    def __init__(self, network: SimulatedNetwork, ranks: Sequence[int], rank: int, *, channel: int) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self._network, self._ranks, self._channel = network, ranks, channel

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        assert all(data.is_contiguous() for _, data in (*sends, *receives)), "as every real transport demands"
        messages = [(peer, _Message(data)) for peer, data in sends]
        for peer, message in messages:
            self._edge(self.rank, peer).put(message)
        return _SimulatedRound(self, messages, receives)

    def among(self, ranks: Sequence[int], channel: int, in_vain: InVain) -> SimulatedTransport:
        """Returns the edges between some of the ranks."""
        names = [self._ranks[rank] for rank in ranks]
        return SimulatedTransport(self._network, names, list(ranks).index(self.rank), channel=channel)

    def take(self, peer: int, timeout_s: float) -> _Message:
        """Returns the oldest message from `peer`."""
        try:
            return self._edge(peer, self.rank).get(timeout=timeout_s)
        except queue.Empty:
            raise TransportError(peer, f"nothing arrived within {timeout_s:g} s", timed_out=True) from None

    def _edge(self, source: int, target: int) -> queue.SimpleQueue[_Message]:
        return self._network.edge(self._ranks[source], self._ranks[target], self._channel)


class _SimulatedRound:
    def __init__(
        self, transport: SimulatedTransport, sent: list[tuple[int, _Message]], receives: Sequence[Transfer]
    ) -> None:
        self._transport, self._sent, self._receives = transport, sent, receives

    def wait(self, timeout_s: float) -> None:
        for peer, target in self._receives:
            message = self._transport.take(peer, timeout_s)
            if message.data.numel() != target.numel():
                raise TransportError(peer, f"sent {message.data.numel()} elements, expected {target.numel()}")
            target.copy_(message.data)
            message.taken.set()
        for peer, message in self._sent:
            if not message.taken.wait(timeout_s):
                raise TransportError(peer, f"did not take its message within {timeout_s:g} s", timed_out=True)
