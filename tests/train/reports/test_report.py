"""What a run shows: the bar at usual widths, what a long run says (on a clock that the test sets), the last table."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from ddp.train.reports.meters import Throughput
from ddp.train.reports.report import ProgressBar, draw_curves, fitting, print_summary

NUM_STEPS = 12345


class Clock:
    """A clock that stands still unless it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Run:
    """A run of NUM_STEPS steps, which takes no time, before a console of this width."""

    def __init__(self, width: int, *, is_terminal: bool = True, rank: int = 0, num_steps: int = NUM_STEPS) -> None:
        self.out, self.clock = io.StringIO(), Clock()
        console = Console(file=self.out, width=width, force_terminal=is_terminal, color_system=None)
        meter = cast(Throughput, SimpleNamespace(samples_per_s=123_456.0))
        self.bar = ProgressBar(
            meter, num_steps=num_steps, num_epochs=15, if_long="A hint.", console=console, clock=self.clock
        )
        evaluation = {"test_loss": 0.4321, "test_accuracy": 0.9876}
        self.state: Any = SimpleNamespace(
            comm=SimpleNamespace(rank=rank), step=0, evaluation=evaluation, reported={}, train_loss=0.5
        )
        self.bar.fit_start(self.state)

    def step(self, number: int, *, loss: float = 0.1234, num_items: float = 1.0) -> None:
        self.state.step = number
        self.bar.step_end(self.state, cast(Any, SimpleNamespace(step=number, epoch=6, loss=loss, num_items=num_items)))

    def lines(self) -> list[str]:
        """Returns all that was printed, each state of the bar as a line of its own."""
        self.bar.fit_end(self.state)
        return [line for line in re.split(r"[\r\n]|\x1b\[[?0-9]*[A-Za-z]", self.out.getvalue()) if line.strip()]


@pytest.mark.parametrize(
    ("width", "there", "left_out"),
    [
        (60, ["loss 0.1234"], ["samples/s", "epoch", "test_"]),
        (80, ["loss 0.1234", "test_accuracy 0.9876"], ["samples/s", "epoch", "test_loss"]),
        (100, ["loss 0.1234", "test_accuracy 0.9876", "test_loss 0.4321"], ["samples/s", "epoch"]),
        (130, ["loss 0.1234", "test_accuracy 0.9876", "test_loss 0.4321", "123,456 samples/s", "epoch 7/15"], []),
    ],
)
def test_the_bar_keeps_steps_and_time_left_and_wraps_no_word(width: int, there: list[str], left_out: list[str]) -> None:
    run = Run(width)
    for step in (1, 6000):
        run.step(step)
        run.bar.evaluated(run.state)
    last = run.lines()[-1]
    assert re.match(r"━+\S* ", last), "it begins with the bar"
    assert " 6000/12345 steps  " in last and re.search(r" \S+:\S\S:\S\S left", last)
    assert [words for words in there if words not in last] == []
    assert [words for words in left_out if words in last] == []
    assert all(len(line) <= width for line in run.lines())


def test_evaluations_stay_above_the_bar() -> None:
    run = Run(130)
    for step, loss in ((100, 0.5), (200, 0.25)):
        run.step(step, loss=loss)
        run.bar.evaluated(run.state)
    lines = [line for line in run.lines() if line.startswith("step ")]
    metrics = "123,456 samples/s  test_loss 0.4321  test_accuracy 0.9876"
    assert lines == [f"step {at}/12345  loss {loss}00  {metrics}" for at, loss in ((100, "0.50"), (200, "0.25"))]


