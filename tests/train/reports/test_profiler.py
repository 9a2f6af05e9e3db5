"""`ddp.Profiler` in fits of two ranks: what it finds out, what it adds, and one clock for all traces.

Tests: ddp/process/clock.py, ddp/train/reports/traces.py.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ddp
from ddp.errors import ConfigError
from ddp.process import clock as process_clock
from ddp.train.checkpoints.checkpoint_store import steps
from ddp.train.reports import traces
from ddp.train.reports.profile import Profile, read_profile
from ddp.train.reports.traces import Trace, merged

SKEW_S = 0.05
SLOW_S, READING_S = 0.15, 0.004
TIMED_S = 0.3
KINDS = ["foreground", "background", "sharded", "central_storage", "naive"]


def busy(seconds: float) -> None:
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


class Net(nn.Module):
    """Takes longer on rank 1 in its sixth forward, the first that is measured: longer than a core keeps one waiting."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.num_forwards = rank, 0
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        if self.num_forwards == 6 and self.rank == 1:
            busy(SLOW_S)
        return self.layers(inputs)


class Slowly(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        busy(READING_S / 4)
        return torch.full((4,), float(index)), index % 2


class Counts(TorchDispatchMode):
    """Counts the operations and calls of each step; its step begins last of all callbacks', and ends first."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.comm, self.found, self.num_ops, self.num_calls = comm, [], 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += func.namespace != "profiler"  # the ranges of a trace
        return func(*args, **(kwargs or {}))

    def around(self, callbacks: list[ddp.Callback]) -> list[ddp.Callback]:
        first, last = ddp.Callback(), ddp.Callback()
        first.step_end, last.step_start = self.ended, self.began  # type: ignore[method-assign]
        return [first, *callbacks, last]

    def began(self, state: ddp.TrainState) -> None:
        self.num_ops, self.num_calls = 0, self.comm.num_calls
        self.__enter__()

    def ended(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.__exit__(None, None, None)
        self.found.append((self.num_ops, self.comm.num_calls - self.num_calls))


class Lengths(ddp.Callback):
    """Notes the length of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step_end(self, state: ddp.TrainState, report: ddp.StepReport) -> None:
        self.seconds.append(report.step_s)


def fitted(comm: Any, run_dir: Path | None, kind: str, callbacks: list[ddp.Callback], *, steps: int = 7) -> None:
    torch.manual_seed(0)
    model: nn.Module = Net(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy: Any = kind if kind in ("sharded", "central_storage") else "auto"
    if kind == "naive":
        model = ddp.NaiveDataParallel(model)
    elif strategy == "auto":
        model = ddp.BucketedDataParallel(model, overlap=kind == "background", first_bucket_mb=1e-4)
    how: dict[str, Any] = {"loss": nn.functional.cross_entropy, "global_batch": 8, "max_steps": steps}
    folder = ddp.Folder(run_dir, progress=False, curves=False)
    ddp.fit(model, Slowly(), optimizer, strategy=strategy, folder=folder, callbacks=callbacks, **how)


def profiled(folder: Path) -> dict[str, Any]:
    comm = ddp.init(device="cpu")
    found: dict[str, Any] = {}
    for kind in KINDS:
        lengths = Lengths()
        fitted(comm, folder / kind, kind, [ddp.Profiler(steps=9), lengths])  # as many as there are after the warm-up
        found[kind] = lengths.seconds
    plain, beside = Counts(comm), Counts(comm)
    fitted(comm, None, "foreground", plain.around([]))
    fitted(comm, folder / "counted", "foreground", beside.around([ddp.Profiler(steps=1)]))
    fitted(comm, folder / "timed", "foreground", [ddp.Profiler(steps=4, seconds=TIMED_S)], steps=10**6)
    found["counts"] = plain.found, beside.found
    with pytest.raises(ConfigError, match="folder=None has none: name one"):
        fitted(comm, None, "foreground", [ddp.Profiler()])
    found["skewed"] = skewed(comm, folder / "skewed")
    ddp.shutdown()
    return found


class Talks(ddp.Callback):
    """Sends a message from rank 1 to rank 0 in each step, and notes by the true clock when it was sent and received."""

    def step_start(self, state: ddp.TrainState) -> None:
        comm, word = state.comm, torch.ones(1)
        with torch.profiler.record_function(f"test: {('recv', 'send')[comm.rank]} {state.step}"):
            comm.send(word, 0) if comm.rank == 1 else comm.recv(word, 1)


def skewed(comm: Any, run_dir: Path) -> None:
    """Trains while the clock of rank 1 is 50 ms ahead, and the ranks seem to be on two hosts."""
    true = time.perf_counter

    def now_s() -> float:
        return true() + SKEW_S * comm.rank

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("ddp.") and getattr(module, "now_s", None) is true:
            module.now_s = now_s  # type: ignore[attr-defined]
    assert process_clock.now_s is now_s
    traces.clock_name = lambda: f"of rank {comm.rank}"
    fitted(comm, run_dir, "background", [ddp.Profiler(steps=2), Talks()], steps=9)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("profiles")
    return folder, run_ranks(profiled, 2, folder)


def longest(profile: Profile, rank: int) -> dict[str, float]:
    parts = [step[rank].parts for step in profile.steps]
    return {part: max(each[part] for each in parts) for part in parts[0]}


@pytest.mark.slow
def test_a_run_that_is_there_to_be_measured_ends_by_itself(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    run = runs[0] / "timed"
    summary, profile = json.loads((run / "summary.json").read_text()), read_profile(run)
    numbers = [step[0].step for step in profile.steps]
    every = numbers[1] - numbers[0]
    assert numbers == [*range(6, numbers[-1] + 1, every)] and 3 <= len(numbers) < 8, "spread over the time"
    assert every in (2**power for power in range(16)) and summary["steps"] - numbers[-1] <= every
    assert summary["stopped_by"] == "measured" and not (run / "traces").exists()
    assert summary["steps"] not in steps(run / "checkpoints")  # those of earlier epochs are there
    assert profile.steps[-1][0].began_s - profile.steps[0][0].began_s > TIMED_S * (1 - 2 / len(numbers))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_taken_apart(kind: str, runs: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, found = runs
    profile = read_profile(folder / kind)
    assert [step[0].step for step in profile.steps] == [6, 7]
    assert (profile.batch, profile.world_size, profile.hosts) == (8, 2, [[0, 1]])
    assert profile.runs == f"in the {'background' if kind == 'background' else 'foreground'}"
    first, second = longest(profile, 0), longest(profile, 1)
    assert min(first["data"], second["data"]) >= READING_S
    assert second["forward"] >= SLOW_S and first["wait"] > second["wait"]
    for step in profile.steps:
        for rank, mine in enumerate(step):
            assert mine.num_samples == 4
            assert mine.step_s == pytest.approx(sum(span.ended_s - span.began_s for span in mine.spans))
            length_s = found[rank][kind][mine.step - 1]
            assert length_s <= mine.step_s < length_s + SLOW_S  # a core may have been taken away in between
            for bucket in mine.buckets:
                assert 0 <= bucket.ready_s <= bucket.launched_s <= bucket.done_s <= mine.step_s - mine.backward_began_s
            assert (mine.buckets == []) is (kind == "naive")
            if mine.buckets:
                assert mine.backward_began_s > mine.parts["data"] + mine.parts["forward"] / 2
                named = [pair for each in mine.buckets for pair in zip(each.parameters, each.shapes, strict=True)]
                assert dict(named) == {name: list(p.shape) for name, p in Net(0).named_parameters()}
        launched = [mine.began_s + mine.backward_began_s + b.launched_s for mine in step for b in mine.buckets[-1:]]
        waits = [
            (mine.began_s + span.began_s, mine.began_s + span.ended_s)
            for mine in step
            for span in mine.spans
            if span.part == "wait"
        ]
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(waits)))  # one of two ranks is waited for
        for mine in step:  # nobody has a bucket before all have launched it
            assert not launched or mine.began_s + mine.backward_began_s + mine.buckets[-1].done_s >= max(launched)


def test_a_run_that_is_not_profiled_has_no_operation_more(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    for each in runs[1]:
        plain, beside = each["counts"]
        assert len(plain) == 7 and plain == beside  # nor have the steps that are profiled


# --- one clock -------------------------------------------------------------------------------------------------------


def test_the_skew_of_a_clock_is_found_within_what_is_said(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    profile = read_profile(runs[0] / "skewed")
    mine, skewed = profile.clock
    assert (mine.offset_s, mine.error_s) == (0, 0)
    assert abs(skewed.offset_s + SKEW_S) <= skewed.error_s < SKEW_S / 2
    assert longest(profile, 0)["wait"] > longest(profile, 1)["wait"]


def test_in_the_merged_trace_nothing_is_received_before_it_is_sent(
    runs: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    there = runs[0] / "skewed" / "traces"
    for rank in range(2):
        plain = json.loads((there / f"rank-{rank}.json").read_text())
        assert (plain["distributedInfo"]["rank"], plain["distributedInfo"]["world_size"]) == (rank, 2)
        for event in plain["traceEvents"]:  # as if the hosts had been started at other times
            if rank and "ts" in event:
                event["ts"] += 123_456
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(plain))
    trace = merged(tmp_path)
    found: dict[str, tuple[float, float]] = {}
    for event in trace["traceEvents"]:
        if "dur" in event and event["name"].startswith("test: "):
            found[event["name"]] = event["ts"], event["ts"] + event["dur"]
    assert sorted(found) == [f"test: {verb} {step}" for verb in ("recv", "send") for step in (7, 8)]
    for step in (7, 8):
        sent, received = found[f"test: send {step}"], found[f"test: recv {step}"]
        assert sent[0] <= received[1] and abs(sent[1] - received[1]) < SKEW_S * 1e6 / 2
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert any(name.startswith("rank 0: ") for name in names) and any(name.startswith("rank 1: ") for name in names)
    assert len({event["pid"] for event in trace["traceEvents"] if event["name"] == "ProfilerStep#8"}) == 2


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda plain: plain.pop("ddpClock"), "rank-1.json has no offset to the clock of rank 0, because another"),
        (lambda plain: plain.pop("traceEvents"), "rank-1.json is damaged (it has no traceEvents): profile the run"),
        (lambda plain: plain["ddpClock"].update(mark="x"), "rank-1.json is damaged (IndexError"),
        (lambda plain: plain["distributedInfo"].update(rank=0), "lacks the traces of ranks 1: copy them"),
        (lambda plain: plain["ddpClock"].update(error_s=5.0), "the clock of rank 1 is known to 5.00 s, and a step"),
        (None, "holds no trace: run it with profile.steps=5"),
    ],
)
def test_traces_that_cannot_be_merged_are_refused(
    damage: Any, expected: str, runs: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    for rank in range(2) if damage else ():
        plain = json.loads((runs[0] / "skewed" / "traces" / f"rank-{rank}.json").read_text())
        if rank:
            damage(plain)
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(plain))
    with pytest.raises(ConfigError) as error:
        merged(tmp_path)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_a_trace_that_cannot_be_written_whole_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And an earlier run's traces, on more workers, do not stay beside those of this one."""
    (tmp_path / "rank-2.json").write_text("{}")
    trace = Trace()
    trace.stop()
    path = tmp_path / "rank-0.json"
    monkeypatch.setattr(trace._profile, "export_chrome_trace", lambda name: Path(name).write_text('{"traceEvents": ['))
    trace.write(path, traces.SAME, world_size=2)
    assert f"{path} could not be written: No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    trace.write(path, traces.SAME, world_size=2)
    assert "ddpClock" in json.loads(path.read_text()) and list(tmp_path.iterdir()) == [path]
