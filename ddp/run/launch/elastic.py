"""Elastic launches (`min_workers`): processes are lost, leave and join, and the others go on.

The supervisor of an elastic launch decides by `comm/meeting/membership.py` who the ranks are:

| who     | how it ends                            | what follows                                                     |
|---------|----------------------------------------|------------------------------------------------------------------|
| a member| by a signal, or because others are lost| a spare takes its place; a process is started again in its       |
|         |                                        | place, `restarts` times, and joins when it is ready              |
|         | it has shown no sign of life           | it is killed, and then the same                                  |
|         | its program raised                     | the run has failed: all others are asked to stop                 |
|         | well                                   | the run is ending: nobody joins any more, and a loss ends it     |
| another | in any way                             | nothing; if it was lost, it is started again, `restarts` times   |

Other hosts may have a launcher, too, which runs one process (`cluster.role=worker`):

    first launcher   `ElasticSupervisor`   serves the store, decides, and treats the process as one of its own
    any other one    `HelpingSupervisor`   starts the process, signals it as the first one asks, and tells that one what
                                           processor time it has used, and how it has ended

If the first launcher does not hear of a process and its launcher for `silent_s`, the process counts as lost. If another
launcher does not reach the store for so long, it kills its process: the ranks have gone on without it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ddp.comm.meeting.membership import ALIVE_S, Elastic, Membership, read_key
from ddp.comm.meeting.role import Role
from ddp.errors import ConfigError, first_line
from ddp.process.clock import Patience, now_s, within
from ddp.process.records import made
from ddp.process.terminal import log
from ddp.run.launch.failures import Failure, Report, Seat
from ddp.run.launch.supervisor import SHUTDOWN_S, Ended, Events, Running, Supervisor, end_text
from ddp.units import counted

CALM_S = 3.0
"""A process is started this much later in a lost one's place, because its imports would slow the others' recovery."""
LEAVE_S = 10.0  # once the members have ended, for those that have waited for nothing
POLL_S = 0.05

T = TypeVar("T")


class _Elsewhere:
    """A process on another host, whose launcher signals it, and says how it ends."""

    pid = 0

    def wait(self) -> NoReturn:
        raise AssertionError("its launcher waits for it")


class ElasticSupervisor(Supervisor):
    """The parent of an elastic launch: ranks come and go.

    Args:
        commands, roles: of the processes at the start.
        again: the command of any further process.
        store: of the membership.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        roles: Sequence[Role],
        events: Events,
        *,
        elastic: Elastic,
        store: Any,
        again: Sequence[str],
        **how: Any,
    ) -> None:
        spares = range(elastic.spares)
        super().__init__([*commands, *(again for _ in spares)], [*roles, *(roles[0] for _ in spares)], events, **how)
        self._again, self._num_restarts = again, dict.fromkeys(self._roles, 0)  # of each, and of those before it
        self._membership = Membership(store, elastic, self._running)
        self._waiting: dict[int, Patience] = {}  # processes that are started later

    def run(self) -> Ended:
        return super().run()._replace(members=self._membership.trained())

    def _look(self) -> None:
        membership, before = self._membership, self._membership.latest
        membership.look()
        latest = membership.latest
        left = [each for each in before.members if each not in (*latest.members, *latest.ended)]
        joined = [each for each in latest.members if each not in before.members]
        for what, processes in (("has left", left), ("has joined", joined)):
            for process in processes:
                self._tell(f"process {process} {what}")
        self._meet_others()
        for process in membership.silent(self._time_used):
            log.warning("process %d has shown no sign of life for too long, and is killed", process)
            self._signal(signal.SIGKILL, [process])
        if self._over is None and not membership.is_closed:
            self._start_waiting()
        self._kill_overdue()
        for process in self._killed & self._running.keys():
            if self._is_elsewhere(process):  # perhaps its launcher is out of reach, too
                self._end_of(process, -signal.SIGKILL)

    def _meet_others(self) -> None:
        """Takes note of the processes on other hosts, of those that come and of those that have ended."""
        for request, host in self._membership.arrivals():
            if self._over is not None or self._membership.is_closed:
                self._membership.answer(request, None)
                continue
            number = self._new(self._restarts)  # its own launcher restarts it
            self._running[number] = Running(self._roles[number], _Elsewhere(), now_s())
            log.info("process %d is started on host %s", number, host)
            self._membership.answer(request, number)
        for process in filter(self._is_elsewhere, list(self._running)):
            if (gone := self._membership.gone(process)) is not None:
                if gone["report"] is not None:
                    made(Report, gone["report"]).write(self._logs)
                self._end_of(process, gone["status"])

    def _is_elsewhere(self, process: int) -> bool:
        return isinstance(self._running[process].process, _Elsewhere)

    def _time_used(self, process: int) -> object:
        if self._is_elsewhere(process):
            return self._membership.time_used(process)
        return _cpu_time(self._running[process].process.pid)

    def _send(self, number: signal.Signals, rank: int) -> None:
        if self._is_elsewhere(rank):
            self._membership.end(rank, number.name)
        else:
            super()._send(number, rank)

    def close(self) -> None:
        for process in filter(self._is_elsewhere, list(self._running)):
            self._send(signal.SIGKILL, process)
            del self._running[process]
        super().close()

    def _new(self, num_restarts: int) -> int:
        """Returns the number of a further process, before which others had it so many times."""
        number = len(self._commands)
        self._commands[number], self._roles[number] = self._again, self._roles[0]
        self._num_restarts[number] = num_restarts
        return number

    def _end_of(self, rank: int, status: int) -> None:
        self._running.pop(rank)
        membership, before = self._membership, self._membership.latest.members
        report = Report.read(Seat(self._logs, rank)) if status else None
        is_lost = status != 0 and status - 128 not in self._stops and (report is None or report.is_secondary)
        membership.look()
        has_asked = membership.has_asked(rank)
        if is_lost and self._over is None and not membership.is_closed:
            self._end_of_lost(rank, end_text(status, report), before, is_wanted=not has_asked)
            if not self._running:
                self._fail({rank: Failure(status, time.time())})
        elif rank in before:
            membership.lost(rank, end_text(status, report) if is_lost else "")  # in a stop, too
            self._end_of_rank(rank, status)
        elif report is not None and not is_lost:
            log.warning("process %d %s; the others continue without it", rank, end_text(status, report))
        if membership.is_closed and not self._running.keys() & set(membership.latest.members):
            self._end_within(LEAVE_S)
            self._signal(signal.SIGTERM, self._running)  # which have waited for nothing

    def _end_of_lost(self, rank: int, how: str, before: Sequence[int], *, is_wanted: bool) -> None:
        """Lets the others continue without a lost process, and starts another one in its place, if that is wanted."""
        membership = self._membership
        if rank in before or not is_wanted:  # one that leaves has still a part in the step that is running
            membership.lost(rank, how)
        if membership.waits:
            self._waiting = {number: Patience(0.0) for number in self._waiting}
        joined = [each for each in membership.latest.members if each not in before]
        then = [f"process {each} took its place" for each in joined]
        if is_wanted and (used := self._num_restarts[rank]) < self._restarts:
            number = self._new(used + 1)
            self._waiting[number] = Patience(0.0 if membership.waits else CALM_S)
            then.append(f"process {number} is started ({used + 1} of {self._restarts})")
        self._start_waiting()
        self._tell("; ".join([f"process {rank} {how}", *then]))

    def _start_waiting(self) -> None:
        for number in [each for each, patience in self._waiting.items() if not patience.left_s()]:
            del self._waiting[number]
            self._start(number)

    def _tell(self, what: str) -> None:
        """Prints one line about a change of the membership."""
        latest = self._membership.latest
        num, s = counted(len(latest.members), "worker"), "s" if len(latest.members) == 1 else ""
        go_on = f"{num} wait{s} for others" if self._membership.waits else f"{num} train{s}"
        log.warning("%s; %s (generation %d)", what, go_on, latest.number)

    def _pass_on(self, number: signal.Signals) -> None:
        self._membership.stop(number.name)
        super()._pass_on(number)


