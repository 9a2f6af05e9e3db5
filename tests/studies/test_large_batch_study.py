"""The study of large batches: which run is the best one, what results say, and what a stopped study leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from large_batch import BATCHES, RIVALS, SEEDS, Findings, LargeBatch, best_of, critical_batch, samples_to
from matplotlib.figure import Figure
from study import Result

from ddp.train.reports.meters import Estimate

STUDY = LargeBatch(num_train=10_000)


def studied() -> list[Result]:
    """Results of a study in which the second rate is the best, and SGD diverges at the largest batch."""
    results: dict[Any, Result] = {}
    for trial in STUDY.trials(results):
        lost = trial.rival == "SGD" and trial.batch == BATCHES[-1]
        accuracy = 0.6 - 0.1 * abs(RIVALS[trial.rival].rates.index(trial.rate) - 1) + 0.01 * trial.seed
        curve = [(1000, 0.3), (2000, accuracy)]
        noise = Estimate(100.0 + trial.seed, 10.0, None)
        results[trial] = Result(trial) if lost else Result(trial, accuracy, curve, 1.0, noise)
    return list(results.values())


def test_every_optimizer_is_tried_at_four_rates_and_the_best_is_tested_with_all_seeds() -> None:
    results = studied()
    by_trial = {result.trial: result for result in results}
    tuning = [trial for trial in by_trial if not trial.is_test]
    assert len(results) == STUDY.num_trials == len(RIVALS) * len(BATCHES) * (4 + len(SEEDS))
    assert {trial.seed for trial in tuning} == {SEEDS[0]}
    best = {(trial.rival, trial.batch): trial.rate for trial in best_of(tuning, by_trial)}
    assert all(best[name, BATCHES[0]] == rival.rates[1] for name, rival in RIVALS.items())
    tested = [trial for trial in by_trial if trial.is_test]
    assert all(trial.rate == best[trial.rival, trial.batch] for trial in tested)


def test_findings_are_means_over_seeds_and_a_run_that_diverged_counts_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Findings.of(studied())
    assert found.target == pytest.approx(0.61 - 0.02)
    lamb, sgd = found.points["LAMB", BATCHES[1]], found.points["SGD", BATCHES[-1]]
    assert [lamb.mean, lamb.spread] == pytest.approx([0.61, 0.01])
    crossings = [1000 + 1000 * (0.59 - 0.3) / (0.3 + 0.01 * seed) for seed in SEEDS]
    assert lamb.to_target == pytest.approx(sum(crossings) / len(SEEDS))
    assert (sgd.mean, sgd.to_target) == (0, None)
    assert critical_batch(found) == "100 to 102 samples"
    STUDY.show(studied())
    assert "61.0 ± 1.0 (0.003) " in capsys.readouterr().out
    figure = Figure()
    STUDY.draw(studied(), figure)
    assert [len(axes.get_lines()) for axes in figure.axes] == [len(RIVALS), len(RIVALS)]


def test_a_study_that_was_stopped_shows_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    for results in ([], studied()[:3], studied()[:50]):
        STUDY.show(results)
        STUDY.draw(results, Figure())
        assert critical_batch(Findings.of(results)) == "not measured"
        assert "AdamW" in capsys.readouterr().out


def test_results_of_another_grid_are_left_out() -> None:
    results = studied()
    elsewhere = Result(replace(results[-1].trial, rate=0.77), 0.9)
    assert STUDY.own([elsewhere, *results]) == results
    assert STUDY.own([*results[:5], elsewhere]) == results[:5]
    assert LargeBatch(num_train=20_000).own(results) == []


def test_samples_to_a_target() -> None:
    curve = [(100, 0.2), (200, 0.6), (300, 0.5)]
    assert samples_to(0.4, curve) == pytest.approx(150)
    assert samples_to(0.1, curve) == pytest.approx(50)
    assert samples_to(0.2, curve) == 100
    assert samples_to(0.7, curve) is None
    assert samples_to(0.7, []) is None
