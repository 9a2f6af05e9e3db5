"""The membership of an elastic launch: which of its processes are the ranks, from one generation to the next.

Processes have numbers, in the order in which they were started. The launcher alone decides which ones are members, so
nobody votes. Whenever one has ended, leaves or is ready to join, it writes the next generation:

    generation 0   processes 0 1 2        3 is a spare: it waits in `ddp.init`
                   1 is killed
    generation 1   processes 0 3 2        3 takes its place, at once; 4 is started
                   4 is ready, but there is no place for it
                   2 is killed, and then 0
    generation 3   processes 3 4

    launcher   `Membership`   decides, and writes
    process    `Member`       reads; a thread of it shows that the process is alive

A rank is a member's place in this list, which is ordered by *slot*: a newcomer takes the lowest free one. So a spare
gets the rank, and the GPU, of the member that was lost, and the others keep theirs.

If a member of its own generation was lost, a process gives up what it waits for, because that will never come. If not,
the members agree after a step that all of them continue in the next generation (`ddp/train/survive.py`).

Everything is in a store of this launch (`private_store.py`):

    limits          how far the launch may shrink and grow, as JSON
    generation      the latest one, as JSON; its number grows with each change of the members
    stop            the signal on which the run is to stop
    open            a fit trains, so that others may join after a step
    trains/N        process N has begun to train
    ready/N         process N waits to become a member
    leaves/N        process N asks to leave, because of the signal that this names
    alive/N         grows as long as process N runs
    closed          the program's first fit has ended: nobody joins any more, and a loss ends the run
    agreed/KEY      values of the launch, which are those of the process that was first
    folder/N        the folder of the program's fit number N

A process is silent if its alive/N does not grow and it uses no processor time: it was stopped, or hangs in the kernel.
A long compilation is not silence.

Other hosts may have launchers, too, each with one process (`run/launch/elastic.py::HelpingSupervisor`). The first
launcher serves the store then, and these keys are added:

    requests        number of requests of such launchers for the number of a process
    arrives/K       the K-th one, with the name of the host
    number/K        the answer; "" if nobody joins any more
    used/N          the processor time that process N has used, as its launcher shows
    ends/N          process N is to get this signal
    gone/N          how process N has ended: its status, and its report as JSON
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp.errors import CommunicatorBroken, ConfigError
from ddp.process.clock import PAUSED_S, Patience, now_s
from ddp.process.terminal import log
from ddp.setting import FromZero, Natural, Positive, Whole, check_values

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # at run time this module stays without torch

STORE = "membership"  # where they meet, in the private folder of a launch
POLL_S, ALIVE_S, LATE_S, WAIT_S = 0.05, 0.5, 3.0, 1.0
RESIZE = "resize"
"""Why the members stop after a step, to continue in the next generation."""

Culprit = tuple[int, str]  # a rank, and how it was lost


class Hosts(NamedTuple):
    """The place at which the launchers and processes of several hosts meet: the first launcher serves the store there.

    Attributes:
        store: of the membership.
        served: the whole store, on the launcher that serves it.
    """

    address: str
    port: int
    store: Store
    served: object = None


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """The limits within which a launch shrinks and grows.

    Attributes:
        min_workers: fewest members that train.
        workers: members at the start.
        spares: further processes, which wait.
        max_workers: most members.
        wait_s: how long fewer members than `min_workers` wait for others.
        silent_s: a process that is silent for so long is killed.
    """

    min_workers: Natural
    workers: Natural
    spares: Whole = 0
    max_workers: Natural
    wait_s: FromZero = 300.0
    silent_s: Positive = 30.0

    def __post_init__(self) -> None:
        check_values(self)
        if self.min_workers > self.workers:
            what = f"min_workers={self.min_workers}: is more than workers={self.workers}"
            raise ConfigError(f"{what}; take at most {self.workers}")
        if self.max_workers < self.workers:
            what = f"max_workers={self.max_workers}: is less than workers={self.workers}"
            raise ConfigError(f"{what}; take {self.workers} or more")


def elastic(*, min_workers: int | None, workers: int, max_workers: int | None = None, **given: Any) -> Elastic | None:
    """Returns how far a launch may shrink and grow; None if it keeps its workers.

    Args:
        given: further ones of `Elastic`.

    Raises:
        ConfigError: a number is out of its bounds, or they contradict each other.
    """
    most = workers if max_workers is None else max_workers
    if min_workers is not None:
        return Elastic(min_workers=min_workers, workers=workers, max_workers=most, **given)
    for name, value, usual in (("spares", given.get("spares", 0), 0), ("max_workers", most, workers)):
        if value != usual:
            raise ConfigError(f"{name}={value}: workers come and go only with min_workers; set it to 1 or more")
    return None


@dataclass(frozen=True)
class Generation:
    """One version of the membership.

    Attributes:
        number: from 0.
        members: by rank, the process.
        ended: by process, how those were lost that have been members.
        num_joined, num_left: processes that have joined since the start, and that have left in agreement.
    """

    number: int
    members: list[int]
    ended: dict[int, str]
    num_joined: int
    num_left: int

    def counts(self) -> dict[str, int]:
        """Returns how often the workers have changed, by the names in summary.json."""
        return {"workers_lost": len(self.ended), "workers_joined": self.num_joined, "workers_left": self.num_left}

    @staticmethod
    def read(text: str | bytes) -> Generation:
        """Returns the generation from its published JSON."""
        plain = json.loads(text)
        return Generation(**{**plain, "ended": {int(process): how for process, how in plain["ended"].items()}})


# --- The launcher ----------------------------------------------------------------------------------------------------


class Membership:
    """Decides who the members are. Only the launcher has one.

    Args:
        store: of the launch.
        running: the processes that run, by number, with something else; it keeps changing.

    Attributes:
        latest: the latest generation.
        stopped_by: the signal on which the run is to stop; "".
        is_closed: no process joins any more, and a loss ends the run.
    """

    def __init__(self, store: Store, limits: Elastic, running: Mapping[int, object]) -> None:
        self._store, self._limits, self._running = store, limits, running
        self._slots = {slot: slot for slot in range(limits.workers)}  # slot → process
        self._asked: dict[int, float] = {}  # members that leave, and when they have asked to
        self._signs: dict[int, tuple[object, float]] = {}  # by process, the last one, and since when it is the same
        self._looked_s, self._warned, self._answered = now_s(), set[int](), set[int]()
        self.latest, self.is_closed, self.stopped_by = Generation(0, list(range(limits.workers)), {}, 0, 0), False, ""
        store.set("limits", json.dumps(asdict(limits)))
        self._publish()

    @property
    def waits(self) -> bool:
        """Returns True if the members are too few to train."""
        return len(self.latest.members) < self._limits.min_workers

    def lost(self, process: int, how: str) -> bool:
        """Takes a member out that has ended. Returns False if the run cannot go on without it.

        Args:
            how: as in "was killed by SIGKILL"; "" if its work is done.
        """
        if not how:
            self.is_closed = True
            self._slots = {slot: each for slot, each in self._slots.items() if each != process}
        elif not self.is_closed:
            self._change(ended={**self.latest.ended, process: how}, without=process)
        return not how or not self.is_closed

    def has_asked(self, process: int) -> bool:
        """Returns True if a process has asked to leave."""
        return process in self._asked or self._store.check([f"leaves/{process}"])

    def look(self) -> None:
        """Takes note of what the processes ask for: to join, to leave, to be left alone."""
        self.is_closed = self.is_closed or self._store.check(["closed"])
        for process in () if self.stopped_by else self.latest.members:
            if process not in self._asked and self.has_asked(process):
                self._asked[process] = now_s()
                self._leave(process, self._store.get(f"leaves/{process}").decode())
        if self._store.check(["open"]) and self._free_slots() and self._ready():
            self._change()

    def silent(self, cpu_time: Callable[[int], object]) -> list[int]:
        """Returns the processes that have been silent for too long; warns of each earlier.

        Args:
            cpu_time: returns the processor time that a process has used.
        """
        now, limit_s, silent = now_s(), self._limits.silent_s, []
        if now - self._looked_s > PAUSED_S:  # this process was paused, and perhaps all others
            self._signs.clear()
        self._looked_s = now
        for process in self._running:
            sign = read_key(self._store, f"alive/{process}"), cpu_time(process)
            before, since_s = self._signs.get(process, (None, now))
            if sign != before:
                since_s = now
                self._warned.discard(process)
            elif now - since_s >= limit_s:
                silent.append(process)
            elif now - since_s >= limit_s / 3 and process not in self._warned:
                self._warned.add(process)
                log.warning(
                    "process %d shows no sign of life for %.0f s; it is killed after %.0f s",
                    *(process, now - since_s, limit_s),
                )
            self._signs[process] = sign, since_s
        return silent

    def trained(self) -> list[int]:
        """Returns the members that have trained; all of them in a program without a fit."""
        has_fit = self._store.check(["open"])
        return [each for each in self.latest.members if not has_fit or self._store.check([f"trains/{each}"])]

    def stop(self, by: str) -> None:
        """Lets the whole run stop, by this signal."""
        if not self.stopped_by:
            self.stopped_by = by
            self._store.set("stop", by)

    # On other hosts

    def arrivals(self) -> Iterator[tuple[int, str]]:
        """Yields each new request for the number of a process on another host, and the name of that host."""
        most = self._store.add("requests", 0) if self._store.check(["requests"]) else 0
        for request in {*range(1, most + 1)} - self._answered:  # one may have ended before it has said its name
            if self._store.check([f"arrives/{request}"]):
                yield request, self._store.get(f"arrives/{request}").decode()

    def answer(self, request: int, number: int | None) -> None:
        """Answers such a request; None: nobody joins any more."""
        self._answered.add(request)
        self._store.set(f"number/{request}", "" if number is None else str(number))

    def time_used(self, process: int) -> str:
        """Returns the processor time that a process on another host has used."""
        return read_key(self._store, f"used/{process}")

    def gone(self, process: int) -> dict[str, Any] | None:
        """Returns how a process on another host has ended: its `status` and `report`; None while it runs."""
        found: dict[str, Any] | None = json.loads(read_key(self._store, f"gone/{process}") or "null")
        return found

    def end(self, process: int, by: str) -> None:
        """Lets the launcher of a process on another host send it this signal."""
        self._store.set(f"ends/{process}", by)

    def _leave(self, process: int, by: str) -> None:
        """Lets a member leave, or the run stop, because too few would stay of those that were asked about together."""
        now, limits = now_s(), self._limits
        together = {each for each, asked_s in self._asked.items() if now - asked_s <= limits.silent_s}
        if len({*self.latest.members} - together) + len(self._ready()) < limits.min_workers:
            self.stop(by)
        else:
            self._change(num_left=self.latest.num_left + 1, without=process)

    def _ready(self) -> list[int]:
        """Returns the processes that wait to become members."""
        if self.is_closed or self.stopped_by:
            return []
        known = {*self._slots.values(), *self._asked}
        return [each for each in sorted(self._running) if each not in known and self._store.check([f"ready/{each}"])]

    def _free_slots(self) -> list[int]:
        return [slot for slot in range(self._limits.max_workers) if slot not in self._slots]

    def _change(self, *, without: int | None = None, **changes: Any) -> None:
        """Writes the next generation: without a process, and with those that are ready."""
        self._slots = {slot: each for slot, each in self._slots.items() if each != without}
        joining = dict(zip(self._free_slots(), self._ready(), strict=False))
        self._slots |= joining
        members, num_joined = [self._slots[slot] for slot in sorted(self._slots)], self.latest.num_joined + len(joining)
        number = self.latest.number + 1
        self.latest = replace(self.latest, number=number, members=members, num_joined=num_joined, **changes)
        self._publish()

    def _publish(self) -> None:
        self._store.set("generation", json.dumps(asdict(self.latest)))


def rank_variables(rank: int, world_size: int, *, on_one_host: bool) -> dict[str, str]:
    """Returns the variables that say which rank a process is, as torchrun sets them.

    Args:
        on_one_host: all ranks are there; else those of a host count each other.
    """
    kinds = ("", "LOCAL_", "ROLE_") if on_one_host else ("",)
    return {f"{of}{name}": str(value) for of in kinds for name, value in (("RANK", rank), ("WORLD_SIZE", world_size))}


def read_key(store: Store, key: str) -> str:
    """Returns a key's value; "" if it has none."""
    return str(store.get(key).decode()) if store.check([key]) else ""


