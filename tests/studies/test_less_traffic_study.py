"""The study of less traffic: what its results say, and what a stopped one leaves."""

from __future__ import annotations

import re

import pytest
from less_traffic import DRAWN, JOBS, PLAIN, SEEDS, WAYS, LessTraffic, points
from matplotlib.figure import Figure
from study import Result

STUDY = LessTraffic()


def studied() -> list[Result]:
    """Results in which signs cost a point and a tenth of a bit, and random-k diverges on text with seed 0."""
    found = []
    for trial in STUDY.planned:
        lost = (trial.job, trial.way, trial.seed) == ("gpt", "random-k, 10 %", 0)
        lossy = trial.way == "sign"
        score = 0.98 + 0.001 * trial.seed - 0.01 * lossy if trial.job == "digits" else 2.0 + 0.1 * lossy
        found.append(Result(trial, None if lost else score, [(10, score / 2), (20, score)], 1.0))
    return found


def test_a_table_and_a_picture_of_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = points(studied())
    assert len(found) == len(JOBS) * len(WAYS)
    assert found["digits", "sign"].differences == pytest.approx([-0.01] * len(SEEDS))
    assert len(found["gpt", "random-k, 10 %"].scores) == len(SEEDS) - 1
    assert found["gpt", "sign"].curve == [(10, pytest.approx(1.05)), (20, pytest.approx(2.1))]
    STUDY.show(studied())
    signs = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["sign"])
    assert re.split("  +", signs.strip())[1:] == ["97.20", "-1.00 ± 0.00", "2.100", "+5.00 ± 0.00"]
    figure = Figure()
    STUDY.draw(studied(), figure)
    assert [len(axes.lines) for axes in figure.axes] == [len(DRAWN), len(DRAWN)]
    assert set(DRAWN) <= set(WAYS)


def test_a_study_that_was_stopped_shows_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    for results in ([], studied()[:3], studied()[5:7]):
        STUDY.show(results)
        STUDY.draw(results, Figure())
        assert PLAIN in capsys.readouterr().out
