"""From a command line to workers and back: real processes, with a stand-in (tests/standin) for the training itself.

Tests: ddp/process/arguments.py, ddp/run/launch/bootstrap.py, ddp/run/launch/failures.py, ddp/run/launch/plugin.py,
ddp/run/launch/run_folder.py.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import pickle
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
import yaml
from ranks import without_gloo

import ddp
from ddp.data.files.storage import as_given
from ddp.errors import CheckpointError, ConfigError, PeerLost, TooFewWorkers, WorkersFailed
from ddp.process.arguments import Parser, quoted
from ddp.run.launch import command_line, worker
from ddp.run.launch.command_line import _quoted_texts, composed, main, options_first, translated
from ddp.run.launch.failures import Failure, Report, Seat, describe_failures
from ddp.run.launch.from_python import launch
from ddp.run.launch.run_folder import continued, forget_trial, only_writer, prepare
from ddp.run.launch.supervisor import Ended
from ddp.run.launch.torchrun import _asked_for, prepared
from ddp.run.settings.checks import check_gpus, name_problems
from ddp.run.settings.config import Config
from ddp.run.settings.groups import DataFiles
from ddp.run.settings.reader import from_plain, value_of

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
TRAIN = [sys.executable, str(ROOT / "recipes" / "train.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN_UNDER_TORCHRUN = [*TORCHRUN, *TRAIN[1:]]


def surroundings(standin: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "tests" / "standin"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "STANDIN": standin}


def start(command: list[str], folder: Path, *, standin: str = "train") -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=surroundings(standin), stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


class Command(Protocol):
    """Runs recipes/train.py's `main` in this process; returns status and what it printed."""

    def __call__(self, *arguments: str, standin: str = "train") -> tuple[Any, str, str]: ...


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Saves the seconds in which an interpreter would import torch: for tests that send it no signal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # `main` sets it; this takes it back
    monkeypatch.setitem(sys.modules, "ddp.run.assembly.stages", None)  # the next line replaces it; this takes it back
    runpy.run_path(str(ROOT / "tests" / "standin" / "sitecustomize.py"))

    def run(*arguments: str, standin: str = "train") -> tuple[Any, str, str]:
        for name, value in surroundings(standin).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    return run


def wait_for(condition: Callable[[], bool], *, limit_s: float = 150.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "never came"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def seen(run_dir: Path, rank: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / f"seen-{rank}.json").read_text())
    return result


# ------------------------------------------------------------------------------------------------------ the recipes


@pytest.mark.slow
def test_sweep_runs_each_world_size_in_a_folder_of_its_own(tmp_path: Path, command: Command) -> None:
    words = ["-m", "cluster.workers=1,2", "cluster.threads_per_worker=1", "sweep.name=mine"]
    status, out, err = command(*words)
    assert (status, err) == (0, "")
    assert "this is rank 0" in out and "this is rank 1" not in out
    assert "starting 1 worker for runs/mine/cluster.workers=1/" in out
    assert command(*words) == (0, table := out[out.index("sweep in runs/") :], ""), "all is there already"
    assert "cluster.workers" in table
    assert "cluster.threads" not in table, "it shows what differs"
    assert out.count("finished 0.5") == 2
    (sweep,) = (tmp_path / "runs").iterdir()
    for job, workers in [("cluster.workers=1", 1), ("cluster.workers=2", 2)]:
        run_dir = sweep / job
        config = from_plain(yaml.safe_load((run_dir / "config.yaml").read_text()))
        assert (config.cluster.workers, config.run.dir) == (workers, str(run_dir))
        assert config.run.group == sweep.name
        for rank in range(workers):
            about = seen(run_dir, rank)
            assert not about["hydra"], "a worker imported Hydra"
            assert (about["workers"], about["threads"], about["omp"], about["mkl"]) == (workers, 1, "1", "AUTO")
    assert "this is rank 1" in (sweep / "cluster.workers=2" / "logs" / "rank-1.log").read_text()
    assert not list(tmp_path.rglob(".hydra"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "seed=1,2", "sweep.parallel=1000"], "sweep.parallel=1000: each job has its own cores, and"),
        (["-m", "seed=1,2", "sweep.parallel=1,2"], "sweep.parallel: all jobs of a sweep share it; give it one value"),
        (["-m", "seed=1,2", "sweep.parallel=0"], "sweep.parallel=0: must be a whole number from 1 up"),
        (["sweep.name=mine"], "sweep.name=mine: is for a sweep; add -m, and give a setting several values"),
    ],
)
@pytest.mark.quick(1)
def test_bad_input_of_a_sweep(arguments: list[str], words: str, tmp_path: Path, command: Command) -> None:
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {words}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_another_launcher_leads_to_the_same_table(tmp_path: Path, command: Command) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install hydra-submitit-launcher")
    launcher = "hydra/launcher=submitit_local"
    status, out, _ = command("-m", "cluster.workers=1", "seed=1,404", "sweep.name=mine", launcher)
    assert status == 2 and "refused (status 2)" in out
    table = (tmp_path / "runs" / "mine" / "sweep.csv").read_text().splitlines()
    assert table == ["seed,test_accuracy,samples_per_s,seconds,status,folder", "1,0.5,,,0,seed=1", "404,,,,2,seed=404"]