@pytest.mark.parametrize("losses", [[0.9, 0.31], [0.62, 0.6], [3.0, 0.0002]])
def test_the_axis_of_losses_has_labels(losses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []

    def look(figure: Figure, path: Path, **how: Any) -> None:
        figure.draw_without_rendering()
        axes, (low, high) = figure.axes[0], figure.axes[0].get_ylim()
        labels.extend(t.get_text() for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high)

    monkeypatch.setattr(Figure, "savefig", look)
    entries = [{"kind": "step", "step": step, "train_loss": loss} for step, loss in enumerate(losses)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", summary={"main_metric": "test_loss"})
    assert len([label for label in labels if label]) >= 4


def test_what_does_not_fit_leaves_room_for_what_does() -> None:
    assert fitting(["steps", "loss 1", "a long metric", "", "epoch"], 20) == "steps  loss 1  epoch"
    assert fitting(["steps", "loss 1"], 3) == "steps"


def said(run: Run) -> list[str]:
    return re.findall(r"This run will take about [^.]*\. A hint\.", " ".join(run.lines()))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_run_of_more_than_ten_minutes_says_so_once(is_terminal: bool) -> None:
    run = Run(80, is_terminal=is_terminal)
    run.clock.now_s += 60  # the first step, which is slow, counts for nothing
    run.step(1)
    for step, second in [(2, 5), (3, 9.9), (11, 10), (12, 20), (1000, 3000)]:
        run.clock.now_s = 1060.0 + second
        run.step(step)
    assert said(run) == ["This run will take about 3 h 26 min. A hint."]  # 12,334 seconds


@pytest.mark.parametrize(
    ("num_steps", "last", "seconds", "expected"),
    [
        (101, 6, 9.9, []),  # 5 % of the steps: three minutes are left
        (101, 5, 9.9, []),  # not yet known
        (601, 11, 9.9, []),  # 10 steps of 600, not yet known; 590 would take 584 s
        (401, 21, 40, ["This run will take about 13 minutes. A hint."]),
        (301, 21, 40, []),  # 560 s
    ],
)
def test_a_shorter_run_says_nothing(num_steps: int, last: int, seconds: float, expected: list[str]) -> None:
    run = Run(80, is_terminal=False, num_steps=num_steps)
    run.step(1)
    run.clock.now_s += seconds
    run.step(last)
    assert said(run) == expected


def test_other_ranks_show_nothing() -> None:
    run = Run(80, rank=1)
    run.step(1)
    run.clock.now_s += 20
    run.step(2)
    run.bar.evaluated(run.state)
    assert run.lines() == []


def test_the_table_at_the_end_says_what_was_on_and_breaks_no_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    plain = {"test_accuracy": 0.5, "samples_per_s": 7.0, "world_size": 1, "threads_per_worker": 2, "global_batch": 64}
    plain |= {"compute_fraction": 1.0, "wait_fraction": 0.0, "data_fraction": 0.0, "steps": 5, "epochs": 1.0}
    plain |= {"stopped_by": None}
    folder = tmp_path / "runs" / ("sweep-2026-11-23_00-40-02.961360/" + "optim.lr=0.1,cluster.workers=2," * 3)
    print_summary(plain, folder, next_commands=["one", "two"])
    out = capsys.readouterr().out
    assert "1 worker × 2 threads" in out and "with" not in out
    assert f"\nresults: {folder.relative_to(tmp_path)}/\n" in out
    assert out.endswith("\ntry next: one\n          two\n") and "last weights" not in out
    print_summary(plain | {"main_metric": "validation_accuracy"}, tmp_path / "runs" / "a b", next_commands=[])
    of_best = "test figures are of the last weights; those of the best checkpoint: "
    assert f"{of_best}python -m ddp evaluate 'runs/a b'\n" in capsys.readouterr().out
    on = {"precision": "bf16", "clip_norm": 0.5, "verified": [344, 345], "deterministic": True}
    print_summary(plain | on, folder, next_commands=[])
    row = " ".join(re.sub("│ +│", "", capsys.readouterr().out).split())
    assert "with │ bf16, clip_norm 0.5, deterministic kernels, " in row
    assert "bitwise equal at 344 of 345 checks" in row.replace("│ ", "")
    print_summary(plain | {"precision": "fp32", "clip_norm": None, "verified": None}, folder, next_commands=[])
    assert "with" not in capsys.readouterr().out
