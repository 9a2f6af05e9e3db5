"""A side-car evaluates every checkpoint once, whatever happens to it meanwhile, and keeps the best."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp
from ddp.errors import CheckpointError, ConfigError
from ddp.train import sidecar
from ddp.train.checkpoints.checkpoint_store import CheckpointStore, StoredCheckpoint, digest, listed, load
from ddp.train.sidecar import SideCar, has_ended, missing, only_sidecar, record_of, results_of_sidecar
from ddp.train.steps.stopping import StopFlag


def save(store: CheckpointStore, step: int, loss: float) -> Path:
    weights = {"weight": torch.tensor([loss], dtype=torch.float64)}
    return store.save(step, {"model": weights, "optimizer": {"step": step}}, meta={"identity": {}})


class Bench:
    """A run's folder, a store that writes there, a clock, and a side-car that finds the loss in the weights."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.now_s = run_dir, 0.0
        self.store = CheckpointStore(run_dir / "checkpoints", keep_last=2, best=None)
        self.said: list[str] = []
        self.stop = StopFlag()
        self.sides: tuple[Any, ...] = ("test",)
        self.side_car = self.started()

    def started(self) -> SideCar:
        """A side-car, as after a restart."""
        folder = self.run_dir / "sidecar"
        folder.mkdir(exist_ok=True)
        options: dict[str, Any] = {"main_metric": "loss", "higher_is_better": False, "say": self.said.append}
        return SideCar(self.run_dir, folder, self.measure, sides=self.sides, clock=lambda: self.now_s, **options)

    def measure(self, checkpoint: StoredCheckpoint, side: str) -> Mapping[str, float] | None:
        return {f"{side}_loss": checkpoint.parts["model"]["weight"].item()}

    def end(self, stopped_by: str | None = None) -> None:
        (self.run_dir / "summary.json").write_text(json.dumps({"stopped_by": stopped_by}))

    def follow(self, **options: Any) -> None:
        def pause(seconds: float) -> None:
            self.now_s += seconds

        self.side_car.follow(self.stop, pause=pause, **options)

    def evaluated(self) -> list[tuple[int, float]]:
        return [(e["step"], e.get("test_loss")) for e in record_of(self.run_dir) if e["kind"] == "evaluation"]

    def skipped(self) -> list[str]:
        return [e["why"] for e in record_of(self.run_dir) if e["kind"] == "skipped"]

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "sidecar").glob("*") if path.is_dir())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(autouse=True)
def warnings_are_heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging.getLogger("ddp"), "propagate", True)
    yield


def test_each_checkpoint_is_evaluated_once_and_the_best_stays(bench: Bench) -> None:
    """Also after a restart of either side, of which the run's makes the same weights again, or others."""
    losses = {1: 0.5, 2: 0.2, 3: math.nan, 4: 0.4, 5: 0.2}
    for step, loss in losses.items():
        save(bench.store, step, loss)
        assert bench.side_car.evaluate_next() and not bench.side_car.evaluate_next()
    assert bench.evaluated() == list({**losses, 3: None}.items()), "NaN is no JSON"
    assert "NaN" not in (bench.run_dir / "sidecar" / "metrics.jsonl").read_text()
    assert bench.kept() == ["step-00000002"], "the first of equals, which the run has pruned"
    assert ddp.load(bench.run_dir / "sidecar").step == ddp.load(bench.run_dir).step == 2
    assert ddp.load(bench.run_dir, "latest").step == 5
    assert set(load(bench.run_dir / "sidecar" / "step-00000002").parts) == {"model", "optimizer"}, "can be resumed"
    bench.side_car = bench.started()
    save(bench.store, 5, 0.2)  # the run has gone on from step 4
    assert not bench.side_car.evaluate_next() and bench.kept() == ["step-00000002"]
    save(bench.store, 5, 0.1)  # with other settings
    assert bench.side_car.evaluate_next() and bench.kept() == ["step-00000005"]
    save(bench.store, 5, 0.05)
    assert bench.side_car.evaluate_next() and bench.kept() == ["step-00000005"]
    assert ddp.load(bench.run_dir).weights["weight"].item() == 0.05
    assert bench.skipped() == [] and len(bench.said) == 7
    without = {
        "main_metric": "test_loss",
        "sidecar": {"evaluated": 7, "last_step": 5, "skipped": 0, "missing": []},
    }
    assert results_of_sidecar(bench.run_dir, "test_loss", last_step=5) == {"test_loss": 0.05, **without}
    assert results_of_sidecar(bench.run_dir, "test_loss", last_step=6) == without, "step 5 is not the run's result"


