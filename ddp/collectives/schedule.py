"""A collective is data: rounds of sends and receives, and a checker that proves what they do.

A schedule is a generator `algorithm(rank, num_ranks)` that yields *rounds*. A round is a tuple of `Send` and
`Recv`: the transfers that this rank has in flight together; the next round starts when all of them are done. A rank
that idles yields an empty round, so that round k means the same moment on every rank. A schedule never sees a
tensor. It speaks of *chunks* 0 … n−1 of a buffer, and of *slots* when a rank holds several buffers:

    rank 0 of a ring of 3:   (Send(1, chunks 2), Recv(2, chunks 1, add))      round 0
                             (Send(1, chunks 1), Recv(2, chunks 0, add))      round 1
                             …

Receives that add are applied in the order in which they are *listed*, never in the order in which they arrive: the
order of additions is part of the schedule, and with it every bit of the result.

`check` runs a schedule for all ranks at once on symbols instead of numbers. Every chunk becomes an expression, a
nested pair of ranks, e.g. ((0, 1), (2, 3)): the sum with its order of additions (a pair has none: a + b is b + a,
bit by bit). Proven are: no deadlock even if a send only completes once its receive is posted (the strictest
transport, NCCL), sender and receiver name the same chunks, no transfer reads what another one of the same round
overwrites, nothing is left in flight, and each contribution arrives exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Send:
    """Sends the chunks of one of this rank's slots to `peer`."""

    peer: int
    chunks: range
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """Receives the chunks into a slot: added to what is there (`add`), or written over it."""

    peer: int
    chunks: range
    add: bool
    slot: int = 0


Round = tuple[Send | Recv, ...]
Algorithm = Callable[[int, int], Iterator[Round]]
Expression = int | tuple["Expression", "Expression"]


class Goal(Enum):
    """What a schedule promises: who holds which chunk of whose contribution before and after."""

    ALL_REDUCE = "every rank ends with the sum of every chunk"
    REDUCE_SCATTER = "rank r ends with the sum of chunk r"
    ALL_GATHER = "rank r starts with chunk r, every rank ends with all chunks"
    BROADCAST = "rank 0 starts with every chunk, every rank ends with them"


class ScheduleError(AssertionError):
    """A schedule does not do what it promises; the message names rank, round and chunk."""


@dataclass(frozen=True)
class Proof:
    """What `check` found out: per chunk its expression, and the rounds that the busiest rank needs."""

    expressions: tuple[Expression, ...]
    num_rounds: int


def check(
    algorithm: Algorithm, num_ranks: int, *, goal: Goal = Goal.ALL_REDUCE, num_chunks: int | None = None
) -> Proof:
    """Proves that `algorithm` reaches `goal` for `num_ranks` ranks.

    Args:
        num_chunks: chunks that the buffer is cut into; one per rank unless given.

    Returns:
        The expression that each chunk becomes, and the number of rounds.

    Raises:
        ScheduleError: it does not; says where.
    """
    num_chunks = num_ranks if num_chunks is None else num_chunks
    ranks = [_Rank(algorithm, rank, num_ranks, goal, num_chunks) for rank in range(num_ranks)]
    while any(not rank.finished for rank in ranks):
        moved = [_match(ranks[op.peer], rank, op) for rank in ranks for op in rank.waiting_receives()]
        moved += [rank.finish_round() for rank in ranks if not rank.finished]
        if not any(moved):
            stuck = "; ".join(f"rank {r.rank} in round {r.round_number}: {r.open}" for r in ranks if not r.finished)
            raise ScheduleError(f"deadlock with {num_ranks} ranks: {stuck}")
    return Proof(_prove(ranks, goal, num_chunks), max(rank.round_number for rank in ranks))


Chunks = dict[tuple[int, int], Expression | None]  # (slot, chunk) -> what stands there; None: nothing of use


