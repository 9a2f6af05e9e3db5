"""The commands of the README against the real library: what a run leaves behind, how it is stopped, how it ends badly.

Starting an interpreter with torch three times is what costs here. So one sweep serves every test that needs a finished
run; and where no signal goes to the parent itself, the parent is this process: `command` calls the same `main`.

Tests: ddp/run/assembly/stages.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
import torch
import yaml
from matplotlib import image
from torch import Tensor

import ddp
from ddp.__main__ import main as ask
from ddp.lab.scaling import report as page
from ddp.lab.scaling.charts import in_seconds
from ddp.models import CNN
from ddp.run.assembly import stages as build
from ddp.run.launch.command_line import main
from ddp.run.settings.config import choose
from ddp.run.settings.reader import from_plain

ROOT = Path(__file__).parent.parent
TRAIN = [sys.executable, str(ROOT / "recipes" / "train.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN = [*TORCHRUN, str(ROOT / "recipes" / "train_torchrun.py")]

NUM_STEPS = 75  # of 29 per epoch (1,438 samples): two epochs' edges, and partial last batches
JOB = [f"max_steps={NUM_STEPS}", "batch.global_size=50", "cluster.threads_per_worker=1", "report.log_every=1"]
JOB = [*JOB, "checkpoint.every_steps=4", "report.curves=false"]
LONG_JOB = ["run.name=mine", *JOB, "max_steps=1500", "epochs=null"]  # it has an end, should nothing happen to it

LIMIT_S = 240.0  # of any one command, on a busy machine

# ------------------------------------------------------------------------------------------------------ to run it all


class Ended(NamedTuple):
    """A command's status and what it printed."""

    status: int | str | None
    out: str
    err: str


class Command:
    """Runs recipes/train.py's `main` in this process, in an empty folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capfd = folder, monkeypatch, capfd
        self._is_running = threading.Event()
        monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # `main` sets it; this takes it back

    def __call__(self, *arguments: str, meanwhile: Callable[[], object] | None = None) -> Ended:
        """Returns how `main` ended. `meanwhile` happens in a thread; what it raises is raised here."""
        self._monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        self._capfd.readouterr()
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(self.folder))
            if meanwhile is not None:
                pool = stack.enter_context(ThreadPoolExecutor(1))
            self._is_running.set()
            stack.callback(self._is_running.clear)  # so that the thread can end before the pool waits for it
            if meanwhile is not None:
                result = pool.submit(meanwhile)
            with pytest.raises(SystemExit) as exit:
                main()
        ended = Ended(exit.value.code, *self._capfd.readouterr())
        if meanwhile is not None and (error := result.exception()):
            raise AssertionError(ended) from error
        return ended

    def is_running(self) -> bool:
        return self._is_running.is_set()

    def fork(self) -> None:
        """Starts workers from now on as tests do that are not marked `engine`."""
        self._monkeypatch.setattr("ddp.run.launch.supervisor.started", forked.Started)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, monkeypatch, capfd)


def start(command: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    variables = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=folder, env=variables, stdout=pipe, stderr=pipe, text=True)


def first_on_path(folder: Path) -> str:
    """PYTHONPATH with `folder` before what stands there."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def finish(process: subprocess.Popen[str]) -> Ended:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()  # a worker follows its parent
    return Ended(process.returncode, out, err)


def workers(run_dir: Path) -> dict[int, int]:
    """Rank → process id of the run's living workers, each of which holds a log open."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            log = file.readlink()
            if log.parent == run_dir / "logs" and log.name.startswith("rank-"):
                found[int(log.stem.removeprefix("rank-"))] = int(file.parent.parent.name)
    return found


def steps_done(run_dir: Path) -> int:
    """The last step in metrics.jsonl."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"])
    return 0


def wait_for(condition: Callable[[], object], *, while_: Callable[[], bool] = lambda: True) -> None:
    """Returns when `condition` has come true; fails when it no longer can."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert while_() and time.monotonic() < deadline_s, "never came"
        time.sleep(0.01)


def wait_for_step(step: int, run_dir: Path, run: Command | subprocess.Popen[str]) -> None:
    """Returns when the running job has come so far."""
    is_running = run.is_running if isinstance(run, Command) else lambda: run.poll() is None
    wait_for(lambda: steps_done(run_dir) >= step, while_=is_running)


def final_model(run_dir: Path) -> dict[str, Tensor]:
    (path,) = run_dir.glob(f"checkpoints/step-{NUM_STEPS:08d}/model.pt")
    weights: dict[str, Tensor] = torch.load(path, weights_only=True)
    return weights


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))]
    assert not different


def summary_of(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return result


# What stands in every interpreter started with it on PYTHONPATH: it notes at the end what had been imported. torch's
# compiler imports sympy.
WITNESS = """
import atexit, os, pathlib, sys
def tell():
    if "torch" in sys.modules:
        found = sorted({name.split(".")[0] for name in sys.modules} & {"hydra", "sympy"})
        pathlib.Path(os.environ["WITNESS"], str(os.getpid())).write_text(f"{sys.argv} {found}")
