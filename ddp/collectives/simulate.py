"""Runs a schedule for all ranks on a logical clock, and computes when each rank would finish on a given network.

The simulator starts no process, holds no tensor and waits for nothing: it is a heap of events. So ten thousand ranks
take seconds, and the result is the same on every machine. It models `ddp/comm/execute.py` on links of Hockney's model:

    a message of n bytes     leaves its sender over n·beta seconds, is under way for alpha, and lands over n·beta: it
                             has arrived alpha + n·beta after it began; the sender is done with it after n·beta
    beginning                a message begins when both sides have posted it
    a port                   carries one message after another, with `gap` between them
    inside a host            every rank has a port out and a port in
    between hosts            the ranks of a host share one port out and one port in: its network interface, full duplex
    a rank                   takes its lanes in turn: it waits for a lane's round, adds what arrived, makes the `Add`s
                             (gamma per byte), and posts that lane's next round. Other lanes' messages move
                             meanwhile: pipelining

                     rank 0   ▓▓▓▓ out ▓▓▓▓
                                 ╲ alpha    ╲
                     rank 1        ▓▓▓▓ in ▓▓▓▓▒▒ add ▒▒  next round …

Messages for the same port queue in the order in which they reach it. Real flows share the port instead: then the
earlier ones finish later, but the last one finishes at the same time. With one message per transfer this is the
textbook's cost in `cost.py`; a test compares them.

Note "symmetry". In a ring or an all-to-all on equal hosts, every host does the same at the same time. Then the
simulator runs one host, whose messages leave on one side and arrive on the other. This is not an approximation: it
computes the same times once instead of once per host. So a ring of 10,000 ranks, 2·10⁸ messages, takes seconds.

Source: R. Hockney, "The communication challenge for MPP", 1994 (alpha and beta); A. Alexandrov et al., "LogGP", 1995
(the gap; a sender is free before its message has arrived).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise, zip_longest
from typing import NamedTuple

from ddp.collectives.cost import Link, Network, about_messages, equal_hosts, textbook
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import SEGMENT_BYTES, Add, Recv, Round, Schedule, ScheduleError, Send, offsets

ELEMENT_BYTES = 4
SIMULATED_MESSAGES = 20_000  # of a schedule that `cost_s` simulates: half a second
MOST_MESSAGES = 1_000_000  # of the simulated ranks: 20 seconds, and 1 GB
MANY_RANKS = 64  # with more, `repeats` compares a sample of the ranks


class Moved(NamedTuple):
    """One message of a simulation."""

    sender: int
    receiver: int
    round_number: int  # of the receiver, from 0
    lane: int
    num_bytes: int
    start_s: float  # when its first byte left
    end_s: float  # when its last byte had landed


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation.

    Attributes:
        finish_s: by rank, its end.
        num_rounds: rounds of the busiest rank, in one lane.
        num_lanes: segments that each chunk was cut into.
        num_messages: messages of all ranks.
        bytes_sent: by rank.
        host_bytes_sent: by host, the bytes that left it.
        moved: every message; only those of the simulated ranks, if one host represented all.
    """

    finish_s: tuple[float, ...]
    num_rounds: int
    num_lanes: int
    num_messages: int
    bytes_sent: tuple[int, ...]
    host_bytes_sent: tuple[int, ...]
    moved: tuple[Moved, ...] = field(repr=False)

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s)


