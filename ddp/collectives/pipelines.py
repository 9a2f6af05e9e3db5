"""Pipelines as data: which micro-batch a stage computes when, and what it exchanges with its neighbours. No torch here.

    python -m ddp draw 1f1b 4 --micro 8        python -m ddp check gpipe 4 --micro 8

A model is cut into *stages*, one per rank: stage s holds the layers after those of stage s − 1. The batch is cut into
*micro-batches*, so that stages compute at the same time. Activations travel down, their gradients travel back up:

    stage 0  F0 F1 F2 F3          B0 F4 B1 F5 B2 F6 B3 F7 B4    B5    B6    B7
    stage 1     F0 F1 F2       B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5    B6    B7
    stage 2        F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6    B7
    stage 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7

The empty places are the *bubble*. Whatever the order, it is at least (p − 1) ÷ (m + p − 1) of the time, for p stages
and m micro-batches that take equally long, because stage p − 1 cannot begin before p − 1 forwards, nor stage 0 end
before p − 1 backwards. What the order decides is memory: the number of activations that a stage *holds*, from their
forward to their backward.

                                bubble                  held by stage s, from 0
    gpipe                       (p − 1) ÷ (m + p − 1)   m
    one_forward_one_backward    (p − 1) ÷ (m + p − 1)   min(m, p − s)

A schedule is a generator `algorithm(stage, num_stages, num_micro)`. It speaks of transfers as collectives do
(`schedule.py`): a `Send` or `Recv` whose chunk is a micro-batch, to or from a neighbour. One word is new, `Compute`. It
yields one of these, or a tuple of them: a round, whose transfers are in flight together, while it computes. Stages −1
and p, which do not exist, are the data and the loss: transfers with them are left out (as with MPI_PROC_NULL in MPI).

Note "a send waits". The checker lets each send wait for its receive, and each round for all of its transfers. This is
the strictest transport that there is. On it, two neighbours that both send first are a deadlock, so in 1F1B an
activation down and a gradient up are one round of both stages. The executor (`ddp/strategies/pipeline.py`) lets sends
wait in the background, and posts receives early. Messages between two stages still match in their order. So whatever
completes on the strict transport completes there, too, and no later.

Source: Y. Huang et al., "GPipe", 2018, arXiv 1811.06965; D. Narayanan et al., "PipeDream", 2019 (1F1B), and
"Efficient large-scale language model training on GPU clusters", 2021, arXiv 2104.04473 (1F1B that ends with the step).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import NamedTuple
from zlib import crc32

from ddp.collectives.picture import MARGIN, color_of, page, rect, text
from ddp.collectives.schedule import Recv, ScheduleError, Send

# --- the vocabulary --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compute:
    """Computes the forward, or the backward, of one micro-batch through this stage."""

    micro: int
    backward: bool

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.micro}"


Op = Send | Recv | Compute
BEGINS = Send, Compute, Recv  # of a round: its sends are posted, it computes, and then it waits for its receives
Algorithm = Callable[[int, int, int], Iterator[Op | tuple[Op, ...]]]


def send(peer: int, micro: int) -> Send:
    """Returns the send of a micro-batch: of its activation to the next stage, or of its gradient to the one before."""
    return Send(peer, range(micro, micro + 1))


def recv(peer: int, micro: int) -> Recv:
    """Returns the receive of a micro-batch: of its activation from the stage before, or its gradient from the next."""
    return Recv(peer, range(micro, micro + 1), add=False)


# --- the schedules ---------------------------------------------------------------------------------------------------


def gpipe(stage: int, num_stages: int, num_micro: int) -> Iterator[Op | tuple[Op, ...]]:
    """Computes all forwards, then all backwards: the simplest order. A stage holds all micro-batches at once."""
    before, after = stage - 1, stage + 1
    for micro in range(num_micro):
        yield recv(before, micro)
        yield Compute(micro, backward=False)
        yield send(after, micro)
    for micro in range(num_micro):
        yield recv(after, micro)
        yield Compute(micro, backward=True)
        yield send(before, micro)


def one_forward_one_backward(stage: int, num_stages: int, num_micro: int) -> Iterator[Op | tuple[Op, ...]]:
    """A backward as soon as it can be: a stage runs only as many forwards ahead as there are stages after it."""
    before, after = stage - 1, stage + 1
    ahead = min(num_micro, num_stages - 1 - stage)
    for micro in range(ahead):
        yield recv(before, micro)
        yield Compute(micro, backward=False)
        yield send(after, micro)
    if ahead < num_micro:
        yield recv(before, ahead)
    for newest in range(ahead, num_micro):
        oldest, is_last = newest - ahead, newest + 1 == num_micro
        yield Compute(newest, backward=False)
        yield send(after, newest), recv(after, oldest)
        yield Compute(oldest, backward=True)
        yield send(before, oldest) if is_last else (send(before, oldest), recv(before, newest + 1))
    for micro in range(num_micro - ahead, num_micro):
        yield recv(after, micro)
        yield Compute(micro, backward=True)
        yield send(before, micro)


PIPELINES: dict[str, Algorithm] = {"gpipe": gpipe, "one_forward_one_backward": one_forward_one_backward}
ALIASES = {"1f1b": "one_forward_one_backward"}


def bubble(num_stages: int, num_micro: int) -> Fraction:
    """Returns the smallest share of the time in which stages idle, if all micro-batches take equally long."""
    return Fraction(num_stages - 1, num_micro + num_stages - 1)


@lru_cache(maxsize=1024)
def rounds_of(algorithm: Algorithm, stage: int, num_stages: int, num_micro: int) -> tuple[tuple[Op, ...], ...]:
    """Returns the rounds of one stage, each in the order of its beginnings, without transfers with stages −1 and p.

    Raises:
        ScheduleError: the generator fails, never ends, or yields something else.
    """
    most, found = 10 * (num_micro + num_stages), list[tuple[Op, ...]]()

    def wrong(what: str) -> ScheduleError:
        return _error(num_stages, num_micro, stage, len(found), what)

    try:
        for step in islice(algorithm(stage, num_stages, num_micro), most + 1):
            ops = step if isinstance(step, tuple) else (step,)
            if not all(_is_op(op, num_micro) for op in ops):
                raise wrong(f"yields {step!r:.80}, not a Send, Recv or Compute of one micro-batch from 0 to m − 1")
            found.append(tuple(op for op in ops if isinstance(op, Compute) or op.peer not in (-1, num_stages)))
    except ScheduleError:
        raise
    except Exception as error:
        raise wrong(f"raises {type(error).__name__}: {error}") from error
    if len(found) > most:
        raise wrong("never ends; a schedule must end")
    return tuple(tuple(sorted(ops, key=lambda op: BEGINS.index(type(op)))) for ops in found if ops)


@lru_cache(maxsize=256)
def digest(algorithm: Algorithm, num_stages: int, num_micro: int) -> int:
    """Returns a number by which two ranks find out whether they have the same schedule."""
    return crc32(repr([rounds_of(algorithm, stage, num_stages, num_micro) for stage in range(num_stages)]).encode())


def _is_op(op: object, num_micro: int) -> bool:
    if isinstance(op, Compute):
        return type(op.micro) is int and 0 <= op.micro < num_micro and isinstance(op.backward, bool)
    if not isinstance(op, Send | Recv) or type(op.peer) is not int or not isinstance(op.chunks, range):
        return False
    return len(op.chunks) == 1 and 0 <= op.chunks[0] < num_micro


# --- the run: proof, and time ----------------------------------------------------------------------------------------


class Costs(NamedTuple):
    """Seconds of one micro-batch on each stage: its forward, its backward, and one message of it."""

    forward_s: float = 1
    backward_s: float = 1
    message_s: float = 0


class Span(NamedTuple):
    """A computation of a stage, in time."""

    stage: int
    compute: Compute
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The run of a pipeline.

    Attributes:
        held: by stage, the largest number of activations that it holds at a time.
    """

    spans: tuple[Span, ...] = field(repr=False)
    num_stages: int
    num_messages: int
    held: tuple[int, ...]

    @property
    def makespan_s(self) -> float:
        return max(span.end_s for span in self.spans)

    @property
    def bubble(self) -> Fraction:
        """Returns the share of the time in which stages idle."""
        busy = sum(Fraction(span.end_s) - Fraction(span.start_s) for span in self.spans)
        return 1 - busy / (self.num_stages * Fraction(self.makespan_s)) if self.makespan_s else Fraction(0)


