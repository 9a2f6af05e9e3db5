"""`ddp sidecar`, `train evaluate.by=sidecar` and the evaluator of a cluster: whose numbers, and who waits for whom.

Tests: ddp/commands/sidecar.py, ddp/commands/train.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_finished import run

import ddp
from ddp.__main__ import main
from ddp.comm.meeting import cluster_spec
from ddp.commands import sidecar as command
from ddp.commands import train
from ddp.errors import ConfigError
from ddp.run.assembly.components import check_callbacks, load_data
from ddp.run.launch import command_line, supervisor
from ddp.run.launch.supervisor import worker_command
from ddp.run.settings.checks import resolve
from ddp.run.settings.config import Config
from ddp.run.settings.reader import from_plain
from ddp.train.sidecar import record_of
from ddp.train.steps.stopping import StopFlag

assert run  # a fixture


def end(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text('{"stopped_by": null}')


def splits_of(run_dir: Path) -> Any:
    with chdir(run_dir.parent):  # where it was started
        return load_data(from_plain(yaml.safe_load((run_dir / "config.yaml").read_text())))


def metrics(run_dir: Path, step: int, samples: Any) -> dict[str, float]:
    """The means over samples, by torch alone."""
    model = ddp.load(run_dir / "checkpoints" / f"step-{step:08d}").model()
    inputs, classes = (torch.stack([torch.as_tensor(each[part]) for each in samples]) for part in (0, 1))
    with torch.no_grad():
        scores = model(inputs)
    accuracy = (scores.argmax(dim=1) == classes).double().mean().item()
    return {"loss": torch.nn.functional.cross_entropy(scores, classes).item(), "accuracy": accuracy}


def check(run_dir: Path, line: dict[str, Any], side: str, samples: Any) -> None:
    for name, value in metrics(run_dir, line["step"], samples).items():
        assert line[f"{side}_{name}"] == pytest.approx(value, rel=1e-5)


@pytest.mark.slow
def test_the_numbers_are_those_of_the_samples_that_the_run_holds_out(run: Path) -> None:
    """The test set; or with a share for validation that share, and the test set for the last checkpoint alone."""
    end(run)
    words = ["env", *worker_command("ddp.commands.sidecar", [str(run)], threads=1)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)  # as the launcher starts it
    assert done.returncode == 0, done.stderr
    lines, test = record_of(run), splits_of(run).test
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        check(run, line, "test", test)
    assert f"step 2  test_loss {lines[1]['test_loss']:.4f}" in done.stdout
    assert ddp.load(run / "sidecar").step == max(lines, key=lambda line: line["test_accuracy"])["step"]
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("  validation: null\n", "  validation: 0.25\n"))
    (run / "sidecar" / "metrics.jsonl").unlink()
    command.follow(run, ["data.test_path=../test.csv"], StopFlag())
    lines, validation = record_of(run), splits_of(run).validation
    assert len(validation) == 5
    assert [(line["kind"], line["step"]) for line in lines] == [("evaluation", 1), ("evaluation", 2), ("report", 2)]
    for line, side in zip(lines, ("validation", "validation", "test"), strict=True):
        check(run, line, side, test if side == "test" else validation)


def test_one_that_comes_late_completes_the_results(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full at first is told in one line."""
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("by: workers", "by: sidecar"))
    early = {"main_metric": "test_accuracy", "steps": 2, "stopped_by": None}
    (run / "summary.json").write_text(json.dumps({**early, "sidecar": {"missing": [1, 2]}}))
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="a: No space left; make room, and start"):
        patch.setattr(
            command.SideCar, "evaluate_next", lambda _: (_ for _ in ()).throw(OSError(28, "No space left", "a"))
        )
        command.follow(run, [], StopFlag())
    command.follow(run, [], StopFlag())
    summary, last = json.loads((run / "summary.json").read_text()), record_of(run)[-1]
    about = {"evaluated": 2, "last_step": 2, "skipped": 0, "missing": []}
    assert summary == {**early, "sidecar": about} | {name: last[name] for name in ("test_loss", "test_accuracy")}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none"], "none does not exist: give the folder of a run"),
        (["."], r"\. is no run of .* train: "),
        (["RUN", "epochs=3"], "epochs=3: give KEY=VALUE, with a key of data, loader, "),
        (["RUN", "data.test_path=none.csv"], "none.csv does not exist"),
        (["RUN", "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_what_cannot_be_followed_is_one_line(
    words: list[str], says: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sidecar", *(str(run) if word == "RUN" else word for word in words)])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1 and re.search(says, err), err


def test_data_of_another_shape_skip_what_they_do_not_fit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(run)
    monkeypatch.setattr("ddp.train.sidecar.GRACE_S", 0.0)
    command.follow(run, ["data.inputs=[a,b,a]"], StopFlag())
    assert [line["why"] for line in record_of(run)] == ["its sample_shape is (2,), and that of data=csv is (3,)"] * 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"early_stopping": {"patience": 2}}, "early_stopping.patience=2: goes by metrics while the workers train"),
        ({"evaluate": {"every_steps": 5}}, "evaluate.every_steps=5: with evaluate.by=sidecar each checkpoint"),
        ({"trial": True}, "trial=true: keeps no checkpoint, and evaluate.by=sidecar evaluates checkpoints"),
        ({"callbacks": ["ddp:EarlyStopping"]}, ""),
    ],
)
def test_what_goes_by_metrics_in_training_is_refused_beside_it(settings: dict[str, Any], says: str) -> None:
    evaluate = {"by": "sidecar", **settings.get("evaluate", {})}
    if says:
        with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
            from_plain({**settings, "evaluate": evaluate})
    else:
        config = from_plain({**settings, "evaluate": evaluate})
        config.run.code = "."
        with pytest.raises(ConfigError, match="callbacks=ddp:EarlyStopping"):
            check_callbacks(config)


