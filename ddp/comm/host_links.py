"""One rank's edges: runs the schedules of collectives over a transport.

All tensors here are flat, contiguous, and of the same length on all ranks. The messages of other tensors never match:
the transport separates collectives that differ in anything that the length of a message depends on. A failed transfer
is a `TransportError` that names the peer by its rank in the communicator.

`CrossHost` is an all-reduce over several hosts: in the memory of each host, between the hosts, and in memory again.

    host 0    ranks 0 1        add up in memory    rank 0 ── slice 0 ── rank 2        hand the slices
    host 1    ranks 2 3        on each host        rank 1 ── slice 1 ── rank 3        out in memory

Ranks in the same place on every host are *counterparts*; each group of counterparts carries its own slice across, by
any algorithm of the catalog. If hosts differ in size, the smallest one sets how many ranks of each host carry a slice.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.placed import Hosts, rooted
from ddp.collectives.schedule import SEGMENT_BYTES, Goal, Schedule, offsets
from ddp.collectives.shards import nodes_by_rank
from ddp.comm.call_queue import Runner, Work, done
from ddp.comm.execute import Program, Scratch, execute, program
from ddp.comm.host_reduce import HostGroup
from ddp.comm.nccl import NcclTransport
from ddp.comm.reduction import SUM, Reduction, divided_, is_identity
from ddp.comm.transport.edge import Transport, TransportError
from ddp.comm.watch.watchdog import Watchdog
from ddp.setting import Additions

CPU = torch.device("cpu")
WARN_S = 10.0
MAX_PLANS = 256
FEW_BYTES, FEW_RANKS = 64 << 10, 8  # of all ranks; up to these, a round costs more than its messages


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one communicator, which its subgroups inherit. The same on all ranks, except for `device`.

    Attributes:
        device: the device of this rank's tensors.
        backend: "gloo", "nccl", or "auto": the result of `agreed_backend`.
        generation: version of the membership.
        algorithm: the meaning of `algorithm="auto"` in a call; "auto" here: the fastest route.
        order: "canonical" lets "auto" take only routes whose additions follow the canonical binary tree over the ranks.
        shared_memory: let CPU tensors go through the memory of a host if its ranks share it.
        segment_bytes: size of a pipelining piece of a chunk.
        warn_s: seconds in one wait after which a warning names the missing rank.
        abort_s: longest wait for a neighbour, in seconds.
        debug: compare the ranks' calls before every collective.
    """

    device: torch.device = CPU
    backend: str = "auto"
    generation: int = 0
    algorithm: str = "auto"
    order: Additions = "any"
    shared_memory: bool = True
    segment_bytes: int = SEGMENT_BYTES
    warn_s: float = WARN_S
    abort_s: float = 60.0
    debug: bool = False


