"""A sweep's folders and its table, from jobs whose results are written down here.

Tests: ddp/process/arguments.py.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ddp.errors import ConfigError
from ddp.process import host
from ddp.process.arguments import setting_for, train_command
from ddp.run.launch import sweep
from ddp.run.launch.command_line import varied_keys
from ddp.run.launch.sweep import Job, earlier, gather, job_folder, report_jobs, show, write
from ddp.units import counted

ACCURATE = {"main_metric": "test_accuracy", "higher_is_better": True}
LONG = "/data/" + "a-rather-long-name/" * 12


def jobs_of(folder: Path, summaries: Mapping[str, Mapping[str, Any] | None], *, failed: int = 1) -> list[Job]:
    """Makes a sweep over data.root; a job without a summary has `failed`."""
    jobs = []
    for number, (value, summary) in enumerate(summaries.items()):
        overrides = [f"data.root={value}", "epochs=1"]
        run_dir = folder / job_folder(overrides, ["data.root"], number=number)
        job = Job(overrides, run_dir).begun()
        if summary is not None:
            main = {"main_metric": "test_loss", "higher_is_better": False} if "test_loss" in summary else {}
            (run_dir / "summary.json").write_text(json.dumps(main | summary))
        jobs.append(job.done(failed if summary is None else 0))
    return jobs


@pytest.mark.parametrize(
    ("summaries", "order", "mark"),
    [
        ({"a": {"test_accuracy": 0.1} | ACCURATE, "b": {"test_accuracy": 0.2} | ACCURATE}, "ba", "best"),
        ({"a": {"test_loss": 0.1, "test_accuracy": 0.1}, "b": {"test_loss": 0.2, "test_accuracy": 0.2}}, "ab", "best"),
        ({"a": {"test_x": 2, "main_metric": "test_x", "higher_is_better": False}, "b": {"test_x": 1}}, "ba", "best"),
        ({"a": None, "b": {"test_loss": math.nan}, "c": {"test_loss": 9.0}}, "cba", "best"),
        ({"a": {"sidecar": {"missing": [3]}, "main_metric": "test_loss"}, "b": {"test_loss": 9.0}}, "ba", "best"),
        ({"a": {"samples_per_s": 1.0}, "b": {"samples_per_s": 2.0}, "c": None}, "bac", "fastest"),
        ({"a": {"test_loss": 1, "samples_per_s": 1}, "b": {"test_loss": 1, "samples_per_s": 2}}, "ba", "best"),
        ({"a": None, "b": None}, "ab", ""),
    ],
)
def test_the_best_job_comes_first_and_is_marked(
    summaries: dict[str, Any], order: str, mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_of(tmp_path, summaries)
    results = gather(tmp_path)
    assert [row.settings["data.root"] for row in results.jobs] == list(order)
    show(results, Path("runs"))
    out = capsys.readouterr().out
    marked = [line for line in out.splitlines() if "best" in line or "fastest" in line]
    assert len(marked) == bool(mark)
    assert not mark or f"│ {mark} │ {order[0]} │" in " ".join(marked[0].split())


@pytest.mark.parametrize("status", [1, 2, 3, 130])
def test_at_80_columns_no_value_is_cut_off_and_how_a_job_ended_is_said(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"test_accuracy": 0.1234, "samples_per_s": 12345.6} | ACCURATE
    jobs_of(tmp_path, {LONG: summary, LONG + "b": None}, failed=status)
    results = gather(tmp_path)
    for name, value in [("TTY_COMPATIBLE", "1"), ("FORCE_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "80")]:
        monkeypatch.setenv(name, value)
    show(results, Path("runs"))
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "sweep in runs/  (sweep.csv, sweep.json)"
    assert max(map(len, lines)) <= 80
    cells = [line.split("│") for line in lines if line.startswith("│")]
    assert "".join(cell[2].strip() for cell in cells) == LONG + LONG + "b"
    assert [cell.strip() for cell in cells[0][3:6]] == ["12.34%", "12,346", "done"]
    ended = {1: "failed (status 1)", 2: "refused (status 2)", 3: "ended by its watch (status 3)"}
    assert ended.get(status, "stopped by SIGINT (status 130)") in [cell[5].strip() for cell in cells]


def test_the_files_hold_what_varied_and_what_came_out(tmp_path: Path) -> None:
    summaries = {"a,b": {"test_loss": 2.0, "seconds": 3, "steps": 5}, "c": {"test_loss": 1.0}, "d": None}
    for value, summary in summaries.items():  # as after each job, also when the sweep is interrupted
        (job,) = jobs_of(tmp_path, {value: summary})
        assert job.objective == (summary or {}).get("test_loss"), "its main metric"
        write(gather(tmp_path), tmp_path)
    Job(["data.root=e"], tmp_path / "data.root=e").begun()
    for name, text in [("broken", "{"), ("of-another", '{"overrides": 3}'), ("no-job", None)]:
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "job.json").write_text(text)
    assert report_jobs(tmp_path) == 1
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["data.root"], row["test_loss"], row["seconds"], row["status"]) for row in rows] == [
        ("c", "1.0", "", "0"),
        ("a,b", "2.0", "3", "0"),
        ("d", "", "", "1"),
        ("e", "", "", ""),
    ]
    entries = json.loads((tmp_path / "sweep.json").read_text())
    assert [entry["folder"] for entry in entries] == [row["folder"] for row in rows]
    assert entries[1]["settings"] == {"data.root": "a,b", "epochs": "1"} and entries[1]["summary"]["steps"] == 5
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"sweep.csv", "sweep.json"}


def test_a_job_is_the_same_if_its_settings_are(tmp_path: Path) -> None:
    run_dir = tmp_path / "optim.lr=0.1"
    job = Job(["optim.lr=0.1", "epochs=1"], run_dir)
    assert earlier(job) is None
    stopped = job.begun().done(143)
    assert earlier(Job(["epochs=1", "++optim.lr=0.1", "resume=auto"], run_dir)) == stopped
    for overrides, words in [
        (["optim.lr=0.1", "epochs=2"], "holds a job with epochs=1, and this one has epochs=2; take another sweep.name"),
        (["optim.lr=0.1"], "holds a job with epochs=1, and this one has no epochs"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(words)):
            earlier(Job(overrides, run_dir))
    (run_dir / "job.json").rename(tmp_path / "elsewhere")
    (run_dir / "job.json").symlink_to(tmp_path / "elsewhere")
    assert Job.read(run_dir) is None, "a link, or a pipe, on which a sweep would wait for ever, is not followed"
    (run_dir / "job.json").unlink()
    (run_dir / "config.yaml").touch()
    with pytest.raises(ConfigError, match="holds a run that is no job of a sweep"):
        earlier(job)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux alone has affinity")
@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_parallel_jobs_divide_the_cores_and_share_none(parallel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {*range(8)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    monkeypatch.setattr(sweep, "_siblings", lambda core: (0, core % 4))  # 1 and 5 are threads of one core
    shares = [sweep._share_of_cores(share, parallel) for share in range(parallel)]
    assert sorted(core for share in shares for core in share) == sorted(cores)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert parallel != 2 or [*map(set, shares)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    with pytest.raises(ConfigError, match=r"sweep\.parallel=9: each job has its own cores, and 8 can"):
        sweep.check_parallel(9)
    sweep.check_parallel(8)
    monkeypatch.setattr(sweep, "available_cores", lambda: 5)  # a quota: the times of five, on any of the eight
    of_quota = [sweep._share_of_cores(share, parallel) for share in range(parallel)]
    assert sum(map(len, of_quota)) == 5 and all({*mine} <= {*all_} for mine, all_ in zip(of_quota, shares, strict=True))


def test_parallel_jobs_divide_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shares(parallel: int) -> list[str]:
        return [",".join(sweep._share_of_gpus(share, parallel)) for share in range(parallel)]

    monkeypatch.setattr(sweep, "available_cores", lambda: 8)
    monkeypatch.setattr(host, "GPUS", tmp_path)
    for name in ("0000:17:00.0", "0000:65:00.0", "0000:b1:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (shares(1), shares(2), shares(4)) == (["0,1,2"], ["0", "1,2"], ["0", "0", "1", "2"])
    sweep.check_parallel(3)
    sweep.check_parallel(4)
    assert capsys.readouterr().err == "sweep.parallel=4: there are 3 GPUs, so jobs share one\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,5")
    assert (shares(2), shares(3)) == (["GPU-8932f937", "5"], ["GPU-8932f937", "GPU-8932f937", "5"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert shares(2) == ["", ""] and not sweep.check_parallel(4)

    started: list[list[str]] = []
    monkeypatch.setattr("ddp.run.launch.sweep.subprocess.Popen", lambda command, **_: started.append(command))
    job = Job([], tmp_path / "job")
    for gpus in (["1", "2"], []):
        sweep._start(job, [], [], gpus, True)
        sweep._start(job, [], [], gpus, False)
    assert [words[:2] for words in started] == [["env", "CUDA_VISIBLE_DEVICES=1,2"]] * 2 + [[sys.executable, "-P"]] * 2


SCRIPT = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
(here / "ready").touch()
while "wait" in sys.argv[2:]:
    time.sleep(0.01)
sys.exit(3 * ("fail" in sys.argv[2:]))
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Makes jobs of this script, in the place of training; returns the settings of each that begins."""
    words: list[list[str]] = []

    def start(job: Job, settings: list[str], *_: Any) -> subprocess.Popen[bytes]:
        words.append(settings)
        return subprocess.Popen([sys.executable, "-IS", "-c", SCRIPT, str(job.run_dir), *settings])

    monkeypatch.setattr(sweep, "_start", start)
    return words


