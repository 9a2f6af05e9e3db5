"""`ddp scale`: the command of docs/features.md as it stands there; jobs that fail or are stopped; bad input."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Forked

from ddp.lab.scaling import report as page
from ddp.lab.scaling import scale
from ddp.run.launch import sweep
from ddp.run.launch.command_line import composed
from ddp.run.launch.run_folder import settings_text
from ddp.run.launch.sweep import Job
from ddp.run.settings import checks
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain

CONFIG = settings_text(Config())
FEATURES = (Path(__file__).parents[3] / "docs" / "features.md").read_text()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_COMMAND", "ddp")
    monkeypatch.setattr(checks, "available_cores", lambda: 2)
    monkeypatch.setattr(yaml, "safe_load", partial(yaml.load, Loader=yaml.CSafeLoader))  # ten times as fast
    return tmp_path


@pytest.mark.slow
def test_the_command_of_the_features_table(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are those of statistics and json on the files that the runs have left."""
    monkeypatch.setattr(sweep, "_start", Forked)
    (command,) = re.findall(r"`scripts/ddp scale ([^`]*)`", FEATURES)
    status, said = scale.main(shlex.split(command)), capsys.readouterr()
    assert status == 0, said
    (folder,) = (here / "runs").iterdir()
    runs = [folder / f"cluster.workers={workers}" for workers in (1, 2)]
    profiles, rates, cells = [json.loads((run / "profile.json").read_text()) for run in runs], [], []
    parts = ["data", "forward", "backward", "communication", "wait", "update", "other"]
    for run, profile in zip(runs, profiles, strict=True):
        of_ranks = zip(*profile["steps"], strict=True)
        seconds = [sum(step["spans"][-1][2] for step in each) for each in of_ranks]
        rates.append(sum(rank["num_samples"] for step in profile["steps"] for rank in step) / max(seconds))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        memory = max(value for line in lines for key, value in line.items() if key.startswith("memory_mb/"))
        ranks = [rank for step in profile["steps"] for rank in step]
        spent = [Counter() for _ in ranks]
        for counter, rank in zip(spent, ranks, strict=True):
            for part, began_s, ended_s in rank["spans"]:
                counter[part] += ended_s - began_s
        means = [1e3 * statistics.fmean(counter[part] for counter in spent) for part in parts]
        workers, speed_up = len(rates), rates[-1] / rates[0]
        cells.append([workers, rates[-1], speed_up, 100 * speed_up / workers, memory, 64e3 / rates[-1], *means])
        assert not [*run.glob("checkpoints/*")] and "test_loss" not in (run / "summary.json").read_text()
    rows = [re.split("  +", line) for line in said.out.splitlines() if re.match("[12]  ", line)]
    assert [len(row) for row in rows] == [6, 7, 8, 8] and max(map(len, said.out.splitlines()[4:12])) < 80
    for speed, parts, wanted in zip(rows[:2], rows[2:], cells, strict=True):
        shown = [float(re.sub(r"[^\d.]", "", cell)) for cell in [*speed[:6], *parts[1:]]]
        assert shown == [pytest.approx(value, rel=6e-3, abs=0.51 if value > 9 else 0.051) for value in wanted]
    assert said.out.startswith("Strong scaling: the workers share a global batch of 64.\n")
    assert re.search(r"[Mm]ore workers (pay|stop paying)", said.out)
    assert "about speed alone: nothing was evaluated" in said.out
    page = (folder / "report.md").read_text()
    assert f"| 2 | {rates[1]:,.1f} | {rates[1] / rates[0]:.2f} |" in page and "Nothing was evaluated" in page
    learns, more = said.out.splitlines()[-2:]
    trains = "ddp train -m cluster.workers=1,2 cluster.threads_per_worker=1 profile.steps=5 sweep.name="
    assert f"{trains}{folder.name}-whole; ddp report runs/{folder.name}-whole" in learns
    asked = shlex.split(more.partition("ddp forecast ")[2])
    assert asked == [str(runs[0].relative_to(here)), *shlex.split("--ranks 8 --per-host 2 --rate 10gbit --alpha 50us")]


# --- jobs that train nothing -----------------------------------------------------------------------------------------


WAITS = "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(130)); print(1, flush=True); time.sleep(60)"


@cache
def composed_once(words: tuple[str, ...]) -> tuple[Config, Path]:
    """A fifth of a second, and several tests ask for the same."""
    return composed(words)


