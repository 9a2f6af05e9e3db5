"""The study of few agreements: what its results say, and that a way is what `ddp.LocalSGD` takes."""

from __future__ import annotations

import re

import pytest
from few_agreements import SYNCHRONOUS, WAYS, FewAgreements, ratios
from matplotlib.figure import Figure
from study import Result

import ddp

STUDY = FewAgreements()


def studied() -> list[Result]:
    """Results in which a round of 32 steps costs a tenth, and of which one diverged."""
    found = []
    for trial in STUDY.planned:
        score = (2.0 + 0.1 * trial.seed) * (1.1 if trial.way == "every 32" else 1.0)
        found.append(Result(trial, None if (trial.way, trial.seed) == ("every 100", 1) else score, [], 1.0))
    return found


def test_a_table_and_a_picture_of_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = ratios(studied())
    assert found["every 32"] == pytest.approx([1.1] * 3)
    assert len(found["every 100"]) == 2 and found[SYNCHRONOUS] == [1.0] * 3
    STUDY.show(studied())
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("every 32  "))
    assert re.split("  +", line.strip()) == ["every 32", "2.310", "1.100", "1.100–1.100"]
    for results in ([], studied()[:2], studied()):
        STUDY.show(results)
        STUDY.draw(results, figure := Figure())
    assert [len(axes.lines) for axes in figure.axes] == [2]


def test_every_way_is_a_policy() -> None:
    for way in WAYS.values():
        assert ddp.LocalSGD(**{key: value for key, value in way.items() if key != "after"})
