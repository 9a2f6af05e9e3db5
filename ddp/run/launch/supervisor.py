"""Supervises workers and servers, each in its own process, and says how they ended.

A process is a plain `subprocess` (`worker.py`), in its own session, with a thread that waits for it.

| who     | how it ends                            | what follows                                                     |
|---------|----------------------------------------|------------------------------------------------------------------|
| a rank  | badly                                  | the run has failed: all others are asked to stop                 |

In an elastic launch (`min_workers`), the others go on: `elastic.py`.

With servers, one may end without the others:

| who     | how it ends                            | what follows                                                     |
|---------|----------------------------------------|------------------------------------------------------------------|
| a worker| by a signal, or because others are lost| it is restarted, `restarts` times; then the others continue      |
|         | by what the servers' fit has raised    | the run has failed, and the servers say why                      |
| a server| by a signal, or because others are lost| all servers are restarted together, `restarts` times, unless all |
|         |                                        | workers have done their work                                     |
| either  | its program raised                     | the run has failed: all others are asked to stop                 |
| servers | well                                   | the run is done; a worker that continues is killed later         |

A restarted server resumes from the run's last checkpoint. As soon as the kernel reports the end of a process, it is
published in the store in which servers and workers meet (`comm/meeting/role.py`). The store is files in the private
folder of the launch (`private_store.py`), so it outlives every process, and no other user reaches it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from ddp.comm.meeting.role import Job, Role, publish_end
from ddp.process.clock import Patience, now_s
from ddp.process.files import make_folder, to_append
from ddp.process.memory import available_cores
from ddp.process.memory import variables as memory_variables
from ddp.process.terminal import log, say
from ddp.run.launch.failures import Failure, Report, Seat, status_text
from ddp.run.settings.config import Config
from ddp.train.steps.stopping import ECHO_S, hears_signals, stop_signals

LEAVE_S, START_S = 10.0, 60.0
"""Once the servers have ended, workers have LEAVE_S to end, too, but at least until START_S after their start, because
on a busy host a short run may be over before a worker has joined."""
FOLLOW_S = 5.0
"""After one server's end because of another, that other has this long to report why; after a rank's agreed stop, the
other ranks have this long to leave."""
LOST = ("PeerLost", "CommunicatorBroken")  # exceptions after which a worker can be restarted
POLL_S = 0.25  # between two looks at what is due
SETTINGS = "config.yaml"  # of a run, in the private folder of its launch


class Ended(NamedTuple):
    """The end of all workers.

    Attributes:
        signal: the one that the parent got.
        failures: by number, in order of discovery.
        members: by rank, the numbers of the last members of an elastic launch; None in another one.
        is_cut_off: this launcher helped another one, which it has lost.
    """

    signal: signal.Signals | None
    failures: Mapping[int, Failure]
    members: Sequence[int] | None = None
    is_cut_off: bool = False


class Process(Protocol):
    """A process that has been started, in its own session."""

    pid: int

    def wait(self) -> int:
        """Returns its status once it has ended; a negative one is a signal."""


def started(words: Sequence[str]) -> Process:
    """Starts a process by the words after `env`."""
    return subprocess.Popen(["env", *words], start_new_session=True)


class End(NamedTuple):
    rank: int
    status: int


Events = SimpleQueue[End | signal.Signals]


class Running(NamedTuple):
    """A running process and its role."""

    role: Role
    process: Process
    since_s: float


class Supervisor:
    """The parent of all processes: starts them, and handles the end of each and every signal.

    Args:
        commands: by number, the words after `env`, but for a process's number and incarnation.
        roles: by number, the role of each process as it is first started.
        events: gets the signals of this process.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], roles: Sequence[Role], events: Events, *, restarts: int, logs: Path
    ) -> None:
        self._commands, self._roles = dict(enumerate(commands)), dict(enumerate(roles))
        self._events, self._restarts, self._logs = events, restarts, logs
        self._num_servers, self._stops = roles[0].num_servers if roles else 0, stop_signals()
        self._running: dict[int, Running] = {}
        self._failures: dict[int, Failure] = {}
        self._has_finished_worker = False  # so the servers may need no other worker
        self._got: tuple[signal.Signals, float] | None = None  # the first signal, and when it came
        self._over: Patience | None = None  # once the run is over: with the processes that still run
        self._lost: dict[int, Failure] = {}  # servers, which are started again once all have ended
        self._losing: Patience | None = None  # meanwhile: with the other servers
        self._killed: set[int] = set()  # by this process

    def run(self) -> Ended:
        """Returns once all have ended, and none is to be started again."""
        for rank in list(self._roles):
            self._start(rank)
        while not self._has_ended:
            try:
                event = self._events.get(timeout=POLL_S)
            except Empty:
                self._look()
                continue
            if isinstance(event, End):
                self._end_of(event.rank, event.status)
            elif event is not signal.SIGCONT:
                self._pass_on(event)
        return Ended(self._got[0], {}) if self._got else Ended(None, self._failures)

    @property
    def _has_ended(self) -> bool:
        return not self._running

    def _look(self) -> None:
        """Does what is due, whenever nothing has happened for a while."""
        self._kill_overdue()

    def close(self) -> None:
        """Kills whatever still runs, after an error here, and waits for its end."""
        self._signal(signal.SIGKILL, list(self._running))
        while self._running:
            if isinstance(event := self._events.get(), End):
                del self._running[event.rank]

    def _start(self, rank: int, incarnation: int = 0) -> None:
        role = replace(self._roles[rank], incarnation=incarnation)
        self._killed.discard(rank)
        process = started([*self._commands[rank], "--rank", str(rank), "--incarnation", str(incarnation)])
        self._running[rank] = Running(role, process, now_s())

        def wait() -> None:
            self._events.put(End(rank, process.wait()))

        threading.Thread(target=wait, name=f"ddp-waits-for-{role.job}-{role.index}", daemon=True).start()

    def _start_again(self, rank: int, incarnation: int) -> None:
        Seat(self._logs, rank, self._num_servers).report.unlink(missing_ok=True)
        self._start(rank, incarnation)

    def _of(self, job: Job) -> list[int]:
        """Returns the numbers of the servers, or workers, that run."""
        return [rank for rank, each in self._running.items() if each.role.job == job]

    def _signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        if number is signal.SIGKILL:
            self._killed.update(ranks)
        for rank in ranks:
            self._send(number, rank)

    def _send(self, number: signal.Signals, rank: int) -> None:
        for each in (number, signal.SIGCONT):  # because one that is stopped answers no other signal
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running[rank].process.pid, each)

    # --- the end of a process ----------------------------------------------------------------------------------------

    def _end_of(self, rank: int, status: int) -> None:
        role = self._running.pop(rank).role
        if not self._num_servers:
            self._end_of_rank(rank, status)
            return
        report = Report.read(Seat(self._logs, rank, self._num_servers)) if status else None
        publish_end(role, end_text(status, report) if status else "")
        if report is not None and not report.is_secondary:
            self._fail({rank: Failure(status, time.time())})
        elif role.job == "server":
            self._end_of_server(role, status, report)
        elif status == 0:
            self._has_finished_worker = True
        elif report is not None and report.type not in LOST:
            self._failures[rank] = Failure(status, time.time())
        elif self._over is None:
            self._end_of_worker(role, status, report)

    def _end_of_rank(self, rank: int, status: int) -> None:
        """Ends the others once a rank has failed. After an agreed stop they end by themselves."""
        if status - 128 in self._stops and self._over is None:
            self._failures[rank] = Failure(status, time.time())
            self._losing = self._losing or Patience(FOLLOW_S)
        elif status:
            self._fail({rank: Failure(status, time.time())})

    def _end_of_worker(self, role: Role, status: int, report: Report | None) -> None:
        """Restarts a lost worker, or continues without it."""
        rank = self._num_servers + role.index
        if role.incarnation < self._restarts:
            _say(role, status, report, f"it is started again ({role.incarnation + 1} of {self._restarts})")
            self._start_again(rank, role.incarnation + 1)
        elif self._of("worker") or self._has_finished_worker:
            _say(role, status, report, "the others continue without it")
        else:
            self._fail({rank: Failure(status, time.time())})

    def _end_of_server(self, role: Role, status: int, report: Report | None) -> None:
        """Restarts all servers once one is lost, or ends the run with the last of them."""
        if self._over is None and status - 128 in self._stops:  # it got this by itself, outside of training
            self._pass_on(signal.Signals(status - 128))
        elif self._over is None and status:
            if self._losing is None:
                who = "it is" if self._num_servers == 1 else "all servers are"
                if self._may_start_again(role):
                    _say(role, status, report, f"{who} started again ({role.incarnation + 1} of {self._restarts})")
                self._losing = Patience(FOLLOW_S)
            if role.index not in self._killed:
                self._lost[role.index] = Failure(status, time.time())
            if report is None:  # the others cannot continue, and have nothing to report
                self._signal(signal.SIGKILL, self._of("server"))
        if self._of("server"):
            return
        lost, self._lost, self._losing = self._lost, {}, None
        if self._over is None and lost and self._may_start_again(role):
            for rank in range(self._num_servers):
                self._start_again(rank, role.incarnation + 1)
            return
        if self._over is None and lost:
            self._fail(lost)
        last_s = max((self._running[rank].since_s for rank in self._of("worker")), default=0.0)
        self._end_within(LEAVE_S if self._got or self._failures else max(LEAVE_S, last_s + START_S - now_s()))
        if self._got:
            self._signal(signal.SIGTERM, self._of("worker"))

    def _may_start_again(self, server: Role) -> bool:
        """Returns True if the servers may be restarted; False once all workers have finished."""
        is_of_use = self._of("worker") or not self._has_finished_worker
        return server.incarnation < self._restarts and bool(is_of_use)

    # --- the end of the run ------------------------------------------------------------------------------------------

    def _end_within(self, limit_s: float) -> None:
        if self._over is None or self._over.left_s() > limit_s:
            self._over = Patience(limit_s)

    def _fail(self, failures: Mapping[int, Failure]) -> None:
        """Records what has failed, and asks all others to stop."""
        self._failures.update({**self._lost, **failures})
        if self._over is None:
            self._end_within(SHUTDOWN_S)
            self._signal(signal.SIGTERM, self._running)

    def _pass_on(self, number: signal.Signals) -> None:
        """Passes a signal on to the servers, or to all ranks; a second one kills all processes."""
        if self._got is None:
            self._got = number, now_s()
            self._end_within(SHUTDOWN_S)
            self._signal(number, self._of("server") if self._num_servers else self._running)
        elif now_s() - self._got[1] > ECHO_S:
            self._signal(signal.SIGKILL, self._running)

    def _kill_overdue(self) -> None:
        """Kills the processes whose time to end is up."""
        if self._over is not None and not self._over.left_s():
            for rank, each in self._running.items():
                if not self._got and not self._failures and rank not in self._killed:
                    late_s = self._over.limit_s
                    log.warning("%s still runs %.0f s after the servers have ended, and is killed", each.role, late_s)
            self._signal(signal.SIGKILL, list(self._running))
        elif self._losing is not None and not self._losing.left_s():
            if self._num_servers:
                self._signal(signal.SIGKILL, self._of("server"))
            else:
                self._fail({})


