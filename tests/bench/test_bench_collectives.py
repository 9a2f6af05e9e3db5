"""The benchmark of collectives: what it computes, what it refuses, how ranks meet, and a run of its shortest form."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ddp.bench import collectives, meeting
from ddp.bench.bystanders import Watch, running
from ddp.bench.collectives import CASES, Bed, Figures, WrongSum, bus_factor, optimum_s
from ddp.bench.collectives_report import GOALS, draw_plot, from_json, goal_of, summary, to_json
from ddp.bench.units import format_size, format_time, parse_size
from ddp.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_collectives"


def figures(**changes: Any) -> Figures:
    """Four ranks, 1 MB in 1 ms, twice as fast as Gloo."""
    cell = Figures(
        case="ordinary",
        algorithm="ring",
        nbytes=1 << 20,
        ranks_per_host=(4,),
        num_cores=4,
        bed=None,
        time_s=1e-3,
        gloo_s=2e-3,
        speedup=2.0,
        predicted_s=1.2e-3,
        copy_s=0.25e-3,
        others_cores=0.0,
        greediest="",
    )
    return dataclasses.replace(cell, **changes)


# ---------------------------------------------------------------------------------------------------------- quantities


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4B", 4), ("1KB", 1024), ("64kb", 65536), ("1.5MB", 1572864), ("25MB", 26214400)]
)
def test_a_size_is_read_and_written(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "0B", "6B", "-4B", "1", "KB", "1TB", "1e3B", "1.0001KB"])
def test_no_size_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}'"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "bed"),
    [
        ("2x2@1gbit", Bed(2, 2, rate_bit_s=1e9)),
        ("4x1@5ms", Bed(4, 1, delay_s=0.005)),
        ("2x2@100mbit@500us", Bed(2, 2, rate_bit_s=1e8, delay_s=0.0005)),
        ("3x1", Bed(3, 1)),
    ],
)
def test_a_bed_is_read_and_written(text: str, bed: Bed) -> None:
    assert Bed.parse(text) == bed
    assert str(bed) == text


@pytest.mark.parametrize(
    "text", ["", "2", "2x", "0x2", "1x1", "2x2@", "2x2@fast", "2x2@1gbit@2gbit", "2x2@1gbit@1ms@2ms"]
)
def test_no_bed_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=f"netbed '{text}'"):
        Bed.parse(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.3e-6, "8.30 µs"), (9.999e-4, "1.00 ms"), (0.0124, "12.4 ms"), (0.2, "200 ms"), (1.5, "1.50 s")],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert [bus_factor(n) for n in (1, 2, 4, 8)] == [0.0, 1.0, 1.5, 1.75]
    cell = figures()
    assert cell.algorithm_bytes_s == (1 << 20) / 1e-3
    assert cell.bus_bytes_s == 1.5 * cell.algorithm_bytes_s
    assert cell.share_of_copy == 0.25
    assert cell.over_predicted == pytest.approx(1.2)


def test_the_optimum_counts_hosts_and_not_ranks() -> None:
    # Two hosts: each sends half of the tensor, twice, whatever stands in them.
    assert optimum_s(1000, 2, 8000.0) == 1.0
    cell = figures(ranks_per_host=(2, 2), bed=Bed(2, 2, rate_bit_s=1e9), nbytes=12_500_000, time_s=0.2)
    assert cell.share_of_optimum == pytest.approx(0.5)
    assert cell.num_delays is None
    assert figures(bed=Bed(4, 1, delay_s=0.005), time_s=0.011).num_delays == pytest.approx(2.2)


# -------------------------------------------------------------------------------------------------------------- goals


def test_every_goal_is_the_goal_of_some_cell() -> None:
    for goal in GOALS:
        bed = Bed.parse(goal.bed) if goal.bed else None
        cell = figures(case=goal.case, nbytes=goal.least, ranks_per_host=goal.ranks_per_host, bed=bed)
        most = dataclasses.replace(cell, nbytes=goal.most)
        assert goal in (goal_of(cell), goal_of(most))
        assert goal_of(dataclasses.replace(cell, ranks_per_host=(3,))) is None


def test_a_goal_is_reached_from_its_figure_on() -> None:
    wanted = {4 << 10: 16.0, 1 << 20: 16.0, (1 << 20) + 4: 2.0}
    for nbytes, speedup in wanted.items():
        goal = goal_of(figures(nbytes=nbytes))
        assert goal is not None
        assert goal.is_reached(figures(nbytes=nbytes, speedup=speedup))
        assert not goal.is_reached(figures(nbytes=nbytes, speedup=speedup - 0.01))
    slow = figures(case="allocated", ranks_per_host=(2,), nbytes=1024, speedup=50.0, time_s=31e-6)
    goal = goal_of(slow)
    assert goal is not None
    assert not goal.is_reached(slow)
    assert goal.is_reached(dataclasses.replace(slow, time_s=30e-6))


def test_the_summary_counts_goals_and_near_predictions() -> None:
    cells = [figures(speedup=20.0), figures(speedup=2.0, predicted_s=1.31e-3), figures(case="ring", predicted_s=None)]
    assert summary(cells) == [
        "goals reached: 1 of 2; missed: ordinary 1MB (4 ranks)",
        "predicted within 30% of measured: 1 of 2 cells (wanted: 9 in 10)",
    ]
    too_few_cores = figures(case="ring", num_cores=2)
    assert summary([too_few_cores]) == []


@pytest.mark.parametrize("bed", [None, Bed(2, 2, rate_bit_s=1e9)])
def test_json_holds_what_was_measured(bed: Bed | None) -> None:
    cell = figures(bed=bed, ranks_per_host=(2, 2) if bed else (4,))
    assert from_json(to_json(cell)) == cell
    assert json.loads(to_json(cell))["bus_bytes_s"] == cell.bus_bytes_s


def test_a_plot_is_drawn_for_every_place(tmp_path: Path) -> None:
    sizes, cases = (1024, 1 << 20, 25 << 20), ("ring", "tree")
    cells = [figures(nbytes=n, ranks_per_host=(w,), case=case) for n in sizes for w in (2, 4) for case in cases]
    draw_plot([*cells, figures(case="barrier", nbytes=0)], tmp_path / "time.png")
    draw_plot(cells, tmp_path / "busbw.png", shown="busbw")
    pictures = [(tmp_path / name).read_bytes() for name in ("time.png", "busbw.png")]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_plot([figures(case="barrier", nbytes=0)], tmp_path / "none.png")


# ------------------------------------------------------------------------------------------------- meeting, neighbours


def moments(num_cores: int) -> list[tuple[float, float]]:
    """When this rank came to each meeting, and when it left; one clock for all processes of a machine."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    with meeting.open_meeting(rank, dist.get_world_size(), num_cores=num_cores) as meet:
        for turn in range(20):
            time.sleep(0.001 * ((turn + rank) % 3))
            came_s = time.monotonic()
            meet()
            found.append((came_s, time.monotonic()))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("num_cores", [1, 4])
