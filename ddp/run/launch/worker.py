"""One worker process: its log, its parent, its work, and the report that it leaves when it fails.

    python -P …/bootstrap.py ddp.run.launch.worker --rank R --parent PID --private DIR … RUN_DIR      train
    python -P …/bootstrap.py ddp.run.launch.worker --rank R --parent PID --private DIR --call FILE    for ddp.launch
                                                   … --servers S --workers W --incarnation N          a server or worker

The life of a worker:

    1  follow the parent     it ends when the parent ends, whatever it is doing
    2  take the log          rank 0 keeps the terminal; any other rank's file descriptors 1 and 2 become logs/rank-R.log
                             (of servers and workers: server 0 keeps it; the others' become logs/worker-0.log, say)
    3  work                  ddp.run.assembly.stages.run, or the function
    4  report                an exception becomes logs/error-rank-R.json, from which the parent finds the root cause

A worker reads plain YAML and never imports Hydra. It imports nothing from the current folder, but for two things: parts
of a run that are named by address (`address.py`), and a function, whose worker takes over its parent's `sys.path`. Its
rank is an argument, not from the environment. The launcher has set the variables for threads and MKL's mode before this
interpreter, and so torch, started.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from ddp.comm.meeting import membership
from ddp.comm.meeting.role import STORE, Role, set_role
from ddp.comm.meeting.secret import take_secret
from ddp.errors import ConfigError, safe_str
from ddp.process.files import make_folder, to_append
from ddp.process.memory import ask_for_signal, collect_from_now_on, collect_later
from ddp.process.stack import stack_of
from ddp.process.terminal import (
    add_handler,
    ended_by_ctrl_c,
    follow_rank,
    keep_writing,
    log,
    say,
    terminal_follows,
)
from ddp.run.launch.failures import Report, Seat
from ddp.run.launch.from_python import adopt, write_exception, write_result
from ddp.run.launch.supervisor import SETTINGS
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain

ORPHAN_GRACE_S = 30.0
"""After its parent's death a worker may spend this long on an agreed stop and a checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Runs one worker; returns its exit status."""
    parser = argparse.ArgumentParser(prog="ddp.run.launch.worker")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the launcher")
    parser.add_argument("--private", type=Path, required=True, help="the launch's private folder")
    parser.add_argument("--call", type=Path, help="a pickled function instead of a run directory")
    parser.add_argument("--timeout", type=float, help="seconds after which a call is given up")
    parser.add_argument("--servers", type=int, default=0, help="number of servers, which are the first ranks")
    parser.add_argument("--workers", type=int, default=0, help="number of workers, which are the other ranks")
    parser.add_argument("--incarnation", type=int, default=0, help="how often this one has been started before")
    parser.add_argument("--elastic", action="store_true", help="ranks come and go")
    parser.add_argument("--hosts", nargs=2, help="and they meet in a store at this address and port")
    parser.add_argument("run_dir", type=Path, nargs="?")
    options = parser.parse_args(argv)

    collect_later()
    keep_writing()
    follow_parent(options.parent, grace_s=ORPHAN_GRACE_S)
    take_secret(options.private, is_meeting=not options.hosts)
    take_role = partial(_take_role, options) if options.servers or options.elastic else lambda: None
    if options.call is not None:
        seat = Seat(options.call.parent / "logs", options.rank, options.servers)
        return _call(options.call, seat, timeout_s=options.timeout, take_role=take_role, moves=options.elastic)
    import yaml

    # Not the file in the run's folder: whoever may write there could name code of their own.
    config = from_plain(yaml.safe_load((options.private / SETTINGS).read_text()))
    if options.incarnation and any((options.run_dir / "checkpoints").glob("*step-*")):
        config.resume = "auto"
    return train(config, options.run_dir, rank=options.rank, take_role=take_role, moves=options.elastic)


def train(
    config: Config,
    run_dir: Path,
    *,
    rank: int,
    role: str = "",
    take_role: Callable[[], object] = lambda: None,
    moves: bool = False,
) -> int:
    """Trains as this rank of the run; returns the exit status (0, also after an agreed stop).

    Args:
        rank: see `Seat`.
        role: the task of a described cluster, as "worker:1".
        take_role: gives this process its role in a run with servers, once the log is taken.
        moves: see `take_log`.
    """
    seat = Seat(run_dir / "logs", rank, config.cluster.servers)
    take_log(seat, world_size=config.strategy.num_processes(config.cluster.workers), role=role, moves=moves)

    def work() -> None:
        with ended_by_ctrl_c():
            take_role()
            from ddp.run.assembly.stages import run  # after the log is taken, because importing torch may print

        run(config, run_dir)

    return guarded(work, seat)


