"""What chooses goes by the validation set, and the test set is read for the report alone."""

from __future__ import annotations

import io
import json
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, WeightedRandomSampler

import ddp
from ddp.errors import ConfigError
from ddp.train.checkpoints.checkpoint_store import listed


class Counted(torch.utils.data.Dataset[Any]):
    """Pairs of which each notes that it was read."""

    may_read_ahead = False

    def __init__(self, sign: float = 1.0) -> None:
        self.sign, self.read = sign, Counter[int]()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        inputs = torch.tensor([1.0, index / 40])
        return inputs, self.sign * inputs.sum()[None]


class Trained(ddp.Callback):
    """Notes what was read in training alone, without the samples that ranks compare before."""

    def __init__(self, data: Counted) -> None:
        self.data, self.before, self.seen = data, Counter[int](), set[int]()

    def step_start(self, state: Any) -> None:
        self.before = self.data.read.copy()

    def step_end(self, state: Any, report: Any) -> None:
        self.seen |= (self.data.read - self.before).keys()


def fit(folder: Path | None = None, data: Any = None, **how: Any) -> tuple[Any, str]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.05)
    if "schedule" in how:
        how["schedule"] = how["schedule"](optimizer)
    how = {"epochs": 4, "global_batch": 8, "curves": False, "noise_scale_every": 0, **how}
    with redirect_stdout(io.StringIO()) as printed:
        state = ddp.fit(model, data or Counted(), optimizer, **grouped(loss=mse_loss, folder=folder, **how))
    return state, printed.getvalue()


def runs(folder: str) -> Any:
    """One run with a share and a test set that disagrees, and what it has read."""
    data, test = Counted(), Counted(-1.0)
    watch, stop = Trained(data), ddp.EarlyStopping(100)
    plateau: Any = lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)  # noqa: E731
    how: dict[str, Any] = {"validation_data": 0.25, "test_data": test, "callbacks": [watch, stop]}
    state, printed = fit(Path(folder, "whole"), data, schedule=plateau, **how)
    lr = state.optimizer.param_groups[0]["lr"]
    first, _ = fit(Path(folder, "parts"), validation_data=0.25, test_data=Counted(-1.0), epochs=2)
    with pytest.raises(ConfigError, match="the run has set apart 10 of 40 samples by seed 0"):
        fit(Path(folder, "parts"), validation_data=0.25, resume="auto", seed=1)
    for _ in range(2):  # the second one has no step left
        resumed, _ = fit(Path(folder, "parts"), validation_data=0.25, test_data=Counted(-1.0), resume="auto")
    unscheduled, _ = fit(validation_data=0.25, test_data=Counted(-1.0))
    assert resumed.evaluation == unscheduled.evaluation and first.evaluation != resumed.evaluation
    own, _ = fit(validation_data=Counted(), test_data=test)
    return (
        watch.seen,
        dict(test.read),
        state.evaluation,
        printed,
        lr,
        stop.num_without,
        own.evaluation,
        state.epochs_done,
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.quick(1)
def test_the_validation_set_chooses_and_the_test_set_is_for_the_report(world_size: int, tmp_path: Path) -> None:
    results = run_ranks(runs, world_size, str(tmp_path))
    seen = set[int]().union(*(result[0] for result in results))
    assert len(seen) == 30 and results[0][2] == pytest.approx(
        EXPECTED.setdefault("evaluation", results[0][2]), rel=1e-5
    )
    assert seen == EXPECTED.setdefault("seen", seen)  # the same at any number of workers
    _, read, evaluation, printed, lr, num_without, own, epochs = results[0]
    assert set(read.values()) <= {2, 4, 6}  # once in each of two runs; more often where ranks compare theirs
    assert list(evaluation) == ["validation_loss", "test_loss"] and evaluation["test_loss"] > 1
    assert list(own) == ["validation_loss", "test_loss"] and epochs == 4
    assert (lr, num_without) == (0.05, 0)  # the validation loss fell, while the test loss rose
    assert "with the last weights  test_loss " in printed and "chosen by" not in printed
    summary = json.loads((tmp_path / "whole/summary.json").read_text())
    assert summary["main_metric"] == "validation_loss" and summary["test_loss"] == evaluation["test_loss"]
    reports = [line for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines() if '"report"' in line]
    assert len(reports) == 2, "one for each end, and no more for a call that has nothing left to train"
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["kind"] != "step"]
    assert [line["kind"] for line in evaluations] == ["evaluation"] * 4 + ["report"]
    assert all(("test_loss" in line) == (line["kind"] == "report") for line in evaluations)
    scores = [saved.manifest.score for saved in listed(tmp_path / "whole/checkpoints").saved]
    assert min(scores) == evaluation["validation_loss"]


EXPECTED: dict[str, Any] = {}


def chosen_by_the_test_set(folder: str) -> list[str]:
    return [
        fit(Path(folder, "a"), test_data=Counted(), epochs=1)[1],
        fit(test_data=Counted(), epochs=1, callbacks=[ddp.EarlyStopping(3)])[1],
        fit(test_data=Counted(), epochs=1)[1],
    ]


def refusals() -> list[str]:
    weighted = DataLoader(Counted(), sampler=WeightedRandomSampler([1.0] * 40, 40))
    found = []
    for how in (
        {"validation_data": 1.5},
        {"validation_data": 3},
        {"validation_data": 0.01},
        {"validation_data": []},
        {"validation_data": 0.2, "order": ddp.data.Fixed(40)},
        {"validation_data": 0.2, "data": weighted},
        {"validation_data": 0.2, "data": iter([]), "max_steps": 3},
        {"schedule": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer)},
        {"val_data": Counted()},
    ):
        with pytest.raises(ConfigError) as refused:
            fit(**how)  # type: ignore[arg-type]
        found.append(str(refused.value))
    return found


def test_a_choice_by_the_test_set_is_told(tmp_path: Path) -> None:
    (first, second, third), found = run_ranks(both, 1, str(tmp_path))[0]
    assert "chosen by test_loss: the best checkpoint; with validation_data (data.validation=0.1) the test set" in first
    assert "chosen by test_loss: the end of the run;" in second and "chosen by" not in third
    for sentence, words in zip(found, SENTENCES, strict=True):
        assert words in sentence


SENTENCES = [
    "validation_data=1.5: give a share between 0 and 1, or a data set",
    "validation_data=3: give a share between 0 and 1, or a data set",
    "validation_data=0.01: of 40 samples that is 0; each side needs some",
    "validation_data has 0 samples",
    "order=fixed: has places for the samples that are set apart for validation, too",
    "the sampler of the DataLoader chooses among all samples",
    "data is a stream, which has no shares",
    "ReduceLROnPlateau reads a metric: give validation_data, or test_data",
    "Did you mean 'validation_data'?",
]


def both(folder: str) -> Any:
    return chosen_by_the_test_set(folder), refusals()