atexit.register(tell)
"""


STRANGERS = ("ddp/__init__.py", "random.py")  # modules of these names in the folder where the job is started


class Finished(NamedTuple):
    """One sweep over two world sizes."""

    ended: Ended
    run_dirs: dict[int, Path]  # by world size
    imports: list[str]  # a line for each interpreter: its arguments, and which of Hydra and sympy it imported


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("sweep")
    witness = folder / "witness"
    witness.mkdir()
    (witness / "sitecustomize.py").write_text(WITNESS)
    for stranger in STRANGERS:
        (folder / stranger).parent.mkdir(exist_ok=True)
        (folder / stranger).write_text("raise AssertionError('imported from the current folder')")
    sweep = [*TRAIN, "-m", "cluster.workers=1,2", *JOB, "report.curves=true"]
    ended = finish(start(sweep, folder, PYTHONPATH=first_on_path(witness), WITNESS=str(witness)))
    assert (ended.status, ended.err) == (0, ""), ended
    (runs,) = (folder / "runs").iterdir()
    told = [path.read_text() for path in witness.iterdir() if path.name.isdigit()]
    return Finished(ended, {world_size: runs / f"cluster.workers={world_size}" for world_size in (1, 2)}, told)


# ------------------------------------------------------------------------------------------------ what a run leaves


@pytest.mark.slow
def test_a_sweep_trains_each_world_size_and_ends_with_a_table(finished: Finished) -> None:
    out = finished.ended.out
    for world_size, run_dir in finished.run_dirs.items():
        assert summary_of(run_dir)["world_size"] == world_size
        assert f"starting {world_size} worker" in out
        assert f"{world_size} worker{'s' * (world_size - 1)} × 1 thread on cpu" in out
        assert f"\nresults: runs/{run_dir.parent.name}/{run_dir.name}/\n" in out
    for words in ("test accuracy", "samples/s", "share of a step", "curves.png"):
        assert out.count(words) >= 2
    assert "sweep in runs/sweep-" in out and out.count("done") == 2
    assert sum("done" in line and "best" in line for line in out.splitlines()) == 1
    assert "try next" not in out, "a sweep suggests no sweep"
    rows = json.loads((finished.run_dirs[1].parent / "sweep.json").read_text())
    assert {row["folder"]: row["summary"] for row in rows} == {
        run_dir.name: summary_of(run_dir) for run_dir in finished.run_dirs.values()
    }


def test_the_report_of_a_sweep_has_the_figures_of_its_runs(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "svg", lambda panel, name: "<svg></svg>")  # test_scaling.py looks at pictures
    sweep = shutil.copytree(finished.run_dirs[1].parent, tmp_path / "sweep", ignore=lambda *_: {"checkpoints"})
    assert ask(["report", str(sweep)]) == 0
    assert "Strong scaling: global batch 50" in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (sweep / "report.md").read_text().splitlines()]
    summaries = {world_size: summary_of(run_dir) for world_size, run_dir in finished.run_dirs.items()}
    target = min(summary["test_accuracy"] for summary in summaries.values())
    for world_size, run_dir in finished.run_dirs.items():
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        until = next(
            line["samples"] for line in lines if line["kind"] == "evaluation" and line["test_accuracy"] >= target
        )
        steps = [line for line in lines if line["kind"] == "step" and line["samples"] <= until]
        began = [0, *(line["samples"] for line in steps)]
        each = zip(steps, began, strict=False)
        seconds = sum((line["samples"] - before) / line["samples_per_s"] for line, before in each)
        speed, _, to_target, *_ = (row for row in rows if row[:1] == [str(world_size)])
        rates = [summaries[size]["samples_per_s"] for size in (1, world_size)]
        assert [speed[1], speed[2]] == [f"{rates[1]:,.1f}", f"{rates[1] / rates[0]:.2f}"]
        assert speed[-1] == f"{summaries[world_size]['test_accuracy']:.2%}"
        assert to_target[1:4] == [in_seconds(seconds), f"{until:,}", f"{world_size * seconds:,.1f}"]


def test_run_directory(finished: Finished) -> None:
    run_dir = finished.run_dirs[2]
    names = {"config.yaml", "starts.jsonl", "metrics.jsonl", "summary.json", "checkpoints", "curves.png", "logs"}
    names.add("job.json")
    assert {path.name for path in run_dir.iterdir()} == names
    config = from_plain(yaml.safe_load((run_dir / "config.yaml").read_text()))
    assert (config.run.dir, config.batch.global_size, config.batch.num_shards) == (str(run_dir), 50, 2)

    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if entry["kind"] == "step"]
    assert [entry["step"] for entry in steps] == list(range(1, NUM_STEPS + 1))
    assert all(0 <= entry["wait_fraction"] <= 1 and entry["samples_per_s"] > 0 for entry in steps)
    evaluations = [entry for entry in entries if entry["kind"] == "evaluation"]
    assert [entry["step"] for entry in evaluations] == [29, 58, NUM_STEPS]
    assert evaluations[-1]["test_accuracy"] > 0.9

    summary = summary_of(run_dir)
    wanted = {"world_size", "global_batch", "steps", "epochs", "samples_per_s", "wait_fraction", "train_loss"}
    assert wanted <= summary.keys()
    assert (summary["steps"], summary["epochs"], summary["global_batch"]) == (NUM_STEPS, 2.59, 50)
    assert summary["test_accuracy"] == evaluations[-1]["test_accuracy"]
    assert summary["stopped_by"] is None

    picture = image.imread(run_dir / "curves.png")
    assert picture.shape[0] > 300 and picture.std() > 0, "it shows something"
    assert {path.name for path in (run_dir / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert (run_dir / "checkpoints" / "latest").read_text() == f"step-{NUM_STEPS:08d}\n"


def test_only_the_parent_imports_hydra_and_only_workers_torch_s_compiler(finished: Finished) -> None:
    in_workers = [line for line in finished.imports if "ddp.run.launch.worker" in line]
    assert len(in_workers) == 3
    assert all(line.endswith(" ['sympy']") for line in in_workers)
    assert len([line for line in finished.imports if line.endswith(" ['hydra']")]) == 2, "the launcher of each job"


def test_nothing_is_imported_from_the_current_folder(finished: Finished) -> None:
    folder = finished.run_dirs[2].parent.parent.parent
    assert all((folder / stranger).is_file() for stranger in STRANGERS)
    assert (finished.ended.status, finished.ended.err) == (0, "")


def test_a_checkpoint_opens_without_the_framework(finished: Finished) -> None:
    module = CNN(in_channels=1, image_size=8, num_classes=10)
    module.load_state_dict(final_model(finished.run_dirs[2]))


# ------------------------------------------------------------------------------------------------- from Python, too


def train_in_worker(run_dir: Path) -> None:
    from ddp.run.assembly.stages import run

    run(from_plain(yaml.safe_load((run_dir / "config.yaml").read_text())), run_dir)


@pytest.mark.slow
def test_called_from_python_a_run_has_the_same_bits(finished: Finished, tmp_path: Path) -> None:
    """As has one that torchrun starts, and starts again, below."""
    shutil.copy(finished.run_dirs[2] / "config.yaml", tmp_path)
    ddp.launch(train_in_worker, tmp_path, workers=2, threads_per_worker=1, timeout_s=LIMIT_S)
    assert_same_bits(final_model(finished.run_dirs[2]), final_model(tmp_path))


# -------------------------------------------------------------------------------------------- stopped and resumed


@pytest.mark.engine
@pytest.mark.slow
def test_stopped_twice_killed_and_resumed_a_run_ends_with_the_same_bits(
    finished: Finished, tmp_path: Path, command: Command
) -> None:
    run_dir = tmp_path / "runs" / "mine"
    job = ["run.name=mine", *JOB]

    process = start([*TRAIN, *job], tmp_path)
    wait_for_step(5, run_dir, process)
    for pid in (running := [process.pid, *workers(run_dir).values()]):
        os.kill(pid, signal.SIGSTOP)
    ended = command("run.name=mine", "resume=auto")
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert f"{run_dir} is being written by process {process.pid} on host {socket.gethostname()}: wait" in ended.err
    for pid in running:  # as process managers do; the launcher passes its own on
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
    ended = finish(process)
    assert ended.status == 143
    go_on = f"{' '.join(TRAIN)} run.name=mine resume=auto"
    assert ended.err.endswith(f"stopped by SIGTERM; continue with {go_on}\n")
    assert "stopped early and saved" in ended.out and ended.out.endswith(f"try next: {go_on}\n")
    summary = summary_of(run_dir)
    assert summary["stopped_by"] == "SIGTERM"
    first = summary["steps"]
    assert 5 <= first < NUM_STEPS
    assert (run_dir / "checkpoints" / f"step-{first:08d}").is_dir()

    command.fork()  # because no further parent of this process is asked to stop

    def interrupt_one_worker() -> None:
        wait_for_step(first + 5, run_dir, command)
        os.kill(workers(run_dir)[1], signal.SIGINT)

    ended = command(*job, "resume=auto", meanwhile=interrupt_one_worker)
    assert ended.status == 130
    assert ended.err.endswith(" run.name=mine resume=auto\n") and "stopped by SIGINT; continue with " in ended.err
    second = summary_of(run_dir)["steps"]
    assert first + 5 <= second < NUM_STEPS
    assert f"continuing after step {first}" in ended.out

    process = start([*TRAIN, *job, "resume=auto"], tmp_path)
    wait_for_step(second + 9, run_dir, process)  # a checkpoint lies between, or two
    survivors = workers(run_dir)
    for pid in survivors.values():
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    ended = command("run.name=mine", "resume=auto")  # rank 0 has outlived its parent, and may still save
    assert ended.status == 2
    assert f"{run_dir}/checkpoints is being written by process {survivors[0]} on host" in ended.err
    for pid in survivors.values():
        os.kill(pid, signal.SIGKILL)
    assert finish(process).status == -signal.SIGKILL
    wait_for(lambda: not workers(run_dir))
    assert second < steps_done(run_dir) < NUM_STEPS

    ended = command("run.name=mine", "resume=auto")  # the settings are those that it began with
    assert (ended.status, ended.err) == (0, "")
    assert summary_of(run_dir)["steps"] == NUM_STEPS
    assert_same_bits(final_model(finished.run_dirs[2]), final_model(run_dir))
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics if each["kind"] == "step"] == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
def test_a_run_saves_when_its_terminal_closes_and_under_nohup_goes_on(finished: Finished, tmp_path: Path) -> None:
    """The second run can print nowhere either, and in letters that are not enough."""
    master, terminal = os.openpty()
    os.set_blocking(master, False)
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    closed = subprocess.Popen(["setsid", "-c", *TRAIN, *LONG_JOB, "cluster.workers=1"], cwd=tmp_path, **streams)
    os.close(terminal)
    run_dir, kept_dir = tmp_path / "runs" / "mine", tmp_path / "runs" / "kept"
    with Path("/dev/full").open("w") as full:
        kept = subprocess.Popen(
            ["nohup", *TRAIN, *JOB, "run.name=kept", "cluster.workers=1"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            stdout=full,
            stderr=full,
        )

    def has_trained_while_somebody_read() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(master, 1 << 16)
        return steps_done(run_dir) >= 5

    try:
        wait_for(has_trained_while_somebody_read, while_=lambda: closed.poll() is None)
        os.close(master)  # the kernel sends SIGHUP to the process that the terminal belonged to
        assert closed.wait(LIMIT_S) == 128 + signal.SIGHUP
        wait_for(lambda: steps_done(kept_dir) >= 5, while_=lambda: kept.poll() is None)
        for pid in (kept.pid, *workers(kept_dir).values()):
            os.kill(pid, signal.SIGHUP)
        assert kept.wait(LIMIT_S) == 0
    finally:
        closed.kill()
        kept.kill()
    summary = summary_of(run_dir)
    assert summary["stopped_by"] == "SIGHUP"
    assert (run_dir / "checkpoints" / f"step-{summary['steps']:08d}").is_dir()
    assert_same_bits(final_model(finished.run_dirs[1]), final_model(kept_dir))


def test_resume_at_another_world_size_from_the_checkpoint_before_the_corrupt_one(
    finished: Finished, command: Command
) -> None:
    run_dir = command.folder / "runs" / "copy"
    shutil.copytree(finished.run_dirs[2], run_dir)
    newest = run_dir / "checkpoints" / f"step-{NUM_STEPS:08d}" / "model.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    (run_dir / "config.yaml").write_bytes((run_dir / "config.yaml").read_bytes()[:300])
    ended = command("run.name=copy", "resume=auto")
    assert (ended.status, ended.err.count("\n")) == (2, 1) and f"{run_dir}/config.yaml is damaged" in ended.err

    ended = command(*JOB, "resume=runs/copy/checkpoints", "run.name=new", "cluster.workers=1")
    run_dir = command.folder / "runs" / "new"
    newest = run_dir / "checkpoints" / newest.relative_to(newest.parents[1])
    assert ended.status == 0, ended
    assert f"step-{NUM_STEPS:08d}" in ended.err and "step-00000072" in ended.err
    assert "world_size was 2, is 1" in ended.err
    assert "continuing after step 72" in ended.out
    summary = summary_of(run_dir)
    assert (summary["world_size"], summary["steps"]) == (1, NUM_STEPS)
    assert torch.load(newest, weights_only=True).keys() == final_model(finished.run_dirs[1]).keys()


@pytest.mark.slow
def test_a_restart_by_torchrun_goes_on_with_its_own_run_to_the_same_bits(finished: Finished, tmp_path: Path) -> None:
    restarting = [*TORCHRUN[:-1], "--max-restarts", "3", TORCHRUN[-1]]
    process = start([*restarting, *JOB], tmp_path)  # neither run.name nor resume=auto
    wait_for(lambda: any(steps_done(folder) >= 5 for folder in tmp_path.glob("runs/*")))
    (victim,) = (pid for pid in children(process.pid) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)
    ended = finish(process)
    assert ended.status == 0, ended
    assert "continuing after step" in ended.out and ended.out.count("test accuracy") == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert_same_bits(final_model(finished.run_dirs[2]), final_model(run_dir))


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


# --------------------------------------------------------------------------------------------------- a worker fails


def test_a_killed_worker_ends_the_run_in_seconds_and_is_named(command: Command) -> None:
    run_dir = command.folder / "runs" / "mine"
    killed_at_s = []

    def kill_one_worker() -> None:
        wait_for_step(5, run_dir, command)
        os.kill(workers(run_dir)[1], signal.SIGKILL)
        killed_at_s.append(time.monotonic())

    ended = command(*LONG_JOB, meanwhile=kill_one_worker)
    assert time.monotonic() - killed_at_s[0] < 15
    assert ended.status == 1
    assert "\nrank 1 was killed by SIGKILL" in f"\n{ended.err}"
    assert "Traceback" not in ended.err
    assert not workers(run_dir)


@pytest.mark.engine
@pytest.mark.slow
def test_a_stopped_worker_is_named_after_the_deadline(command: Command) -> None:
    run_dir = command.folder / "runs" / "mine"

    def stop_one_worker() -> None:
        wait_for_step(5, run_dir, command)
        os.kill(workers(run_dir)[1], signal.SIGSTOP)
        stopped_at_s = time.monotonic()
        wait_for((run_dir / "logs" / "error-rank-0.json").exists, while_=command.is_running)
        assert time.monotonic() - stopped_at_s < 4 + 5  # the deadline, and what the records take to tell

    ended = command(*LONG_JOB, "comm.warn_s=2", "comm.abort_s=4", meanwhile=stop_one_worker)
    assert ended.status == 1
    assert "rank 1" in ended.err.splitlines()[-1] and "no sign of life" in ended.err
    assert "has waited 2 s for rank 1" in ended.err
    assert not workers(run_dir)


# On PYTHONPATH as sitecustomize: the loss of rank 1 raises at its fifth call.
FAULT = """
import sys
if "--rank" in sys.argv and sys.argv[sys.argv.index("--rank") + 1] == "1":
    from ddp.train.steps.task import Classification
    loss, calls = Classification.loss, []
    def scripted(self, model, batch):
        if model.training:  # it is not in the look at the first batch
            calls.append(1)
        if len(calls) == 5:
            raise ArithmeticError("scripted")
        return loss(self, model, batch)
    Classification.loss = scripted
