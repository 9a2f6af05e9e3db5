"""The ranks' statuses: each rank publishes its own, reads the others', and derives from them who is to blame.

    Status            a rank's report on itself
    StatusSnapshot    the others' reports at one moment. Pure: no store, no clock, no thread
    Board             where every rank publishes its status: in the store

    certain     a rank reported that it failed, or left before its part; its process has ended; its tick stands still
    likely      no rank is certainly dead: one is silent, or somewhere else, or a link is cut

A collective waits for all ranks. A message waits for its peer, which may wait in a message for another rank, and so on:
this is the *chain*. It leads to the rank that blocks all the others, or back to its beginning, which is a deadlock.

The transport's errors do not name the culprit: when a Gloo wait times out, it closes pairs to healthy ranks too, so
that one silent rank looks like many broken ones. The statuses in the store do.

A status has a tick that grows. A reader can distinguish five cases:

    the process has ended              known on this host alone              SIGKILL
    the tick stands still              it died elsewhere, or is stopped      SIGSTOP, power
    it reports "failed" or "left"      it raised an error, or finished       look at its log
    the tick runs, a lower number      it is alive, but somewhere else       its Python stack says where
    the tick runs, same number         it waits too: the link between is cut

A rank also publishes its call: the operation, dtype and number of elements, and its messages. Comparing them finds
ranks that call different collectives or wait for each other in a circle, and messages whose two ends do not match.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.meeting.place import host_name
from ddp.comm.transport.shared_memory import ProcessHandle
from ddp.comm.watch.call import Call, Envelope
from ddp.process.clock import PAUSED_S, now_s
from ddp.process.stack import stack_of
from ddp.process.terminal import log

STALE_S = 3.0  # after a wait has failed, a tick that has stood still for this long means a dead or stopped process
QUIET_S = 1.5  # a silence of this length is suspicious if nothing is certain
LOCK_S = 1.25  # longest wait of a last status for the lock, whose holder may wait for a store that does not respond
STACK_FRAMES = 6
LEFT = "it has left already; every rank must call the same collectives equally often"
LEFT_MESSAGE = "it has left already; every send needs a recv on the other rank, and every recv a send"

Culprit = tuple[int, str]  # the rank to blame, and why


@dataclass
class Status:
    """A rank's published report on itself.

    Attributes:
        sequence, label: of its last collective.
        run, kind: its number among all collectives, 0 for none, and the properties that must agree (`Call.kind`).
        message: its last call, if that was a message.
        posted: number of messages that it has posted, by route ("to rank 1").
        in_flight: those of them whose wait has not ended.
    """

    rank: int
    host: str
    pid: int
    tick: int = 0
    state: str = "running"  # "running", "waiting", "failed", "left"
    sequence: int = 0
    label: str = ""
    run: int = 0
    kind: str = ""
    waiting_for: int | None = None
    reason: str = ""
    blames: int | None = None  # the culprit of a failed rank, about which `reason` is: blame is passed on
    stack: list[str] = field(default_factory=list)
    message: Envelope | None = None
    posted: dict[str, int] = field(default_factory=dict)
    in_flight: list[Envelope] = field(default_factory=list)

    @staticmethod
    def read(published: str | bytes) -> Status:
        """Returns the status from its published JSON, `json.dumps(asdict(status))`."""
        status = Status(**json.loads(published))
        status.message = Envelope(*status.message) if status.message is not None else None
        status.in_flight = [Envelope(*each) for each in status.in_flight]
        return status

    @property
    def waits_in(self) -> Envelope | None:
        """The message in which it waits, or gave up."""
        return self.message if self.message in self.in_flight else None

    def posted_end(self, message: Envelope, rank: int) -> Envelope | None:
        """Returns this rank's end of a message that `rank` has posted, while it is in flight here."""
        wanted = message.on_peer(rank)
        return next((each for each in self.in_flight if each[:3] == wanted), None)

    def owes(self, message: Envelope, rank: int) -> bool:
        """Returns True if this rank has not yet posted its end of a message that `rank` has posted."""
        direction, peer, number = message.on_peer(rank)
        return self.posted.get(f"{direction} rank {peer}", 0) < number

    def describe(self) -> str:
        """Returns one line for a report."""
        doing = f"waits for rank {self.waiting_for} in" if self.state == "waiting" else f"{self.state}, last seen in"
        stack = f"; at {' < '.join(reversed(self.stack))}" if self.stack else ""
        reason = self.reason if self.blames is None else f"lost rank {self.blames}: {self.reason}"
        reason = f" ({reason})" if reason else ""
        where = f"#{self.sequence} [{self.label}]"
        if self.message is not None:
            where = f"message #{self.message.number} {self.message.route} [{self.label}], after #{self.sequence}"
        return f"rank {self.rank} ({self.host}, pid {self.pid}) {doing} {where}{reason}{stack}"