def test_a_side_car_that_comes_late_or_is_killed_goes_on_from_its_record(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run has pruned meanwhile is told of; what was evaluated when it was killed is evaluated once more."""
    for step in (1, 2):
        save(bench.store, step, 1 / step)
    bench.side_car.evaluate_next()
    for step in (3, 4, 5):
        save(bench.store, step, 1 / step)
    assert missing(bench.run_dir) == [4, 5], "2 and 3 were pruned unseen"
    with monkeypatch.context() as patch:
        patch.setattr(SideCar, "_append", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bench.side_car._evaluate(listed(bench.store.folder).saved[1], "test", "evaluation")
    assert bench.kept() == ["step-00000004"], "it was the best when the side-car was killed"
    with (bench.run_dir / "sidecar" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evalu')  # the disk was full, say
    bench.side_car = bench.started()
    while bench.side_car.evaluate_next():
        pass
    assert [step for step, _ in bench.evaluated()] == [1, 4, 5] and missing(bench.run_dir) == []
    assert bench.kept() == ["step-00000005"]
    assert bench.skipped() == [
        "removed before the side-car has seen it; save less often, or raise checkpoint.keep_last"
    ]
    assert results_of_sidecar(bench.run_dir, "test_loss", last_step=5)["sidecar"]["skipped"] == 2


def test_what_is_not_whole_is_waited_for_and_then_skipped(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit, a part that is not there, no manifest, one that comes whole late."""
    bench.store.keep_last = 9
    flipped, lacks, no_manifest, late = (save(bench.store, step, float(step)) for step in (1, 2, 3, 4))
    whole = (late / "model.pt").read_bytes()
    (flipped / "model.pt").write_bytes(b"x" + (flipped / "model.pt").read_bytes()[1:])
    (lacks / "optimizer.pt").unlink()
    (no_manifest / "manifest.json").unlink()
    (late / "model.pt").write_bytes(whole[:100])
    for _ in range(3):
        assert not bench.side_car.evaluate_next() and bench.skipped() == []
        bench.now_s += 3
    (late / "model.pt").write_bytes(whole)
    assert bench.side_car.evaluate_next() and bench.evaluated() == [(4, 4.0)]
    bench.now_s += 2
    bench.end()
    bench.follow()
    assert sorted(bench.skipped()) == [
        "its manifest.json is missing or damaged",
        "model.pt has changed since it was written (another SHA-256)",
        "optimizer.pt cannot be read (No such file or directory)",
    ]
    assert bench.now_s < 20 and bench.kept() == ["step-00000004"]
    assert "the side-car has skipped the checkpoint of step 2: optimizer.pt cannot be read" in caplog.text
    bench.side_car = bench.started()
    bench.follow()
    assert len(bench.skipped()) == 3, "told once"
    save(bench.store, 1, 1.0)  # the run comes to that step again
    assert bench.side_car.evaluate_next() and bench.evaluated()[1:] == [(1, 1.0)]


def test_what_the_run_removes_meanwhile_is_read_to_its_end_and_the_next_one_is_taken(bench: Bench) -> None:
    """All files were opened before one is read. A checkpoint that was gone before that is told of at once."""
    path, measure = save(bench.store, 1, 0.1), bench.measure

    def removed(checkpoint: StoredCheckpoint, side: str) -> Mapping[str, float] | None:
        shutil.rmtree(path, ignore_errors=True)
        return measure(checkpoint, side)

    bench.side_car._measure = removed
    assert bench.side_car.evaluate_next() and bench.evaluated() == [(1, 0.1)] and not path.exists()
    assert set(load(bench.run_dir / "sidecar" / "step-00000001").parts) == {"model", "optimizer"}
    for step in (2, 3):
        save(bench.store, step, float(step))
    gone = listed(bench.store.folder).saved[-1]
    shutil.rmtree(gone.path)
    assert bench.side_car._evaluate(gone, "test", "evaluation") and bench.skipped() == ["it was removed meanwhile"]
    assert bench.side_car.evaluate_next() and bench.evaluated() == [(1, 0.1), (3, 3.0)]


SECRET = "THE PRIVATE KEY OF THE USER"


def as_a_link_to(path: Path, secret: Path) -> None:
    path.unlink()
    path.symlink_to(secret)


def as_a_pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def in_the_manifest(**entry: Any) -> Callable[[Path, Path], None]:
    """Gives an entry of the model to a manifest, whose own checksum fits."""

    def change(path: Path, _: Path) -> None:
        manifest = path.with_name("manifest.json")
        plain = json.loads(manifest.read_text())
        plain["parts"]["model"].update(entry)
        manifest.write_text(json.dumps({**plain, "sha256": digest(plain)}))

    return change


@pytest.mark.parametrize(
    "plant", [as_a_link_to, as_a_pipe, in_the_manifest(sha256="/docs"), in_the_manifest(bytes=1 << 60)]
)
def test_nothing_outside_of_a_stranger_s_run_is_read_written_or_removed(
    plant: Callable[[Path, Path], None], bench: Bench
) -> None:
    """A link, a pipe or a path in the place of a part; a link in the place of what earlier versions have made."""
    home = bench.run_dir.parent / "home"
    (home / "docs").mkdir(parents=True, exist_ok=True)
    (home / "docs" / "thesis.txt").write_text(SECRET)
    path = save(bench.store, 1, 1.0)
    (bench.run_dir / "sidecar" / f".tmp-{path.name}").symlink_to(home)
    (bench.run_dir / "sidecar" / "step-00000009").symlink_to(home / "docs")
    plant(path / "model.pt", home / "docs" / "thesis.txt")
    bench.end()
    bench.follow()
    save(bench.store, 2, 2.0)
    bench.follow()
    assert bench.evaluated() == [(2, 2.0)] and len(bench.skipped()) == 1
    assert [each.read_text() for each in home.rglob("*.txt")] == [SECRET]
    shutil.rmtree(home)
    assert not [each for each in bench.run_dir.rglob("*") if each.is_file() and SECRET in each.read_text("latin1")]


def test_a_link_in_the_place_of_its_folder_is_not_followed_also_if_it_comes_late(tmp_path: Path) -> None:
    """The folder of another run of the user's, from an archive; and one that a stranger exchanges while it is used."""
    mine = CheckpointStore(tmp_path / "mine" / "checkpoints", keep_last=9)
    for step in (7, 8, 9):
        save(mine, step, 1.0)
    before = sorted(path.name for path in mine.folder.iterdir())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "sidecar").symlink_to(mine.folder)
    with pytest.raises(ConfigError, match="sidecar is a link, and is not opened"), only_sidecar(tmp_path / "run"):
        pass
    (tmp_path / "run" / "sidecar").unlink()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")

    def exchanged(checkpoint: StoredCheckpoint, side: str) -> Mapping[str, float]:
        if not (tmp_path / "run" / "moved").exists():
            (tmp_path / "run" / "sidecar").rename(tmp_path / "run" / "moved")
            (tmp_path / "run" / "sidecar").symlink_to(mine.folder)
        return {f"{side}_loss": float(checkpoint.step)}

    with only_sidecar(tmp_path / "run") as folder:
        side_car = SideCar(
            tmp_path / "run", folder, exchanged, sides=("test",), main_metric="loss", higher_is_better=True
        )
        for step in (1, 2):
            save(store, step, 1.0)
            assert side_car.evaluate_next()
    assert sorted(path.name for path in mine.folder.iterdir()) == before
    there = {path.name for path in (tmp_path / "run" / "moved").iterdir()}
    assert there == {"best", "latest", "metrics.jsonl", "step-00000002"}


