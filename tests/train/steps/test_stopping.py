"""What a signal asks for, and when it is obeyed at once."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from ranks import PRELOAD, run_ranks

import ddp
from ddp.train.steps import stopping
from ddp.train.steps.stopping import StopFlag

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_and_its_echoes_are_one_request(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    stop = StopFlag()
    with stop.listening():
        assert not stop
        for _ in range(5):
            signal.raise_signal(number)
    assert stop and stop.reason == number.name
    assert [signal.getsignal(each) for each in SIGNALS] == before


@contextmanager
def disposition(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    stop = StopFlag()
    with disposition(number, signal.SIG_IGN), stop.listening():
        signal.raise_signal(number)
    assert not stop


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_the_user_s_program_handles_stays_its_own(number: signal.Signals) -> None:
    stop, got = StopFlag(), []
    with disposition(number, lambda number, frame: got.append(number)), stop.listening():
        signal.raise_signal(number)
    assert not stop and got == [number]

    with tempfile.TemporaryFile() as file:
        faulthandler.register(number, file=file, chain=False)  # in C: Python's signal module does not know of it
        try:
            with stop.listening():
                signal.raise_signal(number)
        finally:
            faulthandler.unregister(number)
        assert not stop and file.tell() > 0


# --- handlers of libraries -------------------------------------------------------------------------------------------

LIBRARY = "def set_by(tell):\n    return lambda number, frame: tell(number)"
KEPT = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def of_a_library(tell: Callable[[int], object], file: str = "/venv/lib/site-packages/engine/jobs.py") -> Any:
    """Returns a handler that stands in an installed file."""
    namespace: dict[str, Any] = {}
    exec(compile(LIBRARY, file, "exec"), namespace)
    return namespace["set_by"](tell)


@pytest.mark.parametrize("number", KEPT)
@pytest.mark.parametrize(
    ("comes", "agreed", "hears"), [(True, True, True), (False, True, True), (True, False, True), (False, False, False)]
)
def test_a_library_s_handler_is_called_once_the_run_has_stopped(
    number: signal.Signals, comes: bool, agreed: bool, hears: bool
) -> None:
    stop, got = StopFlag(), list[int]()
    handler = of_a_library(got.append)
    with disposition(number, handler):
        with stop.before_libraries():
            with stop.listening():
                for _ in range(2 * comes):
                    signal.raise_signal(number)
            assert stop.reason == (number.name if comes else "") and not got
            stop.agreed = number.name if agreed else ""
        assert signal.getsignal(number) is handler
    assert got == [number] * hears


def test_a_library_s_handler_may_end_the_process_and_hears_also_of_a_run_that_fails() -> None:
    stop = StopFlag()
    handler = of_a_library(lambda number: sys.exit(144))
    with disposition(signal.SIGUSR2, handler), pytest.raises(SystemExit) as left, stop.before_libraries():
        signal.raise_signal(signal.SIGUSR2)
        raise ArithmeticError
    assert left.value.code == 144 and isinstance(left.value.__context__, ArithmeticError)


@pytest.mark.parametrize("exits", [True, False])
def test_a_library_s_handler_that_a_second_signal_has_called_is_not_called_again(
    exits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "ECHO_S", 0.0)
    stop, got = StopFlag(), list[int]()

    def tell(number: int) -> None:
        got.append(number)
        if exits:
            sys.exit(144)

    with disposition(signal.SIGUSR2, of_a_library(tell)), suppress(SystemExit), stop.before_libraries():
        signal.raise_signal(signal.SIGUSR2)
        assert not got
        signal.raise_signal(signal.SIGUSR2)
    assert got == [signal.SIGUSR2]


@pytest.mark.parametrize("file", [signal.__file__, stopping.__file__, "/home/me/train.py"])
def test_only_an_installed_library_is_put_off(file: str) -> None:
    stop, got = StopFlag(), list[int]()
    with disposition(signal.SIGUSR1, of_a_library(got.append, file)), stop.before_libraries(), stop.listening():
        signal.raise_signal(signal.SIGUSR1)
        assert got == [signal.SIGUSR1] and not stop


def requeued(folder: Path, number: int, ranks: Sequence[int]) -> None:
    """Trains as a job of two tasks, of which some get the signal, and rank 0's handler ends it."""
    run_dir = folder / "".join(map(str, ranks))
    rank, seen = ddp.init().rank, list[bool]()

    def on_signal(number: int) -> None:
        saved = json.loads((run_dir / "summary.json").read_text())
        seen.append(saved["stopped_by"] == "SIGUSR2" and any((run_dir / "checkpoints").glob("*step-*5")))
        if rank == 0:
            sys.exit(144)

    class Preempted(ddp.Callback):
        def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
            if state.step == 4 and rank in ranks:
                signal.raise_signal(number)

    with disposition(signal.Signals(number), of_a_library(on_signal)):
        try:
            assert fit_in(run_dir, Preempted()).stopped_by == "SIGUSR2"
        except SystemExit as left:
            assert (left.code, rank) == (144, 0)
        else:
            assert rank == 1
    assert seen == [True]
    stopping._obeyed.clear()  # a new process
    assert fit_in(run_dir).step == 8


def fit_in(run_dir: Path, *callbacks: ddp.Callback) -> ddp.TrainState:
    torch.manual_seed(0)
    model, data = torch.nn.Linear(2, 1), (torch.ones(16, 2), torch.ones(16, 1))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss
    folder = ddp.Folder(run_dir, resume="auto", log_every=1, progress=False, curves=False)
    return ddp.fit(model, data, optimizer, loss=loss, global_batch=2, epochs=1, folder=folder, callbacks=callbacks)