"""


@pytest.mark.engine
def test_a_worker_that_raises_is_the_last_block(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (command.folder / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", first_on_path(command.folder))
    ended = command("run.name=mine", *JOB)
    assert ended.status == 1
    assert ended.err.splitlines()[-2] == "ArithmeticError: scripted"
    assert "sitecustomize.py, line " in ended.err.splitlines()[-1]
    aside, block = ended.err.split("rank 1 on host ")
    assert aside.endswith("rank 0 stopped because rank 1 failed\n")
    assert "failed at step 5:\nTraceback" in block and "in scripted" in block
    assert ended.err.count("Traceback") == 1
    assert not workers(command.folder / "runs" / "mine")


UNREADABLE = """
import os, torch
def make():
    if os.environ.get("RANK") == "1":
        raise ArithmeticError("scripted")
    data = torch.ones(8, 4), torch.ones(8, 1)
    return data, data
def net():
    return torch.nn.Linear(4, 1)
def loss(outputs, targets):
    return (outputs - targets).square().mean()
"""


def test_a_worker_that_cannot_load_is_the_last_block(command: Command) -> None:
    """The other one waits for it meanwhile, because each loads before it joins."""
    (command.folder / "unreadable.py").write_text(UNREADABLE)
    command.fork()
    began_s = time.monotonic()
    own = ["data=unreadable:make", "model=unreadable:net", "loss=unreadable:loss"]
    ended = command("run.name=mine", *own, "max_steps=3", "cluster.workers=2")
    assert ended.status == 1
    assert time.monotonic() - began_s < 30
    aside, block = ended.err.split("rank 1 on host ")
    assert aside.endswith("rank 0 stopped because rank 1 failed\n")
    assert "data=unreadable:make: calling it failed" in block and "ArithmeticError: scripted" in block
    assert not workers(command.folder / "runs" / "mine")


# ------------------------------------------------------------------------------------------------ what is suggested


@pytest.mark.parametrize(("cores", "counts"), [(1, "1,2"), (2, "1,2"), (6, "1,2,4"), (64, "1,2,4,8")])
def test_a_sweep_is_suggested_that_this_machine_can_run(
    cores: int, counts: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_COMMAND", "ddp")
    monkeypatch.setattr(build, "available_cores", lambda: cores)
    monkeypatch.setattr("sys.argv", ["train", "run.name=a", "cluster.min_workers=2", "cluster.max_workers=3"])
    config = from_plain({"run": {"name": "a"}})
    suggested = build._next_commands(config, {"stopped_by": None, "device": "cpu"}, tmp_path / "runs" / "a")
    assert suggested == [f"ddp train -m cluster.workers={counts}", "ddp train recipe=gpt"]
    config.strategy = choose("strategy", "one_device")
    alone = build._next_commands(config, {"stopped_by": None, "device": "cpu"}, tmp_path / "runs" / "a")
    assert alone == ["ddp train recipe=gpt"]
    resumed = build._next_commands(config, {"stopped_by": "SIGINT"}, tmp_path / "b=1")
    assert resumed == ["ddp train 'hydra.run.dir=\"b=1\"' resume=auto"]


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("epoch=3", "unknown key epoch. Did you mean epochs?"),
        ("model=cn", "unknown choice model=cn. Did you mean model=cnn?"),
        ("epochs=many", "epochs=many: expected a whole number or null"),
        ("batch.global_size=1", "batch.global_size=1: smaller than cluster.workers=2"),
        ("cluster.workers=0", "cluster.workers=0: must be a whole number from 1 up"),
        ("cluster.workers=100000 batch.global_size=100000", "cluster.workers=100000"),
        ("data=mnist", "train-images-idx3-ubyte.gz"),
        ("data=image_folder data.path=nowhere", "nowhere"),
        ("model=gpt", "model=gpt: does not read the images of data=digits"),
        ("device=cpu backend=nccl", "backend=nccl"),
        ("resume=nowhere", "resume=nowhere does not exist"),
        ("hydra.run.dir=/proc/mine", "run directory /proc/mine: No such file or directory"),
    ],
)
@pytest.mark.quick(2)
def test_bad_input_is_one_line(arguments: str, words: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no network
    ended = command(*arguments.split())
    assert ended.status == 2 and not ended.out.partition("\n")[2], "no more than that it starts"
    assert ended.err.startswith("error: ") and words in ended.err.partition("\n")[0]
    assert "Traceback" not in ended.err
    assert list(command.folder.glob("runs/*")) == []


def test_a_checkpoint_of_another_model_is_refused_by_the_first_parameter(finished: Finished, command: Command) -> None:
    ended = command("model.width=8", f"resume={finished.run_dirs[2]}")
    assert ended.status == 2
    assert "is of another model: features.0.weight is [32, 1, 3, 3] there and [8, 1, 3, 3] here" in ended.err
    assert ended.err.count("\n") == 1
