"""Collectives as data: rounds of sends and receives, and a checker that proves their result.

A schedule is a generator `algorithm(rank, num_ranks)` that yields *rounds*. A round is a tuple of `Send` and `Recv`:
the transfers that this rank has in flight together. The next round starts when all of them have completed. A rank that
idles yields an empty round, so that round k means the same moment on every rank. A schedule never sees a tensor. It
names *chunks* 0 … n−1 of a buffer, and *buffers* by number if a rank holds several; an `Add` at the end of a round adds
one of them to another:

    rank 0 of a ring of 3:   (Send(1, chunks 2), Recv(2, chunks 1, add))      round 1
                             (Send(1, chunks 1), Recv(2, chunks 0, add))      round 2
                             …

The executor applies receives that add in the order in which they are *listed*, never in the order of arrival: the
order of additions is part of the schedule, and with it every bit of the result. The present value comes first in the
sum; `before` puts messages ahead of it: they are added up first, in their order, then the present value, then the other
messages. The round's `Add`s come last, in their order, after everything received has been written or added. A round may
send a chunk and add to it; the peer then gets the value before the addition.

`Schedule.check` runs a schedule for all ranks at once on symbols instead of numbers. Every chunk becomes an expression,
a nested pair of ranks such as ((0, 1), (2, 3)): the sum with its order of additions. (A pair is unordered, because a +
b and b + a have the same bits.) The checker proves:

    no deadlock        each send of a round has its receive in the same round, and vice versa. So every round completes
                       once its ranks have reached it, even on a transport such as NCCL, where a send only completes
                       when its receive is posted; by induction the last round completes too
    no race            no transfer of a round overwrites what another one reads or writes
    no waste           no transfer delivers a value that is already there
    exactly once       no contribution is added twice, and none is missing at the end
    one result         all ranks end with the same expression, and so with the same bits

Note "canonical". A schedule is canonical if every chunk is added up in the order of the binary tree over the ranks that
`canonical` returns: nearest neighbours first, split at the largest power of two. The bits then depend neither on the
chunk boundaries nor on the schedule, as long as it is canonical: binomial tree, butterfly, or a host's shared memory.

Note "over shards". A schedule with `num_shards` adds up the shards of a batch instead of the ranks. A rank's buffers
initially hold sums of its own shards: buffer k the k-th of its nodes (`shards.py`). The expressions then consist of
shards, and the sum must be the canonical tree over them, because its bits must not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import groupby, zip_longest
from typing import NamedTuple

from ddp.collectives.shards import halves, nodes_by_rank

# --- chunks ----------------------------------------------------------------------------------------------------------

SEGMENT_BYTES = 4 << 20
"""Default size of a pipelining piece of a chunk."""


def offsets(numel: int, num_chunks: int, unit: int = 1) -> list[int]:
    """Returns the boundaries of the chunks, in elements: `num_chunks + 1` numbers from 0 to `numel`.

    Chunks differ by at most one element: offsets(10, 4) = [0, 2, 5, 7, 10], and offsets(2, 4) = [0, 0, 1, 1, 2].

    Args:
        unit: all boundaries but the last one are multiples of it; then chunks differ by at most `unit` elements.
    """
    num_units = -(-numel // unit)
    return [min(numel, index * num_units // num_chunks * unit) for index in range(num_chunks + 1)]


def around(first: int, count: int, num_chunks: int) -> tuple[range, ...]:
    """Returns `count` chunks from `first`, on a circle of `num_chunks`, as one run, or two if they pass the end."""
    first %= num_chunks
    passed = first + count - num_chunks
    if passed <= 0:
        return (range(first, first + count),)
    return range(first, num_chunks), range(passed)


# The number of chunks into which a schedule cuts its buffer, by number of ranks. Most schedules take one of these.


def one_per_rank(num_ranks: int) -> int:
    """Returns the number of ranks: every rank has its own chunk."""
    return num_ranks


def one_chunk(num_ranks: int) -> int:
    """Returns 1: the buffer is one chunk."""
    return 1


# --- the vocabulary --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Sends chunks of one of this rank's buffers to `peer`."""

    peer: int
    chunks: range
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class Recv:
    """Receives chunks into one of this rank's buffers, and adds them to the present value (`add`) or overwrites it.

    Attributes:
        before: the received value comes before the present one in the sum, not after it. Messages of a round with
            `before` for the same chunk must bring the same run of chunks.
    """

    peer: int
    chunks: range
    add: bool
    buffer: int = 0
    before: bool = False


