"""What `ddp.launch` sends to its workers and back, in one process: mistakes in one sentence, before a worker starts."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import resource
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import ddp
from ddp.errors import ConfigError, safe_str, workers_failed
from ddp.run.launch.failures import Failure, Report, Seat, agreed_signal, describe_failures
from ddp.run.launch.from_python import CALL, _failed, folder_for_call, write_exception, write_result
from ddp.train.steps.state import TrainState

LOCK = threading.Lock()


def plain() -> int:
    return 7


def of_two(x: int, y: int = 0) -> int:
    return x + y


def with_global() -> bool:
    return LOCK.locked()


def with_closure() -> Callable[[], bool]:
    mine = threading.Lock()
    return lambda: mine.locked()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: ddp.launch(plain()),
            "needs a function, and got 7: give it train, and not train(), which runs it here",
        ),  # type: ignore[arg-type]
        (lambda: ddp.launch(plain, 2), r"too many positional arguments. Did you mean ddp.launch(plain, workers=2)?"),
        (lambda: ddp.launch(plain, nprocs=2), "unexpected keyword argument 'nprocs'. Did you mean workers=2?"),
        (lambda: ddp.launch(plain, worker=2), "Did you mean workers=2?"),
        (lambda: ddp.launch(plain, xyz=5, worker=2), "Did you mean workers=2?"),
        (
            lambda: ddp.launch(of_two),
            "calls of_two(x: 'int', y: 'int' = 0) -> 'int' with the other arguments: missing a required",
        ),
        (lambda: ddp.launch(plain, workers="2"), "workers='2': must be a whole number from 1 up"),  # type: ignore[arg-type]
        (lambda: ddp.launch(plain, workers=True), "workers=True: must be a whole number"),
        (lambda: ddp.launch(plain, workers=10**6), "workers=1000000: free memory and ulimit -u here are enough for "),
        (lambda: ddp.launch(plain, servers=10**6), "servers=1000000 workers=2: free memory and ulimit -u here are "),
        (lambda: ddp.launch(plain, threads_per_worker=0), "threads_per_worker=0: must be a whole number"),
        (lambda: ddp.launch(plain, timeout_s=0), "timeout_s=0: must be a number above 0, or leave it out"),
        (lambda: ddp.launch(of_two, 1, LOCK), "ddp.launch(of_two, …): argument 2 cannot be sent to another process"),
        (lambda: ddp.launch(of_two, x=LOCK), "ddp.launch(of_two, …): x= cannot be sent"),
        (lambda: ddp.launch(with_closure()), "mine, which <lambda> uses cannot be sent"),
        (lambda: ddp.launch(functools.partial(of_two, LOCK)), "ddp.launch(partial, …): the function cannot be sent"),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_workers_start(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call()
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_more_workers_than_the_cores_can_serve_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ddp.run.settings.checks.available_cores", lambda: 2)
    monkeypatch.setattr("ddp.run.launch.from_python.available_cores", lambda: 2)
    monkeypatch.setattr("ddp.run.launch.from_python.folder_for_call", lambda *_: pytest.fail("far enough"))
    with caplog.at_level(logging.WARNING, "ddp"), pytest.raises(pytest.fail.Exception, match="far enough"):
        ddp.launch(plain, workers=64)
    assert [record.getMessage() for record in caplog.records] == [
        "workers=64: they oversubscribe 2 cores; 2 or fewer train faster"
    ]


def sent(folder: Path) -> Any:
    with (folder / CALL).open("rb") as stream:
        pickle.load(stream)
        function, args, kwargs, _ = pickle.load(stream)
    return function(*args, **kwargs)


def test_a_main_program_may_call_its_attributes_as_torch_calls_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.classes` and `torch.ops` are no plain modules, and cloudpickle takes `own.classes` for a use of one."""
    module = ModuleType("__mp_main__")
    exec("import torch\ndef tell(own):\n    return [own.classes, own.ops, torch.ops.aten is not None]", module.__dict__)
    monkeypatch.setitem(sys.modules, "__mp_main__", module)
    with folder_for_call(1, module.tell, (SimpleNamespace(classes=3, ops=4),), {}) as folder:
        assert sent(folder) == [3, 4, True]