def simulate(
    schedule: Schedule,
    network: Network,
    numel: int,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    every_host: bool = False,
) -> Timeline:
    """Runs a schedule for every rank of `network` on a buffer of `numel` elements, of `ELEMENT_BYTES` each.

    Args:
        segment_bytes: size of a pipelining segment of a chunk, as in `execute`.
        every_host: simulate every host, even if one could represent all.

    Raises:
        ScheduleError: the ranks deadlock, or there are too many messages to simulate.
    """
    num_ranks = network.num_ranks
    cut = _Cut(offsets(numel, schedule.num_chunks(num_ranks)), max(1, segment_bytes // ELEMENT_BYTES))
    period = num_ranks
    if not every_host and cut.is_even and repeats(schedule, network.hosts):
        period = 1 if len(network.hosts) == 1 else len(network.hosts[0])
    return _Run(schedule, cut, network, period).timeline()


def whole_chunks(numel: int, num_chunks: int) -> int:
    """Returns `numel`, rounded up to chunks of equal length, so that identical hosts are simulated once."""
    return -(-numel // num_chunks) * num_chunks


@lru_cache(maxsize=4096)
def cost_s(name: str, schedule: Schedule, nbytes: int, network: Network) -> float:
    """Returns the simulated seconds of an all-reduce of `nbytes`: a pure function of its arguments, cached.

    It takes milliseconds for up to 16 ranks, and tens of milliseconds for up to 64, or for any number if all hosts are
    identical (ring, all-to-all).

    Args:
        name: the schedule's name in the catalog, whose formula is used for more than `SIMULATED_MESSAGES` messages.
    """
    num_ranks = network.num_ranks
    if num_ranks == 1:
        return 0.0
    numel, num_chunks = -(-nbytes // ELEMENT_BYTES), schedule.num_chunks(num_ranks)
    one_host_stands_for_all = numel > num_chunks and repeats(schedule, network.hosts)  # all chunks have one length
    if about_messages(schedule, num_ranks) > SIMULATED_MESSAGES and not one_host_stands_for_all:
        seconds = textbook(name, nbytes, network)
        if seconds is not None:
            return seconds
    if numel > num_chunks:
        numel = whole_chunks(numel, num_chunks)
    return simulate(schedule, network, numel).makespan_s


class _Cut:
    """A buffer, cut into chunks and segments, which determine the messages of a transfer."""

    def __init__(self, bounds: list[int], segment_numel: int) -> None:
        self._bounds, self._segment_numel = bounds, segment_numel
        lengths = {stop - start for start, stop in pairwise(bounds)}
        self.is_even = len(lengths) == 1
        self.num_lanes = max(1, -(-max(lengths) // segment_numel))

    def messages(self, chunks: range, lane: int) -> list[int]:
        """Returns the bytes of each message of a transfer of `chunks` in this lane, without empty ones."""
        bounds = self._bounds
        if self.num_lanes == 1:  # neighbouring chunks travel as one message
            numel = bounds[chunks.stop] - bounds[chunks.start]
            return [numel * ELEMENT_BYTES] if numel else []
        before, most = lane * self._segment_numel, self._segment_numel
        numels = [min(most, bounds[chunk + 1] - bounds[chunk] - before) for chunk in chunks]
        return [numel * ELEMENT_BYTES for numel in numels if numel > 0]

    def num_messages(self, chunks: range) -> int:
        """Returns an upper bound of the number of messages of a transfer of `chunks` in all lanes."""
        return 1 if self.num_lanes == 1 else self.num_lanes * len(chunks)


@dataclass(slots=True, eq=False)
class _Rank:
    """One simulated rank: its host, schedule and clock, and its lanes in the order of their turns."""

    number: int
    host: int
    place: int
    rounds: list[Round]
    lanes: deque[_Lane] = field(default_factory=deque)
    clock_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Lane:
    """One lane of one rank, and the round that it has in flight."""

    rank: _Rank
    number: int
    round_number: int = -1
    num_left: int = 0  # unfinished messages of the round
    ready_s: float = 0.0  # when the last finished message finished
    num_adding: int = 0  # bytes to be added after the round


class _Posted(NamedTuple):
    """One side of a message, until the other side is posted."""

    is_send: bool
    lane: _Lane
    num_bytes: int
    posted_s: float


@dataclass(slots=True, eq=False)
class _Message:
    """A message posted by both sides."""

    sender: _Lane
    receiver: _Lane
    to_rank: int
    num_bytes: int
    link: Link
    out_port: int
    in_port: int
    order: tuple[int, int, int] = (0, 0, 0)  # among the events of one moment
    start_s: float | None = None


class _Run:
    """The event loop. Ranks 0 … period − 1 are simulated; rank r behaves as rank r mod period.

    An event is a message that has reached its port out, or its port in. Events are processed in the order of time;
    those of one moment by distance of the ranks, sender's place on its host, and posting: an order that is the same for
    every host, so that it does not break the symmetry.
    """

    def __init__(self, schedule: Schedule, cut: _Cut, network: Network, period: int) -> None:
        self.cut, self.network, self.num_ranks, self.period = cut, network, network.num_ranks, period
        seats = {rank: (host, place) for host, ranks in enumerate(network.hosts) for place, rank in enumerate(ranks)}
        self.host_of = [seats[rank][0] for rank in range(self.num_ranks)]
        self.num_messages = 0
        self.ranks = [_Rank(r, *seats[r], list(self._rounds(schedule, r))) for r in range(period)]
        num_ports = period + len(network.hosts)  # each rank's own, then each host's
        self.out_free_s, self.in_free_s = [0.0] * num_ports, [0.0] * num_ports
        self.posted: dict[tuple[int, int], deque[_Posted]] = {}  # by sender modulo period and distance to the receiver
        self.moments: list[float] = []  # a heap; many events share a moment
        self.events: dict[float, list[_Message]] = {}  # by moment
        self.num_events = 0
        self.moved: list[Moved] = []

    def _rounds(self, schedule: Schedule, rank: int) -> Iterator[Round]:
        """Yields the rounds of a rank, and counts their messages, to refuse too many before they fill the memory."""
        for ops in schedule.algorithm(rank, self.num_ranks):
            yield ops
            self.num_messages += sum(self.cut.num_messages(op.chunks) for op in ops if isinstance(op, Send))
            if self.num_messages > MOST_MESSAGES:
                raise ScheduleError(
                    f"{self.num_ranks:,} ranks: more than {MOST_MESSAGES:,} messages, which would take minutes and "
                    "gigabytes; take fewer ranks or bytes, or hosts that all do the same: one stands for all"
                )

    def timeline(self) -> Timeline:
        for rank in self.ranks:
            lanes = [_Lane(rank, number) for number in range(self.cut.num_lanes)]
            rank.lanes.extend(lane for lane in lanes if self._post_next(lane))
        for rank in self.ranks:
            self._advance(rank)
        while self.moments:
            now_s = heappop(self.moments)
            for message in sorted(self.events.pop(now_s), key=lambda message: message.order):
                if message.start_s is None:
                    self._depart(message, now_s)
                else:
                    self._arrive(message, message.start_s, now_s)
        if stuck := [rank for rank in self.ranks if rank.lanes]:
            where = ", ".join(f"rank {rank.number} in round {rank.lanes[0].round_number + 1}" for rank in stuck[:8])
            raise ScheduleError(f"deadlock with {self.num_ranks} ranks: {where}")
        return self._result()

    def _advance(self, rank: _Rank) -> None:
        """Advances the lanes in turn, up to the first one whose round is not over."""
        while rank.lanes and not rank.lanes[0].num_left:
            lane = rank.lanes.popleft()
            rank.clock_s = max(rank.clock_s, lane.ready_s) + self.network.gamma_s * lane.num_adding
            if self._post_next(lane):
                rank.lanes.append(lane)

    def _post_next(self, lane: _Lane) -> bool:
        """Posts the lane's next round. Returns False if there is none."""
        lane.round_number += 1
        if lane.round_number == len(lane.rank.rounds):
            return False
        lane.ready_s, lane.num_left, lane.num_adding = lane.rank.clock_s, 0, 0
        for op in lane.rank.rounds[lane.round_number]:
            for num_bytes in self.cut.messages(op.chunks, lane.number):
                if isinstance(op, Add):
                    lane.num_adding += num_bytes
                    continue
                lane.num_left += 1
                if isinstance(op, Recv) and op.add:
                    lane.num_adding += num_bytes
                self._post(lane, op, num_bytes)
        return True

    def _post(self, lane: _Lane, op: Send | Recv, num_bytes: int) -> None:
        """Posts one side of a message. The sides of an edge match in the order of posting."""
        here = _Posted(isinstance(op, Send), lane, num_bytes, lane.rank.clock_s)
        sender, receiver = (lane.rank.number, op.peer) if here.is_send else (op.peer, lane.rank.number)
        edge = sender % self.period, (receiver - sender) % self.num_ranks
        waiting = self.posted.setdefault(edge, deque())
        if not waiting or waiting[0].is_send == here.is_send:
            waiting.append(here)
        elif here.is_send:
            self._match(edge, here, waiting.popleft())
        else:
            self._match(edge, waiting.popleft(), here)

    def _match(self, edge: tuple[int, int], send: _Posted, receive: _Posted) -> None:
        sender, receiver = edge[0], sum(edge) % self.num_ranks
        if send.num_bytes != receive.num_bytes:
            what = f"rank {sender} sends {send.num_bytes} bytes, rank {receiver} expects {receive.num_bytes}"
            raise ScheduleError(f"round {receive.lane.round_number + 1}: {what}")
        here, there = send.lane.rank, receive.lane.rank
        link, ports = self.network.inside, (here.number, there.number)
        if self.host_of[sender] != self.host_of[receiver]:
            link, ports = self.network.between, (self.period + here.host, self.period + there.host)
        message = _Message(send.lane, receive.lane, receiver, send.num_bytes, link, *ports)
        self._schedule(message, max(send.posted_s, receive.posted_s))

    def _schedule(self, message: _Message, time_s: float) -> None:
        sender = message.sender.rank
        self.num_events += 1
        message.order = ((message.to_rank - sender.number) % self.num_ranks, sender.place, self.num_events)
        if time_s not in self.events:
            heappush(self.moments, time_s)
            self.events[time_s] = []
        self.events[time_s].append(message)

    def _depart(self, message: _Message, now_s: float) -> None:
        """Occupies the sender's port. The sender's side finishes when the last byte has left."""
        link = message.link
        message.start_s = max(now_s, self.out_free_s[message.out_port])
        left_s = message.start_s + message.num_bytes * link.beta_s
        self.out_free_s[message.out_port] = left_s + link.gap_s
        self._schedule(message, message.start_s + link.alpha_s)
        self._done(message.sender, left_s)

    def _arrive(self, message: _Message, start_s: float, now_s: float) -> None:
        """Occupies the receiver's port. The receiver's side finishes when the last byte has landed."""
        link, lane = message.link, message.receiver
        end_s = max(now_s, self.in_free_s[message.in_port]) + message.num_bytes * link.beta_s
        self.in_free_s[message.in_port] = end_s + link.gap_s
        ends = message.sender.rank.number, message.to_rank
        self.moved.append(Moved(*ends, lane.round_number, lane.number, message.num_bytes, start_s, end_s))
        self._done(lane, end_s)

    def _done(self, lane: _Lane, time_s: float) -> None:
        lane.num_left -= 1
        lane.ready_s = max(lane.ready_s, time_s)
        if not lane.num_left and lane.rank.lanes[0] is lane:
            self._advance(lane.rank)

    def _result(self) -> Timeline:
        sent, left = [0] * self.period, [0] * self.period  # bytes, and the bytes that leave the host
        for message in self.moved:
            sent[message.sender] += message.num_bytes
            if self.host_of[message.receiver] != self.host_of[message.sender]:
                left[message.sender] += message.num_bytes
        who = [rank % self.period for rank in range(self.num_ranks)]
        return Timeline(
            finish_s=tuple(self.ranks[rank].clock_s for rank in who),
            num_rounds=max(len(rank.rounds) for rank in self.ranks),
            num_lanes=self.cut.num_lanes,
            num_messages=len(self.moved) * self.num_ranks // self.period,
            bytes_sent=tuple(sent[rank] for rank in who),
            host_bytes_sent=tuple(sum(left[who[rank]] for rank in members) for members in self.network.hosts),
            moved=tuple(self.moved),
        )


# --- symmetry --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def repeats(schedule: Schedule, hosts: Hosts) -> bool:
    """Returns True if all hosts (on one host: all ranks) behave identically, with peers moved by the same distance.

    It compares the rounds of every rank, or of a sample if there are more than `MANY_RANKS`.
    """
    num_ranks, per_host = sum(map(len, hosts)), len(hosts[0])
    if num_ranks % per_host or hosts != equal_hosts(num_ranks, per_host):
        return False
    period = 1 if len(hosts) == 1 else per_host
    others: Iterable[int] = range(period, num_ranks)
    if num_ranks > MANY_RANKS:
        others = {period, num_ranks // 2, num_ranks // 2 + 1, num_ranks - 1}
    return all(
        here == there
        for rank in others
        for here, there in zip_longest(
            _seen_from(rank % period, schedule, num_ranks), _seen_from(rank, schedule, num_ranks)
        )
    )


def _seen_from(rank: int, schedule: Schedule, num_ranks: int) -> Iterator[list[tuple[int, bool, int, bool]]]:
    """Yields a rank's rounds as seen from that rank: distance to the peer, direction, number of chunks, and if added.

    Only the order of posting to the same peer matters, because the simulator orders messages by distance. An `Add` has
    distance 0, which no peer has.
    """
    for ops in schedule.algorithm(rank, num_ranks):
        seen = [
            (0, False, len(op.chunks), True)
            if isinstance(op, Add)
            else ((op.peer - rank) % num_ranks, isinstance(op, Send), len(op.chunks), isinstance(op, Recv) and op.add)
            for op in ops
        ]
        yield sorted(seen, key=lambda transfer: transfer[:2])
