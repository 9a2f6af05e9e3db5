"""Loader processes that cannot send, are stopped, or say nothing: the rank that waits for them is told, and goes on.

Tests: ddp/data/loading/processes.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from ddp.data.loading import processes
from ddp.data.loading.iterable import IterableLoader, IterableSampler
from ddp.data.loading.loader import EvaluationLoader, TrainLoader
from ddp.data.loading.processes import Limits, WatchedLoader
from ddp.data.orders.sampler import TrainSampler
from ddp.errors import ConfigError, LoaderLost


class Odd(list[Any]):
    """Sample 6 is what `odd` returns, all others are numbers."""

    def __init__(self, odd: Any) -> None:
        super().__init__(range(8))
        self.odd = odd

    def __getitem__(self, index: Any) -> Any:
        return self.odd() if index == 6 else torch.tensor([float(index)])


class OddStream(IterableDataset[Any]):
    def __init__(self, odd: Any) -> None:
        self.samples = Odd(odd)

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(8))


def train_loader(data: Any, **options: Any) -> TrainLoader:
    sampler = TrainSampler(len(data), global_batch=4, rank=0, world_size=1)
    return TrainLoader(data, sampler, num_workers=1, **options)


def batches_of(loader: TrainLoader) -> Any:
    return (batch for _, micros in loader.epoch() for batch in micros)


def lone(samples: list[Any]) -> Any:
    return threading.Lock()


@pytest.mark.parametrize("make", [threading.Lock, lambda: lambda: 6, lambda: torch.zeros(1, requires_grad=True) * 2])
def test_a_sample_that_cannot_be_sent_is_named(make):
    told = r"^sample 6 cannot be sent from a loader process \(.+\): let samples .* or take num_workers=0$"
    loader = train_loader(Odd(make), collate=list)
    with pytest.raises(ConfigError, match=told):
        list(batches_of(loader))
    loader.close()


def test_what_cannot_be_sent_is_named_wherever_it_is_read():
    evaluation = EvaluationLoader(Odd(threading.Lock), batch_size=4, rank=0, world_size=1, collate=list, num_workers=1)
    with pytest.raises(ConfigError, match=r"^sample 6 cannot be sent"):
        list(evaluation)
    stream = IterableLoader(
        OddStream(threading.Lock),
        IterableSampler(global_batch=4, rank=0, world_size=1, seed=0, shares_itself=False),
        collate=list,
        num_workers=1,
    )
    stream.begin()
    with pytest.raises(ConfigError, match=r"^sample 6 cannot be sent"):
        list(stream.steps())
    stream.close()
    whole = train_loader(Odd(float), collate=lone)
    with pytest.raises(ConfigError, match=r"^the batch of samples \d, \d, \d, \d, as collate returns it, cannot be"):
        list(batches_of(whole))
    whole.close()


def raising(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("line 3: 'x' is no number"), r"^line 3: 'x' is no number$"),
        (RuntimeError("stack expects each tensor to be equal size"), r"(?s)^Caught RuntimeError.*equal size\n$"),
    ],
)
def test_an_error_of_the_data_is_the_same_from_a_loader_process_and_blames_no_memory(error, told):
    loader = train_loader(Odd(lambda: raising(error)))
    with pytest.raises(type(error), match=told) as caught:
        list(batches_of(loader))
    assert not hasattr(caught.value, "__notes__")
    loader.close()


class Stuck:
    """A DataLoader whose process does not read what it is sent while it starts."""

    num_workers, _iterator, child = 1, None, None

    def __iter__(self) -> Any:
        self.child = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE)
        with self.child:
            self.child.stdout.read()
        raise BrokenPipeError


def test_a_process_that_does_not_start_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(processes, "CHECK_S", 0.01)
    with subprocess.Popen(["sleep", "600"]) as other:
        stuck = Stuck()
        watch = WatchedLoader([], num_workers=1, limits=Limits(rank=2, warn_s=0.02, abort_s=0.1))
        watch._loader = stuck
        with pytest.raises(
            LoaderLost, match=r"^a loader process of rank 2 is starting and has not sent its next batch f"
        ):
            next(watch.batches())
        watch.close()
        assert stuck.child.returncode == -signal.SIGKILL and other.poll() is None
        other.kill()
    assert "for a loader process of rank 2, starting, to send its next batch" in caplog.text


def test_memory_is_named_where_it_has_run_out():
    loader = train_loader(Odd(lambda: raising(OSError(12, "Cannot allocate memory"))), max_unreadable=0)
    loader._batches.tolerated = ()
    with pytest.raises(OSError, match="Cannot allocate") as caught:
        list(batches_of(loader))
    assert caught.value.__notes__ == ["the memory may have run out; take fewer loader processes"]
    loader.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(processes, "CHECK_S", 0.02)


def stopped(batches: Any) -> int:
    """Stops the loader process after the first batch; returns its number."""
    next(batches)
    (pid,) = (child.pid for child in active_children())
    os.kill(pid, signal.SIGSTOP)
    while processes._state(pid) != "stopped":
        pass
    return pid


@pytest.mark.filterwarnings("ignore:Exception ignored")  # torch opens files to see whether it can, and leaves them
def test_a_loader_process_that_is_stopped_is_named_and_given_up(quick, caplog):
    loader = train_loader(list(range(400)), limits=Limits(rank=3, warn_s=0.1, abort_s=0.5))
    batches = batches_of(loader)
    pid = stopped(batches)
    told = (
        rf"^loader process 0 of rank 3 \(pid {pid}\) is stopped and has not sent samples \d+, \d+, \d+, \d+ for 0.5 s "
        rf"\(abort_s\): continue it with kill -CONT {pid}, or find out who has stopped it$"
    )
    with pytest.raises(LoaderLost, match=told):
        list(batches)
    assert f"waited 0 s for loader process 0 of rank 3 (pid {pid}), stopped, to send samples" in caplog.text
    loader.close()
    assert not active_children()
    assert len(list(batches_of(loader))) == 100  # it opens again
    loader.close()


def test_a_run_that_shall_stop_does_not_wait_for_a_process_that_is_stopped(quick):
    loader = train_loader(list(range(400)), limits=Limits(wants_stop=lambda: "SIGTERM"))
    batches = batches_of(loader)
    stopped(batches)
    with pytest.raises(LoaderLost, match=r"has not sent .* while the run shall stop \(SIGTERM\): continue it with"):
        list(batches)
    loader.close()


class Hangs(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return time.sleep(1000) if index == 6 else super().__getitem__(index)


def test_a_loader_process_that_says_nothing_is_given_up_also_in_an_evaluation(quick):
    limits = Limits(abort_s=1.5)
    loader = EvaluationLoader(Hangs(range(8)), batch_size=4, rank=0, world_size=1, num_workers=2, limits=limits)
    told = r"^loader process 1 of rank 0 .* is alive and has not sent samples 4, 5, 6, 7 for 1.5 s .*raise comm.abort_s"
    with pytest.raises(LoaderLost, match=told):
        list(loader)
    assert not active_children()


def test_a_process_that_is_stopped_does_not_outlive_its_loader():
    loader = train_loader(list(range(40)))
    batches = batches_of(loader)
    pid = stopped(batches)
    loader.close()
    with pytest.raises(OSError, match="No such process"):
        os.kill(pid, 0)


def break_off(pid: int, error: Exception) -> None:
    """Fails as the socket of a process that is ending does, while the process is still there."""
    threading.Timer(0.05, os.kill, (pid, signal.SIGKILL)).start()
    raise error


class BreaksOff:
    """Is received by a rank while the loader process that sends it ends."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return break_off, (os.getpid(), self.error)


@pytest.mark.parametrize("error", [EOFError(), FileNotFoundError(2, "No such file or directory")])
def test_a_process_that_ends_while_its_tensor_is_received_is_named(error):
    loader = train_loader(Odd(lambda: BreaksOff(error)), collate=list)
    with pytest.raises(LoaderLost, match=r"^loader process 0 of rank 0 \(pid \d+\) was killed by SIGKILL before it"):
        list(batches_of(loader))
    loader.close()


IN_A_DEEP_FOLDER = """
import multiprocessing, os, sys, torch
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import TrainSampler
for again in range(2):
    loader = TrainLoader(torch.arange(8.0), TrainSampler(8, global_batch=4, rank=0, world_size=1), num_workers=1)
    print(sorted(x for _, micros in loader.epoch() for batch in micros for x in batch.tolist()))
    loader.close()
print(multiprocessing.util.get_temp_dir())
"""


@pytest.mark.slow
def test_loader_processes_send_tensors_where_tmpdir_has_a_long_path(tmp_path):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_A_DEEP_FOLDER],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(deep)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    *rows, folder = done.stdout.splitlines()
    assert rows == [str([float(each) for each in range(8)])] * 2
    assert len(folder) < 80 and not Path(folder).exists()  # it is removed with the process
