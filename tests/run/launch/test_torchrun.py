"""Servers and workers as a launcher has started them, which numbers its ranks in its own way."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

import ddp
from ddp.comm.meeting.cluster_spec import ClusterTask
from ddp.comm.meeting.place import RankPlace, number_of
from ddp.comm.meeting.role import current_role
from ddp.errors import ConfigError
from ddp.run.launch import torchrun
from ddp.run.settings.checks import check_servers
from ddp.run.settings.config import Config


def train_in_the_launcher_s_processes(folder: Path) -> Any:
    """What this rank is in the run, as it is when training begins."""
    config, found = Config(trial=True), list[Any]()
    config.cluster.threads_per_worker = 1

    def prepared(**counts: Any) -> dict[str, Any]:
        (folder / "counts").write_text(json.dumps([os.environ["RANK"], counts]))
        return {"config": asdict(config), "run_dir": str(folder)}

    def trained(*_: Any, rank: int, take_role: Any, **__: Any) -> int:
        take_role()
        comm = ddp.init()
        found.append((rank, str(current_role()), comm.rank, comm.all_reduce(torch.ones(1)).item()))
        ddp.shutdown()
        return 0

    sys.argv[1:] = ["cluster.servers=2"]
    torchrun.prepared, torchrun.train_in_this_process = prepared, trained  # type: ignore[assignment]
    with pytest.raises(SystemExit) as ended:
        torchrun.main()
    assert not ended.value.code
    return found[0]


def test_the_last_ranks_are_servers_and_the_first_of_them_prepares_the_run(tmp_path: Path) -> None:
    assert run_ranks(train_in_the_launcher_s_processes, 4, tmp_path) == [
        (2, "worker 0", 0, 1.0),
        (3, "worker 1", 0, 1.0),
        (0, "server 0", 0, 2.0),
        (1, "server 1", 1, 2.0),
    ]
    counts = {"workers": 2, "servers": 2, "local_workers": 2, "earlier": None}
    assert json.loads((tmp_path / "counts").read_text()) == ["2", counts]


def test_a_launcher_s_processes_are_not_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp train", "cluster.servers=2"])
    with pytest.raises(ConfigError, match=r"^cluster\.servers=2: of the 2 started processes, at least one must be"):
        number_of(RankPlace("torchrun", 0, 2), 2, setting="cluster.servers")
    assert torchrun._num_servers(RankPlace("torchrun", 0, 3)) == 2
    tasks = ClusterTask("ps", 0, "h:1"), ClusterTask("worker", 0, "h:2")
    with pytest.raises(ConfigError, match=r"^cluster\.servers=2: TF_CONFIG has 1 task of the job ps; leave it out$"):
        torchrun._num_servers(RankPlace("TF_CONFIG", 0, 2, tasks=tasks))
    monkeypatch.setattr(sys, "argv", ["ddp train", "strategy=parameter_server"])
    assert torchrun._num_servers(RankPlace("torchrun", 0, 3)) == 1


def test_a_server_without_a_tensor_is_refused() -> None:
    config = Config()
    config.cluster.servers = 3
    with pytest.raises(ConfigError, match=r"^cluster\.servers=3: the model has 2 tensors to train, and a server"):
        check_servers(config, torch.nn.Linear(2, 2))
    config.cluster.servers = 2
    check_servers(config, torch.nn.Linear(2, 2))
