"""The ledger, held to what it promises by a checker of its own, over thousands of interleavings and on a clock."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import pytest

from ddp.strategies.parameter_server import ledger as module
from ddp.strategies.parameter_server.ledger import Lease, Ledger, Plan, Update

NUM_INTERLEAVINGS = 10_000


def plans_of(epoch: int, sizes: list[int], *, step: int) -> list[Plan]:
    """Returns the plans of an epoch with these sizes; the first is number `step`."""
    return [Plan(step + i, epoch, sum(sizes[:i]), size) for i, size in enumerate(sizes)]


# --- A model checker --------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """What a worker knows: leases that it has read, and the one that it computes, with the version that it has."""

    queue: list[Lease] = field(default_factory=list)
    computes: tuple[Lease, int] | None = None
    is_stopped: bool = False
    has_returned: bool = False


class Checked:
    """A ledger, workers that do things in any order, and what has to hold of them all, counted by itself."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(seed)
        self.mode = ("sync", "async", "bounded")[seed % 3]
        self.num_parts = draw.randint(1, 4) if self.mode == "sync" else 1
        self.num_shards = self.num_parts + draw.randint(0, 2)
        self.staleness = draw.randint(0, 4) if self.mode == "bounded" else None
        self.version = self.first = draw.choice((0, 7))
        self.ledger = Ledger(
            mode=self.mode,  # type: ignore[arg-type]
            num_parts=self.num_parts,
            num_shards=self.num_shards,
            staleness=self.staleness,
            num_backups=draw.choice((0, 0, 1, 2)) if self.mode == "sync" else 0,
            version=self.version,
        )
        self.workers = {number: Worker() for number in range(draw.choice((1, 2, 3, 3, 4, 4, 5, 8)))}
        self.now_s = 0.0
        self.granted: set[int] = set()
        self.counted: dict[tuple[int, int], tuple[int, int]] = {}  # by step and part: by whom, and of which version
        self.updated: list[int] = []

    def grant(self, name: int) -> None:
        granted = self.ledger.grant(name, most=self.random.randint(1, 3), now_s=self.now_s)
        numbers = {lease.number for lease in granted}
        assert len(numbers) == len(granted) and not numbers & self.granted, "two grants have the same number"
        assert all((lease.plan.step, lease.part) not in self.counted for lease in granted), "counts already"
        self.granted |= numbers
        self.workers[name].queue += granted

    def begin(self, name: int) -> str:
        worker = self.workers[name]
        lease = worker.queue[0]
        answer = self.ledger.begin(name, lease, now_s=self.now_s)
        if answer == "now":
            assert (lease.plan.step, lease.part) not in self.counted, "began what counts already"
            assert self.mode != "sync" or lease.plan.step == self.version + 1, "began with other parameters"
            worker.computes = lease, self.version
        if answer == "wait":
            assert not self.ledger.returned(name, lease, now_s=self.now_s), "the return of what was never begun"
        else:
            del worker.queue[0]
        return answer

    def give_back(self, name: int) -> None:
        worker = self.workers[name]
        assert worker.computes is not None
        (lease, version), worker.computes = worker.computes, None
        place = lease.plan.step, lease.part
        counts = self.ledger.returned(name, lease, now_s=self.now_s)
        assert counts == (place not in self.counted), "a part counts when it comes first"
        assert not self.ledger.returned(name, lease, now_s=self.now_s), "counted twice"
        if counts:
            self.counted[place] = name, version
        worker.has_returned = True

    def lose(self, name: int) -> None:
        """A worker is lost; another with the same name may come at once."""
        worker, self.workers[name] = self.workers[name], Worker()
        self.ledger.lost(name)
        for lease in (*worker.queue, *(worker.computes or ())[:1]):
            assert not self.ledger.returned(name, lease, now_s=self.now_s), "the return of a lost worker"

    def update(self) -> None:
        update = self.ledger.take_update()
        if update is None:
            return
        step, size = update.plan.step, update.plan.size
        parts = [self.counted.get((step, part)) for part in range(self.num_parts)]
        assert update.workers == tuple(part and part[0] for part in parts)
        bounds = [part * self.num_shards // self.num_parts * size // self.num_shards for part in range(len(parts) + 1)]
        assert [part is None for part in parts] == [bounds[i] == bounds[i + 1] for i in range(len(parts))]
        assert step not in self.updated, "a plan is in two updates"
        assert self.mode != "sync" or step == self.version + 1, "updates are not in the order of plans"
        age = max(self.version - part[1] for part in parts if part is not None)
        assert update.age == age and age <= (0 if self.mode == "sync" else self.staleness or age), "too old"
        self.updated.append(step)
        self.version += 1
        assert self.ledger.version == self.version

    def act(self) -> None:
        """Somebody does something."""
        draw = self.random
        self.now_s += draw.choice((0.0, 0.01, 0.1, 2.0))
        name = draw.randrange(len(self.workers))
        worker, chance = self.workers[name], draw.random()
        if chance < 0.02:
            self.lose(name)
        elif chance < 0.04:
            worker.is_stopped = not worker.is_stopped
        elif chance < 0.2:
            self.update()
        elif not worker.is_stopped:
            if worker.computes is not None and chance < 0.7:
                self.give_back(name)
            elif worker.computes is None and worker.queue and chance < 0.9:
                self.begin(name)
            else:
                self.grant(name)

    def finish(self) -> None:
        """One worker goes on; all others are stopped, some of them are lost."""
        name = self.random.choice(list(self.workers))
        self.workers[name].is_stopped = False
        for other in self.workers:
            if other != name and self.random.random() < 0.5:
                self.lose(other)
        worker, num_idle = self.workers[name], 0
        while not self.ledger.is_epoch_over:
            done = len(self.updated), len(self.counted)
            if worker.computes is not None:
                self.give_back(name)
            self.update()
            self.now_s += 0.1
            self.grant(name)
            while worker.queue and worker.computes is None and self.begin(name) == "gone":
                pass
            num_idle = num_idle + 1 if (len(self.updated), len(self.counted)) == done else 0
            assert num_idle < 99, "nothing moves"
            if num_idle < 3:  # it may be told that something is gone, ask, and begin
                continue
            if (late_s := self.ledger.next_late_s(self.now_s)) is not None:
                self.now_s += late_s * (1 + 1e-9)
            else:
                assert not worker.has_returned, "nothing moves"
                for other in set(self.workers) - {name}:  # nobody knows yet how long something takes
                    self.lose(other)

    def run(self) -> None:
        step, draw = self.version + 1, self.random
        for epoch in range(draw.choice((1, 1, 1, 2))):
            assert self.ledger.is_epoch_over
            num_steps = draw.randint(0, 2 if self.mode == "sync" else 4)
            sizes = [draw.choice((1, 3, 8, 8))] * num_steps + [draw.randint(1, 8)]
            plans = plans_of(epoch, sizes, step=step)
            step += len(plans)
            self.ledger.begin_epoch(plans)
            for _ in range(draw.choice((4, 8, 16))):
                self.act()
            self.finish()
            assert sorted(self.updated) == list(range(self.first + 1, step)), "a plan is missing"


def interleavings(first: int, stop: int) -> Iterator[None]:
    for seed in range(first, stop):
        Checked(seed).run()
        yield


def test_every_part_counts_once_in_any_order_of_events() -> None:
    assert sum(1 for _ in interleavings(0, NUM_INTERLEAVINGS)) == NUM_INTERLEAVINGS


# --- On a clock -------------------------------------------------------------------------------------------------------


def clocked(
    ledger: Ledger, sizes: list[int], sample_s: dict[str, float], *, read_s: float = 0.0, most: int = 2
) -> tuple[list[tuple[float, Update]], list[tuple[str, Lease]]]:
    """Returns when there were which updates, and who began what; a worker of infinite seconds per sample is stopped."""
    ledger.begin_epoch(plans_of(0, sizes, step=1))
    events: list[tuple[float, int, str, Lease | None]] = [(0.0, i, name, None) for i, name in enumerate(sample_s)]
    queues: dict[str, list[tuple[float, Lease]]] = {name: [] for name in sample_s}
    idle = set(sample_s)
    updates, begun, number, asked = [], [], len(events), 0
    while not ledger.is_epoch_over:
        now_s, _, name, lease = heappop(events)
        if lease is not None:
            ledger.returned(name, lease, now_s=now_s)
            while (update := ledger.take_update()) is not None:
                updates.append((now_s, update))
            idle.add(name)
        reading = {each for each in idle if queues[each] and queues[each][0][0] > now_s}
        for each in [name] if name and lease is None else sorted(idle - reading):
            while each in idle:
                assert len(begun) < 1000 and (asked := asked + 1) < 5000, "nothing moves"
                queue = queues[each]
                granted = ledger.grant(each, most=most, now_s=now_s)
                queue += [(now_s + read_s, lease) for lease in granted]
                if queue and queue[0][0] > now_s:  # it is read yet
                    heappush(events, (queue[0][0], number := number + 1, each, None))
                    break
                answer = ledger.begin(each, queue[0][1], now_s=now_s) if queue else "wait"
                if answer == "wait":
                    break
                _, lease = queue.pop(0)
                if answer == "now":
                    begun.append((each, lease))
                    idle.remove(each)
                    if sample_s[each] < float("inf"):
                        done_s = now_s + sample_s[each] * lease.plan.size / lease.num_parts
                        heappush(events, (done_s, number := number + 1, each, lease))
        if idle and (late_s := ledger.next_late_s(now_s)) is not None:
            heappush(events, (now_s + late_s, number := number + 1, "", None))
        assert now_s < 1e4, "nothing moves"
    return updates, begun


def by_worker(updates: list[tuple[float, Update]]) -> dict[Any, int]:
    """Returns how many parts of each worker count."""
    names = [name for _, update in updates for name in update.workers]
    return {name: names.count(name) for name in sorted(set(names))}


def equal_workers_share_evenly() -> None:
    """Of k workers each computes one part of each plan, and nobody a copy."""
    ledger = Ledger(mode="sync", num_parts=3)
    updates, begun = clocked(ledger, [3] * 10, {"a": 1.0, "b": 1.01, "c": 1.02}, most=3)
    assert len(begun) == 30 and updates[-1][0] <= 10.3
    assert max(lease.number for _, lease in begun) <= 40, "what was read is discarded"
    assert by_worker(updates[1:]) == {"a": 9, "b": 9, "c": 9}


def a_step_does_not_wait_for_the_slowest() -> None:
    """First 3 of 4: once the ledger knows the slow worker, a step takes what three fast ones take."""
    ledger = Ledger(mode="sync", num_parts=3, num_backups=1)
    updates, _ = clocked(ledger, [3] * 40, {"slow": 5.0, "a": 1.0, "b": 1.01, "c": 1.02})
    ends_s = [end_s for end_s, _ in updates]
    assert ends_s[-1] <= 40 * 1.2 and ends_s[-1] - ends_s[9] <= 30 * 1.03


def backup_workers_copy_in_every_step() -> None:
    """Four equal workers compute in every step, three parts and a copy, and none discards what it has read."""
    ledger = Ledger(mode="sync", num_parts=3, num_backups=1)
    updates, begun = clocked(ledger, [3] * 10, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0})
    assert updates[-1][0] <= 10 + 1
    for step in range(3, 10):
        assert sorted(name for name, lease in begun if lease.plan.step == step) == ["a", "b", "c", "d"]
    assert max(lease.number for _, lease in begun) <= 50, "what was read is discarded"
    ledger = Ledger(mode="sync", num_parts=2, num_backups=1)  # one stops in the midst of a part without a copy
    for epoch in range(2):
        ledger.begin_epoch(plans_of(epoch, [4], step=epoch + 1))
        leases = {name: ledger.grant(name, most=1, now_s=0.0)[0] for name in "abc"}
        assert [lease.part for lease in leases.values()] == [0, 1, 0]
        assert {ledger.begin(name, lease, now_s=1.0) for name, lease in leases.items()} == {"now"}
        assert ledger.returned("a", leases["a"], now_s=1.5) and not ledger.returned("c", leases["c"], now_s=2.0)
        if epoch == 0:
            assert ledger.returned("b", leases["b"], now_s=3.0) and ledger.take_update() is not None
    assert ledger.next_late_s(1.8) == pytest.approx(0.2) and ledger.grant("c", most=1, now_s=1.9) == []
    assert [lease.part for lease in ledger.grant("c", most=1, now_s=2.0)] == [1]


