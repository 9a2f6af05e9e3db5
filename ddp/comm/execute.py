"""Runs a schedule on real memory: the one executor behind every collective.

    program     turns a schedule into the transfers of one rank for one length of buffer, round by round.
                Pure numbers, computed once and cached
    execute     runs it on tensors

Segments and lanes. Every chunk is cut into segments of at most `segment_numel` elements. Segment j of all chunks is
*lane* j: a complete, separate collective, on its own pieces of the buffer. All lanes post their first round at once;
then the executor takes them in turn: it waits for the lane's round, adds what arrived, and posts the lane's next round.
So one segment is added while the others are on the wire (pipelining).

    lane 0   ▓ post ─── wire ─── ▓ add, post ─── wire ─── ▓ …
    lane 1     ▓ post ─── wire ─── ▓ add, post ─── wire ─── ▓ …

Every rank takes its lanes in the same order, so that the messages of two ranks match in order of posting.

Note "narrow wire". With a wire format every message is encoded, and what arrives is added to the wide value that is
there: the sums are accumulated in the tensor's own type. A sender rounds its own copy too: then two ranks that exchange
their parts and both add them (recursive doubling) get the same bits, and so does a rank that keeps what it passed on.
A sum that is complete here and is not sent is rounded, too, because other ranks may have received it rounded; but not
where every rank ends with its own sums (reduce-scatter).

Note "complete sums". A mean divides every sum once. The rank that adds the last term to an element divides it at once,
and passes it on divided. Every rank derives that from the schedule: if the last receive of an element adds it, or an
`Add` does after that, the sum is complete on this rank, which divides it; if that receive overwrites it, it has been
divided elsewhere. So most ranks divide only their own share, while other lanes are on the wire. Only buffer 0 ends with
complete sums; the others hold partial sums.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ddp.collectives.schedule import Add, Algorithm, Recv, Round, Send
from ddp.comm.reduction import COMBINE, SUM, Reduction, divided_, is_identity
from ddp.comm.transport.edge import Pending, Transfer, Transport

Offsets = tuple[int, ...]  # the start of each chunk of a buffer, in elements; the last entry is its length

# --- what is to be done ----------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A run of elements of a buffer: one message of a round, or sums that are complete after it."""

    peer: int
    buffer: int
    start: int
    stop: int
    add: bool  # add what arrives; else it replaces the value here
    before: bool = False  # … and comes first in the sum


class Step(NamedTuple):
    """One round of a lane. It may be empty, because the messages of a rank that skipped rounds would not match."""

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    additions: tuple[tuple[Piece, Piece], ...]  # after the receives: the second piece is added to the first
    sums: tuple[Piece, ...]  # note "complete sums"
    unsent: tuple[Piece, ...]  # of these, the ones that this rank does not send


