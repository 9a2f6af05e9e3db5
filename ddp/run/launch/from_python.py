"""`ddp.launch`: runs a function of a script or notebook on new processes of this host."""

from __future__ import annotations

import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ddp.comm.meeting.place import refuse_workers
from ddp.errors import ConfigError, WorkersFailed
from ddp.process.log import log
from ddp.process.memory import available_cores
from ddp.run.launch.engine import run_workers
from ddp.run.launch.function_call import CALL, check_call, folder_for_call, result_file
from ddp.run.launch.report import Failure, describe_failures
from ddp.run.settings.checks import most_workers
from ddp.units import counted


def launch(
    function: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    threads_per_worker: int | None = None,
    timeout_s: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on `workers` new processes of this host, and returns their results by rank.

    Inside the function `ddp.init()` finds the other ranks. Function, arguments and results are sent by cloudpickle, so
    a function of a notebook works. Rank 0 prints to this terminal.

    Args:
        workers: the world size.
        threads_per_worker: None: cores ÷ workers, at least 1.
        timeout_s: a worker that runs longer ends the launch, and says where it stood. None: no limit.

    Raises:
        ConfigError: an argument cannot work, or cannot be sent; or this process is one rank of several already.
        WorkersFailed: a worker raised or died; the message ends with the block of the one that failed first.
        KeyboardInterrupt, SystemExit: Ctrl-C, or another signal, which has ended the workers, too.
    """
    check_call(function, args, kwargs)
    _check_launch(workers, threads_per_worker, timeout_s)
    name = getattr(function, "__name__", "function")
    refuse_workers(f"ddp.launch({name}, …)", instead=f"call {name}(…) itself")
    if sys.stdout is not None and sys.stdout.isatty():  # a pipe gets what the function prints, and nothing else
        print(f"starting {counted(workers, 'worker')} …", flush=True)
    with folder_for_call(workers, function, args, kwargs) as folder:
        limit = [] if timeout_s is None else ["--timeout", str(timeout_s)]
        ended = run_workers(["--call", str(folder / CALL), *limit], workers=workers, threads=threads_per_worker)
        if (stopped_by := ended.signal or _left_by(ended.failures)) is signal.SIGINT:
            raise KeyboardInterrupt("it has ended the workers; if a fit was running, its last line says what is saved")
        if stopped_by is not None:
            raise SystemExit(128 + stopped_by)
        if ended.failures:
            raise WorkersFailed(describe_failures(ended.failures, folder / "logs"))
        results = [result_file(folder, rank) for rank in range(workers)]
        for rank, path in enumerate(results):
            if not path.exists():
                raise WorkersFailed(f"rank {rank} ended without a result: does the function call sys.exit?")
        return [pickle.loads(path.read_bytes()) for path in results]


def _check_launch(workers: Any, threads_per_worker: Any, timeout_s: Any) -> None:
    """Raises ConfigError unless the arguments of `launch` are numbers that can work; warns of too many workers."""
    for name, number in (("workers", workers), ("threads_per_worker", threads_per_worker)):
        is_left_out = number is None and name != "workers"
        if not is_left_out and (not hasattr(number, "__index__") or isinstance(number, bool) or number < 1):
            raise ConfigError(f"{name}={number!r}: must be a whole number from 1 up")
    if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s > 0):
        raise ConfigError(f"timeout_s={timeout_s!r}: must be seconds above 0; leave it out for no limit")
    if workers > most_workers():
        cores = counted(available_cores(), "core")
        log.warning("workers=%d: they take turns on %s; %d or fewer train faster", workers, cores, available_cores())


def _left_by(failures: Mapping[int, Failure]) -> signal.Signals | None:
    """Returns the signal on which the workers have left in agreement, if only they got it."""
    statuses = {failure.status for failure in failures.values()}
    return next((number for number in signal.Signals if statuses == {128 + number}), None)