def a_slow_worker_computes_less() -> None:
    """In async each worker computes as much as it can, also at the end, where leases of the slow one go to others."""
    ledger = Ledger(mode="async")
    updates, begun = clocked(ledger, [1] * 44, {"slow": 5.0, "a": 1.0, "b": 1.01}, most=3)
    assert updates[-1][0] <= 44 / 2.2 + 2
    assert by_worker(updates) == {"a": 20, "b": 20, "slow": 4} and len(begun) == 44


def what_is_late_is_copied() -> None:
    """A stopped worker's part is computed by another after three times the usual, and what it has only read at once."""
    for mode, num_parts in (("sync", 2), ("async", 1)):
        ledger = Ledger(mode=mode, num_parts=num_parts)  # type: ignore[arg-type]
        updates, begun = clocked(ledger, [2] * 6, {"stopped": float("inf"), "a": 0.5 * num_parts}, most=3)
        assert by_worker(updates) == {"a": 6 * num_parts}
        assert [lease.plan.step for name, lease in begun if name == "stopped"] == [1]
        ends_s = [end_s for end_s, _ in updates]
        assert ends_s[-1] == pytest.approx(3.0 + 1 + 5 * 2 if mode == "sync" else 5.0 + 1, abs=1e-6), ends_s


def a_short_part_is_late_after_a_second() -> None:
    ledger = Ledger(mode="async")
    updates, _ = clocked(ledger, [1] * 3, {"stopped": float("inf"), "a": 0.01})
    assert updates[-1][0] == pytest.approx(1.02)
    ledger = Ledger(mode="async")
    ledger.begin_epoch(plans_of(0, [1] * 3, step=1))
    for begun_s, name in enumerate("abc"):
        (lease,) = ledger.grant(name, most=1, now_s=begun_s)
        assert ledger.begin(name, lease, now_s=begun_s) == "now"
    assert ledger.next_late_s(2.0) is None, "nobody knows how long a lease takes"
    assert ledger.returned("c", lease, now_s=2.1) and ledger.next_late_s(0.5) == pytest.approx(0.5)
    assert ledger.next_late_s(1.5) == pytest.approx(0.5) and ledger.next_late_s(2.0) is None