@dataclass(frozen=True, slots=True)
class Add:
    """Adds chunks of this rank's buffer `other` to its buffer `into`, after all receives of the round."""

    into: int
    other: int
    chunks: range


Round = tuple[Send | Recv | Add, ...]
Algorithm = Callable[[int, int], Iterator[Round]]
Expression = int | tuple["Expression", "Expression"]


class Goal(Enum):
    """The promise of a schedule: which rank holds which chunk of whose contribution, before and after."""

    ALL_REDUCE = "every rank ends with the sum of every chunk"
    REDUCE_SCATTER = "rank r ends with the sum of chunk r"
    REDUCE = "rank 0 ends with the sum of every chunk; the others with parts of it"
    ALL_GATHER = "rank r starts with chunk r, every rank ends with all chunks"
    GATHER = "rank r starts with chunk r, rank 0 ends with all chunks"
    BROADCAST = "rank 0 starts with every chunk, every rank ends with them"
    SCATTER = "rank 0 starts with every chunk, rank r ends with chunk r"
    ALL_TO_ALL = "chunk d of rank s ends as chunk s of rank d in buffer 1, which already holds every rank's own chunk"

    @property
    def adds(self) -> bool:
        """Returns True if contributions are summed, and False if they only move."""
        return self in (Goal.ALL_REDUCE, Goal.REDUCE_SCATTER, Goal.REDUCE)

    @property
    def chunk_per_rank(self) -> bool:
        """Returns True if chunks belong to ranks, and False if a schedule may cut the buffer freely."""
        return self not in (Goal.ALL_REDUCE, Goal.REDUCE, Goal.BROADCAST)


class ScheduleError(AssertionError):
    """A schedule does not do what it promises; the message names rank, round and chunk."""


@dataclass(frozen=True)
class Proof:
    """The proof of a schedule by `Schedule.check`, with its counts of rounds, messages and chunks."""

    expressions: tuple[Expression, ...]  # of each chunk at the end
    canonical: bool  # True if every chunk is added up in the order of `canonical`, or if nothing is added
    num_rounds: int
    num_chunks: int
    messages_sent: tuple[int, ...]  # by each rank
    chunks_sent: tuple[int, ...]  # by each rank

    @property
    def busiest(self) -> Fraction:
        """Returns how many buffers the busiest rank sends: 3/2 for a ring of 4."""
        return Fraction(max(self.chunks_sent), self.num_chunks)


class Schedule(NamedTuple):
    """An algorithm, its goal, and the number of chunks into which it cuts the buffer.

    Attributes:
        num_chunks: by number of ranks.
        num_shards: number of shards of a batch that contribute (note "over shards"); None: ranks contribute.
    """

    algorithm: Algorithm
    goal: Goal
    num_chunks: Callable[[int], int]
    num_shards: int | None = None

    def check(self, num_ranks: int, *, root: int = 0) -> Proof:
        """Proves that this schedule reaches its goal.

        Args:
            root: the rank in the role of rank 0 in the goal.

        Raises:
            ScheduleError: it does not; the message names rank, round and chunk.
        """
        goal, num_chunks = self.goal, self.num_chunks(num_ranks)
        if goal.chunk_per_rank and num_chunks != num_ranks:
            raise ScheduleError(
                f"{num_ranks} ranks, {num_chunks} chunks: this goal has a chunk per rank ({goal.value})"
            )
        if self.num_shards is not None and self.num_shards < num_ranks:
            raise ScheduleError(f"{num_ranks} ranks, {self.num_shards} shards: a rank would have none")
        run = SymbolicRun(self, num_ranks, root=root)
        for rounds in zip_longest(*(self.algorithm(rank, num_ranks) for rank in range(num_ranks))):
            run.play(rounds)
        expressions = run.prove()
        return Proof(
            expressions,
            canonical=not goal.adds or set(expressions) == {canonical(run.num_contributors)},
            num_rounds=run.round_number,
            num_chunks=num_chunks,
            messages_sent=tuple(run.messages_sent),
            chunks_sent=tuple(run.chunks_sent),
        )