class _Rank:
    """One rank of the symbolic run: its buffer, and the round that it has in flight."""

    def __init__(self, algorithm: Algorithm, rank: int, num_ranks: int, goal: Goal, num_chunks: int) -> None:
        self.rank, self.round_number = rank, 0
        self.buffer: Chunks = {(0, chunk): self._start(goal, chunk) for chunk in range(num_chunks)}
        self.rounds = algorithm(rank, num_ranks)
        self.finished = False
        self._next_round()

    def _start(self, goal: Goal, chunk: int) -> int | None:
        if goal is Goal.ALL_GATHER:
            return self.rank if chunk == self.rank else None
        if goal is Goal.BROADCAST:
            return 0 if self.rank == 0 else None
        return self.rank

    def _next_round(self) -> None:
        ops = next(self.rounds, None)
        self.finished = ops is None
        self.ops: Round = ops or ()
        self.open = list(self.ops)  # not yet matched by the other side
        self.arrived: dict[Recv, list[Expression | None]] = {}
        self._forbid_races()

    def _forbid_races(self) -> None:
        read = {(op.slot, chunk) for op in self.ops if isinstance(op, Send) for chunk in op.chunks}
        written = [(op.slot, c) for op in self.ops if isinstance(op, Recv) and not op.add for c in op.chunks]
        added = {(op.slot, c) for op in self.ops if isinstance(op, Recv) and op.add for c in op.chunks}
        if (set(written) & (read | added)) or len(set(written)) < len(written):
            raise ScheduleError(f"rank {self.rank} round {self.round_number}: a chunk is overwritten while in use")

    def waiting_receives(self) -> list[Recv]:
        return [op for op in self.open if isinstance(op, Recv)]

    def first_open_send_to(self, peer: int) -> Send | None:
        return next((op for op in self.open if isinstance(op, Send) and op.peer == peer), None)

    def finish_round(self) -> bool:
        """Once everything in flight has met its other side: apply what arrived, in the order listed."""
        if self.open:
            return False
        for op in self.ops:
            if isinstance(op, Recv):
                for chunk, value in zip(op.chunks, self.arrived[op], strict=True):
                    here = self.buffer.get((op.slot, chunk))
                    if value is None or value == here:
                        what = "nothing of use" if value is None else "what it has already"
                        raise ScheduleError(f"rank {self.rank} round {self.round_number}: chunk {chunk} brings {what}")
                    self.buffer[op.slot, chunk] = self._sum(here, value, chunk) if op.add else value
        self.round_number += 1
        self._next_round()
        return True

    def _sum(self, here: Expression | None, value: Expression, chunk: int) -> Expression:
        if here is None:
            raise ScheduleError(f"rank {self.rank} round {self.round_number}: adds to chunk {chunk}, which it has not")
        if not set(leaves(here)).isdisjoint(leaves(value)):
            raise ScheduleError(f"rank {self.rank} round {self.round_number}: a contribution to chunk {chunk} twice")
        return (here, value) if min(leaves(here)) < min(leaves(value)) else (value, here)


def _match(sender: _Rank, receiver: _Rank, op: Recv) -> bool:
    """Delivers the sender's oldest open message to this receiver, if it has one."""
    send = sender.first_open_send_to(receiver.rank)
    first = next(r for r in receiver.waiting_receives() if r.peer == op.peer)
    if send is None or first is not op:
        return False
    if send.chunks != op.chunks:
        raise ScheduleError(f"rank {sender.rank} sends {send.chunks}, rank {receiver.rank} expects {op.chunks}")
    if any((send.slot, chunk) not in sender.buffer for chunk in send.chunks):
        raise ScheduleError(f"rank {sender.rank} round {sender.round_number}: sends {send.chunks}, which it has not")
    receiver.arrived[op] = [sender.buffer[send.slot, chunk] for chunk in send.chunks]
    sender.open.remove(send)
    receiver.open.remove(op)
    return True


def leaves(expression: Expression) -> list[int]:
    """The contributions that an expression adds up."""
    if isinstance(expression, int):
        return [expression]
    return leaves(expression[0]) + leaves(expression[1])


def _prove(ranks: list[_Rank], goal: Goal, num_chunks: int) -> tuple[Expression, ...]:
    """Compares what every rank ends with to the goal, and all ranks with each other."""
    everyone = list(range(len(ranks)))
    found: list[Expression] = []
    for chunk in range(num_chunks):
        owner = chunk if goal is Goal.REDUCE_SCATTER else 0
        value = ranks[owner].buffer[0, chunk]
        want = {Goal.ALL_GATHER: [chunk], Goal.BROADCAST: [0]}.get(goal, everyone)
        if value is None or sorted(leaves(value)) != want:
            raise ScheduleError(f"chunk {chunk} ends as {value} on rank {owner}: not each of {want} exactly once")
        if goal is not Goal.REDUCE_SCATTER:
            for rank in ranks:
                if rank.buffer[0, chunk] != value:
                    raise ScheduleError(f"chunk {chunk}: rank {rank.rank} has {rank.buffer[0, chunk]}, not {value}")
        found.append(value)
    return tuple(found)