def test_signal_to_the_parent_or_to_one_worker_ends_in_the_documented_status(tmp_path: Path) -> None:
    runs = {name: tmp_path / "runs" / name for name in ("parent", "worker", "slurm")}
    started = {name: start([*TRAIN, f"run.name={name}"], tmp_path, standin="wait") for name in runs}
    for run_dir in runs.values():
        wait_for(lambda run_dir=run_dir: all((run_dir / f"ready-{rank}").exists() for rank in (0, 1)))
    started["parent"].send_signal(signal.SIGTERM)
    os.kill(seen(runs["worker"], 1)["pid"], signal.SIGINT)
    started["slurm"].send_signal(signal.SIGUSR1)
    for name, expected, word in [("parent", 143, "SIGTERM"), ("worker", 130, "SIGINT"), ("slurm", 138, "SIGUSR1")]:
        status, _, err = finish(started[name])
        assert status == expected
        assert err == f"stopped by {word}; continue with {' '.join(TRAIN)} run.name={name} resume=auto\n"
        assert json.loads((runs[name] / "summary.json").read_text())["stopped_by"] == word


@pytest.mark.slow
def test_a_worker_that_raises_is_the_last_thing_seen_and_its_run_is_not_overwritten(
    tmp_path: Path, command: Command
) -> None:
    status, _, err = command("run.name=mine", standin="raise")
    assert status == 1
    assert err.splitlines()[-2] == "ArithmeticError: scripted"
    assert re.fullmatch(r"in your code: .*sitecustomize.py, line \d+, in run: raise error", err.splitlines()[-1])
    assert "rank 1 on host" in err and "failed at step 7:" in err
    assert err.count("Traceback") == 1, "the parent adds none of its own"

    status, _, err = command("run.name=mine")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: run.name=mine:") and "resume=auto" in err

    status, _, err = command("run.name=mine", "resume=auto")
    assert (status, err) == (0, "")
    assert not list((tmp_path / "runs" / "mine" / "logs").glob("error-*")), "the old failure is forgotten"


@pytest.mark.parametrize(
    ("arguments", "said", "words"),
    [
        (["cluster.worker=3"], "", "Did you mean cluster.workers?"),
        (["hydra.run.dir=/dev/null/x"], "", "run directory /dev/null/x: Not a directory"),
        (["strategy=one_device"], "", "strategy=one_device: is for one worker, and there are 2; take one worker, or"),
        (["seed=404", "run.name=a"], "starting 2 workers for runs/a/ …\n", "data.root=data: no such data"),
    ],
)
@pytest.mark.quick(1)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[str], said: str, words: str, tmp_path: Path, command: Command
) -> None:
    status, out, err = command(*arguments)
    assert (status, out, err.count("\n")) == (2, said, 1)
    assert err.startswith("error: ") and words in err
    assert [path for path in tmp_path.rglob("*") if path.name != "runs"] == []


def test_torchrun_trains_with_rank_0_alone_composing(tmp_path: Path) -> None:
    settings = ["data=digits", "cluster.threads_per_worker=2", "run.name=t"]
    status, out, err = finish(start([*TRAIN_UNDER_TORCHRUN, *settings], tmp_path))
    assert status == 0, err
    assert "this is rank 0" in out and "this is rank 1" not in out and out.count("finished 0.5") == 1
    about = [seen(tmp_path / "runs" / "t", rank) for rank in (0, 1)]
    assert [each["hydra"] for each in about] == [True, False]
    assert all((each["workers"], each["torch_threads"], each["mkl"]) == (2, 2, "AUTO") for each in about)


@pytest.mark.slow
def test_torchrun_s_bad_input_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    status, _, err = finish(start([*TORCHRUN, "-m", "ddp", "train", "data=digit"], tmp_path))
    assert status == 1
    assert err.count("error: unknown choice data=digit. Did you mean data=digits?") == 1
    assert 'ddp/__main__.py", line' not in err, "no traceback of a rank"


# ------------------------------------------------------------------------------------------------------------ launch


def collector() -> tuple[bool, bool]:
    """Returns True if Python's collector runs, and True if it leaves out what stood before the function."""
    return gc.isenabled(), gc.get_freeze_count() > 0


def describe_self(word: str, *, times: int) -> tuple[str, str, str | None, str | None, bool]:
    hydra = any(name.split(".")[0] in ("hydra", "omegaconf") for name in sys.modules)
    return word * times, os.environ["RANK"], os.environ.get("OMP_NUM_THREADS"), os.environ.get("MKL_CBWR"), hydra


def test_launch_returns_results_by_rank_and_two_at_once_do_not_meet() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    other: list[Any] = []
    word = "closure"
    thread = threading.Thread(
        target=lambda: other.extend(launch(lambda: (word, os.environ["RANK"], collector()), workers=3))
    )
    thread.start()
    results = launch(describe_self, "ab", times=2, workers=2, threads_per_worker=3)
    thread.join()
    assert results == [("abab", str(rank), "3", "AUTO", False) for rank in range(2)]
    assert other == [("closure", str(rank), (True, True)) for rank in range(3)]
    assert {number: signal.getsignal(number) for number in before} == before
    assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in os.environ


