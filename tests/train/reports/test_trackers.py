"""What reaches each tracker: once, from rank 0, over crashes and resumes, and however the run ends.

The libraries are stood for by `tests/fakes/`, whose parameters `python tests/train/reports/test_trackers.py`
compares with those of the libraries where they are installed.

Tests: ddp/trackers.py.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import os
import random
import re
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import RankFailed, collect, run_ranks, start_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import CommunicatorBroken, ConfigError, PeerLost
from ddp.train.arguments import FitArguments
from ddp.train.fit import train
from ddp.train.reports import trackers as tracker
from ddp.train.steps.stopping import StopFlag

ROOT = Path(__file__).parents[3]
FAKES = ROOT / "tests" / "fakes"
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
NUM_STEPS, EVERY = 16, 4
KILLED = "its process has ended"
ALL = ("TensorBoard", "CSV", "MLflow", "WandB")


class At(ddp.Callback):
    """Does something after a step, on one rank."""

    def __init__(self, step: int, rank: int, do: Any) -> None:
        self.step, self.rank, self.do = step, rank, do

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        if (state.step, state.comm.rank) == (self.step, self.rank):
            self.do(state)


class Fails(ddp.Callback):
    """Fails while it hears of an error, on rank 0."""

    def exception(self, state: ddp.TrainState, error: BaseException) -> None:
        if state.comm.rank == 0:
            raise RuntimeError("no callback after this one would hear of it")


class AtTheEnd(ddp.Callback):
    """Does something once all is written, on one rank."""

    def __init__(self, rank: int, do: Any) -> None:
        self.rank, self.do = rank, do

    def finished(self, state: ddp.TrainState, summary: Any) -> None:
        if state.comm.rank == self.rank:
            self.do()


class Draws(ddp.Callback):
    """Notes what the program would draw before each step."""

    def __init__(self) -> None:
        self.drawn = list[float]()

    def step_start(self, state: ddp.TrainState) -> None:
        self.drawn += [float(torch.rand(1)), random.random(), np.random.rand()]


class Draw(ddp.Callback):
    """Draws curves in less time than they take."""

    def fit_end(self, state: ddp.TrainState) -> None:
        if state.comm.rank == 0 and state.run_dir is not None:
            Image.new("RGBA", (10, 4)).save(state.run_dir / "curves.png")


def fit(folder: Path | None, *callbacks: ddp.Callback, stop: StopFlag | None = None, **how: Any) -> Any:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
    kept = {"resume": folder and "auto", "every_steps": 6, "log_every": 2, "progress": False, "curves": False}
    kept |= how.pop("kept", {})
    given = FitArguments(
        model=module,
        data=(X, CLASSES),
        optimizer=torch.optim.Adam(module.parameters(), lr=0.01),
        loss=F.cross_entropy,
        global_batch=10,
        epochs=NUM_STEPS * 10 // len(X),
        validation_data=(X, CLASSES),
        test_data=(X[:30], CLASSES[:30]),
        folder=ddp.Folder(folder, **kept),
        callbacks=callbacks,
        stop=stop,
        **how,
    )
    state = train(given)
    return torch.cat([each.detach().flatten() for each in module.parameters()]), state


def trackers(*names: str) -> list[Any]:
    sys.path.append(str(FAKES))
    sys.modules["torch.utils.tensorboard"] = importlib.import_module("tensorboard")
    return [getattr(ddp.trackers, name)(group="a sweep") for name in names or ALL]


def shown_by_tensorboard(folder: Path) -> list[tuple[str, Any, int]]:
    """Returns tag, value and step of each event; those from a later writer's `purge_step` on are hidden."""
    found: list[tuple[str, Any, int]] = []
    for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        if "purge" in event:
            found = [each for each in found if each[2] < event["purge"]]
        elif "tag" in event:
            found.append((event["tag"], event["value"], event["step"]))
    return found


