"""Runs a schedule for all ranks on a logical clock: when would everyone be done on *that* network?

No process, no tensor, no waiting: a heap of events. So ten thousand ranks cost seconds, and the answer is the same on
every machine. What is modelled is what `ddp/comm/execute.py` does, on links of Hockney's kind:

    a message of n bytes     leaves its sender over n·beta seconds, is under way for alpha, and lands over n·beta:
                             it has arrived alpha + n·beta after it began; the sender is done with it after n·beta
    beginning                when both sides have posted it. A sender learns of a posted receive `announce` seconds
                             later: where the transport makes a send wait for its receiver (rendezvous), two ranks that
                             post to each other at the same moment pay for that, and one that was awaited does not
    many messages            use one way one after another, at a distance of `gap` besides their bytes
    cores and memory         carry the messages inside a host: one of n bytes keeps all others of its host waiting for
                             busy + n·shared. Zero where every rank has a core and a link of its own
    inside a host            every rank has a way out and a way in, used by one message at a time
    between hosts            the ranks of a host share one way out and one way in: its network interface, full duplex
    a rank                   takes its lanes in turn: waits for a lane's round, adds what arrived (gamma per byte),
                             posts that lane's next round. Other lanes' messages move meanwhile: that is pipelining

                     rank 0   ▓▓▓▓ out ▓▓▓▓
                                 ╲ alpha    ╲
                     rank 1        ▓▓▓▓ in ▓▓▓▓▒▒ add ▒▒  next round …

Messages that want the same way queue in the order in which they come to it. (Real flows share it instead; whoever comes
first then finishes later, the last finishes at the same time.) With nothing shared this is the textbook's cost of
`cost.py`; a test compares them.

Symmetry. In a ring or an all-to-all on equal hosts every host does the same at the same time. Then one host is
simulated with messages that leave on one side and come in on the other, which is not an approximation: it is the
same sum, once instead of once per host. It makes a ring of 10,000 ranks, 2·10⁸ messages, a matter of seconds.

Source: R. Hockney, "The communication challenge for MPP", 1994 (alpha and beta); A. Alexandrov et al., "LogGP", 1995
(the gap; a sender is free before its message has arrived). Read next: `cost.py`.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain, islice, pairwise, zip_longest
from typing import NamedTuple

from ddp.collectives.chunks import offsets
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Recv, Round, Schedule, ScheduleError, Send

SEGMENT_BYTES = 4 << 20
MANY_RANKS = 64


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs on its way.

    Attributes:
        alpha_s: from a byte's departure to its arrival.
        beta_s: per byte.
        announce_s: from a receive's posting to the moment at which the sender knows of it.
        gap_s: for how long a message keeps its way busy besides its bytes.
        shared_s: per byte, for how long a message keeps every other one of its host from beginning. Inside hosts only:
            between them the way is shared anyway.
        busy_s: for how long it does so besides its bytes.
    """

    alpha_s: float
    beta_s: float
    announce_s: float = 0.0
    gap_s: float = 0.0
    shared_s: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """Who sits where, and what the ways between them cost.

    Attributes:
        hosts: the ranks of each host.
        inside: between two ranks of one host.
        between: between two hosts; the ranks of a host share it.
        gamma_s: to add one byte that has arrived.
        addition_s: to add nothing: what every addition costs besides.
    """

    hosts: Hosts
    inside: Link
    between: Link
    gamma_s: float = 0.0
    addition_s: float = 0.0

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.hosts))


def equal_hosts(num_ranks: int, per_host: int) -> Hosts:
    """Hosts of `per_host` neighbouring ranks; the last may have fewer."""
    return tuple(tuple(range(start, min(start + per_host, num_ranks))) for start in range(0, num_ranks, per_host))


class Moved(NamedTuple):
    """One message of a simulation."""

    sender: int
    receiver: int
    round_number: int  # of the receiver
    lane: int
    num_bytes: int
    start_s: float  # first byte leaves
    end_s: float  # last byte has landed


@dataclass(frozen=True)
class Timeline:
    """What a simulation found.

    Attributes:
        finish_s: by rank, when it was done.
        num_rounds: rounds of the busiest rank, in one lane.
        num_lanes: pieces that each chunk was cut into.
        num_messages: of all ranks together.
        bytes_sent: by rank.
        host_bytes_sent: by host, what left it.
        moved: every message, if asked for.
    """

    finish_s: tuple[float, ...]
    num_rounds: int
    num_lanes: int
    num_messages: int
    bytes_sent: tuple[int, ...]
    host_bytes_sent: tuple[int, ...]
    moved: tuple[Moved, ...] = field(default=(), repr=False)

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s)