class Sham:
    """Jobs that leave a run as fast as their workers are many, but for some, which end with a status.

    One whose status is None waits for a signal, and this process gets one.
    """

    def __init__(self) -> None:
        self.statuses: dict[int, int | None] = {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, job: Job, *_: Any) -> subprocess.Popen[bytes]:
        workers = int(job.settings["cluster.workers"])
        status = self.statuses.get(workers, 0)
        if status == 0:
            (job.run_dir / "config.yaml").write_text(CONFIG)
            summary = {"world_size": workers, "global_batch": 64, "samples_per_s": 64.0 * workers, "seconds": 1.0}
            (job.run_dir / "summary.json").write_text(json.dumps(summary | {"stopped_by": "measured"}))
        script = WAITS if status is None else f"import sys; sys.exit({status})"
        process = subprocess.Popen([sys.executable, "-IS", "-c", script], stdout=subprocess.PIPE)
        self.processes[workers] = process
        assert process.stdout is not None
        with process.stdout as out:
            if out.readline():  # it waits
                os.kill(os.getpid(), signal.SIGINT)
        return process


@pytest.fixture
def sham(monkeypatch: pytest.MonkeyPatch) -> Sham:
    found = Sham()
    monkeypatch.setattr(sweep, "_start", found.start)
    monkeypatch.setattr(scale, "check", lambda config: (None, None))
    monkeypatch.setattr(scale, "composed", lambda words: composed_once(tuple(words)))
    monkeypatch.setattr(page, "svg", lambda *_: "<svg></svg>")
    return found