def told(folder: Path, runs: Path, *, once: bool = True) -> dict[str, Any]:
    """Returns what stands in each tracker: (name, step) → value of all metrics, and the rest; each name once a step."""
    of_files = {path.name.partition("-")[0]: json.loads(path.read_text()) for path in sorted(runs.glob("*.json"))}
    assert len(of_files) == len(list(runs.glob("*.json"))), "one run in each tracker"
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    events = shown_by_tensorboard(folder)
    pairs: dict[str, list[tuple[str, int, Any]]] = {
        "TensorBoard": [(tag, step, value) for tag, value, step in events if isinstance(value, (int, float))],
        "CSV": [
            (name, int(row["step"]), float(value))
            for row in rows
            for name, value in row.items()
            if value and name not in ("kind", "step")
        ],
        "MLflow": [(name, *each) for name, history in of_files["mlflow"]["metrics"].items() for each in history],
        "WandB": [
            (name, row["step"], value)
            for row in of_files["wandb"]["history"]
            for name, value in row.items()
            if not name.startswith(("step", "last_", "curves", "kind"))
        ],
    }
    for title, found in pairs.items():
        assert not once or len({each[:2] for each in found}) == len(found), f"{title} has something twice"
    return {
        **{title: {(name, step): value for name, step, value in found} for title, found in pairs.items()},
        "texts": {(tag, step): value for tag, value, step in events if isinstance(value, str)},
        "files": of_files,
        "status": next(csv.DictReader((folder / "status.csv").read_text().splitlines()), None),
    }


def expected(folder: Path) -> dict[tuple[str, int], Any]:
    found = {}
    for entry in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        once = ("kind", "step") if entry["kind"] == "step" else ("kind", "step", "samples", "epoch")
        found |= {(name, entry["step"]): value for name, value in entry.items() if name not in once}
    return found


