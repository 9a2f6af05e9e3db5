"""`python -m ddp evaluate` and `predict`: the numbers are those of one process; what cannot work is said before.

Tests: ddp/run/assembly/load.py.
"""

from __future__ import annotations

import csv
import errno
import io
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from regions import new_name, showing

import ddp
from ddp.__main__ import main
from ddp.commands import finished
from ddp.commands.finished import settings_for, write_rows
from ddp.data.samples import Splits
from ddp.errors import CheckpointError, ConfigError
from ddp.run.assembly.components import load_data, load_held_out, make_model
from ddp.run.launch.run_folder import prepare
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain
from ddp.strategies.region import Region
from ddp.train.checkpoints.checkpoint_store import CheckpointStore

COLUMNS = {"inputs": ["a", "b"], "target": "c", "num_classes": 3}
COLUMN_WORDS = ["data.inputs=[a,b]", "data.target=c", "data.num_classes=3"]


def write_samples(path: Path, *, num: int, seed: int) -> None:
    draw = np.random.RandomState(seed)
    rows = [f"{a:.3f},{b:.3f},{draw.randint(3)}" for a, b in draw.randn(num, 2)]
    path.write_text("\n".join(["a,b,c", *rows]) + "\n")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose paths are relative to the folder in which it was started, asked about from another folder."""
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "train.csv", num=20, seed=0)
    write_samples(tmp_path / "test.csv", num=7, seed=1)
    data = {"name": "csv", "path": "train.csv", "test_path": "test.csv", **COLUMNS}
    config = from_plain({"data": data, "model": {"name": "mlp", "hidden": 8}, "evaluate": {"batch": 2}})
    (tmp_path / "run").mkdir()
    prepare(config, tmp_path / "run")
    splits = load_data(config)
    facts = {"sample_shape": list(splits.sample_shape or ()), "num_classes": splits.num_classes}
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step, score in ((1, 0.5), (2, 0.4)):  # the first is the best
        torch.manual_seed(step)
        weights = make_model(config, splits).state_dict()
        store.save(step, {"model": weights}, meta={"identity": facts}, score=score)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "run"


def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes this process the one worker; returns how many workers were asked for."""
    asked: list[int] = []

    def launch(work: Any, *, workers: int, threads_per_worker: int | None) -> list[Any]:
        asked.append(workers)
        return [work()]

    monkeypatch.setattr(finished, "launch", launch)
    return asked


def expected(run: Path, samples: Any) -> torch.Tensor:
    inputs = torch.stack([inputs for inputs, _ in samples])
    with torch.no_grad():
        return torch.log_softmax(ddp.load(run).model()(inputs), dim=1)


