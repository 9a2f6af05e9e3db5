"""The last calls of a rank: how many are remembered, and what a run that fails leaves of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import ddp
from ddp.comm.watch.call import Call, Envelope, History, plain_calls
from ddp.errors import ConfigError
from ddp.train.reports.history import calls_left


def test_the_last_thousand_calls_are_remembered() -> None:
    history = History()
    for number in range(1, 1502):
        noted = history.note(Call(number, "barrier"))
        if number < 1501:
            history_s = noted.done_s = noted.began_s + 0.5
    calls = plain_calls(history.since())
    assert [call["number"] for call in calls] == list(range(502, 1502))
    assert calls[0]["done_s"] - calls[0]["began_s"] == pytest.approx(0.5, abs=1e-6) and calls[-1]["done_s"] is None
    assert [noted.call.sequence for noted in history.since(history_s)] == [] and len(history.since()) == 1000


def test_a_call_is_told_in_plain_values() -> None:
    history = History()
    history.note(Call(7, "all_reduce", "sum", (2, 3), torch.float32, "step 1, totals"))
    history.note(Call(7, "send", shape=(4,), message=Envelope("to", 3, 2, (4,), "float32")))
    collective, message = plain_calls(history.since(), ranks=[4, 5])
    collective.pop("began_s")
    assert json.loads(json.dumps(collective)) == {
        "number": 7,
        "operation": "all_reduce",
        "op": "sum",
        "shape": [2, 3],
        "dtype": "float32",
        "label": "step 1, totals",
        "ranks": [4, 5],
        "done_s": None,
    }
    assert (message["number"], message["to"], message["operation"]) == (2, 3, "send")


class Fails(ddp.Callback):
    """Fails on rank 1 before step 3."""

    def step_start(self, state: ddp.TrainState) -> None:
        if state.step == 2 and state.comm.rank == 1:
            raise RuntimeError("this is the test's")


def failing_run(run_dir: Path) -> list[dict[str, Any]]:
    comm = ddp.init(device="cpu")
    group = comm.subgroup([1, 0])
    assert group is not None
    group.barrier()
    model = nn.Linear(4, 2)
    data = torch.randn(12, 4), torch.randint(0, 2, (12,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"loss": nn.functional.cross_entropy, "global_batch": 4, "epochs": 1, "callbacks": [Fails()]}
    with pytest.raises((RuntimeError, ddp.PeerLost)) as raised:
        ddp.fit(model, data, optimizer, folder=ddp.Folder(run_dir, progress=False, curves=False), **how)
    ddp.shutdown(failed=str(raised.value))
    lines = (run_dir / "logs" / f"calls-rank-{comm.rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_that_fails_leaves_the_last_calls_of_each_rank(tmp_path: Path) -> None:
    waiting, failed = run_ranks(failing_run, 2, tmp_path / "run")
    assert [call["ranks"] for call in failed if call["operation"] == "barrier"] == [[1, 0]]
    assert waiting[-1]["done_s"] is None and waiting[-1]["label"].startswith("step 3, ")
    assert all(call["done_s"] >= call["began_s"] for call in waiting[:-1])
    told = [[(call["number"], call["operation"], call.get("label")) for call in calls] for calls in (waiting, failed)]
    assert told[0][: len(told[1])] == told[1]  # both have called the same, until one of them has failed
    by_number = {call["number"]: call for call in failed if call["operation"] == "all_reduce"}
    for call in waiting:
        if call["operation"] == "all_reduce" and call["done_s"]:
            assert call["done_s"] >= by_number[call["number"]]["began_s"]  # nobody is done before all have come


def test_an_error_that_says_it_all_leaves_none(tmp_path: Path) -> None:
    comm: Any = SimpleNamespace(rank=2, recent_calls=lambda: [{"number": 1}])
    for error, run_dir in ((ConfigError("x"), tmp_path), (KeyboardInterrupt(), tmp_path), (RuntimeError("x"), None)):
        with pytest.raises(type(error)), calls_left(run_dir, comm):
            raise error
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError), calls_left(tmp_path, comm):
        raise RuntimeError("x")
    assert (tmp_path / "logs" / "calls-rank-2.jsonl").read_text() == '{"number": 1}\n'