def test_a_number_of_workers_that_fails_is_told_and_the_others_are_shown(
    sham: Sham, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sham.statuses[2] = 1
    monkeypatch.setattr(checks, "available_cores", lambda: 4)
    assert scale.main(["sweep.name=mine"]) == 1
    said = capfd.readouterr().out
    assert [*sham.processes] == [1, 2, 4] and "cluster.workers=2/: failed (status 1)" in said
    shown = re.findall(r"^(\d) +([\d.]+) +([\d.]+) +([\d.]+)%", said, re.MULTILINE)
    assert shown == [("1", "64.0", "1.00", "100.0"), ("4", "256.0", "4.00", "100.0")]
    assert "cluster.workers=2 is left out: its job has ended so: failed (status 1)." in said


@pytest.mark.parametrize(("strategy", "is_offered"), [("sharded", True), ("fully_sharded", False)])
def test_a_forecast_is_offered_if_there_is_one(
    sham: Sham,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    strategy: str,
    is_offered: bool,
) -> None:
    monkeypatch.setitem(globals(), "CONFIG", settings_text(from_plain({"strategy": {"name": strategy}})))
    assert scale.main(["sweep.name=mine"]) == 0
    said = capfd.readouterr().out
    assert "do they learn as well?" in said and ("four hosts like this?" in said) is is_offered


def test_ctrl_c_leaves_what_was_measured_and_the_rest_is_measured_later(
    sham: Sham, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sham.statuses[4] = None
    monkeypatch.setattr(checks, "available_cores", lambda: 4)
    assert scale.main([]) == 130
    assert all(process.poll() is not None for process in sham.processes.values())
    said = capfd.readouterr()
    assert "200.0%" not in said.out and len(re.findall(r"^\d .* 100.0%", said.out, re.MULTILINE)) == 2
    (again,) = re.findall(r"^measure the missing runs by ddp scale (.*)$", said.err, re.MULTILINE)
    sham.statuses.clear(), sham.processes.clear()
    assert scale.main(shlex.split(again)) == 0
    assert [*sham.processes] == [4], "the others are there"
    assert len(re.findall(r"^\d .* 100.0%", capfd.readouterr().out, re.MULTILINE)) == 3
    with pytest.raises(SystemExit):
        scale.main([*shlex.split(again), "--seconds", "3"])
    said = "holds a job with profile.seconds=5, and this one has profile.seconds=3; take another"
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(("typed", "name"), [('sweep.name="a b"', "a b"), ("sweep.name=", "scale-*"), ("", "scale-*")])
def test_a_folder_s_name_is_read_as_train_reads_it(typed: str, name: str, sham: Sham, here: Path) -> None:
    sham.statuses = {1: 2, 2: 2}
    assert scale.main([typed] if typed else []) == 2
    assert len([*here.glob(f"runs/{name}/cluster.workers=2/job.json")]) == 1


def test_a_folder_that_cannot_be_made_is_told(sham: Sham, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs").write_text("a file")
    with pytest.raises(SystemExit) as ended:
        scale.main(["sweep.name=mine"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.err.count("\n") == 1 and said.err.startswith("error: run directory "), said


def test_a_single_run_is_compared_with_nothing(sham: Sham, capfd: pytest.CaptureFixture[str]) -> None:
    sham.statuses = {2: 2}
    assert scale.main([]) == 2
    said = capfd.readouterr().out
    assert said.endswith("so there is nothing to compare\n") and "efficiency" not in said


# --- before a job begins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("epoch=3", "unknown key epoch. Did you mean epochs?"),
        ("model=cn", "unknown choice model=cn. Did you mean model=cnn?"),
        ("batch.global_size=1", "batch.global_size=1: smaller than cluster.workers=2, so some would have no sample"),
        ("device=cuda", "device=cuda: torch sees no GPU here"),
        ("strategy=one_device", "strategy=one_device"),
        ("--workers 1,8", "--workers 8: 2 cores can be used here, and workers that take turns do not show what"),
        ("--workers 2,02", "--workers 2: a single number of workers has nothing to be compared with"),
        ("optim.lr=0.1,0.2", "optim.lr: has several values, and the number of workers alone varies here"),
        ("cluster.workers=1,2", "cluster.workers=1,2: is what varies here; give --workers 1,2,4"),
        ("profile.seconds=3", "profile.seconds=3: is given as --seconds"),
        ("resume=auto", "resume=auto: a run to be measured starts from scratch; leave it out"),
        ("sweep.parallel=2", "sweep.parallel=2: jobs that run at the same time slow each other down; leave it out"),
        ("trial=true", "trial=true: has too few steps to be measured; leave it out"),
        ("-m seed=1,2", "-m: is for training; leave it out"),
        ("--second 3 --lr 0.1", "--lr 0.1: settings have no dashes before them; write optim.lr=0.1"),
    ],
)
@pytest.mark.quick(1)
def test_bad_input_is_one_line_before_a_job_begins(
    words: str, says: str, sham: Sham, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        scale.main(words.split())
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.startswith(f"error: {says}"), said
    assert said.err.count("\n") == 1 and not sham.processes and not (here / "runs").exists()


@pytest.mark.parametrize("words", ["--workers 0,1", "--workers two", "--seconds 0", "--seconds nan"])
def test_options_are_numbers_above_zero(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scale.main(words.split())
    assert ended.value.code == 2 and "give a " in capsys.readouterr().err


def test_one_core_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "available_cores", lambda: 1)
    with pytest.raises(SystemExit):
        scale.main([])
    says = "1 core can be used here: a single number of workers has nothing to be compared with"
    assert capsys.readouterr().err.startswith(f"error: {says}")


@pytest.mark.parametrize(("cores", "numbers"), [(2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_all_cores_are_tried(cores: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_cores", lambda: cores)
    assert scale._numbers(from_plain({}), None) == numbers


def test_what_is_compared_and_how_unequal_shares_are() -> None:
    def told(*batches: int) -> list[str]:
        plain = [{"cluster": {"workers": 1 + k}, "batch": {"global_size": each}} for k, each in enumerate(batches)]
        return scale.compares([from_plain(each) for each in plain])

    (weak,) = told(32, 64, 96)
    assert weak.endswith("grows with the workers, 32 for 1 worker, 64 for 2 workers, 96 for 3 workers.")
    strong, unequal = told(64, 64, 64)
    assert strong == "Strong scaling: the workers share a global batch of 64."
    assert unequal.startswith("A batch of 64 does not divide among 3 workers: a step waits for the largest share, 22,")
    assert unequal.endswith("efficiency is at most 97%.")


def test_the_jobs_are_the_user_s_run_but_for_its_end(here: Path, sham: Sham) -> None:
    words = ["optim.lr=0.1", "batch.global_size=${per_worker:16}", "cluster.threads_per_worker=3", "max_steps=7"]
    words += ["early_stopping.patience=2", "early_stopping.min_delta=0.1", "watch.action=stop"]
    todo = scale.jobs_for(words, here / "runs" / "mine", numbers=[1, 2], seconds=2.5)
    configs = [composed_once(tuple(job.overrides))[0] for job in todo]
    assert [job.run_dir.name for job in todo] == ["cluster.workers=1", "cluster.workers=2"]
    assert [config.batch.global_size for config in configs] == [16, 32]
    for config in configs:
        assert (config.optim.lr, config.cluster.threads_per_worker, config.profile.seconds) == (0.1, 3, 2.5)
        assert config.max_steps == 10**9 and (config.evaluate.every_epochs, config.evaluate.every_steps) == (None, None)
        assert (config.early_stopping.patience, config.watch.action) == (None, "off")