class StatusSnapshot(NamedTuple):
    """One rank's view of the others at one moment.

    Attributes:
        mine: this rank's status.
        call: the call in which this rank waits.
        statuses: the others', by rank.
        silent_s: by rank, the seconds since its tick has changed.
        ended: ranks whose process is known to have ended.
    """

    mine: Status
    call: Call
    statuses: Mapping[int, Status]
    silent_s: Mapping[int, float]
    ended: Collection[int]

    def certain(self) -> Culprit | None:
        """Returns the rank that is certainly to blame for a failed wait."""
        concerned = self if self.call.message is None else self.among({*self.chain(), self.call.message.peer})
        return self.stuck() or self.failed() or concerned.gone() or concerned.silent(STALE_S)

    def lost(self) -> Culprit | None:
        """Returns a rank that is certainly lost, in whichever collectives the ranks are."""
        return self.failed() or self.gone() or self.silent(STALE_S)

    def missed(self, peer: int) -> StatusSnapshot:
        """Returns the snapshot of only the ranks that have not reached this call, and the rank that this one waits for.

        For a message, these are the ranks of the chain.
        """
        if self.call.message is not None:
            return self.among(self.chain())
        return self.among(r for r, s in self.statuses.items() if s.sequence < self.call.sequence or r == peer)

    def among(self, ranks: Iterable[int]) -> StatusSnapshot:
        """Returns the snapshot of only these ranks, without this one."""
        return self._replace(statuses={rank: self.statuses[rank] for rank in ranks if rank in self.statuses})

    def chain(self) -> list[int]:
        """Returns the chain: this rank, the peer of its message unless that has posted its end, the peer of that rank,
        ….

        If the ranks wait for each other in a circle, it ends with a rank that is in it already.
        """
        ranks, message, everyone = [self.mine.rank], self.call.message, {**self.statuses, self.mine.rank: self.mine}
        while message is not None and (status := everyone.get(message.peer)) is not None:
            owes = status.owes(message, ranks[-1])
            if owes or (len(ranks) == 1 and status.posted_end(message, ranks[0])):
                ranks.append(message.peer)
            if not owes or message.peer in ranks[:-1]:
                break
            message = status.waits_in
        return ranks

    def stuck(self) -> Culprit | None:
        """Returns a rank because of which this rank's call can never complete, and why; None if no reason is known.

        There are three reasons: the rank calls another collective, its end of a message has another type or size, or
        it is the next in a circle of ranks that wait for each other.
        """
        mine = self.call.message
        if mine is None:
            return self._calls_otherwise()
        if (status := self.statuses.get(mine.peer)) is None:
            return None
        theirs = status.posted_end(mine, self.mine.rank)
        if theirs is not None and theirs.kind != mine.kind:
            does, where = f"rank {mine.peer} {_does(theirs)}", f"rank {self.mine.rank} {_does(mine)}"
            return mine.peer, f"{does} where {where}; both must agree in dtype and number of elements"
        *circle, last = self.chain()
        if last != self.mine.rank or not circle:
            return None
        waits = [mine, *(wait for rank in circle[1:] if (wait := self.statuses[rank].waits_in))]
        return mine.peer, _deadlock(circle, {each.direction for each in waits})

    def _calls_otherwise(self) -> Culprit | None:
        """Returns a rank whose collective with the same number differs from this rank's."""
        mine = self.mine
        for rank, status in self.statuses.items():
            if 0 < status.run == mine.run and status.kind != mine.kind:
                theirs, ours = f"{status.kind} [{status.label}]", f"{mine.kind} [{self.call.label}]"
                return rank, (
                    f"it calls {theirs} where rank {mine.rank} calls {ours}: all ranks must call the same, with one "
                    "dtype and size. With debug=True (comm.debug=true) the error is raised where the calls differ"
                )
        return None

    def failed(self) -> Culprit | None:
        """Returns a rank that reports a failure, or the rank that it blames; this rank itself, if it was given up."""
        for rank, status in self.statuses.items():
            if status.state == "failed" and status.blames is None:
                return rank, f"it failed: {status.reason}. Its own log has the traceback"
        blamed = [(rank, status.blames) for rank, status in self.statuses.items() if status.blames is not None]
        for rank, culprit in blamed:
            if culprit != self.mine.rank:
                return culprit, f"as rank {rank} found out first"
        if blamed:
            accuser = blamed[0][0]
            return self.mine.rank, f"rank {accuser} has given this one up: {self.statuses[accuser].reason}"
        return None

    def gone(self) -> Culprit | None:
        """Returns a rank that will never arrive: it has left, or its process has ended."""
        for rank, status in self.statuses.items():
            if status.state == "left" and self.call.message is not None:
                return rank, LEFT_MESSAGE
            if status.state == "left" and status.sequence < self.call.sequence:
                return rank, LEFT
            if status.state != "left" and rank in self.ended:
                return rank, "it shows no sign of life: its process has ended"
        return None

    def silent(self, silence_s: float) -> Culprit | None:
        """Returns a rank whose tick has stood still for this long."""
        for rank, status in self.statuses.items():
            if status.state != "left" and (silent_s := self.silent_s[rank]) >= silence_s:
                return rank, f"it shows no sign of life for {silent_s:.0f} s: killed, stopped, or its host is down"
        return None

    def likely(self, suspect: int, observed: str, abort_s: float) -> Culprit:
        """Returns the rank that is most likely to blame if nothing is certain.

        Args:
            suspect: the peer of the transfer that failed.
            observed: the transport's error.
            abort_s: the deadline, for the message.
        """
        if self.call.message is not None:
            return self._likely_in_message(suspect, observed, abort_s)
        for rank, status in self.statuses.items():
            if status.state == "left":
                return rank, LEFT
            if not status.pid:
                return rank, "it arrived, but has shown no sign of life since: killed, stopped, or its host is down"
            if self.silent_s[rank] >= QUIET_S:
                return rank, "it shows no sign of life: killed, stopped, or its host is down"
        behind = [status for status in self.statuses.values() if status.sequence < self.call.sequence]
        if behind:  # among ranks at the same call, one that does not itself wait for a message
            status = min(behind, key=lambda each: (each.sequence, each.waits_in is not None))
            if (message := status.waits_in) and message.peer == self.mine.rank and self.mine.owes(message, status.rank):
                return status.rank, _crossed(self.mine.rank, self.call.title, status.rank, message)
            return status.rank, _late("has not reached this collective", status, abort_s)
        return suspect, _cut(observed)

    def _likely_in_message(self, suspect: int, observed: str, abort_s: float) -> Culprit:
        *waiting, last = self.chain()
        concerned = self.among({suspect, *waiting, last})
        if culprit := concerned.gone() or concerned.silent(QUIET_S):
            return culprit
        message, status = self.call.message, self.statuses.get(last)
        if message is None or status is None:
            return suspect, _cut(observed)
        if len(waiting) > 1:
            return last, _late(f"rank {waiting[-1]} waits for it", status, abort_s)
        if status.state == "waiting" and status.message is None and status.sequence > self.mine.sequence:
            collective = f"collective #{status.sequence} [{status.label}]"
            return last, _crossed(last, collective, self.mine.rank, message)
        if status.owes(message, self.mine.rank):
            return last, _late("has not reached this message", status, abort_s)
        return suspect, _cut(observed)