def slow_readers_get_something_done() -> None:
    """Reading takes longer than what is late: nobody takes from another what he is about to begin."""
    ledger = Ledger(mode="async")
    clocked(ledger, [1] * 3, {"a": 0.01, "b": 0.01, "c": 0.01})
    updates, begun = clocked(ledger, [1], {"a": 0.01, "b": 0.01, "c": 0.01}, read_s=4.0)
    assert updates[-1][0] == pytest.approx(4.01) and len(begun) == 1


def fewer_workers_than_parts_read_ahead_evenly() -> None:
    """Two workers for four parts compute two each, and discard nothing that they have read."""
    ledger = Ledger(mode="sync", num_parts=4)
    updates, begun = clocked(ledger, [4] * 10, {"a": 1.0, "b": 1.01})
    assert updates[-1][0] <= 10 * 2.02 + 1 and len(begun) == 40
    lost = Ledger(mode="sync", num_parts=3)  # three for three, of which one is lost in the midst
    lost.begin_epoch(plans_of(0, [3] * 4, step=1))
    for name in "abc":
        lost.grant(name, most=3, now_s=0.0)
    lost.lost("b")
    taken = [lease for name in "ac" for lease in lost.grant(name, most=9, now_s=0.0)]
    assert taken, "its leases are free"