@pytest.mark.parametrize("name", ["__mp_main__", "only_loaded"])
def test_what_a_worker_cannot_import_travels_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the main program of a child that multiprocessing has spawned, or a file that was loaded by its path."""
    module = ModuleType(name)
    exec("class Two:\n    value = 2\ndef twice(two):\n    return two.value * Two.value", module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    with folder_for_call(1, module.twice, (module.Two(),), {}) as folder:
        monkeypatch.delitem(sys.modules, name)
        assert sent(folder) == 4
    assert not folder.exists()


@contextmanager
def full_disk() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_temporary_folder_is_one_sentence_on_both_ways(tmp_path: Path) -> None:
    large = torch.zeros(1 << 16)
    with (
        full_disk(),
        pytest.raises(ConfigError, match=r"File too large; make room there, or set TMPDIR to another"),
        folder_for_call(2, of_two, (large,), {}),
    ):
        pytest.fail("it was written")
    with full_disk(), pytest.raises(ConfigError, match="make room there, or set TMPDIR"):
        write_result(tmp_path, 0, plain, large)
    assert list(tmp_path.iterdir()) == [], "the report has room"


def test_a_result_that_cannot_be_sent_says_what_to_return(tmp_path: Path) -> None:
    state = TrainState.__new__(TrainState)
    state.comm = LOCK  # type: ignore[assignment]
    words = r"plain returned a TrainState, .*_thread.lock.*: return what you need of it, such as state.evaluation"
    with pytest.raises(ConfigError, match=words):
        write_result(tmp_path, 0, plain, state)
    with pytest.raises(ConfigError, match=r"plain returned a lock, .*: return what you need of it$"):
        write_result(tmp_path, 0, plain, LOCK)


class Pruned(Exception):
    """An exception of the user's own, as Optuna's TrialPruned."""

    def __init__(self, value: float, *, why: str = "") -> None:
        super().__init__(value)
        self.value, self.why = value, why

    def half(self) -> float:
        return self.value / 2


class NeedsTwo(Exception):
    """One whose pickle cannot be read."""

    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(one)


class Frozen(Exception):
    """One that lets nothing be derived from it, or be set."""

    def __init_subclass__(cls) -> None:
        raise TypeError("final")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")


class Own(Exception):
    """One that makes objects in a way of its own, and whose objects are in the way of an error under way."""

    rank = property(lambda self: 7)
    __hash__ = None  # type: ignore[assignment]

    def __new__(cls, text: str, code: int) -> Own:
        return super().__new__(cls, text, code)

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return Own, (*self.args, 3)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")

    def __repr__(self) -> str:
        raise ValueError("no text")

    __str__ = __repr__


class Leaves(Exception):
    """One whose module ends the program that imports it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


class Cancelled(BaseException):
    """One that `except Exception` lets pass."""


def holds_a_lock() -> ValueError:
    error = ValueError(1)
    error.lock = LOCK  # type: ignore[attr-defined]
    return error


@contextmanager
def under_way() -> Iterator[None]:
    """Is what the launch raises its error through; `contextlib` sets the error's traceback."""
    yield


def value(of: object, name: str) -> Any:
    return getattr(of, name, None)


