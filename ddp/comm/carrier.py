"""How a collective gets done: by a schedule over the transport, in the memory of the host, or by both.

    way                     where it is possible    what happens
    "ring", "tree", …       everywhere              the schedule runs over the transport
    "shared_memory"         all ranks on one host   each rank adds up its slice of everyone's buffer, in memory
    "shared_memory+ring"    several hosts           add up inside every host, in memory; rank i of each host carries
                                                    slice i across, by a ring; hand the slices out, in memory

The last one keeps the link of a host busy with what must cross it and nothing else: each byte leaves a host as often as
if the host were one rank. Read `execute.py` for the first, `host_reduce.py` for the second; this file joins them.

All tensors here are flat, contiguous, and of the same length on all ranks. Errors are the transport's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ddp.collectives.catalog import ALL_REDUCE, SCHEDULES, all_reduce_schedules
from ddp.collectives.chunks import offsets
from ddp.collectives.placed import Hosts, rooted
from ddp.collectives.schedule import Schedule
from ddp.comm.arithmetic import COMBINE
from ddp.comm.execute import Scratch, execute, program
from ddp.comm.host_reduce import HostGroup
from ddp.comm.work import Runner, Work, done
from ddp.transport.edge import Transport, TransportError

IN_MEMORY = "shared_memory"
FEW_BYTES, FEW_RANKS = 64 << 10, 8  # of all together; up to so many, rounds cost more than messages
CROSSING_BYTES = 2 << 20  # so much of a buffer crosses between hosts while more is added up inside them


class Carrier:
    """The connections of one rank: its transport, and the memory that it shares with the other ranks of its host.

    Attributes:
        hosts: which ranks share a host, as far as is known; until `share_memory`, every rank is alone.
        group: this host's ranks in memory, if it has several and they can share it.
        all_reduces: every way of an all-reduce here, and the schedule that it runs over the transport, if any.
        waiting_for: told, before each wait, which rank it is for.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        device: torch.device,
        segment_bytes: int,
        timeout_s: float,
        hosts: Hosts | None = None,
    ) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self.transport = transport
        self.group: HostGroup | None = None
        self.hosts = hosts or tuple((rank,) for rank in range(self.world_size))
        self.all_reduces: dict[str, Schedule | None] = {**all_reduce_schedules(self.hosts)}
        self.waiting_for: Callable[[int], object] = lambda peer: None
        self.device, self._segment_bytes, self._timeout_s = device, segment_bytes, timeout_s
        self._scratch = Scratch()
        self._crossings = Runner(f"ddp-crossings-{self.rank}", device)
        self._counterparts: Sequence[int] = ()  # the ranks in this one's place on every host, if it carries a slice
        self._across: Transport | None = None  # the edges between those

    @property
    def shares_memory(self) -> bool:
        """Whether some ranks reach each other through memory."""
        return any(way.startswith(IN_MEMORY) for way in self.all_reduces)

    def know_hosts(self, hosts: Hosts) -> None:
        """Takes the layout that the ranks have found out together."""
        self.hosts = hosts
        self.all_reduces = {**all_reduce_schedules(hosts)}

    def share_memory(self, group: HostGroup | None, *, channel: int) -> None:
        """Adds the ways through memory. Every rank calls it, once all hosts of several ranks have their memory.

        Args:
            group: this host's memory; None where a rank is alone on its host.
            channel: a channel of the transport that nobody uses.
        """
        self.group = group
        if len(self.hosts) == 1:
            self.all_reduces[IN_MEMORY] = None
            return
        for place in range(self._num_slices()):
            column = [host[place] for host in self.hosts]
            edges = self.transport.among(column, channel)
            if edges is not None:
                self._counterparts, self._across = column, edges
        self.all_reduces |= {f"{IN_MEMORY}+{name}": schedule for name, schedule in ALL_REDUCE.items()}

    # --- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        flat: Tensor,  # [numel]
        op: str,
        way: str,
        *,
        sequence: int,
        divide_by: int = 1,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        """Combines `flat` over all ranks; then divides, once for each element."""
        schedule = self.all_reduces[way]
        if schedule is None:
            self._memory.all_reduce(flat, op, divide_by=divide_by, sequence=sequence, timeout_s=self._timeout_s)
        elif way.startswith(IN_MEMORY):
            self._through_hosts(flat, op, schedule, sequence=sequence, divide_by=divide_by, wire_dtype=wire_dtype)
        else:
            self._run(schedule, flat, op=op, divide_by=divide_by, wire_dtype=wire_dtype)

    def _through_hosts(
        self,
        flat: Tensor,
        op: str,
        schedule: Schedule,
        *,
        sequence: int,
        divide_by: int,
        wire_dtype: torch.dtype | None,
    ) -> None:
        """Inside the host, across, and inside again: piece by piece, so that memory works while the wire does.

        While piece k crosses, on a thread of its own, this one adds up piece k+1 and then hands out piece k−1. Hosts of
        different size: the smallest says how many carry.
        """
        num_pieces = max(1, flat.numel() * flat.element_size() // CROSSING_BYTES)
        bounds = offsets(flat.numel(), num_pieces)
        crossing: deque[tuple[Tensor, list[int], Work]] = deque()
        for start, stop in pairwise(bounds):
            piece = flat[start:stop]
            slices = offsets(len(piece), self._num_slices())
            if self.group is not None:
                slices += [len(piece)] * (self.group.size + 1 - len(slices))  # the others have nothing to carry
                self.group.reduce_scatter(piece, slices, op, sequence=sequence, timeout_s=self._timeout_s)
            cross = partial(self._cross, piece, slices, op, schedule, divide_by=divide_by, wire_dtype=wire_dtype)
            crossing.append((piece, slices, self._crossings.submit(cross) if num_pieces > 1 else done(cross())))
            if len(crossing) == 2:
                self._hand_out(*crossing.popleft(), sequence=sequence)
        self._hand_out(*crossing.popleft(), sequence=sequence)

    def _cross(
        self,
        piece: Tensor,
        slices: Sequence[int],
        op: str,
        schedule: Schedule,
        *,
        divide_by: int = 1,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        """Reduces this rank's slice with its counterparts', if it carries one."""
        if self._across is None:
            return
        place = self.group.index if self.group is not None else 0
        mine = piece[slices[place] : slices[place + 1]]
        try:
            self._run(schedule, mine, op=op, divide_by=divide_by, wire_dtype=wire_dtype, transport=self._across)
        except TransportError as error:
            error.peer = self._counterparts[error.peer]
            raise

    def _hand_out(self, piece: Tensor, slices: Sequence[int], crossed: Work, *, sequence: int) -> None:
        crossed.wait()
        if self.group is not None:
            self.group.all_gather(piece, slices, sequence=sequence, timeout_s=self._timeout_s)

    def reduce_scatter(self, flat: Tensor, bounds: Sequence[int], op: str, *, sequence: int) -> None:
        """Afterwards flat[bounds[r]:bounds[r + 1]] of rank r is combined; the rest is undefined."""
        if self._is_in_memory(flat):
            self._memory.reduce_scatter(flat, bounds, op, sequence=sequence, timeout_s=self._timeout_s)
        else:
            self._run(_by_size("reduce_scatter", flat, self.world_size), flat, bounds, op=op)

    def all_gather(self, flat: Tensor, bounds: Sequence[int], *, sequence: int) -> None:
        """Gives rank r's flat[bounds[r]:bounds[r + 1]] to everyone."""
        if self._is_in_memory(flat):
            self._memory.all_gather(flat, bounds, sequence=sequence, timeout_s=self._timeout_s)
        else:
            self._run(_by_size("all_gather", flat, self.world_size), flat, bounds)

    def broadcast(self, flat: Tensor, root: int, *, sequence: int) -> None:
        """Gives the root's `flat` to everyone."""
        if self._is_in_memory(flat):
            self._memory.broadcast(flat, root, sequence=sequence, timeout_s=self._timeout_s)
        else:
            self._run(rooted(SCHEDULES["tree_broadcast"], root), flat)

    def reduce(self, flat: Tensor, root: int, op: str) -> None:
        """Combines into the root's `flat`; the others' is undefined."""
        self._run(rooted(SCHEDULES["tree_reduce"], root), flat, op=op)

    def gather(self, flat: Tensor, bounds: Sequence[int], root: int) -> None:
        """Brings rank r's flat[bounds[r]:bounds[r + 1]] to the root."""
        self._run(rooted(SCHEDULES["tree_gather"], root), flat, bounds)

    def scatter(self, flat: Tensor, bounds: Sequence[int], root: int) -> None:
        """Brings the root's flat[bounds[r]:bounds[r + 1]] to rank r; the rest is undefined."""
        self._run(rooted(SCHEDULES["tree_scatter"], root), flat, bounds)

    def all_to_all(
        self, outgoing: Tensor, going: Sequence[int], incoming: Tensor, coming: Sequence[int], *, longest: int
    ) -> None:
        """Chunk r of every rank's `outgoing` becomes chunk (that rank) of rank r's `incoming`.

        Args:
            going, coming: where their chunks begin, and where the last one ends.
            longest: elements of the longest chunk on any rank.
        """
        mine = slice(going[self.rank], going[self.rank + 1])
        incoming[coming[self.rank] : coming[self.rank + 1]].copy_(outgoing[mine])
        buffers, bounds = [outgoing, incoming], [going, coming]
        self._execute(SCHEDULES["all_to_all_exchange"], buffers, bounds, self.transport, longest=longest)

    def barrier(self, *, sequence: int) -> None:
        """Returns once every rank has come."""
        if self.group is not None:  # all of this host are here
            self.group.barrier(sequence=sequence, timeout_s=self._timeout_s)
            if len(self.hosts) == 1:
                return
        flag = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if not self.shares_memory:
            self._run(SCHEDULES["recursive_doubling"], flag, op="max")
        elif self.group is None or self.group.index == 0:
            self._cross(flag, [0, 1], "max", SCHEDULES["recursive_doubling"])
        if self.group is not None:  # and all of the others
            self.group.barrier(sequence=sequence, timeout_s=self._timeout_s)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everyone's bytes, by rank; always over the transport, so that it works where memory is in doubt."""
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(payload)
        self._run(_by_size("all_gather", sizes, self.world_size), sizes, range(self.world_size + 1))
        bounds = [0, *accumulate(sizes.tolist())]
        data = torch.zeros(bounds[-1], dtype=torch.uint8, device=self.device)
        if payload:
            data[bounds[self.rank] : bounds[self.rank + 1]] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._run(_by_size("all_gather", data, self.world_size), data, bounds)
        everything = data.cpu().numpy().tobytes()
        return [everything[start:stop] for start, stop in pairwise(bounds)]

    def interrupt(self, culprit: int, reason: str) -> None:
        """Ends the waits of this process with a TransportError. From any thread.

        Args:
            culprit: the rank that will not come.
        """
        if self.group is not None:
            self.group.interrupt(culprit)
        self.transport.interrupt(reason)

    def close(self) -> None:
        """Gives the memory back."""
        self._crossings.close()
        if self.group is not None:
            self.group.close()
            self.group = None

    # --- what they are made of ---------------------------------------------------------------------------------------

    def _run(
        self,
        schedule: Schedule,
        flat: Tensor,
        bounds: Sequence[int] | None = None,
        *,
        op: str = "sum",
        divide_by: int = 1,
        wire_dtype: torch.dtype | None = None,
        transport: Transport | None = None,
    ) -> None:
        """Executes a schedule over one buffer, cut evenly unless told where."""
        transport = transport or self.transport
        if transport.world_size == 1 and divide_by != 1:
            flat.div_(divide_by)  # nobody adds to it
        if bounds is None:
            bounds = offsets(flat.numel(), schedule.num_chunks(transport.world_size))
        self._execute(schedule, [flat], [bounds], transport, op=op, divide_by=divide_by, wire_dtype=wire_dtype)

    def _execute(
        self,
        schedule: Schedule,
        buffers: Sequence[Tensor],
        bounds: Sequence[Sequence[int]],
        transport: Transport,
        *,
        op: str = "sum",
        divide_by: int = 1,
        wire_dtype: torch.dtype | None = None,
        longest: int | None = None,
    ) -> None:
        ranks = self._counterparts if transport is self._across else range(self.world_size)
        execute(
            program(
                schedule.algorithm,
                transport.rank,
                transport.world_size,
                tuple(map(tuple, bounds)),
                segment_numel=max(1, self._segment_bytes // buffers[0].element_size()),
                longest=longest,
            ),
            buffers,
            transport,
            scratch=self._scratch,
            combine=COMBINE[op].into,
            timeout_s=self._timeout_s,
            wire_dtype=wire_dtype,
            waiting_for=lambda peer: self.waiting_for(ranks[peer]),
            finish=None if divide_by == 1 else lambda part: part.div_(divide_by),
        )

    @property
    def _memory(self) -> HostGroup:
        assert self.group is not None
        return self.group

    def _is_in_memory(self, flat: Tensor) -> bool:
        return self.group is not None and len(self.hosts) == 1 and flat.device.type == "cpu"

    def _num_slices(self) -> int:
        return min(len(host) for host in self.hosts)


def _by_size(operation: str, flat: Tensor, num_ranks: int) -> Schedule:
    """Of those that move no byte twice: a ring, which keeps to neighbours; for few bytes those of few rounds."""
    if flat.nbytes > FEW_BYTES:
        return SCHEDULES[f"ring_{operation}"]
    return SCHEDULES[f"{'all_to_all' if num_ranks <= FEW_RANKS else 'circulant'}_{operation}"]