class HelpingSupervisor(Supervisor):
    """The parent of one process on another host than the launcher that decides.

    Args:
        command: of the process.
        store: of the membership.
        restarts: how often another process is started in the place of a lost one.
        silent_s: longest silence of the store.
    """

    def __init__(
        self, command: Sequence[str], events: Events, store: Any, *, restarts: int, logs: Path, silent_s: float
    ) -> None:
        super().__init__([], [], events, restarts=restarts, logs=logs)
        self._command, self._store, self._silent_s = command, store, silent_s
        self._next_s = 0.0
        self._waiting: Patience | None = Patience(0.0)  # before the process is started, or another one
        self._passed = dict[int, str]()  # by process, the last signal that was asked for
        self._is_reachable = True

    def run(self) -> Ended:
        return super().run()._replace(is_cut_off=not self._is_reachable)

    @property
    def _has_ended(self) -> bool:
        return not self._running and self._waiting is None

    def _pass_on(self, number: signal.Signals) -> None:
        self._waiting = None
        super()._pass_on(number)

    def _start_another(self) -> None:
        """Starts the process, once the first launcher has given it a number.

        Raises:
            ConfigError: nobody joins any more.
        """
        self._waiting, number = None, self._ask(self._number)
        if number == "":
            raise ConfigError("cluster.role=worker: the run is ending, and nobody joins any more; start a new run")
        if number is not None:
            self._commands[int(number)], self._roles[int(number)] = self._command, Role("worker", 0, 1, 0, self._store)
            self._start(int(number))

    def _number(self) -> str:
        request = self._store.add("requests", 1)
        self._store.set(f"arrives/{request}", socket.gethostname())
        while not self._store.check([f"number/{request}"]):
            time.sleep(POLL_S)
        return str(self._store.get(f"number/{request}").decode())

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Returns the result of a call to the store; kills the process, and returns None, if that is out of reach."""
        if not self._is_reachable:
            return None
        try:
            return within(self._silent_s, call)
        except Exception as error:  # of the store, or of the time
            self._is_reachable, self._waiting = False, None
            log.warning("the launcher that has begun the run is out of reach (%s); this host leaves", first_line(error))
            is_cut_off = isinstance(error, TimeoutError)  # if not, that launcher has ended, and the ranks stop together
            self._end_within(0.0 if is_cut_off else SHUTDOWN_S)
            self._signal(signal.SIGKILL if is_cut_off else signal.SIGTERM, list(self._running))
            return None

    def _look(self) -> None:
        wanted = self._ask(self._show) or {}
        for process, by in wanted.items():
            if self._passed.get(process) != by:
                self._passed[process] = by
                self._signal(signal.Signals[by], [process])
        if self._waiting is not None and not self._waiting.left_s():
            self._start_another()
        self._kill_overdue()

    def _show(self) -> dict[int, str]:
        """Shows what time the processes have used; returns by process the signal that it is to get."""
        if now_s() >= self._next_s:
            self._next_s = now_s() + ALIVE_S
            for process, each in self._running.items():
                self._store.set(f"used/{process}", str(_cpu_time(each.process.pid)))
        asked = {process: read_key(self._store, f"ends/{process}") for process in self._running}
        return {process: by for process, by in asked.items() if by}

    def _end_of(self, rank: int, status: int) -> None:
        self._running.pop(rank)
        report = Report.read(Seat(self._logs, rank)) if status else None
        gone = {"status": status, "report": report and asdict(report)}
        is_closed = self._ask(partial(self._tell, rank, json.dumps(gone)))
        is_lost = status != 0 and status - 128 not in self._stops and (report is None or report.is_secondary)
        if is_closed and status == -signal.SIGTERM:
            log.warning("process %d had not begun to train when the run ended", rank)
        elif is_lost and not is_closed and self._over is None and self._restarts:
            self._restarts -= 1
            self._waiting = Patience(CALM_S)
            log.warning("process %d %s; another one is started", rank, end_text(status, report))
        elif status and self._got is None and self._is_reachable:
            self._failures[rank] = Failure(status, time.time())

    def _tell(self, process: int, how: str) -> bool:
        """Says how a process has ended. Returns True if it is not to be replaced."""
        is_asked = read_key(self._store, f"ends/{process}") == signal.SIGTERM.name
        is_closed = is_asked or any(self._store.check([key]) for key in ("closed", "stop", f"leaves/{process}"))
        self._store.set(f"gone/{process}", how)  # last, because the first launcher may wait for this alone
        return is_closed


def _cpu_time(pid: int) -> Any:
    """Returns the processor time that a process has used, in the kernel's units; None where it does not say."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return None
