"""Tests the benchmark of strategies: its figures, what it holds against formulas, and its shortest run."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

from ddp.__main__ import main
from ddp.lab.bench.report import from_json, to_json
from ddp.lab.bench.step import Training
from ddp.lab.bench.strategies import MIB, STRATEGIES, MeasureStrategy, StrategyCell, TimeStrategies, merged
from ddp.lab.bench.workloads import WORKLOADS
from ddp.optim.norms import BLOCK_NUMEL


def test_figures_of_a_job_are_put_together_and_compared() -> None:
    """`sharded` takes 1.5 × alone in the median of three turns, and torch's class twice as long as that."""
    turns_s = {"sharded": [0.15, 0.3, 0.12], "torch": [0.3, 0.3, 0.36], "alone": [0.1, 0.2, 0.1]}
    timed = StrategyCell(place="here", name="job", turns_s=turns_s, held={"sharded": 3 * MIB}, sent={"torch": 1234.5})
    peaks = [
        StrategyCell(place="here", name="job", turns_s={}, peak={name: n * MIB})
        for name, n in (("sharded", 6), ("mirrored", 8))
    ]
    other = StrategyCell(place="there", name="job", turns_s={}, peak={"alone": MIB})
    cell, apart = merged([timed, *peaks, other])
    assert apart == other
    assert (cell.turns_s, cell.peak) == (turns_s, {"sharded": 6 * MIB, "mirrored": 8 * MIB})
    assert from_json(to_json([cell]), StrategyCell) == [cell]
    sharded, torch, alone, mirrored = cell.rows()
    assert all(row.keys() == cell.legend.keys() for row in cell.rows())
    assert sharded["step"] == "150" and sharded["÷ sharded"] == "1.000" and sharded["over alone"] == "+50.0%"
    assert (sharded["torch ÷"], sharded["over turns"]) == ("2.00", "1.00 – 3.00")
    assert (sharded["peak"], sharded["÷ mirrored"], sharded["held"], sharded["sent"]) == ("6.0", "0.75", "3.0", "")
    assert (torch["÷ sharded"], torch["sent"]) == ("2.000", "1,234") and alone["over alone"] == "+0.0%"
    assert (mirrored["strategy"], mirrored["step"], mirrored["÷ mirrored"]) == ("mirrored", "", "1.00")


def test_a_round_is_its_steps_and_the_one_that_ends_it() -> None:
    """Also where one step in six has been delayed by something else."""
    training = Training.__new__(Training)
    assert training.of_turn([3.0, 1.0, 2.0]) == 2.0
    training.every = 3
    assert training.of_turn([1.0, 1.0, 4.0, 1.0, 9.0, 4.0]) == 2.0


def everything() -> tuple[StrategyCell, StrategyCell]:
    return TimeStrategies("digits-cnn", num_turns=1)()[0], MeasureStrategy("digits-cnn", "lamb", "sharded")()[0]


def test_every_strategy_is_timed_and_counted() -> None:
    (timed, measured), same = run_ranks(everything, 2)
    assert (timed, measured) == same
    assert timed.turns_s.keys() == timed.held.keys() == set(STRATEGIES)
    assert all(len(turns) == 1 and turns[0] > 0 for turns in timed.turns_s.values())
    num_bytes = 4 * sum(p.numel() for p in WORKLOADS["digits-cnn"].make().parameters())
    whole, steps = 2 * 3 * num_bytes, 2 * 4 * 8  # AdamW's state, with a number of steps for each of eight tensors
    assert {name: held - whole - steps for name, held in timed.held.items() if name not in ONCE} == dict.fromkeys(
        set(STRATEGIES) - ONCE, 0
    )
    assert abs(timed.held["sharded"] - 4 * num_bytes) <= 2 * 4 * BLOCK_NUMEL + 2 * steps
    assert 0 <= timed.held["central_storage"] - 3 * num_bytes <= 2 * steps, "all parameters and all state, once"
    assert timed.held["torch_zero"] == 4 * num_bytes + steps // 2
    assert measured.peak["sharded"] > 4 * num_bytes and measured.name == "digits-cnn, lamb"


ONCE = {"sharded", "torch_zero", "central_storage"}
"""Strategies that hold the optimizer's state once; the last one parameters, too."""


def test_the_shortest_run_reports_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, picture = tmp_path / "cells.json", tmp_path / "steps.png"
    words = ["--models", "digits-cnn", "--turns", "1", "--json", str(kept), "--plot", str(picture)]
    assert main(["bench", "strategies", *words, "--strategies", "alone"]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks on one host" in printed and "digits-cnn, adamw" in printed
    (cell,) = from_json(kept.read_text(), StrategyCell)
    assert list(cell.turns_s) == list(cell.peak) == list(cell.held) == ["alone"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_job_that_cannot_be_measured_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        "--strategies sharded,shard": f"strategy 'shard' is unknown; choose among {', '.join(STRATEGIES)}",
        "--optimizers sgd": "optimizer 'sgd' is unknown; choose among adamw, lamb",
        "--strategies sharded --plot a.png": 'relative to the strategy "alone"',
    }.items():
        with pytest.raises(SystemExit):
            main(["bench", "strategies", *words.split()])
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
