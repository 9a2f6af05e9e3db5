"""The ledger of parameter servers: decides which worker computes which samples, and which gradients count.

    server      begin_epoch(plans)                                            take_update → update, commit
    worker                  grant → read   begin → pull, compute, push   returned → "counts", or "came too late"
                                           waits, or learns that the lease is gone

A *plan* is a step of the sampler. A *lease* is one part of it, granted to one worker, which reads its samples ahead. A
lease that is *begun* will be *returned* with gradients. The *version* is the number of updates. Three modes:

    sync        A plan is cut into `num_parts`, and all its parts make one update. No worker begins a part before the
                updates of all plans before it.
    async       A plan is one part, and each return is an update at once, however old its parameters are.
    bounded     As async, but no worker begins a part whose gradient could be staler than `staleness` updates.

Each part of each plan counts exactly once, from the worker that returns it first. So that no worker waits for one that
is lost, stopped or slow, an idle worker, which may begin no other part, gets, in this order:

    a free part          also one of a lost worker
    one taken back       a lease that its holder has not begun, if that saves at least half of its time
    a copy               of a part that is *late*: it takes `LATE` times longer than any worker took last time

With backup workers (arXiv 1604.00981), `num_backups` parts of each plan are granted twice, the second time to the
workers that ask last, which are the slowest; so all workers compute in each step, and it waits for the fastest. Then a
part is late sooner, measured by the fastest worker. The paper drops late gradients; here only copies are dropped, and
no sample is.

Note "bounded". Let u plans be *in flight*: begun or returned, and not in an update yet. An update raises the version by
one, and takes one plan out. So the gradient of version b that is in the update after version v is v − b updates old,
and at any time before, with version w and u plans in flight, it is at most (w − b) + (u − 1) updates old in the end, if
no further plan begins. An update does not change that sum, since w rises and u falls; a lost worker lowers it. It grows
only when a further plan begins, and then the ledger demands that (w − b) + u ≤ s for the oldest b in flight, where u
does not count the new plan. So s is a bound for all. The new one itself has b = w, and with staleness 0 it begins when
nothing is in flight. A copy may always begin, because its plan is counted already.

Pure and without a clock: the servers call it under one lock. Cost: a call visits all leases that are out, a few for
each worker.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Mode = Literal["sync", "async", "bounded"]
Status = Literal["now", "wait", "gone"]

LATE = 3.0  # times the longest recent time of a worker
LEAST_LATE_S = 1.0  # no part is late earlier
LATE_WITH_BACKUPS = 2.0  # times the shortest recent time of a worker
UNKNOWN_S = 1.0  # expected time of a lease until one has been returned


class Plan(NamedTuple):
    """A step of the sampler: `size` samples from `position` of an epoch. Steps are numbered from 1 in the run."""

    step: int
    epoch: int
    position: int
    size: int


class Lease(NamedTuple):
    """Part `part` of `num_parts` of a plan, granted to one worker. No two grants have the same number."""

    number: int
    plan: Plan
    part: int
    num_parts: int


def as_plain(lease: Lease) -> list[Any]:
    """Returns a lease in a form that JSON can hold."""
    number, plan, part, num_parts = lease
    return [number, list(plan), part, num_parts]


def as_lease(plain: Sequence[Any]) -> Lease:
    """Returns the lease from the form that `as_plain` returned."""
    number, plan, part, num_parts = plain
    return Lease(int(number), Plan(*map(int, plan)), int(part), int(num_parts))


class Update(NamedTuple):
    """An update of the parameters.

    Attributes:
        workers: by part, the worker whose gradient counts; None for a part without samples. sizes: by part, its
            samples.
        age: updates since its oldest parameters were pulled.
    """

    plan: Plan
    workers: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    age: int


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker that has asked and is not lost.

    Attributes:
        held: its leases, in the order in which it reads them.
        seen_s: time of its last request.
        sample_s: time per sample of its last return; None before the first.
    """

    name: Hashable
    seen_s: float
    held: list[_Held] = field(default_factory=list)
    sample_s: float | None = None

    @property
    def is_busy(self) -> bool:
        return any(each.begun_s is not None for each in self.held)

    @property
    def not_begun(self) -> list[_Held]:
        return [each for each in self.held if each.begun_s is None]