def test_it_ends_with_the_run_with_a_signal_or_when_nothing_happens(bench: Bench) -> None:
    save(bench.store, 1, 1.0)
    bench.end("SIGTERM")  # which will go on
    assert not has_ended(bench.run_dir)
    with pytest.raises(ConfigError, match=r"nothing has happened there for 60 s, and the run has not ended"):
        bench.follow(patience_s=60)
    assert bench.evaluated() == [(1, 1.0)] and 60 < bench.now_s < 62
    (bench.run_dir / "summary.json").unlink()

    def goes_on(seconds: float) -> None:
        bench.now_s += 50
        if bench.now_s > 300:
            bench.end()
        (bench.run_dir / "metrics.jsonl").write_text("x")
        os.utime(bench.run_dir / "metrics.jsonl", ns=(0, int(bench.now_s)))

    bench.side_car.follow(bench.stop, patience_s=60, pause=goes_on)
    assert bench.now_s > 300
    save(bench.store, 2, 2.0), save(bench.store, 3, 3.0)
    bench.side_car._measure = lambda checkpoint, side: bench.stop.request("SIGTERM")  # type: ignore[func-returns-value]
    bench.follow()
    assert bench.evaluated() == [(1, 1.0)], "it was given up in the midst of it"
    bench.stop, bench.side_car = StopFlag(), bench.started()
    bench.follow()
    assert [step for step, _ in bench.evaluated()] == [1, 2, 3]