def test_jobs_run_side_by_side_and_after_a_signal_goes_on_what_is_missing(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["done", "fail", "wait", "wait", "x"]
    todo = [Job([kind], tmp_path / f"job={number}") for number, kind in enumerate(kinds)]

    def ready(_: Job) -> bool:
        if all((job.run_dir / "ready").exists() for job in todo[2:4]):
            os.kill(os.getpid(), signal.SIGTERM)
        assert not todo[4].run_dir.exists()
        return False

    before = signal.getsignal(signal.SIGTERM)
    ended: list[Job] = []
    assert sweep.run(iter(todo), parallel=2, is_hopeless=ready, ended=ended.append) == 143
    assert len(ended) == 4 and all(Job.read(job.run_dir) == job for job in ended)
    assert signal.getsignal(signal.SIGTERM) is before
    found = [Job.read(job.run_dir) for job in todo]
    assert [job and job.status for job in found] == [0, 3, 143, 143, None] and found[-1] is None
    assert "job=2/: stopped by SIGTERM (status 143)" in capsys.readouterr().out

    (todo[2].run_dir / "config.yaml").touch()  # it had begun to train
    again = [Job(["done"], todo[0].run_dir), *todo[1:2], Job(["wait"], todo[2].run_dir), todo[4]]
    started.clear()
    hopeless = todo[2].run_dir / "ready"
    hopeless.unlink()

    def is_hopeless(job: Job) -> bool:
        return job.run_dir == hopeless.parent and hopeless.exists()

    ended.clear()
    assert sweep.run(iter(again), in_view=True, is_hopeless=is_hopeless, ended=ended.append) is None
    assert [job.status for job in ended] == [0, 3, 143, 0]
    assert [job.pruned for job in ended] == [False, False, True, False]
    group = f"run.group={tmp_path.name}"
    assert [words[:-2] for words in started] == [[group], [group, "resume=auto"], [group]]
    assert started[1][-2:] == ["wait", f'hydra.run.dir="{again[2].run_dir}"']


def test_a_job_that_does_not_stop_is_killed(
    tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is paused when the signal comes, and one when the sweep itself fails."""
    monkeypatch.setattr(sweep, "STOP_S", 0.1)
    processes = []
    start = sweep._start
    monkeypatch.setattr(sweep, "_start", lambda *given: processes.append(start(*given)) or processes[-1])

    def paused(job: Job) -> bool:
        if (job.run_dir / "ready").exists():
            (job.run_dir / "ready").unlink()
            processes[-1].send_signal(signal.SIGSTOP)
            if job.run_dir.name == "fails":
                raise OSError("the disk is full")
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    for name in ("stops", "fails"):
        with pytest.raises(OSError, match="disk") if name == "fails" else contextlib.nullcontext():
            assert sweep.run(iter([Job(["wait"], tmp_path / name)]), is_hopeless=paused) == 143
        assert processes[-1].poll() == -signal.SIGKILL
    assert (stopped := Job.read(tmp_path / "stops")) and stopped.status == 137


@pytest.mark.parametrize(
    ("overrides", "varied", "name"),
    [
        (["cluster.workers=2", "epochs=3", "optim.lr=0.1"], ["cluster.workers", "optim.lr"], None),
        (["+model=mlp"], ["model"], "model=mlp"),
        (["epochs=3"], [], "job=7"),
        (['data.path="a.csv"'], ["data.path"], "data.path=a.csv"),
        (["data.path=/a/../b"], ["data.path"], "data.path=_a_.._b,job=7"),
        (["run.name='a b'"], ["run.name"], "run.name=_a_b_,job=7"),
    ],
)
def test_a_job_s_folder_is_named_by_what_varies(overrides: list[str], varied: list[str], name: str | None) -> None:
    assert job_folder(overrides, varied, number=7) == (name or "cluster.workers=2,optim.lr=0.1")
    long = job_folder([f"data.root={LONG}"], ["data.root"], number=7)
    assert long.endswith(",job=7") and "/" not in long and len(long) <= 140


def test_what_a_sweep_varies_is_what_hydra_would_vary() -> None:
    arguments = ["-m", "--config-dir=/x", "a=1,2", "b='1,2'", "+c=range(1,3)", "d=[1,2]", "model=cnn,mlp"]
    assert varied_keys(arguments) == ["a", "c", "model"]


@pytest.mark.parametrize("name", ["mine", "2026-11-21_09-19-32.7", "a=1,b=2", "with space", 'a"b', "back\\"])
def test_a_folder_s_setting_is_read_back_by_hydra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {"run.name": tmp_path / "runs" / name, "hydra.run.dir": tmp_path / "runs" / "sweep" / name}
    for key, folder in folders.items():
        (override,) = OverridesParser.create().parse_overrides([setting_for(folder, name)])
        assert override.key_or_group == key
        expected = name if key == "run.name" else os.path.relpath(folder)
        assert override.value() == expected


@pytest.mark.parametrize(
    ("typed", "arguments", "environment", "expected"),
    [
        ("python recipes/train.py a=1", ["a=1"], {}, "python recipes/train.py b=2 'c d'"),
        (".venv/bin/python -m ddp train a=1 b=2", ["a=1", "b=2"], {}, ".venv/bin/python -m ddp train b=2 'c d'"),
        ("/x/python -P -m ddp train", [], {"DDP_COMMAND": "../my clone/ddp"}, "'../my clone/ddp' train b=2 'c d'"),
        ("python -u a.py a=1", ["a=1"], {"TORCHELASTIC_RUN_ID": "1"}, "python -m ddp train b=2 'c d'"),
        ("python -m pytest", ["a=1"], {}, "python -m ddp train b=2 'c d'"),
    ],
)
def test_a_command_begins_as_the_user_s(
    typed: str, arguments: list[str], environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DDP_COMMAND", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.orig_argv", typed.split())
    monkeypatch.setattr("sys.argv", ["x", *arguments])
    assert train_command("b=2", "c d") == expected


def test_counts() -> None:
    assert [counted(number, "worker") for number in (0, 1, 1234)] == ["0 workers", "1 worker", "1,234 workers"]


def test_ctrl_c_ends_a_job_from_its_beginning_on(tmp_path: Path) -> None:
    """Its interpreter, which would fail with an error of its own while it begins, hears it once the job does."""
    process = sweep._start(Job(["seed=1"], tmp_path / "mine"), [], [], [], False)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    assert (tmp_path / "mine" / "logs" / "job.log").read_text() == ""
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "this process hears it at once"