class Payload:
    """Makes a file in whichever process unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.file,)


def listening(pid: int) -> set[tuple[str, int]]:
    """Address, in the kernel's hexadecimal, and port of every TCP socket on which the process listens."""
    addresses: dict[str, tuple[str, int]] = {}
    for family in ("tcp", "tcp6"):
        for line in Path("/proc/net", family).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                address, _, port = words[1].partition(":")
                addresses[f"socket:[{words[9]}]"] = address, int(port, 16)
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError, KeyError):  # closed since, or no socket that listens
            found.add(addresses[str(link.readlink())])
    return found


def be_attacked(proof: Path, before: set[tuple[str, int]]) -> tuple[set[str], set[str]]:
    """The addresses on which the launcher and this rank listen; rank 0 attacks the launcher, as a stranger would.

    Args:
        proof: what only a launcher that unpickles makes.
        before: where the launcher's process listened before, for reasons of its own.
    """
    from torch.distributed import TCPStore

    comm = ddp.init(shared_memory=False)
    launcher, worker = listening(os.getppid()) - before, listening(os.getpid())
    if comm.rank == 0:
        state = base64.b64encode(pickle.dumps(Payload(proof))).decode()
        for _, port in launcher:
            stranger = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=5))
            stranger.set(f"torch.rendezvous.{os.environ['TORCHELASTIC_RUN_ID']}", state)
    ddp.shutdown()
    return {address for address, _ in launcher}, {address for address, _ in worker}


@pytest.mark.slow
def test_a_launch_listens_on_loopback_only_and_unpickles_nothing_of_its_store(tmp_path: Path) -> None:
    results = launch(be_attacked, tmp_path / "proof", listening(os.getpid()), workers=2)
    loopback = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}  # the last one: 127.0.0.1 as IPv6
    assert all(launcher and launcher <= loopback for launcher, _ in results)
    assert all(worker and worker <= loopback for _, worker in results)
    assert list(tmp_path.iterdir()) == [], "the launcher ran what a stranger had written"


def fail_as_told(tell: Mapping[str, str], folder: Path) -> None:
    pid = folder / f"pid-{os.environ['RANK']}"
    pid.with_suffix(".partial").write_text(str(os.getpid()))
    pid.with_suffix(".partial").rename(pid)
    match tell.get(os.environ["RANK"]):
        case "raise":
            raise ArithmeticError("scripted")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "lost":  # as a neighbour does: when rank 1 is gone, and whatever the engine says meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            wait_for((folder / "pid-1").exists)
            wait_for(lambda: not is_running(int((folder / "pid-1").read_text())))
            raise PeerLost(1, "here", 0, 3, "all_reduce")
        case "exit":
            print("last words", flush=True)
            os._exit(7)
        case "hang":
            threading.Event().wait()


@pytest.mark.parametrize(
    ("tell", "last", "elsewhere", "kind"),
    [
        (
            *({"0": "lost", "1": "raise"}, "ArithmeticError: scripted", "rank 0 stopped because rank 1 failed"),
            ArithmeticError,
        ),
        (
            *({"0": "lost", "1": "kill"}, "rank 1 was killed by SIGKILL (out of memory?)"),
            *("rank 0 stopped because rank 1", None),
        ),
        ({"1": "exit"}, "last words", "rank 1 exited with status 7", None),
    ],
)
@pytest.mark.quick(1)
def test_launch_names_the_root_cause_last(
    tell: dict[str, str], last: str, elsewhere: str, kind: type[Exception] | None, tmp_path: Path
) -> None:
    with pytest.raises(WorkersFailed if kind is None else kind) as error:
        launch(fail_as_told, tell, tmp_path)
    assert isinstance(error.value, WorkersFailed) and error.value.rank == 1
    assert error.value.type_name == ("" if kind is None else kind.__name__)
    lines = str(error.value).splitlines()
    assert last in (lines[-1], lines[-1].startswith("in your code: ") and lines[-2])
    assert elsewhere in str(error.value)


def test_a_launch_past_its_time_says_where_it_stood(tmp_path: Path) -> None:
    words = r"(?s)in fail_as_told.*TimeoutError: still running after timeout_s=1$"
    with pytest.raises(TimeoutError, match=words) as failed:
        launch(fail_as_told, {"0": "hang"}, tmp_path, workers=1, timeout_s=1)
    assert isinstance(failed.value, WorkersFailed)


def test_launch_needs_a_worker() -> None:
    with pytest.raises(ConfigError, match="workers=0"):
        launch(print, workers=0)


# ----------------------------------------------------------------------------------------------- who failed, in words


def reported(logs: Path, rank: int, *, time_s: float, secondary: bool = False) -> None:
    words = {"message": f"of {rank}", "traceback": f"E: of {rank}"}
    Report(rank=rank, type="E", **words, is_secondary=secondary, time_s=time_s).write(logs)


