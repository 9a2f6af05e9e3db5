"""Connects one rank with the others: by edges, in the memory of its host, and by both together.

    join        finds out which ranks share a host, and connects this rank with those on its host, through memory
    connect     does the same, and adds edges to the other hosts: everything that a communicator uses
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ddp.collectives.placed import Hosts
from ddp.comm.across import Across
from ddp.comm.arithmetic import SUM, Reduction
from ddp.comm.carrier import Carriers
from ddp.comm.host_memory import HostMemory, tried
from ddp.comm.host_reduce import HostGroup
from ddp.comm.settings import Settings
from ddp.comm.transport.edge import InVain, has_hope
from ddp.comm.transport.shared_memory import KINDS, Barrier, Kind, SharedMemory, why_unsupported
from ddp.comm.transport.topology import Gather, discover
from ddp.comm.watch.watchdog import Watchdog
from ddp.comm.way import Way, possible_ways
from ddp.comm.wire import Wire, by_size
from ddp.process.log import log


@dataclass(frozen=True)
class Links:
    """The connections of one rank to the others.

    Attributes:
        wire: edges to all ranks.
        hosts: the ranks of every host.
        ways: every way that an all-reduce can go here, by name.
        group: this host's ranks in memory, if it has several and they share it.
        across: connects the memories of several hosts, where ranks of a host share memory.
    """

    wire: Wire
    hosts: Hosts
    ways: Mapping[str, Way]
    group: HostGroup | None = None
    across: Across | None = None

    def memory_of(self, flat: Tensor) -> HostGroup | None:
        """Returns the memory in which all ranks reach such a tensor, if they share any."""
        return self.group if self.across is None and flat.is_cpu else None

    def offers(self, algorithm: str) -> bool:
        """Returns True for "auto", and for any name that a way here answers to."""
        return algorithm == "auto" or any(way.answers_to(algorithm) for way in self.ways.values())

    def all_reduce(self, flat: Tensor, way: Way, reduction: Reduction = SUM, *, sequence: int = 0) -> None:
        """Combines `flat` over all ranks in the given way, in place."""
        if way.schedule is None:
            assert self.group is not None  # `Auto.way` refuses a tensor that this memory cannot reach
            self.group.all_reduce(flat, reduction.op, divide_by=int(reduction.divide_by), sequence=sequence)
        elif way.in_memory:
            assert self.across is not None
            self.across.all_reduce(flat, way.schedule, reduction, sequence=sequence)
        else:
            self.wire.run(way.schedule, flat, reduction=reduction)

    @cached_property
    def slices(self) -> list[int]:
        """By rank, the number of its slice in `reduce_scatter` and `all_gather`."""
        return (self.across.slices if self.across is not None else None) or list(range(self.wire.world_size))

    @cached_property
    def carriers(self) -> Carriers:
        """The part of each tensor that every rank carries from its host to the others."""
        shares_memory = self.group is not None or self.across is not None
        hosts = self.hosts if shares_memory else [[rank] for rank in range(self.wire.world_size)]
        at = {rank: (number, place) for number, host in enumerate(hosts) for place, rank in enumerate(host)}
        numbers, places = zip(*(at[rank] for rank in range(self.wire.world_size)), strict=True)
        return Carriers(numbers, places, min(map(len, hosts)))

    def sum_in_host(self, flat: Tensor, reduction: Reduction = SUM, *, sequence: int = 0) -> None:
        """Combines `flat` over the ranks that share this host's memory, in place."""
        if self.group is not None and flat.is_cpu:
            self.group.all_reduce(flat, reduction.op, divide_by=int(reduction.divide_by), sequence=sequence)
        elif reduction.divide_by != 1:
            flat.div_(reduction.divide_by)

    def reduce_scatter(
        self, flat: Tensor, bounds: Sequence[int], reduction: Reduction = SUM, *, sequence: int = 0
    ) -> None:
        """Combines each rank's slice of `flat` over all ranks, in place; the rest of `flat` is undefined then."""
        if memory := self.memory_of(flat):
            memory.reduce_scatter(flat, bounds, reduction.op, divide_by=int(reduction.divide_by), sequence=sequence)
            return
        undivided = reduction._replace(divide_by=1)  # a schedule takes partial sums that it passes on for complete ones
        if across := self._slicing(flat):
            across.reduce_scatter(flat, bounds, undivided, sequence=sequence)
        else:
            self.wire.run(by_size("reduce_scatter", flat.nbytes, self.wire.world_size), flat, bounds, undivided)
        if reduction.divide_by != 1:
            number = self.slices[self.wire.rank]
            flat[bounds[number] : bounds[number + 1]].div_(reduction.divide_by)

    def all_gather(self, flat: Tensor, bounds: Sequence[int], *, sequence: int = 0) -> None:
        """Gives everyone each rank's slice of `flat`, in place."""
        if memory := self.memory_of(flat):
            memory.all_gather(flat, bounds, sequence=sequence)
        elif across := self._slicing(flat):
            across.all_gather(flat, bounds, sequence=sequence)
        else:
            self.wire.run(by_size("all_gather", flat.nbytes, self.wire.world_size), flat, bounds)

    def _slicing(self, flat: Tensor) -> Across | None:
        """Returns what connects the hosts' memories, if such a tensor goes through it in slices."""
        return self.across if self.across is not None and self.across.slices and flat.is_cpu else None

    def close(self) -> None:
        """Gives the memory back."""
        if self.across is not None:
            self.across.close()
        if self.group is not None:
            self.group.close()


