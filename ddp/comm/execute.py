"""Runs a schedule on real memory: the one executor behind every collective.

Segments and lanes. Every chunk is cut into segments of at most `segment_bytes`. Segment j of all chunks is *lane*
j: a whole collective of its own, on its own pieces of the buffer. All lanes post their first round at once; then
the executor takes them in turn: wait for the lane's round, add what came in, post the lane's next round. So while
one segment is being added, the others are on the wire: that is the pipelining.

    lane 0   ▓ post ─── wire ─── ▓ add, post ─── wire ─── ▓ …
    lane 1     ▓ post ─── wire ─── ▓ add, post ─── wire ─── ▓ …

Every rank takes its lanes in the same order, so that messages between two ranks match in order of posting.

Note "narrow wire". With a `wire_dtype` every message is cast to it, and what arrives is added to the wide value that is
there: the sums are accumulated in the tensor's own type. A sender rounds its own copy too: then two ranks that exchange
their parts and both add them (recursive doubling) get the same bits, and so does whoever keeps what it passed on.
What never travelled is rounded at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ddp.collectives.schedule import Recv, Round, Send
from ddp.transport.edge import Pending, Transfer, Transport

Combine = Callable[[Tensor, Tensor], object]  # combine(here, arrived) updates `here` in place


def execute(
    rounds: Callable[[], Iterable[Round]],
    slots: Sequence[Slot],
    transport: Transport,
    *,
    scratch: Scratch,
    combine: Combine,
    segment_bytes: int,
    timeout_s: float,
    wire_dtype: torch.dtype | None = None,
    longest: int | None = None,
    waiting_for: Callable[[int], object] = lambda peer: None,
) -> None:
    """Runs one collective on this rank, in place.

    Args:
        rounds: makes this rank's schedule anew; called once per lane.
        slots: the buffers; almost always one.
        scratch: where incoming parts land before they are added; kept by the caller from one collective to the next.
        combine: adds (or takes the maximum of, …) what arrived into what is there.
        segment_bytes: size of a pipelining piece of a chunk. The same on all ranks.
        timeout_s: longest silence of a neighbour, in seconds.
        wire_dtype: what travels, if not the buffers' own type (note "narrow wire").
        longest: elements of the longest chunk on any rank, where this rank's offsets do not tell.
        waiting_for: told, before each wait, which peer a round's first transfer is with.

    Raises:
        TransportError: a neighbour stayed silent or its connection broke. The buffers' contents are undefined then.
    """
    segment_numel = max(1, segment_bytes // slots[0].flat.element_size())
    if longest is None:
        longest = max((stop - start for slot in slots for start, stop in pairwise(slot.offsets)), default=0)
    num_lanes = max(1, -(-longest // segment_numel))
    scratch.reset()
    lanes = [
        _Lane(
            iter(rounds()),
            [slot.flat for slot in slots],
            [_Pieces(slot.offsets, segment_numel, lane, num_lanes) for slot in slots],
            transport,
            scratch,
            combine,
            wire_dtype,
        )
        for lane in range(num_lanes)
    ]
    active = deque(lane for lane in lanes if lane.post_next())
    while active:
        lane = active.popleft()
        waiting_for(lane.first_peer)
        lane.finish(timeout_s)
        if lane.post_next():
            active.append(lane)
    if wire_dtype is not None:
        for slot in slots:
            slot.flat.copy_(slot.flat.to(wire_dtype))


class Slot(NamedTuple):
    """One buffer of a collective, and where its chunks begin."""

    flat: Tensor  # [numel], contiguous
    offsets: Sequence[int]  # in elements; the last entry is numel


class Scratch:
    """Memory for what is on its way in, one block per dtype and device, grown to the largest need and kept.

    A fresh block per collective would cost more in page faults than the additions themselves.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._used = 0

    def reset(self) -> None:
        """Takes back everything handed out."""
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel], shared with no one until `reset`."""
        start, self._used = self._used, self._used + numel
        block = self._blocks.get((dtype, device))
        if block is None or block.numel() < self._used:
            block = torch.empty(2 * self._used, dtype=dtype, device=device)  # lanes ask one after another: grow ahead
            self._blocks[dtype, device] = block
        return block[start : self._used]


class _Pieces:
    """Which runs of elements a lane has of given chunks; neighbours are merged into one message."""

    def __init__(self, offsets: Sequence[int], segment_numel: int, lane: int, num_lanes: int) -> None:
        self._offsets, self._segment_numel, self._lane, self._num_lanes = offsets, segment_numel, lane, num_lanes

    def of(self, chunks: range) -> list[tuple[int, int]]:
        """(start, stop) pairs, none of them empty."""
        if self._num_lanes == 1:
            runs = [(self._offsets[chunks.start], self._offsets[chunks.stop])]
        else:
            runs = [self._of_one(chunk) for chunk in chunks]
        return [(start, stop) for start, stop in runs if stop > start]

    def _of_one(self, chunk: int) -> tuple[int, int]:
        start = self._offsets[chunk] + self._lane * self._segment_numel
        return start, min(start + self._segment_numel, self._offsets[chunk + 1])


class _Lane:
    """One segment of every chunk on its way through the schedule."""

    def __init__(
        self,
        rounds: Iterator[Round],
        slots: list[Tensor],
        pieces: list[_Pieces],
        transport: Transport,
        scratch: Scratch,
        combine: Combine,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._rounds, self._slots, self._pieces = rounds, slots, pieces
        self._transport, self._scratch, self._combine = transport, scratch, combine
        self._wire_dtype = wire_dtype
        self._pending: Pending | None = None
        self._arriving: list[_Arriving] = []
        wide = slots[0]
        self._departure = self._landing = torch.empty(0, dtype=wire_dtype or wide.dtype, device=wide.device)
        self.first_peer = transport.rank

    def post_next(self) -> bool:
        """Posts the next round; False when the schedule has ended.

        A round that moves nothing for this lane (its piece of a short chunk is empty) takes its turn all the same:
        if ranks skipped rounds, each by itself, their messages would no longer match in order.
        """
        ops = next(self._rounds, None)
        if ops is None:
            return False
        sends = self._outgoing([op for op in ops if isinstance(op, Send)])
        receives = self._incoming([op for op in ops if isinstance(op, Recv)])
        self._pending = self._transport.post(sends, receives) if sends or receives else None
        if self._pending is not None:
            self.first_peer = (receives or sends)[0].peer
        return True

    def finish(self, timeout_s: float) -> None:
        """Waits for the round, then adds what arrived, in the order listed.

        Sends have ended too by then, so that a round may send a chunk and add to it (recursive doubling does).
        """
        if self._pending is not None:
            self._pending.wait(timeout_s)
        for here, arrived, add in self._arriving:
            if add:
                self._combine(here, arrived)
            else:
                here.copy_(arrived)

    def _outgoing(self, ops: list[Send]) -> list[Transfer]:
        parts = [(op.peer, part) for op in ops for part in self._parts(op)]
        if self._wire_dtype is None:
            return [Transfer(peer, part) for peer, part in parts]
        self._departure = self._enough(self._departure, sum(part.numel() for _, part in parts))
        transfers, used = [], 0
        for peer, part in parts:
            narrow = self._departure[used : used + part.numel()].copy_(part)
            part.copy_(narrow)  # note "narrow wire"
            used += part.numel()
            transfers.append(Transfer(peer, narrow))
        return transfers

    def _incoming(self, ops: list[Recv]) -> list[Transfer]:
        """Straight to where it belongs, or by way of scratch if it is to be added or widened."""
        parts = [(op, part) for op in ops for part in self._parts(op)]
        by_scratch = [op.add or self._wire_dtype is not None for op, _ in parts]
        needed = sum(part.numel() for (_, part), by in zip(parts, by_scratch, strict=True) if by)
        self._landing = self._enough(self._landing, needed)
        self._arriving = []
        transfers, used = [], 0
        for (op, part), by in zip(parts, by_scratch, strict=True):
            landing = part
            if by:
                landing = self._landing[used : used + part.numel()]
                used += part.numel()
                self._arriving.append(_Arriving(part, landing, op.add))
            transfers.append(Transfer(op.peer, landing))
        return transfers

    def _parts(self, op: Send | Recv) -> list[Tensor]:
        """This lane's pieces of the chunks of a transfer."""
        return [self._slots[op.slot][start:stop] for start, stop in self._pieces[op.slot].of(op.chunks)]

    def _enough(self, block: Tensor, numel: int) -> Tensor:
        return block if block.numel() >= numel else self._scratch.take(numel, block.dtype, block.device)


class _Arriving(NamedTuple):
    """Something on its way in by way of scratch."""

    here: Tensor
    arrived: Tensor
    add: bool
