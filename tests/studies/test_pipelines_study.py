"""The study of pipelines: each row has its figure and its goal, and a bubble is the time in which stages idle."""

from __future__ import annotations

import pipelines
import pytest
import torch
from ranks import run_ranks

from ddp.process.clock import now_s


def test_a_stage_sleeps_twice_as_long_in_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.Sleep, "busy_s", 0.0)
    outputs = pipelines.Sleeping(0.001)(torch.ones(1, 8))
    assert pipelines.Sleep.busy_s >= 0.001
    begin_s = now_s()
    outputs.sum().backward()
    assert pipelines.Sleep.busy_s >= 0.003 and now_s() - begin_s >= 0.002


def bubble_of_one() -> float:
    return pipelines.sleeping(pipelines.Sizes(forward_s=0.01, num_sleeping=1), 2, "gpipe")


def test_one_stage_has_hardly_a_bubble() -> None:
    assert 0 <= run_ranks(bubble_of_one, 1)[0] < 0.5


@pytest.mark.slow
def test_the_study_has_all_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pipelines, "STAGES", (2,))
    monkeypatch.setattr(pipelines, "MICRO_BATCHES", (4,))
    pipelines.show(1, pipelines.Sizes(forward_s=0.01, num_sleeping=1, num_steps=2))
    out = capsys.readouterr().out
    for name in ("gpipe", "one_forward_one_backward"):
        what = f"- {name}, 2 stages, 4 micro-batches: "
        assert f"{what}tensors that differ from those of one rank: 0 (goal 0)" in out
        assert f"{what}activations held, by stage: {[4, 4] if name == 'gpipe' else [2, 1]} (goal" in out
        assert f"{what}bubble: " in out and f"{what}step ÷ torch's: " in out
