"""The report of a sweep, from runs that are written down here; the numbers beside them are computed by hand.

Tests: ddp/lab/scaling/charts.py, ddp/lab/scaling/figures.py, ddp/lab/scaling/report.py, ddp/lab/scaling/runs.py.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ddp.__main__ import main
from ddp.lab.scaling import report as page
from ddp.lab.scaling.charts import COLOURS, PARTS
from ddp.lab.scaling.figures import Series, compare, waited_for
from ddp.lab.scaling.report import verdict
from ddp.lab.scaling.runs import read_run, read_runs
from ddp.run.settings.config import Config
from ddp.train.reports.profile import PARTS as OF_A_STEP
from ddp.train.reports.profile import BucketTimes, ClockOffset, Profile, RankStep, Span

DEFAULTS = json.dumps(asdict(Config()))
ACCURATE = {"main_metric": "test_accuracy", "higher_is_better": True}


class DRAWN:
    """The functions that draw, which takes a second; most tests go without."""

    svg = staticmethod(page.svg)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "svg", lambda panel, name: "<svg></svg>")


def leave(
    run_dir: Path,
    workers: int,
    rate: float,
    *,
    batch: int = 64,
    threads: int = 1,
    lines: Sequence[dict[str, Any]] = (),
    settings: dict[str, Any] | None = None,
    **summary: Any,
) -> Path:
    """Writes down what a run of this many workers leaves."""
    run_dir.mkdir(parents=True)
    plain = json.loads(DEFAULTS)
    plain["cluster"] |= {"workers": workers, "local_workers": workers, "threads_per_worker": threads}
    plain["batch"] |= {"global_size": batch, "num_shards": workers}
    for key, value in (settings or {}).items():
        group, _, name = key.rpartition(".")
        (plain[group] if group else plain)[name] = value
    (run_dir / "config.yaml").write_text(yaml.dump(plain, Dumper=yaml.CSafeDumper, sort_keys=False))
    told = {"world_size": workers, "global_batch": batch, "samples_per_s": rate, "threads_per_worker": threads}
    told |= {"seconds": 10.0, "stopped_by": None, "data_fraction": 0.1, "compute_fraction": 0.6, "wait_fraction": 0.3}
    (run_dir / "summary.json").write_text(json.dumps(told | summary))
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return run_dir


def step(samples: int, rate: float, **figures: float) -> dict[str, Any]:
    return {"kind": "step", "step": samples // 64, "samples": samples, "samples_per_s": rate, **figures}


def evaluation(samples: int, accuracy: float) -> dict[str, Any]:
    return {"kind": "evaluation", "step": samples // 64, "samples": samples, "test_accuracy": accuracy}


def strong(sweep: Path) -> Path:
    """A sweep of 1, 2 and 4 workers: efficiencies of 100, 90 and 60 %."""
    memory = {"memory_mb/rank_0": 900.0, "device_memory_mb/rank_0": 5.0}
    lines = [step(400, 200.0), evaluation(300, 0.5), evaluation(600, 0.8), step(1000, 150.0, **memory)]
    lines += [evaluation(1200, 0.93)]
    leave(sweep / "k=1", 1, 100.0, lines=[evaluation(500, 0.7), evaluation(1000, 0.92)], test_accuracy=0.92, **ACCURATE)
    leave(sweep / "k=2", 2, 180.0, lines=lines, test_accuracy=0.93, **ACCURATE)
    four = [step(1000, 250.0, **{"memory_mb/rank_0": 300.0, "memory_mb/rank_3": 310.0}), evaluation(1000, 0.9)]
    four += [step(2000, 500.0, **{"memory_mb/rank_0": 320.0, "memory_mb/rank_3": 290.0}), evaluation(2000, 0.94)]
    leave(sweep / "k=4", 4, 240.0, lines=four, test_accuracy=0.94, **ACCURATE)
    return sweep


def only(sweep: Path, **asked: Any) -> Series:
    (series,), notes = compare(read_runs(sweep)[0], **asked)
    assert not notes
    return series


def test_figures_are_those_computed_by_hand(tmp_path: Path) -> None:
    series = only(strong(tmp_path))
    one, two, four = series.points
    assert [point.speed_up for point in series.points] == [1.0, 1.8, 2.4]
    assert [point.efficiency for point in series.points] == [1.0, 0.9, 0.6]
    assert (series.target, series.metric) == (0.92, "test_accuracy")  # the worst end, which all have reached
    assert [point.samples_to for point in series.points] == [1000, 1200, 2000]
    # 1000 ÷ 100; 400 ÷ 200 + 800 ÷ 150; 1000 ÷ 250 + 1000 ÷ 500
    assert [point.seconds_to for point in series.points] == pytest.approx([10.0, 2 + 16 / 3, 6.0])
    assert two.time_efficiency == pytest.approx(10 / (2 * (2 + 16 / 3)))
    assert (four.worker_seconds_to, four.worker_seconds) == (24.0, 40.0)
    assert [seconds for seconds, _ in two.curve] == pytest.approx([1.5, 2 + 4 / 3, 2 + 16 / 3])
    assert [metric for _, metric in two.curve] == [0.5, 0.8, 0.93]
    assert [list(point.run.memory) for point in series.points] == [[], [5e6], [320e6, 310e6]]  # of a device first
    assert one.parts == [pytest.approx({"data": 0.064, "compute": 0.384, "wait": 0.192})]  # of 64 ÷ 100 s


def test_time_is_that_of_another_program(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(20):
        samples = np.cumsum(random.integers(1, 500, size=12))
        rates = random.uniform(10, 1000, size=12)
        lines = [step(int(until), float(rate)) for until, rate in zip(samples, rates, strict=True)]
        run = read_run(leave(tmp_path / str(number), 1, 50.0, lines=lines), [])
        seconds = np.cumsum(np.diff(samples, prepend=0) / rates)
        asked = random.uniform(1, float(samples[-1]), size=5)
        expected = np.interp(asked, [0, *samples], [0, *seconds])
        assert [run.seconds_at(each) for each in asked] == pytest.approx(list(expected))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({}, "but reach test accuracy 92.00% after 1.20 times as many samples, an efficiency by that time of 68%"),
        ({"goal": 0.95}, "after 1: 2 workers are 1.80 times as fast as 1, an efficiency of 90% (goal 95%)."),
        ({"target": 0.75, "goal": 0.9}, "after 2: 4 workers are 2.40 times as fast as 1, an efficiency of 60%"),
        ({"target": 0.75}, "after 2: 4 workers are 2.40 times as fast as 1, an efficiency of 60% (goal 80%)."),
        ({"target": 0.935, "goal": 0.5}, "after 1: with 2 training does not reach test accuracy 93.50%."),
        ({"target": 0.75, "goal": 0.5}, "More workers pay up to 4, the most that were measured: they are 2.40 times"),
    ],
)
def test_one_sentence_says_where_workers_stop_paying(asked: dict[str, float], says: str, tmp_path: Path) -> None:
    assert says in verdict(only(strong(tmp_path), **asked))


def test_who_misses_the_target_is_told(tmp_path: Path) -> None:
    assert main(["report", str(strong(tmp_path)), "--target", "0.935"]) == 0
    said = [line for line in (tmp_path / "report.md").read_text().splitlines() if "does not reach" in line]
    told = "training does not reach test accuracy 93.50%."
    assert said[1:] == [f"- With {many} {told}" for many in ("1 worker", "2 workers")]


def test_more_workers_can_be_slower(tmp_path: Path) -> None:
    for workers, rate in ((2, 100.0), (3, 90.0)):
        leave(tmp_path / str(workers), workers, rate)
    series = only(tmp_path)
    assert "stop paying after 2: 3 workers are slower than 2, an efficiency of 60% (goal 80%)." in verdict(series)
    assert series.target is None and not series.metric


def test_a_loss_is_better_if_it_is_lower(tmp_path: Path) -> None:
    losses = {1: (0.9, 0.3), 2: (0.4, 0.5)}
    for workers, (first, last) in losses.items():
        lines = [
            {"kind": "evaluation", "step": samples, "samples": samples, "test_loss": loss}
            for samples, loss in ((100, first), (200, last))
        ]
        leave(tmp_path / str(workers), workers, 10.0, lines=lines, main_metric="test_loss", test_loss=last)
    assert only(tmp_path).target == 0.3  # 0.5 is no loss that is about as good
    series = only(tmp_path, target=0.5)
    assert [point.samples_to for point in series.points] == [200, 100]


@pytest.mark.parametrize(("end", "pays"), [(0.93, True), (0.9, False), (0.97, True)])
def test_speed_without_convergence_is_no_success(end: float, pays: bool, tmp_path: Path) -> None:
    for workers, accuracy in ((1, 0.94), (2, end)):  # evaluated at the end only, after the same samples
        lines = [evaluation(1000, accuracy)]
        leave(tmp_path / str(workers), workers, 100.0 * workers, lines=lines, test_accuracy=accuracy, **ACCURATE)
    series = only(tmp_path)
    assert (series.target, series.stop.reason) == ((min(0.94, end), None) if pays else (0.94, "target"))


PAY, STOP, UNKNOWN = "More workers pay up to 2", "More workers stop paying after 1: ", "Unknown whether more workers "


@pytest.mark.parametrize(
    ("one_ms", "two_ms", "begins", "says"),
    [
        ([100] * 5, [55] * 5, PAY, "1.82 times as fast as 1, an efficiency of 91% (goal 80%)"),
        ([100] * 5, [80, 82, 84, 80, 80], STOP, "an efficiency of 62% (60% to 62% by windows, goal 80%)."),
        ([100] * 5, [55, 55, 70, 55, 55], UNKNOWN, "an efficiency of 86%, and between 71% and 91% by windows"),
        ([90, 110, 100, 100, 100], [64] * 5, UNKNOWN, "an efficiency of 78%, and between 70% and 86% by windows"),
        ([150] * 5, [55] * 5, UNKNOWN, "136%, which is no merit of theirs: the run of 1 worker was slowed down"),
    ],
)
def test_a_busy_host_has_no_verdict(
    one_ms: list[int], two_ms: list[int], begins: str, says: str, tmp_path: Path
) -> None:
    """Efficiencies of the windows are computed by hand."""
    for workers, steps_ms in ((1, one_ms), (2, two_ms)):
        folder = leave(tmp_path / str(workers), workers, 1.0, stopped_by="measured")
        profile = profile_of([[[1.0, 2.0]] * workers] * 5)
        lengths = zip(profile.steps, steps_ms, strict=True)
        steps = [[replace(rank, spans=[Span("forward", 0.0, ms / 1e3)]) for rank in step] for step, ms in lengths]
        replace(profile, steps=steps).write(folder)
    said = verdict(only(tmp_path))
    assert said.startswith(begins) and says in said


# --- what is compared ------------------------------------------------------------------------------------------------


def found(sweep: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Returns the names of runs of each series by its title, and the notes."""
    from ddp.lab.scaling.report import title_of

    runs, notes = read_runs(sweep)
    series, more = compare(runs)
    return {title_of(each): [point.run.name for point in each.points] for each in series}, notes + more