def end_text(status: int, report: Report | None) -> str:
    """Returns how a process has ended, as text: by its report, if it has left one."""
    return status_text(status) if report is None else f"has ended ({report.type}: {' '.join(report.message.split())})"


def _say(role: Role, status: int, report: Report | None, then: str) -> None:
    """Prints the one line about a loss that does not end the run."""
    log.warning("%s %s; %s", role, end_text(status, report), then)


# --- The command of a process that computes; signals to its parent, and Ctrl-Z ---------------------------------------
#
# A worker is a *command*, because a process that multiprocessing makes would import the parent's main module, and Hydra
# with it. The command is `env NAME=VALUE … python`, which changes nothing in this process. Every user of the host can
# read a command, so the secret of the launch goes through a private folder (`comm/meeting/secret.py`). `bootstrap.py`
# lets a worker import this very package, and nothing of the current folder.


CUBLAS_WORKSPACE = ":4096:8"  # deterministic=true needs it on a GPU, before the first matrix product
SHUTDOWN_S = 60
"""After a signal, workers have this long to agree and save before they are killed."""
ADDRESS, INTERFACE = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
"""An environment in which Gloo and NCCL listen only where processes of this host reach them."""


def worker_command(module: str, words: Sequence[str], *, threads: int, is_apart: bool = True) -> list[str]:
    """Returns the words after `env` that run a module of this package as a process that computes.

    The variables come first, which it needs before it starts.

    Both thread counts, also for one worker, and MKL's reproducible mode are set, because without them many kernels
    change their bits with the number of threads and with the alignment of their input. The interface on which the
    libraries may listen is set even if the user has named another one, for launches over several hosts.

    Args:
        is_apart: no process of another host has to reach it.
    """
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "MKL_CBWR": "AUTO",
        "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE,
        "PYTHONUNBUFFERED": 1,
        **(ON_LOOPBACK if is_apart else {}),
    }
    if "PYTHONPATH" in os.environ:  # an empty entry is the current folder
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, os.environ["PYTHONPATH"].split(os.pathsep)))
    named = assignments(variables | memory_variables())
    return [*named, sys.executable, "-P", str(Path(__file__).parent / "bootstrap.py"), module, *words]