@pytest.mark.parametrize(
    ("failures", "reports", "root"),
    [
        ({0: (1, 100), 1: (1, 100)}, {0: (100.2, False), 1: (100.1, False)}, 1),  # the earlier one
        ({0: (1, 100), 1: (1, 100)}, {0: (100.1, True), 1: (100.2, False)}, 1),  # the one that lost nobody
        ({0: (1, 100), 1: (-9, 100)}, {0: (100.1, False)}, 1),  # a death beside what it caused
        ({1: (1, 100), 0: (-9, 130)}, {1: (100.1, False)}, 1),  # killed by the engine, 30 s later
        ({1: (1, 100), 0: (-15, 100)}, {1: (100.1, True)}, 1),  # ended by the engine; all that is known is of rank 1
        ({0: (1, 100), 1: (-9, 130)}, {0: (100.1, True)}, 0),  # rank 1 hung: what lost it knows more
        ({1: (-11, 100), 0: (-15, 100)}, {}, 1),
        ({2: (3, 100)}, {}, 2),
    ],
)
def test_root_cause(
    failures: dict[int, tuple[int, float]], reports: dict[int, tuple[float, bool]], root: int, tmp_path: Path
) -> None:
    for rank, (time_s, secondary) in reports.items():
        reported(tmp_path, rank, time_s=time_s, secondary=secondary)
    text = describe_failures({rank: Failure(*how) for rank, how in failures.items()}, tmp_path).text
    *others, block = text.split(f"rank {root} ", 1) if len(failures) == 1 else text.rsplit(f"\nrank {root} ", 1)
    assert block.startswith(("on host", "was killed", "exited"))
    assert all(f"rank {rank} " in others[0] for rank in failures if rank != root)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.worker=3", "unknown key cluster.worker. Did you mean cluster.workers? Valid in cluster: "),
        ("+cluster.worker=3", "unknown key cluster.worker. Did you mean cluster.workers?"),
        ("nothing=3", "unknown key nothing. Valid: "),
        ("data.context=3", "unknown key data.context: it belongs to data=jsonl or data=csv or data=parquet or"),
        *(
            (odd, f"unknown choice {odd}.")
            for odd in ("strategy=null", "strategy=5", "strategy=-1e3", "strategy=[a]", "strategy={a:1}")
        ),
        ("hook=null", "unknown choice hook=null."),
        ("recipe=true", "unknown choice recipe=true."),
        ("data=xyz", "unknown choice data=xyz. Valid: arrow, cifar10, csv, digits, image_folder"),
        ("batch.global_size=abc", "batch.global_size=abc: expected a whole number"),
        ("batch.global_size=null", "batch.global_size=null: expected a whole number"),
        ("epochs=1.5", "epochs=1.5: expected a whole number or null"),
        ("device=gpu", "device=gpu: expected one of auto, cpu, cuda"),
        ("precision=BF16", "expected one of fp32, bf16, bf16_pure, fp16. Did you mean bf16?"),
        ("model=CNN", "unknown choice model=CNN. Did you mean model=cnn?"),
        ("comm.algorithm=RING", "comm.algorithm=RING: unknown. Did you mean ring? Choose one of auto"),
        ("comm.algorithm=hierarchical", "is for several hosts, and all workers are on this one; leave it out"),
        ("comm.algorithm=shared_memory+ring", "is for several hosts, and all workers are on this one; leave it out"),
        ("data.sharding=Sample", "data.sharding=Sample: unknown. Did you mean sample? Choose one of"),
        ("batch_size=64", "unknown key batch_size. Did you mean batch.global_size?"),
        ("validation_split=0.1", "unknown key validation_split. Did you mean data.validation?"),
        ("data.shuffle=true", "unknown key data.shuffle. Did you mean data.order?"),
        ("steps_per_epoch=3", "unknown key steps_per_epoch. Did you mean max_steps?"),
        ("optim.lr=[1]", "optim.lr=[1]: expected a number"),
        ("batch.global_size=1", "batch.global_size=1: smaller than cluster.workers=2"),
        ("cluster.workers=3", "cluster.workers=3: the launcher says that there are 2 workers already; leave this"),
        ("-m", "-m is for a process that starts its own workers, and the launcher says that there are 2"),
        ("--epochs=3", "--epochs=3: settings have no dashes before them; write epochs=3"),
        ("a b", "cannot read 'a b': "),
        ("seed=1,2", "seed=1,2 has several values: put -m first for a sweep of them, or write a list, seed=[1,2]"),
        ("hydra/launcher=job", "unknown choice hydra/launcher=job. Did you mean hydra/launcher=jobs?"),
        ("hydra/launcher=submitit_nope", "hydra/launcher=submitit_nope"),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
        ("run.name=${seed", "run.name: no viable alternative at input"),
        ("seed=${oc.env:PATH_OF_NOBODY,7}", "seed=7: expected a whole number, got a text: leave out its quotes"),
        ("~schedule", "~schedule: a setting always has a value; write schedule=VALUE"),
        ("~max_steps", "~max_steps: a setting always has a value; write max_steps=VALUE"),
        ("=3", "=3: a setting always has a value; write NAME=VALUE"),
    ],
)
@pytest.mark.quick(5)
def test_every_error_of_hydra_becomes_one_sentence(
    override: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", f"hydra.run.dir={tmp_path}", override])
    with pytest.raises(Exception) as error:
        _asked_for(workers=2, servers=0, local_workers=2)
    message = translated(error.value)
    assert message is not None and words in message
    assert "\n" not in message and "schema_" not in message


def test_a_file_of_the_user_s_own_that_is_no_yaml_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("optim:\n  lr: 0.5\n   beta1: 0.8\n")
    monkeypatch.setattr(sys, "argv", ["train.py", f"--config-dir={tmp_path}", "recipe=mine"])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1 and f'"{tmp_path}/recipe/mine.yaml", line 3' in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epochs", "3"], "--epochs 3: settings have no dashes before them; write epochs=3"),
        (["epochs=3", "--batch-size=8"], "settings have no dashes before them; write batch.global_size=8"),
        (["--workers", "2", "seed=1"], "write cluster.workers=2"),
        (["-lr", "seed=1"], "-lr: settings have no dashes before them; write optim.lr=VALUE"),
    ],
)
def test_a_setting_that_is_written_as_an_option_is_told_how(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        options_first(arguments)
    assert str(refused.value).endswith(words)


def test_an_option_of_the_command_that_is_misspelt_is_no_setting() -> None:
    with pytest.raises(ConfigError, match="--trails: there is no such option; did you mean --trials"):
        options_first(["--trails", "5"], own=["--trials", "--seed"])
    with pytest.raises(ConfigError, match="write seed=1"):
        options_first(["--seed=1"], own=["--workers", "--seconds"])


def test_the_word_for_a_sweep_may_stand_anywhere_and_its_paths_are_split_at_commas() -> None:
    assert options_first(["epochs=3", "-m", "seed=1,2"]) == ["-m", "epochs=3", "seed=1,2"]
    paths = ["data.path=a.csv,{b,c}.tar", "data.test_path=d", 'data.path="e,f"', "seed=1,2"]
    quoted = ['data.path=a.csv,"{b,c}.tar"', "data.test_path=d", 'data.path="e,f"', "seed=1,2"]
    assert _quoted_texts(paths, sweeps=True) == quoted
    assert _quoted_texts(paths) == ['data.path="a.csv,{b,c}.tar"', *quoted[1:]]
    names = ["data.target=a (b)", "data.target=label", "data.inputs=[x, petal (cm)]", "data.validation_path={a,b}"]
    assert _quoted_texts(names) == [
        *('data.target="a (b)"', "data.target=label", 'data.inputs=[x,"petal (cm)"]', 'data.validation_path="{a,b}"')
    ]


TEXTS = ["5e82123", "1.10", "1_000", "007", "0x10", "nan", "-inf", "true", "No", "null", "2026-11-28", "12:30:45", "~"]
TEXTS += ["a b", "a/b", "müde", "it's", "a\\", "{a: b}", "cluster.workers=2"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_a_text_whatever_hydra_or_yaml_would_read(text: str) -> None:
    """As the name of a run, in a list, of a sweep's jobs, in a word of another command, and as it is printed."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # not at the top: workers import this file

    parser = OverridesParser.create()

    def read(word: str, *, sweeps: bool = False) -> Any:
        return parser.parse_override(*_quoted_texts([word], sweeps=sweeps)).value()

    assert read(f"run.name={text}") == read(f"run.name={quoted(text)}") == read(f"data.target={text}") == text or (
        text == "null" and read("data.target=null") is None
    )
    assert value_of("run.name", text) == value_of("run.name", quoted(text)) == text
    if not set(text) & set("{\\"):
        assert read(f"init_from.skip=[{text},0.]") == [text, "0."]
        several = read(f"run.name={text},7", sweeps=True).list
        assert [str(getattr(each, "text", each)) for each in several] == [text, "7"]


def test_a_name_that_looks_like_a_number_names_the_folder_and_other_settings_keep_their_types() -> None:
    words = ["run.name=5e82123", "run.group=1e5", "optim.lr=1e-3", "epochs=7", "init_from.path=null"]
    config, run_dir = composed(words)
    assert (config.run.name, run_dir.name, config.run.group) == ("5e82123", "5e82123", "1e5")
    assert (config.optim.lr, config.epochs, config.init_from.path) == (1e-3, 7, None)


@pytest.mark.parametrize("name", ["..", ".", "", "a/../b", "/a", "a/", "a//b", " a", "a ", "a/ b", "\0", "\x1b[2J"])
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    for key in ("run.name", "sweep.name"):
        (problem,) = name_problems(key, name)
        assert problem.startswith(f"{key}={name}: is no name of a folder below runs/; take one like mine or group/mine")
        if name:
            with pytest.raises(ConfigError, match=f"^{key}=.*: is no name"):
                from_plain({key.partition(".")[0]: {"name": name}})


def test_no_folder_is_made_for_a_name_that_leads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for words in (["run.name=.."], ["run.name="], ["-m", "seed=1,2", "sweep.name=../there"]):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        err = capsys.readouterr().err
        assert ended.value.code == 2 and err.count("\n") == 1 and ": is no name of a folder below runs/" in err
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_path_may_begin_with_the_user_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In settings and in Hydra's own, in words of other commands, as an option, and from Python."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["hydra.run.dir=~/run", "resume=~/old", "data=csv", "data.inputs=[x]", "data.target=y"]
    words += ["data.num_classes=2", "data.path=~/a.csv", "data.test_path=~/b.csv", "data.index_dir=~/ix"]
    config, run_dir = composed(words)
    assert (run_dir, config.resume) == (tmp_path / "run", f"{tmp_path}/old")
    assert isinstance(config.data, DataFiles)
    found = (config.data.path, config.data.test_path, config.data.index_dir)
    assert found == tuple(f"{tmp_path}/{name}" for name in ("a.csv", "b.csv", "ix"))
    assert composed(["init_from.path=~/w.pt"])[0].init_from.path == f"{tmp_path}/w.pt"
    assert from_plain({"data": {"name": "digits", "root": value_of("data.root", "~/d")}}).data.root == f"{tmp_path}/d"
    parser = Parser()
    parser.add_argument("--out", type=Path)
    assert parser.parse_args(["--out=~/x.csv"]).out == tmp_path / "x.csv"
    assert (ddp.Folder("~/x", "~/y").path, ddp.Folder(Path("~/x"), "~/y").resume) == (f"{tmp_path}/x", f"{tmp_path}/y")
    assert as_given(["~/{1,2}.csv", "s3://~/b"]) == [f"{tmp_path}/{{1,2}}.csv", "s3://~/b"]
    assert as_given(Path("~/c")) == as_given("file://~/c") == [f"{tmp_path}/c"]
    monkeypatch.chdir(tmp_path)
    assert as_given(["~draft.csv", Path("~")]) == [f"{tmp_path}/~draft.csv", str(tmp_path)]  # of no user
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}/run"):
        ddp.load("~/run")


@pytest.mark.parametrize("of_several", [{"cluster": {"workers": 4, "local_workers": 2}}, {"cluster": {"workers": 4}}])
def test_an_algorithm_between_hosts_is_refused_on_one_host_alone(of_several: dict[str, Any]) -> None:
    plain = {**of_several, "comm": {"algorithm": "hierarchical"}}
    if "local_workers" in of_several["cluster"]:
        assert from_plain(plain).comm.algorithm == "hierarchical"
    else:
        with pytest.raises(ConfigError, match="is for several hosts"):
            from_plain(plain)


def test_a_run_s_folder_that_is_not_in_utf_8_is_refused_before_it_is_made(tmp_path: Path) -> None:
    run_dir = tmp_path / os.fsdecode(b"r\xff")
    with pytest.raises(ConfigError, match="this name is not UTF-8"), only_writer(run_dir):
        pytest.fail("it was made")
    assert not run_dir.exists()


def test_an_error_of_ours_is_not_made_the_user_s() -> None:
    assert translated(KeyError("x")) is None
    assert translated(pickle.PicklingError()) is None


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """A disk that ends: the kernel refuses to write more into one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replaces ddp.run.assembly.stages by a check that only remembers what it was given."""
    calls: list[Config] = []
    monkeypatch.setitem(sys.modules, "ddp.run.assembly.stages", type(sys)("ddp.run.assembly.stages"))

    def check(config: Config) -> tuple[None, None]:
        calls.append(config)
        return None, None

    monkeypatch.setattr(sys.modules["ddp.run.assembly.stages"], "check", check, raising=False)
    return calls


def test_a_full_disk_is_met_before_training(checked: list[Config], tmp_path: Path) -> None:
    with largest_file(1 << 20), pytest.raises(ConfigError, match=r"run directory .*: File too large; make room"):
        prepare(Config(), tmp_path)
    assert checked == [] and list(tmp_path.iterdir()) == []


def test_prepare_records_what_it_resolved_and_resume_keeps_the_shards(checked: list[Config], tmp_path: Path) -> None:
    first = from_plain({"cluster": {"workers": 4}, "run": {"name": "a"}})
    prepare(first, tmp_path)
    assert checked == [first]
    assert from_plain(yaml.safe_load((tmp_path / "config.yaml").read_text())) == first
    assert first.batch.num_shards == 4 and first.cluster.threads_per_worker is not None

    with pytest.raises(ConfigError, match="holds a run; continue it with resume=auto"):
        prepare(Config(), tmp_path)
    for resume in ("auto", str(tmp_path / "checkpoints" / "step-5")):
        second = from_plain({"cluster": {"workers": 2}, "resume": resume})
        prepare(second, tmp_path)
        assert second.batch.num_shards == 4

    written = (tmp_path / "config.yaml").stat()
    prepare(second, tmp_path)
    assert (tmp_path / "config.yaml").stat().st_mtime_ns == written.st_mtime_ns, "the same is not written again"


STRATEGIES = [("parameter_server", "auto", 0), ("auto", "parameter_server", 0)]  # or one, once that is resolved


@pytest.mark.parametrize(("before", "then", "servers"), STRATEGIES)
def test_a_run_goes_on_under_another_strategy_with_the_servers_of_that(
    before: str, then: str, servers: int, checked: list[Config], tmp_path: Path
) -> None:
    prepare(from_plain({"strategy": {"name": before}}), tmp_path)
    now = from_plain({"strategy": {"name": then}, "resume": "auto"})
    assert continued(now, [f"strategy={then}", "resume=auto"], tmp_path).cluster.servers == servers


@pytest.mark.parametrize(
    ("plain", "num_gpus", "refused"),
    [
        ({"device": "cuda"}, 0, "device=cuda: torch sees no GPU here"),
        ({"backend": "nccl"}, 0, "backend=nccl: torch sees no GPU here"),
        ({"backend": "nccl"}, 1, "backend=nccl: needs one GPU for each of the 2 workers here, and"),
        ({"backend": "nccl"}, 2, ""),
        ({"device": "cuda"}, 1, ""),
        ({}, 0, ""),
        ({"cluster": {"devices": [0]}}, 0, r"cluster.devices=\[0\]: torch sees no GPU here; take others, or leave it"),
        ({"cluster": {"devices": [2, 0]}}, 2, r"=\[2, 0\]: torch sees 2 GPUs here, counted from 0; take others, or"),
        ({"cluster": {"devices": [2]}, "backend": "nccl"}, 3, "each of the 2 workers here, and there are 1; take"),
        ({"cluster": {"devices": [2, 0]}, "backend": "nccl"}, 3, ""),
    ],
)
def test_only_who_starts_the_workers_knows_which_gpus_they_see(
    plain: dict[str, Any],
    num_gpus: int,
    refused: str,
    checked: list[Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    config = from_plain({**plain, "cluster": {"workers": 2, **plain.get("cluster", {})}})
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_gpus(config)
    prepare(config, tmp_path, local_workers=2)  # a launcher may show each worker another one
    assert checked == [config]


def test_a_trial_leaves_no_run_also_if_it_was_killed(checked: list[Config], tmp_path: Path) -> None:
    for _ in range(2):  # the first one was killed
        prepare(from_plain({"trial": True}), tmp_path)
    forget_trial(tmp_path)
    assert list(tmp_path.iterdir()) == []
    prepare(from_plain({"trial": True}), tmp_path)
    prepare(Config(), tmp_path)
    with pytest.raises(ConfigError, match="holds a run; continue it with resume=auto"):
        prepare(from_plain({"trial": True}), tmp_path)


def test_a_folder_that_another_run_writes_is_refused_and_a_fresh_one_left_empty(
    checked: list[Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["train_torchrun.py", f"hydra.run.dir={run_dir}"])
    for folder in (run_dir, run_dir / "checkpoints"):
        folder.mkdir()
        code = "import pathlib, sys; from ddp.process.files import hold; held = hold(pathlib.Path(sys.argv[1]))\n"
        code += "print(flush=True); sys.stdin.read(); held.close()"
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", code, folder], stdin=pipe, stdout=pipe) as other:
            assert other.stdout is not None and other.stdout.readline()
            before = sorted(tmp_path.rglob("*"))
            sent = prepared(workers=2, local_workers=2)
            assert f"{folder} is being written by process {other.pid} on host" in sent["error"]
            assert sorted(tmp_path.rglob("*")) == before and checked == []
    (run_dir / "checkpoints").rmdir()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "resume=nowhere/config"])
    monkeypatch.setattr(sys.modules["ddp.run.assembly.stages"], "check", _refuse)
    assert prepared(workers=2, local_workers=2)["error"] == "no such data"
    assert not run_dir.exists()


def _refuse(_: Config) -> None:
    raise ConfigError("no such data")


@pytest.mark.parametrize(
    "share", [0.1, 0.3, 0.5, 0.7, 0.9, 1.0, "", "[" * 1_000, "- a", "\0", "seed: x", "optim: {name: []}"]
)
@pytest.mark.quick(2)
def test_a_damaged_config_is_one_sentence_and_its_checkpoints_stay_usable(
    share: float | str, checked: list[Config], tmp_path: Path
) -> None:
    prepare(Config(), tmp_path)
    path = tmp_path / "config.yaml"
    whole = path.read_text()
    path.write_text(share if isinstance(share, str) else whole[: int(share * whole.rindex("\n", 0, -1)) + 1])
    with pytest.raises(
        ConfigError, match=rf"^{path} is damaged: .*resume={tmp_path}/checkpoints run.name=NEW"
    ) as error:
        continued(from_plain({"resume": "auto"}), [], tmp_path)
    assert "\n" not in str(error.value)
    again = from_plain({"resume": str(tmp_path / "checkpoints")})
    prepare(again, tmp_path)
    assert from_plain(yaml.safe_load(path.read_text())) == again

    path.write_text(whole[:-1])  # a value that is cut can be another one
    with pytest.raises(ConfigError, match="damaged: it ends in the middle of a line"):
        continued(from_plain({"resume": "auto"}), [], tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"damaged: .*is not a regular file"):
        continued(from_plain({"resume": "auto"}), [], tmp_path)


# ------------------------------------------------------------------------------------------------------ Ctrl-Z and fg


PAUSED = """
import os, sys, ddp
def f():
    comm = ddp.init(abort_s=5, warn_s=6)
    open(f"pid-{comm.rank}", "w").write(str(os.getpid()))
    while not (comm.agree_any(os.path.exists("resumed"))):
        pass
    ddp.shutdown()
    return comm.rank
print(ddp.launch(f, workers=2))
"""


@pytest.mark.slow
def test_a_launch_that_is_paused_at_the_terminal_pauses_its_workers_and_goes_on_with_them(tmp_path: Path) -> None:
    """The terminal's signal reaches the launcher alone, because each worker has a session of its own."""
    pipe, variables = subprocess.PIPE, {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PAUSED]
    launched = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=pipe, stderr=pipe, text=True)
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    processes = [launched.pid, *(int(file.read_text()) for file in files)]

    def states() -> set[str]:
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in processes}

    launched.send_signal(signal.SIGTSTP)
    wait_for(lambda: states() == {"T"})
    time.sleep(7)  # longer than the deadline, and than the wait that is worth a warning
    (tmp_path / "resumed").touch()
    launched.send_signal(signal.SIGCONT)
    status, printed, errors = finish(launched)
    assert (status, without_gloo(printed), errors) == (0, "[0, 1]\n", "")


