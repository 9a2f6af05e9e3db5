"""Starts a launch's workers by a fork of a process that has imported torch, in the place of torchrun's engine.

A worker that begins as a new interpreter imports torch, the package and, for the optimizer, torch's compiler, which
takes seconds. It is `worker.main` in both ways. Tests of what the engine does are marked `engine`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ranks import PRELOAD

from ddp.comm.meeting.secret import private_folder
from ddp.process.memory import available_cores
from ddp.run.launch.engine import SHUTDOWN_S, Ended
from ddp.run.launch.loopback import ON_LOOPBACK, OneHost
from ddp.run.launch.report import Failure


def run_workers(arguments: Sequence[str], *, workers: int, threads: int | None) -> Ended:
    """Does what `ddp.run.launch.engine.run_workers` does, but for signals."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "ddp.run.launch.worker"])
    rendezvous = OneHost("forked")
    meeting = rendezvous.next_rendezvous().bootstrap_store_info
    shared = {
        **os.environ,
        **ON_LOOPBACK,
        "OMP_NUM_THREADS": str(threads or max(1, available_cores() // workers)),
        "MASTER_ADDR": meeting.master_addr,
        "MASTER_PORT": str(meeting.master_port),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    failures: dict[int, Failure] = {}
    with private_folder() as private:
        started = {}
        for rank in range(workers):
            outputs = [Connection(os.dup(number)) for number in (1, 2)]
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = ["--rank", str(rank), "--private", str(private), *arguments]
            process = context.Process(target=_work, args=(words, variables, Path.cwd(), outputs))
            process.start()
            started[process.sentinel] = rank, process
        while started:
            for sentinel in wait(list(started), SHUTDOWN_S if failures else None) or list(started):
                rank, process = started.pop(sentinel)
                if process.is_alive():
                    process.kill()
                process.join()
                if process.exitcode:
                    failures[rank] = Failure(process.exitcode, time.time())
                    for _, other in started.values():
                        other.terminate()
    return Ended(None, failures)


def _work(words: list[str], variables: dict[str, str], folder: Path, outputs: list[Connection]) -> None:
    """Becomes a worker: its environment, folder, output and threads are those that the engine would give it."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output.fileno(), number)
        output.close()
    import torch

    from ddp.run.launch.worker import leave, main

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    multiprocessing.set_start_method(None, force=True)  # a worker that begins as an interpreter has chosen none
    leave(main(["--parent", str(os.getppid()), *words]))