NO_STEP = Step((), (), (), (), ())
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
    """Returns the program of `rank` in a schedule.

    Args:
        offsets: by buffer; almost always of one.
        segment_numel: elements of a pipelining piece of a chunk. The same on all ranks.
        longest: elements of the longest chunk on any rank, if this rank's offsets do not show it.
    """
    rounds = list(algorithm(rank, num_ranks))
    if longest is None:
        longest = max((stop - start for bounds in offsets for start, stop in pairwise(bounds)), default=0)
    num_lanes = max(1, -(-longest // segment_numel))
    complete, sent = _complete_sums(rounds), _last_sent(rounds)

    def runs(lane: int, buffer: int, chunks: range) -> Iterator[tuple[int, int]]:
        """Yields a lane's non-empty parts of these chunks. With a single lane, neighbouring chunks are merged."""
        bounds, done = offsets[buffer], lane * segment_numel
        found = [(bounds[k] + done, min(bounds[k] + done + segment_numel, bounds[k + 1])) for k in chunks]
        if num_lanes == 1:
            found = [(bounds[chunks.start], bounds[chunks.stop])]
        return ((start, stop) for start, stop in found if stop > start)

    def step(lane: int, number: int, ops: Round) -> Step:
        sends, receives, sums, unsent = list[Piece](), list[Piece](), list[Piece](), list[Piece]()
        additions = list[tuple[Piece, Piece]]()
        for op in ops:
            if isinstance(op, Add):
                ends = ([Piece(rank, k, *run, True) for run in runs(lane, k, op.chunks)] for k in (op.into, op.other))
                additions += zip(*ends, strict=True)
                continue
            pieces, how = (sends, (False,)) if isinstance(op, Send) else (receives, (op.add, op.before))
            pieces += [Piece(op.peer, op.buffer, *run, *how) for run in runs(lane, op.buffer, op.chunks)]
        for chunk in complete[number]:
            of_chunk = [Piece(rank, 0, *run, True) for run in runs(lane, 0, range(chunk, chunk + 1))]
            sums += of_chunk
            unsent += of_chunk if sent.get(chunk, -1) <= number else []
        return Step(tuple(sends), tuple(receives), tuple(additions), tuple(sums), tuple(unsent))

    return tuple(tuple(step(lane, number, ops) for number, ops in enumerate(rounds)) for lane in range(num_lanes))


def _complete_sums(rounds: Sequence[Round]) -> dict[int, list[int]]:
    """Returns, by round, the chunks of buffer 0 that receive their last addition in it and do not change later."""
    last: dict[int, tuple[int, bool]] = {}
    for number, ops in enumerate(rounds):
        for op in sorted(ops, key=lambda op: isinstance(op, Add)):  # additions come last, wherever they are listed
            if isinstance(op, Recv) and op.buffer == 0:
                last.update(dict.fromkeys(op.chunks, (number, op.add)))
            elif isinstance(op, Add) and op.into == 0:
                last.update(dict.fromkeys(op.chunks, (number, True)))
    complete = defaultdict[int, list[int]](list)
    for chunk, (number, is_added) in last.items():
        if is_added:
            complete[number].append(chunk)
    return complete


def _last_sent(rounds: Sequence[Round]) -> dict[int, int]:
    """Returns, by chunk of buffer 0, the round in which it is sent for the last time."""
    return {
        chunk: number
        for number, ops in enumerate(rounds)
        for op in ops
        if isinstance(op, Send) and op.buffer == 0
        for chunk in op.chunks
    }


# --- doing it --------------------------------------------------------------------------------------------------------


def execute(
    program: Program,
    buffers: Sequence[Tensor],
    transport: Transport,
    *,
    scratch: Scratch,
    reduction: Reduction = SUM,
    is_shared: bool = True,
    timeout_s: float,
    waiting_for: Callable[[int], object] = lambda peer: None,
) -> None:
    """Runs one collective on this rank, in place.

    Args:
        buffers: [numel] each, contiguous.
        is_shared: several ranks end with the same sums, whose bits must be equal on all of them.
        scratch: memory for incoming parts before they are added; the caller keeps it between collectives.
        timeout_s: longest silence of a neighbour, in seconds.
        waiting_for: called before each wait, with the peer of the round's first transfer.

    Raises:
        TransportError: a neighbour stayed silent or its connection broke. The buffers' contents are undefined then.
    """
    scratch.reset()
    lanes = [_Lane(steps, buffers, transport, scratch, reduction, is_shared) for steps in program]
    active = deque(lane for lane in lanes if lane.post_next())
    while active:
        lane = active.popleft()
        waiting_for(lane.first_peer)
        lane.end_round(timeout_s)
        if lane.post_next():
            active.append(lane)


class Scratch:
    """Memory for incoming parts: one block per dtype and device, grown to the largest need and kept.

    The page faults of a new block per collective would cost more than the additions themselves.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._used = 0

    def reset(self) -> None:
        """Releases all that was taken."""
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns [numel], which nothing else uses until `reset`."""
        start, self._used = self._used, self._used + numel
        block = self._blocks.get((dtype, device))
        if block is None or block.numel() < self._used:
            with torch.inference_mode(False):  # it outlives the context of this call
                block = torch.empty(2 * self._used, dtype=dtype, device=device)  # lanes ask in turn: grow ahead
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
        reduction: Reduction,
        is_shared: bool,
    ) -> None:
        self._steps, self._buffers, self._transport, self._scratch = iter(steps), buffers, transport, scratch
        self._combine = COMBINE[reduction.op]
        self._divide_by, self._wire, self._is_shared = reduction.divide_by, reduction.wire, is_shared
        self._step = NO_STEP
        self._pending: Pending | None = None
        self._arriving: list[tuple[Piece, Tensor]] = []  # by way of scratch
        self._departure: Tensor | None = None  # both are reused in every round
        self._landing: Tensor | None = None
        self.first_peer = transport.rank

    def post_next(self) -> bool:
        """Posts the next round; returns False if there is none."""
        step = next(self._steps, None)
        if step is None:
            return False
        sends, receives = self._outgoing(step.sends), self._incoming(step.receives)
        self._step = step
        self._pending = self._transport.post(sends, receives) if sends or receives else None
        if self._pending is not None:
            self.first_peer = (receives or sends)[0].peer
        return True

    def end_round(self, timeout_s: float) -> None:
        """Waits for the round, then makes its additions in the order listed, and divides the complete sums.

        Its sends have completed by then, so a round may send a chunk and add to it, as recursive doubling does.
        """
        if self._pending is not None:
            self._pending.wait(timeout_s)
        self._add_before([each for each in self._arriving if each[0].before])
        for piece, arrived in self._arriving:
            if not piece.before:
                self._take(arrived, self._part(piece), add=piece.add)
        for into, other in self._step.additions:
            part = self._part(into)
            self._combine(part, self._part(other), out=part)
        if not is_identity(self._divide_by):
            for piece in self._step.sums:
                divided_(self._part(piece), self._divide_by)
        if self._wire is not None and self._is_shared and self._step.unsent:
            self._rounded(self._step.unsent)

    def _add_before(self, arriving: Sequence[tuple[Piece, Tensor]]) -> None:
        """Sums the parts that precede this rank's own, and adds the sum to its own; a + b has the bits of b + a."""
        sums: dict[Piece, Tensor] = {}  # by the piece that they are added to
        for piece, arrived in arriving:
            place, part = piece._replace(peer=self._transport.rank), self._part(piece)
            is_first = place not in sums
            if is_first:
                sums[place] = self._scratch.take(part.numel(), part.dtype, part.device)
            self._take(arrived, sums[place], add=not is_first)
        for place, total in sums.items():
            part = self._part(place)
            self._combine(part, total, out=part)

    def _take(self, arrived: Tensor, part: Tensor, *, add: bool) -> None:
        """Adds an incoming part to a part of a buffer, or copies it there."""
        if self._wire is not None:
            (self._wire.add if add else self._wire.decode)(arrived, part)
        elif add:
            self._combine(part, arrived, out=part)
        else:
            part.copy_(arrived)

    def _outgoing(self, pieces: tuple[Piece, ...]) -> list[Transfer]:
        if self._wire is None or not pieces:
            return [Transfer(piece.peer, self._part(piece)) for piece in pieces]
        return [Transfer(piece.peer, encoded) for piece, encoded in zip(pieces, self._rounded(pieces), strict=True)]

    def _rounded(self, pieces: Sequence[Piece]) -> Sequence[Tensor]:
        """Returns pieces encoded, and rounds the local copies to what the others get (note "narrow wire")."""
        assert self._wire is not None
        self._departure, room = self._room(self._departure, pieces)
        for piece, encoded in zip(pieces, room, strict=True):
            part = self._part(piece)
            self._wire.encode(part, encoded)
            self._wire.decode(encoded, part)
        return room

    def _incoming(self, pieces: tuple[Piece, ...]) -> list[Transfer]:
        """Receives directly into the buffer, or into scratch memory if the part is to be added or widened."""
        detours = [piece for piece in pieces if piece.add or self._wire is not None]
        self._arriving = []
        if detours:
            self._landing, room = self._room(self._landing, detours)
            self._arriving = list(zip(detours, room, strict=True))
        landings = iter(self._arriving)
        return [
            Transfer(piece.peer, next(landings)[1] if piece.add or self._wire is not None else self._part(piece))
            for piece in pieces
        ]

    def _part(self, piece: Piece) -> Tensor:
        flat = self._buffers[piece.buffer]
        return flat if piece.stop - piece.start == flat.numel() else flat[piece.start : piece.stop]

    def _room(self, block: Tensor | None, pieces: Sequence[Piece]) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns a block that is large enough, the given one if possible; and a part of it for each piece."""
        sizes = [piece.stop - piece.start for piece in pieces]
        if self._wire is not None:
            sizes = list(map(self._wire.length, sizes))
        needed = sum(sizes)
        if block is None or block.numel() < needed:
            wide = self._buffers[0]
            dtype = wide.dtype if self._wire is None else self._wire.dtype
            block = self._scratch.take(needed, dtype, wide.device)
        if len(sizes) == 1 and block.numel() == needed:
            return block, (block,)
        ends = list(accumulate(sizes))
        return block, [block[end - size : end] for end, size in zip(ends, sizes, strict=True)]