JOB = """
import subprocess, sys
from ddp.run.launch import command_line
from ddp.run.launch import sweep
def main():
    child = subprocess.Popen([sys.executable, "-IS", "-c", "input()"], start_new_session=True, stdin=subprocess.PIPE)
    print(child.pid, flush=True)
    child.communicate(sys.stdin.buffer.readline())
    sys.exit()
command_line.main = main
sweep.main(["--parent", sys.argv[1], "none"])
"""


def test_a_job_of_a_sweep_can_be_paused_before_its_workers_begin(tmp_path: Path) -> None:
    """It has a session of its own, and the kernel ignores Ctrl-Z there unless it is handled."""
    command = [sys.executable, "-c", JOB, str(os.getpid())]
    variables, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    job = subprocess.Popen(command, cwd=tmp_path, env=variables, start_new_session=True, stdin=pipe, stdout=pipe)
    assert job.stdin is not None and job.stdout is not None
    processes = [job.pid, int(job.stdout.readline())]

    def are_paused() -> bool:
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in processes} == {"T"}

    job.send_signal(signal.SIGTSTP)
    wait_for(are_paused)
    job.send_signal(signal.SIGCONT)
    wait_for(lambda: not are_paused())
    job.communicate(b"\n")
    assert job.returncode == 0


