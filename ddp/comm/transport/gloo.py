"""Transport over torch.distributed's point-to-point operations, by Gloo: CPU tensors, and GPU tensors through the host.

It has its own connections, so that its messages never mix with those of the application.

Every transfer is a separate `send` or `recv`; messages between two ranks match in order of posting. Gloo does not
support CUDA tensors here: those are staged through pinned host memory.

Note "tags". Gloo delivers a message to the receive with the same tag. If that is shorter, the process aborts; if it is
longer, there is no error. So the tag encodes the properties of a message, and ends that differ never match: then the
watchdog can find the cause. Bit 30 distinguishes messages between two ranks from those of collectives.

Note "interrupting Gloo". A thread inside one of Gloo's waits cannot check anything else, and Gloo's own deadline also
runs while the process is stopped. So Gloo waits without a deadline, and a second thread enforces the deadline and
checks whether the wait can still succeed. It ends a wait by another one, for a message that is never sent, with a
timeout of a millisecond. After that Gloo closes all connections of this object, which ends every wait. No collective
could continue over them.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.transport.edge import NO_DEADLINE, GiveUpCheck, Pending, Transfer, TransportError
from ddp.errors import first_line
from ddp.process import gpu
from ddp.process.clock import Patience
from ddp.process.host import gloo_s_interfaces

WATCH_EVERY_S = 0.25
AT_ONCE = timedelta(milliseconds=1)
UNUSED_TAG = (1 << 31) - 1  # of no message


def gloo_of(store: Store, rank: int, world_size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Returns Gloo's backend object, once its ranks are connected.

    All objects of a process share the thread for their connections, because it wakes up a hundred times a second.
    """
    # Not by `dist.new_group`, which would read addresses of an earlier session from the same store.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout, options._threads = _devices(*gloo_s_interfaces()), timeout, 1
    return dist.ProcessGroupGloo(store, rank, world_size, options)


_known: dict[tuple[Any, ...], list[Any]] = {}  # by process, because a forked child lacks the thread


def _devices(*interfaces: str) -> list[Any]:
    """Returns this process's Gloo devices on these interfaces; without interfaces, on one that Gloo chooses."""
    key, gloo = (os.getpid(), *interfaces), dist.ProcessGroupGloo
    if key not in _known:
        _known[key] = [gloo.create_device(interface=name) for name in interfaces] or [gloo.create_default_device()]
    return _known[key]


class GlooConnections:
    """This process's connections to all ranks, shared by all its waits, and a thread that ends overdue waits.

    Args:
        backend: Gloo's own object, which avoids torch's dispatcher, half the cost of a `dist.isend`.
        rank: this process's number in it.
    """

    def __init__(self, backend: Any, rank: int) -> None:
        self.backend, self.rank = backend, rank
        self.interrupted = ""  # the reason why no wait can succeed any more
        self.waits: dict[int, tuple[float, GiveUpCheck]] = {}  # in progress, with their timeout in seconds
        self.numbers = itertools.count()  # of the waits
        self._nothing = torch.empty(1, device="cpu")
        name, mine = f"ddp-gloo-{rank}", weakref.ref(self)  # the thread ends when the connections are unreferenced
        thread = threading.Thread(target=_end_overdue_waits, args=(mine,), name=name, daemon=True)
        _watching.add(thread)
        _open.add(self)
        thread.start()

    def interrupt(self, reason: str) -> None:
        """Ends all present and future waits of this process (note "interrupting Gloo")."""
        self.interrupted = self.interrupted or reason
        others = (peer for peer in range(self.backend.size()) if peer != self.rank)
        for peer in others:  # several, because a connection that is closed already ends no other one
            with suppress(RuntimeError):
                self.backend.recv([self._nothing], peer, UNUSED_TAG).wait(AT_ONCE)


_watching: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_open: weakref.WeakSet[GlooConnections] = weakref.WeakSet()
_program_ends = threading.Event()