class HostLinks:
    """Runs schedules on this rank, over one transport.

    Args:
        watchdog: records the rank that each wait is for.
        ranks: the numbers of the transport's ranks in the communicator; the same numbers unless given.
    """

    def __init__(
        self, transport: Transport, watchdog: Watchdog, settings: Settings, *, ranks: Sequence[int] = ()
    ) -> None:
        self.rank, self.world_size, self.transport = transport.rank, transport.world_size, transport
        self._watchdog, self._settings, self._ranks = watchdog, settings, ranks or range(self.world_size)
        self._scratch, self._landings = Scratch(), Scratch()
        self._is_enqueued = isinstance(transport, NcclTransport)  # then the host never waits
        self._plan = lru_cache(MAX_PLANS)(partial(_planned, transport))

    def among(self, ranks: Sequence[int], channel: int) -> HostLinks:
        """Returns the edges between some of the ranks, including this one. Collective over them.

        Args:
            channel: an unused channel of the transport.
        """
        edges = self.transport.among(ranks, channel, self._watchdog.hopeless_because)
        return HostLinks(edges, self._watchdog, self._settings, ranks=ranks)

    def run(
        self, schedule: Schedule, flat: Tensor, bounds: Sequence[int] | None = None, reduction: Reduction = SUM
    ) -> None:
        """Runs a schedule over one buffer.

        Args:
            bounds: the start of each chunk, and the end of the last one; cut evenly unless given.
        """
        if self.world_size == 1:  # there is no transfer and no addition
            divided_(flat, reduction.divide_by)
            return
        unit, shrink = (1, 1) if reduction.wire is None else (reduction.wire.unit, reduction.wire.shrink)
        if bounds is None:
            bounds = offsets(flat.numel(), schedule.num_chunks(self.world_size), unit)
        if shrink != 1:
            flat.mul_(1 / shrink)  # a power of two, so it changes no digit
        is_divided = not is_identity(reduction.divide_by)
        if is_divided:
            reduction = reduction._replace(divide_by=reduction.divide_by / shrink)
        self._execute(schedule, [flat], [bounds], reduction)
        if shrink != 1 and not is_divided:
            flat.mul_(shrink)

    def run_over_shards(
        self,
        schedule: Schedule,
        rows: Sequence[Tensor],
        bounds: Sequence[int] | None = None,
        reduction: Reduction = SUM,
        *,
        chunk: int | None = None,
    ) -> None:
        """Runs a schedule over the shards of a batch. The result is in `rows[0]`; the other rows are undefined
        afterwards.

        Args:
            rows: [numel] each: the sums of this rank's nodes (`nodes_by_rank`), in their order.
            bounds: the start of each chunk of a row, and the end of the last one; cut evenly unless given.
            chunk: the chunk that this rank owns; its own number unless given.
        """
        assert schedule.num_shards is not None and reduction.wire is None, "sums over shards travel as they are"
        nodes = nodes_by_rank(self.world_size, schedule.num_shards)
        assert len(rows) == len(nodes[self.rank]), f"{len(rows)} rows for {len(nodes[self.rank])} nodes"
        if self.world_size == 1:
            self.run(schedule, rows[0], reduction=reduction)
            return
        if bounds is None:
            bounds = offsets(rows[0].numel(), schedule.num_chunks(self.world_size))
        # A landing has this rank's chunk of another rank's node, and its other chunks are empty.
        chunk = self.rank if chunk is None else chunk
        numel, num_landings = bounds[chunk + 1] - bounds[chunk], sum(map(len, nodes)) - len(rows)
        self._landings.reset()
        room = self._landings.take(num_landings * numel, rows[0].dtype, rows[0].device)
        landings = [room[number * numel : (number + 1) * numel] for number in range(num_landings)]
        of_landing = [0] * (chunk + 1) + [numel] * (self.world_size - chunk)
        places = [*[bounds] * len(rows), *[of_landing] * num_landings]
        self._execute(schedule, [*rows, *landings], places, reduction)

    def exchange(
        self, outgoing: Tensor, bounds_out: Sequence[int], incoming: Tensor, bounds_in: Sequence[int], *, longest: int
    ) -> None:
        """Sends chunk r of `outgoing` to each rank r, as the chunk of its `incoming` that has this rank's number.

        Args:
            bounds_out, bounds_in: the start of each of their chunks, and the end of the last one.
            longest: elements of the longest chunk on any rank.
        """
        mine = slice(bounds_out[self.rank], bounds_out[self.rank + 1])
        incoming[bounds_in[self.rank] : bounds_in[self.rank + 1]].copy_(outgoing[mine])
        self._execute(SCHEDULES["all_to_all_exchange"], [outgoing, incoming], [bounds_out, bounds_in], longest=longest)

    def all_gather(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Copies rank r's flat[bounds[r]:bounds[r + 1]] to every rank, in place."""
        self.run(by_size("all_gather", flat.nbytes, self.world_size), flat, bounds)

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Copies the root's values to every rank, in place."""
        self.along_tree("broadcast", flat, root)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        flag = torch.zeros(1, dtype=torch.uint8, device=self._settings.device)
        self.run(SCHEDULES["recursive_doubling"], flag, reduction=Reduction("max"))
        self.on_host(flag)  # on a GPU the host waits here

    def along_tree(
        self, operation: str, flat: Tensor, root: int, bounds: Sequence[int] | None = None, reduction: Reduction = SUM
    ) -> None:
        """Runs "gather", "scatter", "reduce" or "broadcast" over a tree with this root, in place.

        Args:
            bounds: rank r's part of a gather or scatter is flat[bounds[r]:bounds[r + 1]].
        """
        self.run(rooted(SCHEDULES[f"tree_{operation}"], root), flat, bounds, reduction)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank."""
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self._settings.device)
        sizes[self.rank] = len(payload)
        self.all_gather(sizes, range(self.world_size + 1))
        bounds = [0, *accumulate(self.on_host(sizes).tolist())]
        data = torch.zeros(bounds[-1], dtype=torch.uint8, device=self._settings.device)
        if payload:
            data[bounds[self.rank] : bounds[self.rank + 1]] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self.all_gather(data, bounds)
        everything = self.on_host(data).numpy().tobytes()
        return [everything[start:stop] for start, stop in pairwise(bounds)]

    def on_host(self, result: Tensor) -> Tensor:
        """Returns the result of a collective in a tensor, on the CPU.

        Raises:
            TransportError: the collective was aborted meanwhile, so the numbers are undefined.
        """
        numbers = result.cpu()
        if self._is_enqueued and (culprit := self._watchdog.hopeless_because()):
            raise TransportError(*culprit, timed_out=True)
        return numbers

    def _waits_for(self, peer: int) -> None:
        if not self._is_enqueued:
            self._watchdog.waits_for(self._ranks[peer])

    def _execute(
        self,
        schedule: Schedule,
        buffers: Sequence[Tensor],
        bounds: Sequence[Sequence[int]],
        reduction: Reduction = SUM,
        longest: int | None = None,
    ) -> None:
        # No segments on a stream: on a GPU, more commands cost more than overlapping additions and transfers saves.
        segment_bytes = sys.maxsize if self._is_enqueued else self._settings.segment_bytes
        segment_numel = max(1, segment_bytes // buffers[0].element_size())
        if reduction.wire is not None:
            segment_numel = -(-segment_numel // reduction.wire.unit) * reduction.wire.unit
        places = tuple(map(tuple, bounds))
        wire = None if reduction.wire is None else (reduction.wire.dtype, reduction.wire.unit, reduction.wire.shrink)
        steps, edges = self._plan(schedule, places, segment_numel, longest, (buffers[0].dtype, reduction.op, wire))
        try:
            execute(
                steps,
                buffers,
                edges,
                scratch=self._scratch,
                reduction=reduction,
                is_shared=schedule.goal is not Goal.REDUCE_SCATTER,
                timeout_s=self._settings.abort_s,
                waiting_for=self._waits_for,
            )
        except TransportError as error:
            error.peer = self._ranks[error.peer]
            raise


def _planned(
    transport: Transport,
    schedule: Schedule,
    places: tuple[tuple[int, ...], ...],
    segment_numel: int,
    longest: int | None,
    numbers: tuple[object, ...],
) -> tuple[Program, Transport]:
    """Returns this rank's program, and edges on which its messages match only those of the same schedule.

    Args:
        places: by buffer, its bounds. Those of buffer 0 are the same on all ranks, unless `longest` is given.
        numbers: the dtype of the elements, and the operation on them.
    """
    steps = program(
        schedule.algorithm,
        transport.rank,
        transport.world_size,
        places,
        segment_numel=segment_numel,
        longest=longest,
    )
    shared = places[0] if longest is None else longest
    return steps, transport.for_collective((_spelled(schedule), shared, segment_numel, numbers))


def _spelled(part: object) -> str:
    """Returns the name of an algorithm and of its parts: the same text in every process."""
    if isinstance(part, partial):
        return f"{_spelled(part.func)}({', '.join(map(_spelled, (*part.args, *part.keywords.values())))})"
    if isinstance(part, Schedule):
        return _spelled(part.algorithm)
    return getattr(part, "__qualname__", repr(part))


def by_size(operation: str, nbytes: int, num_ranks: int) -> Schedule:
    """Returns a schedule: for many bytes a ring, in which ranks talk to neighbours only; else one with few rounds."""
    if nbytes > FEW_BYTES:
        return SCHEDULES[f"ring_{operation}"]
    return SCHEDULES[f"{'all_to_all' if num_ranks <= FEW_RANKS else 'circulant'}_{operation}"]


# --- over hosts whose ranks share memory ------------------------------------------------------------------------------


CROSSING_BYTES = 2 << 20  # the part of a buffer that crosses between hosts while the next part is added up inside them


class CrossHost:
    """This rank's part in the collectives between its host and the others.

    Args:
        wire: edges to all ranks.
        group: this host's memory; None if the rank is alone.
        channel: an unused channel of the transport.

    Attributes:
        slices: by rank, the number of its slice in `reduce_scatter` and `all_gather`; None if hosts differ in size.
            Counterparts have adjacent slices, because the ranks of a host add up the terms of these slices in one
            piece.
        runner: runs the crossings of a long buffer.
    """

    def __init__(self, links: HostLinks, hosts: Hosts, group: HostGroup | None, *, channel: int) -> None:
        self._group, self._hosts = group, hosts
        self._place = group.index if group is not None else 0
        self._num_slices = min(map(len, hosts))
        self.slices: list[int] | None = None
        if self._num_slices == max(map(len, hosts)):
            order = [rank for counterparts in zip(*hosts, strict=True) for rank in counterparts]
            self.slices = [order.index(rank) for rank in range(len(order))]
        self._counterparts = None  # if this rank carries nothing
        if self._place < self._num_slices:
            self._counterparts = links.among([host[self._place] for host in hosts], channel)
        self.runner = Runner(f"ddp-crossings-{links.rank}", torch.device("cpu"))

    def all_reduce(self, flat: Tensor, schedule: Schedule, reduction: Reduction) -> None:
        """Reduces `flat` over all ranks, piece by piece, so that work in memory overlaps with the transfers.

        While another thread sends piece k across, this thread hands out piece k−1 and then adds up piece k+1.

        Args:
            flat: [numel].
            schedule: of the crossing.
        """
        crossing: deque[tuple[Tensor, list[int], Work[None]]] = deque()
        bounds = offsets(flat.numel(), num_pieces(flat.nbytes))
        for start, stop in pairwise(bounds):
            piece = flat[start:stop]
            slices = offsets(len(piece), self._num_slices)
            if self._group is not None:
                slices += [len(piece)] * (self._group.size + 1 - len(slices))  # the other ranks carry nothing
                self._group.reduce_scatter(piece, slices, reduction.op)
            cross = partial(self._cross, piece, slices, schedule, reduction)
            crossing.append((piece, slices, self.runner.submit(cross) if len(bounds) > 2 else done(cross())))
            if len(crossing) == 2:
                self._hand_out(*crossing.popleft())
        self._hand_out(*crossing.popleft())

    def reduce_scatter(self, flat: Tensor, bounds: Sequence[int], reduction: Reduction) -> None:
        """Reduces each rank's slice of `flat` over all ranks, in place; its other slices are undefined afterwards.

        Args:
            bounds: the start of each slice, in the order of `slices`, and the end of the last one.
        """
        num_hosts = len(self._hosts)
        if self._group is not None:
            self._group.reduce_scatter(flat, bounds[::num_hosts], reduction.op)
        self._run("reduce_scatter", flat, bounds, reduction)

    def all_gather(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Copies each rank's slice of `flat` to every rank, in place.

        Args:
            bounds: as in `reduce_scatter`.
        """
        self.gather_across(flat, bounds)
        if self._group is not None:
            self._group.all_gather(flat, bounds[:: len(self._hosts)])

    def gather_across(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Copies to each rank the slices of its counterparts, which are adjacent to its own, in place.

        Args:
            bounds: as in `reduce_scatter`.
        """
        self._run("all_gather", flat, bounds, SUM)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        if self._group is not None:
            self._group.barrier()  # all ranks of this host have arrived
        if self._place == 0 and self._counterparts is not None:
            self._counterparts.barrier()
        if self._group is not None:
            self._group.barrier()  # and those of all other hosts

    def close(self) -> None:
        """Ends the thread."""
        self.runner.close()

    def _run(self, operation: str, flat: Tensor, bounds: Sequence[int], reduction: Reduction) -> None:
        """Runs a schedule among the counterparts, on the range that spans their slices."""
        assert self._counterparts is not None
        first = self._place * len(self._hosts)
        mine = bounds[first : first + len(self._hosts) + 1]
        part = flat[mine[0] : mine[-1]]
        schedule = by_size(operation, part.nbytes, len(self._hosts))
        self._counterparts.run(schedule, part, [bound - mine[0] for bound in mine], reduction)

    def _cross(self, piece: Tensor, slices: Sequence[int], schedule: Schedule, reduction: Reduction) -> None:
        """Reduces this rank's slice over its counterparts, if it carries one."""
        if self._counterparts is not None:
            mine = piece[slices[self._place] : slices[self._place + 1]]
            self._counterparts.run(schedule, mine, reduction=reduction)

    def _hand_out(self, piece: Tensor, slices: Sequence[int], crossed: Work[None]) -> None:
        crossed.wait()
        if self._group is not None:
            self._group.all_gather(piece, slices)


def num_pieces(nbytes: int) -> int:
    """Returns the number of pieces in which a buffer of this size crosses between hosts."""
    return max(1, nbytes // CROSSING_BYTES)