@pytest.mark.parametrize("world_size", [1, 3])
def test_nobody_leaves_a_meeting_before_everyone_has_come(num_cores: int, world_size: int) -> None:
    for turn in zip(*run_ranks(moments, world_size, num_cores), strict=True):
        assert max(came_s for came_s, _ in turn) <= min(left_s for _, left_s in turn)


def test_own_processes_are_no_bystanders() -> None:
    everyone, others = Watch([]), Watch([os.getpid()])
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    counted, not_counted = everyone.so_far(), others.so_far()
    assert counted.num_cores > not_counted.num_cores
    assert f"({os.getpid()})" not in not_counted.greediest
    assert os.getpid() in running(sys.orig_argv[0])


# --------------------------------------------------------------------------------------------------------- correctness


def wrong_results() -> list[str]:
    """What the checks say to all-reduces that are none."""
    dist.init_process_group("gloo")
    rank, numel = dist.get_rank(), 1024
    comm: Any = SimpleNamespace(rank=rank, world_size=dist.get_world_size())
    cell = collectives._Cell(comm, meet=lambda: None, case=CASES["ordinary"], nbytes=4 * numel)
    buffer, theirs = torch.zeros(numel), torch.zeros(numel)

    def all_but_one() -> None:
        last = buffer[-1].clone()
        dist.all_reduce(buffer)
        buffer[-1] = last

    def rounded_apart() -> None:
        dist.all_reduce(buffer)
        buffer[0] *= 1 + rank * torch.finfo(torch.float32).eps

    said = []
    gloo = collectives._Side(lambda: dist.all_reduce(theirs), theirs)
    for call in (lambda: dist.all_reduce(buffer), all_but_one, rounded_apart):
        try:
            cell._check(collectives._Side(call, buffer), gloo)
            said.append("")
        except WrongSum as error:
            said.append(str(error))
    pace = collectives._Pace(num_repetitions=1, num_calls=3)
    buffer.fill_(float(comm.world_size) ** pace.num_calls)
    cell._expect_sum(collectives._Side(gloo.call, buffer), pace)
    buffer[3] = 1.0
    with pytest.raises(WrongSum, match="a sum of ones"):
        cell._expect_sum(collectives._Side(gloo.call, buffer), pace)
    dist.destroy_process_group()
    return said