def _keep_for_ever() -> None:
    """Keeps Gloo's objects alive in a forked child: destroying one would wait for threads that only the parent has."""
    for each in (*(connections.backend for connections in _open), *_known.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


os.register_at_fork(after_in_child=_keep_for_ever)


@atexit.register
def _end_watching() -> None:
    """Ends the deadline threads: one that is inside Gloo when the interpreter exits would abort the process."""
    _program_ends.set()
    for thread in list(_watching):
        thread.join(timeout=1)


def _end_overdue_waits(connections: weakref.ref[GlooConnections]) -> None:
    patience: dict[int, Patience] = {}
    while not _program_ends.wait(WATCH_EVERY_S):
        here = connections()
        if here is None:
            return
        waits = here.waits.copy()
        patience = {each: patience.get(each) or Patience(limit_s) for each, (limit_s, _) in waits.items()}
        for each, (limit_s, hopeless_because) in waits.items():
            if not patience[each].left_s():
                here.interrupt(f"nothing came for {limit_s:g} s")
            elif culprit := hopeless_because():
                here.interrupt(f"rank {culprit[0]}: {culprit[1]}")
        del here


@dataclass(eq=False)
class GlooTransport:
    """Point-to-point over Gloo, on CPU tensors.

    Args:
        ranks: by rank of the group, its rank in the connections.
        rank: this process's rank in the group.
        hopeless_because: see `Transport.among`.
        channel: this group's number, unique among groups over the same connections.
        tag: the tag of all transfers.
    """

    connections: GlooConnections
    ranks: Sequence[int]
    rank: int
    hopeless_because: GiveUpCheck
    channel: int = 0
    tag: int = 0

    has_tags = True

    def __post_init__(self) -> None:
        self.world_size = len(self.ranks)

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Posts receives first, because a Gloo send begins once its receiver has announced the destination."""
        backend = self.connections.backend
        works = [(peer, self._posted(backend.recv, data, peer)) for peer, data in receives]
        works += [(peer, self._posted(backend.send, data, peer)) for peer, data in sends]
        return _GlooRound(self.connections, works, self.hopeless_because)

    def for_collective(self, kind: Hashable) -> GlooTransport:
        """Returns the same connections under the tag of this kind (note "tags")."""
        return replace(self, tag=collective_tag(self.channel, kind))

    def for_message(self, number: int, kind: tuple[int, str]) -> GlooTransport:
        """Returns the same connections under the message's own tag (note "tags")."""
        tag = message_tag(self.channel, number, kind)  # and not by `replace`, which takes longer than to post a message
        return type(self)(self.connections, self.ranks, self.rank, self.hopeless_because, self.channel, tag)

    def among(self, ranks: Sequence[int], channel: int, hopeless_because: GiveUpCheck) -> GlooTransport:
        """Returns a transport over the same connections for another group. They end with the last transport."""
        names, rank = [self.ranks[rank] for rank in ranks], list(ranks).index(self.rank)
        return type(self)(self.connections, names, rank, hopeless_because, channel)

    def _posted(self, operation: Callable[[list[Tensor], int, int], dist.Work], data: Tensor, peer: int) -> dist.Work:
        """Posts one transfer; raises TransportError if the peer's connection has broken since the last round."""
        try:
            return operation([data], self.ranks[peer], self.tag)
        except RuntimeError as error:
            raise TransportError(peer, first_line(error)) from error


def message_tag(channel: int, number: int, kind: tuple[int, str]) -> int:
    """Returns the tag of a message between two ranks: bit 30, ten bits of its number, twenty of its other properties.

    Messages of one pair that are in flight together have distinct numbers, so no two of them share a tag by chance.
    """
    return 1 << 30 | (number & 1023) << 20 | _agreed(channel, kind)


def collective_tag(channel: int, kind: Hashable) -> int:
    """Returns the tag of all transfers of a collective: ten bits of the channel, twenty of its other properties."""
    return (channel & 1023) << 20 | _agreed(channel, kind)


@lru_cache(1024)
def _agreed(channel: int, kind: Hashable) -> int:
    """Returns twenty bits, but never all ones: see UNUSED_TAG."""
    return zlib.crc32(f"{channel} {kind}".encode()) % ((1 << 20) - 1)


class _GlooRound(NamedTuple):
    connections: GlooConnections
    works: list[tuple[int, dist.Work]]
    hopeless_because: GiveUpCheck

    def wait(self, timeout_s: float) -> None:
        connections = self.connections
        number = next(connections.numbers)
        connections.waits[number] = timeout_s, self.hopeless_because
        try:
            for peer, work in self.works:  # noqa: B007 - the error tells which
                work.wait(NO_DEADLINE)
        except RuntimeError as error:
            why = connections.interrupted
            raise TransportError(peer, why or first_line(error), timed_out=bool(why)) from error
        finally:
            del connections.waits[number]


class StagedGlooTransport(GlooTransport):
    """Gloo for CUDA tensors: copies them to pinned memory before a send, and back after a receive."""

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        outgoing = [Transfer(peer, _pinned(data).copy_(data, non_blocking=True)) for peer, data in sends]
        incoming = [Transfer(peer, _pinned(data)) for peer, data in receives]
        if sends:
            gpu.cuda.current_stream(sends[0].data.device).synchronize()  # Gloo reads the bytes from the host
        return _StagedRound(super().post(outgoing, incoming), incoming, receives)


class _StagedRound(NamedTuple):
    inner: Pending
    incoming: Sequence[Transfer]
    receives: Sequence[Transfer]

    def wait(self, timeout_s: float) -> None:
        self.inner.wait(timeout_s)
        for (_, arrived), (_, target) in zip(self.incoming, self.receives, strict=True):
            target.copy_(arrived, non_blocking=True)  # the pinned block is not reused before this copy completes


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
