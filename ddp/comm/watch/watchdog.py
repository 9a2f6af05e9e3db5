"""The watchdog finds the rank that is missing, and ends waits that cannot succeed.

Before each wait a rank records its call and the rank that it waits for. Every `INTERVAL_S` a separate thread publishes
that record on the `Board`, and reads the others'. It ends with `leave`, or with the watchdog itself.

After `warn_s` of waiting the watchdog prints a warning, once per call. It waits for a rank that is alive until the
deadline, `abort_s`. If the statuses show earlier that the wait cannot succeed, because a rank failed, left, or has
shown no sign of life for `SILENCE_S`, or because a call is stuck, the watchdog gives up: then `hopeless_because` ends
the waits. In either case `find_culprit` turns the statuses into a `PeerLost`. None of this slows a collective down,
because a record is one assignment.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from ddp.comm.meeting.membership import current_member, lost_member
from ddp.comm.meeting.private_store import part_of
from ddp.comm.transport.shared_memory import ProcessHandle
from ddp.comm.watch.call import Call, Envelope
from ddp.comm.watch.status import STALE_S, Board, Culprit, StatusSnapshot, Wait
from ddp.errors import PeerLost
from ddp.process.clock import HelperThread, Patience, now_s, within
from ddp.process.terminal import log

Result = TypeVar("Result")

INTERVAL_S = 0.5
SILENCE_S = 60.0  # a library that keeps the interpreter lock for this long looks like a dead process
SEARCH_S = 1.25  # longest search for a culprit after a deadline
STORE_S = 0.3  # and for one more response of the store
SHORTEST_S, POLL_S = 0.001, 0.05  # between two checks for a value


class Watchdog:
    """Records what this rank waits for, warns, gives up, and finds the missing rank.

    Args:
        store: of this session of the ranks alone.
        generation: version of the membership, for messages.
        warn_s: seconds in one wait after which a warning names the missing rank.
        abort_s: longest wait for a rank that is alive.
        world_ranks: these ranks' numbers in the membership of an elastic launch, if they are a subset.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        generation: int,
        warn_s: float,
        abort_s: float,
        world_ranks: Sequence[int] = (),
    ) -> None:
        self.board = Board(store, rank, world_size)
        self._generation, self._world_ranks = generation, world_ranks
        self.warn_s, self._abort_s = warn_s, abort_s
        # In an elastic launch the launcher alone judges, which sees what processor time a process uses.
        self._silence_s = abort_s if current_member() is not None else min(abort_s, SILENCE_S)
        self._hosts: dict[int, str] = {}
        self._culprit: Culprit | None = None
        self._warned = self.board.last_wait.call
        self.board.publish()
        self._stopped = threading.Event()
        known = weakref.ref(self), self._stopped  # so that the thread does not keep the watchdog alive
        self._thread = threading.Thread(target=_watch, args=known, name="ddp-watchdog", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._thread, self._stopped)  # at exit, too

    def set_hosts(self, names: Sequence[str], pids: Mapping[int, int]) -> None:
        """Sets the hosts and processes of the ranks.

        Args:
            names: every rank's host, for errors when a rank and the store are lost together.
            pids: by rank of this host, its process, whose end is known without waiting for its tick.
        """
        self._hosts = dict(enumerate(names))
        self.board.processes = {rank: ProcessHandle(pid) for rank, pid in pids.items() if rank != self.board.rank}

    def set_messages(self, posted: Mapping[str, int], in_flight: Mapping[Envelope, object]) -> None:
        """Sets this rank's messages, which may keep changing: see `Status.posted` and `Status.in_flight`."""
        self.board.posted, self.board.in_flight = posted, in_flight

    def among(self, ranks: Sequence[int], channel: int) -> Watchdog:
        """Returns a watchdog for a group of some of the ranks, whose calls have separate numbers."""
        return Watchdog(
            part_of(self.board.store, f"channel/{channel}"),
            list(ranks).index(self.board.rank),
            min(len(ranks), self.board.world_size),  # a watchdog of one rank stays one in a group
            generation=self._generation,
            warn_s=self.warn_s,
            abort_s=self._abort_s,
            world_ranks=[self._world_ranks[rank] for rank in ranks] if self._world_ranks else ranks,
        )

    # --- what this rank does -----------------------------------------------------------------------------------------

    def begin(self, call: Call, peer: int, run: int = 0) -> None:
        """Records that a call begins, and the rank that it waits for first (`run`: see `Wait`)."""
        board = self.board
        board.wait = board.last_wait = Wait(call, peer, now_s(), run)

    def waits_for(self, peer: int) -> None:
        """Records that a wait begins in the running call."""
        last = self.board.last_wait
        self.begin(last.call, peer, last.run)

    def end(self) -> None:
        """Records that the call is over."""
        self.board.wait = None

    def hopeless_because(self) -> Culprit | None:
        """Returns the rank that will never arrive, and why, once no wait can succeed any more."""
        return self._culprit or lost_member(self._world_ranks)

    def give_up(self, rank: int, reason: str) -> None:
        """Ends this process's present and future waits."""
        self._culprit = rank, reason

    def fail(self, reason: str, *, blames: int | None = None) -> None:
        """Publishes that this rank cannot continue, so that the others need not find out by waiting."""
        self.board.publish_last("failed", reason, blames)

    def leave(self) -> None:
        """Publishes that this rank is done, unless it has failed. Ends the thread."""
        self.board.publish_last("left")
        self._end()
        self.board.close()

    def publish(self, key: str, word: str) -> None:
        """Writes a value to the session's store, for the ranks that wait for it."""
        self.board.store.set(key, word)

    def wait_for_value(self, key: str, rank: int, call: Call | None = None) -> bytes:
        """Waits at the store, not in the transport, for a value of `rank`, as long as that rank is alive.

        Args:
            key: of the session's store.
            call: described in errors; a step of the start-up unless given.

        Raises:
            PeerLost: the rank failed or left, or its tick has stood still for too long.
        """
        self.begin(call or Call(0, "start-up"), rank)
        is_there, limit_s = partial(self._is_published, key, rank), max(self._silence_s, STALE_S)
        pause_s = SHORTEST_S
        try:
            while not within(limit_s, is_there):
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, POLL_S)
            word: bytes = within(limit_s, partial(self.board.store.get, key))
        except (DistError, TimeoutError) as error:
            raise self.find_culprit(rank) from error
        self.end()
        return word

    def _is_published(self, key: str, rank: int) -> bool:
        """Returns True if the value is there; raises PeerLost once it cannot arrive any more."""
        store = self.board.store
        if store.check([key]):
            return True
        others = self.board.observe()
        is_gone = rank in others.ended or others.statuses[rank].state in ("failed", "left")
        is_silent = others.silent_s[rank] >= max(self._silence_s, STALE_S)
        is_hopeless = is_gone or is_silent or self.hopeless_because() is not None
        if is_hopeless and not store.check([key]):  # the value may have arrived just before
            raise self.find_culprit(rank)
        return False

    def while_watched(self, make: Callable[[], Result], peer: int) -> Result:
        """Returns the result of `make`, which blocks in a library until all ranks have called it. Runs it on another
        thread.

        Args:
            peer: the rank that it waits for first.

        Raises:
            PeerLost: a rank has failed, is gone, or did not arrive within the deadline.
            RuntimeError: the error of `make`, if no other rank is the cause.
        """
        call, helper, patience = Call(0, "start-up"), HelperThread("ddp-set-up"), Patience(self._abort_s)
        future = helper.submit(make)
        helper.end()
        self.begin(call, peer)
        try:
            while not future.done():
                if culprit := self.hopeless_because():
                    raise self.find_culprit(culprit[0], culprit[1])
                if not patience.left_s():
                    raise self.find_culprit(peer, f"the ranks are not connected after {self._abort_s:g} s")
                self._stopped.wait(POLL_S)
            return future.result()
        except PeerLost:
            raise
        except RuntimeError as error:
            if (lost := self.find_lost(call, peer)) is not None:
                raise lost from error
            raise
        finally:
            self.end()

    # --- after a wait has failed -------------------------------------------------------------------------------------

    def find_culprit(self, suspect: int, observed: str = "") -> PeerLost:
        """Reads the statuses until they show the missing rank; blames the suspect if they show nothing else.

        After a long wait they show it at once, because the thread has been reading them; after a sudden failure it
        takes up to `STALE_S` seconds and two intervals. It never takes longer than `SEARCH_S` beyond the deadline, even
        if the store does not respond, for example because the process that serves it is stopped.

        Args:
            suspect: the peer of the transfer that failed.
            observed: the transport's error.
        """
        if self._stopped.is_set():
            return self._lost(suspect, observed)
        until_s = now_s() + STALE_S + 2 * INTERVAL_S
        until_s = max(now_s() + SEARCH_S, min(until_s, self.board.last_wait.since_s + self._abort_s + SEARCH_S))

        def find() -> Culprit:
            try:
                others, found = self._read_until(until_s)
                culprit = found or others.likely(suspect, observed, self._abort_s)
            except Exception as error:
                why = f"and the store that the ranks share is out of reach ({type(error).__name__})"
                culprit = self._culprit or (suspect, why)
            self.fail(culprit[1], blames=culprit[0])
            return culprit

        try:
            return self._lost(*within(until_s - now_s() + STORE_S, find))
        except TimeoutError:
            return self._lost(0, "the store that the ranks share, on rank 0's host, does not respond")

    def find_lost(self, call: Call, peer: int) -> PeerLost | None:
        """Returns the rank that is certainly lost, if any, after an error that another rank may have caused.

        Takes some seconds.

        Args:
            call: the call that failed.
            peer: the rank that this rank reports to wait for.
        """
        self.begin(call, peer)
        try:
            _, culprit = self._read_until(now_s() + STALE_S + 2 * INTERVAL_S, StatusSnapshot.lost)
        except Exception as error:
            log.debug("watchdog: the store is out of reach: %s", error)
            return None
        finally:
            self.end()
        if culprit is None:
            return None
        self.fail(culprit[1], blames=culprit[0])
        return self._lost(*culprit)

    def _read_until(
        self, until_s: float, find: Callable[[StatusSnapshot], Culprit | None] = StatusSnapshot.certain
    ) -> tuple[StatusSnapshot, Culprit | None]:
        """Reads the statuses until they show with certainty who is to blame."""
        while True:
            others = self.board.observe()
            culprit = lost_member(self._world_ranks) or find(others)
            if culprit or not others.statuses or now_s() > until_s or self._stopped.wait(INTERVAL_S / 2):
                return others, culprit

    def _lost(self, culprit: int, reason: str) -> PeerLost:
        call, host = self.board.last_wait.call, self._hosts.get(culprit, "unknown")
        number, route = (call.sequence, "") if call.message is None else (call.message.number, call.message.route)
        return PeerLost(culprit, host, self._generation, number, call.label, reason, route)

    # --- during a wait -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Publishes this rank's status. In a wait, looks at the others', and warns or gives up."""
        try:
            self.board.publish()
            if self.board.wait is None:
                self.board.forget_changes()
            else:
                others = self.board.observe()
                self._warn_if_late(others)
                self._give_up_if_hopeless(others)
        except Exception as error:  # the store ends with the run or its host: waits notice that themselves
            log.debug("watchdog: the store is out of reach: %s", error)

    def _warn_if_late(self, others: StatusSnapshot) -> None:
        wait = self.board.wait
        if wait is None or wait.call is self._warned or (waited_s := self._waited_s(wait)) < self.warn_s:
            return
        self._warned = wait.call
        lines = [status.describe() for status in others.statuses.values()]
        log.warning(
            "%s has waited %.0f s for rank %d. The others:" + "\n  %s" * len(lines),
            *(wait.call.title, waited_s, wait.peer, *lines),
        )

    def _waited_s(self, wait: Wait) -> float:
        """Returns the seconds of a wait since this process was last paused."""
        return now_s() - max(wait.since_s, self.board.awake_since_s)

    def _give_up_if_hopeless(self, others: StatusSnapshot) -> None:
        """Ends a wait before its deadline if it cannot succeed any more.

        A rank that has reached this collective may have done its part and left, while another one still computes: only
        a rank that waits for it gives up, and notifies the others.
        """
        wait = self.board.wait
        if wait is None or self._culprit is not None or (waited_s := self._waited_s(wait)) < STALE_S:
            return  # data that a rank sent before it failed may still arrive
        missed = others.missed(wait.peer)
        culprit = others.stuck() or others.failed() or missed.gone()
        if culprit is None and waited_s >= self._silence_s:
            culprit = missed.silent(self._silence_s)
        if culprit is not None and wait is self.board.wait:
            self.give_up(*culprit)


def _watch(watchdog: weakref.ref[Watchdog], stopped: threading.Event) -> None:
    """Calls the watchdog's `check` periodically, until it is stopped or unreferenced."""
    while not stopped.wait(INTERVAL_S):
        if (here := watchdog()) is None:
            return
        here.check()
        del here


def _end(thread: threading.Thread, stopped: threading.Event) -> None:
    """Ends a watchdog's thread. One that returns from the store while the interpreter exits would abort the process."""
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(timeout=STORE_S)
