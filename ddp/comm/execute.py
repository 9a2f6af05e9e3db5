"""Runs a schedule on real memory: the one executor behind every collective.

Segments and lanes. Every chunk is cut into segments of at most `segment_bytes`. Segment j of all chunks is *lane*
j: a whole collective of its own, on its own pieces of the buffer. All lanes post their first round at once; then
the executor takes them in turn: wait for the lane's round, add what came in, post the lane's next round. So while
one segment is being added, the others are on the wire: that is the pipelining.

    lane 0   ▓ post ─── wire ─── ▓ add, post ─── wire ─── ▓ …
    lane 1     ▓ post ─── wire ─── ▓ add, post ─── wire ─── ▓ …

Every rank takes its lanes in the same order, so that messages between two ranks match in order of posting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ddp.collectives.schedule import Recv, Round, Send
from ddp.transport.edge import Pending, Transfer, Transport

Combine = Callable[[Tensor, Tensor], object]  # combine(here, arrived) updates `here` in place


def execute(
    rounds: Callable[[], Iterable[Round]],
    slots: Sequence[Tensor],
    offsets: Sequence[int],
    transport: Transport,
    *,
    scratch: Scratch,
    combine: Combine,
    segment_bytes: int,
    timeout_s: float,
    waiting_for: Callable[[int], object] = lambda peer: None,
) -> None:
    """Runs one collective on this rank, in place.

    Args:
        rounds: makes this rank's schedule anew; called once per lane.
        slots: the buffers, each [numel], contiguous; almost always one.
        offsets: where chunks begin, in elements; the last entry is numel.
        scratch: where incoming parts land before they are added; kept by the caller from one collective to the next.
        combine: adds (or takes the maximum of, …) what arrived into what is there.
        segment_bytes: size of a pipelining piece of a chunk. The same on all ranks.
        timeout_s: longest silence of a neighbour, in seconds.
        waiting_for: told, before each wait, which peer a round's first transfer is with.

    Raises:
        TransportError: a neighbour stayed silent or its connection broke. The buffers' contents are undefined then.
    """
    segment_numel = max(1, segment_bytes // slots[0].element_size())
    longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
    num_lanes = max(1, -(-longest // segment_numel))
    scratch.reset()
    lanes = [
        _Lane(iter(rounds()), slots, _Pieces(offsets, segment_numel, lane, num_lanes), transport, scratch, combine)
        for lane in range(num_lanes)
    ]
    active = deque(lane for lane in lanes if lane.post_next())
    while active:
        lane = active.popleft()
        waiting_for(lane.first_peer)
        lane.finish(timeout_s)
        if lane.post_next():
            active.append(lane)


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

    def take(self, numel: int, like: Tensor) -> Tensor:
        """[numel], of the dtype and device of `like`, shared with no one until `reset`."""
        start, self._used = self._used, self._used + numel
        key = (like.dtype, like.device)
        block = self._blocks.get(key)
        if block is None or block.numel() < self._used:
            block = self._blocks[key] = like.new_empty(2 * self._used)  # lanes ask one after another: grow ahead
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
        slots: Sequence[Tensor],
        pieces: _Pieces,
        transport: Transport,
        scratch: Scratch,
        combine: Combine,
    ) -> None:
        self._rounds, self._slots, self._pieces = rounds, slots, pieces
        self._transport, self._scratch, self._combine = transport, scratch, combine
        self._pending: Pending | None = None
        self._arriving: list[tuple[Tensor, Tensor]] = []  # (where it is added, scratch it lands in), as listed
        self._landing = slots[0][:0]
        self.first_peer = transport.rank

    def post_next(self) -> bool:
        """Posts the next round; False when the schedule has ended.

        A round that moves nothing for this lane (its piece of a short chunk is empty) takes its turn all the same:
        if ranks skipped rounds, each by itself, their messages would no longer match in order.
        """
        ops = next(self._rounds, None)
        if ops is None:
            return False
        sends = [transfer for op in ops if isinstance(op, Send) for transfer in self._outgoing(op)]
        self._arriving = []
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
        for here, arrived in self._arriving:
            self._combine(here, arrived)

    def _outgoing(self, op: Send) -> Iterator[Transfer]:
        for start, stop in self._pieces.of(op.chunks):
            yield Transfer(op.peer, self._slots[op.slot][start:stop])

    def _incoming(self, ops: list[Recv]) -> list[Transfer]:
        targets = [(op, self._slots[op.slot][start:stop]) for op in ops for start, stop in self._pieces.of(op.chunks)]
        self._reserve(sum(target.numel() for op, target in targets if op.add))
        transfers, used = [], 0
        for op, target in targets:
            landing = target
            if op.add:
                landing = self._landing[used : used + target.numel()]
                used += target.numel()
                self._arriving.append((target, landing))
            transfers.append(Transfer(op.peer, landing))
        return transfers

    def _reserve(self, numel: int) -> None:
        if self._landing.numel() < numel:
            self._landing = self._scratch.take(numel, self._slots[0])