UNITS = Costs()


@lru_cache(maxsize=256)
def check(algorithm: Algorithm, num_stages: int, num_micro: int) -> Timeline:
    """Proves a schedule on a transport where a send waits for its receive, and returns its run in units of time.

    It proves that each micro-batch passes each stage once forward and once backward, each after what it needs has
    arrived; that messages match in their order; and that nothing deadlocks.

    Raises:
        ScheduleError: the schedule is wrong; the message names stage, round and micro-batch.
    """
    return _Run(algorithm, num_stages, num_micro, UNITS, waits=True).timeline()


def simulate(algorithm: Algorithm, num_stages: int, num_micro: int, costs: Costs) -> Timeline:
    """Returns the run of a schedule by the executor, whose sends are in flight while a stage computes.

    Raises:
        ScheduleError: the schedule is wrong.
    """
    check(algorithm, num_stages, num_micro)
    return _Run(algorithm, num_stages, num_micro, costs, waits=False).timeline()


@dataclass(slots=True, eq=False)
class _Stage:
    """One stage, its clock, and what it has computed and received."""

    number: int
    rounds: tuple[tuple[Op, ...], ...]
    num_begun: int = 0
    num_open: int = 0  # transfers of the running round that have not completed
    clock_s: float = 0  # when what has completed of the running round has
    computed: set[Compute] = field(default_factory=set)
    sent: set[Send] = field(default_factory=set)
    arrived: set[Compute] = field(default_factory=set)  # the computations whose messages are here
    arriving: set[Compute] = field(default_factory=set)  # with this round
    held: int = 0
    most_held: int = 0


