"""Runs a schedule on real memory: the one executor behind every collective.

    program     what a schedule means for one rank and one length of buffer: which elements go where, round by round.
                Pure numbers, worked out once and kept
    execute     runs it on tensors

Segments and lanes. Every chunk is cut into segments of at most `segment_numel` elements. Segment j of all chunks is
*lane* j: a whole collective of its own, on its own pieces of the buffer. All lanes post their first round at once; then
the executor takes them in turn: wait for the lane's round, add what came in, post the lane's next round. So while
one segment is being added, the others are on the wire: that is the pipelining.

    lane 0   ▓ post ─── wire ─── ▓ add, post ─── wire ─── ▓ …
    lane 1     ▓ post ─── wire ─── ▓ add, post ─── wire ─── ▓ …

Every rank takes its lanes in the same order, so that messages between two ranks match in order of posting.

Note "narrow wire". With a `wire_dtype` every message is cast to it, and what arrives is added to the wide value that is
there: the sums are accumulated in the tensor's own type. A sender rounds its own copy too: then two ranks that exchange
their parts and both add them (recursive doubling) get the same bits, and so does whoever keeps what it passed on.
What never travelled is rounded at the end.

Note "finishing". A mean divides every sum once. Whoever adds the last term to an element divides it there and then, and
the others get it divided: that is the last time that a rank receives the element, if it adds it; if not, it comes
finished. So most ranks divide their share only, while other lanes are on the wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ddp.collectives.schedule import Algorithm, Recv, Round, Send
from ddp.transport.edge import Pending, Transfer, Transport

Combine = Callable[[Tensor, Tensor], object]  # combine(here, arrived) updates `here` in place
Offsets = tuple[int, ...]  # where a buffer's chunks begin, in elements; the last entry is its length

# --- what is to be done ----------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """One message of a round: a run of elements of a buffer."""

    peer: int
    slot: int
    start: int
    stop: int
    add: bool  # what arrives is added; else it replaces what is there


class Step(NamedTuple):
    """One round of a lane. May be empty: a rank that left rounds out would lose the order of its messages."""

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    summed: tuple[Part, ...]  # sums that are complete after it (note "finishing")


class Part(NamedTuple):
    """A run of elements of a buffer."""

    slot: int
    start: int
    stop: int


Program = tuple[tuple[Step, ...], ...]  # by lane, by round


@lru_cache(maxsize=512)
def program(
    algorithm: Algorithm,
    rank: int,
    num_ranks: int,
    offsets: tuple[Offsets, ...],
    *,
    segment_numel: int,
    longest: int | None = None,
) -> Program:
    """What `rank` does in a schedule.

    Args:
        offsets: by buffer; almost always of one.
        segment_numel: elements of a pipelining piece of a chunk. The same on all ranks.
        longest: elements of the longest chunk on any rank, where this rank's offsets do not tell.
    """
    return program_of(list(algorithm(rank, num_ranks)), offsets, segment_numel=segment_numel, longest=longest)


def program_of(
    rounds: Sequence[Round], offsets: Sequence[Sequence[int]], *, segment_numel: int, longest: int | None = None
) -> Program:
    """What these rounds mean; see `program`."""
    if longest is None:
        longest = max((stop - start for bounds in offsets for start, stop in pairwise(bounds)), default=0)
    num_lanes = max(1, -(-longest // segment_numel))
    cuts = [_Cuts(offsets, segment_numel, lane, num_lanes) for lane in range(num_lanes)]
    summed = _summed(rounds)
    return tuple(tuple(cut.step(ops, chunks) for ops, chunks in zip(rounds, summed, strict=True)) for cut in cuts)


def _summed(rounds: Sequence[Round]) -> list[list[tuple[int, int]]]:
    """By round, the chunks (slot, number) that are received in it for the last time, and added."""
    last: dict[tuple[int, int], tuple[int, bool]] = {}
    for number, ops in enumerate(rounds):
        for op in ops:
            if isinstance(op, Recv):
                last.update({(op.buffer, chunk): (number, op.add) for chunk in op.chunks})
    found: list[list[tuple[int, int]]] = [[] for _ in rounds]
    for place, (number, is_added) in last.items():
        if is_added:
            found[number].append(place)
    return found


class _Cuts(NamedTuple):
    """Which elements a lane has of given chunks."""

    offsets: Sequence[Sequence[int]]
    segment_numel: int
    lane: int
    num_lanes: int

    def step(self, ops: Round, summed: Sequence[tuple[int, int]]) -> Step:
        sends = tuple(piece for op in ops if isinstance(op, Send) for piece in self._pieces(op, add=False))
        receives = tuple(piece for op in ops if isinstance(op, Recv) for piece in self._pieces(op, add=op.add))
        parts = (part for slot, chunk in summed for part in self._parts(slot, range(chunk, chunk + 1)))
        return Step(sends, receives, tuple(parts))

    def _pieces(self, op: Send | Recv, *, add: bool) -> Iterable[Piece]:
        return (Piece(op.peer, *part, add) for part in self._parts(op.buffer, op.chunks))

    def _parts(self, slot: int, chunks: range) -> Iterable[Part]:
        """None of them empty; where a lane has all of its chunks, neighbours travel as one."""
        bounds = self.offsets[slot]
        if self.num_lanes == 1:
            runs = [(bounds[chunks.start], bounds[chunks.stop])]
        else:
            done = self.lane * self.segment_numel
            runs = [(bounds[k] + done, min(bounds[k] + done + self.segment_numel, bounds[k + 1])) for k in chunks]
        return (Part(slot, start, stop) for start, stop in runs if stop > start)


# --- doing it --------------------------------------------------------------------------------------------------------


def execute(
    program: Program,
    buffers: Sequence[Tensor],
    transport: Transport,
    *,
    scratch: Scratch,
    combine: Combine,
    timeout_s: float,
    wire_dtype: torch.dtype | None = None,
    waiting_for: Callable[[int], object] = lambda peer: None,
    finish: Callable[[Tensor], object] | None = None,
) -> None:
    """Runs one collective on this rank, in place.

    Args:
        buffers: [numel] each, contiguous.
        scratch: where incoming parts land before they are added; kept by the caller from one collective to the next.
        combine: adds (or takes the maximum of, …) what arrived into what is there.
        timeout_s: longest silence of a neighbour, in seconds.
        wire_dtype: what travels, if not the buffers' own type (note "narrow wire").
        waiting_for: told, before each wait, which peer a round's first transfer is with.
        finish: done with every sum before anyone else gets it, by the ranks that make it (note "finishing").

    Raises:
        TransportError: a neighbour stayed silent or its connection broke. The buffers' contents are undefined then.
    """
    scratch.reset()
    lanes = [_Lane(steps, buffers, transport, scratch, combine, wire_dtype) for steps in program]
    active = deque(lane for lane in lanes if lane.post_next())
    while active:
        lane = active.popleft()
        waiting_for(lane.first_peer)
        lane.end_round(timeout_s, finish)
        if lane.post_next():
            active.append(lane)
    if wire_dtype is not None:
        for flat in buffers:
            flat.copy_(flat.to(wire_dtype))


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


class _Lane:
    """One segment of every chunk on its way through the rounds."""

    def __init__(
        self,
        steps: Sequence[Step],
        buffers: Sequence[Tensor],
        transport: Transport,
        scratch: Scratch,
        combine: Combine,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._steps, self._buffers, self._transport = iter(steps), buffers, transport
        self._scratch, self._combine, self._wire_dtype = scratch, combine, wire_dtype
        self._pending: Pending | None = None
        self._arriving: list[_Arriving] = []
        self._summed: tuple[Part, ...] = ()
        self._departure: Tensor | None = None  # both kept from round to round
        self._landing: Tensor | None = None
        self.first_peer = transport.rank

    def post_next(self) -> bool:
        """Posts the next round; False when there is none."""
        step = next(self._steps, None)
        if step is None:
            return False
        sends, receives, self._summed = self._outgoing(step.sends), self._incoming(step.receives), step.summed
        self._pending = self._transport.post(sends, receives) if sends or receives else None
        if self._pending is not None:
            self.first_peer = (receives or sends)[0].peer
        return True

    def end_round(self, timeout_s: float, finish: Callable[[Tensor], object] | None) -> None:
        """Waits for the round, then adds what arrived, in the order listed, and finishes the sums that are complete.

        Sends have ended too by then, so that a round may send a chunk and add to it (recursive doubling does).
        """
        if self._pending is not None:
            self._pending.wait(timeout_s)
        for here, arrived, add in self._arriving:
            if add:
                self._combine(here, arrived)
            else:
                here.copy_(arrived)
        if finish is not None:
            for part in self._summed:
                finish(self._part(part))

    def _outgoing(self, pieces: tuple[Piece, ...]) -> list[Transfer]:
        if self._wire_dtype is None or not pieces:
            return [Transfer(piece.peer, self._part(piece)) for piece in pieces]
        self._departure, narrows = self._room(self._departure, pieces)
        transfers = []
        for piece, narrow in zip(pieces, narrows, strict=True):
            part = self._part(piece)
            narrow.copy_(part)
            part.copy_(narrow)  # note "narrow wire"
            transfers.append(Transfer(piece.peer, narrow))
        return transfers

    def _incoming(self, pieces: tuple[Piece, ...]) -> list[Transfer]:
        """Straight to where it belongs, or by way of scratch if it is to be added or widened."""
        self._arriving = []
        detours = [piece for piece in pieces if piece.add or self._wire_dtype is not None]
        if not detours:
            return [Transfer(piece.peer, self._part(piece)) for piece in pieces]
        self._landing, room = self._room(self._landing, detours)
        landings = iter(room)
        transfers = []
        for piece in pieces:
            here = landing = self._part(piece)
            if piece.add or self._wire_dtype is not None:
                landing = next(landings)
                self._arriving.append(_Arriving(here, landing, piece.add))
            transfers.append(Transfer(piece.peer, landing))
        return transfers

    def _part(self, piece: Piece | Part) -> Tensor:
        flat = self._buffers[piece.slot]
        return flat if piece.stop - piece.start == flat.numel() else flat[piece.start : piece.stop]

    def _room(self, block: Tensor | None, pieces: Sequence[Piece]) -> tuple[Tensor, Sequence[Tensor]]:
        """A block that is large enough, this one if it is; and a place in it for each piece."""
        sizes = [piece.stop - piece.start for piece in pieces]
        needed = sum(sizes)
        if block is None or block.numel() < needed:
            wide = self._buffers[0]
            block = self._scratch.take(needed, self._wire_dtype or wide.dtype, wide.device)
        if len(sizes) == 1 and block.numel() == needed:
            return block, (block,)
        ends = list(accumulate(sizes))
        return block, [block[end - size : end] for end, size in zip(ends, sizes, strict=True)]


class _Arriving(NamedTuple):
    """Something on its way in by way of scratch."""

    here: Tensor
    arrived: Tensor
    add: bool
