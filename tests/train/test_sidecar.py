"""A side-car evaluates every checkpoint once, whatever happens to it meanwhile, and keeps the best."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp
from ddp.errors import CheckpointError, ConfigError
from ddp.train import sidecar
from ddp.train.checkpoint_store import CheckpointStore, load
from ddp.train.sidecar import SideCar, has_ended, missing, only_sidecar, record_of, results_of_sidecar
from ddp.train.stopping import StopFlag

NAN = math.nan


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
        (self.run_dir / "sidecar").mkdir(exist_ok=True)
        options: dict[str, Any] = {"main_metric": "loss", "higher_is_better": False, "say": self.said.append}
        return SideCar(self.run_dir, self.measure, sides=self.sides, clock=lambda: self.now_s, **options)

    def measure(self, path: Path, side: str) -> Mapping[str, float] | None:
        return {f"{side}_loss": load(path).parts["model"]["weight"].item()}

    def end(self, stopped_by: str | None = None) -> None:
        (self.run_dir / "summary.json").write_text(json.dumps({"stopped_by": stopped_by}))

    def follow(self, **options: Any) -> None:
        def pause(seconds: float) -> None:
            self.now_s += seconds

        self.side_car.follow(self.stop, pause=pause, **options)

    def evaluated(self) -> list[tuple[int, float]]:
        return [(e["step"], e["test_loss"]) for e in record_of(self.run_dir) if e["kind"] == "evaluation"]

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
    losses = {1: 0.5, 2: 0.2, 3: NAN, 4: 0.4, 5: 0.2}
    for step, loss in losses.items():
        save(bench.store, step, loss)
        assert bench.side_car.look() and not bench.side_car.look()
    assert str(bench.evaluated()) == str(list(losses.items()))
    assert bench.kept() == ["step-00000002"], "the first of equals, which the run has pruned"
    assert ddp.load(bench.run_dir / "sidecar").step == ddp.load(bench.run_dir).step == 2
    assert ddp.load(bench.run_dir, "latest").step == 5
    assert set(load(bench.run_dir / "sidecar" / "step-00000002").parts) == {"model", "optimizer"}, "can be resumed"
    bench.side_car = bench.started()
    save(bench.store, 5, 0.2)  # the run has gone on from step 4
    assert not bench.side_car.look() and bench.kept() == ["step-00000002"]
    save(bench.store, 5, 0.1)  # with other settings
    assert bench.side_car.look() and bench.kept() == ["step-00000005"]
    save(bench.store, 5, 0.05)
    assert bench.side_car.look() and bench.kept() == ["step-00000005"]
    assert ddp.load(bench.run_dir).weights["weight"].item() == 0.05
    assert bench.skipped() == [] and len(bench.said) == 7
    without = {
        "main_metric": "test_loss",
        "sidecar": {"evaluated": 7, "last_step": 5, "skipped": 0, "missing": []},
    }
    assert results_of_sidecar(bench.run_dir, "test_loss", last_step=5) == {"test_loss": 0.05, **without}
    assert results_of_sidecar(bench.run_dir, "test_loss", last_step=6) == without, "step 5 is not the run's result"


def test_what_was_seen_outlives_the_run_s_pruning_and_a_kill(bench: Bench) -> None:
    """The side-car is killed between its line and the keeping of the best, and in the midst of linking."""
    for step in (1, 2):
        save(bench.store, step, 1 / step)
    bench.side_car.look()
    for step in (3, 4, 5):
        save(bench.store, step, 1 / step)
    assert missing(bench.run_dir) == [2, 4, 5], "held: 2; 3 was saved and pruned unseen"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SideCar, "_settle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bench.side_car.look()
    (bench.run_dir / "sidecar" / ".tmp-step-00000009-abc").mkdir()
    with (bench.run_dir / "sidecar" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evalu')  # the disk was full, say
    bench.side_car = bench.started()
    assert bench.kept() == [f".held-step-0000000{step}-{bench_key(bench, step)}" for step in (4, 5)] + ["step-00000002"]
    while bench.side_car.look():
        pass
    assert [step for step, _ in bench.evaluated()] == [1, 2, 4, 5] and missing(bench.run_dir) == []
    assert bench.kept() == ["step-00000005"]
    assert bench.skipped() == [
        "removed before the side-car has seen it; save less often, or raise checkpoint.keep_last"
    ]
    assert results_of_sidecar(bench.run_dir, "test_loss", last_step=5)["sidecar"]["skipped"] == 1


def bench_key(bench: Bench, step: int) -> str:
    manifest = json.loads((bench.store.folder / f"step-{step:08d}" / "manifest.json").read_text())
    key: str = manifest["parts"]["model"]["sha256"][:8]
    return key


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
        assert not bench.side_car.look() and bench.skipped() == []
        bench.now_s += 3
    (late / "model.pt").write_bytes(whole)
    assert bench.side_car.look() and bench.evaluated() == [(4, 4.0)]
    bench.now_s += 2
    bench.end()
    bench.follow()
    assert bench.skipped() == [
        "it has no optimizer.pt",
        "its manifest.json is missing or damaged",
        "model.pt has changed since it was written (another SHA-256)",
    ]
    assert bench.now_s < 20 and bench.kept() == ["step-00000004"]
    assert "the side-car has skipped the checkpoint of step 2: it has no optimizer.pt" in caplog.text
    bench.side_car = bench.started()
    bench.follow()
    assert len(bench.skipped()) == 3, "told once"
    save(bench.store, 1, 1.0)  # the run comes to that step again
    assert bench.side_car.look() and bench.evaluated()[1:] == [(1, 1.0)]


def test_a_checkpoint_that_is_removed_while_it_is_linked_is_told_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = save(bench.store, 1, 1.0), os.link

    def removed(source: Path, target: Path, **options: Any) -> None:
        if source.name == "optimizer.pt":
            path.rename(path.with_name(".tmp-removed"))
        link(source, target, **options)

    monkeypatch.setattr(os, "link", removed)
    assert not bench.side_car.look()
    assert bench.skipped() == ["it was removed meanwhile"] and bench.kept() == []


def test_without_hard_links_checkpoints_are_copied(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    path = save(bench.store, 1, 1.0)
    bench.side_car.look()
    linked = bench.run_dir / "sidecar" / "step-00000001" / "model.pt"
    assert linked.stat().st_ino == (path / "model.pt").stat().st_ino
    monkeypatch.setattr(os, "link", refuse)
    for step in (2, 3):
        save(bench.store, step, 1 / step)
        bench.side_car.look()
    copied = bench.run_dir / "sidecar" / "step-00000003" / "model.pt"
    assert copied.stat().st_ino != (bench.store.folder / "step-00000003" / "model.pt").stat().st_ino
    assert load(copied.parent).step == 3 and caplog.text.count("takes no hard links (Operation not permitted)") == 1


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
    measure, bench.side_car._measure = bench.measure, lambda path, side: bench.stop.request("SIGTERM")  # type: ignore[assignment]
    bench.follow()
    assert bench.evaluated() == [(1, 1.0)], "it was given up in the midst of it"
    bench.stop, bench.side_car = StopFlag(), bench.started()
    bench.side_car._measure = measure
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
    def refuse(path: Path, side: str) -> None:
        raise CheckpointError("it is of another model")

    save(bench.store, 1, 1.0)
    bench.side_car._measure = refuse
    assert not bench.side_car.look()
    bench.now_s += 60
    assert bench.side_car.look() and bench.skipped() == ["it is of another model"] and bench.kept() == []
