"""The end of a fit: where the run is, which weights the model has, and that it takes the best ones on request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.errors import ConfigError
from ddp.train.checkpoints.checkpoint_store import CheckpointStore, load
from ddp.train.steps.state import TrainState

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Spoils(ddp.Callback):
    """Makes the weights of the last step bad ones."""

    def step_end(self, state: TrainState, report: ddp.StepReport) -> None:
        if report.step == 9:
            with torch.no_grad():
                for parameter in state.model.module.parameters():
                    parameter.mul_(100)


def fit(*callbacks: ddp.Callback, **how: Any) -> TrainState:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    given: dict[str, Any] = {"loss": F.mse_loss, "global_batch": 8, "epochs": 3, "validation_data": (X, Y), **how}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return ddp.fit(module, (X, Y), optimizer, callbacks=[*callbacks, Spoils()], **given)


def restored(folder: str) -> list[Any]:
    """Returns what each strategy has left in the model, which the best checkpoint has, too."""
    found = []
    for strategy in ("auto", "sharded", "central_storage"):
        path = Path(folder, strategy)
        state = fit(strategy=strategy, folder=ddp.Folder(path, restore_best=True, progress=False, curves=False))
        best = ddp.load(path)
        assert (best.step, state.step, state.evaluated_at) == (6, 9, 6)
        assert state.evaluation[state.main_metric] == best.score == state.history[1][state.main_metric]
        weights = state.model.module.state_dict()
        assert [name for name, each in best.weights.items() if not torch.equal(each, weights[name])] == []
        found.append({name: each.tolist() for name, each in weights.items()})
    ddp.shutdown()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.quick(1)
def test_the_model_ends_with_the_best_weights_on_every_rank(world_size: int, tmp_path: Path) -> None:
    by_rank = run_ranks(restored, world_size, str(tmp_path))
    assert all(each == by_rank[0] for each in by_rank)


def test_averages_are_restored_where_they_were_the_best(tmp_path: Path) -> None:
    state = fit(ddp.EMA(0.5), folder=ddp.Folder(tmp_path, restore_best=True, progress=False))
    weights = state.model.module.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in ddp.load(tmp_path).weights.items())
    raw = ddp.load(tmp_path, averaged=False).weights
    assert not torch.equal(raw["0.weight"], weights["0.weight"])


def test_the_best_checkpoint_may_be_of_a_version_that_named_a_compiled_model_otherwise(tmp_path: Path) -> None:
    fit(epochs=2, folder=ddp.Folder(tmp_path / "run", progress=False, curves=False))
    best = load(tmp_path / "run" / "checkpoints")
    named = {f"_orig_mod.{name}": value for name, value in best.parts["model"].items()}
    store = CheckpointStore(tmp_path / "earlier" / "checkpoints", best="min")
    store.save(best.step, {**best.parts, "model": named}, meta=best.meta, score=best.score)
    keeps = ddp.Folder(tmp_path / "earlier", resume="auto", restore_best=True, progress=False, curves=False)
    state = fit(folder=keeps)
    assert (state.step, state.evaluated_at) == (9, 6)
    weights = state.model.module.state_dict()
    assert all(torch.equal(each, weights[name]) for name, each in best.parts["model"].items())


@pytest.mark.slow
def test_a_fit_says_where_the_run_is_and_that_other_weights_are_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fit()
    said = capsys.readouterr().out
    (run,) = Path("runs").iterdir()
    assert f"the run is in {run}\n" in said
    note = "the best checkpoint is that of step 6, and the model has the weights of step 9: "
    assert re.search(f"{note}ddp.load\\('{run}'\\) has the best ones, ddp.Folder\\(restore_best=True\\)", said)
    fit(folder=ddp.Folder("mine", restore_best=True))
    said = capsys.readouterr().out
    assert "the best checkpoint is that of step 6, and the model has its weights\n" in said and "run is in" not in said
    fit(epochs=2, folder="other")
    assert "best checkpoint" not in capsys.readouterr().out


def test_the_best_weights_cannot_be_had_without_a_folder_or_without_held_out_samples(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="restore_best=True with path=None"):
        ddp.Folder(None, restore_best=True)
    with pytest.raises(ConfigError, match=r"restore_best=True: nothing says .* give validation_data"):
        fit(validation_data=None, folder=ddp.Folder(tmp_path, restore_best=True))
