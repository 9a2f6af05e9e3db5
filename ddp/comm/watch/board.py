"""The board: every rank publishes its status in the store, and reads the others' there.

Why not ask the transport? When a Gloo wait times out it closes pairs to healthy ranks too, so that one silent rank
looks like many broken ones. Errors of the transport never tell who is guilty; the store does.

A status has a tick that grows. A reader can tell five cases apart:

    the process has ended              known of ranks on this host           SIGKILL
    the tick stands still              it died elsewhere, or is stopped      SIGSTOP, power
    it says "failed" or "left"         it raised an error, or finished       look at its log
    the tick runs, a lower number      it is alive, but somewhere else       its Python stack says where
    the tick runs, same number         it waits too: the link between is cut

A rank publishes what it calls, too: the operation, dtype and number of elements, and its messages. Ranks that call
different collectives or wait for each other in a circle, and messages whose two ends do not fit, are found by
comparing them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.meeting.place import host_name
from ddp.comm.transport.shared_memory import Life
from ddp.comm.watch.call import Call, Envelope
from ddp.comm.watch.status import Status, StatusSnapshot
from ddp.process.clock import PAUSED_S, now_s
from ddp.process.stack import stack_of
from ddp.process.terminal import log

LOCK_S = 1.25  # longest wait of a last status for another thread, which may wait for a store that does not answer
STACK_FRAMES = 6


class Wait(NamedTuple):
    """A call of this rank, and the rank that it waits for.

    Attributes:
        run: counts the collectives that ranks do together, the same on all of them; 0: it is none of these.
    """

    call: Call
    peer: int
    since_s: float
    run: int = 0


class Board:
    """Publishes this rank's status, and reads the others'.

    Attributes:
        store: where the statuses are; of this session of the ranks alone.
        wait: what this rank waits in; None while it is in no call.
        last_wait: the same, or what it last waited in.
        posted, in_flight: this rank's messages, see `Status`; they go on changing.
        lives: by rank of this host, its process: once that has ended, no rank waits for a sign of life.
        awake_since_s: when this process was last paused, or waited for no rank.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        # A connection of its own: a blocked call elsewhere must not block this one.
        self.store: Store = store.clone()  # type: ignore[attr-defined]
        self.rank, self.world_size = rank, world_size
        self.wait: Wait | None = None
        self.last_wait = Wait(Call(0, "start-up"), rank, now_s())
        self.posted: Mapping[str, int] = {}
        self.in_flight: Mapping[Envelope, object] = {}
        self.lives: dict[int, Life] = {}
        self._status = Status(rank, host_name(), os.getpid())
        self._published = self.last_wait.call
        self._last_change: dict[int, tuple[int, float]] = {}  # rank → its tick, and when that was new
        self._observed_s = self.awake_since_s = now_s()
        self._main_thread = threading.main_thread().ident
        self._lock = threading.RLock()  # of the status and of the store, which serves one thread at a time

    def publish(self) -> None:
        """Puts this rank's status into the store, and the main thread's stack if its call is the same as last time."""
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
        """Publishes that this rank has "failed" or "left", once; the first one stands."""
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
        """Reads the others, and keeps when each tick was last seen to move: by this rank's clock, not by theirs."""
        self._begin_anew_if_paused()
        statuses = self.read_all()
        self._begin_anew_if_paused()
        silent_s = {}
        for rank, status in statuses.items():
            tick, since_s = self._last_change.get(rank, (None, 0.0))
            if tick != status.tick:
                since_s = now_s()
                self._last_change[rank] = status.tick, since_s
            silent_s[rank] = now_s() - since_s
        ended = [rank for rank, life in self.lives.items() if not life.goes_on()]
        call, _, _, run = self.last_wait
        posted, in_flight = dict(self.posted), list(self.in_flight)
        mine = replace(self._status, run=run, kind=call.kind, posted=posted, in_flight=in_flight)
        return StatusSnapshot(mine, call, statuses, silent_s, ended)

    def read_all(self) -> dict[int, Status]:
        """Reads every other rank's status. An empty one stands for a rank that never published."""
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
        """Gives the handles of the neighbours' processes back."""
        for life in self.lives.values():
            life.close()
        self.lives.clear()

    def _begin_anew_if_paused(self) -> None:
        """Forgets what was seen before this process was paused, or while it waited for no rank."""
        now = now_s()
        if now - self._observed_s > PAUSED_S:
            self._last_change.clear()
            self.awake_since_s = now
        self._observed_s = now

    def _stack(self) -> list[str]:
        frames = stack_of(self._main_thread or 0)[-STACK_FRAMES:]
        return [f"{entry.name} ({Path(entry.filename).name}:{entry.lineno})" for entry in frames]
