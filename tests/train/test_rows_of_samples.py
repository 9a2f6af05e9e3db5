"""Metrics over the rows of all samples, training samples beside the held-out ones, and the history of a run.

Tests: ddp/train/evaluate.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(61, 4, generator=RANDOM, dtype=torch.float64)
CLASSES = (X.sum(1) + torch.randn(61, generator=RANDOM) > 0).long()
HELD_OUT = X[:23], CLASSES[:23]
DATA = X[23:], CLASSES[23:]


class Detection(ddp.Task):
    main_metric, higher_is_better = "auc", True

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, classes = batch
        losses = F.binary_cross_entropy_with_logits(model(inputs)[:, 0], classes.double(), reduction="none")
        return losses.sum(), len(classes)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.loss(model, batch), "scores": ddp.Rows(model(batch[0])), "classes": ddp.Rows(batch[1])}

    def finish(self, means: Mapping[str, Any]) -> dict[str, float]:
        scores, classes = means["scores"][:, 0], means["classes"]
        return {"loss": means["loss"], **figures(scores, classes)}


class LeavesRows(Detection):
    def finish(self, means: Mapping[str, Any]) -> dict[str, float]:
        return {**super().finish(means), "scores": means["scores"]}


def figures(scores: Tensor, classes: Tensor) -> dict[str, Any]:
    return {"auc": roc_auc_score(classes, scores), "f1": torch.tensor(f1_score(classes, scores > 0))}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()


def trained(folder: Any = None, *, task: Any = None, epochs: int = 2, **how: Any) -> Any:
    module = net()
    how = {"test_data": HELD_OUT, "evaluation": ddp.Evaluation(training=10, batch=4), **how}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    kept = folder and ddp.Folder(folder, resume="auto", progress=False, curves=False)
    how = {"global_batch": 8, "epochs": epochs, "folder": kept, **how}
    return ddp.fit(module, DATA, optimizer, loss=task or Detection(), **how)


def on_ranks(folder: str) -> tuple[Any, ...]:
    ddp.init(abort_s=20)
    alone = [ddp.evaluate(net(), HELD_OUT, loss=Detection(), batch_size=2, num_shards=each) for each in (None, 5)]
    few = ddp.evaluate(net(), (X[:2], torch.tensor([0, 1])), loss=Detection())  # some rank has no row
    first = trained(folder, epochs=1).history
    state = trained(folder, epochs=2)
    model = state.model.module
    expected = {side: ddp.evaluate(model, data, loss=Detection()) for side, data in SIDES.items()}
    rounds = trained(evaluation=ddp.Evaluation(), strategy="local_sgd").history
    with pytest.raises(ConfigError, match=r"LeavesRows.finish returned tensor.* for 'scores': return a number for"):
        trained(task=LeavesRows())
    ddp.shutdown()
    return alone, few, first, state.history, state.evaluation, expected, state.reported, rounds


SPREAD = torch.arange(10) * len(DATA[0]) // 10
SIDES = {"test": HELD_OUT, "training": (DATA[0][SPREAD], DATA[1][SPREAD])}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.quick(1)
def test_rows_of_all_samples_and_the_history_of_a_run(world_size: int, tmp_path: Path) -> None:
    scores = net().eval()(HELD_OUT[0]).detach()
    for alone, few, first, history, evaluation, expected, reported, rounds in run_ranks(
        on_ranks, world_size, str(tmp_path)
    ):
        for found in alone:
            assert found["auc"] == pytest.approx(roc_auc_score(HELD_OUT[1], scores))
            assert found["f1"] == pytest.approx(f1_score(HELD_OUT[1], scores > 0)) and type(found["f1"]) is float
        assert few["auc"] in (0, 1)
        assert history[:1] == first and [(each["step"], each["epochs"]) for each in history] == [(5, 1), (10, 2)]
        assert evaluation.items() <= history[1].items() and history[1]["train_loss"] > 0 and reported == {}
        for side, metrics in expected.items():
            for name, value in metrics.items():
                assert evaluation[f"{side}_{name}"] == pytest.approx(value, rel=1e-12)
        assert not any(name.startswith("training_") for each in rounds for name in each) and rounds
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert '"training_auc"' in lines and '"training_auc"' in (tmp_path / "summary.json").read_text()


def test_what_cannot_be_evaluated_beside_held_out_samples() -> None:
    for how, told in (
        ({"test_data": None}, "evaluation.training=10: goes with held-out samples, by their numbers; give validation"),
        ({"evaluation": ddp.Evaluation(training=10), "test_data": [], "task": Detection()}, "test_data has 0 samples"),
    ):
        with pytest.raises(ConfigError, match=told):
            trained(**how)
    with pytest.raises(ConfigError, match=r"training=-1"):
        ddp.Evaluation(training=-1)
    for wrong in (torch.tensor(1.0), 3.0):
        with pytest.raises(ConfigError, match=r"Rows: was given a .*, not a tensor with a row for each sample"):
            ddp.Rows(wrong)  # type: ignore[arg-type]
