"""Runs a function on several ranks, each a process of its own, quickly.

    results = run_ranks(function, 4, argument)      # function(argument) on 4 ranks; results by rank

Processes are forked from a server that has imported torch already, so a group of ranks costs some 0.2 s, not
seconds. The store lives in the test's process, on a free port. A rank's exception is raised here with its
traceback; a rank that does not end in time fails the test.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import cloudpickle
import pytest

PRELOAD = [
    *("torch", "torch.distributed", "ddp.run.assembly.stages", "ddp.replica.drop_in.data_parallel", "ddp.train.fit"),
    "torch._dynamo",  # two seconds' import, for which torch's optimizers ask
    *("pytest", "matplotlib.figure"),  # a fifth and half of a second: many tests run in ranks, and draw curves
    "tests.huge_pages",  # last: a fork in 25 instead of 50 ms of CPU time
]


Result = TypeVar("Result")


class RankFailed(AssertionError):
    """A rank raised, died or did not end."""


def start_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, environment: dict[str, str] | None = None
) -> list[tuple[Any, Connection]]:
    """Starts the ranks; (process, where its result will come from) by rank."""
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    payload = cloudpickle.dumps((function, args))
    cloudpickle.unregister_pickle_by_value(module)  # other modules take it by name
    started = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **(environment or {}),
        }
        process = context.Process(target=_run, args=(payload, variables, sender), daemon=True)
        process.start()
        sender.close()
        process.store = store  # lives as long as the processes do
        started.append((process, receiver))
    return started


def collect(started: list[tuple[Any, Connection]], *, timeout_s: float = 60.0) -> list[Any]:
    """The ranks' results; a rank's exception or death is its result as a RankFailed."""
    results: list[Any] = []
    deadline_s = time.monotonic() + timeout_s
    for rank, (process, receiver) in enumerate(started):
        if not wait([receiver], max(1.0, deadline_s - time.monotonic())):
            results.append(RankFailed(f"rank {rank} did not end within {timeout_s} s"))
            process.kill()
        else:
            try:
                ok, value = cloudpickle.loads(receiver.recv_bytes())
                results.append(value if ok else RankFailed(f"rank {rank}:\n{value}"))
            except EOFError:
                process.join(timeout_s)
                results.append(RankFailed(f"rank {rank} died with exit code {process.exitcode}"))
        receiver.close()
    for process, _ in started:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    return results


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Runs `function(*args)` on every rank; the results by rank."""
    return unfailed(collect(start_ranks(function, world_size, *args), timeout_s=timeout_s))


def unfailed(results: list[Any]) -> list[Any]:
    """The results that `collect` returned, if there is no RankFailed among them; else that one is raised."""
    for result in results:
        if isinstance(result, RankFailed):
            raise result
    return results


def as_threads(world_size: int, program: Callable[[int, Any], Result]) -> list[Result]:
    """Runs `program(rank, gather)` for every rank as a thread of this process; the results by rank."""
    meeting = threading.Barrier(world_size, timeout=60)
    payloads = [b""] * world_size

    def run(rank: int) -> Result:
        def gather(payload: bytes) -> list[bytes]:
            payloads[rank] = payload
            meeting.wait()
            everyone = list(payloads)
            meeting.wait()
            return everyone

        threading.current_thread().rank = rank  # type: ignore[attr-defined]
        return program(rank, gather)

    with ThreadPoolExecutor(world_size) as threads:
        return [done.result() for done in [threads.submit(run, rank) for rank in range(world_size)]]


def without_gloo(printed: str) -> str:
    """Returns what programs printed, without the lines that Gloo of torch 2.10 prints among them."""
    return re.sub(r"^\[Gloo\] Rank \d+ is connected to .*\n", "", printed, flags=re.MULTILINE)


in_each_mode = pytest.mark.parametrize(
    ("overlap", "half"),
    [(False, 1), (True, 0), *(pytest.param(*other, marks=pytest.mark.slow) for other in ((False, 0), (True, 1)))],
    ids=["foreground", "background", "foreground, others", "background, others"],
)
"""Half of a file's cases with reductions in the foreground, half in the background; the rest as slow tests."""


def run_cases(cases: Sequence[Callable[[Any], None]], comm: Any, names: Sequence[str]) -> None:
    """Runs case(comm) for each case, or for those that are named; a failure says in which it was."""
    for case in cases:
        if not names or case.__name__ in names:
            try:
                case(comm)
            except BaseException as error:
                error.add_note(f"in the case {case.__name__}")
                raise


def _run(payload: bytes, variables: dict[str, str], sender: Connection) -> None:
    os.environ.update(variables)
    faulthandler.enable()  # a rank that dies of a signal says where
    gc.freeze()  # the collector need not look at what the server has imported
    import torch

    torch.set_num_threads(1)
    try:
        function, args = cloudpickle.loads(payload)
        answer = cloudpickle.dumps((True, function(*args)))
    except BaseException:
        answer = cloudpickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)
    sender.close()
    os._exit(0)  # a failed rank's threads may wait for lost peers
