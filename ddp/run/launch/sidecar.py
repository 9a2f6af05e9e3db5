"""Starts the side-car of a run (`ddp/train/evaluation/sidecar.py`) beside its workers, on a core that they leave.

    cores 0 1 2 3, three workers × one thread     0 1 2  workers          3  side-car
    cores 0 1, two workers                        0 1    workers, and the side-car where they wait: it is told

It computes on the CPU. Its output goes to RUN_DIR/logs/sidecar.log. It has the lowest priority, because training must
not wait for it, and ends with its launcher.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ddp.process.files import make_folder, to_append
from ddp.process.memory import available_cores
from ddp.process.terminal import say
from ddp.run.launch.engine import worker_command
from ddp.run.settings.config import Config

END_S = 10.0  # after SIGTERM, in the midst of a batch


@contextmanager
def started(config: Config, run_dir: Path) -> Iterator[Callable[[], bool] | None]:
    """Runs a side-car for the duration of the block, if the settings ask for one.

    Yields:
        A function that says whether it is there; None if none was asked for.
    """
    if config.evaluate.by != "sidecar":
        yield None
        return
    with ExitStack() as until_end:
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
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        until_end.callback(_end, process)
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, if it is there: what it has evaluated is written, and the rest waits in its folder."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
