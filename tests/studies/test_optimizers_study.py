"""The benchmark of optimizers: its rival by hand is LAMB, and its table has every figure."""

from __future__ import annotations

import optimizers
import pytest
import torch
from torch import nn

from ddp.optim import LAMB


def test_the_loop_is_lamb() -> None:
    start = [torch.randn(3, 4), torch.zeros(5)]
    ours, loop = ([nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    steps = LAMB(ours, lr=1e-3), optimizers.Loop(loop)
    for _ in range(20):
        for one, other in zip(ours, loop, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in steps:
            optimizer.step()
    for one, other in zip(ours, loop, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_the_table_has_all_rivals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(optimizers, "SHAPES", {"2 × 10": [10, 10]})
    num_threads = torch.get_num_threads()
    optimizers.show(num_turns=2)
    torch.set_num_threads(num_threads)
    lines = capsys.readouterr().out.splitlines()
    head, row = (next(line for line in lines if key in line) for key in ("loop", "2 × 10"))
    assert all(title in head for title in (*optimizers.RIVALS, "LAMB ÷ AdamW", "loop ÷ LAMB", "LARS ÷ SGD"))
    assert all(float(cell) > 0 for cell in row.strip("│ ").split("│")[1:])