class Channels:
    """Numbers the channels of the transport. The groups of one process share one of these."""

    def __init__(self) -> None:
        self._last, self._lock = 0, threading.Lock()

    def take(self, gather: Gather) -> int:
        """Returns a channel that no group with any of these ranks has. Collective over the ranks of `gather`.

        Another thread may be taking one for other ranks meanwhile. So each rank first reserves the number for itself.
        """
        while True:
            number = max(int(last) for last in gather(str(self._last).encode())) + 1
            with self._lock:
                is_free, self._last = number > self._last, max(number, self._last)
            if all(answer == b"free" for answer in gather(b"free" if is_free else b"taken")):
                return number


def connect(wire: Wire, watchdog: Watchdog, settings: Settings, channels: Channels) -> Links:
    """Connects this rank with the others in every way that is possible here. Collective.

    Raises:
        TransportError: a rank did not take part.
    """
    joined = join(
        wire.rank,
        wire.gather_bytes,
        shared_memory=settings.shared_memory and settings.device.type == "cpu",
        timeout_s=settings.abort_s,
        in_vain=watchdog.in_vain,
    )
    watchdog.know_hosts(joined.names, joined.pids)
    if joined.obstacle and wire.rank == 0:
        log.warning("collectives inside a host go over the network's transport: %s", joined.obstacle)
    across = None
    if joined.shares_memory and len(joined.hosts) > 1:
        channel = channels.take(wire.gather_bytes)
        across = Across(wire, joined.hosts, joined.group, channel=channel)
    ways = possible_ways(joined.hosts, shared_memory=joined.shares_memory)
    return Links(wire, joined.hosts, ways, joined.group, across)


class Joined(NamedTuple):
    """The hosts of the ranks, as they found out together. The same on all ranks, but for `pids` and `group`.

    Attributes:
        hosts: the ranks of every host.
        names: by rank, the name of its host.
        pids: by rank of this host, its process, where that can be known here.
        shares_memory: the ranks of every host with several are in its memory together.
        group: this host's memory; None where the rank is alone, or nobody shares any.
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
    in_vain: InVain = has_hope,
    kinds: Sequence[Kind] = KINDS,
) -> Joined:
    """Finds out which ranks share a host, and connects those on this one. Collective over all ranks of `gather`.

    Args:
        gather: all-gather of bytes; keeps a deadline of its own.
        shared_memory: join them in the host's memory, too.
        timeout_s: longest wait for a rank of this host.
        in_vain: see `Barrier`.
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
            memory, problem = tried(lambda: _first(kind, num_bytes, len(ranks)))
            path = memory.path if memory is not None else ""
        paths = gather(path.encode())
        if rank != ranks[0] and (path := paths[ranks[0]].decode()):
            memory, problem = tried(lambda: _further(path, num_bytes))
        about = [json.loads(text) for text in gather(json.dumps([_name(), problem, _processors()]).encode())]
    finally:
        if memory is not None:
            memory.forget()
    names, problems, processors = zip(*about, strict=True)
    obstacle = "; ".join(f"rank {other}: {why}" for other, why in enumerate(problems) if why)
    shares_memory = shared_memory and not obstacle and len(layout.hosts) < len(names)
    group = None
    if shares_memory and kind is not None and memory is not None:
        index = ranks.index(rank)
        barrier = Barrier(
            memory, 0, index=index, ranks=ranks, pids=[layout.pids[other] for other in ranks], in_vain=in_vain
        )
        group = HostGroup(
            HostMemory(
                memory,
                barrier,
                kind=kind,
                ranks=ranks,
                index=index,
                names=[names[other] for other in ranks],
                timeout_s=timeout_s,
            ),
            num_processors=len(set().union(*(processors[other] for other in ranks))),
        )
        barrier.wait(timeout_s)
    return Joined(layout.hosts, names, pids, shares_memory, group, obstacle)


def _name() -> str:
    return socket.gethostname()


def _processors() -> list[int]:
    """Returns those that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _first(kind: Kind, num_bytes: int, size: int) -> SharedMemory:
    """Makes the memory of a host, on its first rank."""
    memory = SharedMemory.create(kind, num_bytes)
    try:
        memory.prefault(0, num_bytes)
        Barrier.create(memory, 0, size=size)
    except OSError:
        memory.forget()
        raise
    return memory


def _further(path: str, num_bytes: int) -> SharedMemory:
    """Maps the memory of a host, on its other ranks."""
    memory = SharedMemory.attach(path, num_bytes)
    memory.prefault(0, num_bytes)
    return memory