@dataclass(eq=False, slots=True)
class _Held:
    """A lease that a worker holds.

    Attributes:
        begun_s, version: when it was begun, and the version of the parameters pulled.
    """

    lease: Lease
    part: _Part
    worker: _Worker
    begun_s: float | None = None
    version: int = 0


@dataclass(eq=False, slots=True)
class _Part:
    """A part of a plan.

    Attributes:
        holders: leases by which it may still be returned.
        counts: the lease whose return counts, once there is one; None for a part without samples.
    """

    open: _Open
    number: int
    size: int
    holders: list[_Held] = field(default_factory=list)
    is_counted: bool = False
    counts: _Held | None = None

    def is_of(self, worker: _Worker) -> bool:
        """Returns True if a worker has returned the part, or may do so."""
        return any(each is not None and each.worker is worker for each in (*self.holders, self.counts))


@dataclass(eq=False, slots=True)
class _Open:
    """A plan that is not in an update yet; of `num_copies` parts a copy was granted ahead."""

    plan: Plan
    parts: list[_Part] = field(default_factory=list)
    num_copies: int = 0

    @property
    def versions(self) -> list[int]:
        """Returns the versions of the parameters of all parts that are begun or returned."""
        begun = [each.version for part in self.parts for each in part.holders if each.begun_s is not None]
        return begun + [part.counts.version for part in self.parts if part.counts is not None]