class _Posted(NamedTuple):
    """One end of a message, until the other one is posted."""

    stage: _Stage
    micro: int
    time_s: float


class _Run:
    """Runs all stages, round by round. Between two stages messages match in the order in which they are posted.

    Args:
        waits: a send waits for its receive; else it completes at once.
    """

    def __init__(self, algorithm: Algorithm, num_stages: int, num_micro: int, costs: Costs, *, waits: bool) -> None:
        self.num_stages, self.num_micro, self.costs, self.waits = num_stages, num_micro, costs, waits
        self.stages = [_Stage(s, rounds_of(algorithm, s, num_stages, num_micro)) for s in range(num_stages)]
        self.sends: dict[tuple[int, int], deque[_Posted]] = {}  # by sender and receiver
        self.receives: dict[tuple[int, int], deque[_Posted]] = {}
        self.free_s: dict[tuple[int, int], float] = {}  # when an edge has carried its last message
        self.spans: list[Span] = []
        self.num_messages = 0
        self.touched = dict.fromkeys(self.stages)  # those that may go on

    def timeline(self) -> Timeline:
        while moving := [each for each in self.touched if each.num_begun < len(each.rounds) and not each.num_open]:
            self.touched = {}
            for stage in moving:
                self._begin(stage)
        if stuck := [stage for stage in self.stages if stage.num_open]:
            waits = "; ".join(f"stage {stage.number} in round {stage.num_begun}" for stage in stuck[:8])
            raise self._error(stuck[0], f"deadlock: {' and '.join(self._waits_for(stuck[0]))}; stuck are {waits}")
        for stage in self.stages:
            for each in (Compute(m, backward) for backward in (False, True) for m in range(self.num_micro)):
                if each not in stage.computed:
                    raise self._error(stage, f"ends without the {_named(each)}")
        return Timeline(tuple(self.spans), self.num_stages, self.num_messages, tuple(s.most_held for s in self.stages))

    def _begin(self, stage: _Stage) -> None:
        """Begins the next round of a stage: its transfers are posted, and then it computes."""
        stage.num_begun += 1
        stage.arrived |= stage.arriving
        stage.arriving.clear()
        ops, start_s = stage.rounds[stage.num_begun - 1], stage.clock_s
        for op in ops:
            if isinstance(op, Send):
                self._post_send(stage, op, start_s)
            elif isinstance(op, Recv):
                self._post_recv(stage, op, start_s)
        for op in ops:
            if isinstance(op, Compute):
                start_s = self._compute(stage, op, start_s)
        stage.clock_s = max(stage.clock_s, start_s)
        self.touched[stage] = None

    def _post_send(self, stage: _Stage, op: Send, now_s: float) -> None:
        self._refuse_stranger(stage, op.peer)
        micro = op.chunks[0]
        needed = Compute(micro, backward=op.peer < stage.number)
        if needed not in stage.computed:
            raise self._error(stage, f"sends micro-batch {micro} to stage {op.peer} before the {_named(needed)}")
        if op in stage.sent:
            raise self._error(stage, f"sends micro-batch {micro} to stage {op.peer} twice")
        stage.sent.add(op)
        stage.num_open += self.waits
        self.num_messages += 1
        edge = stage.number, op.peer
        self.sends.setdefault(edge, deque()).append(_Posted(stage, micro, now_s))
        self._match(edge)

    def _post_recv(self, stage: _Stage, op: Recv, now_s: float) -> None:
        self._refuse_stranger(stage, op.peer)
        stage.num_open += 1
        edge = op.peer, stage.number
        self.receives.setdefault(edge, deque()).append(_Posted(stage, op.chunks[0], now_s))
        self._match(edge)

    def _match(self, edge: tuple[int, int]) -> None:
        """Lets the oldest send of an edge meet the oldest receive, if both are posted."""
        if not (self.sends.get(edge) and self.receives.get(edge)):
            return
        sender, micro, sent_s = self.sends[edge].popleft()
        receiver, expected, posted_s = self.receives[edge].popleft()
        if micro != expected:
            what = f"expects micro-batch {expected} of stage {sender.number}, which sends micro-batch {micro}"
            raise self._error(receiver, what)
        begun_s = max(sent_s, posted_s if self.waits else self.free_s.get(edge, 0))
        self.free_s[edge] = ended_s = begun_s + self.costs.message_s
        receiver.arriving.add(Compute(micro, backward=receiver.number < sender.number))
        for stage in (sender, receiver) if self.waits else (receiver,):
            stage.num_open -= 1
            stage.clock_s = max(stage.clock_s, ended_s)
            self.touched[stage] = None

    def _compute(self, stage: _Stage, op: Compute, start_s: float) -> float:
        """Computes, and returns when that ends."""
        is_edge = stage.number == (self.num_stages - 1 if op.backward else 0)
        if op in stage.computed:
            raise self._error(stage, f"computes the {_named(op)} twice")
        if op.backward and Compute(op.micro, backward=False) not in stage.computed:
            raise self._error(stage, f"computes the {_named(op)} before its forward")
        if not is_edge and op not in stage.arrived:
            what = "gradient" if op.backward else "activation"
            raise self._error(stage, f"computes the {_named(op)} before its {what} has been received")
        end_s = start_s + (self.costs.backward_s if op.backward else self.costs.forward_s)
        self.spans.append(Span(stage.number, op, start_s, end_s))
        stage.computed.add(op)
        stage.held += -1 if op.backward else 1
        stage.most_held = max(stage.most_held, stage.held)
        return end_s

    def _waits_for(self, stage: _Stage) -> Iterator[str]:
        for (sender, receiver), ends in self.sends.items():
            if sender == stage.number and ends:
                yield f"waits until stage {receiver} receives micro-batch {ends[0].micro}"
        for (sender, receiver), ends in self.receives.items():
            if receiver == stage.number and ends:
                yield f"waits until stage {sender} sends micro-batch {ends[0].micro}"

    def _refuse_stranger(self, stage: _Stage, peer: int) -> None:
        if abs(peer - stage.number) != 1:
            raise self._error(stage, f"exchanges a message with stage {peer}, which is not its neighbour")

    def _error(self, stage: _Stage, what: str) -> ScheduleError:
        return _error(self.num_stages, self.num_micro, stage.number, stage.num_begun, what)


