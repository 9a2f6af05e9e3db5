"""What a worker loads before it joins the others, and who is told if it cannot.

Tests: ddp/comm/meeting/place.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankFailed, collect, run_ranks, start_ranks

import ddp
from ddp.comm.communicator import Communicator
from ddp.comm.meeting.place import all_have_one_launcher
from ddp.comm.meeting.secret import FOLDER
from ddp.run.assembly import components, stages
from ddp.run.settings.reader import from_plain

SETTINGS: dict[str, Any] = {
    "data": {"name": "synthetic", "num_samples": 64},
    "model": {"name": "mlp"},
    "max_steps": 2,
    "device": "cpu",
    "report": {"curves": False},
}
WITH_OTHERS: dict[str, Any] = {"cluster": {"workers": 2}}


def fails_to_load(folder: str) -> None:
    usual = components.load_data

    def load_data(*given: Any, **how: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise ArithmeticError("scripted")
        return usual(*given, **how)

    components.load_data = load_data
    stages.run(from_plain({**SETTINGS, **WITH_OTHERS}), Path(folder))


def test_without_a_launcher_of_ours_the_others_are_told(tmp_path: Path) -> None:
    began_s = time.monotonic()
    other, failed = collect(start_ranks(fails_to_load, 2, str(tmp_path)))
    assert time.monotonic() - began_s < 20
    assert isinstance(failed, RankFailed) and "ArithmeticError: scripted" in str(failed)
    assert isinstance(other, RankFailed) and "PeerLost" in str(other)
    assert "rank 1" in str(other) and "it failed: ArithmeticError: scripted" in str(other)


def loads_first(folder: str) -> list[str]:
    """Returns what happens in a worker, in order."""
    seen = list[str]()
    for owner, name in ((components, "load_data"), (components, "make_optimizer"), (stages, "init"), (stages, "train")):
        usual = getattr(owner, name)

        def noted(*given: Any, name: str = name, usual: Any = usual, **how: Any) -> Any:
            seen.append(name)
            return usual(*given, **how)

        setattr(owner, name, noted)
    stages.run(from_plain({**SETTINGS, **WITH_OTHERS}), Path(folder))
    return seen


def test_data_model_and_optimizer_are_there_before_a_worker_joins(tmp_path: Path) -> None:
    expected = ["load_data", "make_optimizer", "init", "train"]
    assert run_ranks(loads_first, 2, str(tmp_path)) == [expected, expected]


def test_one_launcher_has_started_all_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all_have_one_launcher()
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert not all_have_one_launcher()  # torchrun may have
    monkeypatch.setenv(FOLDER, "somewhere")
    assert all_have_one_launcher()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not all_have_one_launcher()


def moved() -> None:
    config = from_plain({**SETTINGS, "cluster": {"workers": 1}})
    parts = stages.loaded(config)
    optimizer = torch.optim.Adagrad(parts.module.parameters(), lr=0.1)  # has a state at once
    assert all(state["sum"].dtype == torch.float32 for state in optimizer.state.values())
    comm: Communicator = ddp.init()
    parts.module.double()  # as a move to a device, it gives parameters other memory
    stages.replica_of(config, Path("nowhere"), parts._replace(optimizer=optimizer), comm)
    assert all(state["sum"].dtype == torch.float64 for state in optimizer.state.values())


def test_an_optimizer_s_first_state_follows_the_parameters() -> None:
    run_ranks(moved, 1)