def all_requeued(folder: Path) -> None:
    for ranks in ((0,), (1,), (0, 1)):
        requeued(folder, signal.SIGUSR2, ranks)


def test_whichever_rank_is_told_that_time_is_up_all_save_and_every_handler_is_called(tmp_path: Path) -> None:
    run_ranks(all_requeued, 2, tmp_path)


# --- submitit's own executor -----------------------------------------------------------------------------------------

FORKS = """
import os, sys
from multiprocessing.connection import Client
from multiprocessing.reduction import send_handle

with Client(sys.argv[1]) as tasks:
    tasks.send((sys.argv[-1], dict(os.environ)))
    for number in (1, 2):
        send_handle(tasks, number, None)
    sys.exit(tasks.recv())
"""


def forked_tasks(listener: Listener) -> None:
    """Starts each task of a job as a fork that has imported torch, whose status its own process then ends with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    def run(client: Any) -> None:
        with client:
            folder, variables = client.recv()
            outputs = [Connection(recv_handle(client)) for _ in (1, 2)]
            task = context.Process(target=task_of_a_job, args=(folder, variables, outputs))
            task.start()
            task.join()
            client.send(task.exitcode)

    with suppress(OSError):  # it is closed
        while True:
            threading.Thread(target=run, args=[listener.accept()], daemon=True).start()


def task_of_a_job(folder: str, variables: dict[str, str], outputs: list[Any]) -> None:
    from submitit.core import submission

    os.environ.update(variables)
    for number, output in zip((1, 2), outputs, strict=True):
        os.dup2(output.fileno(), number)
    submission.process_job(folder)


class Preempted(ddp.Callback):
    """Lets rank 1 hear in the first run that time is up."""

    def fit_start(self, state: ddp.TrainState) -> None:
        self.begin = state.step

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        if (self.begin, state.step, state.comm.rank) == (0, 4, 1):
            os.kill(os.getpid(), signal.SIGUSR2)


class Job:
    """A job in the form of submitit's documentation."""

    def __call__(self, folder: Path) -> tuple[int, int, list[float]]:
        from submitit.helpers import TorchDistributedEnvironment

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        state = fit_in(folder, watch := Preempted())
        return watch.begin, state.step, [each for p in state.model.parameters() for each in p.flatten().tolist()]

    def checkpoint(self, folder: Path) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, folder)


@pytest.mark.slow
def test_a_job_that_submitit_requeues_goes_on_where_it_has_stopped(tmp_path: Path) -> None:
    import submitit

    (tmp_path / "forks.py").write_text(FORKS)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with Listener(family="AF_UNIX") as listener:
        threading.Thread(target=forked_tasks, args=[listener], daemon=True).start()
        python = shlex.join([sys.executable, "-S", str(tmp_path / "forks.py"), str(listener.address)])
        executor = submitit.LocalExecutor(tmp_path / "jobs", python=python)
        executor.update_parameters(tasks_per_node=2, timeout_min=2)
        job = executor.submit(Job(), tmp_path / "run")
        results = job.results()
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    weights = [each for p in fit_in(tmp_path / "whole").model.parameters() for each in p.flatten().tolist()]
    assert results == [(5, 8, weights)] * 2
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9)), "none is there twice"
    assert "Traceback" not in "".join(path.read_text() for path in (tmp_path / "jobs").glob("*_log.*"))


def test_the_first_reason_stands() -> None:
    stop = StopFlag()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    stop.request("time is up")
    assert stop.reason == "SIGTERM"


def test_a_signal_comes_before_a_callback_s_wish_because_it_asks_the_program_too() -> None:
    stop = StopFlag()
    stop.request("pruned")
    assert (stop.reason, stop.signal_name) == ("pruned", "")
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
    assert (stop.reason, stop.signal_name) == ("SIGTERM", "SIGTERM")


SECOND_WISH = """
import signal
from ddp.train.steps import stopping

stop = stopping.StopFlag()
with stop.listening():
    signal.raise_signal(signal.SIGTERM)
    stopping.now_s = lambda before=stopping.now_s: before() + stopping.ECHO_S
    print("still here", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("too far", flush=True)
"""


def test_a_second_signal_well_after_the_first_ends_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", SECOND_WISH], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGTERM, "still here\n", "")


def test_a_thread_cannot_listen_but_can_be_asked() -> None:
    stop = StopFlag()

    def listen() -> None:
        with stop.listening():
            stop.request("asked")

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert stop.reason == "asked"


@pytest.mark.parametrize(("every_steps", "saves"), [(None, True), (1, True), (None, False)])
def test_a_fit_that_no_signal_makes_save_says_so_where_that_matters(
    every_steps: int | None, saves: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ddp.Folder(tmp_path if saves else None, every_steps=every_steps, curves=False)

    def fit() -> None:
        model, data = torch.nn.Linear(1, 1), (torch.ones(2, 1), torch.ones(2, 1))
        optimizer, loss = torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.mse_loss
        ddp.fit(model, data, optimizer, loss=loss, global_batch=2, epochs=1, folder=folder)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    told = capsys.readouterr().out
    assert "2 training samples" in told
    assert ("no signal makes it save; folder=ddp.Folder(every_steps=…)" in told) == (saves and every_steps is None)
