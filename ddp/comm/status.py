"""The ranks' statuses, and what they tell about who is to blame. Pure: no store, no clock, no thread.

    certain     a rank said that it failed, or left before its part; its process has ended; its tick stands still
    likely      nobody is surely dead: someone is silent, or somewhere else, or a link is cut

Read before: `call.py`. Read next: `watchdog.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ddp.comm.call import Call

STALE_S = 3.0  # after a wait has failed, a tick that has stood still for this long means a dead or stopped process
QUIET_S = 1.5  # so long a silence is suspicious where nothing is certain
LEFT = "it has left already; every rank must call the same collectives equally often"

Verdict = tuple[int, str]  # the rank to blame, and why


@dataclass
class Status:
    """A rank's account of itself, as it is published."""

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
        """Returns one line for a report."""
        doing = f"waits for rank {self.waiting_for} in" if self.state == "waiting" else f"{self.state}, last seen in"
        stack = f"; at {' < '.join(reversed(self.stack))}" if self.stack else ""
        reason = f" ({self.reason})" if self.reason else ""
        return f"rank {self.rank} ({self.host}, pid {self.pid}) {doing} #{self.sequence} [{self.label}]{reason}{stack}"


class Others(NamedTuple):
    """One rank's view of the others at one moment.

    Attributes:
        rank: this one.
        call: what this one waits in.
        statuses: by rank.
        silent_s: by rank, for how long its tick has stood still.
        ended: ranks whose process is known to have ended.
    """

    rank: int
    call: Call
    statuses: Mapping[int, Status]
    silent_s: Mapping[int, float]
    ended: Collection[int]

    def certain(self) -> Verdict | None:
        """Returns who is surely to blame for a wait that has failed."""
        return self.failed() or self.gone() or self.elsewhere() or self.silent(STALE_S)

    def lost(self) -> Verdict | None:
        """Returns who is surely lost, whichever collectives the ranks are in."""
        return self.failed() or self.gone() or self.silent(STALE_S)

    def missed(self, peer: int) -> Others:
        """Returns only the ranks that have not come to this call, and the rank that this one waits for."""
        late = {rank: s for rank, s in self.statuses.items() if s.sequence < self.call.sequence or rank == peer}
        return self._replace(statuses=late)

    def failed(self) -> Verdict | None:
        """Returns a rank that says it failed, or whom such a rank blames; this rank itself, if it was given up."""
        for rank, status in self.statuses.items():
            if status.state == "failed" and status.blames is None:
                return rank, f"it failed: {status.reason}. Its own log has the traceback"
        blamed = [(rank, status.blames) for rank, status in self.statuses.items() if status.blames is not None]
        for rank, culprit in blamed:
            if culprit != self.rank:
                return culprit, f"as rank {rank} found out first"
        if blamed:
            judge = blamed[0][0]
            return (
                self.rank,
                f"rank {judge} has given this one up: it was stopped or silent for too long, or is cut off",
            )
        return None

    def gone(self) -> Verdict | None:
        """Returns a rank that will never come: it has left, or its process has ended."""
        for rank, status in self.statuses.items():
            if status.state == "left" and status.sequence < self.call.sequence:
                return rank, LEFT
            if status.state != "left" and rank in self.ended:
                return rank, "it shows no sign of life: its process has ended"
        return None

    def elsewhere(self) -> Verdict | None:
        """Returns a rank that is in another collective of the same number."""
        for rank, status in self.statuses.items():
            if status.sequence == self.call.sequence and status.label != self.call.label:
                return rank, f"it is in another collective of that number: [{status.label}]; all must call the same"
        return None

    def silent(self, silence_s: float) -> Verdict | None:
        """Returns a rank whose tick has stood still for so long."""
        for rank, status in self.statuses.items():
            if status.state != "left" and (silent_s := self.silent_s[rank]) >= silence_s:
                return rank, f"it shows no sign of life for {silent_s:.0f} s: killed, stopped, or its host is down"
        return None

    def likely(self, suspect: int, observed: str, abort_s: float) -> Verdict:
        """Returns who is most likely to blame where nothing is certain.

        Args:
            suspect: the peer of the transfer that failed.
            observed: what the transport saw.
            abort_s: the deadline, for the message.
        """
        for rank, status in self.statuses.items():
            if status.state == "left":
                return rank, LEFT
            if self.silent_s[rank] >= QUIET_S:
                return rank, "it shows no sign of life: killed, stopped, or its host is down"
        behind = [status for status in self.statuses.values() if status.sequence < self.call.sequence]
        if behind:
            status = min(behind, key=lambda each: each.sequence)
            late = f"it is alive, but has not come to this collective: {status.describe()}"
            return status.rank, f"{late}. With abort_s above {abort_s:g} s it is waited for longer"
        return suspect, f"it is alive, but the link to it is not ({observed or 'nothing came'}): is it cut?"