def canonical(num_contributors: int, first: int = 0) -> Expression:
    """Returns the binary tree over ranks or shards, split at the largest power of two: 5 → (((0, 1), (2, 3)), 4).

    Args:
        first: the number of the first contributor.
    """
    if num_contributors == 1:
        return first
    left, right = halves(range(first, first + num_contributors))
    return canonical(len(left), left.start), canonical(len(right), right.start)


OTHER_ORDER = (
    ": the same sum, added in another order, has other bits; receive in one order of ranks everywhere, and say "
    "before=True of what comes before the rank's own part"
)

# --- the symbolic run --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Value:
    """The immutable content of a chunk. Equal values are one object, so that comparing them is free."""

    expression: Expression
    contributors: int  # bit r is set if it contains the contribution of rank r (over shards: of shard r)


class SymbolicRun:
    """The buffers of all ranks, on which it runs one round after another."""

    def __init__(self, schedule: Schedule, num_ranks: int, *, root: int = 0) -> None:
        goal, num_chunks = schedule.goal, schedule.num_chunks(num_ranks)
        self.num_ranks, self.goal, self.num_chunks, self.root = num_ranks, goal, num_chunks, root
        self.num_shards, self.num_contributors = schedule.num_shards, schedule.num_shards or num_ranks
        self.round_number = 0  # number of rounds begun: the first one is round 1
        self.messages_sent, self.chunks_sent = [0] * num_ranks, [0] * num_ranks
        self._travelled: set[int] = set()  # chunks that any rank has sent
        self._sums: dict[tuple[Value, Value], Value] = {}
        everyone, chunks = range(num_ranks), range(num_chunks)
        self._own = [[Value(rank, 1 << rank) for _ in chunks] for rank in everyone]  # each rank's contribution
        # by rank: (buffer, chunk) → its value; None: undefined
        self.buffers: list[dict[tuple[int, int], Value | None]] = [
            {(0, chunk): self._own[rank][chunk] if self._has_at_first(rank, chunk) else None for chunk in chunks}
            for rank in everyone
        ]
        if goal is Goal.ALL_TO_ALL:
            for rank in everyone:
                self.buffers[rank].update({(1, c): self._own[rank][rank] if c == rank else None for c in chunks})
        if self.num_shards is not None:
            self.buffers = [
                {(buffer, chunk): _sum_of(node) for buffer, node in enumerate(nodes) for chunk in chunks}
                for nodes in nodes_by_rank(num_ranks, self.num_shards)
            ]

    def _has_at_first(self, rank: int, chunk: int) -> bool:
        if self.goal in (Goal.ALL_GATHER, Goal.GATHER):
            return chunk == rank
        if self.goal in (Goal.BROADCAST, Goal.SCATTER):
            return rank == self.root
        return True

    def play(self, rounds: tuple[Round | None, ...]) -> None:
        """Runs one round of all ranks: everything is sent first, and then written or added in the order listed."""
        self.round_number += 1
        on_the_way: dict[tuple[int, int], list[Send]] = {}  # between two ranks, in the order listed
        receives, additions = list[tuple[int, Recv]](), list[tuple[int, Add]]()
        for rank, ops in enumerate(rounds):
            if ops is None:
                raise self._error(rank, "its schedule has ended, while that of another rank continues")
            for op in ops:
                self._forbid_nonsense(rank, op)
                if isinstance(op, Send):
                    on_the_way.setdefault((rank, op.peer), []).append(op)
                    self.messages_sent[rank] += 1
                    self.chunks_sent[rank] += len(op.chunks)
                    self._travelled.update(op.chunks)
                elif isinstance(op, Recv):
                    receives.append((rank, op))
                else:
                    additions.append((rank, op))
            self._forbid_races(rank, ops)
        arrived = [(rank, op, self._delivered(rank, op, on_the_way.get((op.peer, rank)))) for rank, op in receives]
        for (rank, peer), sends in on_the_way.items():
            if sends:
                raise self._error(rank, f"deadlock: rank {peer} receives no {_named(sends[0].chunks)} in this round")
        self._write_before([each for each in arrived if each[1].before])
        for rank, op, values in arrived:
            if not op.before:
                self._write(rank, op, values)
        for rank, addition in additions:
            self._add(rank, addition)

    def _forbid_nonsense(self, rank: int, op: Send | Recv | Add) -> None:
        if not isinstance(op, Add) and (op.peer == rank or not 0 <= op.peer < self.num_ranks):
            raise self._error(rank, f"names rank {op.peer} as its peer")
        if not op.chunks or op.chunks.step != 1 or op.chunks.start < 0 or op.chunks.stop > self.num_chunks:
            raise self._error(rank, f"{op.chunks} is not a run of the chunks 0 to {self.num_chunks - 1}")
        if isinstance(op, Recv) and op.before and not op.add:
            raise self._error(rank, f"overwrites {_named(op.chunks)} with before=True, which needs add=True")

    def _forbid_races(self, rank: int, ops: Round) -> None:
        overwritten = [(op.buffer, c) for op in ops if isinstance(op, Recv) and not op.add for c in op.chunks]
        if overwritten:
            # Except an Add, which comes after all receives and adds their results.
            transfers = [op for op in ops if not isinstance(op, Add)]
            used = {(op.buffer, c) for op in transfers if isinstance(op, Send) or op.add for c in op.chunks}
            if len(set(overwritten)) < len(overwritten) or not used.isdisjoint(overwritten):
                raise self._error(rank, "a chunk is overwritten while in use")
        before = {(op.buffer, op.chunks) for op in ops if isinstance(op, Recv) and op.before}
        if len({(buffer, c) for buffer, run in before for c in run}) < sum(len(run) for _, run in before):
            raise self._error(rank, "runs of chunks that are added before what is there overlap: take the same run")

    def _delivered(self, rank: int, op: Recv, sends: list[Send] | None) -> list[Value]:
        """Returns the content of the oldest message of this round from the peer."""
        if not sends:
            raise self._error(rank, f"deadlock: rank {op.peer} sends no {_named(op.chunks)} in this round")
        send = sends.pop(0)
        # Chunks may differ in length by one element, so they keep their numbers; in an all-to-all all have one length.
        fits = len(send.chunks) == len(op.chunks) if self.goal is Goal.ALL_TO_ALL else send.chunks == op.chunks
        if not fits:
            raise self._error(rank, f"expects {_named(op.chunks)}, rank {op.peer} sends {_named(send.chunks)}")
        values = []
        for chunk in send.chunks:
            value = self.buffers[op.peer].get((send.buffer, chunk))
            if value is None:
                raise self._error(op.peer, f"sends chunk {chunk}, which is undefined there")
            values.append(value)
        return values

    def _write_before(self, arrived: list[tuple[int, Recv, list[Value]]]) -> None:
        """Sums, chunk by chunk, the messages that come before the present value, and adds that value."""
        sums: dict[tuple[int, int, int], Value] = {}  # by rank, buffer and chunk
        for rank, op, values in arrived:
            for chunk, value in zip(op.chunks, values, strict=True):
                place = rank, op.buffer, chunk
                sums[place] = self._sum(rank, chunk, sums[place], value) if place in sums else value
        for (rank, buffer, chunk), value in sums.items():
            self._write(rank, Recv(rank, range(chunk, chunk + 1), add=True, buffer=buffer), [value])

    def _write(self, rank: int, op: Recv, values: list[Value]) -> None:
        buffer = self.buffers[rank]
        for chunk, value in zip(op.chunks, values, strict=True):
            here = buffer.get((op.buffer, chunk))
            if value is here:
                raise self._error(rank, f"chunk {chunk} is there already")
            buffer[op.buffer, chunk] = self._sum(rank, chunk, here, value) if op.add else value

    def _add(self, rank: int, op: Add) -> None:
        """Adds chunks of one buffer of a rank to another one."""
        values = []
        for chunk in op.chunks:
            value = self.buffers[rank].get((op.other, chunk))
            if value is None:
                raise self._error(rank, f"adds chunk {chunk} of buffer {op.other}, which is undefined")
            values.append(value)
        self._write(rank, Recv(rank, op.chunks, add=True, buffer=op.into), values)

    def _sum(self, rank: int, chunk: int, here: Value | None, value: Value) -> Value:
        if here is None:
            raise self._error(rank, f"adds to chunk {chunk}, which is undefined")
        if twice := here.contributors & value.contributors:
            raise self._error(rank, f"adds the contribution of {self._whose(twice)} to chunk {chunk} twice")
        # A pair is unordered (a + b is b + a): the part with the smallest rank or shard is written first.
        smallest = [part.contributors & -part.contributors for part in (here, value)]
        first, second = (here, value) if smallest[0] < smallest[1] else (value, here)
        found = self._sums.get((first, second))
        if found is None:
            expression = first.expression, second.expression
            found = self._sums[first, second] = Value(expression, first.contributors | second.contributors)
        return found

    def prove(self) -> tuple[Expression, ...]:
        """Compares every rank's final buffers to the goal; returns the expression of each chunk."""
        return tuple(self._proven(chunk) for chunk in range(self.num_chunks))

    def _proven(self, chunk: int) -> Expression:
        if self.goal is Goal.ALL_TO_ALL:
            for rank, buffer in enumerate(self.buffers):
                if buffer[1, chunk] is not self._own[chunk][rank]:
                    what = f"chunk {chunk} of buffer 1 is not rank {chunk}'s chunk for rank {rank}"
                    raise self._wrong_end(rank, what)
            return chunk
        holders = self._holders(chunk)
        value = self.buffers[holders[0]][0, chunk]
        if value is None or value.contributors != self._wanted(chunk):
            missing = self._wanted(chunk) & ~(value.contributors if value else 0)
            what = f"chunk {chunk} ends as {_as_text(value)}: not each contribution once"
            hint = "" if chunk in self._travelled else self._not_sent()
            raise self._wrong_end(holders[0], f"{what}, that of {self._whose(missing)} is missing{hint}")
        for rank in holders:
            other = self.buffers[rank][0, chunk]
            if other is not value:
                there = f"as {_as_text(value)} on rank {holders[0]}"
                is_same_sum = other is not None and other.contributors == value.contributors
                hint = OTHER_ORDER if is_same_sum else ""
                raise self._wrong_end(rank, f"chunk {chunk} ends as {_as_text(other)}, but {there}{hint}")
        if self.num_shards is not None and value.expression != canonical(self.num_shards):
            what = f"chunk {chunk} ends as {_as_text(value)}, not as the canonical tree over the shards"
            raise self._wrong_end(holders[0], f"{what}: its bits would depend on the number of ranks")
        return value.expression

    def _holders(self, chunk: int) -> list[int]:
        """Returns the ranks that must have this chunk at the end."""
        if self.goal in (Goal.REDUCE_SCATTER, Goal.SCATTER):
            return [chunk]
        if self.goal in (Goal.REDUCE, Goal.GATHER):
            return [self.root]
        return list(range(self.num_ranks))

    def _wanted(self, chunk: int) -> int:
        """Returns the ranks or shards whose contributions a chunk must have at the end, as a bit mask."""
        if self.goal.adds:
            return (1 << self.num_contributors) - 1
        return 1 << (chunk if self.goal in (Goal.ALL_GATHER, Goal.GATHER) else self.root)

    def _whose(self, mask: int) -> str:
        """Returns the names of the ranks, or of the shards, whose bits are set."""
        numbers = [str(number) for number in range(mask.bit_length()) if mask >> number & 1]
        kind = "rank" if self.num_shards is None else "shard"
        return f"{kind}{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"

    def _error(self, rank: int, what: str) -> ScheduleError:
        return ScheduleError(f"{self.num_ranks} ranks, rank {rank} in round {self.round_number}: {what}")

    def _wrong_end(self, rank: int, what: str) -> ScheduleError:
        return ScheduleError(f"{self.num_ranks} ranks, rank {rank} at the end: {what}")

    def _not_sent(self) -> str:
        whole = f"the whole buffer is range({self.num_chunks})"
        return f"; no rank sends this chunk: {whole}, a chunk per rank unless num_chunks says otherwise"


