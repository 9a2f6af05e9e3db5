"""Tests the benchmark of same bits: its modes, and how it reports them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from ddp.__main__ import main
from ddp.lab.bench.report import from_json, to_json
from ddp.lab.bench.shard_costs import MIB, MODES, MeasureMode, ShardsCell, ShardTraining, TimeModes, merged
from ddp.lab.bench.step import make, session


def forked(job: Callable[[], Any], *, workers: int, threads_per_worker: int = 1) -> list[Any]:
    """Does what `ddp.launch` does, within a tenth of its time."""
    results: list[Any] = run_ranks(called, workers, job)
    return results


def called(job: Callable[[], Any]) -> Any:
    return job()


def test_figures_of_a_model_are_put_together_and_compared() -> None:
    turns_s = {"same_bits": [0.12, 0.3], "ordinary": [0.1, 0.2], "torch": [0.12, 0.6], "one_forward": [0.05, 0.1]}
    timed = ShardsCell(place="here", name="mlp", turns_s=turns_s, gradient_bytes=2 * MIB)
    peaks = [
        ShardsCell(place="here", name="mlp", turns_s={}, gradient_bytes=2 * MIB, peak={mode: n * MIB})
        for mode, n in (("same_bits", 9), ("ordinary", 6))
    ]
    (cell,) = merged([timed, *peaks])
    row = cell.columns()
    assert row.keys() == cell.legend.keys()
    assert (row["same_bits"], row["÷ ordinary"], row["over turns"]) == ("210", "1.350", "1.20 – 1.50")
    assert (row["÷ torch"], row["over these"]) == ("0.750", "0.50 – 1.00")
    assert (row["÷ one_forward"], row["ordinary ÷"]) == ("2.700", "2.000")
    assert (row["peak"], row["of ordinary"], row["more"]) == ("9.0", "6.0", "+1.50")
    assert timed.more_gradients is None and timed.columns()["more"] == ""
    assert from_json(to_json([cell]), ShardsCell) == [cell]


def trained() -> dict[str, list[Tensor]]:
    """Returns the parameters after three steps in each mode."""
    with session() as comm:
        module, batch = make("small-mlp", rank=comm.rank)
        trainings = {mode: ShardTraining(mode, copy.deepcopy(module), batch) for mode in MODES}
        for training in trainings.values():
            for group in training._optimizer.param_groups:
                group["lr"] = 0.1
            training.steps_s(3)
        return {mode: [p.detach().clone() for p in each.replica.parameters()] for mode, each in trainings.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_modes_train_alike(world_size: int) -> None:
    """On three workers shards have unequal sizes, so that one forward has another mean."""
    found = run_ranks(trained, world_size)
    for mode in MODES if world_size == 2 else ("same_bits", "ordinary", "torch"):
        for of_rank in found:
            torch.testing.assert_close(of_rank[mode], found[0]["same_bits"])


def everything() -> tuple[ShardsCell, ShardsCell]:
    return TimeModes("small-mlp", num_turns=1)()[0], MeasureMode("small-mlp", "same_bits")()[0]


def test_every_mode_is_timed_and_memory_measured() -> None:
    (timed, measured), same = run_ranks(everything, 2)
    assert (timed, measured) == same
    assert timed.turns_s.keys() == MODES.keys()
    assert all(len(turns) == 1 and turns[0] > 0 for turns in timed.turns_s.values())
    assert timed.gradient_bytes == measured.gradient_bytes == 4 * (21 * 32 + 33 * 2)
    assert measured.peak["same_bits"] > 0


def test_costs_are_reported_and_kept_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "cells.json"
    monkeypatch.setattr("ddp.lab.bench.command.launch", forked)
    words = ["--parts", "memory", "--models", "small-mlp", "--workers", "1", "--json", str(kept)]
    assert main(["bench", "same_bits", *words]) == 0
    printed = capsys.readouterr().out
    assert "1 rank on one host" in printed and "small-mlp" in printed and "of ordinary" in printed
    (cell,) = json.loads(kept.read_text())
    assert cell["peak"].keys() == {"same_bits", "ordinary"}


def test_what_cannot_be_measured_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        "--parts hash": "part 'hash' is unknown; choose among steps, memory",
        "--models mlp": "model 'mlp' is unknown; choose among small-mlp",
    }.items():
        with pytest.raises(SystemExit) as left:
            main(["bench", "same_bits", *words.split()])
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