HEARD: dict[str, object] = {}  # by what was done, what SIGINT would have done then


def note_of(name: str) -> Callable[..., None]:
    return lambda *_, **__: HEARD.update({name: signal.getsignal(signal.SIGINT)})


def imported_for(name: str) -> Callable[..., None]:
    note_of(f"{name} imports")()
    return note_of(name)


class Function:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return imported_for, ("function",)


class Stages(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name != "run":
            raise AttributeError(name)
        return imported_for("worker")


def test_ctrl_c_is_no_exception_while_a_launcher_or_a_worker_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy and torch lose a KeyboardInterrupt that comes while they are imported, or raise another error."""
    HEARD.clear()
    monkeypatch.setattr(command_line, "prepare", note_of("launcher imports"))
    monkeypatch.setattr(command_line, "train", note_of("launcher"))
    command_line._trained(Config(), tmp_path)
    monkeypatch.setattr(worker, "take_log", lambda *_, **__: None)
    monkeypatch.setattr(worker, "guarded", lambda work, *_, **__: work())
    monkeypatch.setattr(worker, "write_result", lambda *_: None)
    (tmp_path / "call").write_bytes(pickle.dumps((1, sys.path)) + pickle.dumps((Function(), (), {}, {})))
    worker._call(tmp_path / "call", Seat(tmp_path, 0), timeout_s=None, take_role=lambda: None)
    monkeypatch.setitem(sys.modules, "ddp.run.assembly.stages", Stages("stages"))
    worker.train(Config(), tmp_path, rank=0)
    for name in ("launcher", "function", "worker"):
        assert HEARD[f"{name} imports"] == signal.SIG_DFL and HEARD[name] == signal.default_int_handler, name


def test_ctrl_c_ends_a_worker_that_is_imported_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "imported.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    bootstrap, variables = ROOT / "ddp/run/launch/bootstrap.py", {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-S", "-P", str(bootstrap), "imported"]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_too_few_workers_have_a_status_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, status in ((TooFewWorkers("1 of min_workers=2 workers are left"), 4), (ValueError("else"), 1)):
        Report.of(error, Seat(tmp_path / "logs", 0)).write(tmp_path / "logs")
        monkeypatch.setattr(command_line, "run_workers", lambda *_, **__: Ended(None, {0: Failure(1, time.time())}))
        assert command_line.train(Config(), tmp_path) == status
