"""Connects one rank with the others: by links, through the memory of its host, or by both.

    discover    finds out which ranks share a host
    join        does so, and connects those through memory
    connect     does so, and adds links to the other hosts: everything that a communicator uses

The ranks find out who shares a host by trying, never by inference: LOCAL_WORLD_SIZE says nothing about sub-groups,
containers or uneven layouts; equal host names say nothing about shared memory. So every rank offers shared memory with
a random number in it, and tries to read that of all others:

    1  gather     every rank's boot id, and the path and number of its memory
    2  try        open the memory of each rank with the same boot id; the right number in it means a shared host
    3  gather     the ranks that each has reached
    4  group      ranks that all reach each other, greedily by rank: the same result everywhere, from the same facts

Virtual machines cloned from one image have equal boot ids, and a PID means another process in another namespace; the
number settles both cases. If some ranks with equal boot ids cannot reach each other through memfds, steps 1 to 3 are
repeated with files in /dev/shm, which containers may share although their processes cannot see each other.

Cost: two gathers (four in the second case) of a few hundred bytes, one open and one read per neighbour.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ddp.collectives.placed import Hosts
from ddp.comm.flat_collectives import FlatCollectives
from ddp.comm.host_links import CPU, CrossHost, HostLinks, Settings
from ddp.comm.host_memory import HostMemory, tried
from ddp.comm.host_reduce import HostGroup
from ddp.comm.meeting.place import host_name
from ddp.comm.transport.edge import Gather, GiveUpCheck, gathered, never_hopeless
from ddp.comm.transport.shared_memory import KINDS, Barrier, Kind, SharedMemory, why_unsupported
from ddp.comm.watch.watchdog import Watchdog
from ddp.process.memory import processors
from ddp.process.terminal import log

Reached = Mapping[int, Sequence[Kind]]  # rank → the kinds of memory through which it was reached
PROBE_BYTES = 64


class Channels:
    """Numbers the channels of the transport. The groups of one process share one of these."""

    def __init__(self) -> None:
        self._last, self._lock = 0, threading.Lock()

    def take(self, gather: Gather) -> int:
        """Returns a channel that no other group with any of these ranks has. Collective over the ranks of `gather`.

        Another thread may take a channel for other ranks meanwhile. So each rank first reserves the number for itself.
        """
        while True:
            number: int = max(gathered(gather, self._last)) + 1
            with self._lock:
                is_free, self._last = number > self._last, max(number, self._last)
            if all(gathered(gather, is_free)):
                return number


def connect(
    links: HostLinks,
    watchdog: Watchdog,
    settings: Settings,
    channels: Channels,
    call_number: Callable[[], int],
    call_label: Callable[[], str],
) -> FlatCollectives:
    """Connects this rank with the others by every route that is possible here. Collective.

    Args:
        call_number, call_label: see `HostMemory`.

    Raises:
        TransportError: a rank did not take part.
    """
    joined = join(
        links.rank,
        links.gather_bytes,
        shared_memory=settings.shared_memory and settings.device.type == CPU.type,
        timeout_s=settings.abort_s,
        hopeless_because=watchdog.hopeless_because,
        call_number=call_number,
        call_label=call_label,
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
    """The hosts of the ranks. The same on all ranks, except for `pids` and `group`.

    Attributes:
        hosts: the ranks of every host.
        names: by rank, the name of its host, with its task in the description of a cluster.
        pids: by rank of this host, its process, if that is known here.
        shares_memory: on every host with several ranks, they share its memory.
        group: this host's memory; None if the rank is alone, or no memory is shared.
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
    call_number: Callable[[], int] = lambda: 0,
    call_label: Callable[[], str] = str,
    kinds: Sequence[Kind] = KINDS,
) -> Joined:
    """Finds out which ranks share a host, and connects those on this one. Collective over all ranks of `gather`.

    Args:
        gather: all-gather of bytes; keeps its own deadline.
        shared_memory: connect them through the host's memory, too.
        timeout_s: longest wait for a rank of this host.
        hopeless_because: see `Barrier`.
        call_number, call_label: see `HostMemory`.
        kinds: which memory to try, in order of preference; the same on every rank.

    Raises:
        TransportError: a rank of this host did not take part.
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
        about = gathered(gather, [host_name(), problem, processors()])
    finally:
        if memory is not None:
            memory.forget()
    names, problems, cores = zip(*about, strict=True)
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
            call_number=call_number,
            call_label=call_label,
        )
        group = HostGroup(shared, num_processors=len(set().union(*(cores[other] for other in ranks))))
        shared.wait()
    return Joined(layout.hosts, names, pids, shares_memory, group, obstacle)


def _mapped(memory: SharedMemory, *, size: int = 0) -> SharedMemory:
    """Returns the memory of a host, with its pages mapped; with a barrier of `size` ranks if it is new."""
    try:
        memory.prefault(0, len(memory.buffer))
        if size:
            Barrier.create(memory, size=size)
    except OSError:
        memory.forget()
        raise
    return memory


# --- which ranks share a host ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankLocation:
    """Location of a rank: its kernel, its process and its memory."""

    boot_id: str  # "" if the kernel does not say
    pid_namespace: str
    pid: int
    path: str  # of its memory; "" if it has none of that kind
    number: str  # written into that memory


class Neighbours(NamedTuple):
    """The result of the discovery. The same on every rank, except for `pids` and `reasons`.

    Attributes:
        hosts: the ranks of every host, ascending; hosts are ordered by their first rank.
        kinds: by host, the memory through which all its ranks reach each other; None for a single rank.
        pids: by rank, its process as this rank knows it; None if that is in another PID namespace.
        reasons: by rank under the same kernel, why it shares no memory with this one.
    """

    hosts: Hosts
    kinds: tuple[Kind | None, ...]
    pids: tuple[int | None, ...]
    reasons: Mapping[int, str]

    def host_of(self, rank: int) -> tuple[tuple[int, ...], Kind | None]:
        """Returns the ranks of this rank's host, and the kind of memory that they share."""
        return next((host, kind) for host, kind in zip(self.hosts, self.kinds, strict=True) if rank in host)


