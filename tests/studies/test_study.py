"""What studies share: a run is made once, and a line that was cut off is made again; and how they refuse."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import less_traffic
import pytest
from less_traffic import JOBS, PLAIN, LessTraffic, Trial
from ranks import run_ranks
from study import Result, make_runs, read

STUDIES = Path(__file__).parents[2] / "recipes" / "studies"
DONE = Trial("digits", PLAIN, 0)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path, results = tmp_path / "results.jsonl", [Result(DONE, 0.5, [(1, 0.5)], seconds=float(n)) for n in range(3)]
    assert read(path, Trial) == []
    lines = [json.dumps(asdict(result)) for result in results]
    path.write_text("\n".join([*lines[:2], lines[2][:50]]))
    assert read(path, Trial) == results[:2]


def short_study(path: Path, planned: list[Trial]) -> None:
    less_traffic.JOBS = {name: job._replace(num_steps=4) for name, job in JOBS.items()}
    study = LessTraffic()
    study.planned = planned
    make_runs(study, path)


def test_runs_are_made_once(tmp_path: Path) -> None:
    path, others = tmp_path / "results.jsonl", [Trial("digits", way, 0) for way in ("wire int8", "PowerSGD, rank 4")]
    path.write_text(json.dumps(asdict(Result(DONE, 0.5, [(1, 0.5)], 1.0))) + "\n{")
    run_ranks(short_study, 2, path, [DONE, *others])
    first, *new = read(path, Trial)
    assert (first.trial, first.score) == (DONE, 0.5)
    assert [result.trial for result in new] == others
    assert all(result.score is not None and 0 < result.score < 1 and result.curve[-1][0] == 4 for result in new)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data.py --turns 0", "--turns: 0: give a whole number from 1 up"),
        ("optimizers.py --turns nan", "--turns: nan: give a whole number from 1 up"),
        ("large_batch.py --num-train 100", "100: give a whole number from 8,192 up: an epoch has a whole batch"),
        ("less_traffic.py --seeds 6", "6: give a whole number from 1 to 5"),
        ("servers.py --kills -1", "--kills: -1: give a whole number from 0 up"),
        ("hooks.py --methods signs", "method 'signs' is unknown; choose among plain"),
        ("hooks.py --models digits", "model 'digits' is unknown; choose among small-mlp"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *arguments = words.split()
    monkeypatch.setattr(sys, "argv", [str(STUDIES / script), *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(STUDIES / script), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert message in line