def simulate(
    schedule: Schedule,
    network: Network,
    numel: int,
    *,
    element_bytes: int = 4,
    segment_bytes: int = SEGMENT_BYTES,
    keep_moved: bool = False,
) -> Timeline:
    """Runs a schedule for every rank of `network` on a buffer of `numel` elements.

    With more than `MANY_RANKS` ranks, where every host does the same, a buffer whose chunks are not of one length is
    made longer by up to one element per chunk: else all hosts would be simulated, for a difference that nobody sees.

    Args:
        segment_bytes: size of a pipelining piece of a chunk, as in `execute`.
        keep_moved: list every message in the result (then every host is simulated, whatever its symmetry).

    Raises:
        ScheduleError: the ranks wait for each other for ever.
    """
    if network.num_ranks > MANY_RANKS and not keep_moved and repeats(schedule, network.hosts):
        numel = whole_chunks(numel, schedule.num_chunks(network.num_ranks))
    job = _Job(schedule, network.num_ranks, numel, element_bytes, segment_bytes)
    period = network.num_ranks if keep_moved else _period(job, schedule, network)
    run = _Run(job, network, period, keep_moved)
    with _no_garbage_collection() if period > 256 else nullcontext():
        return run.timeline()


def whole_chunks(numel: int, num_chunks: int) -> int:
    """`numel`, rounded up to chunks of one length."""
    return -(-numel // num_chunks) * num_chunks


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The collector would visit ten thousand suspended ranks again and again, half of the time, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Job:
    """A schedule on a buffer: which messages each transfer becomes."""

    def __init__(
        self,
        schedule: Schedule,
        num_ranks: int,
        numel: int,
        element_bytes: int,
        segment_bytes: int,
    ) -> None:
        self.algorithm, self.num_ranks = schedule.algorithm, num_ranks
        self.bounds = offsets(numel, schedule.num_chunks(num_ranks))
        self.element_bytes, self.segment_numel = element_bytes, max(1, segment_bytes // element_bytes)
        lengths = [stop - start for start, stop in pairwise(self.bounds)]
        self.num_lanes = max(1, -(-max(lengths, default=0) // self.segment_numel))
        self.chunks_alike = len(set(lengths)) <= 1

    def rounds(self, rank: int) -> Iterator[Round]:
        """One rank's schedule.

        Short ones are run to their end at once: a generator may keep a list of all ranks until it has ended, and ten
        thousand such lists fill the memory. Long ones (a ring) are asked for one round at a time.
        """
        rounds = self.algorithm(rank, self.num_ranks)
        first = list(islice(rounds, 64))
        return chain(first, rounds)

    def messages(self, chunks: range, lane: int) -> list[int]:
        """Bytes of each message that a transfer of `chunks` is in this lane; none of them empty."""
        bounds = self.bounds
        if self.num_lanes == 1:
            numel = bounds[chunks.stop] - bounds[chunks.start]
            return [numel * self.element_bytes] if numel else []
        before, most = lane * self.segment_numel, self.segment_numel
        numels = [min(most, bounds[chunk + 1] - bounds[chunk] - before) for chunk in chunks]
        return [numel * self.element_bytes for numel in numels if numel > 0]


class _Lane:
    """One lane of one rank, and the round that it has in flight."""

    __slots__ = ("adding", "additions", "left", "number", "rank", "ready_s", "round_number", "rounds")

    def __init__(self, rank: _Rank, number: int, rounds: Iterator[Round]) -> None:
        self.rank, self.number, self.rounds = rank, number, rounds
        self.round_number = -1
        self.left = 0  # transfers not yet done
        self.ready_s = 0.0  # when the last of those done was done
        self.adding = self.additions = 0  # bytes, and messages, to be added after the round


class _Rank:
    """One simulated rank: its clock, and its lanes in the order in which they get their turn."""

    __slots__ = (
        "bytes_sent",
        "clock_s",
        "host",
        "host_bytes_sent",
        "lanes",
        "num_messages",
        "num_rounds",
        "place",
        "rank",
    )

    def __init__(self, rank: int, host: int, place: int) -> None:
        self.rank, self.host, self.place = rank, host, place
        self.lanes: deque[_Lane] = deque()
        self.clock_s = 0.0
        self.num_rounds = self.num_messages = self.bytes_sent = self.host_bytes_sent = 0


class _Message:
    """A message that both sides have posted."""

    __slots__ = ("crosses", "num_bytes", "receiver", "sender", "start_s", "under_way")

    def __init__(self, sender: _Lane, receiver: _Lane, num_bytes: int, crosses: bool) -> None:
        self.sender, self.receiver, self.num_bytes, self.crosses = sender, receiver, num_bytes, crosses
        self.under_way = False
        self.start_s = 0.0


class _Event(NamedTuple):
    """A message at the beginning of its way out, or of its way in. Compared in this order."""

    distance: int
    place: int
    number: int
    message: _Message


class _Run:
    """The event loop. Ranks 0 … period − 1 are simulated; rank r behaves as rank r mod period.

    Events are taken in the order of time; among those of one moment, by distance of the ranks, sender's place on its
    host, and posting: an order that looks the same from every host, so that symmetry is not broken by it.
    """

    def __init__(self, job: _Job, network: Network, period: int, keep_moved: bool) -> None:
        self.job, self.network, self.period = job, network, period
        self.host_of = [0] * network.num_ranks
        self.ranks: list[_Rank] = [_Rank(0, 0, 0)] * period
        for host, members in enumerate(network.hosts):
            for place, rank in enumerate(members):
                self.host_of[rank] = host
                if rank < period:
                    self.ranks[rank] = _Rank(rank, host, place)
        num_ways = period + len(network.hosts)  # a rank's own, then a host's
        self.out_free_s, self.in_free_s = [0.0] * num_ways, [0.0] * num_ways
        self.host_free_s = [0.0] * len(network.hosts)  # its cores and memory
        self.sends: dict[tuple[int, int], deque[_End]] = {}  # posted, and not yet met by the other side
        self.receives: dict[tuple[int, int], deque[_End]] = {}
        self.moments: list[float] = []  # a heap; many events share a moment
        self.events: dict[float, list[_Event]] = {}  # by moment
        self.num_events = 0
        self.moved: list[Moved] | None = [] if keep_moved else None

    def timeline(self) -> Timeline:
        for rank in self.ranks:
            lanes = [_Lane(rank, number, self.job.rounds(rank.rank)) for number in range(self.job.num_lanes)]
            rank.lanes.extend(lane for lane in lanes if self._post(lane))
        for rank in self.ranks:
            self._advance(rank)
        while self.moments:
            now_s = heappop(self.moments)
            for event in sorted(self.events.pop(now_s)):
                if event.message.under_way:
                    self._arrive(event.message, now_s)
                else:
                    self._depart(event, now_s)
        self._nobody_waits()
        return self._result()

    def _advance(self, rank: _Rank) -> None:
        """Takes the lanes in turn up to the first whose round is not over."""
        while rank.lanes and not rank.lanes[0].left:
            lane = rank.lanes.popleft()
            adding_s = self.network.gamma_s * lane.adding + self.network.addition_s * lane.additions
            rank.clock_s = max(rank.clock_s, lane.ready_s) + adding_s
            if self._post(lane):
                rank.lanes.append(lane)

    def _post(self, lane: _Lane) -> bool:
        """Posts the lane's next round; False when there is none."""
        ops = next(lane.rounds, None)
        if ops is None:
            rank = lane.rank
            rank.num_rounds = max(rank.num_rounds, lane.round_number + 1)
            return False
        lane.round_number += 1
        lane.ready_s, lane.left, lane.adding, lane.additions = lane.rank.clock_s, 0, 0, 0
        for op in ops:
            for num_bytes in self.job.messages(op.chunks, lane.number):
                lane.left += 1
                if isinstance(op, Send):
                    self._post_send(lane, op.peer, num_bytes)
                else:
                    self._post_receive(lane, op.peer, num_bytes)
                    if op.add:
                        lane.adding += num_bytes
                        lane.additions += 1
        return True

    # Messages between two ranks meet in the order of posting. An edge is (sender modulo period, distance to receiver).

    def _post_send(self, lane: _Lane, peer: int, num_bytes: int) -> None:
        rank = lane.rank
        rank.num_messages += 1
        rank.bytes_sent += num_bytes
        if self.host_of[peer] != rank.host:
            rank.host_bytes_sent += num_bytes
        edge = rank.rank, (peer - rank.rank) % self.job.num_ranks
        end = _End(lane, num_bytes, rank.clock_s)
        if waiting := self.receives.get(edge):
            self._begin(edge, end, waiting.popleft())
        else:
            self.sends.setdefault(edge, deque()).append(end)

    def _post_receive(self, lane: _Lane, peer: int, num_bytes: int) -> None:
        edge = peer % self.period, (lane.rank.rank - peer) % self.job.num_ranks
        end = _End(lane, num_bytes, lane.rank.clock_s)
        if waiting := self.sends.get(edge):
            self._begin(edge, waiting.popleft(), end)
        else:
            self.receives.setdefault(edge, deque()).append(end)

    def _begin(self, edge: tuple[int, int], send: _End, receive: _End) -> None:
        sender, distance = edge
        receiver = (sender + distance) % self.job.num_ranks
        if send.num_bytes != receive.num_bytes:
            what = f"rank {sender} sends {send.num_bytes} bytes, rank {receiver} expects {receive.num_bytes}"
            raise ScheduleError(f"round {receive.lane.round_number}: {what}")
        crosses = self.host_of[sender] != self.host_of[receiver]
        link = self.network.between if crosses else self.network.inside
        message = _Message(send.lane, receive.lane, send.num_bytes, crosses)
        start_s = max(send.posted_s, receive.posted_s + link.announce_s)
        self._schedule(start_s, distance, message)

    def _schedule(self, time_s: float, distance: int, message: _Message) -> None:
        self.num_events += 1
        if time_s not in self.events:
            heappush(self.moments, time_s)
            self.events[time_s] = []
        self.events[time_s].append(_Event(distance, message.sender.rank.place, self.num_events, message))

    def _depart(self, event: _Event, now_s: float) -> None:
        """The message's turn on its way out; frees the sender when its last byte has left."""
        message = event.message
        link, way = self._way(message.sender.rank, message)
        message.start_s = max(now_s, self.out_free_s[way])
        if (link.shared_s or link.busy_s) and not message.crosses:
            host = message.sender.rank.host
            message.start_s = max(message.start_s, self.host_free_s[host])
            self.host_free_s[host] = message.start_s + link.busy_s + message.num_bytes * link.shared_s
        left_s = message.start_s + message.num_bytes * link.beta_s
        self.out_free_s[way] = left_s + link.gap_s
        message.under_way = True
        self._schedule(message.start_s + link.alpha_s, event.distance, message)
        self._done(message.sender, left_s)

    def _arrive(self, message: _Message, now_s: float) -> None:
        """Its turn on its way in."""
        link, way = self._way(message.receiver.rank, message)
        end_s = max(now_s, self.in_free_s[way]) + message.num_bytes * link.beta_s
        self.in_free_s[way] = end_s + link.gap_s
        if self.moved is not None:
            lane, sender = message.receiver, message.sender.rank.rank
            size = message.num_bytes
            self.moved.append(
                Moved(sender, lane.rank.rank, lane.round_number, lane.number, size, message.start_s, end_s)
            )
        self._done(message.receiver, end_s)

    def _way(self, rank: _Rank, message: _Message) -> tuple[Link, int]:
        """The link, and which of the ways out or in: a rank's own, or its host's."""
        if message.crosses:
            return self.network.between, self.period + rank.host
        return self.network.inside, rank.rank

    def _done(self, lane: _Lane, time_s: float) -> None:
        lane.left -= 1
        lane.ready_s = max(lane.ready_s, time_s)
        if not lane.left and lane.rank.lanes[0] is lane:
            self._advance(lane.rank)

    def _nobody_waits(self) -> None:
        stuck = [rank for rank in self.ranks if rank.lanes]
        if stuck:
            where = ", ".join(f"rank {rank.rank} in round {rank.lanes[0].round_number}" for rank in stuck[:8])
            raise ScheduleError(f"deadlock with {self.job.num_ranks} ranks: {where}")

    def _result(self) -> Timeline:
        num_ranks, hosts = self.job.num_ranks, self.network.hosts
        everyone = [self.ranks[rank % self.period] for rank in range(num_ranks)]
        return Timeline(
            finish_s=tuple(rank.clock_s for rank in everyone),
            num_rounds=max(rank.num_rounds for rank in everyone),
            num_lanes=self.job.num_lanes,
            num_messages=sum(rank.num_messages for rank in everyone),
            bytes_sent=tuple(rank.bytes_sent for rank in everyone),
            host_bytes_sent=tuple(sum(everyone[rank].host_bytes_sent for rank in members) for members in hosts),
            moved=tuple(sorted(self.moved or (), key=lambda moved: (moved.start_s, moved.sender, moved.receiver))),
        )


class _End(NamedTuple):
    """One side of a message: who posted it, and when."""

    lane: _Lane
    num_bytes: int
    posted_s: float


def _period(job: _Job, schedule: Schedule, network: Network) -> int:
    """The smallest number of neighbouring ranks that stand for all: 1, a host's, or all of them."""
    if not job.chunks_alike or not repeats(schedule, network.hosts):
        return job.num_ranks
    ranks_share_nothing = len(network.hosts) == 1 and not (network.inside.shared_s or network.inside.busy_s)
    return 1 if ranks_share_nothing else len(network.hosts[0])


@lru_cache(maxsize=1024)
def repeats(schedule: Schedule, hosts: Hosts) -> bool:
    """Whether every host does the same (on one host: every rank), with peers moved by the same distance.

    That is read off the schedule: of every rank up to `MANY_RANKS` ranks, of a sample beyond.
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


def _seen_from(rank: int, schedule: Schedule, num_ranks: int) -> Iterator[list[tuple[type, int, int, bool]]]:
    """A rank's rounds as seen from where it sits: how far the peer is, how many chunks, and whether they are added."""
    for ops in schedule.algorithm(rank, num_ranks):
        yield [(type(op), (op.peer - rank) % num_ranks, len(op.chunks), isinstance(op, Recv) and op.add) for op in ops]
