"""Starts a launch's workers by a fork of a process that has imported torch, in the place of new interpreters.

A worker that begins as a new interpreter imports torch, the package and, for the optimizer, torch's compiler, which
takes seconds. It is `worker.main` in both ways. Tests that need interpreters are marked `engine`. A user's program
that launches workers is such a fork, too (`run_program`), and its workers are forks of it.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from ranks import PRELOAD

from ddp.train.steps.stopping import stop_signals

# A start polls every process of before. Where another thread waits for one of them, only one of the two can read its
# exit status, and the other one is told 255.
_STATUS = threading.Lock()


class Started:
    """A worker that is forked, as `ddp/run/launch/supervisor.py::started` gives it."""

    def __init__(self, words: Sequence[str], context: Any = None) -> None:
        at = list(words).index(sys.executable)
        variables = {**os.environ, **dict(word.split("=", 1) for word in words[:at])}
        arguments = list(words)[words.index("ddp.run.launch.worker") + 1 :]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        outputs = [Connection(os.dup(number)) for number in (1, 2)]
        process = (context or _server()).Process(target=_play, args=(arguments, variables, Path.cwd(), outputs))
        with _STATUS:
            process.start()
        self.pid = process.pid
        while os.getsid(self.pid) != self.pid:
            time.sleep(0.001)
        self._process = process

    def wait(self) -> int:
        wait([self._process.sentinel])
        with _STATUS:
            self._process.join()
        return self._process.exitcode


def _play(words: list[str], variables: dict[str, str], folder: Path, outputs: list[Connection]) -> None:
    os.setsid()
    for number in stop_signals():  # a new interpreter has none of the launcher's handlers
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    _work(words, variables, folder, outputs)


def run_program(file: Path, folder: Path, *, timeout_s: float = 120) -> CompletedProcess[str]:
    """Runs a program of Python, as `python FILE` in a folder does; what it launches is forked."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        outputs = [Connection(os.dup(stream.fileno())) for stream in (out, err)]
        process = _server().Process(target=_program, args=(file, dict(os.environ), folder, outputs))
        process.start()
        process.join(timeout_s)
        process.kill()
        process.join()
        out.seek(0), err.seek(0)
        return CompletedProcess(file, process.exitcode, out.read(), err.read())


class Forked:
    """A job of a sweep (`ddp/run/launch/sweep.py`) that is forked, with what is asked of a `subprocess.Popen`."""

    def __init__(self, job: Any, words: Sequence[str], *_: Any) -> None:
        logs = job.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "job.log").open("a") as log:
            outputs = [Connection(os.dup(log.fileno())) for _ in range(2)]
            self._process = _server().Process(target=_job, args=(list(words), dict(os.environ), Path.cwd(), outputs))
            self._process.start()
        self.terminate, self.kill, self.wait = self._process.terminate, self._process.kill, self._process.join

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)


def _job(words: list[str], variables: dict[str, str], folder: Path, outputs: list[Connection]) -> None:
    """Becomes a job: the command line of one run, whose workers are forks of it."""
    _become(variables, folder, outputs)
    from ddp.run.launch import command_line, supervisor

    supervisor.started = partial(Started, context=multiprocessing.get_context("fork"))  # type: ignore[assignment]
    sys.argv[1:] = words
    command_line.main()


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "ddp.run.launch.worker"])
    return context


def _program(file: Path, variables: dict[str, str], folder: Path, outputs: list[Connection]) -> None:
    """Becomes an interpreter that runs a program."""
    _become(variables, folder, outputs)
    from ddp.run.launch import supervisor

    supervisor.started = partial(Started, context=multiprocessing.get_context("fork"))  # type: ignore[assignment]
    sys.argv, sys.path[0] = [str(file)], str(file.parent)
    runpy.run_path(str(file), run_name="__main__")


def _become(variables: dict[str, str], folder: Path, outputs: list[Connection]) -> None:
    """Takes over the environment, folder and output of another process."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output.fileno(), number)
        output.close()


def _work(words: list[str], variables: dict[str, str], folder: Path, outputs: list[Connection]) -> None:
    """Becomes a worker: its environment, folder, output and threads are those that a launch would give it."""
    _become(variables, folder, outputs)
    import torch

    from ddp.run.launch.worker import leave, main

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    multiprocessing.set_start_method(None, force=True)  # a worker that begins as an interpreter has chosen none
    leave(main([*words, "--parent", str(os.getppid())]))