def _take_role(options: argparse.Namespace) -> None:
    """Gives this process its role among those that one host's launcher has started: server, worker, or member."""
    from ddp.comm.meeting.private_store import Folder  # and torch with it
    from ddp.comm.meeting.rendezvous import hosts_store

    if options.elastic:
        store = hosts_store(*options.hosts) if options.hosts else Folder(options.private / membership.STORE)
        membership.join_membership(store, options.rank, launcher=None if options.hosts else options.parent)
        return
    counts = {"workers": options.workers, "servers": options.servers}
    store = Folder(options.private / STORE)
    set_role(Role.of_number(options.rank, **counts, store=store, incarnation=options.incarnation))


def _call(
    file: Path, seat: Seat, *, timeout_s: float | None, take_role: Callable[[], object], moves: bool = False
) -> int:
    """Runs the function in `file`, and writes its result next to it."""

    def work() -> None:
        with file.open("rb") as stream:
            world_size, sys.path[:] = pickle.load(stream)  # first, because unpickling imports modules
            take_log(seat, world_size=world_size, moves=moves)
            with ended_by_ctrl_c():
                take_role()
                function, args, kwargs, defined = pickle.load(stream)
                adopt(defined)
        collect_from_now_on()
        write_result(file.parent, seat.rank, function, function(*args, **kwargs))

    if timeout_s is not None:
        _give_up_after(timeout_s, seat)
    return guarded(work, seat, send=partial(write_exception, file.parent, seat.rank))


# ---------------------------------------------------------------------------------------------- 1 follow the parent


def follow_parent(parent: int, *, grace_s: float) -> None:
    """Makes this process end when `parent` does, also when the parent is killed by SIGKILL.

    Note "two ways to die". The kernel's parent-death signal (Linux) arrives at once, and ends a process without a
    handler for SIGTERM even where the interpreter hangs. But during training SIGTERM only asks for an agreed stop. The
    ranks may be unable to agree, because the store was in the parent. So a thread ends the process after `grace_s`.
    """
    asked = ask_for_signal(signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if not asked:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="ddp-follow-parent", daemon=True).start()


def _give_up_after(timeout_s: float, seat: Seat) -> None:
    """Ends this worker after `timeout_s` with a report that shows where its main thread stood."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def give_up() -> None:
        where = "".join(traceback.format_list(stack_of(main_thread)))
        error = TimeoutError(f"still running after timeout_s={timeout_s:g}")
        replace(Report.of(error, seat), traceback=f"{where}TimeoutError: {error}").write(seat.logs)
        write_exception(seat.logs.parent, seat.rank, error)
        leave(1)

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()


# --------------------------------------------------------------------------------------------------- 2 take the log


class _Terminal(logging.StreamHandler[Any]):
    """Handler that writes to the current `sys.stderr`, which a progress bar replaces to keep its own line whole."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def take_log(seat: Seat, *, world_size: int, role: str = "", moves: bool = False) -> None:
    """Sends this process's output to logs/rank-R.log; rank 0 keeps the terminal and logs to both.

    File descriptors are redirected, so that the output of C++ and of child processes goes there, too.

    Args:
        moves: this process may become rank 0 later, or cease to be it.
    """
    make_folder(seat.logs)
    terminal, of_terminal = (os.dup(1), os.dup(2)) if moves else (1, 2), _Terminal()

    def show(is_first: bool) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        with to_append(seat.log) as file:
            for fd, own in enumerate(terminal, start=1):
                os.dup2(own if is_first else file.fileno(), fd)
        log.removeHandler(of_terminal)
        if is_first:
            add_handler(of_terminal, logging.WARNING)

    faulthandler.enable()  # a crash in C++ leaves its Python stack in the log
    add_handler(logging.StreamHandler(to_append(seat.log)))
    show(seat.rank == 0)
    follow_rank(seat.rank, world_size, role)
    if moves:
        terminal_follows(show)


# ------------------------------------------------------------------------------------------------- 3 work, 4 report


def guarded(work: Callable[[], None], seat: Seat, *, send: Callable[[BaseException], None] = lambda _: None) -> int:
    """Runs `work`; returns 0, 1 after an exception, which it reports, or 130 after Ctrl-C outside of training.

    Args:
        send: is given the exception, once the report is written.
    """
    try:
        work()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit:
        raise
    except BaseException as error:
        report = Report.of(error, seat)
        try:
            report.write(seat.logs)
            send(error)
            with to_append(seat.log) as file:
                file.write(f"{report.traceback}\n")
        except (OSError, ConfigError):  # such as a full disk, which may have ended the work
            say(report.block(), to=sys.stderr)
        _notify_others(error)
        return 1
    return 0


def _notify_others(error: BaseException) -> None:
    """Notifies waiting ranks why this one ends; after the report, because then the launcher ends them."""
    if (session := sys.modules.get("ddp.comm.session")) is not None:  # else it has not joined them
        with contextlib.suppress(Exception):
            session.shutdown(failed=f"{type(error).__name__}: {safe_str(error)}")


def leave(status: int) -> NoReturn:
    """Ends the process now, because after a failure a communicator's threads would wait at exit for lost peers."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
