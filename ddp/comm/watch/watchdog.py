"""The watchdog finds out who is missing: every rank publishes its status in the store, and reads the others' there.

Why not ask the transport? When a Gloo wait times out it closes pairs to healthy ranks too, so that one silent rank
looks like many broken ones. Errors of the transport never tell who is guilty; the store does.

Before each wait a rank notes its call and whom it waits for. Every `INTERVAL_S` a thread outside the wait publishes
that note and a tick that grows; if the call is the same as last time, it adds the main thread's stack. So a reader can
tell five cases apart:

    the process has ended              known of ranks on this host           SIGKILL
    the tick stands still              it died elsewhere, or is stopped      SIGSTOP, power
    it says "failed" or "left"         it raised an error, or finished       look at its log
    the tick runs, a lower number      it is alive, but somewhere else       its Python stack says where
    the tick runs, same number         it waits too: the link between is cut

A rank publishes what it calls, too: the operation, dtype and number of elements, and its messages. Ranks that call
different collectives or wait for each other in a circle, and messages whose two ends do not fit, are found by
comparing them.

After `warn_s` of waiting the watchdog prints a warning, once per call. A rank that lives and computes is waited for
until the deadline, `abort_s`. If the statuses show before that nobody can come any more, because a rank failed, left,
or has shown no sign of life for `SILENCE_S`, or because a call is stuck, the watchdog gives up: `hopeless_because`
says so to whoever waits. In either case `find_culprit` turns the statuses into a `PeerLost`. None of this slows a
collective down, because a note is one assignment.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from ddp.comm.meeting.private_store import part_of
from ddp.comm.transport.shared_memory import Life
from ddp.comm.watch.call import Call, Envelope
from ddp.comm.watch.status import STALE_S, Culprit, Status, StatusSnapshot
from ddp.errors import PeerLost
from ddp.process.clock import PAUSED_S, now_s, within
from ddp.process.log import log
from ddp.process.stack import stack_of

INTERVAL_S = 0.5
SILENCE_S = 60.0  # a library that keeps the interpreter lock for this long looks like a dead process
JUDGE_S = 1.25  # longest search for a culprit after a deadline
STORE_S = 0.3  # and for one more answer of the store
POLL_S = 0.05
STACK_FRAMES = 6


class Wait(NamedTuple):
    """A call of this rank, and the rank that it waits for.

    Attributes:
        run: counts the collectives that ranks do together, on all of them alike; 0: it is none of these.
    """

    call: Call
    peer: int
    since_s: float
    run: int = 0


class Watchdog:
    """Publishes this rank's status, reads the others', and finds who is missing.

    Args:
        store: where the statuses are; of this session of the ranks alone.
        generation: version of the membership, for messages.
        warn_s: seconds in one wait after which a warning says who is missing.
        abort_s: longest wait for a rank that lives.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, generation: int, warn_s: float, abort_s: float
    ) -> None:
        # A connection of its own: a blocked call elsewhere must not block this one.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self.warn_s, self._abort_s, self._silence_s = warn_s, abort_s, min(abort_s, SILENCE_S)
        self._hosts: dict[int, str] = {}
        self._lives: dict[int, Life] = {}
        self._status = Status(rank, socket.gethostname(), os.getpid())
        self._posted: Mapping[str, int] = {}
        self._in_flight: Mapping[Envelope, object] = {}
        self._wait: Wait | None = None
        self._last_wait = Wait(Call(0, "start-up"), rank, now_s())
        self._culprit: Culprit | None = None
        self._published = self._warned = self._last_wait.call
        self._last_change: dict[int, tuple[int, float]] = {}  # rank → its tick, and when that was new
        self._observed_s = self._awake_since_s = now_s()
        self._main_thread = threading.main_thread().ident
        self._lock = threading.RLock()  # of the status and of the store, which serves one thread at a time
        self._stopped = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._loop, name="ddp-watchdog", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._thread, self._stopped)  # at exit, too

    def set_hosts(self, names: Sequence[str], pids: Mapping[int, int]) -> None:
        """Takes what the ranks have found out about each other.

        Args:
            names: every rank's host, for the case that a rank is lost and the store with it.
            pids: by rank of this host, its process: once that has ended, nobody waits for a sign of life.
        """
        self._hosts = dict(enumerate(names))
        self._lives = {rank: Life(pid) for rank, pid in pids.items() if rank != self._rank}

    def set_messages(self, posted: Mapping[str, int], in_flight: Mapping[Envelope, object]) -> None:
        """Takes the messages of this rank, which may go on changing: see `Status.posted` and `Status.in_flight`."""
        self._posted, self._in_flight = posted, in_flight

    def among(self, ranks: Sequence[int], channel: int) -> Watchdog:
        """Returns one for a group of some of the ranks, whose calls have numbers of their own."""
        return Watchdog(
            part_of(self._store, f"channel/{channel}"),
            list(ranks).index(self._rank),
            min(len(ranks), self._world_size),  # a watchdog of one rank watches nobody in a group either
            generation=self._generation,
            warn_s=self.warn_s,
            abort_s=self._abort_s,
        )

    def begin(self, call: Call, peer: int, run: int = 0) -> None:
        """Notes that a call begins, and whom it waits for first (`run`: see `Wait`)."""
        self._wait = self._last_wait = Wait(call, peer, now_s(), run)

    def waits_for(self, peer: int) -> None:
        """Notes a wait that begins now, in the running call."""
        last = self._last_wait
        self._wait = self._last_wait = Wait(last.call, peer, now_s(), last.run)

    def end(self) -> None:
        """Notes that the call is over."""
        self._wait = None

    def hopeless_because(self) -> Culprit | None:
        """Returns the rank that will never come, and why, once no wait can succeed any more."""
        return self._culprit

    def give_up(self, rank: int, reason: str) -> None:
        """Ends this process's waits, now and from now on."""
        self._culprit = rank, reason

    def fail(self, reason: str, *, blames: int | None = None) -> None:
        """Tells the others that this rank cannot go on, before they have to find out by waiting."""
        self._finish("failed", reason, blames)

    def leave(self) -> None:
        """Tells the others that this rank is done, unless it has failed. Ends the thread."""
        self._finish("left", "", None)
        self._end()
        for life in self._lives.values():
            life.close()
        self._lives.clear()

    def say(self, key: str, word: str) -> None:
        """Puts a word into the session's store, for those that wait for it."""
        self._store.set(key, word)

    def wait_for_word(self, key: str, rank: int, call: Call) -> bytes:
        """Waits at the store, not in the transport, for what `rank` puts there; for as long as that rank lives.

        Args:
            key: of the session's store.
            call: what the rank does meanwhile.

        Raises:
            PeerLost: the rank failed or left, or its tick has stood still for too long.
        """
        self.begin(call, rank)
        look, limit_s = partial(self._has_said, key, rank), max(self._silence_s, STALE_S)
        try:
            while not within(limit_s, look):
                self._stopped.wait(POLL_S)
            word: bytes = within(limit_s, partial(self._store.get, key))
        except (DistError, TimeoutError) as error:
            raise self.find_culprit(rank) from error
        self.end()
        return word

    def _has_said(self, key: str, rank: int) -> bool:
        """Returns True if the word is there; raises PeerLost once it cannot come any more."""
        if self._store.check([key]):
            return True
        others = self._observe()
        is_gone = rank in others.ended or others.statuses[rank].state in ("failed", "left")
        is_silent = others.silent_s[rank] >= max(self._silence_s, STALE_S)
        if (is_gone or is_silent) and not self._store.check([key]):  # the word may have come just before
            raise self.find_culprit(rank)
        return False

    # --- after a wait has failed -------------------------------------------------------------------------------------

    def find_culprit(self, suspect: int, observed: str = "") -> PeerLost:
        """Reads the statuses until they tell who is missing; blames the suspect if they show nothing else.

        After a long wait they tell at once, because the thread has been reading them; after a sudden break it takes up
        to `STALE_S` seconds and two intervals. It never takes longer than `JUDGE_S` beyond the deadline: not
        even if the store does not answer, as when the process that keeps it is stopped.

        Args:
            suspect: the peer of the transfer that failed.
            observed: what the transport saw.
        """
        if self._stopped.is_set():
            return self._lost(suspect, observed)
        until_s = now_s() + STALE_S + 2 * INTERVAL_S
        until_s = max(now_s() + JUDGE_S, min(until_s, self._last_wait.since_s + self._abort_s + JUDGE_S))
        culprit: list[Culprit] = []

        def judge() -> None:
            try:
                others, found = self._judge_until(until_s)
                culprit.append(found or others.likely(suspect, observed, self._abort_s))
            except Exception as error:
                why = f"and the store that the ranks share is out of reach ({type(error).__name__})"
                culprit.append(self._culprit or (suspect, why))
            self.fail(culprit[0][1], blames=culprit[0][0])

        judging = threading.Thread(target=judge, name="ddp-judge", daemon=True)
        judging.start()
        judging.join(until_s - now_s() + STORE_S)
        silent = (0, "the store that the ranks share, kept on rank 0's host, does not answer")
        return self._lost(*(culprit[0] if culprit else silent))

    def find_lost(self, call: Call, peer: int) -> PeerLost | None:
        """Returns the rank that is surely lost, after an error that may be another rank's doing or this one's own.

        Takes some seconds.

        Args:
            call: what failed.
            peer: the rank that a report names as the one that this rank waits for.
        """
        self.begin(call, peer)
        try:
            _, culprit = self._judge_until(now_s() + STALE_S + 2 * INTERVAL_S, StatusSnapshot.lost)
        except Exception as error:
            log.debug("watchdog: the store is out of reach: %s", error)
            return None
        finally:
            self.end()
        if culprit is None:
            return None
        self.fail(culprit[1], blames=culprit[0])
        return self._lost(*culprit)

    def _judge_until(
        self, until_s: float, judge: Callable[[StatusSnapshot], Culprit | None] = StatusSnapshot.certain
    ) -> tuple[StatusSnapshot, Culprit | None]:
        """Reads the statuses until they show for certain who is to blame."""
        while True:
            others = self._observe()
            culprit = judge(others)
            if culprit or not others.statuses or now_s() > until_s or self._stopped.wait(INTERVAL_S / 2):
                return others, culprit

    def _lost(self, culprit: int, reason: str) -> PeerLost:
        call, host = self._last_wait.call, self._hosts.get(culprit, "unknown")
        number, route = (call.sequence, "") if call.message is None else (call.message.number, call.message.route)
        return PeerLost(culprit, host, self._generation, number, call.label, reason, route)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            try:
                self._publish()
                if self._wait is None:
                    self._last_change.clear()
                else:
                    others = self._observe()
                    self._warn_if_late(others)
                    self._give_up_if_hopeless(others)
            except Exception as error:  # the store goes away when the run ends or its host dies: waits find out
                log.debug("watchdog: the store is out of reach: %s", error)

    def _publish(self) -> None:
        with self._lock:
            status, wait, (call, _, _, run) = self._status, self._wait, self._last_wait
            status.tick += 1
            stands_still, self._published = call is self._published, call
            status.sequence, status.label, status.message = call.sequence, call.label, call.message
            status.run, status.kind = run, call.kind
            status.posted, status.in_flight = dict(self._posted), list(self._in_flight)
            if status.state in ("running", "waiting"):
                status.state = "waiting" if wait else "running"
                status.waiting_for = wait.peer if wait else None
                status.stack = self._stack() if stands_still else []
            self._store.set(f"rank/{status.rank}", json.dumps(asdict(status)))

    def _finish(self, state: str, reason: str, blames: int | None) -> None:
        if not self._lock.acquire(timeout=JUDGE_S):  # another thread waits for a store that does not answer
            return
        try:
            if self._status.state not in ("failed", "left"):
                self._status.state, self._status.reason, self._status.blames = state, reason[:500], blames
                self._publish()
        except Exception as error:
            log.debug("watchdog: the store is out of reach: %s", error)
        finally:
            self._lock.release()

    def _observe(self) -> StatusSnapshot:
        """Reads the others, and keeps when each tick was last seen to move: by this rank's clock, not by theirs."""
        self._begin_anew_if_paused()
        statuses = self._read_all()
        self._begin_anew_if_paused()
        silent_s = {}
        for rank, status in statuses.items():
            tick, since_s = self._last_change.get(rank, (None, 0.0))
            if tick != status.tick:
                since_s = now_s()
                self._last_change[rank] = status.tick, since_s
            silent_s[rank] = now_s() - since_s
        ended = [rank for rank, life in self._lives.items() if not life.goes_on()]
        call, _, _, run = self._last_wait
        posted, in_flight = dict(self._posted), list(self._in_flight)
        mine = replace(self._status, run=run, kind=call.kind, posted=posted, in_flight=in_flight)
        return StatusSnapshot(mine, call, statuses, silent_s, ended)

    def _begin_anew_if_paused(self) -> None:
        """Forgets what was seen before this process was paused, or had nobody to wait for."""
        now = now_s()
        if now - self._observed_s > PAUSED_S:
            self._last_change.clear()
            self._awake_since_s = now
        self._observed_s = now

    def _read_all(self) -> dict[int, Status]:
        """Reads every other rank's status. An empty one stands for a rank that never published."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        statuses = {rank: Status(rank, "unknown", 0, label="start-up") for rank in others}
        for rank in others:
            with self._lock:
                if self._store.check([f"rank/{rank}"]):
                    statuses[rank] = Status.read(self._store.get(f"rank/{rank}"))
        return statuses

    def _warn_if_late(self, others: StatusSnapshot) -> None:
        wait = self._wait
        if wait is None or wait.call is self._warned or (waited_s := self._waited_s(wait)) < self.warn_s:
            return
        self._warned = wait.call
        lines = [status.describe() for status in others.statuses.values()]
        log.warning(
            "%s has waited %.0f s for rank %d. The others:\n  %s",
            *(wait.call.title, waited_s, wait.peer, "\n  ".join(lines)),
        )

    def _waited_s(self, wait: Wait) -> float:
        """Returns how long this process has waited since it was last paused."""
        return now_s() - max(wait.since_s, self._awake_since_s)

    def _give_up_if_hopeless(self, others: StatusSnapshot) -> None:
        """Ends a wait before its deadline, if the rank that it waits for cannot come any more.

        A rank that has come to this collective may have done its part and gone, while another one still computes: it is
        missed only by the rank that waits for it, which tells the others.
        """
        wait = self._wait
        if wait is None or self._culprit is not None or (waited_s := self._waited_s(wait)) < STALE_S:
            return  # what a rank sent before it failed may still be on its way
        missed = others.missed(wait.peer)
        culprit = others.stuck() or others.failed() or missed.gone()
        if culprit is None and waited_s >= self._silence_s:
            culprit = missed.silent(self._silence_s)
        if culprit is not None and wait is self._wait:
            self.give_up(*culprit)

    def _stack(self) -> list[str]:
        frames = stack_of(self._main_thread or 0)[-STACK_FRAMES:]
        return [f"{entry.name} ({os.path.basename(entry.filename)}:{entry.lineno})" for entry in frames]  # noqa: PTH119


def _end(thread: threading.Thread, stopped: threading.Event) -> None:
    """Ends a watchdog's thread. One that returns from the store while the interpreter exits would abort the process."""
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(timeout=STORE_S)
