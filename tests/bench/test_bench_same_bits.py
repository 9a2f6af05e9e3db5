"""Tests the benchmark of same bits: what it says of equal and of different runs, its modes, and its shortest run."""

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
from ddp.bench.planted_faults import FaultCell, PlantFaults, named, said_of
from ddp.bench.report import from_json, to_json
from ddp.bench.same_bits import BitsCell, verdict
from ddp.bench.shard_costs import MIB, MODES, MeasureMode, ShardsCell, ShardTraining, TimeModes, merged
from ddp.bench.step import make, session

# -------------------------------------------------------------------------------------------------------------- hashes


def bits(**changes: Any) -> BitsCell:
    """Returns a cell whose runs are equal."""
    ending = {"parameters": "a", "loss": "b"}
    words = {"model": "mlp", "optimizer": "sgd", "strategy": "whole"}
    given = {"endings": {"W=1": ending, "W=3": ending, "resized": ending}, "expected": ending, **words, **changes}
    return BitsCell(place="here", name="mlp, sgd, whole", **given)


def test_the_first_run_that_differs_is_named_and_in_what() -> None:
    equal, ending = bits(), {"parameters": "a", "loss": "b"}
    ranks_differ = bits(endings={"W=1": ending, "W=3": {**ending, "parameters": "a/c"}, "resized": {"loss": "c"}})
    other_strategy = bits(endings={"W=1": {"parameters": "c", "loss": "d"}})
    assert [each.differs for each in (equal, ranks_differ, other_strategy)] == [
        *("", "W=3: parameters", "W=1: parameters, loss"),
    ]
    assert verdict([equal, equal]) == "equal: 6 runs of 2 cases, bit by bit"
    assert verdict([equal, ranks_differ]) == "different, first of each: mlp, sgd, whole at W=3: parameters"
    row, other = equal.columns(), ranks_differ.columns()
    assert row.keys() == equal.legend.keys() and row["bits"] == "equal"
    assert row["W=1"] == row["W=3"] == row["resized"] == other["W=1"] != other["W=3"] and row["W=2"] == ""
    assert from_json(to_json([equal]), BitsCell) == [equal]


def forked(job: Callable[[], Any], *, workers: int, threads_per_worker: int = 1) -> list[Any]:
    """Does what `ddp.launch` does, within a tenth of its time."""
    results: list[Any] = run_ranks(called, workers, job)
    return results


def called(job: Callable[[], Any]) -> Any:
    return job()


WORDS = "--parts hashes --models mlp --optimizers adamw --strategies whole,sharded --workers 1,3 --steps 2"


def test_the_shortest_run_finds_equal_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "cells.json"
    monkeypatch.setattr("ddp.bench.same_bits.launch", forked)
    assert main(["bench_same_bits", *WORDS.split(), "--resizes", "2,1", "--json", str(kept)]) == 0
    printed = capsys.readouterr().out
    assert "8 shards of a batch of 30, 2 steps; resized: 2 → 1 workers" in printed
    assert printed.splitlines()[-1] == "equal: 6 runs of 2 cases, bit by bit"
    cells = from_json(kept.read_text(), BitsCell)
    assert [cell.strategy for cell in cells] == ["whole", "sharded"]
    assert all(list(cell.endings) == ["W=1", "W=3", "resized"] for cell in cells)
    assert list(cells[0].expected) == ["parameters", "buffers", "loss", "metrics"]