def bounded_goes_on_and_is_bounded() -> None:
    for staleness, least_s in ((0, 30.0), (1, 15.0), (2, 10.0)):
        ledger = Ledger(mode="bounded", staleness=staleness)
        updates, _ = clocked(ledger, [1] * 30, {"a": 1.0, "b": 1.0, "c": 1.0})
        assert max(update.age for _, update in updates) == staleness
        assert updates[-1][0] == pytest.approx(least_s)
    ledger = Ledger(mode="bounded", staleness=2)
    ledger.begin_epoch(plans_of(0, [1] * 9, step=1))
    (slow,), (other,), (third,) = (ledger.grant(name, most=1, now_s=0.0) for name in ("slow", "a", "b"))
    assert [ledger.begin(*each, now_s=0.0) for each in (("slow", slow), ("a", other))] == ["now", "now"]
    assert not ledger.is_complete(other.plan.step)
    assert ledger.returned("a", other, now_s=1.0) and ledger.is_complete(other.plan.step)
    assert ledger.take_update() is not None and not ledger.is_complete(other.plan.step)
    assert ledger.begin("b", third, now_s=1.0) == "now"
    (fourth,) = ledger.grant("a", most=1, now_s=1.0)
    assert ledger.begin("a", fourth, now_s=1.0) == "wait", "the slow one would be three updates old"
    assert ledger.returned("b", third, now_s=2.0) and ledger.begin("a", fourth, now_s=2.0) == "wait"
    assert ledger.returned("slow", slow, now_s=3.0) and ledger.begin("a", fourth, now_s=3.0) == "wait"
    ages = [update.age for update in iter(ledger.take_update, None)]
    assert ages == [0, 2] and ledger.begin("a", fourth, now_s=3.0) == "now"
    ledger = Ledger(mode="bounded", staleness=2)  # a stopped one holds the others up until its part is copied
    updates, _ = clocked(ledger, [1] * 9, {"a": 0.1, "stopped": float("inf"), "b": 0.1})
    assert updates[-1][0] < 3 and by_worker(updates).keys() == {"a", "b"}


