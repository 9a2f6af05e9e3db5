"""The profile of a run: its file, the parts of its steps, its clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp.collectives.simulate import Link
from ddp.errors import ConfigError
from ddp.train.monitor.profile import (
    BucketTimes,
    ClockOffset,
    NetworkFigures,
    Profile,
    RankStep,
    Span,
    read_profile,
)

BUCKET = BucketTimes(
    index=0,
    bytes=24,
    offset=0,
    numel=6,
    dtype="float32",
    parameters=["0.weight"],
    shapes=[[2, 3]],
    ready_s=0.001,
    launched_s=0.001,
    done_s=0.0015,
)
RANK_STEP = RankStep(
    step=3,
    began_s=10.0,
    num_samples=4,
    data_s=0.001,
    forward_s=0.002,
    backward_s=0.0,
    communication_s=0.0,
    wait_s=0.0,
    update_s=0.0,
    other_s=0.0,
    backward_began_s=0.003,
    buckets=[BUCKET],
    spans=[Span("data", 0.0, 0.001), Span("forward", 0.001, 0.003)],
)
PROFILE = Profile(
    version=1,
    model="Sequential",
    num_parameters=6,
    batch=8,
    world_size=2,
    hosts=[[0], [1]],
    threads=1,
    cores=[2, 2],
    device="cpu",
    strategy="Replicated",
    hook=None,
    wire="bf16",
    algorithm="ring",
    runs="in the background",
    order=["0.weight"],
    network=NetworkFigures(
        inside=Link(1e-5, 1e-9), between=Link(1e-4, 1e-8, 1e-6), gamma_s=1e-10, memory=None, allocated=[(8, 1e-6)]
    ),
    clock=[ClockOffset(offset_s=0.0, error_s=0.0), ClockOffset(offset_s=-0.05, error_s=1e-4)],
    steps=[[RANK_STEP, RANK_STEP]],
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    PROFILE.write(tmp_path)
    assert read_profile(tmp_path) == PROFILE
    assert RANK_STEP.step_s == 0.003


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    plain = json.loads(json.dumps(asdict(PROFILE)))
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "holds no profile.json: run it with profile.steps=5"),
        ("{", "is damaged (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): profile the"),
        ("[]", "is damaged (it holds no JSON object)"),
        (damaged(lambda plain: plain.update(version=2)), "is of version 2, and version 1 is read here"),
        (damaged(lambda plain: plain.pop("version")), "is of version None, and"),
        (damaged(lambda plain: plain.pop("clock")), "is damaged (it has no clock)"),
        (damaged(lambda plain: plain.update(batch="8")), "is damaged (batch: '8')"),
        (damaged(lambda plain: plain.update(batch=True)), "is damaged (batch: True)"),
        (damaged(lambda plain: plain["steps"][0][1].update(wait_s=float("nan"))), "is damaged (steps.wait_s: nan)"),
        (damaged(lambda plain: plain["steps"][0][1]["spans"][0].pop()), "is damaged (steps.spans: ['data', 0.0])"),
        (damaged(lambda plain: plain["steps"][0].pop()), "is damaged (steps: there are none, or some"),
        (damaged(lambda plain: plain.update(hosts=[[0, 1], [1]])), "are not the ranks 0 to 1"),
        (damaged(lambda plain: plain.update(cores=[2])), "is damaged (cores: not one number for each host)"),
    ],
)
def test_a_file_that_is_no_profile_is_told_in_a_sentence(text: str | None, expected: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_profile(tmp_path)
    assert expected in str(error.value) and "\n" not in str(error.value)
