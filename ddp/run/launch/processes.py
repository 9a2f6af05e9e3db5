"""Processes of a run: the command of one that computes, signals to their parent, Ctrl-Z, and the side-car among them.

A worker is a *command*, because a process that multiprocessing makes would import the parent's main module, and Hydra
with it. The command is `env NAME=VALUE … python`, which changes nothing in this process. Every user of the host can
read a command, so the secret of the launch goes through a private folder (`comm/meeting/secret.py`). `bootstrap.py`
lets a worker import this very package, and nothing of the current folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp.process.files import make_folder, to_append
from ddp.process.memory import available_cores
from ddp.process.memory import variables as memory_variables
from ddp.process.terminal import say
from ddp.run.settings.config import Config
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


# --- The side-car ----------------------------------------------------------------------------------------------------
#
# The side-car of a run (`ddp/train/sidecar.py`) runs beside its workers, on a core that they leave.
#
#     cores 0 1 2 3, three workers × one thread     0 1 2  workers          3  side-car
#     cores 0 1, two workers                        0 1    workers, and the side-car where they wait: it is told
#
# It computes on the CPU. Its output goes to RUN_DIR/logs/sidecar.log. It has the lowest priority, because training must
# not wait for it, and ends with its launcher.


END_S = 10.0  # after SIGTERM, in the midst of a batch


@contextlib.contextmanager
def with_sidecar(config: Config, run_dir: Path) -> Iterator[Callable[[], bool] | None]:
    """Runs a side-car for the duration of the block, if the settings ask for one.

    Yields:
        A function that says whether it is there; None if none was asked for.
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
    """Ends the process, if it is there: what it has evaluated is written, and the rest waits in its folder."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