def assignments(variables: Mapping[str, object]) -> list[str]:
    """Returns the words after `env` that set variables."""
    return [f"{name}={value}" for name, value in variables.items()]


@contextlib.contextmanager
def signals_to(tell: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Gives `tell` each signal that asks this process to stop, for the duration of the block."""
    signals = stop_signals() if hears_signals() else []
    if signals and signal.getsignal(signal.SIGQUIT) is not signal.SIG_IGN:
        signals.append(signal.SIGQUIT)  # it ends the workers, too, but they save nothing
    before = {number: signal.signal(number, lambda got, _: tell(signal.Signals(got))) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def paused_together(
    by: signal.Signals = signal.SIGSTOP, tell: Callable[[signal.Signals], object] = bool
) -> Iterator[None]:
    """Lets Ctrl-Z pause the workers, too, and `fg` continue them, for the duration of the block.

    Every worker has its own session, which the terminal does not reach. Without this the workers would continue until
    they need the store of the paused launcher.

    Args:
        by: SIGTSTP for children that pause their own workers.
        tell: is given SIGCONT afterwards. Without an entry, a `SimpleQueue.get` whose timeout has passed in a signal
            handler, which this is, would wait for ever.
    """
    if not hears_signals() or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield
        return

    def pause(*_: Any) -> None:
        workers = [child for child in _children() if os.getsid(child) == child]
        _signal_sessions(workers, by)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when this process is continued
        _signal_sessions(workers, signal.SIGCONT)
        tell(signal.SIGCONT)

    signal.signal(signal.SIGTSTP, pause)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _signal_sessions(leaders: Sequence[int], number: signal.Signals) -> None:
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, number)


def _children() -> list[int]:
    """Returns this process's children, or none where the kernel does not list them."""
    return [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]


# --- The side-car ----------------------------------------------------------------------------------------------------
#
# The side-car of a run (`ddp/train/sidecar.py`) runs next to its workers, on a core that they leave free.
#
#     cores 0 1 2 3, three workers × one thread     0 1 2  workers          3  side-car
#     cores 0 1, two workers                        0 1    workers, and the side-car while they wait
#
# It computes on the CPU. Its output goes to RUN_DIR/logs/sidecar.log. It has the lowest priority, because training must
# not wait for it, and ends with its launcher.


END_S = 10.0  # after SIGTERM, in the midst of a batch


@contextlib.contextmanager
def with_sidecar(config: Config, run_dir: Path) -> Iterator[Callable[[], bool] | None]:
    """Runs a side-car for the duration of the block, if the settings ask for one.

    Yields:
        A function that returns True while the side-car runs; None without a side-car.
    """
    if config.evaluate.by != "sidecar":
        yield None
        return
    with contextlib.ExitStack() as until_end:
        core = _own_core(config)
        words = ["--parent", str(os.getpid()), *(["trust=true"] if config.trust else [])]
        words += [str(run_dir.resolve()), "device=cpu", "backend=auto", "cluster.threads_per_worker=1"]
        command = ["env", *worker_command("ddp.commands.sidecar", words, threads=1)]
        make_folder(run_dir / "logs")
        log = until_end.enter_context(to_append(run_dir / "logs" / "sidecar.log"))
        if core is not None:
            cores = os.sched_getaffinity(0)
            until_end.callback(os.sched_setaffinity, 0, cores)
            os.sched_setaffinity(0, {core})  # which the child inherits
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        until_end.callback(_end_sidecar, process)
        if core is not None:
            os.sched_setaffinity(0, cores - {core})  # which the workers inherit
        where = f"on core {core}, which the workers leave to it" if core is not None else "on the cores of the workers"
        say(f"a side-car evaluates each checkpoint {where}: sidecar/, logs/sidecar.log")
        yield lambda: process.poll() is None
        if process.poll():
            say(f"the side-car has failed: see {run_dir / 'logs' / 'sidecar.log'}", to=sys.stderr)


def _own_core(config: Config) -> int | None:
    """Returns a core that the workers' threads need not have; None if there is none, or it cannot be given away."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = os.sched_getaffinity(0)
    taken = config.cluster.workers * (config.cluster.threads_per_worker or 1)
    return max(cores) if len(cores) > 1 and available_cores() > taken else None


def _end_sidecar(process: subprocess.Popen[bytes]) -> None:
    """Ends the process if it runs. Its results are written; checkpoints not evaluated yet stay in its folder."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