def _error(num_stages: int, num_micro: int, stage: int, number: int, what: str) -> ScheduleError:
    where = f"{num_stages} stages, {num_micro} micro-batches, stage {stage} in round {number}"
    return ScheduleError(f"{where}: {what}")


def _named(op: Compute) -> str:
    return f"{'backward' if op.backward else 'forward'} of micro-batch {op.micro}"


# --- for a reader ----------------------------------------------------------------------------------------------------


def draw(algorithm: Algorithm, num_stages: int, num_micro: int) -> str:
    """Returns what each stage computes when, as text: a line per stage, a column per unit of time.

    stage 0  F0 F1       B0    B1
    stage 1     F0 B0 F1 B1
    """
    run, width = check(algorithm, num_stages, num_micro), len(f"F{num_micro - 1}") + 1
    table = [[""] * int(run.makespan_s) for _ in range(num_stages)]
    for span in run.spans:
        table[span.stage][int(span.start_s)] = str(span.compute)
    lines = [f"stage {stage:<2}" + "".join(f"{cell:>{width}}" for cell in row) for stage, row in enumerate(table)]
    return "\n".join([*(line.rstrip() for line in lines), "", *summary(run)])


def summary(run: Timeline) -> list[str]:
    """Returns the bubble of a run, and what each stage holds, a line for each."""
    held = ", ".join([*map(str, run.held[:64]), *["…"][: len(run.held) > 64]])
    exactly = f"{run.bubble} = " if run.bubble.denominator < 10_000 else ""
    return [f"bubble: {exactly}{float(run.bubble):.1%} of the time", f"activations held, by stage: {held}"]


