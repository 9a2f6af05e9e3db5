"""A search: trials that train nothing, in processes of their own; what Optuna has been told; bad input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp.commands.search import Search, Space, _Trial, main, run
from ddp.errors import ConfigError
from ddp.process.files import write_whole
from ddp.run.launch import sweep
from ddp.run.launch.sweep import Job, jobs_in

SCRIPT = """
import json, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
word = next(each[6:] for each in sys.argv if each.startswith("model="))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
value = {"best": 0.9, "fail": 0.9, "late": 0.9, "nan": float("nan")}.get(word, 0.0)
(here / "metrics.jsonl").write_text(json.dumps({"kind": "evaluation", "step": 3, "test_accuracy": value}) + "\\n")
while word == "hopeless":
    time.sleep(0.01)
summary = {"main_metric": "test_accuracy", "higher_is_better": True, "test_accuracy": value}
if word == "late":
    summary = {"main_metric": "test_accuracy", "sidecar": {"missing": [3]}}
(here / "summary.json").write_text(json.dumps({} if word == "silent" else summary))
sys.exit(word == "fail")
"""


@pytest.fixture
def sham(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Makes trials of this script, in the place of training; returns their processes."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(job: Job, *_: Any) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([sys.executable, "-IS", "-c", SCRIPT, str(job.run_dir), *job.overrides]))
        return processes[-1]

    monkeypatch.setattr(sweep, "_start", start)
    return processes


def search_of(folder: Path, *words: str, trials: int, **options: Any) -> Search:
    space = Space.of([f"model={','.join(words)}", "epochs=1"])
    return Search(space, folder, metric="accuracy", higher_is_better=True, num_trials=trials, **options)


def test_a_search_goes_on_past_trials_that_fail_and_stops_one_without_hope(
    tmp_path: Path, sham: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", reason="pip install optuna")
    good = [f"m{number}" for number in range(5)]
    left = ["nan", "fail", "hopeless", "best", "late"]
    for number, word in enumerate([*good, *left]):
        job = Job([f"model={word}", "epochs=1"], tmp_path / f"model={word}").begun()
        if word in good:
            figures = {"test_accuracy": 0.5 + number / 100}
            (job.run_dir / "metrics.jsonl").write_text(json.dumps({"kind": "evaluation", "step": 7} | figures) + "\n")
            about = {"main_metric": "test_accuracy", "higher_is_better": True}
            (job.run_dir / "summary.json").write_text(json.dumps(about | figures))
            job.done(0)

    assert run(search_of(tmp_path, *good, *left, trials=10, parallel=2)) == 0
    assert len(sham) == 5 and all(process.poll() is not None for process in sham), "no process is left"
    found = {job.run_dir.name.partition("=")[2]: job for job in jobs_in(tmp_path)}
    assert {word: (found[word].status, found[word].objective, found[word].pruned) for word in left} == {
        "nan": (0, None, False),
        "fail": (1, None, False),
        "hopeless": (143, None, True),
        "best": (0, 0.9, False),
        "late": (0, None, False),
    }
    out = capsys.readouterr().out
    assert sum("best" in line and "done" in line and "│" in line for line in out.splitlines()) == 1
    assert "pruned" in out and (tmp_path / "sweep.csv").is_file()

    again = search_of(tmp_path, *good, *left, trials=12)
    states = [trial.state.name for trial in again.study.trials]
    assert {name: states.count(name) for name in states} == {"COMPLETE": 6, "FAIL": 3, "PRUNED": 1}
    assert (again.study.best_value, again.study.best_params) == (0.9, {"model": "best"})
    assert run(again) == 0
    assert len(sham) == 5 and len(again.study.trials) == 12, "what is proposed again is not run again"
    with pytest.raises(ConfigError, match="holds a job with epochs=1, and this one has epochs=2; take another"):
        Search(Space.of(["model=a,b", "epochs=2"]), tmp_path, metric="", higher_is_better=True, num_trials=1)


def test_a_trial_that_goes_on_has_each_evaluation_read_once(tmp_path: Path) -> None:
    """Its run drops what lies beyond its checkpoint, and so begins another file."""
    pytest.importorskip("optuna", reason="pip install optuna")
    search, trial, metrics = search_of(tmp_path, "a", "b", trials=1), _Trial(None), tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "evaluation", "step": step, "test_accuracy": step / 10}) + "\n" for step in range(5)]
    metrics.write_text("".join(lines[:3]))
    job = Job([], tmp_path)
    assert [*search._evaluations(job, trial)] == [(1, 0.0), (2, 0.1), (3, 0.2)]
    write_whole(metrics, lines[0])
    assert not [*search._evaluations(job, trial)]
    for line in lines[1:]:
        with metrics.open("a") as file:
            file.write(line)
    assert [*search._evaluations(job, trial)] == [(4, 0.3), (5, 0.4)]


def test_a_search_without_an_objective_is_refused(tmp_path: Path, sham: list[subprocess.Popen[bytes]]) -> None:
    pytest.importorskip("optuna", reason="pip install optuna")
    with pytest.raises(ConfigError, match="no accuracy of held-out samples, so the search has no objective; give"):
        run(search_of(tmp_path, "silent", "silent2", trials=9, seed=1))
    assert all(process.poll() is not None for process in sham)


def test_a_space_is_what_hydra_s_grammar_says_and_a_trial_is_read_back(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="pip install optuna")
    words = ["++model.args.a=1,2", "b=range(3,9,2)", "c=tag(log,interval(1e-4,1))", "d=int(interval(1,5))", "e=x"]
    space = Space.of([*words, 'f="p q",r', "g=range(0.25,0.75,0.25)"])
    kinds = {key: type(kind).__name__.removesuffix("Distribution") for key, kind in space.distributions.items()}
    assert [*kinds.values()] == ["Categorical", "Int", "Float", "Int", "Categorical", "Categorical"]
    assert [*kinds] == ["++model.args.a", "b", "c", "d", "f", "g"] and space.fixed == ["e=x"]
    bounds = space.distributions
    assert (bounds["b"].low, bounds["b"].high, bounds["b"].step, bounds["c"].log) == (3, 7, 2, True)
    assert space.first()[1:4] == ["++model.args.a=1", "b=3", "c=0.0001"]
    values = {"++model.args.a": "2", "b": 5, "c": 0.01234567, "d": 4, "f": "p q", "g": "0.5"}
    typed = [space.typed(key, value) for key, value in values.items()]
    assert typed == ["++model.args.a=2", "b=5", "c=0.01235", "d=4", 'f="p q"', "g=0.5"]
    assert space.params(Job(typed, tmp_path)) == values | {"c": 0.01235}
    for other in ("b=9", "c=2", "f=s", "d=x"):
        assert space.params(Job([*typed, other], tmp_path)) is None
    assert space.params(Job(typed[1:], tmp_path)) is None
    assert math.isclose(float(space.typed("c", 1.00004e-4).partition("=")[2]), 1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["epochs=1"], "nothing varies: give what is searched several values"),
        (["model.width=16,32", "model.wdith=3"], "unknown key model.wdith"),
        (["model.width=16,32", "sweep.parallel=99"], "sweep.parallel=99: each job has its own cores"),
        (["model.width=16,32", "trial=true"], "trial=true: keeps no metric to search by"),
        (["model.width=16,32", "evaluate.by=sidecar"], "--no-pruning: is missing, because pruning goes by metrics"),
        (["model=cnn,nope"], "unknown choice model=nope. Valid: cnn, gpt"),
        (["model.width=range(3,3)"], "model.width: an empty range"),
        (["optim.lr=tag(log,interval(0,1))"], "optim.lr: "),
        (["optim.lr=interval(0"], "cannot read 'optim.lr=interval(0'"),
        (["--model.width=16,32"], "--model.width=16,32: settings have no dashes before them"),
    ],
)
@pytest.mark.quick(1)
def test_bad_input_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if any(mark in words[0] for mark in ("16,32", "nope", "range", "tag")) and words[0][0] != "-":
        pytest.importorskip("optuna", reason="pip install optuna")
    with pytest.raises(SystemExit, match="2"):
        main(words)
    err = capsys.readouterr().err
    assert err.startswith(f"error: {said}") and err.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_disk_without_room_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", reason="pip install optuna")
    monkeypatch.chdir(tmp_path)
    full = OSError(28, "No space left")
    monkeypatch.setattr(sweep, "make_folder", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(SystemExit, match="2"):
        main(["optim.lr=0.1,0.2", "sweep.name=s"])
    assert capsys.readouterr().err.startswith("error: run directory runs/s: No space left; make room there, or take ")


def test_without_optuna_it_is_said_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit, match="2"):
        main(["model.width=16,32"])
    assert capsys.readouterr().err == "error: a search needs Optuna: pip install 'optuna>=4,<6'\n"


def test_a_search_that_is_stopped_says_how_it_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", reason="pip install optuna")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDP_COMMAND", "ddp")
    monkeypatch.setattr("ddp.commands.search.run", lambda search: 130)
    assert main(["optim.lr=interval(0.1,0.2)", "sweep.name=s", "--trials", "3"]) == 130
    again = "the search continues with ddp search 'optim.lr=interval(0.1,0.2)' --trials 3 sweep.name=s\n"
    assert capsys.readouterr().err == again
