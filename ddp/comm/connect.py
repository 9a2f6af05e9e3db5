"""Connects one rank with the others: by links, in the memory of its host, and by both together.

    join        finds out which ranks share a host (`transport/topology.py`), and connects those through memory
    connect     does so, and adds links to the other hosts: everything that a communicator uses
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddp.collectives.placed import Hosts
from ddp.comm.flat_collectives import FlatCollectives
from ddp.comm.host_links import CrossHost, HostLinks
from ddp.comm.host_memory import HostMemory, tried
from ddp.comm.host_reduce import HostGroup
from ddp.comm.meeting.place import host_name
from ddp.comm.settings import CPU, Settings
from ddp.comm.transport.edge import Gather, GiveUpCheck, gathered, never_hopeless
from ddp.comm.transport.shared_memory import KINDS, Barrier, Kind, SharedMemory, why_unsupported
from ddp.comm.transport.topology import discover
from ddp.comm.watch.watchdog import Watchdog
from ddp.process.terminal import log


class Channels:
    """Numbers the channels of the transport. The groups of one process share one of these."""

    def __init__(self) -> None:
        self._last, self._lock = 0, threading.Lock()

    def take(self, gather: Gather) -> int:
        """Returns a channel that no group with any of these ranks has. Collective over the ranks of `gather`.

        Another thread may be taking one for other ranks meanwhile. So each rank first reserves the number for itself.
        """
        while True:
            number: int = max(gathered(gather, self._last)) + 1
            with self._lock:
                is_free, self._last = number > self._last, max(number, self._last)
            if all(gathered(gather, is_free)):
                return number


def connect(links: HostLinks, watchdog: Watchdog, settings: Settings, channels: Channels) -> FlatCollectives:
    """Connects this rank with the others by every route that is possible here. Collective.

    Raises:
        TransportError: a rank did not take part.
    """
    joined = join(
        links.rank,
        links.gather_bytes,
        shared_memory=settings.shared_memory and settings.device.type == CPU.type,
        timeout_s=settings.abort_s,
        hopeless_because=watchdog.hopeless_because,
    )
    watchdog.set_hosts(joined.names, joined.pids)
    if joined.obstacle and links.rank == 0:
        log.warning("collectives inside a host go over the network's transport: %s", joined.obstacle)
    cross_host = None
    if joined.shares_memory and len(joined.hosts) > 1:
        channel = channels.take(links.gather_bytes)
        cross_host = CrossHost(links, joined.hosts, joined.group, channel=channel)
    return FlatCollectives(links, joined.hosts, joined.group, cross_host)


class Joined(NamedTuple):
    """The hosts of the ranks, as they found out together. The same on all ranks, but for `pids` and `group`.

    Attributes:
        hosts: the ranks of every host.
        names: by rank, the name of its host, with its task in the description of a cluster.
        pids: by rank of this host, its process, where that can be known here.
        shares_memory: the ranks of every host with several are in its memory together.
        group: this host's memory; None where the rank is alone, or no memory is shared.
        obstacle: why ranks of one host cannot share memory, if they should.
    """

    hosts: Hosts
    names: Sequence[str]
    pids: Mapping[int, int]
    shares_memory: bool
    group: HostGroup | None
    obstacle: str


def join(
    rank: int,
    gather: Gather,
    *,
    shared_memory: bool = True,
    timeout_s: float,
    hopeless_because: GiveUpCheck = never_hopeless,
    kinds: Sequence[Kind] = KINDS,
) -> Joined:
    """Finds out which ranks share a host, and connects those on this one. Collective over all ranks of `gather`.

    Args:
        gather: all-gather of bytes; keeps its own deadline.
        shared_memory: join them in the host's memory, too.
        timeout_s: longest wait for a rank of this host.
        hopeless_because: see `Barrier`.
        kinds: which memory to try, in order of preference; the same on every rank.

    Raises:
        TransportError: a rank of this host did not come.
    """
    layout = discover(rank, gather, kinds=kinds)
    ranks, kind = layout.host_of(rank)
    pids = {other: pid for other in ranks if (pid := layout.pids[other]) is not None}
    memory, path, problem = None, "", ""
    if shared_memory:
        problem = "; ".join(sorted(set(layout.reasons.values()))) if kind is None else why_unsupported()
    num_bytes = HostMemory.num_bytes(len(ranks))
    try:
        if shared_memory and kind is not None and not problem and rank == ranks[0]:
            memory, problem = tried(lambda: _mapped(SharedMemory.create(kind, num_bytes), size=len(ranks)))
            path = memory.path if memory is not None else ""
        paths = gathered(gather, path)
        if rank != ranks[0] and (path := paths[ranks[0]]):
            memory, problem = tried(lambda: _mapped(SharedMemory.attach(path, num_bytes)))
        about = gathered(gather, [host_name(), problem, _processors()])
    finally:
        if memory is not None:
            memory.forget()
    names, problems, processors = zip(*about, strict=True)
    obstacle = "; ".join(f"rank {other}: {why}" for other, why in enumerate(problems) if why)
    shares_memory = shared_memory and not obstacle and len(layout.hosts) < len(names)
    group = None
    if shares_memory and kind is not None and memory is not None:
        shared = HostMemory(
            memory,
            kind=kind,
            ranks=ranks,
            index=ranks.index(rank),
            names=[names[other] for other in ranks],
            pids=[layout.pids[other] for other in ranks],
            timeout_s=timeout_s,
            hopeless_because=hopeless_because,
        )
        group = HostGroup(shared, num_processors=len(set().union(*(processors[other] for other in ranks))))
        shared.wait()
    return Joined(layout.hosts, names, pids, shares_memory, group, obstacle)


def _processors() -> list[int]:
    """Returns those that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _mapped(memory: SharedMemory, *, size: int = 0) -> SharedMemory:
    """Returns the memory of a host, with its pages mapped; with a barrier of `size` ranks where it is new."""
    try:
        memory.prefault(0, len(memory.buffer))
        if size:
            Barrier.create(memory, size=size)
    except OSError:
        memory.forget()
        raise
    return memory
