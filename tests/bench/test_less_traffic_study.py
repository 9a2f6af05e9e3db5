"""The study of less traffic: what its results say, what a stopped one leaves, and two runs of it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from ranks import run_ranks

from ddp.bench import less_traffic
from ddp.bench.less_traffic import DRAWN, JOBS, PLAIN, SEEDS, WAYS, Result, Trial, read, study, trials
from ddp.bench.less_traffic_report import draw, points, show


def studied() -> list[Result]:
    """Results in which signs cost a point and a tenth of a bit, and random-k diverges on text with seed 0."""
    found = []
    for trial in trials():
        lost = (trial.job, trial.way, trial.seed) == ("gpt", "random-k, 10 %", 0)
        lossy = trial.way == "sign"
        score = 0.98 + 0.001 * trial.seed - 0.01 * lossy if trial.job == "digits" else 2.0 + 0.1 * lossy
        found.append(Result(trial, None if lost else score, [(10, score / 2), (20, score)], 1.0))
    return found


def test_a_table_and_a_picture_of_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = points(studied())
    assert len(found) == len(JOBS) * len(WAYS)
    assert found["digits", "sign"].differences == pytest.approx([-0.01] * len(SEEDS))
    assert len(found["gpt", "random-k, 10 %"].scores) == len(SEEDS) - 1
    assert found["gpt", "sign"].curve == [(10, pytest.approx(1.05)), (20, pytest.approx(2.1))]
    show(found, WAYS)
    signs = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["sign"])
    assert re.split("  +", signs.strip())[1:] == ["97.20", "-1.00 ± 0.00", "2.100", "+5.00 ± 0.00"]
    draw(found, DRAWN, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert set(DRAWN) <= set(WAYS)


def test_a_study_that_was_stopped_shows_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for results in ([], studied()[:3], studied()[5:7]):
        found = points(results)
        show(found, WAYS)
        draw(found, DRAWN, tmp_path / "picture.png")
        assert PLAIN in capsys.readouterr().out


def test_a_line_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    path, results = tmp_path / "results.jsonl", studied()[:3]
    assert read(path) == []
    lines = [json.dumps(asdict(result)) for result in results]
    path.write_text("\n".join([*lines[:2], lines[2][:50]]))
    assert read(path) == results[:2]


def short_study(folder: str, wanted: list[Trial]) -> None:
    less_traffic.JOBS = {name: job._replace(num_steps=4) for name, job in JOBS.items()}
    study(folder, wanted)


def test_runs_are_made_once(tmp_path: Path) -> None:
    (done, *others) = wanted = [Trial("digits", way, 0) for way in (PLAIN, "wire int8", "PowerSGD, rank 4")]
    (tmp_path / "results.jsonl").write_text(json.dumps(asdict(Result(done, 0.5, [(1, 0.5)], 1.0))) + "\n{")
    run_ranks(short_study, 2, str(tmp_path), wanted)
    first, *new = read(tmp_path / "results.jsonl")
    assert (first.trial, first.score) == (done, 0.5)
    assert [result.trial for result in new] == others
    assert all(result.score is not None and 0 < result.score < 1 and result.curve[-1][0] == 4 for result in new)