def _late(why: str, status: Status, abort_s: float) -> str:
    return f"it is alive, but {why}: {status.describe()}. Set abort_s above {abort_s:g} s to wait longer"


def _cut(observed: str) -> str:
    return f"it is alive, but the link to it is not ({observed or 'nothing came'}): check the network between them"


def _crossed(in_collective: int, collective: str, in_message: int, message: Envelope) -> str:
    """Describes a collective and a message that wait for each other, and names the remedy."""
    return (
        f"rank {in_collective} waits in {collective} and rank {in_message} in message #{message.number} "
        f"{message.route}, each for the other one: all ranks must call them in the same order"
    )


def _does(message: Envelope) -> str:
    return f"{'sends' if message.direction == 'to' else 'receives'} {list(message.shape)} {message.dtype}"


def _deadlock(circle: Sequence[int], directions: Collection[str]) -> str:
    """Describes ranks that wait in a circle, and names the remedy.

    Args:
        directions: of the messages that the ranks wait in.
    """
    do = " or ".join(verb for direction, verb in (("to", "receive"), ("from", "send")) if direction in directions)
    first, remedy = circle.index(min(circle)), "let one of them send first"
    *ranks, last = *circle[first:], *circle[:first]
    what = f"wait in a circle, each for the next one to {do}" if ranks[1:] else f"both wait for the other one to {do}"
    if "to" in directions:
        remedy = "let one of them receive first, or send with async_op=True and receive before wait()"
    return f"ranks {', '.join(map(str, ranks))} and {last} {what}: {remedy}"


# --- the board -------------------------------------------------------------------------------------------------------


class Wait(NamedTuple):
    """A call of this rank, and the rank that it waits for.

    Attributes:
        run: number of the collective, which is the same on all ranks; 0: it is not a collective.
    """

    call: Call
    peer: int
    since_s: float
    run: int = 0


