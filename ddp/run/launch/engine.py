"""Torchrun's engine, run as a part of this process: it starts workers (`worker.py`), waits, and says how they ended.

With a *function* as its entry point the engine's workers would import the parent's main module, and Hydra with it. So
it starts a *command*. The engine passes on no environment of ours. So the command is `env NAME=VALUE … python`, which
changes nothing in this process. Every user of the host can read a command, so the secret of the launch goes through a
private folder (`comm/meeting/secret.py`). Nothing that it or its workers open listens beyond this host
(`loopback.py`).
`bootstrap.py` lets a worker import this very package, and nothing of the current folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddp.comm.meeting.secret import private_folder
from ddp.errors import ConfigError
from ddp.process.memory import available_cores
from ddp.process.memory import variables as memory_variables
from ddp.run.launch.report import Failure
from ddp.train.steps.stopping import hears_signals, stop_signals

CUBLAS_WORKSPACE = ":4096:8"  # deterministic=true needs it on a GPU, before the first matrix product
SHUTDOWN_S = 60
"""After a signal, workers have this long to agree and save before they are killed; 30 s under torch 2.10."""


class Ended(NamedTuple):
    """Says how all workers ended. `signal`: what the parent itself got; `failures`: by rank, in order of discovery."""

    signal: signal.Signals | None
    failures: Mapping[int, Failure]


def run_workers(arguments: Sequence[str], *, workers: int, threads: int | None) -> Ended:
    """Runs `ddp.run.launch.worker` in `workers` processes through torchrun's engine, and waits.

    Args:
        threads: of a worker; None: cores ÷ workers, at least 1.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from ddp.run.launch.loopback import BACKEND

    signals = stop_signals()
    if signal.getsignal(signal.SIGQUIT) is not signal.SIG_IGN:
        signals.append(signal.SIGQUIT)  # it ends the workers, too, but they save nothing
    with (
        temporary_folder("ddp-engine-") as folder,
        private_folder() as private,
        _unchanged_process(signals),
        paused_together(),
    ):
        # "${local_rank}" is the engine's macro; any other "$" is doubled to pass through it.
        launch = ["--parent", str(os.getpid()), "--private", str(private), *arguments]
        threads = threads or max(1, available_cores() // workers)
        command = worker_command("ddp.run.launch.worker", launch, threads=threads)
        command = [*(word.replace("$", "$$") for word in command), "--rank", "${local_rank}"]
        can_wait = "shutdown_timeout" in LaunchConfig.__dataclass_fields__
        patience: dict[str, Any] = {"shutdown_timeout": SHUTDOWN_S} if can_wait else {}
        engine = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend=BACKEND,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
            signals_to_handle=",".join(number.name for number in signals),
            **patience,
        )
        try:
            elastic_launch(engine, "env")(*command)
        except SignalException as caught:
            return Ended(signal.Signals(caught.sigval), {})
        except KeyboardInterrupt:  # before the engine has installed its handlers
            return Ended(signal.SIGINT, {})
        except ChildFailedError as failed:
            failures = {rank: Failure(each.exitcode, each.timestamp) for rank, each in failed.failures.items()}
            return Ended(None, failures)
    return Ended(None, {})


def worker_command(module: str, words: Sequence[str], *, threads: int) -> list[str]:
    """Returns the words after `env` that run a module of this package as a process that computes.

    The variables come first, which it needs before it starts.

    Both thread counts, also for one worker, and MKL's reproducible mode are set, because without them many kernels
    change their bits with the number of threads and with the alignment of their input. The interface on which the
    libraries may listen is set even if the user has named another one, for launches over several hosts.
    """
    from ddp.run.launch.loopback import ON_LOOPBACK

    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "MKL_CBWR": "AUTO",
        "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE,
        "PYTHONUNBUFFERED": 1,
        **ON_LOOPBACK,
    }
    if "PYTHONPATH" in os.environ:  # an empty entry is the current folder
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, os.environ["PYTHONPATH"].split(os.pathsep)))
    named = [f"{name}={value}" for name, value in (variables | memory_variables()).items()]
    return [*named, sys.executable, "-P", str(Path(__file__).parent / "bootstrap.py"), module, *words]


@contextlib.contextmanager
def _unchanged_process(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Restores the variable and signal handlers that the engine changes in its process, and keeps it from logging."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signals if in_main_thread}
    variable = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    for name in ("elastic", "launcher"):
        logger = logging.getLogger(f"torch.distributed.{name}")
        logger.propagate = False  # for good, because another thread may launch, too
        logger.addHandler(_SILENCE)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if variable is None:
            os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)


@contextlib.contextmanager
def heard(tell: Callable[[signal.Signals], object]) -> Iterator[None]:
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
def paused_together(by: signal.Signals = signal.SIGSTOP) -> Iterator[None]:
    """Lets Ctrl-Z pause the workers, too, and `fg` continue them, for the duration of the block.

    Every worker has its own session, which the terminal does not reach. Without this the workers would go on until
    they need the store of the launcher that is paused.

    Args:
        by: SIGTSTP for children that pause workers of their own.
    """
    if not hears_signals() or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield
        return

    def pause(*_: Any) -> None:
        workers = [child for child in _children() if os.getsid(child) == child]
        _signal_sessions(workers, by)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when this process is continued
        _signal_sessions(workers, signal.SIGCONT)

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
    """Returns this process's children, or none where the kernel does not tell."""
    return [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]


_SILENCE = logging.NullHandler()


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Makes a folder for the duration of the block.

    Raises:
        ConfigError: no disk has room for one.
    """
    with contextlib.ExitStack() as until_end:
        try:
            folder = until_end.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        except OSError as error:
            raise ConfigError(f"{error.strerror}; make room, or set TMPDIR to another folder") from error
        yield Path(folder)
