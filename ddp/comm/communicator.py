"""The communicator runs a user's collectives, each with a number, a label and a deadline.

    comm.all_reduce(t)                    in place, sum; op="mean" | "product" | "min" | "max"; one tensor or a list
    comm.all_reduce(t, async_op=True)     returns a Work at once; any number may be in flight
    comm.all_reduce(t, algorithm="ring")  by that schedule; "auto" takes the fastest of a short trial
    comm.reduce_scatter(t)                rank r's share of the sum
    comm.reduce_scatter_(t, bounds)       the same in place, in slices of any length; comm.all_gather_(t, bounds)
    comm.all_gather(t), comm.gather(t)    every rank's tensor, by rank; first dimensions may differ
    comm.broadcast(t), comm.reduce(t)     in place, from or to a root
    comm.scatter(list), comm.all_to_all(list)
    comm.barrier(), comm.agree_any(flag)
    comm.chain(function)                  a function that calls several of these, as one
    comm.send(t, dst), comm.recv(t, src)  a message between two ranks, of which the others know nothing
    comm.allocate(numel, dtype)           memory that collectives reach without a copy
    comm.subgroup(ranks)                  a communicator of some of the ranks
    comm.plan.explain(nbytes)             every algorithm: its formula, its time, and what "auto" takes

The collectives among them are in `verbs.py`. This module has the beginning and end of a communicator, and what its
ranks wait for besides collectives: messages, and what all ranks do by other means (`Peers`).

    rank 0   send(x, 1)  ── message #1 from 0 to 1 ──▶  recv(y, 0)   rank 1
             recv(z, 1)  ◀── message #1 from 1 to 0 ──  send(y, 0)
             send(x, 1)  ── message #2 from 0 to 1 ──▶  recv(y, 0)

No other rank knows of a message, so it has no number among the collectives. Each rank counts what it sends to each peer
and what it receives from there. Both ends count the same messages, so their numbers match.

A message is posted at once, even while collectives are in flight. The wait for it is queued after them (`CallQueue`),
is watched, and has a deadline. A send completes when the peer has received the message. So two ranks that both send
first and receive later would deadlock; the watchdog reports that.

A transport without tags (NCCL) matches messages by their order alone, and deadlocks if they are posted one by one.
So messages are held back until one of them is waited for, and then posted together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, SupportsInt, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ddp.collectives.placed import Hosts
from ddp.comm import checks
from ddp.comm.call_queue import CallQueue, HostCopy, Work
from ddp.comm.connect import Channels, connect
from ddp.comm.flat_collectives import FlatCollectives
from ddp.comm.host_links import HostLinks, Settings
from ddp.comm.nccl import NcclTransport, StreamQueue
from ddp.comm.plan import Plan
from ddp.comm.reduction import dtype_name, flatten, reduction_of, write_back
from ddp.comm.transport.edge import Pending, Transfer, Transport, TransportError
from ddp.comm.transport.shared_memory import SLICE_S
from ddp.comm.verbs import Later, Now, Result, Verbs
from ddp.comm.watch.call import Call, Direction, Envelope, History, plain_calls
from ddp.comm.watch.watchdog import Watchdog
from ddp.errors import ConfigError, PeerLost
from ddp.process import gpu
from ddp.process.clock import Patience

DEFAULTS = Settings()


class Communicator(Verbs):
    """The ranks of one membership and what they can do together. Made by `ddp.init`, or by `subgroup`. Collective.

    Args:
        transport: the edges between the ranks.
        watchdog: finds the rank that is missing; without one, the transport's error names it.
        hosts: the ranks of every host, if known; then the ranks do not test for shared memory.
        world_ranks: its ranks' numbers in the communicator that `ddp.init` made.
        channels: numbers the channels of the transport.

    Attributes:
        rank, world_size: this process's number, and how many there are.
        settings, and of them device, generation, warn_s, abort_s: see `Settings`.
        hosts: the ranks of every host.
        plan: chooses the algorithm of an all-reduce.
        peers: waits for what the other ranks do by other means than collectives.
        slices: by rank, the number of its slice in `reduce_scatter_` and `all_gather_`; on one host, its rank.
        host_partition: the part of each tensor that every rank carries from its host to the others.

    Raises:
        ConfigError: the algorithm asked for is not possible here.
        PeerLost: a rank did not take part.
    """

    def __init__(
        self,
        transport: Transport,
        settings: Settings = DEFAULTS,
        *,
        watchdog: Watchdog | None = None,
        hosts: Hosts | None = None,
        world_ranks: Sequence[int] = (),
        channels: Channels | None = None,
    ) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self.device, self.generation = settings.device, settings.generation
        self.warn_s, self.abort_s = settings.warn_s, settings.abort_s
        self._is_subgroup = bool(world_ranks)
        self._channels, self._world_ranks = channels or Channels(), world_ranks or range(self.world_size)
        self._watchdog = watchdog or Watchdog(
            HashStore(), self.rank, 1, generation=self.generation, warn_s=math.inf, abort_s=self.abort_s
        )
        links = HostLinks(transport, self._watchdog, settings)
        gather = links.gather_bytes if settings.debug else None
        of_queue = self._watchdog, self.rank, self._world_ranks
        self._queue = (
            StreamQueue(*of_queue, transport=transport, gather=gather, timeout_s=self.abort_s)
            if isinstance(transport, NcclTransport)
            else CallQueue(*of_queue, device=self.device, gather=gather)
        )
        if hosts is not None:
            self._collectives = FlatCollectives(links, hosts)
        else:
            queue = self._queue
            starting = partial(
                connect, links, self._watchdog, settings, self._channels, queue.call_number, queue.call_label
            )
            self._collectives = self._queue.run(Call(0, "start-up"), starting)
            if self._collectives.cross_host is not None:
                self._queue.runners.append(self._collectives.cross_host.runner)
        if world_ranks and not self._collectives.offers(settings.algorithm):
            settings = replace(settings, algorithm="auto")  # a group of one rank shares no memory, for example
        try:
            self.plan = Plan(self._collectives, settings, self._queue)
        except ConfigError:
            self._collectives.close()
            raise
        self.settings, self.hosts, self.slices = settings, self._collectives.hosts, self._collectives.slices
        self.host_partition = self._collectives.host_partition
        self.peers = Peers(self._queue, self._watchdog, self.rank, timeout_s=self.abort_s)
        self._messages = Messages(transport, self._queue, timeout_s=self.abort_s)
        self._watchdog.set_messages(self._messages.posted, self._messages.in_flight)
        self._groups: list[Communicator] = []
        self._is_closed = False

    # --- messages ----------------------------------------------------------------------------------------------------

    @overload
    def send(self, tensor: Tensor, dst: int, *, async_op: Now = False, label: str = "") -> None: ...
    @overload
    def send(self, tensor: Tensor, dst: int, *, async_op: Later, label: str = "") -> Message: ...
    def send(self, tensor: Tensor, dst: int, *, async_op: bool = False, label: str = "") -> Message | None:
        """Sends `tensor` to rank `dst`, which calls `recv`; returns once that rank has received it.

        The messages from one rank to another are received in the order in which they were sent.

        Args:
            async_op: post the message and return a `Message` at once; leave `tensor` alone until its `wait` has
                returned.
            label: name of this call in errors and profiles.

        Raises:
            ConfigError: there is no such rank, or the tensor cannot be sent.
            PeerLost: `dst` did not receive it within the deadline, or both ranks wait for each other.
            CommunicatorBroken: an earlier call failed.
        """
        checks.message(self.device, tensor, "dst", dst, me=self.rank, world_size=self.world_size)
        message = self._messages.post("to", dst, tensor, label=label)
        if not async_op:
            message.wait()
        return message if async_op else None

    @overload
    def recv(self, tensor: Tensor, src: int, *, async_op: Now = False, label: str = "") -> Tensor: ...
    @overload
    def recv(self, tensor: Tensor, src: int, *, async_op: Later, label: str = "") -> Message: ...
    def recv(self, tensor: Tensor, src: int, *, async_op: bool = False, label: str = "") -> Tensor | Message:
        """Receives the next message from rank `src` into `tensor`, and returns it. Raises what `send` does.

        Args:
            tensor: of the sender's dtype, with as many elements as the sender's; its memory layout may differ.
            async_op, label: as in `send`.
        """
        checks.message(self.device, tensor, "src", src, me=self.rank, world_size=self.world_size)
        checks.holds_result(tensor)
        message = self._messages.post("from", src, tensor, label=label)
        if not async_op:
            message.wait()
        return message if async_op else tensor

    # --- for hooks and strategies -------------------------------------------------------------------------------------

    @overload
    def chain(self, function: Callable[[], Result], *, async_op: Now = False, label: str = "") -> Result: ...
    @overload
    def chain(self, function: Callable[[], Result], *, async_op: Later, label: str = "") -> Work[Result]: ...
    @overload
    def chain(self, function: Callable[[], Result], *, async_op: bool, label: str = "") -> Result | Work[Result]: ...
    def chain(
        self, function: Callable[[], Result], *, async_op: bool = False, label: str = ""
    ) -> Result | Work[Result]:
        """Runs a function that calls collectives of this communicator as one collective.

        They run in its thread, with no other collective in between. Those that it calls with `async_op` run one after
        another while it continues.

        Returns:
            The function's result; with `async_op` a `Work`.
        """
        return self._queue.run_chain(self._queue.number("chain", label=label), function, async_op=async_op)

    def to_host(self, *tensors: Tensor) -> HostCopy:
        """Begins to copy the present numbers of these tensors to the host. Not collective."""
        return HostCopy(tensors, self.device, self._queue.refuse_if_broken)

    def sum_in_host(self, flat: Tensor, *, divide_by: SupportsInt = 1, label: str = "") -> None:
        """Sums over the ranks that share this host's memory, in place; a rank that is alone only divides.

        Args:
            flat: [numel], contiguous.
            divide_by, label: as in `all_reduce`.
        """
        checks.on(self.device, flat)
        checks.is_flat(flat)
        checks.reduction("sum", flat.dtype, divide_by)
        call = self._queue.number("sum_in_host", "sum", flat, label)

        def run() -> None:
            reduction = reduction_of("sum", flat.dtype, self.world_size, divide_by)
            self._collectives.sum_in_host(flat, reduction)

        self._queue.run(call, run)

    # --- memory, groups, the end -------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns [numel] zeros, in the memory that this communicator's collectives reach without a copy. Collective.

        The memory is released when every rank has called `free`, or with the communicator.
        """
        checks.memory(numel, dtype)
        call = self._queue.number("allocate", f"{numel} {dtype}")
        return self._queue.run(call, lambda: self._collectives.allocate(numel, dtype, self.device))

    def free(self, tensor: Tensor) -> None:
        """Frees memory from `allocate`. Every rank calls it; no collective may still use the tensor.

        Any thread may call it at any time, such as a finalizer during another collective.
        """
        self._collectives.free(tensor)

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Returns a communicator of some of the ranks, in the order given; None on the others. Collective over all.

        Its collectives are numbered and watched separately, and may run concurrently with this one's.
        """
        checks.subgroup(ranks, self.world_size)
        call = self._queue.number("subgroup", f"of {list(ranks)}")
        return self._queue.run(call, partial(self._subgroup, list(ranks)))

    def _subgroup(self, ranks: list[int]) -> Communicator | None:
        links, channels = self._collectives.links, self._channels
        channel = channels.take(links.gather_bytes)
        if self.rank not in ranks:
            return None
        watchdog = self._watchdog.among(ranks, channel)
        named, place = [self._world_ranks[rank] for rank in ranks], ranks.index(self.rank)
        among = partial(links.transport.among, ranks, channel, watchdog.hopeless_because)
        try:
            transport = watchdog.while_watched(among, (place + 1) % len(ranks)) if self.is_stream_ordered else among()
            group = Communicator(transport, self.settings, watchdog=watchdog, world_ranks=named, channels=channels)
        except BaseException as error:
            watchdog.leave()
            if isinstance(error, PeerLost):
                rank = ranks[error.rank]
                raise PeerLost(rank, error.host, error.generation, error.sequence, error.label, error.reason) from error
            raise
        self._groups = [other for other in self._groups if not other._is_closed] + [group]
        return group

    @property
    def is_stream_ordered(self) -> bool:
        """Returns True if collectives are enqueued on a GPU, so that the host waits for none of them."""
        return isinstance(self._queue, StreamQueue)

    @property
    def is_broken(self) -> bool:
        """Returns True if further calls are refused, because an earlier one failed."""
        return self._queue.error is not None

    @property
    def num_calls(self) -> int:
        """The number of collective calls that this rank has made."""
        return self._queue.num_calls

    @property
    def history(self) -> History:
        """The last calls, without those of subgroups."""
        return self._queue.history

    def runs_in_background(self, thread: int) -> bool:
        """Returns True if this is a background thread, whose collectives do not block their caller."""
        return self.is_stream_ordered or any(runner.thread == thread for runner in self._queue.runners)

    def recent_calls(self) -> list[dict[str, Any]]:
        """Returns this rank's last calls, in the order in which they began, as plain values. Not collective.

        A call that has not ended, or has failed, has None as its `done_s`. Those of a subgroup have its `ranks`.
        """
        others = [call for group in self._groups for call in group.recent_calls()]
        more = {"ranks": list(self._world_ranks)} if self._is_subgroup else {}
        return sorted([*plain_calls(self._queue.history.since(), **more), *others], key=lambda call: call["began_s"])

    def abandon(self, reason: str = "") -> None:
        """Ends this rank's part at once, and aborts everything in flight.

        Args:
            reason: why this rank stops early, as the others are to report it; "" if the program ends.
        """
        for group in self._groups:
            group.abandon(reason)
        self._queue.abandon(reason)

    def close(self) -> None:
        """Waits for everything in flight, and leaves. The communicator cannot be used afterwards."""
        self._is_closed = True
        for group in self._groups:
            group.close()
        self._queue.close()
        self._collectives.close()


# --- messages --------------------------------------------------------------------------------------------------------


class Messages:
    """The messages of one rank.

    Args:
        timeout_s: longest wait for a peer that is alive.

    Attributes:
        posted: number of messages so far, by route ("to rank 1").
        in_flight: messages whose wait has not ended. Keeps their tensors alive, because Gloo writes to them.
    """

    def __init__(self, transport: Transport, queue: CallQueue, *, timeout_s: float) -> None:
        self.posted: dict[str, int] = {}
        self.in_flight: dict[Envelope, Message] = {}
        self._transport, self._queue, self._timeout_s = transport, queue, timeout_s
        self._together = Posting(transport)  # messages held back, where there are no tags
        self._lock = threading.Lock()  # two threads may post, and messages need distinct numbers

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
        """Waits, after the collectives before it, until a message has completed."""

        def finish() -> None:
            with self._lock:
                message.posting.post()
            message.posting.wait(self._timeout_s)
            if envelope.direction == "from":
                write_back(message.flat, (message.tensor,))
                if not message.tensor.is_inference():
                    increment_version(message.tensor)  # because autograd does not see the transport's write

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
        """Returns the tensor of a `recv` once it is filled; None for a `send`, once the peer has received it.

        Call it for every message, also for a `send`: until then, its tensor is kept alive.

        Raises:
            PeerLost: the peer did not post its end within the deadline, or both wait for each other.
            CommunicatorBroken: an earlier call failed.
        """
        if self.envelope in self._messages.in_flight:
            self._messages.wait_for(self)
        return self.tensor if self.envelope.direction == "from" else None


class Posting:
    """The transfers that are posted together: one, or several if the transport has no tags."""

    def __init__(self, transport: Transport) -> None:
        self.is_posted = False
        self._transport = transport
        self._sends: list[Transfer] = []
        self._receives: list[Transfer] = []
        self._ready: list[torch.cuda.Event] = []  # on a GPU: after these, the tensors may be read and written
        self._pending: Pending | None = None
        self._error: TransportError | None = None

    def add(self, direction: Direction, transfer: Transfer) -> None:
        if transfer.data.device.type == gpu.KIND and not self._transport.has_tags:
            self._ready.append(gpu.cuda.current_stream(transfer.data.device).record_event())
        (self._sends if direction == "to" else self._receives).append(transfer)

    def post(self) -> None:
        """Posts what has been added, once. If that fails, `wait` raises the error, because it can find the culprit."""
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
        """Returns once all transfers are complete; may be called several times."""
        if self._error is not None:
            raise self._error
        if self._pending is not None:
            self._pending.wait(timeout_s)
            self._pending = None


# --- what the ranks do by other means --------------------------------------------------------------------------------


class Peers:
    """Waits for what the other ranks do without collectives, with the same numbers, deadlines and errors.

    Args:
        timeout_s: longest wait for a rank that is alive.
    """

    def __init__(self, queue: CallQueue, watchdog: Watchdog, rank: int, *, timeout_s: float) -> None:
        self._queue, self._watchdog, self._rank, self._timeout_s = queue, watchdog, rank, timeout_s

    def wait_for_rank_zero(self, label: str) -> None:
        """Returns once rank 0 has called it too; waits as long as rank 0 is alive.

        Raises:
            PeerLost: rank 0 failed, left, or shows no sign of life.
        """
        call = self._queue.number("wait_for_rank_zero", label=label)
        try:
            if self._rank == 0:
                self._watchdog.publish(f"passed/{call.sequence}", "")
            else:
                self._watchdog.wait_for_value(f"passed/{call.sequence}", 0, call)
        except PeerLost as lost:
            self._queue.error = lost
            raise

    def wait_for(self, wait: Callable[[float], bool], *, label: str) -> None:
        """Waits for work outside of collectives, such as a future of torch.distributed. Every rank calls it.

        Args:
            wait: waits for at most the given seconds, and returns True once the work is complete; called until then.

        Raises:
            PeerLost: the work did not complete within the deadline.
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
        """Returns the rank that is surely lost, if any, after an error outside of this communicator. Not collective."""
        call = Call(self._queue.num_calls, "wait", name=label)
        lost = self._watchdog.find_lost(call, self._queue.neighbour)
        self._queue.error = self._queue.error or lost
        return lost