def test_evaluate_gives_the_metrics_of_the_best_checkpoint(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    workers = here(monkeypatch)
    write_samples(Path("other.csv"), num=11, seed=2)
    for words, num in (([], 7), (["data.test_path=other.csv", "cluster.workers=9"], 11)):
        assert main(["evaluate", str(run), *words]) == 0
        samples = load_held_out(settings_for(run, words)).test
        scores, classes = expected(run, samples), torch.stack([torch.as_tensor(c) for _, c in samples])  # type: ignore[attr-defined]
        accuracy = (scores.argmax(dim=1) == classes).double().mean()
        out = capfd.readouterr().out
        assert f"step-00000001, on {num} samples of data=csv:" in out
        assert f"test accuracy  {accuracy:.2%}" in out
        assert f"test loss  {torch.nn.functional.nll_loss(scores, classes):.4f}" in out
    assert workers == [2, 9]
    assert repr(ddp.load(run)) == f"Trained(path={run / 'checkpoints' / 'step-00000001'!r}, step=1, score=0.5)"
    assert main(["evaluate", str(run / "checkpoints" / "step-00000002")]) == 0
    assert "step-00000002, on 7 samples" in capfd.readouterr().out


def test_files_to_train_on_are_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what says how they were shared out and changed, by code that may be gone; the whole set may be evaluated."""
    here(monkeypatch)
    path = run / "config.yaml"
    given = path.read_text().replace("  validation: null\n", "  validation: 0.9999\n")
    path.write_text(given.replace("  sharding: auto\n", "  sharding: gone:deal\n"))
    trained = run.parent / "train.csv"
    for words in ([f"data.test_path={trained}"], [], ["data=csv", "data.test_path=../test.csv", *COLUMN_WORDS]):
        assert main(["evaluate", str(run), *words]) == 0
        trained.unlink(missing_ok=True)


def test_predict_writes_a_row_for_each_sample_in_order(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Three real workers share seven samples, in batches of two."""
    assert main(["predict", str(run), "cluster.workers=3", "--out", "scores.npy", "evaluate.batch=1"]) == 0
    assert "scores.npy: 7 rows, each with 3 of" in capfd.readouterr().out
    found = np.load("scores.npy")
    torch.testing.assert_close(torch.from_numpy(found), expected(run, load_held_out(settings_for(run, [])).test))
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []


def test_a_run_that_goes_on_is_asked_by_the_name_of_its_region(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The parent looks once: the workers share the samples, and have the same weights."""
    last = ddp.load(run, "latest")
    about = {"run_dir": str(run), **last.facts}
    with new_name() as name, showing(Region(name, lambda: last.weights, about, folder=run), 1234):
        found = ddp.load(region=name)
        assert (found.step, found.score, found.path, found.facts) == (1234, None, run, last.facts)
        assert main(["predict", f"region={name}", "cluster.workers=2", "--out", "now.npy"]) == 0
        assert f"now.npy: 7 rows, each with 3 of region={name} at step 1,234" in capfd.readouterr().out
        inputs = torch.stack([inputs for inputs, _ in load_held_out(settings_for(run, [])).test])  # type: ignore[attr-defined]
        with torch.no_grad():
            scores = torch.log_softmax(last.model()(inputs), dim=1)
        torch.testing.assert_close(torch.from_numpy(np.load("now.npy")), scores)
        here(monkeypatch)
        titles, rows = [], []
        for asked in (f"region={name}", str(last.path)):
            assert main(["evaluate", asked]) == 0
            title, *row = capfd.readouterr().out.splitlines()
            titles.append(title), rows.append(row)
        assert titles[0] == f"region={name} at step 1,234, on 7 samples of data=csv:" and rows[0] == rows[1]


def test_a_region_without_a_model_that_is_known_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"other": torch.zeros(3)}
    with new_name() as name:
        cases = {None: "what has no folder is no run of", str(run.parent): f"{run.parent} is no run of"}
        for run_dir, says in cases.items():
            with showing(Region(name, lambda: tensors, {"run_dir": run_dir}), 0):
                with pytest.raises(SystemExit):
                    main(["evaluate", f"region={name}"])
                err = capsys.readouterr().err
                assert says in err and err.count("\n") == 1
                with pytest.raises(CheckpointError, match=f"region={name} at step 0 is of a run from Python"):
                    ddp.load(region=name).model()
        with showing(Region(name, lambda: tensors, {"run_dir": str(run), **ddp.load(run).facts}), 0):
            with pytest.raises(CheckpointError, match=f"region={name} at step 0 is of another model: it has no "):
                ddp.load(region=name).model()
            with pytest.raises(SystemExit):
                main(["evaluate", f"region={name}"])
            assert f"region={name} at step 0 is of another model" in capsys.readouterr().err
    for both_or_none in ({}, {"path": run, "region": "mine"}):
        with pytest.raises(ConfigError, match=r"ddp.load takes the folder of a run, or the region=.*: give either"):
            ddp.load(**both_or_none)


def test_csv_is_read_back_as_the_same_numbers() -> None:
    rows = np.random.RandomState(0).randn(5, 2, 2).astype(np.float32)
    for each in (rows, rows[:, 0, 0], rows.astype(np.float64), np.arange(5)):
        file = io.BytesIO()
        write_rows(file, each, is_csv=True)
        names, *lines = csv.reader(io.StringIO(file.getvalue().decode()))
        assert names == (["output"] if each.ndim == 1 else [f"output_{column}" for column in range(4)])
        back = np.array(lines, dtype=each.dtype).reshape(each.shape)
        assert (back == each).all()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["evaluate", "none"], "none does not exist: give the folder of a run"),
        (["evaluate", "region=none"], "no run on this host keeps region=none: "),
        (["predict", "region=n/one", "--out", "x.csv"], "region='n/one': take letters, digits, "),
        (["evaluate", "."], r"\. is no run of .* train: .* use ddp.evaluate and ddp.predict there"),
        (["evaluate", "RUN", "epochs=3"], "epochs=3: give KEY=VALUE, with a key of data, loader, "),
        (["evaluate", "RUN", "data.test_pat=x"], r"unknown key data.test_pat. Did you mean data.test_path\?"),
        (["evaluate", "RUN", "cluster.workers=two"], "cluster.workers=two: expected a whole number"),
        (["evaluate", "RUN", "cluster.spec.worker=[a:1,b:1]"], r"is for training; here all workers are on this host"),
        (["predict", "RUN", "--out", "x.csv", "cluster.task=worker:0"], "cluster.task=worker:0: is for training"),
        (["evaluate", "RUN", "cluster.workers=0"], "cluster.workers=0: "),
        (["evaluate", "RUN", "data.path=x.csv"], "data.path: .* give them as data.test_path=…"),
        (["evaluate", "RUN", "data.test_path=none.csv"], "none.csv does not exist"),
        (["evaluate", "RUN", "data=digits"], r"data=digits: their sample_shape is \(1, 8, 8\), .* with \(2,\)"),
        (["evaluate", "RUN", "data.inputs=[a,b,a]"], r"data=csv: their sample_shape is \(3,\), and .* with \(2,\)"),
        (["evaluate", "RUN", "--fast"], "unrecognized arguments: --fast"),
        (["predict", "RUN"], "the following arguments are required: --out"),
        (["predict", "RUN", "--out", "scores.txt"], "--out scores.txt: its name must end with .csv or .npy"),
        (["predict", "RUN", "--out", "no/scores.csv"], "--out no/scores.csv: there is no folder /.*/no"),
        (["predict", "RUN", "--out", "folder.csv"], "--out folder.csv: is a folder"),
    ],
)
def test_what_cannot_work_is_one_line_before_a_worker_starts(
    words: list[str], says: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder.csv").mkdir()
    workers = here(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main([str(run) if word == "RUN" else word for word in words])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and not workers
    assert re.search(says, err), err


def test_a_rank_of_several_evaluates_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(
        "TF_CONFIG", '{"cluster": {"worker": ["h:1", "g:1"]}, "task": {"type": "worker", "index": 1}}'
    )
    with pytest.raises(SystemExit):
        main(["evaluate", "none"])
    said = "evaluate: this process is rank 1 of 2 already, as TF_CONFIG says: start it by itself, with its own workers"
    assert said in capsys.readouterr().err


def test_a_model_that_cannot_take_the_samples_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown_facts(config: Config, **_: Any) -> Splits:
        return Splits(train=[], test=[(torch.ones(5), 0)])  # type: ignore[arg-type]

    monkeypatch.setattr(finished.components, "load_held_out", unknown_facts)
    for words in (["evaluate", str(run)], ["predict", str(run), "--out", "x.csv"]):
        with pytest.raises(SystemExit):
            main(words)
        err = capsys.readouterr().err
        assert re.search(r"cannot take their first sample \(RuntimeError: .*mat1 and mat2 shapes", err)
        assert err.count("\n") == 1


def test_a_file_that_could_not_be_written_whole_is_what_it_was(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here(monkeypatch)
    Path("scores.csv").write_text("before")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(finished, "write_rows", fail)
    with pytest.raises(SystemExit):
        main(["predict", str(run), "--out", "scores.csv"])
    said = f"--out {Path('scores.csv').absolute()}: No space left on device; make room there, or take another folder\n"
    assert capsys.readouterr().err.endswith(said)
    assert [path.name for path in Path().iterdir()] == ["scores.csv"] and Path("scores.csv").read_text() == "before"
    assert asdict(settings_for(run, ["trust=true"]))["trust"] is True
