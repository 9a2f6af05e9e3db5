"""What callbacks hear of checkpoints and of the end, on every rank; and that any rank may end the run.

Tests: ddp/train/steps/callbacks.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import grouped
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ddp
from ddp.comm.objects import all_gather_object
from ddp.errors import ConfigError
from ddp.train.checkpoints.checkpoint_store import identity_of
from ddp.train.evaluate import POLL_EVERY

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
CLASSES = torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1))
NUM_STEPS = 8


class Hears(ddp.Callback):
    """Notes what it is told, and what lies in the folder then."""

    def __init__(self) -> None:
        self.heard = list[str]()
        self.entries = list[Any]()
        self.summary: Mapping[str, Any] = {}

    def logged(self, state: ddp.TrainState, entry: Mapping[str, Any]) -> None:
        self.entries.append(entry)

    def checkpoint_saved(self, state: ddp.TrainState, path: Path) -> None:
        assert path.is_absolute() and (path / "model.pt").exists() and path.parent.parent == state.run_dir
        everyone = all_gather_object(state.comm, (state.step, path))  # a collective, as Ray's report is one
        assert everyone == [(state.step, path)] * state.comm.world_size
        self.heard.append(path.name)

    def exception(self, state: ddp.TrainState, error: BaseException) -> None:
        self.heard.append(f"{type(error).__name__}: {error}")

    def fit_end(self, state: ddp.TrainState) -> None:
        self.heard.append("fit_end")

    def finished(self, state: ddp.TrainState, summary: Mapping[str, Any]) -> None:
        self.heard.append("finished")
        self.summary = summary
        if state.run_dir is not None:
            assert json.loads((state.run_dir / "summary.json").read_text()) == json.loads(json.dumps(summary))
            self.heard += [path.name for path in state.run_dir.glob("*.png")]


class Stops(ddp.Callback):
    """Ends the run at one moment, on one rank or on all."""

    def __init__(self, moment: str, step: int = 3, *, on: int | None = 1, reason: Any = "pruned") -> None:
        def ask(state: ddp.TrainState, *_: Any) -> None:
            if on in (None, state.comm.rank) and state.step == step:
                state.stop(f"{reason} by rank {state.comm.rank}" if on is None else reason)
                state.stop("too late")

        setattr(self, moment, ask)


def fit(*callbacks: ddp.Callback, **how: Any) -> tuple[Tensor, ddp.TrainState]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
    given = {"loss": F.cross_entropy, "global_batch": 10, "epochs": 2, "folder": None, "progress": False, **how}
    state = ddp.fit(
        module, (X, CLASSES), torch.optim.Adam(module.parameters(), lr=0.01), callbacks=callbacks, **grouped(**given)
    )
    return torch.cat([each.detach().flatten() for each in module.parameters()]), state


def moments(folder: Path) -> None:
    comm = ddp.init(abort_s=20)
    whole, _ = fit()
    held_out: dict[str, Any] = {"test_data": (X, CLASSES), "batch": 1}
    assert len(X) / comm.world_size > POLL_EVERY

    hears = Hears()
    bits, state = fit(hears, folder=folder / "whole", checkpoint_every_steps=3, log_every=3)
    names = ["step-00000003", "step-00000006", "step-00000008"]
    assert hears.heard == [*names, "fit_end", "finished", "curves.png"] and torch.equal(bits, whole)
    assert state.run_dir == folder / "whole" and hears.summary["steps"] == NUM_STEPS
    assert json.loads(json.dumps(state.settings)).items() <= identity_of(folder / "whole" / "checkpoints").items()
    assert state.settings["world_size"] == comm.world_size and state.settings["optimizer"][0]["lr"] == "0.01"
    assert all(each == hears.summary for each in all_gather_object(comm, dict(hears.summary)))

    lines = (folder / "whole" / "metrics.jsonl").read_text().splitlines()
    assert lines == list(map(json.dumps, hears.entries)) or comm.rank  # samples per second are a rank's own
    assert [(each["kind"], each["step"]) for each in hears.entries] == [("step", 3), ("step", 6)]
    short, _ = fit(max_steps=4)
    for moment in ("step_start", "step_end", "evaluated", "checkpoint_saved"):
        hears, run = Hears(), folder / moment
        how = {"folder": run, "curves": False, "checkpoint_every_steps": 3, "every_steps": 3, **held_out}
        bits, state = fit(Stops(moment), hears, **how)
        assert (state.step, state.stopped_by, state.evaluated_at) == (4, "pruned", 3), moment
        assert hears.heard == ["step-00000003", "step-00000004", "fit_end", "finished"]
        assert hears.summary["stopped_by"] == "pruned" and torch.equal(bits, short)
    bits, state = fit(folder=run, resume="auto", curves=False)
    assert (state.step, state.stopped_by) == (NUM_STEPS, "") and torch.equal(bits, whole)
    bits, state = fit(Stops("fit_start", 0), sharded=True)
    assert (state.step, state.stopped_by, state.run_dir) == (1, "pruned", None)

    for moment in ("step_end", "evaluated", "fit_end", "finished"):
        hears = Hears()
        bits, state = fit(Stops(moment, NUM_STEPS), hears, validation_data=(X, CLASSES), **held_out)
        assert (state.step, state.stopped_by) == (NUM_STEPS, "") and torch.equal(bits, whole)
        assert state.evaluation["test_loss"] == state.evaluation["validation_loss"], "the report is made, too"
        assert hears.heard == ["fit_end", "finished"] and hears.summary["stopped_by"] is None
        assert [each["kind"] for each in hears.entries] == ["evaluation", "evaluation", "report"], "and nothing written"
    bits, state = fit(Stops("step_start", NUM_STEPS - 1))
    assert (state.step, state.stopped_by) == (NUM_STEPS, "pruned") and torch.equal(bits, whole)
    assert fit(Stops("step_end", on=None))[1].stopped_by == "pruned by rank 0"

    for reason in ("", None, 3):
        hears = Hears()
        with pytest.raises(ConfigError, match=r"^state\.stop\(.*\): say why the run ends, such as state"):
            fit(Stops("finished", NUM_STEPS, on=comm.rank, reason=reason), hears)
        assert [each.partition(":")[0] for each in hears.heard] == ["fit_end", "ConfigError"]

    def signalled(state: ddp.TrainState, report: ddp.StepReport) -> None:
        state.stop_flag.request(("pruned", "SIGTERM")[comm.rank])

    signals = ddp.Callback()
    signals.step_end = signalled  # type: ignore[method-assign]
    assert fit(signals)[1].stopped_by == "SIGTERM"  # which asks the program to stop, too
    with pytest.raises(SystemExit, match="143"):
        fit()
    ddp.shutdown()


@pytest.mark.slow
def test_every_rank_hears_of_checkpoints_and_of_the_end_and_any_rank_may_end_the_run(tmp_path: Path) -> None:
    run_ranks(moments, 2, tmp_path)