def discover(rank: int, gather: Gather, *, kinds: Sequence[Kind] = KINDS) -> Neighbours:
    """Finds out which ranks share a host. Collective over all ranks of `gather`.

    Args:
        gather: all-gather of bytes; keeps its own deadline.
        kinds: which memory to try, in order of preference; the same on every rank.
    """
    reached: list[dict[int, list[Kind]]] = []
    facts: list[RankLocation] = []
    reasons: dict[int, str] = {}
    for kind in kinds:
        facts, reached_now, reasons = _try(rank, gather, kind)
        reached = reached or [{} for _ in facts]
        for so_far, others in zip(reached, reached_now, strict=True):
            for other in others:
                so_far.setdefault(other, []).append(kind)
        if all(b in reached[a] for a in range(len(facts)) for b in _same_kernel(facts, a)):
            break
    hosts, chosen = group(reached)
    namespace = facts[rank].pid_namespace
    pids = tuple(each.pid if each.pid_namespace == namespace else None for each in facts)
    return Neighbours(hosts, chosen, pids, reasons)


def group(reached: Sequence[Reached]) -> tuple[Hosts, tuple[Kind | None, ...]]:
    """Groups ranks that all reach each other by one kind of memory: each joins the first such host, or starts one.

    Args:
        reached: by rank, the ranks that it reached, and how.

    Returns:
        The hosts, and by host the kind; None where a rank is alone.
    """
    hosts: list[list[int]] = []
    kinds: list[list[Kind]] = []
    for rank in range(len(reached)):
        for number, host in enumerate(hosts):
            common = [kind for kind in kinds[number] if all(_mutual(reached, rank, other, kind) for other in host)]
            if common:
                host.append(rank)
                kinds[number] = common
                break
        else:
            hosts.append([rank])
            kinds.append(list(KINDS))
    chosen = tuple(kind[0] if len(host) > 1 else None for host, kind in zip(hosts, kinds, strict=True))
    return tuple(tuple(host) for host in hosts), chosen


def _mutual(reached: Sequence[Reached], a: int, b: int, kind: Kind) -> bool:
    return kind in reached[a].get(b, ()) and kind in reached[b].get(a, ())


def _same_kernel(facts: Sequence[RankLocation], rank: int) -> list[int]:
    return [other for other, each in enumerate(facts) if other != rank and each.boot_id == facts[rank].boot_id]


def _try(rank: int, gather: Gather, kind: Kind) -> tuple[list[RankLocation], list[list[int]], dict[int, str]]:
    """Takes steps 1 to 3 with one kind of memory.

    Returns:
        Every rank's location; by rank, the ranks that it reached; and by rank, why this one did not reach it.
    """
    number = secrets.token_bytes(PROBE_BYTES)
    memory, own_reason = None, ""
    try:
        memory = SharedMemory.create(kind, PROBE_BYTES)
    except OSError as error:
        own_reason = str(error)
    try:
        path = ""
        if memory is not None:
            memory.buffer[:] = number
            path = memory.path
        mine = RankLocation(boot_id(), _pid_namespace(), os.getpid(), path, number.hex())
        facts = [RankLocation(**each) for each in gathered(gather, asdict(mine))]
        neighbours = _same_kernel(facts, rank)
        reasons = {other: own_reason or _why_out_of_reach(facts[other]) for other in neighbours}
        reached = gathered(gather, [other for other, reason in reasons.items() if not reason])
    finally:
        if memory is not None:
            memory.forget()
    return facts, reached, {other: reason for other, reason in reasons.items() if reason}


def _why_out_of_reach(neighbour: RankLocation) -> str:
    if not neighbour.path:
        return "it has no shared memory to offer"
    try:
        memory = SharedMemory.attach(neighbour.path, PROBE_BYTES)
    except OSError as error:
        return str(error)
    if memory.buffer[:].hex() != neighbour.number:
        return f"{neighbour.path} is another process's here"
    return ""


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
