"""The command of a process that computes, the signals to those that have started some, and Ctrl-Z.

A worker is a *command*, because a process that multiprocessing makes would import the parent's main module, and Hydra
with it. The command is `env NAME=VALUE … python`, which changes nothing in this process. Every user of the host can
read a command, so the secret of the launch goes through a private folder (`comm/meeting/secret.py`). `bootstrap.py`
lets a worker import this very package, and nothing of the current folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp.process.memory import variables as memory_variables
from ddp.train.steps.stopping import hears_signals, stop_signals

CUBLAS_WORKSPACE = ":4096:8"  # deterministic=true needs it on a GPU, before the first matrix product
SHUTDOWN_S = 60
"""After a signal, workers have this long to agree and save before they are killed."""
ADDRESS, INTERFACE = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
"""An environment in which Gloo and NCCL listen only where processes of this host reach them."""


def worker_command(module: str, words: Sequence[str], *, threads: int) -> list[str]:
    """Returns the words after `env` that run a module of this package as a process that computes.

    The variables come first, which it needs before it starts.

    Both thread counts, also for one worker, and MKL's reproducible mode are set, because without them many kernels
    change their bits with the number of threads and with the alignment of their input. The interface on which the
    libraries may listen is set even if the user has named another one, for launches over several hosts.
    """
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