def test_strong_and_weak_scaling_are_told_by_the_batch(tmp_path: Path) -> None:
    leave(tmp_path / "one", 1, 100.0)
    leave(tmp_path / "two-strong", 2, 180.0, threads=1)
    leave(tmp_path / "two-weak", 2, 190.0, batch=128)
    assert found(tmp_path) == (
        {
            "Strong scaling: global batch 64": ["one", "two-strong"],
            "Weak scaling: batch 64 per worker": ["one", "two-weak"],
        },
        [],
    )


def test_runs_that_differ_in_more_than_workers_are_never_put_together(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for workers in (1, 2):
            leave(tmp_path / f"{rate}-{workers}", workers, 100.0 * workers, settings={"clip_norm": rate})
    leave(tmp_path / "other", 4, 100.0, settings={"epochs": 3})
    groups, notes = found(tmp_path)
    assert groups == {
        "Strong scaling: global batch 64, clip_norm=0.1": ["0.1-1", "0.1-2"],
        "Strong scaling: global batch 64, clip_norm=0.2": ["0.2-1", "0.2-2"],
    }
    assert notes == ["other is in no comparison, because no other run differs from it in the number of workers alone."]


def test_threads_that_follow_from_workers_are_no_other_setting(tmp_path: Path) -> None:
    for workers, threads in ((1, 2), (2, 1)):
        leave(tmp_path / f"{workers}x{threads}", workers, 100.0, threads=threads)
    assert found(tmp_path)[0] == {"Strong scaling: global batch 64": ["1x2", "2x1"]}
    for workers, threads in ((1, 1), (2, 2)):  # now they were chosen
        leave(tmp_path / f"{workers}x{threads}", workers, 100.0, threads=threads)
    assert found(tmp_path)[0] == {
        "Strong scaling: global batch 64, cluster.threads_per_worker=1": ["1x1", "2x1"],
        "Strong scaling: global batch 64, cluster.threads_per_worker=2": ["1x2", "2x2"],
    }


def test_of_repeats_the_one_of_median_speed_is_shown(tmp_path: Path) -> None:
    for seed, (rate, accuracy) in enumerate([(90.0, 0.8), (100.0, 0.9), (140.0, 0.7)]):
        leave(tmp_path / f"1-{seed}", 1, rate, settings={"seed": seed}, test_accuracy=accuracy, **ACCURATE)
    leave(tmp_path / "2", 2, 150.0, test_accuracy=0.85, **ACCURATE)
    series = only(tmp_path)
    assert [point.run.name for point in series.points] == ["1-1", "2"]
    assert series.points[1].speed_up == 1.5 and series.target == 0.85
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert "made 90 to 140 samples/s, test accuracy 70.00% to 90.00%; the one of median speed is shown" in page


# --- who was waited for ----------------------------------------------------------------------------------------------


def profile_of(ready_s: Sequence[Sequence[Sequence[float]]], *, error_s: float = 0.0) -> Profile:
    """Returns a profile in which buckets were ready then, by step, rank and bucket."""

    def rank_step(number: int, rank: int, moments: Sequence[float]) -> RankStep:
        buckets = [
            BucketTimes(
                index=index,
                bytes=4,
                dtype="float32",
                parameters=[f"{index}"],
                shapes=[[1]],
                ready_s=moment,
                launched_s=moment,
                done_s=moment,
            )
            for index, moment in enumerate(moments)
        ]
        edges = pairwise(accumulate((0.001 * place for place, _ in enumerate(OF_A_STEP, number)), initial=0.0))
        return RankStep(
            step=number,
            began_s=5.0 * number - 0.5 * rank,
            num_samples=1,
            backward_began_s=0.5 + 0.5 * rank,  # of all ranks at once
            buckets=buckets,
            spans=[Span(part, *edge) for part, edge in zip(OF_A_STEP, edges, strict=True)],
        )

    world_size = len(ready_s[0])
    return Profile(
        version=1,
        model="Net",
        num_parameters=2,
        batch=64,
        world_size=world_size,
        hosts=[list(range(world_size))],
        threads=1,
        cores=[world_size],
        device="cpu",
        strategy="Replicated",
        hook=None,
        wire=None,
        algorithm="ring",
        runs="in the foreground",
        clock=[ClockOffset(offset_s=0.0, error_s=error_s)] * world_size,
        steps=[[rank_step(number, *each) for each in enumerate(ranks)] for number, ranks in enumerate(ready_s)],
    )


READY_S = [[[1.0, 2.0], [1.0, 2.5], [1.5, 2.25]], [[1.0, 2.0], [1.0, 2.0], [1.25, 2.25]]]
"""Rank 1 is last once, by 0.25 s; rank 2 three times, by 0.5, 0.25 and 0.25 s."""


def test_who_was_waited_for_is_the_last_with_its_bucket() -> None:
    assert waited_for(profile_of(READY_S)) == [(0.0, 0.0), (0.25, 0.25), (0.75, pytest.approx(1 / 3))]
    unsure = waited_for(profile_of(READY_S, error_s=0.126))  # the clocks of two ranks together: more than 0.25 s
    assert unsure == [(0.0, 0.0), (0.0, 0.0), (0.25, 0.5)]
    assert waited_for(profile_of([[[1.0]]])) == []


def test_the_report_shows_parts_and_who_was_waited_for(tmp_path: Path) -> None:
    sweep = strong(tmp_path / "s")
    assert main(["report", str(sweep)]) == 0
    assert "are known with profile.steps=5 in the sweep." in (sweep / "report.md").read_text()
    profile_of([[*each, each[0]] for each in READY_S]).write(sweep / "k=4")
    assert main(["report", str(sweep)]) == 0
    page = (sweep / "report.md").read_text()
    # parts of 0, 1, … 6 and 1, 2, … 7 ms: means of 0.5, 1.5, …
    assert "| 4 |  | 0.5 | 1.5 | 2.5 | 3.5 | 4.5 | 5.5 | 6.5 |" in page
    assert "With 4 workers rank 2 was waited for most often" in page
    assert "its bucket ready in 75% of all cases, on average by 333.3 ms." in page


# --- bad input -------------------------------------------------------------------------------------------------------


def _changed(run_dir: Path, **changes: Any) -> None:
    path = run_dir / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _stopped_in_a_measurement(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("  steps: 0\n  seconds: null", "  steps: 9\n  seconds: 5.0"))
    _changed(run, stopped_by="me", steps=3)


BROKEN = {
    "k=2 is left out: it has no summary.json": lambda run: (run / "summary.json").unlink(),
    "k=2 is left out: its summary.json is damaged": lambda run: (run / "summary.json").write_text('{"world_size": 2'),
    "(it has no seconds)": lambda run: (run / "summary.json").write_text('{"world_size": 2, "global_batch": 1}'),
    "it was stopped by SIGTERM after 7 steps": lambda run: _changed(run, stopped_by="SIGTERM", steps=7),
    "it was there to be measured, and was stopped after 3 steps by me": lambda run: _stopped_in_a_measurement(run),
    "k=2 is left out: it has trained no step": lambda run: _changed(run, samples_per_s=0.0),
    "damaged (a number is below 1)": lambda run: _changed(run, world_size=0),
    "k=2 is left out: it has no config.yaml": lambda run: (run / "config.yaml").unlink(),
    "k=2 is left out: config.yaml is damaged": lambda run: (run / "config.yaml").write_text("seed: ["),
    "k=2 is left out: its job has ended so: failed (status 1)": lambda run: (run / "job.json").write_text(
        '{"overrides": [], "status": 1}'
    ),
    "k=2 is left out: its job has ended so: pruned": lambda run: (run / "job.json").write_text(
        '{"overrides": [], "status": 0, "pruned": true}'
    ),
    "k=2 is shown without its profile: profile.json is damaged": lambda run: (run / "profile.json").write_text("{"),
    "k=2 is shown without its profile: profile.json is of 1 workers": lambda run: profile_of([[[1.0]]]).write(run),
}


@pytest.mark.parametrize("says", BROKEN)
def test_what_is_broken_is_told_in_a_sentence_and_the_rest_is_shown(
    says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BROKEN[says](strong(tmp_path) / "k=2")
    assert main(["report", str(tmp_path)]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    (line,) = (line for line in out.splitlines() if says in line)
    assert line.endswith(".") and line.count(". ") == 0 and str(tmp_path) not in line
    assert "| 1 |" in page and "| 4 |" in page and ("| 2 |" in page) == ("is shown" in says)


def test_lines_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    lines = (strong(tmp_path) / "k=2" / "metrics.jsonl").read_text().splitlines()
    slow = '{"kind": "step", "samples": 1e9, "samples_per_s": 0.0}'
    damaged = [slow, '{"kind": "step"}', "{}", *lines, '{"kind": "st']
    (tmp_path / "k=2" / "metrics.jsonl").write_text("\n".join(damaged))
    assert only(tmp_path).points[1].seconds_to == pytest.approx(2 + 16 / 3)


def test_a_run_that_has_diverged_is_told_and_never_pays(tmp_path: Path) -> None:
    _changed(strong(tmp_path) / "k=2", test_accuracy=math.nan)
    lines = [step(400, 200.0), evaluation(300, math.nan)]
    (tmp_path / "k=2" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    series = only(tmp_path, goal=0.5)
    assert series.target == 0.92 and series.stop.reason == "target" and series.stop.last.workers == 1
    assert main(["report", str(tmp_path)]) == 0
    assert "With 2 workers training has diverged, or was not evaluated." in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("prepare", "words", "says"),
    [
        (lambda folder: None, [], "nowhere: there is no such folder; give that of a sweep"),
        (lambda folder: folder.mkdir(), [], "nowhere holds no runs: give the folder of a sweep"),
        (lambda folder: leave(folder, 1, 1.0), [], "nowhere is a single run: give the folder of a sweep"),
        (lambda folder: leave(folder / "one", 1, 1.0), [], "no two runs differ in the number of workers alone"),
        (lambda folder: (strong(folder) / "report.html").mkdir(), [], "nowhere: Is a directory; make room there"),
        (strong, ["--goal-efficiency", "80"], "--goal-efficiency: 80: give a share above 0 and at most 1"),
        (strong, ["--price-per-worker-hour", "nan"], "--price-per-worker-hour: nan: give a number above 0"),
        (strong, ["--target", "high"], "--target: high: give a number"),
        (strong, ["--target", "nan"], "--target: nan: give a number"),
    ],
)
def test_bad_input_is_told_in_a_sentence(
    prepare: Any, words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path / "nowhere")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path / "nowhere"), *words])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