def test_a_wrong_sum_and_unequal_bits_are_seen() -> None:
    for right, wrong, unequal in run_ranks(wrong_results, 2):
        assert right == ""
        assert "the sum is not Gloo's" in wrong
        assert "different bits" in unequal


# ------------------------------------------------------------------------------------------------------- command line

Refusal = Callable[..., str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs the command line in this process, and returns the one line with which it refuses."""

    def refuse(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        said = capsys.readouterr().err.splitlines()
        lines = [line for line in said if not line.startswith("warning: before anything has started")]
        assert left.value.code == 2
        assert len(lines) == 1, lines
        return lines[0]

    return refuse


def test_the_shortest_run_measures_and_reports(tmp_path: Path) -> None:
    kept = tmp_path / "figures.jsonl"
    asked = ("--workers", 2, "--sizes", "4KB,2MB", "--turns", 1, "--turn-s", 0.01)
    words = (*asked, "--cases", "allocated,transport,barrier", "--algorithms", "ring", "--json", kept)
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on one host" in done.stdout
    cells = [from_json(line) for line in kept.read_text().splitlines()]
    named = [(cell.case, cell.nbytes) for cell in cells]
    sizes = (4096, 2 << 20)
    assert named == [
        *((case, nbytes) for case in ("allocated", "transport") for nbytes in sizes),
        ("barrier", 0),
        *(("ring", nbytes) for nbytes in sizes),
    ]
    assert all(cell.time_s > 0 and cell.gloo_s > 0 and cell.ranks_per_host == (2,) for cell in cells)
    assert all((cell.predicted_s is None) == (cell.case == "barrier") for cell in cells)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sizes", "1XB"), "size '1XB'"),
        (("--sizes", ","), "nothing to measure"),
        (("--cases", "allocated,mine"), "case 'mine' is unknown"),
        (("--workers", "1"), "--workers 1: want numbers from 2 up"),
        (("--turns", "0"), "must be above 0"),
        (("--netbed", "2x2@1furlong"), "netbed '2x2@1furlong'"),
        (("--plot", "/no/such/folder/a.png"), "there is no folder /no/such/folder"),
        (("--turns", "many"), "invalid int value"),
    ],
)
def test_bad_input_is_refused_in_one_line(words: tuple[str, ...], message: str, refusal: Refusal) -> None:
    assert message in refusal(*words)


def test_an_algorithm_that_is_not_there_is_refused_in_one_line_by_the_ranks(refusal: Refusal) -> None:
    assert "algorithm 'rong' is not possible here; choose among" in refusal(
        "--workers", "2", "--algorithms", "ring,rong"
    )


def test_a_netbed_without_root_or_tools_is_refused_in_one_line(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--netbed needs root" in refusal("--netbed", "2x1")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "--netbed needs ip, tc, unshare: install iproute2" in refusal("--netbed", "2x1")


@pytest.mark.parametrize("world_size", range(1, 9))
def test_ones_summed_so_often_are_counted_exactly(world_size: int) -> None:
    """Also half-way: Gloo adds one rank after another."""
    ones = torch.ones(1)
    for count in range(collectives._exact_sums(world_size)):
        partial = torch.zeros(1)
        for number in range(1, world_size + 1):
            partial += ones
            assert partial.item() == number * world_size**count
        ones = partial