def _as_text(value: Value | None) -> str:
    return "undefined" if value is None else str(value.expression)


def _sum_of(node: range) -> Value:
    """Returns a rank's own sum: a node of the tree over the shards."""
    return Value(canonical(len(node), node.start), (1 << node.stop) - (1 << node.start))


def _named(chunks: range) -> str:
    return f"chunk {chunks.start}" if len(chunks) == 1 else f"chunks {chunks.start}-{chunks.stop - 1}"


# --- for a reader ----------------------------------------------------------------------------------------------------


def draw(algorithm: Algorithm, num_ranks: int) -> str:
    """Returns the rounds of all ranks as text, a block per round and a line per rank.

    round 1
      rank 0   chunk 2 → rank 1      chunk 1 += rank 2
      rank 1   chunk 0 → rank 2      chunk 2 += rank 0
      rank 2   chunk 1 → rank 0      chunk 0 += rank 1

    Additions among a rank's own buffers are on a line below: "then in chunk 1: buffer 0 += 2".
    """
    programs = [list(algorithm(rank, num_ranks)) for rank in range(num_ranks)]
    transfers = [op for program in programs for ops in program for op in ops if not isinstance(op, Add)]
    width = max((len(_phrase(op)) for op in transfers), default=0)
    blocks = [
        "\n".join(
            [f"round {number}", *(_lines(rank, ops, max(width + 2, 21)) for rank, ops in enumerate(rounds) if ops)]
        )
        for number, rounds in enumerate(zip_longest(*programs, fillvalue=()), start=1)
        if any(rounds)
    ]
    return "\n\n".join(blocks) or "nothing to do: a single rank already has every contribution"


def _lines(rank: int, ops: Round, width: int) -> str:
    transfers, additions = [op for op in ops if not isinstance(op, Add)], [op for op in ops if isinstance(op, Add)]
    lines = [f"  rank {rank:<3}" + "".join(f" {_phrase(op):<{width}}" for op in transfers).rstrip()]
    for chunks, of_these in groupby(additions, lambda op: op.chunks):
        sums = ", ".join(f"buffer {op.into} += {op.other}" for op in of_these)
        lines.append(f"{'':11}then in {_named(chunks)}: {sums}")
    return "\n".join(lines)


def _phrase(op: Send | Recv) -> str:
    name = _named(op.chunks)
    name += f" of buffer {op.buffer}" if op.buffer else ""
    if isinstance(op, Send):
        return f"{name} → rank {op.peer}"
    return f"{name} {'+=' if op.add else '←'} rank {op.peer}{' (before)' if op.before else ''}"