def a_late_worker_gets_a_part_at_once() -> None:
    """Whoever is first takes all parts of a plan; who comes later gets what the first could not begin yet."""
    ledger = Ledger(mode="sync", num_parts=3)
    ledger.begin_epoch(plans_of(0, [3, 3], step=1))
    first = ledger.grant("a", most=3, now_s=0.0)
    assert [lease.part for lease in first] == [0, 1, 2] and ledger.begin("a", first[0], now_s=0.1) == "now"
    (second,) = ledger.grant("b", most=1, now_s=0.2)
    (third,) = ledger.grant("c", most=1, now_s=0.2)
    assert [second[1:], third[1:]] == [first[2][1:], first[1][1:]]
    assert [ledger.begin("a", lease, now_s=0.3) for lease in first[1:]] == ["gone", "gone"]


def plans_are_drawn_as_they_are_granted() -> None:
    drawn: list[int] = []
    ledger = Ledger(mode="async")
    assert ledger.is_epoch_over and ledger.next_late_s(0.0) is None and ledger.take_update() is None
    ledger.begin_epoch(drawn.append(plan.step) or plan for plan in plans_of(0, [1] * 9, step=1))  # type: ignore[func-returns-value]
    assert len(ledger.grant("a", most=2, now_s=0.0)) == 2 and drawn == [1, 2]
    assert ledger.grant("a", most=2, now_s=0.0) == [] and not ledger.is_epoch_over


ON_A_CLOCK: tuple[Callable[[], None], ...] = (
    equal_workers_share_evenly,
    a_step_does_not_wait_for_the_slowest,
    backup_workers_copy_in_every_step,
    a_slow_worker_computes_less,
    what_is_late_is_copied,
    a_short_part_is_late_after_a_second,
    slow_readers_get_something_done,
    fewer_workers_than_parts_read_ahead_evenly,
    bounded_goes_on_and_is_bounded,
    a_late_worker_gets_a_part_at_once,
    plans_are_drawn_as_they_are_granted,
)


@pytest.mark.parametrize("check", ON_A_CLOCK, ids=lambda check: check.__name__)
def test_on_a_clock(check: Callable[[], None]) -> None:
    check()


# --- Mutants ----------------------------------------------------------------------------------------------------------

MUTANTS = {
    "a copy counts, too": ("        if part.is_counted:\n", "        if False:\n"),
    "what is not begun counts": ("if held is None or held.begun_s is None:\n", "if held is None:\n"),
    "the leases of the lost stay theirs": ("self._take_back(gone.held)", "pass"),
    "one update older": ("<= self._staleness", "<= self._staleness + 1"),
    "the youngest is what is bounded": ("self.version - min(under_way)", "self.version - max(under_way)"),
    "what is returned is not under way": ("return begun + [", "return begun or 0 * ["),
    "any plan may begin in sync": ("return each is (self._open[0] if self._open else None)", "return True"),
    "what waits comes before what may begin": ("            self._take_back(me.not_begun)", "            pass"),
    "nothing is late": ("LATE = 3.0", "LATE = 1e99"),
    "much is late": ("LATE = 3.0", "LATE = 1.5"),
    "late at once": ("LEAST_LATE_S = 1.0", "LEAST_LATE_S = 0.0"),
    "backups do not hasten": ("        if self._num_backups:\n", "        if False:\n"),
    "nothing is taken back": ("part.size / 2 and", "part.size * 1e9 and"),
    "slow readers take from each other": (" and each is not each.worker.held[0]", ""),
    "as many copies as one likes": ("each.num_copies += 1", "pass"),
    "no copies ahead": ("each.num_copies < self._num_backups", "False"),
    "who asks first takes all": ("mine < share", "True"),
    "all parts have samples": ("is_counted=begin == end", "is_counted=False"),
    "parts of samples, not of shards": ("each * self._num_shards // self._num_parts * plan", "each * plan"),
    "parts are never free again": ("each.part.holders.remove(each)", "pass"),
    "the version stands": ("self.version += 1", "pass"),
    "all is taken in one go": ("len(me.not_begun) < most", "True"),
}


def is_noticed() -> bool:
    try:
        for check in ON_A_CLOCK:
            check()
        for _ in interleavings(0, 300):
            pass
    except (AssertionError, ValueError, IndexError, TypeError, ZeroDivisionError):
        return True
    return False


@pytest.mark.slow
def test_mutants_die() -> None:
    source, survivors = inspect.getsource(module), []
    for name, (line, becomes) in MUTANTS.items():
        assert source.count(line) == 1, f"the ledger has no {line!r} any more, or more than one"
        scope: dict[str, Any] = {"__name__": module.__name__}
        exec(compile(source.replace(line, becomes), name, "exec"), scope)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "Ledger", scope["Ledger"])
            if not is_noticed():
                survivors.append(name)
    assert survivors == [], survivors