# --- the pages -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Notes the elements, attributes, cells and pictures of a page; raises if an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.open += [tag] if tag not in ("meta", "link", "img", "br") else []
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1].append(data)


def cells(row: str) -> list[str]:
    return [cell.strip().replace("\\", "") for cell in row.strip("|").split("|")]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with its report, in a folder whose name means something to HTML and Markdown."""
    sweep = strong(tmp_path_factory.mktemp("report") / "<b>a_sweep")
    profile_of([[*each, each[0]] for each in READY_S]).write(sweep / "k=4")
    words = ["--target", "0.75", "--price-per-worker-hour", "36", "--goal-efficiency", "0.7"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp.lab.scaling.report.svg", DRAWN.svg)
        assert main(["report", str(sweep), *words]) == 0
    return sweep


def test_both_pages_show_the_same_figures_and_need_nothing_else(sweep: Path) -> None:
    markdown, text = (sweep / "report.md").read_text(), (sweep / "report.html").read_text()
    page = Page(text)
    rows = [cells(line) for line in markdown.splitlines() if line.startswith("|") and "--:" not in line]
    assert [[cell for cell in row if cell] for row in rows] == page.rows
    assert ["2", "180.0", "1.80", "90.0%", "5 MB", "355.6", "met", "93.00%"] in page.rows
    assert ["4", "240.0", "2.40", "60.0%", "320 MB", "266.7", "missed", "94.00%"] in page.rows
    # 0.75 is reached after 1000, 600 and 1000 samples: 10 s, 400 ÷ 200 + 200 ÷ 150 s, 4 s; a worker-second costs 0.01
    assert ["2", "3.33 s", "600", "6.7", "0.0667", "150.0%", "10.0 s", "20.0", "0.200"] in page.rows
    said = "More workers stop paying after 2: 4 workers are 2.40 times as fast as 1"
    assert f"**{said}" in markdown and said in text
    named = re.findall(r"!\[.*\]\((.*)\)", markdown)
    assert len(named) == 4 and all((sweep / name).read_text().startswith("<svg") for name in named)
    assert "<b>a_sweep" not in text and "\\<b\\>a\\_sweep" in markdown
    for name, value in page.attributes:
        assert name not in ("src", "href", "srcset") and not name.startswith("on")
        assert name.startswith("xmlns") or "//" not in (value or "")
        assert name != "xlink:href" or (value or "").startswith("#")
    assert "@import" not in text and "<script" not in text and not re.search(r"url\((?!#)", text)


def test_pictures_have_colours_of_both_themes_alone(sweep: Path) -> None:
    text = (sweep / "report.html").read_text()
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 4
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert {"line", "quiet"} <= set(re.findall(r"var\(--(\w+)\)", picture)) <= set(COLOURS)
        assert set(re.findall(r"#[0-9a-f]{6}", picture)) <= set(PARTS.values())
    named = re.findall(r' id="([^"]*)"', text)
    assert len(named) == len(set(named))


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_neither_a_phone_nor_a_desktop_has_to_scroll_sideways(sweep: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    page, measured = tmp_path / "report.html", "contentDocument.documentElement"
    page.write_text((sweep / "report.html").read_text())
    frames = [
        f'<iframe src="{page.name}" width={width} height=900 '
        f"onload='document.body.dataset.w{width} = {measured}.scrollWidth - {measured}.clientWidth'></iframe>"
        for width in (360, 1280)
    ]
    (tmp_path / "frames.html").write_text(f"<body>{''.join(frames)}</body>")
    told = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'chromium'}"),
            *("--allow-file-access-from-files", "--dump-dom", f"file://{tmp_path / 'frames.html'}"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert set(re.findall(r'data-w(\d+)="(\d+)"', told.stdout)) == {("360", "0"), ("1280", "0")}, told.stderr