def test_it_has_a_core_of_its_own_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it runs is a stand-in that says where; the workers' threads, and their cores, are those that are left."""
    looks = "import os, time; print(os.sched_getaffinity(0), flush=True); time.sleep(60)"
    monkeypatch.setattr(supervisor, "worker_command", lambda *_, threads: [sys.executable, "-c", looks])
    mine = os.sched_getaffinity(0)
    for workers in (max(1, len(mine) - 1), len(mine)):
        config = from_plain({"cluster": {"workers": workers}, "evaluate": {"by": "sidecar"}})
        resolve(config)
        assert config.cluster.threads_per_worker == 1
        log = tmp_path / "logs" / "sidecar.log"
        with supervisor.with_sidecar(config, tmp_path) as is_there:
            assert is_there is not None
            left = {max(mine)} if workers < len(mine) else set()
            assert os.sched_getaffinity(0) == mine - left
            while not log.read_text().endswith("\n") and is_there():
                pass
            assert is_there() and log.read_text() == f"{left or mine}\n"
        assert os.sched_getaffinity(0) == mine and not is_there()
        log.unlink()


def test_the_table_the_curves_and_the_summary_have_the_side_car_s_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The workers evaluate nothing; the launcher waits until the side-car, which here begins then, has ended."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")

    @contextmanager
    def started(config: Config, run_dir: Path) -> Iterator[Callable[[], bool]]:
        def is_there() -> bool:
            command.follow(run_dir, [], StopFlag())
            return False

        yield is_there

    monkeypatch.setattr(command_line, "with_sidecar", started)
    words = ["cluster.workers=1", "epochs=2", "run.name=mine", "data=synthetic", "data.num_samples=64"]
    words += ["data.image_size=8", "evaluate.by=sidecar", "report.log_every=1"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 0
    run_dir = Path("runs/mine")
    kinds = {json.loads(line)["kind"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()}
    summary, last = json.loads((run_dir / "summary.json").read_text()), record_of(run_dir)[-1]
    assert "evaluation" not in kinds and last["step"] == summary["steps"]
    assert summary["test_accuracy"] == last["test_accuracy"] and summary["main_metric"] == "test_accuracy"
    assert summary["sidecar"] == {"evaluated": 2, "last_step": last["step"], "skipped": 0, "missing": []}
    out = capfd.readouterr().out
    assert f"2 checkpoints evaluated, the last one of step {last['step']}" in " ".join(out.split())
    assert not (run_dir / "checkpoints" / "best").exists() and ddp.load(run_dir).path.parent == run_dir / "sidecar"  # type: ignore[union-attr]
    assert not list(run_dir.glob("sidecar/.*"))


def test_the_evaluator_of_a_cluster_follows_the_others_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(run)
    monkeypatch.setattr(cluster_spec, "_own", None)
    words = ["cluster.spec={worker: [h:1, g:1]}", "cluster.task=evaluator:0", f"hydra.run.dir={run}", "device=cpu"]
    with pytest.raises(SystemExit) as ended:
        train.main(words)
    assert ended.value.code == 0 and [line["step"] for line in record_of(run)] == [1, 2]


def test_a_signal_ends_it_with_the_status_of_the_signal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of an evaluation; the next side-car makes it anew."""
    monkeypatch.setattr(command, "evaluate", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    assert main(["sidecar", str(run)]) == 128 + signal.SIGTERM and record_of(run) == []
    assert not list((run / "sidecar").glob("*"))
