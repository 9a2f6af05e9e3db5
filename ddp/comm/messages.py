"""Waits for what is no collective: messages between two ranks, and what all ranks do by other means.

    rank 0   send(x, 1)  ── message #1 from 0 to 1 ──▶  recv(y, 0)   rank 1
             recv(z, 1)  ◀── message #1 from 1 to 0 ──  send(y, 0)
             send(x, 1)  ── message #2 from 0 to 1 ──▶  recv(y, 0)

No other rank knows of a message, so it has no number among the collectives. Each rank counts what it sends to each peer
and what it receives from there. Both ends count the same, and so they find each other.

A message is posted at once, beside the collectives that are in flight. The wait for it takes its turn behind them
(`CallQueue`), is watched, and has a deadline. A send ends when the peer has taken the message. So two ranks that both
send first and receive later would wait for each other for ever; the watchdog tells them so.

A transport without tags (NCCL) matches messages by their order alone, and deadlocks if they are posted one by one.
There messages are kept until the first of them is waited for, and then posted together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ddp.comm.call_queue import CallQueue
from ddp.comm.reduction import dtype_name, flatten, write_back
from ddp.comm.transport.edge import Pending, Transfer, Transport, TransportError
from ddp.comm.transport.shared_memory import SLICE_S
from ddp.comm.watch.call import Call, Direction, Envelope
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import PeerLost
from ddp.process import gpu
from ddp.process.clock import Patience


class Messages:
    """The messages of one rank.

    Args:
        timeout_s: longest wait for a peer that lives.

    Attributes:
        posted: how many there have been, by route ("to rank 1").
        in_flight: those that have not been waited for to the end. It keeps their tensors, which Gloo writes to.
    """

    def __init__(self, transport: Transport, queue: CallQueue, *, timeout_s: float) -> None:
        self.posted: dict[str, int] = {}
        self.in_flight: dict[Envelope, Message] = {}
        self._transport, self._queue, self._timeout_s = transport, queue, timeout_s
        self._together = Posting(transport)  # what waits to be posted, where there are no tags
        self._lock = threading.Lock()  # two threads may post, and no two messages have one number

    def post(self, direction: Direction, peer: int, tensor: Tensor, *, label: str = "") -> Message:
        """Posts one end of a message; returns at once.

        Raises:
            CommunicatorBroken: an earlier call failed.
        """
        self._queue.refuse_if_broken()
        route, flat = f"{direction} rank {peer}", flatten(tensor)
        with self._lock:
            number = self.posted.get(route, 0) + 1
            envelope = Envelope(direction, peer, number, tuple(tensor.shape), dtype_name(tensor.dtype))
            if self._transport.has_tags:
                posting = Posting(self._transport.for_message(number, envelope.kind))
            else:
                posting = self._together = Posting(self._transport) if self._together.is_posted else self._together
            posting.add(direction, Transfer(peer, flat))
            self.posted[route] = number
            self.in_flight[envelope] = message = Message(self, envelope, posting, flat, tensor, label)
            if self._transport.has_tags:
                posting.post()
        return message

    def wait_for(self, message: Message) -> None:
        """Waits in its turn until a message has arrived."""

        def finish() -> None:
            with self._lock:
                message.posting.post()
            message.posting.wait(self._timeout_s)
            if envelope.direction == "from":
                write_back(message.flat, (message.tensor,))
                if not message.tensor.is_inference():
                    increment_version(message.tensor)  # the transport has written past autograd, which must know of it

        envelope = message.envelope
        verb = "send" if envelope.direction == "to" else "recv"
        call = Call(self._queue.num_calls, verb, shape=tuple(envelope.shape), name=message.label, message=envelope)
        self._queue.run(call, finish)
        del self.in_flight[envelope]


class Message:
    """One end of a message, which has been posted. Leave its tensor alone until `wait` has returned."""

    def __init__(
        self, messages: Messages, envelope: Envelope, posting: Posting, flat: Tensor, tensor: Tensor, label: str
    ) -> None:
        self.envelope, self.posting, self.flat, self.tensor, self.label = envelope, posting, flat, tensor, label
        self._messages = messages

    def wait(self) -> Tensor | None:
        """Returns the tensor of a `recv` once it is filled; None for a `send`, once the peer has taken it.

        Call it for every message, also for one that you send: until then, its tensor is kept.

        Raises:
            PeerLost: the peer did not do its part within the deadline, or both wait for each other.
            CommunicatorBroken: an earlier call failed.
        """
        if self.envelope in self._messages.in_flight:
            self._messages.wait_for(self)
        return self.tensor if self.envelope.direction == "from" else None


class Posting:
    """The transfers that go to the transport together: one, or with a transport without tags, several."""

    def __init__(self, transport: Transport) -> None:
        self.is_posted = False
        self._transport = transport
        self._sends: list[Transfer] = []
        self._receives: list[Transfer] = []
        self._ready: list[torch.cuda.Event] = []  # of a GPU, from when on tensors may be read and written
        self._pending: Pending | None = None
        self._error: TransportError | None = None

    def add(self, direction: Direction, transfer: Transfer) -> None:
        if transfer.data.device.type == gpu.KIND and not self._transport.has_tags:
            self._ready.append(gpu.cuda.current_stream(transfer.data.device).record_event())
        (self._sends if direction == "to" else self._receives).append(transfer)

    def post(self) -> None:
        """Posts what has been added, once. If that fails, `wait` says so, which has its turn and finds out why."""
        if self.is_posted:
            return
        self.is_posted = True
        for event in self._ready:
            event.wait()  # the current stream waits
        try:
            self._pending = self._transport.post(self._sends, self._receives)
        except TransportError as error:
            self._error = error

    def wait(self, timeout_s: float) -> None:
        """Returns once all transfers are done, as often as it is called."""
        if self._error is not None:
            raise self._error
        if self._pending is not None:
            self._pending.wait(timeout_s)
            self._pending = None


# --- what the ranks do by other means --------------------------------------------------------------------------------


class Peers:
    """Waits for what the other ranks do by other means than collectives: with their numbers, deadlines and blame.

    Args:
        timeout_s: longest wait for a rank that lives.
    """

    def __init__(self, queue: CallQueue, watchdog: Watchdog, rank: int, *, timeout_s: float) -> None:
        self._queue, self._watchdog, self._rank, self._timeout_s = queue, watchdog, rank, timeout_s

    def wait_for_rank_zero(self, label: str) -> None:
        """Returns once rank 0 has called it too, however long that takes while rank 0 lives.

        Raises:
            PeerLost: rank 0 failed, left, or shows no sign of life.
        """
        call = self._queue.number("wait_for_rank_zero", label=label)
        try:
            if self._rank == 0:
                self._watchdog.publish(f"passed/{call.sequence}", "")
            else:
                self._watchdog.wait_for_word(f"passed/{call.sequence}", 0, call)
        except PeerLost as lost:
            self._queue.error = lost
            raise

    def wait_for(self, wait: Callable[[float], bool], *, label: str) -> None:
        """Waits for what the ranks do by other means: a future of torch.distributed, say. Every rank calls it.

        Args:
            wait: waits for the given seconds at most; returns True if the wait is over. It is called until it is.

        Raises:
            PeerLost: it was not there within the deadline.
        """
        neighbour = self._queue.neighbour

        def until_there() -> None:
            patience = Patience(self._timeout_s)
            while not wait(min(patience.left_s(), SLICE_S)):
                if culprit := self._watchdog.hopeless_because():
                    raise TransportError(neighbour, f"rank {culprit[0]}: {culprit[1]}", timed_out=True)
                if not patience.left_s():
                    raise TransportError(neighbour, f"nothing came for {self._timeout_s:g} s", timed_out=True)

        self._queue.run(self._queue.number("wait", label=label), until_there)

    def find_lost(self, label: str) -> PeerLost | None:
        """Returns the rank that is surely lost after an error outside of this communicator, if any. Not collective."""
        call = Call(self._queue.num_calls, "wait", name=label)
        lost = self._watchdog.find_lost(call, self._queue.neighbour)
        self._queue.error = self._queue.error or lost
        return lost