class Ledger:
    """Grants leases to workers, and decides which returns make an update.

    Workers are identified by any hashable name. Before a worker reuses a name, its former owner must be `lost`.

    Args:
        num_parts: of a plan; 1 but in mode sync.
        num_shards: parts of a plan with their own random streams; a lease takes whole ones; None: `num_parts`.
        staleness: most updates between the pull of parameters and the update by their gradient, in mode bounded.
        num_backups: copies of each plan's parts that are granted ahead, in mode sync.
        version: updates that the run has made.
    """

    def __init__(
        self,
        *,
        mode: Mode,
        num_parts: int = 1,
        num_shards: int | None = None,
        staleness: int | None = None,
        num_backups: int = 0,
        version: int = 0,
    ) -> None:
        assert mode == "sync" or (num_parts == 1 and num_backups == 0), mode
        assert (staleness is None) == (mode != "bounded"), staleness
        self.mode, self.version = mode, version
        self._num_parts, self._num_shards = num_parts, num_shards or num_parts
        self._staleness, self._num_backups = staleness, num_backups
        self._plans: Iterator[Plan] = iter(())
        self._open: list[_Open] = []  # in the order of the sampler
        self._complete: deque[_Open] = deque()  # in the order of their last return
        self._workers: dict[Hashable, _Worker] = {}
        self._num_granted, self._counted_s = 0, -math.inf

    # --- The server ---------------------------------------------------------------------------------------------------

    def begin_epoch(self, plans: Iterable[Plan]) -> None:
        """Takes the plans of an epoch, one after another as they are granted, once the former epoch is over."""
        assert self.is_epoch_over
        self._plans = iter(plans)

    @property
    def is_epoch_over(self) -> bool:
        """Returns True if every plan of the epoch is in an update."""
        return not self._open and not self._draw()

    def is_complete(self, step: int | None) -> bool:
        """Returns True if the update of a step can be taken, and was not."""
        return any(each.plan.step == step for each in self._complete)

    def take_update(self) -> Update | None:
        """Returns the next update, and raises the version; None if no further plan is complete.

        In mode sync updates are in the order of the plans, else in the order of returns.
        """
        if not self._complete:
            return None
        done = self._complete.popleft()
        self._open.remove(done)
        age = self.version - min(done.versions)
        self.version += 1
        workers = tuple(part.counts and part.counts.worker.name for part in done.parts)
        return Update(done.plan, workers, tuple(part.size for part in done.parts), age)

    def lost(self, worker: Hashable) -> None:
        """Frees all leases of a worker; its later returns do not count."""
        if (gone := self._workers.pop(worker, None)) is not None:
            self._take_back(gone.held)

    def next_late_s(self, now_s: float) -> float | None:
        """Returns the seconds until a worker will be late, if none calls earlier; None: never."""
        left_s = [at_s - now_s for at_s in map(self._late_at_s, self._workers.values()) if now_s < at_s < math.inf]
        return min(left_s, default=None)

    # --- A worker -----------------------------------------------------------------------------------------------------

    def grant(self, worker: Hashable, *, most: int, now_s: float) -> list[Lease]:
        """Returns further leases for a worker, so that it holds `most` that it has not begun, in reading order."""
        me = self._workers.setdefault(worker, _Worker(worker, now_s))
        me.seen_s = now_s
        granted = []
        if (part := self._for_idle(me, now_s)) is not None:
            self._take_back(me.not_begun)  # because it reads in order, and may not begin them yet
            granted.append(self._lease(part, me))
        while len(me.not_begun) < most and (part := self._ahead(me)) is not None:
            granted.append(self._lease(part, me))
        return granted

    def begin(self, worker: Hashable, lease: Lease, *, now_s: float) -> Status:
        """Returns "now" if a worker is to pull parameters and to compute a lease, the next one that it has read.

        "wait": not before another worker returns a part, is lost, or is late. "gone": never; the lease was taken back.
        """
        held = self._find(worker, lease)
        if held is None:
            return "gone"
        held.worker.seen_s = now_s
        if held.begun_s is None and not self._may_begin(held.part.open):
            if self._for_idle(held.worker, now_s) is None:
                return "wait"
            self._take_back(held.worker.not_begun)  # there is something better to do
            return "gone"
        if held.begun_s is None:
            held.begun_s, held.version = now_s, self.version
        return "now"

    def returned(self, worker: Hashable, lease: Lease, *, now_s: float) -> bool:
        """Returns True if a gradient counts; False for a late copy, and for a lease that was not begun or was taken
        back.

        The first return of a part counts.
        """
        held = self._find(worker, lease)
        if held is None or held.begun_s is None:
            return False
        part = held.part
        held.worker.held.remove(held)
        held.worker.seen_s = now_s
        held.worker.sample_s = (now_s - held.begun_s) / part.size
        if part.is_counted:
            return False
        part.is_counted, part.counts, self._counted_s = True, held, now_s
        for other in part.holders:
            if other.begun_s is None:
                other.worker.held.remove(other)
        part.holders.clear()
        if all(each.is_counted for each in part.open.parts):
            self._complete.append(part.open)
        return True

    # --- Which part a worker gets -------------------------------------------------------------------------------------

    def _ahead(self, me: _Worker) -> _Part | None:
        """Returns a part to be read ahead, of the first plan in which a worker lacks its share."""
        share = math.ceil((self._num_parts + self._num_backups) / len(self._workers))
        # A part of an earlier plan would come later in its queue than one that waits for it.
        first = self._open.index(me.not_begun[-1].part.open) if self.mode == "sync" and me.not_begun else 0
        for each in self._from(first):
            mine = sum(part.is_of(me) for part in each.parts)
            if mine < share and (free := _free(each)) is not None:
                return free
            if not mine and each.num_copies < self._num_backups and (held := [p for p in each.parts if p.holders]):
                each.num_copies += 1
                return min(held, key=lambda part: len(part.holders))
        return None

    def _from(self, number: int) -> Iterator[_Open]:
        """Yields the open plans from one on, and draws further ones."""
        while number < len(self._open) or self._draw():
            yield self._open[number]
            number += 1

    def _for_idle(self, me: _Worker, now_s: float) -> _Part | None:
        """Returns a part to do at once, if nothing that the worker holds may be begun; takes it back from others.

        That pays if the others would begin it later than half of its time here. A lease that its holder is to begin
        next is copied instead, or two workers that are slow to read would take it from each other forever.
        """
        if me.is_busy or any(self._may_begin(each.part.open) for each in me.held):
            return None
        parts = [part for each in self._open if self._may_begin(each) for part in each.parts if not part.is_counted]
        for part in parts:
            if not part.holders:
                return part
        if self._may_begin(None) and self._draw():
            return _free(self._open[-1])
        waits = [min(self._wait_s(each, now_s) for each in part.holders) for part in parts]
        worthwhile = [
            (wait_s, part)
            for wait_s, part in zip(waits, parts, strict=True)
            if wait_s > (me.sample_s or 0.0) * part.size / 2 and not part.is_of(me)
        ]
        if not worthwhile:
            return None
        _, found = max(worthwhile, key=lambda each: each[0])
        self._take_back([each for each in found.holders if each.begun_s is None and each is not each.worker.held[0]])
        return found

    def _may_begin(self, each: _Open | None) -> bool:
        """Returns True if a part of a plan may be begun now; None stands for a plan that is not drawn yet."""
        if self.mode == "sync":
            return each is (self._open[0] if self._open else None)
        if self._staleness is None or (each is not None and each.versions):
            return True
        under_way = [min(versions) for each in self._open if (versions := each.versions)]
        return not under_way or self.version - min(under_way) + len(under_way) <= self._staleness

    def _draw(self) -> bool:
        """Opens the next plan of the epoch; returns False if there is none."""
        if (plan := next(self._plans, None)) is None:
            return False
        opened = _Open(plan)
        for number in range(self._num_parts):
            begin, end = (
                each * self._num_shards // self._num_parts * plan.size // self._num_shards
                for each in (number, number + 1)
            )
            opened.parts.append(_Part(opened, number, end - begin, is_counted=begin == end))
        self._open.append(opened)
        return True

    # --- Leases and time ----------------------------------------------------------------------------------------------

    def _lease(self, part: _Part, me: _Worker) -> Lease:
        self._num_granted += 1
        held = _Held(Lease(self._num_granted, part.open.plan, part.number, self._num_parts), part, me)
        part.holders.append(held)
        me.held.append(held)
        return held.lease

    def _take_back(self, leases: list[_Held]) -> None:
        for each in list(leases):
            each.worker.held.remove(each)
            if each in each.part.holders:  # else it counts already
                each.part.holders.remove(each)

    def _find(self, worker: Hashable, lease: Lease) -> _Held | None:
        held = self._workers[worker].held if worker in self._workers else []
        return next((each for each in held if each.lease == lease), None)

    def _wait_s(self, held: _Held, now_s: float) -> float:
        """Returns the expected seconds until a lease is begun; infinity if its worker is late."""
        if now_s >= self._late_at_s(held.worker):
            return math.inf
        before = held.worker.held[: held.worker.held.index(held)]
        takes_s = (self._takes_s(each) - (0.0 if each.begun_s is None else now_s - each.begun_s) for each in before)
        return 0.0 if held.begun_s is not None else sum(max(0.0, each) for each in takes_s)

    def _takes_s(self, held: _Held) -> float:
        """Returns the expected seconds of a lease, from its worker's last time per sample, or else the slowest one."""
        known = [each.sample_s for each in self._workers.values() if each.sample_s is not None]
        sample_s = held.worker.sample_s if held.worker.sample_s is not None else max(known, default=None)
        return UNKNOWN_S if sample_s is None else sample_s * held.part.size

    def _late_at_s(self, worker: _Worker) -> float:
        """Returns the time at which a worker is late with the part that it has begun or may begin; infinity: never."""
        known = [each.sample_s for each in self._workers.values() if each.sample_s is not None]
        doing = next((each for each in worker.held if each.begun_s is not None), None)
        doing = doing or next((each for each in worker.held if self._may_begin(each.part.open)), None)
        if doing is None or not known:
            return math.inf
        since_s = max(worker.seen_s, self._counted_s) if doing.begun_s is None else doing.begun_s
        size = doing.part.size
        if self._num_backups:
            return since_s + LATE_WITH_BACKUPS * min(known) * size
        return since_s + max(LEAST_LATE_S, LATE * max(known) * size)


def _free(each: _Open) -> _Part | None:
    """Returns the first part of a plan that no worker holds."""
    return next((part for part in each.parts if not part.is_counted and not part.holders), None)