CELL, LINE, TOP, LEFT = 26, 30, 84, MARGIN + 64  # of a picture: width of a unit of time; height of a stage; margins


def svg(algorithm: Algorithm, num_stages: int, num_micro: int, *, title: str) -> str:
    """Returns the same as a picture: a backward is darker than the forward of its micro-batch."""
    run = check(algorithm, num_stages, num_micro)
    parts = [text(MARGIN, 34, title, size=20, weight="bold")]
    parts += [text(MARGIN, 54 + 17 * k, line, size=12) for k, line in enumerate(summary(run))]
    parts += [text(MARGIN, TOP + LINE * s + 18, f"stage {s}", size=12) for s in range(num_stages)]
    for span in run.spans:
        x, y = LEFT + CELL * span.start_s, TOP + LINE * span.stage
        fill, opacity = color_of(span.compute.micro, num_micro), "" if span.compute.backward else "80"
        parts.append(rect(x, y, CELL * (span.end_s - span.start_s), LINE - 5, fill=fill + opacity, stroke="#1f2937"))
        parts.append(text(x + CELL / 2, y + 17, str(span.compute), size=11, anchor="middle"))
    return page(title, max(480, LEFT + CELL * run.makespan_s + MARGIN), TOP + LINE * num_stages + MARGIN, parts)