class Board:
    """Publishes this rank's status, and reads the others'.

    Attributes:
        store: of the statuses; of this session of the ranks alone.
        wait: this rank's current wait; None outside of calls.
        last_wait: the current or the last wait.
        posted, in_flight: this rank's messages, see `Status`; they keep changing.
        processes: by rank of this host, its process, whose end is known without waiting for its tick.
        awake_since_s: the end of this process's last pause, or of its last time without a wait.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        # A separate connection, because a blocked call elsewhere must not block this one.
        self.store: Store = store.clone()  # type: ignore[attr-defined]
        self.rank, self.world_size = rank, world_size
        self.wait: Wait | None = None
        self.last_wait = Wait(Call(0, "start-up"), rank, now_s())
        self.posted: Mapping[str, int] = {}
        self.in_flight: Mapping[Envelope, object] = {}
        self.processes: dict[int, ProcessHandle] = {}
        self._status = Status(rank, host_name(), os.getpid())
        self._published = self.last_wait.call
        self._last_change: dict[int, tuple[int, float]] = {}  # rank → its tick, and when that changed
        self._observed_s = self.awake_since_s = now_s()
        self._main_thread = threading.main_thread().ident
        self._lock = threading.RLock()  # for the status and the store, which serves one thread at a time

    def publish(self) -> None:
        """Writes this rank's status to the store, with the main thread's stack if the call is the same as last time."""
        with self._lock:
            status, wait, (call, _, _, run) = self._status, self.wait, self.last_wait
            status.tick += 1
            stands_still, self._published = call is self._published, call
            status.sequence, status.label, status.message = call.sequence, call.label, call.message
            status.run, status.kind = run, call.kind
            status.posted, status.in_flight = dict(self.posted), list(self.in_flight)
            if status.state in ("running", "waiting"):
                status.state = "waiting" if wait else "running"
                status.waiting_for = wait.peer if wait else None
                status.stack = self._stack() if stands_still else []
            self.store.set(f"rank/{status.rank}", json.dumps(asdict(status)))

    def publish_last(self, state: str, reason: str = "", blames: int | None = None) -> None:
        """Publishes that this rank has "failed" or "left"; only the first call counts."""
        if not self._lock.acquire(timeout=LOCK_S):
            return
        try:
            if self._status.state not in ("failed", "left"):
                self._status.state, self._status.reason, self._status.blames = state, reason[:500], blames
                self.publish()
        except Exception as error:
            log.debug("watchdog: the store is out of reach: %s", error)
        finally:
            self._lock.release()

    def observe(self) -> StatusSnapshot:
        """Reads the others' statuses, and records by this rank's clock when each tick last changed."""
        self._reset_if_paused()
        statuses = self.read_all()
        self._reset_if_paused()
        silent_s = {}
        for rank, status in statuses.items():
            tick, since_s = self._last_change.get(rank, (None, 0.0))
            if tick != status.tick:
                since_s = now_s()
                self._last_change[rank] = status.tick, since_s
            silent_s[rank] = now_s() - since_s
        ended = [rank for rank, process in self.processes.items() if not process.is_running()]
        call, _, _, run = self.last_wait
        posted, in_flight = dict(self.posted), list(self.in_flight)
        mine = replace(self._status, run=run, kind=call.kind, posted=posted, in_flight=in_flight)
        return StatusSnapshot(mine, call, statuses, silent_s, ended)

    def read_all(self) -> dict[int, Status]:
        """Reads every other rank's status, an empty one if the rank has never published."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        statuses = {rank: Status(rank, "unknown", 0, label="start-up") for rank in others}
        for rank in others:
            with self._lock:
                if self.store.check([f"rank/{rank}"]):
                    statuses[rank] = Status.read(self.store.get(f"rank/{rank}"))
        return statuses

    def forget_changes(self) -> None:
        """Resets every rank's silence timer, because this rank waits for none."""
        self._last_change.clear()

    def close(self) -> None:
        """Closes the handles of the neighbours' processes."""
        for process in self.processes.values():
            process.close()
        self.processes.clear()

    def _reset_if_paused(self) -> None:
        """Resets the observations after this process was paused, or waited for no rank."""
        now = now_s()
        if now - self._observed_s > PAUSED_S:
            self._last_change.clear()
            self.awake_since_s = now
        self._observed_s = now

    def _stack(self) -> list[str]:
        frames = stack_of(self._main_thread or 0)[-STACK_FRAMES:]
        return [f"{entry.name} ({Path(entry.filename).name}:{entry.lineno})" for entry in frames]