def assert_whole(folder: Path, runs: Path, *, status: str, reason: str, step: int) -> None:
    """Checks that each tracker has all of metrics.jsonl, and how the run has ended."""
    found, wanted = told(folder, runs), expected(folder)
    assert {step for name, step in wanted if name == "train_loss"} == {*range(2, step + 1, 2)}
    exact = ("train_loss", "validation_loss", "test_loss", "samples")  # a repeated step takes another time
    for title in ALL:
        # What ranks use is gathered once a second, and so at other steps in a repetition.
        here, there = ({key for key in each if "/rank_" not in key[0]} for each in (found[title], wanted))
        assert here == there, title
        for name, at in wanted:
            assert name not in exact or found[title][name, at] == wanted[name, at], (title, name, at)
    mlflow, wandb = found["files"]["mlflow"], found["files"]["wandb"]
    assert mlflow["name"] == wandb["name"] == folder.name
    assert mlflow["tags"] == {"group": "a sweep", "reason": reason} and wandb["group"] == "a sweep"
    assert mlflow["status"] == {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[status]
    assert wandb["state"] == {"interrupted": "preempted"}.get(status, status)
    assert (wandb["summary"]["status"], wandb["summary"]["reason"]) == (status, reason)
    assert found["status"] == {"status": status, "reason": reason, "step": str(step)}
    assert found["texts"]["status", step] == (f"{status}: {reason}" if reason else status)
    settings = dict(list(csv.reader((folder / "settings.csv").read_text().splitlines()))[1:])
    assert settings == mlflow["params"] == wandb["config"] and settings["optimizer.0.lr"] == "0.01"
    assert "| optimizer.0.lr | 0.01 |" in found["texts"]["settings", 0]
    name = f"step-{step:08d}"
    if status != "failed":
        assert "model.pt" in mlflow["artifacts"][f"checkpoints/{name}"]
        assert wandb["artifacts"][-1][1:] == ["model", name]
        assert found["texts"]["checkpoint", step].endswith(name)
    if (folder / "curves.png").exists():
        assert mlflow["artifacts"]["curves.png"] > 0 and wandb["history"][-1]["curves"] == "curves.png"
        assert ("curves", step) in found["texts"]


# --- in one process after another ------------------------------------------------------------------------------------


def part(folder: Path, runs: Path, step: int, rank: int, how: str) -> tuple[Tensor, list[str]]:
    """Trains on, until something happens on a rank after a step."""
    ddp.init(abort_s=20)
    os.environ |= {"FAKE_TRACKERS": str(runs), "WANDB_MODE": "offline" if how else "online"}
    if how == "kill":
        os.environ["FAKE_FAILURE"] = "hangs at step 10"  # which is before the last checkpoint

    def happens(state: ddp.TrainState) -> None:
        if how == "raise":
            raise RuntimeError(f"rank {rank} has had enough")
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        weights, _ = fit(folder, Fails(), *trackers(), At(step, rank, happens))
    except RuntimeError as error:
        ddp.shutdown(failed=f"{type(error).__name__}: {error}")  # as launches do
        raise
    ddp.shutdown()
    return weights, sorted({"mlflow", "wandb"} & sys.modules.keys())


@pytest.mark.slow
def test_over_crashes_and_resumes_it_stays_one_run_in_which_each_step_stands_once(tmp_path: Path) -> None:
    folder, runs = tmp_path / "run", tmp_path / "there"
    runs.mkdir()
    results = collect(start_ranks(part, 2, folder, runs, 9, 1, "raise"))
    assert all(isinstance(each, RankFailed) for each in results)
    assert_whole_but_failed(folder, runs, reason="it failed: RuntimeError: rank 1 has had enough", last=9)
    results = collect(start_ranks(part, 2, folder, runs, 15, 0, "kill"))
    assert "died with exit code -9" in str(results[0])
    assert_whole_but_failed(folder, runs, reason=KILLED, last=15)
    results = run_ranks(part, 2, folder, runs, 0, 0, "")
    assert [imported for _, imported in results] == [["mlflow", "wandb"], []], "rank 0 alone imports libraries"
    assert_whole(folder, runs, status="finished", reason="", step=NUM_STEPS)


@pytest.mark.parametrize(
    ("lost", "reason", "marks"), [(0, KILLED, True), (1, KILLED, False), (0, "it failed: ValueError: no", False)]
)
def test_a_rank_speaks_for_one_that_was_killed_and_not_for_one_that_said_so_itself(
    lost: int, reason: str, marks: bool
) -> None:
    broken = CommunicatorBroken("a call after an error")
    broken.__cause__ = PeerLost(rank=lost, host="h", generation=0, sequence=1, label="x", reason=reason)
    assert tracker._was_killed(broken, rank=0) is marks
    broken.__cause__.__cause__ = broken  # a ring
    assert tracker._was_killed(broken, rank=0) is marks


def assert_whole_but_failed(folder: Path, runs: Path, *, reason: str, last: int) -> None:
    found = told(folder, runs)
    assert found["status"]["status"] == "failed" and reason in found["status"]["reason"]
    assert found["files"]["mlflow"]["status"] == "FAILED" and reason in found["files"]["mlflow"]["tags"]["reason"]
    assert found["files"]["wandb"]["state"] == "failed" and reason in found["files"]["wandb"]["summary"]["reason"]
    texts = [value for (tag, _), value in found["texts"].items() if tag == "status"]
    assert sum(each.startswith("failed: ") for each in texts) == len(texts) and reason in texts[-1]
    steps = {step for _, step in found["MLflow"]}
    assert max(steps) == last // 2 * 2 or reason == KILLED  # some may have been on their way


# --- in one process --------------------------------------------------------------------------------------------------


def ways(tmp_path: Path) -> list[str]:
    comm = ddp.init(abort_s=20)
    warned = list[str]()
    tracker.log.warning = lambda text, *parts: warned.append(text % parts)  # type: ignore[method-assign]
    plain, draws = Draws(), Draws()
    whole, _ = fit(tmp_path / "plain", plain)

    def into(name: str) -> Path:
        runs = tmp_path / f"{name} there"
        runs.mkdir(exist_ok=True)
        os.environ["FAKE_TRACKERS"] = str(runs)
        return runs

    runs = into("whole")
    weights, _ = fit(tmp_path / "whole", *trackers(), draws, Draw())
    assert torch.equal(weights, whole) and draws.drawn == plain.drawn, "the bits are those without trackers"
    if comm.rank == 0:
        assert_whole(tmp_path / "whole", runs, status="finished", reason="", step=NUM_STEPS)
    before = {path: path.read_text() for path in runs.iterdir()}
    fit(tmp_path / "whole", *trackers())
    assert before == {path: path.read_text() for path in runs.iterdir()}, "a complete run sends nothing"

    runs, stop = into("stopped"), StopFlag()
    fit(tmp_path / "stopped", *trackers(), At(7, 1, lambda state: stop.request("SIGTERM")), stop=stop)
    if comm.rank == 0:
        assert_whole(tmp_path / "stopped", runs, status="interrupted", reason="SIGTERM", step=8)
    fit(tmp_path / "stopped", *trackers(), At(9, 1, lambda state: state.stop("pruned")))
    if comm.rank == 0:
        assert_whole(tmp_path / "stopped", runs, status="finished", reason="pruned", step=10)
    weights, _ = fit(tmp_path / "stopped", *trackers())
    assert torch.equal(weights, whole)
    if comm.rank == 0:
        assert_whole(tmp_path / "stopped", runs, status="finished", reason="", step=NUM_STEPS)
    assert not warned
    num_runs = len(list(runs.iterdir()))
    fit(tmp_path / "other", *trackers("MLflow"), max_steps=18, kept={"resume": tmp_path / "whole"})
    assert len(list(runs.iterdir())) == num_runs + 1 or comm.rank, "in another folder it is another run"
    warned.clear()  # of what has changed

    runs, names = into("by hand"), {"ddp": ddp}
    trackers()
    names |= {"mlflow": importlib.import_module("mlflow"), "wandb": importlib.import_module("wandb")}
    names["SummaryWriter"] = importlib.import_module("tensorboard").SummaryWriter
    for program in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trackers.md").read_text(), re.DOTALL):
        exec(program, names)
    by_hand = [names[title]() for title in ("MLflow", "WandB", "TensorBoard")]
    fit(tmp_path / "by hand", ddp.trackers.CSV(), *by_hand)
    if comm.rank == 0:
        found = told(tmp_path / "by hand", runs, once=False)
        assert {*found["CSV"]} == {*found["MLflow"]} == {*found["WandB"]} == {*found["TensorBoard"]}
        assert found["files"]["mlflow"]["status"] == "FINISHED" and found["files"]["wandb"]["state"] == "finished"

    fit(None, *trackers("MLflow", "WandB"))
    for name in ("TensorBoard", "CSV"):
        with pytest.raises(ConfigError, match=rf"^{name} writes into the run's folder, and folder=None: give a folder"):
            fit(None, *trackers(name))
    runs = into("trial")
    fit(tmp_path / "trial", *trackers(), kept={"trial": True, "resume": None})
    assert not list(runs.iterdir()) and not (tmp_path / "trial").exists()

    limits = tracker.BEGIN_S, tracker.END_S
    for how, says in {
        "fails at step 4": "MLflow: ConnectionError: the server is down; the run continues, and sends it nothing more",
        "hangs at step 4": "MLflow has not taken all of the run within 0.5 s, and may miss the rest",
    }.items():
        into(how)
        os.environ["FAKE_FAILURE"], tracker.END_S = how, 0.5
        weights, _ = fit(tmp_path / how, *trackers("MLflow", "CSV"))
        assert torch.equal(weights, whole)
        assert warned == ([says] if comm.rank == 0 else []), "it is said once"
        warned.clear()
        assert (tmp_path / how / "status.csv").read_text() == "status,reason,step\nfinished,,16\n"
    for how, says in {
        "fails at start_run": "MLflow cannot begin a run: ConnectionError: the server is down",
        "hangs at start_run": "MLflow cannot begin a run: it has not answered within 0.5 s",
    }.items():
        os.environ["FAKE_FAILURE"], tracker.BEGIN_S = how, 0.5
        with pytest.raises(ConfigError, match=f"^{says}$"):
            fit(tmp_path / how, *trackers("CSV", "MLflow"))
        status = (tmp_path / how / "status.csv").read_text() if comm.rank == 0 else "failed,"
        assert "failed," in status, "the others are told"
    tracker.BEGIN_S, tracker.END_S = limits
    del os.environ["FAKE_FAILURE"]
    with pytest.raises(ConfigError, match="the run would be sent to CSV twice: give"):
        fit(None, *trackers("CSV", "CSV"))

    status, told_of = tmp_path / "signalled" / "status.csv", list[bool]()
    before = signal.signal(signal.SIGTERM, lambda *_: told_of.append(status.exists()))
    fit(status.parent, *trackers("CSV"), AtTheEnd(0, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    signal.signal(signal.SIGTERM, before)
    assert told_of == [True] * (comm.rank == 0), "a signal that comes late waits for the trackers"

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises((ValueError, PeerLost)):
        try:
            fit(tmp_path / "late", *trackers("CSV"), AtTheEnd(1, fails))
        except ValueError:
            ddp.shutdown(failed="ValueError: no")
            raise
    assert comm.rank or (tmp_path / "late" / "status.csv").read_text().splitlines()[1].startswith("failed,")
    ddp.shutdown()
    return warned


@pytest.mark.slow
def test_each_way_to_end_is_told_and_the_bits_are_those_without_trackers(tmp_path: Path) -> None:
    assert run_ranks(ways, 2, tmp_path) == [[], []]


class Slow(ddp.trackers.Tracker):
    """Takes long for a checkpoint."""

    title = "Slow"

    def begin(self, id: str, start: Any) -> str:
        return "x"

    def file(self, path: Path, step: int) -> None:
        time.sleep(60)


def stopped_while_a_tracker_is_slow(folder: Path) -> float:
    tracker.STOP_S, stop, begin_s = 0.3, StopFlag(), time.monotonic()
    with stop.listening():
        _, state = fit(folder, Slow(), At(6, 0, lambda _: os.kill(os.getpid(), signal.SIGTERM)), stop=stop)
    ddp.shutdown()
    assert state.stopped_by == "SIGTERM"
    return time.monotonic() - begin_s


def test_after_a_signal_a_tracker_has_less_time_than_launchers_grant(tmp_path: Path) -> None:
    assert run_ranks(stopped_while_a_tracker_is_slow, 1, tmp_path)[0] < 30
    assert tracker.STOP_S == 20.0


def test_names_that_a_tracker_refuses_reach_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TRACKERS", str(tmp_path))
    monkeypatch.syspath_prepend(FAKES)
    found = ddp.trackers.MLflow()
    found.begin("", tracker.Start(None, "", 0))
    found.settings({"data.args.a@b": "1"})
    found.metrics("evaluation", 1, {"top@5 (%)": 1.0, "größe": 2.0, "n" * 300: 3.0})
    run = json.loads(next(tmp_path.iterdir()).read_text())
    assert run["params"] == {"data.args.a_b": "1"}
    assert run["metrics"] == {"top_5 ___": [[1, 1.0]], "größe": [[1, 2.0]], "n" * 250: [[1, 3.0]]}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MLflow", "MLflow is not installed: pip install mlflow"),
        ("WandB", "Weights & Biases is not installed: pip install wandb"),
        ("TensorBoard", "TensorBoard is not installed: pip install tensorboard"),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_installs_it(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in (None, ModuleSpec("wandb", None)):  # not there; a folder of that name, such as of W&B's own files
        monkeypatch.setattr(tracker, "find_spec", lambda name, found=found: found)
        with pytest.raises(ConfigError, match=f"^{words}$"):
            getattr(ddp.trackers, name)()
    assert ddp.trackers.CSV()


PARTS = {
    "mlflow": ("mlflow", "start_run log_params log_metrics log_artifact log_artifacts set_tag end_run"),
    "mlflow MlflowClient": ("mlflow", "__init__ get_metric_history"),
    "wandb": ("wandb", "init"),
    "wandb Run": ("wandb.sdk.wandb_run", "define_metric log log_artifact mark_preempting finish"),
    "wandb Config": ("wandb.sdk.wandb_config", "update"),
    "tensorboard SummaryWriter": ("torch.utils.tensorboard", "__init__ add_scalar add_text add_image close"),
}


def compare_with_the_libraries() -> None:
    """Prints which parameters of the fakes the libraries do not have."""
    real = {part: importlib.import_module(module) for part, (module, _) in PARTS.items()}
    for name in ("mlflow", "wandb", "tensorboard"):
        del sys.modules[name]
    sys.path.insert(0, str(FAKES))
    for part, (_, names) in PARTS.items():
        module, *inner = part.split()
        fake, library = importlib.import_module(module), real[part]
        for each in inner:
            fake, library = getattr(fake, each), getattr(library, each)
        for name in names.split():
            mine, its = (inspect.signature(getattr(owner, name)).parameters for owner in (fake, library))
            print(f"{part}.{name}: {sorted({*mine} - {*its}) or 'equal'}")


if __name__ == "__main__":
    compare_with_the_libraries()