@pytest.mark.parametrize(
    ("error", "is_sent", "is_of_type"),
    [
        (Pruned(3.0, why="too slow"), True, True),
        (FileNotFoundError(2, "No such file", "/nowhere"), True, True),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), True, True),
        (ExceptionGroup("several", [KeyError("k"), ValueError()]), True, True),
        (StopIteration(5), True, True),
        (RuntimeError("plain"), True, True),
        (ddp.PeerLost(1, "here", 0, 3, "all_reduce"), True, True),
        (ddp.WorkersFailed("of a launch of its own"), True, True),
        (MemoryError("x"), True, True),
        (Own("x", 3), True, True),
        (Leaves(), False, False),
        (Frozen("x"), True, False),
        (Cancelled("x"), True, False),
        (NeedsTwo(1, two=2), False, False),
        (holds_a_lock(), False, False),
        (ValueError("x" * 100), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_failed_launch_is_of_the_type_of_its_cause(
    error: BaseException, is_sent: bool, is_of_type: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if len(safe_str(error)) == 100:
        monkeypatch.setattr("ddp.run.launch.from_python.LARGEST_EXCEPTION", 99)
    Report.of(error, Seat(tmp_path / "logs", 1)).write(tmp_path / "logs")
    write_exception(tmp_path, 1, error)
    failures = {1: Failure(1, 0.0)}
    with pytest.raises(ddp.WorkersFailed) as caught, under_way():
        raise _failed(tmp_path, failures)
    failed = caught.value
    assert str(failed) == describe_failures(failures, tmp_path / "logs").text
    assert (failed.rank, failed.type_name) == (1, type(error).__name__)
    for each in (failed, copy.copy(failed), pickle.loads(pickle.dumps(failed))):
        assert isinstance(each, ddp.WorkersFailed) and isinstance(each, type(error)) == is_of_type
        assert (type(each.exception) is type(error)) == is_sent and each.__cause__ is each.exception
        assert (str(each), each.rank, each.type_name) == (str(failed), 1, failed.type_name)
        if is_of_type:
            ours = {"rank", *dir(ddp.WorkersFailed)}
            names = [name for name in dir(error) if not name.startswith("__") and name not in ours]
            here = {name: value(error, name) for name in names if not callable(value(error, name))}
            assert repr(here) == repr({name: value(each, name) for name in here})
            assert "".join(traceback.format_exception(failed)).count(" failed:\n") == 1  # the block, once
    if isinstance(error, Pruned):
        with pytest.raises(Pruned) as caught:
            raise failed
        assert (caught.value.value, caught.value.why, caught.value.half()) == (3.0, "too slow", 1.5)
        with pytest.raises(AttributeError, match="'Pruned' object has no attribute 'nothing'"):
            getattr(failed, "nothing")  # noqa: B009


def test_a_launch_within_a_launch_hands_on_the_type() -> None:
    inner = workers_failed("inner", 1, "KeyError", pickle.dumps(KeyError("k")))
    outer = workers_failed("outer", 0, "WorkersFailed", pickle.dumps(inner))
    assert isinstance(outer, KeyError) and (str(outer), outer.rank, str(outer.exception)) == ("outer", 0, "inner")


class Listens(ddp.Callback):
    """Raises on some ranks, and writes down what each rank hears."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self.folder, self.ranks = folder, ranks

    def step_end(self, state: TrainState, report: ddp.StepReport) -> None:
        if state.step == 2 and state.comm.rank in self.ranks:
            raise Pruned(0.5, why=f"as rank {state.comm.rank} has seen")

    def exception(self, state: TrainState, error: BaseException) -> None:
        (self.folder / f"{state.comm.rank}.txt").write_text(f"{type(error).__name__}: {error}")


def pruned_trial(folder: Path, ranks: Sequence[int]) -> None:
    model, data = torch.nn.Linear(2, 1), (torch.ones(8, 2), torch.ones(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listens, loss = Listens(folder, ranks), torch.nn.functional.mse_loss
    ddp.fit(model, data, optimizer, loss=loss, global_batch=2, epochs=2, folder=None, callbacks=[listens])


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@pytest.mark.quick(1)
def test_a_callback_s_error_keeps_its_type_and_the_other_ranks_hear_it(ranks: Sequence[int], tmp_path: Path) -> None:
    with pytest.raises(Pruned) as caught:
        ddp.launch(pruned_trial, tmp_path, ranks, workers=2)
    failed = caught.value
    assert isinstance(failed, ddp.WorkersFailed) and failed.rank in ranks and failed.value == 0.5
    assert failed.why == f"as rank {failed.rank} has seen"
    heard = (tmp_path / "1.txt").read_text()
    if 1 not in ranks:
        assert heard.startswith("PeerLost: lost rank 0 ") and "it failed: Pruned: 0.5" in heard
    else:
        assert heard == "Pruned: 0.5"


def test_workers_that_leave_by_a_signal_s_status_are_a_stop_and_no_failure() -> None:
    assert agreed_signal({rank: Failure(130, 0.0) for rank in range(2)}) is not None
    assert agreed_signal({0: Failure(130, 0.0), 1: Failure(1, 0.0)}) is None
    assert agreed_signal({}) is None


SCRIPT = """
import enum, io, multiprocessing, pickle, typing
import ddp

class Batch(typing.NamedTuple):
    x: int

class Colour(enum.Enum):
    RED = 1

def double(batch):
    return Batch(2 * batch.x)

def again(value):
    return pickle.loads(pickle.dumps(value))

def sys():  # a name that the worker's main program uses, too
    return "mine"

def work(batch):
    found = [type(again(batch)) is Batch, again(Colour.RED) is Colour.RED, again(double) is double]
    for method in ("fork", "spawn"):  # a spawned process begins with no name of this script
        with multiprocessing.get_context(method).Pool(1) as pool:
            found.append([type(each) is Batch and each.x for each in pool.map(double, [Batch(3)])] == [6])
    return found, again(sys)(), Batch(5)

if __name__ == "__main__":
    found, mine, batch = ddp.launch(work, Batch(1), workers=1)[0]
    print(all(found), len(found), mine, type(batch) is Batch)
"""


@pytest.mark.slow
def test_pickle_finds_what_the_script_defines(tmp_path: Path) -> None:
    """In a worker, and in the processes that it starts: torch.save, pools and loader processes need it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines()[-1:] == ["True 5 mine True"], ended.stderr