def test_bits_that_differ_are_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three workers end with other parameters than one."""

    def launched(job: Any, *, workers: int, threads_per_worker: int) -> list[Any]:
        return [[{"parameters": str(workers), "buffers": "b"} for _ in job.cases]]

    monkeypatch.setattr("ddp.bench.same_bits.launch", launched)
    words = [*WORDS.split(), "--resizes", ""]
    assert main(["bench_same_bits", *words]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("different, first of each: mlp, adamw, whole at W=3: parameters; mlp, adamw, sharded at W=3")


# -------------------------------------------------------------------------------------------------------------- faults


def fault(num_right: int, **changes: Any) -> FaultCell:
    given: dict[str, Any] = {
        "fault": "flipped bit", "workers": 3, "num_trials": 4, "most_steps": 207, "audit_share": None, "said": "rank 1",
    }  # fmt: skip
    return FaultCell(place="here", name="3 workers", num_right=num_right, **{**given, **changes})


def test_trials_that_went_wrong_are_told() -> None:
    right, wrong = fault(4), fault(3, said="rank 2")
    alarm = fault(9, fault="none", num_trials=1000, most_steps=None, said="rank 0")
    silent = fault(1000, fault="none", num_trials=1000, most_steps=None, said="")
    assert named([right, right, silent, silent]) == "named: 8 faults of 8; no alarm in 2,000 audits of healthy runs"
    assert said_of([right, silent]) == ["flipped bit, 3 workers: rank 1"]
    assert named([right, wrong, alarm]) == (
        "not named, or named wrongly: flipped bit on 3 workers, 1 of 4 trials; none on 3 workers, 991 of 1,000 trials"
    )
    assert said_of([wrong, alarm])[1] == "none on 3 workers, 991 of 1,000 trials: rank 0"
    assert right.columns().keys() == right.legend.keys() and silent.columns()["steps"] == ""
    assert from_json(to_json([right]), FaultCell) == [right]


def test_faults_are_named_and_healthy_ranks_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def planted(workers: int, num_trials: int) -> list[FaultCell]:
        cells: list[FaultCell] = forked(PlantFaults(num_trials, num_audits=6, audit_every=2), workers=workers)[0]
        return cells

    monkeypatch.setattr("ddp.commands.bench_same_bits.WORLD_SIZES", (3,))
    monkeypatch.setattr("ddp.commands.bench_same_bits.plant_faults", planted)
    assert main(["bench_same_bits", "--parts", "faults", "--trials", "2"]) == 0
    printed = capsys.readouterr().out
    assert "are not finite, in shard" in printed and "take that machine out" in printed
    assert printed.splitlines()[-1] == "named: 4 faults of 4; no alarm in 6 audits of healthy runs"


def test_faults_that_are_not_named_are_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp.commands.bench_same_bits.plant_faults", lambda workers, trials: [fault(3)])
    assert main(["bench_same_bits", "--parts", "faults"]) == 1


# ---------------------------------------------------------------------------------------------------- steps and memory


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
    monkeypatch.setattr("ddp.bench.command.launch", forked)
    words = ["--parts", "memory", "--timed", "small-mlp", "--timed-workers", "1", "--json", str(kept)]
    assert main(["bench_same_bits", *words]) == 0
    printed = capsys.readouterr().out
    assert "1 rank on one host" in printed and "small-mlp" in printed and "of ordinary" in printed
    (cell,) = json.loads(kept.read_text())
    assert cell["peak"].keys() == {"same_bits", "ordinary"}


def test_what_cannot_be_measured_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        "--parts hash": "part 'hash' is unknown; choose among hashes, faults, steps, memory",
        "--models mlp-25m": "model 'mlp-25m' is unknown; choose among mlp, resnet18, gpt",
        "--optimizers adam": "optimizer 'adam' is unknown; choose among sgd, adamw, lamb",
        "--strategies auto": "strategy 'auto' is unknown; choose among whole, sharded, central_storage",
        "--timed mlp": "model 'mlp' is unknown; choose among small-mlp",
        "--workers 1,9": "--workers 9: a batch has 8 shards, and each worker needs one",
        "--resizes 1,9": "--resizes: 9: give a whole number from 1 to 8: each worker needs a shard",
        "--steps 4": "--steps 4: a run of 5 sizes makes a step of each; make more steps",
    }.items():
        with pytest.raises(SystemExit) as left:
            main(["bench_same_bits", *words.split()])
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
