"""`python -m ddp where`, of a run whose guard has left a step out, or has gone back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.__main__ import main


def run(folder: Path) -> str:
    """Makes a run over 24 samples, of which number 9 is not finite, in steps of 8."""
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    inputs[9, 2] = float("nan")
    model = nn.Linear(4, 3)
    ddp.fit(
        model, (inputs, torch.arange(24) % 3), torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy,
        global_batch=8, epochs=2, batches=ddp.Batches(order=ddp.data.Fixed(24)), callbacks=[ddp.Guard("skip")],
        folder=ddp.Folder(folder, progress=False, curves=False),
    )  # fmt: skip
    return str(folder)


def test_a_step_that_the_guard_has_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run")
    for words, expected in {
        ("--step", "2"): "step 2, in epoch 0: 8 samples\nrank 0, shard 0:\n    16 17 18 19 20 21 22 23\n",
        ("--sample", "9", "--epoch", "0"): "sample 9, epoch 0: left out, by the run's guard, before step 2\n",
        ("--sample", "9", "--epoch", "1"): "sample 9, epoch 1: left out, by the run's guard, before step 4\n",
        ("--sample", "16", "--epoch", "0"): "sample 16, epoch 0: step 2, rank 0, shard 0\n",
        ("--sample", "16", "--epoch", "1"): "sample 16, epoch 1: step 4, rank 0, shard 0\n",
    }.items():
        capsys.readouterr()
        assert main(["where", folder, *words]) == 0
        assert capsys.readouterr().out == expected
    with pytest.raises(SystemExit):
        main(["where", folder, "--step", "5"])
    assert "the run has steps 1 to 4" in capsys.readouterr().err


@pytest.mark.parametrize("line", [{"left_out": {"step": 2}}, {"went_back": {"step": 2, "position": 8, "size": 8}}])
def test_a_damaged_line_about_a_bad_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: dict[str, object]
) -> None:
    folder = Path(run(tmp_path / "run"))
    with (folder / "starts.jsonl").open("a") as file:
        file.write(f"{json.dumps(line)}\n")
    with pytest.raises(SystemExit):
        main(["where", str(folder), "--step", "1"])
    assert "starts.jsonl is damaged (it has no " in capsys.readouterr().err


def test_a_bad_step_without_a_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(run(tmp_path / "run"))
    path = folder / "starts.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(SystemExit) as ended:
        main(["where", str(folder), "--step", "1"])
    assert ended.value.code == 2 and "starts.jsonl" in capsys.readouterr().err