def test_the_last_weights_are_reported_on_the_test_set_if_another_one_chooses(bench: Bench) -> None:
    bench.sides = ("validation", "test")
    bench.side_car = bench.started()
    for step in (1, 2):
        save(bench.store, step, step)
    bench.end()
    bench.follow()
    bench.follow()
    kinds = [(entry["kind"], entry["step"]) for entry in record_of(bench.run_dir)]
    assert kinds == [("evaluation", 1), ("evaluation", 2), ("report", 2)] and bench.kept() == ["step-00000001"]
    found = results_of_sidecar(bench.run_dir, "test_loss", last_step=2)
    assert (found["validation_loss"], found["test_loss"], found["main_metric"]) == (2.0, 2.0, "validation_loss")


def test_a_run_without_checkpoints_and_a_second_side_car_are_refused(bench: Bench) -> None:
    bench.end()
    with pytest.raises(ConfigError, match="has ended and holds no checkpoint: there is nothing to evaluate"):
        bench.follow()
    with (bench.run_dir / "sidecar" / ".lock").open("w") as lock:
        lock.write("process 7 on host h\n"), lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"has a side-car: .* is being written by process 7 on host h"):
            only_sidecar(bench.run_dir).__enter__()
        assert sidecar.is_followed(bench.run_dir)
    assert not sidecar.is_followed(bench.run_dir)


def test_the_table_waits_for_it_and_no_longer(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    save(bench.store, 1, 1.0)
    answers = iter([True, True, False])
    sidecar.wait_for(bench.run_dir, lambda: next(answers), within_s=60)
    assert capsys.readouterr().out == "1 checkpoint left for the side-car; waiting up to 60 s …\n"
    sidecar.wait_for(bench.run_dir, lambda: True, within_s=0.0)
    assert results_of_sidecar(bench.run_dir, "test_loss", last_step=5)["sidecar"]["missing"] == [1]


def test_another_model_s_checkpoint_is_skipped(bench: Bench) -> None:
    def refuse(checkpoint: StoredCheckpoint, side: str) -> None:
        raise CheckpointError("it is of another model")

    save(bench.store, 1, 1.0)
    bench.side_car._measure = refuse
    assert not bench.side_car.evaluate_next()
    bench.now_s += 60
    assert bench.side_car.evaluate_next() and bench.skipped() == ["it is of another model"] and bench.kept() == []
