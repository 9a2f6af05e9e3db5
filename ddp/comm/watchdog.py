"""Who is missing: every rank says through the store what it is doing, and a thread outside the wait reads along.

Why not ask the transport? When a Gloo wait times out it closes pairs to healthy ranks too, so that one silent rank
looks like many broken ones. Errors of the transport never tell who is guilty; the store does.

Before each wait a rank notes (sequence, label, waiting for whom). Every `INTERVAL_S` its watchdog thread publishes that
note, a tick that grows, and where the main thread stands, if it is no further than last time. So a reader can tell five
cases apart:

    the process has ended              known of ranks on this host           SIGKILL
    the tick stands still              it died elsewhere, or is stopped      SIGSTOP, power
    it says "failed" or "left"         it raised an error, or finished       look at its log
    the tick runs, its number is lower it is alive, but somewhere else       its Python stack says where
    the tick runs, same number         it waits too: the link between is cut

After `warn_s` of waiting the report is printed once per collective. A rank that lives and computes is waited for until
the deadline, `abort_s`; if the records show before that nobody can come any more, because a rank failed, left, or has
shown no sign of life for `SILENCE_S`, the watchdog interrupts the wait. In either case `find_culprit` turns the records
into a `PeerLost`. Nothing of this is on the path of a collective: a note is one assignment.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from ddp.clock import PAUSED_S, now_s
from ddp.comm.call import Call
from ddp.errors import PeerLost
from ddp.log import log
from ddp.stack import stack_of
from ddp.transport.shared_memory import Life

INTERVAL_S = 0.5
STALE_S = 3.0  # after a wait has failed, a tick that stands still for so long is a dead or stopped process
SILENCE_S = 60.0  # and before that, for so long: a library that keeps the interpreter lock looks the same
JUDGE_S = 1.25  # longest search for a culprit after a deadline
STORE_S = 0.3  # and for one more answer of the store
POLL_S = 0.05
STACK_FRAMES = 6
LEFT = "it has left already; every rank must call the same collectives equally often"


class Note(NamedTuple):
    """What this rank is waiting for."""

    call: Call
    peer: int
    since_s: float


@dataclass
class Record:
    """What a rank publishes about itself."""

    rank: int
    host: str
    pid: int
    tick: int = 0
    state: str = "running"  # "running", "waiting", "failed", "left"
    sequence: int = 0
    label: str = ""
    waiting_for: int | None = None
    reason: str = ""
    blames: int | None = None  # a failed rank's own culprit: guilt is passed on to where it began
    stack: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """One line for a report."""
        doing = f"waits for rank {self.waiting_for} in" if self.state == "waiting" else f"{self.state}, last seen in"
        stack = f"; at {' < '.join(reversed(self.stack))}" if self.stack else ""
        reason = f" ({self.reason})" if self.reason else ""
        return f"rank {self.rank} ({self.host}, pid {self.pid}) {doing} #{self.sequence} [{self.label}]{reason}{stack}"


class Watchdog:
    """Publishes this rank's record, reads the others', and finds who is missing.

    Args:
        store: where the records are; of this session of the ranks alone.
        generation: version of the membership, for messages.

    Attributes:
        interrupt: called with a rank and a reason when a wait cannot succeed, from the watchdog's thread.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, generation: int, warn_s: float, abort_s: float
    ) -> None:
        self.interrupt: Callable[[int, str], object] = lambda rank, reason: None
        # A connection of its own: a blocked call elsewhere must not block this one.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._world_size, self._generation = world_size, generation
        self._warn_s, self._abort_s, self._silence_s = warn_s, abort_s, min(abort_s, SILENCE_S)
        self._hosts = ["unknown"] * world_size
        self._lives: dict[int, Life] = {}
        self.record = Record(rank, socket.gethostname(), os.getpid())
        self._note: Note | None = None
        self._last_note = Note(Call(0, "start-up"), rank, now_s())
        self._warned = -1
        self._interrupted: Note | None = None
        self._last_change: dict[int, tuple[int, float]] = {}  # rank → its tick, and when that was new
        self._observed_s = self._awake_since_s = now_s()
        self._main_thread = threading.main_thread().ident
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._loop, name="ddp-watchdog", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._thread, self._stopped)  # at exit, too

    def among(self, ranks: Sequence[int], channel: int) -> Watchdog:
        """One for a group of some of the ranks, which has numbers of its own."""
        return Watchdog(
            PrefixStore(f"channel/{channel}", self._store),
            list(ranks).index(self.record.rank),
            len(ranks),
            generation=self._generation,
            warn_s=self._warn_s,
            abort_s=self._abort_s,
        )

    def know_hosts(self, names: Sequence[str], pids: Mapping[int, int | None] | None = None) -> None:
        """Takes the ranks' host names, for the case that a rank is lost and the store with it.

        Args:
            pids: by rank of this host, its process: once that has ended, nobody waits for a sign of life.
        """
        self._hosts = list(names)
        self._lives = {rank: Life(pid) for rank, pid in (pids or {}).items() if rank != self.record.rank}

    def begin(self, call: Call, peer: int) -> Note | None:
        """Notes that a call begins, and whom it waits for first. Returns the note of the call around it, if any."""
        outer, self._note = self._note, Note(call, peer, now_s())
        self._last_note = self._note
        return outer

    def waits_for(self, peer: int) -> None:
        """Notes a wait that begins now, in the call that has begun."""
        self._note = self._last_note = Note(self._last_note.call, peer, now_s())

    def end(self, outer: Note | None = None) -> None:
        """Notes that the call is over, and that the one around it goes on."""
        self._note = outer
        if outer is not None:
            self._last_note = outer

    def fail(self, reason: str, *, blames: int | None = None) -> None:
        """Tells the others that this rank cannot go on, before they have to find out by waiting."""
        self._finish("failed", reason, blames)

    def leave(self) -> None:
        """Tells the others that this rank is done; ends the thread."""
        self._finish("left", "", None)
        self._end()
        for life in self._lives.values():
            life.close()
        self._lives.clear()

    def stop(self) -> None:
        """Lets the thread end; what was published last stays."""
        self._stopped.set()

    def find_culprit(self, suspect: int, observed: str = "") -> PeerLost:
        """Reads the records until they tell who is missing.

        After a long wait they tell at once, since the thread has read along; after a connection that broke suddenly it
        takes up to `STALE_S` seconds and two intervals. It never takes longer than `JUDGE_S` beyond the deadline: not
        even if the store does not answer, as when the process that keeps it is stopped.

        Args:
            suspect: the peer of the transfer that failed, blamed if the records show nothing else.
            observed: what the transport saw.
        """
        note, verdict = self._last_note, list[tuple[int, str]]()
        sure_s = now_s() + STALE_S + 2 * INTERVAL_S
        until_s = max(now_s() + JUDGE_S, min(sure_s, note.since_s + self._abort_s + JUDGE_S))
        judge = threading.Thread(
            target=lambda: verdict.append(self._watch_until(until_s, suspect, observed)), name="ddp-judge", daemon=True
        )
        judge.start()
        judge.join(until_s - now_s() + STORE_S)
        silent = (0, "the store that the ranks meet at, kept on rank 0's host, does not answer")
        culprit, reason = verdict[0] if verdict else silent
        return PeerLost(culprit, self._hosts[culprit], self._generation, note.call.sequence, note.call.label, reason)

    def find_lost(self, call: Call, peer: int) -> PeerLost | None:
        """Who is surely lost, after an error that may be another rank's doing or this one's own; takes some seconds.

        Args:
            call: what failed.
            peer: whom a report says that this rank waits for.
        """
        outer, verdict, until_s = self.begin(call, peer), None, now_s() + STALE_S + 2 * INTERVAL_S
        try:
            while (verdict := self._judge(self._observe())) is None and now_s() < until_s:
                self._stopped.wait(INTERVAL_S / 2)
        except Exception as error:
            log.debug("watchdog: the store is out of reach: %s", error)
        finally:
            self.end(outer)
        if verdict is None:
            return None
        culprit, reason = verdict
        self.fail(f"lost rank {culprit}", blames=culprit)
        return PeerLost(culprit, self._hosts[culprit], self._generation, call.sequence, call.label, reason)

    def _watch_until(self, until_s: float, suspect: int, observed: str) -> tuple[int, str]:
        """A verdict, for certain or at last; passed on to the others."""
        try:
            records = self._observe()
            while (verdict := self._judge(records)) is None:
                if now_s() > until_s:
                    verdict = self._judge_living(records, suspect, observed)
                    break
                self._stopped.wait(INTERVAL_S / 2)
                records = self._observe()
        except Exception as error:
            verdict = suspect, f"and the store that the ranks meet at is out of reach ({type(error).__name__})"
        self.fail(f"lost rank {verdict[0]}", blames=verdict[0])
        return verdict

    def wait_for_word(self, key: str, rank: int, call: Call) -> bytes:
        """Waits at the store, not in the transport, for what `rank` puts there; for as long as that rank lives.

        Args:
            key: of the session's store.
            call: what the rank does meanwhile.

        Raises:
            PeerLost: the rank failed or left, or its tick has stood still for too long.
        """
        outer = self.begin(call, rank)
        try:
            while not self._store.check([key]):
                record = self._observe()[rank]
                is_gone = self._has_died(rank) or record.state in ("failed", "left")
                is_silent = self._is_silent(rank, max(self._silence_s, STALE_S))
                if (is_gone or is_silent) and not self._store.check([key]):  # the word may have come just before
                    raise self.find_culprit(rank)
                self._stopped.wait(POLL_S)
            word: bytes = self._store.get(key)
        except DistError as error:
            raise self.find_culprit(rank) from error
        self.end(outer)
        return word

    def say(self, key: str, word: str) -> None:
        """Puts a word into the session's store, for those that wait for it."""
        self._store.set(key, word)

    # --- judging -----------------------------------------------------------------------------------------------------

    def _judge(self, records: dict[int, Record]) -> tuple[int, str] | None:
        """Returns what is certain: ranks that said they failed or left, and ranks whose tick stands still."""
        return self._failed(records) or self._gone(records) or self._absent(records, STALE_S)

    def _failed(self, records: dict[int, Record]) -> tuple[int, str] | None:
        for rank, record in records.items():
            if record.state == "failed" and record.blames is None:
                return rank, f"it failed: {record.reason}. Its own log has the traceback"
        for rank, record in records.items():
            if record.blames is not None and record.blames != self.record.rank:
                return record.blames, f"as rank {rank} found out first"
        return None

    def _gone(self, records: dict[int, Record]) -> tuple[int, str] | None:
        for rank, record in records.items():
            if record.state == "left" and record.sequence < self._last_note.call.sequence:
                return rank, LEFT
            if record.state != "left" and self._has_died(rank):
                return rank, "it shows no sign of life: its process has ended"
        return None

    def _absent(self, records: dict[int, Record], silence_s: float) -> tuple[int, str] | None:
        call = self._last_note.call
        for rank, record in records.items():
            if record.sequence == call.sequence and record.label != call.label:
                return rank, f"it is in another collective of that number: [{record.label}]; all must call the same"
        for rank, record in records.items():
            if record.state != "left" and self._is_silent(rank, silence_s):
                silent_s = now_s() - self._last_change[rank][1]
                return rank, f"it shows no sign of life for {silent_s:.0f} s: killed, stopped, or its host is down"
        return None

    def _has_died(self, rank: int) -> bool:
        """True if it is known that the process has ended; of another host it is not."""
        return rank in self._lives and not self._lives[rank].goes_on()

    def _is_silent(self, rank: int, silence_s: float) -> bool:
        return now_s() - self._last_change[rank][1] >= silence_s

    def _judge_living(self, records: dict[int, Record], suspect: int, observed: str) -> tuple[int, str]:
        """Nobody is surely dead: someone is silent, or somewhere else, or a link is cut."""
        for rank, record in records.items():
            if record.state == "left":
                return rank, LEFT
            if self._is_silent(rank, 3 * INTERVAL_S):
                return rank, "it shows no sign of life: killed, stopped, or its host is down"
        behind = [r for r in records.values() if r.sequence < self._last_note.call.sequence]
        if behind:
            record = min(behind, key=lambda r: r.sequence)
            late = f"it is alive, but has not come to this collective: {record.describe()}"
            return record.rank, f"{late}. With abort_s above {self._abort_s:g} s it is waited for longer"
        return suspect, f"it is alive, but the link to it is not ({observed or 'nothing came'}): is it cut?"

    # --- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            try:
                self._publish()
                if self._note is None:
                    self._last_change.clear()
                else:
                    records = self._observe()
                    self._warn_if_late(records)
                    self._interrupt_if_in_vain(records)
            except Exception as error:  # the store goes away when the run ends or its host dies: waits find out
                log.debug("watchdog: the store is out of reach: %s", error)

    def _publish(self) -> None:
        with self._lock:
            record, note, call = self.record, self._note, self._last_note.call
            record.tick += 1
            stands_still = record.sequence == call.sequence
            record.sequence, record.label = call.sequence, call.label
            if record.state in ("running", "waiting"):
                record.state = "waiting" if note else "running"
                record.waiting_for = note.peer if note else None
                record.stack = self._stack() if stands_still else []
            self._store.set(self._key(record.rank), json.dumps(asdict(record)))

    def _finish(self, state: str, reason: str, blames: int | None) -> None:
        with self._lock:
            if self.record.state in ("failed", "left"):
                return
            self.record.state, self.record.reason, self.record.blames = state, reason[:500], blames
        try:
            self._publish()
        except Exception as error:
            log.debug("watchdog: the store is out of reach: %s", error)

    def _observe(self) -> dict[int, Record]:
        """Reads the others, and keeps when each tick was last seen to move: by this rank's clock, not by theirs."""
        self._begin_anew_if_paused()
        records = self._read_all()
        self._begin_anew_if_paused()
        for rank, record in records.items():
            if rank not in self._last_change or self._last_change[rank][0] != record.tick:
                self._last_change[rank] = record.tick, now_s()
        return records

    def _begin_anew_if_paused(self) -> None:
        """Forgets what was seen before this process was paused, or had nobody to wait for."""
        now = now_s()
        if now - self._observed_s > PAUSED_S:
            self._last_change.clear()
            self._awake_since_s = now
        self._observed_s = now

    def _warn_if_late(self, records: dict[int, Record]) -> None:
        note = self._note
        if note is None or note.call.sequence == self._warned or (waited_s := self._waited_s(note)) < self._warn_s:
            return
        self._warned = note.call.sequence
        lines = [record.describe() for record in records.values()]
        log.warning(
            "collective #%d [%s] has waited %.0f s for rank %d. The others:\n  %s",
            *(note.call.sequence, note.call.label, waited_s, note.peer, "\n  ".join(lines)),
        )

    def _waited_s(self, note: Note) -> float:
        """Returns how long this process has waited since it was last paused."""
        return now_s() - max(note.since_s, self._awake_since_s)

    def _interrupt_if_in_vain(self, records: dict[int, Record]) -> None:
        """Ends a wait before its deadline, if what it waits for cannot come any more.

        A rank that has come to this collective may have done its part and gone, while another one still computes: it is
        missed only by the rank that waits for it, which tells the others.
        """
        note = self._note
        if note is None or note is self._interrupted or (waited_s := self._waited_s(note)) < STALE_S:
            return  # what a rank sent before it failed may still be on its way
        missed = {rank: r for rank, r in records.items() if r.sequence < note.call.sequence or rank == note.peer}
        verdict = self._failed(records) or self._gone(missed)
        if verdict is None and waited_s >= self._silence_s:
            verdict = self._absent(missed, self._silence_s)
        if verdict is not None and note is self._note:
            self._interrupted = note
            self.interrupt(*verdict)

    def _stack(self) -> list[str]:
        frames = stack_of(self._main_thread or 0)[-STACK_FRAMES:]
        return [f"{entry.name} ({os.path.basename(entry.filename)}:{entry.lineno})" for entry in frames]  # noqa: PTH119

    # --- the store ---------------------------------------------------------------------------------------------------

    def _key(self, rank: int) -> str:
        return f"rank/{rank}"

    def _read_all(self) -> dict[int, Record]:
        """Every other rank's record. A rank that never published is stood in for by an empty one."""

        def read(rank: int) -> Record:
            return Record(**json.loads(self._store.get(self._key(rank))))

        others = [rank for rank in range(self._world_size) if rank != self.record.rank]
        known = {rank for rank in others if self._store.check([self._key(rank)])}
        return {rank: read(rank) if rank in known else Record(rank, "unknown", 0, label="start-up") for rank in others}


def _end(thread: threading.Thread, stopped: threading.Event) -> None:
    """Ends a watchdog's thread. One that returns from the store while the interpreter exits would abort the process."""
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(timeout=STORE_S)