# --- A process -------------------------------------------------------------------------------------------------------


@dataclass
class Member:
    """This process's part in the membership.

    Args:
        store: of the launch; a connection of its own.
        number: of the process.
        launcher: the id of this process's parent, which decides; None: another host's launcher may do so.

    Attributes:
        limits: how far the launch may shrink and grow.
        latest: the latest generation.
        stopped_by: the signal on which the run is to stop; "".
        entered: the generation that this process has entered last; None: none.
        on_news: called after each change of these, on another thread.
        asked: the signal because of which it has asked to leave; "".
        trains: it has begun to train.
        is_closed: the program's first fit has ended, perhaps before this process has met the others.
    """

    store: Store
    number: int
    launcher: int | None
    limits: Elastic = field(init=False)
    latest: Generation = field(init=False)
    stopped_by: str = ""
    entered: Generation | None = None
    on_news: Callable[[], object] = bool
    asked: str = ""
    trains: bool = False
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.limits = Elastic(**json.loads(self.store.get("limits")))
        self.latest = Generation.read(self.store.get("generation"))
        self._news = threading.Event()
        self._tick, self._next_s = 0, 0.0
        self.thread = threading.Thread(target=_follow, args=(weakref.ref(self),), name="ddp-member", daemon=True)
        self.thread.start()

    def show(self) -> None:
        """Shows that this process is alive."""
        if now_s() >= self._next_s:
            self._tick, self._next_s = self._tick + 1, now_s() + ALIVE_S
            self.store.set(f"alive/{self.number}", str(self._tick))

    def look(self) -> None:
        """Reads the latest generation, and whether the run is to stop."""
        found = Generation.read(self.store.get("generation"))
        stopped_by = read_key(self.store, "stop")
        self.is_closed = self.is_closed or self.store.check(["closed"])
        if found.number > self.latest.number or stopped_by != self.stopped_by:
            self.latest, self.stopped_by = found, stopped_by
            self._news.set()
            self.on_news()

    @property
    def lost(self) -> Culprit | None:
        """Returns a rank of the entered generation that has been lost since, and how."""
        latest, mine = self.latest, self.entered
        for rank, process in enumerate(() if mine is None else mine.members):
            if (how := latest.ended.get(process)) is not None:
                return rank, f"it {how}"
        return None

    @property
    def is_superseded(self) -> bool:
        """Returns True if the members are no longer those of the entered generation."""
        return self.entered is not None and self.latest.number > self.entered.number

    def has_news(self, within_s: float | None = None) -> bool:
        """Returns True once there are other members than those of the entered generation; False if that takes long.

        Args:
            within_s: longest wait; None: the launcher sees a silent process after `silent_s`.
        """
        patience = Patience(self.limits.silent_s + LATE_S if within_s is None else within_s)
        while not self.is_superseded and patience.left_s():
            time.sleep(POLL_S)
        return self.is_superseded

    def enter(self, *, is_later: bool = False) -> Generation:
        """Enters the latest generation, once this process is a member; sets the variables that say which rank it is.

        Args:
            is_later: wait for another one than the entered one, because that has lost a member.

        Raises:
            SystemExit: this process has left, or is not needed any more.
            CommunicatorBroken: the launcher knows of no lost member.
        """
        if is_later and not self.has_news():
            raise CommunicatorBroken("a collective has failed, but no worker has ended, so there is no next generation")
        self._news.clear()
        self.look()
        while self.number not in (latest := self.latest).members:
            if self.entered is not None:
                raise SystemExit(128 + signal.Signals[read_key(self.store, f"leaves/{self.number}") or "SIGKILL"])
            if self.stopped_by:
                raise SystemExit(0)
            if not self.store.check([f"ready/{self.number}"]):
                self.store.set(f"ready/{self.number}", "")
            self._news.wait(WAIT_S)
            self._news.clear()
        self.entered, rank, size = latest, latest.members.index(self.number), len(latest.members)
        os.environ.update(rank_variables(rank, size, on_one_host=self.launcher is not None))
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(latest.number)
        return latest

    def ask_to_leave(self, by: str) -> bool:
        """Asks to leave, because of this signal. Returns False if nobody decides any more."""
        if self.launcher not in (None, os.getppid()):
            return False
        try:
            self.store.set(f"leaves/{self.number}", by)
        except Exception as error:  # the store has ended with the launcher that served it
            log.debug("membership: the store is out of reach: %s", error)
            return False
        self.asked = by
        return True

    def agreed(self, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of the launch for a key: those that were given first."""
        if not self.store.check([f"agreed/{key}"]):
            self.store.set(f"agreed/{key}", json.dumps(dict(values)))
        found: dict[str, Any] = json.loads(self.store.get(f"agreed/{key}"))
        return found

    def open(self) -> None:
        """Lets others join after a step, because a fit trains."""
        self.trains = True
        self.store.set(f"trains/{self.number}", "")
        self.store.set("open", "")

    def close(self) -> None:
        """Ends the joining of processes, because the program's first fit has ended."""
        self.store.set("closed", "")


def _follow(member: weakref.ref[Member]) -> None:
    """Lets a process read each new generation, and show that it is alive, as long as it has a part in the launch."""
    while not _program_ends.wait(POLL_S) and (here := member()) is not None:
        try:
            here.look()
            here.show()
        except Exception as error:  # the launch has ended
            log.debug("membership: the store is out of reach: %s", error)
            if here.launcher is None:
                return  # it does not come back, and torch would print each try
        del here


_mine: Member | None = None
_program_ends = threading.Event()


@atexit.register
def _end_following() -> None:
    """Ends the thread: one that returns from torch's store while the interpreter exits would abort the process."""
    _program_ends.set()
    if _mine is not None:
        _mine.thread.join(timeout=1)


def current_member() -> Member | None:
    """Returns this process's part in the membership of its launch; None outside of an elastic one."""
    return _mine


def join_membership(store: Store, number: int, *, launcher: int | None) -> Member:
    """Makes this process one that may become a member; see `Member`."""
    global _mine
    _mine = Member(store, number, launcher)
    return _mine


def leave_if_late() -> None:
    """Ends this process if it was to join ranks whose fit has ended meanwhile."""
    if _mine is not None and _mine.is_closed and not _mine.trains:
        raise SystemExit(0)


def is_resized() -> bool:
    """Returns True in a generation of an elastic launch after the first one."""
    return _mine is not None and _mine.entered is not None and _mine.entered.number > 0


def lost_member(ranks: Sequence[int] = ()) -> Culprit | None:
    """Returns a rank that has been lost, and how, as the launcher says; None outside of an elastic launch.

    Args:
        ranks: of a group, in which ranks have other numbers; a rank that is not in it ends its waits, too.
    """
    if _mine is None or (lost := _mine.lost) is None:
        return None
    rank, how = lost
    if not ranks:
        return lost
    return (list(ranks).index(rank), how) if rank in ranks else (0, f"rank {rank} of all was lost: {how}")


def is_superseded() -> bool:
    """Returns True if the ranks of this process's generation will not all arrive, because there is a later one."""
    return _mine is not None and _mine.is_superseded
