"""Ranks as threads of one process: the transport that tests and tutorials run collectives on, without any network.

    network = SimulatedNetwork(4)
    network.run(lambda transport: ...)      # called once per rank, each in a thread of its own

Every directed edge is a first-in first-out queue of copied tensors. A send completes only when its receiver has taken
it, as on the strictest real transport, so a schedule that would deadlock there deadlocks here (until its deadline).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from ddp.transport.edge import Pending, Transfer, TransportError

Result = TypeVar("Result")


class SimulatedNetwork:
    """The edges between `world_size` ranks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        pairs = [(source, target) for source in range(world_size) for target in range(world_size)]
        self.edges: dict[tuple[int, int], queue.SimpleQueue[_Message]] = {p: queue.SimpleQueue() for p in pairs}

    def transport(self, rank: int) -> SimulatedTransport:
        """This rank's end of every edge."""
        return SimulatedTransport(self, rank)

    def run(self, program: Callable[[SimulatedTransport], Result]) -> list[Result]:
        """Runs `program` on all ranks at once; its results by rank. The first rank's error is raised."""
        with ThreadPoolExecutor(self.world_size) as threads:
            runs = [threads.submit(program, self.transport(rank)) for rank in range(self.world_size)]
            return [run.result() for run in runs]


class _Message:
    def __init__(self, data: Tensor) -> None:
        self.data, self.taken = data.clone(), threading.Event()


class SimulatedTransport:
    """One rank of a `SimulatedNetwork`."""

    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        self.rank, self.world_size = rank, network.world_size
        self._network = network

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        messages = [(peer, _Message(data)) for peer, data in sends]
        for peer, message in messages:
            self._network.edges[self.rank, peer].put(message)
        return _SimulatedRound(self, messages, receives)

    def close(self) -> None:
        """Nothing is held."""

    def take(self, peer: int, timeout_s: float) -> _Message:
        """The oldest message from `peer`."""
        try:
            return self._network.edges[peer, self.rank].get(timeout=timeout_s)
        except queue.Empty:
            raise TransportError(peer, f"nothing arrived within {timeout_s:g} s", timed_out=True) from None


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
