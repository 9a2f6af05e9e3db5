"""Tests what both benchmarks share: quantities, places, turns, strangers, the barrier, reports and refusals.

Tests: ddp/units.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from rich.console import Console

from ddp.__main__ import main
from ddp.errors import ConfigError
from ddp.lab.bench.collectives import CollectiveCell, open_barrier
from ddp.lab.bench.command import BenchSite, by_place, from_json, print_report, strangers, to_json
from ddp.lab.bench.step import StepCell
from ddp.lab.bench.turns import Cell, take_turns
from ddp.lab.forecast.prices import PAYLOAD
from ddp.process.memory import available_cores
from ddp.units import format_size, format_time, parse_size
from recipes.studies.bed import Bed
from recipes.studies.plots import draw

MIB = 1 << 20


def collective(**changes: Any) -> CollectiveCell:
    """Returns a cell of four ranks: 1 MB in 1 ms, twice as fast as Gloo."""
    fields = {
        "place": "4 ranks",
        "name": "ordinary 1MB",
        "turns_s": {"ours": [1e-3, 1e-3, 2e-3], "Gloo": [2e-3, 1e-3, 6e-3]},
        "case": "ordinary",
        "algorithm": "ring",
        "nbytes": MIB,
        "world_size": 4,
        "wire_s": None,
        "delay_s": None,
    }
    return CollectiveCell(**{**fields, **changes})


def step(**changes: Any) -> StepCell:
    """Returns a cell: in the median of three turns, ours takes 1.5 × alone, and torch takes 2 × ours."""
    fields = {
        "place": "2 ranks",
        "name": "mlp-25m",
        "turns_s": {"ours": [0.15, 0.3, 0.12], "torch": [0.3, 0.3, 0.36], "alone": [0.1, 0.2, 0.1]},
        "num_parameters": 10,
        "gradient_bytes": MIB,
        "wire_s": None,
        "over": ["ours"],
    }
    return StepCell(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------ quantities and places


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4B", 4), ("1KB", 1024), ("64kb", 65536), ("1.5MB", 1572864), ("25MB", 26214400)]
)
def test_a_size_is_read_and_written(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "0B", "6B", "-4B", "1", "KB", "1TB", "1e3B", "1.0001KB"])
def test_no_size_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}': want a multiple of 4 bytes .*, with its unit, e.g. 4B"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.3e-6, "8.30 µs"), (9.999e-4, "1.00 ms"), (0.0124, "12.4 ms"), (0.2, "200 ms"), (1.5, "1.50 s")],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("text", "bed"),
    [
        ("2x2@1gbit", (2, 2, 1e9, 0.0)),
        ("4x1@5ms", (4, 1, None, 0.005)),
        ("2x2@100mbit@500us", (2, 2, 1e8, 0.0005)),
        ("3x1", (3, 1, None, 0.0)),
    ],
)
def test_a_bed_is_read(text: str, bed: tuple[int, int, float | None, float]) -> None:
    assert Bed.parse(text) == Bed(text, *bed)


@pytest.mark.parametrize(
    "text", ["", "2", "2x", "0x2", "1x1", "2x2@", "2x2@fast", "2x2@1gbit@2gbit", "2x2@1gbit@1ms@2ms"]
)
def test_no_bed_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match=f"netbed '{text}'"):
        Bed.parse(text)


def test_the_headline_says_where_and_beside_whom() -> None:
    cores = f"{available_cores()} cores"
    assert BenchSite().title(2) == f"2 ranks on one host, {cores}"
    assert BenchSite(beside=1).title(1) == f"1 rank on one host, {cores}, beside 1 process that only computes"
    on_bed = BenchSite(Bed.parse("2x2@1gbit"), beside=2).title(4, 2)
    assert on_bed == f"4 ranks on 2 hosts (netbed 2x2@1gbit), {cores}, beside 2 processes that only compute"


def test_the_wire_counts_hosts_and_payload() -> None:
    # Two hosts: each sends half of the tensor, twice, whatever number of ranks they have.
    assert BenchSite(Bed.parse("2x4@8kbit")).wire_s(1000) == pytest.approx(1.0 / PAYLOAD)
    assert BenchSite(Bed.parse("4x1@8kbit")).wire_s(1000) == pytest.approx(1.5 / PAYLOAD)
    assert BenchSite(Bed.parse("4x1@5ms")).wire_s(1000) is None
    assert BenchSite().wire_s(1000) is None


# --------------------------------------------------------------------------------------------------------------- turns


def test_turns_alternate_and_ratios_are_taken_turn_by_turn() -> None:
    order: list[str] = []
    rivals: dict[str, Callable[[], float]] = {
        name: lambda name=name: order.append(name) or float(len(order))  # type: ignore[misc, func-returns-value]
        for name in ("ours", "torch")
    }
    turns_s = take_turns(rivals, 3)
    assert order == ["ours", "torch", "torch", "ours", "ours", "torch"]
    assert turns_s == {"ours": [1.0, 4.0, 5.0], "torch": [2.0, 3.0, 6.0]}
    cell = step()
    assert cell.median_s("ours") == 0.15
    assert cell.ratios("torch", "ours") == pytest.approx([2.0, 1.0, 3.0])
    assert cell.speedup == pytest.approx(2.0)


def test_what_was_not_measured_has_no_figure() -> None:
    cell = step(turns_s={"ours": [0.1]})
    assert cell.ratios("torch", "ours") == []
    assert (cell.median_s("naive"), cell.speedup, cell.spread("torch", "ours")) == (None, None, "")
    assert cell.columns() == dict.fromkeys(cell.columns(), "") | {"model": "mlp-25m", "variant": "ours", "step": "100"}


# --------------------------------------------------------------------------------------------------- strangers, barrier


def is_running(pid: int) -> bool:
    """Returns False also for a zombie, which has ended but has not been waited for."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, "never came"
        time.sleep(0.01)


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_strangers_compute_until_the_block_ends() -> None:
    with strangers(2) as pids:
        assert len(pids) == 2
        wait_for(lambda: all(cpu_ticks(pid) > 5 for pid in pids))
    assert not any(map(is_running, pids))


def test_strangers_end_with_a_parent_that_is_killed() -> None:
    script = "from ddp.lab.bench.command import strangers\nwith strangers(1) as pids: print(*pids, flush=True), input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_running(pid))


def moments(is_crowded: bool) -> list[tuple[float, float]]:
    """Returns when this rank reached each barrier, and when it left, by the clock that all processes share."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    with open_barrier(rank, dist.get_world_size(), is_crowded=is_crowded) as barrier:
        for turn in range(20):
            time.sleep(0.001 * ((turn + rank) % 3))
            came_s = time.monotonic()
            barrier()
            found.append((came_s, time.monotonic()))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("is_crowded", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_nobody_leaves_a_barrier_before_everyone_has_come(is_crowded: bool, world_size: int) -> None:
    for turn in zip(*run_ranks(moments, world_size, is_crowded), strict=True):
        assert max(came_s for came_s, _ in turn) <= min(left_s for _, left_s in turn)


# -------------------------------------------------------------------------------------------------------------- reports


def test_the_summary_names_cells_where_ours_is_slower() -> None:
    cells = [collective(), collective(name="ring 1MB", turns_s={"ours": [1.0], "Gloo": [0.9]})]
    assert CollectiveCell.summary(cells) == ["slower than Gloo: in 1 of 2 cells: ring 1MB (0.90×)"]
    assert StepCell.summary([step(), step(turns_s={"naive": [1.0]})]) == ["slower than torch: nowhere"]
    assert StepCell.summary([step(turns_s={"naive": [1.0]})]) == []


@pytest.mark.parametrize("cell", [collective(wire_s=0.01), step()])
def test_json_holds_what_was_measured(cell: Cell) -> None:
    assert from_json(to_json([cell]), type(cell)) == [cell]
    assert json.loads(to_json([cell]))[0]["speedup"] == pytest.approx(2.0)


def test_tables_show_what_there_is() -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    cells: list[Cell] = [collective(delay_s=5e-4), collective(wire_s=9e-4, place="beside 1")]
    cells += [step(wait_s={"ours": 0.037}), step(turns_s={"alone": [1.0]}, place="4 ranks of step")]
    print_report(cells, console)
    text = console.export_text()
    for expected in (
        "1.57",
        "2.00",
        "1.00 – 3.00",
        "90%",
        "beside 1",
        "+50.0%",
        "5000",
        "37.0",
        "4 ranks of step",
        "bus bandwidth, busbw of nccl-tests: algbw × 2(n−1)/n",
    ):
        assert expected in text
    assert "in_backward" not in text


def test_a_plot_is_drawn_with_a_panel_for_every_place(tmp_path: Path) -> None:
    sizes, cases = (1024, MIB, 25 * MIB), ("ring", "tree")
    cells = [collective(nbytes=n, place=place, case=case) for n in sizes for place in "ab" for case in cases]
    draw(by_place([*cells, collective(case="barrier", nbytes=0)]), tmp_path / "times.png")
    draw(by_place([step(name=name, place=place) for place in "ab" for name in ("one", "two")]), tmp_path / "steps.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("times.png", "steps.png"))


# --------------------------------------------------------------------------------------------------------- command line

Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a command in this process, and returns the one line with which it refuses."""

    def refuse(*words: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(words)
        lines = capsys.readouterr().err.splitlines()
        assert left.value.code == 2
        assert len(lines) == 1, lines
        return lines[0]

    return refuse


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench collectives --sizes 1XB", "size '1XB'"),
        ("bench collectives --sizes ,", "--sizes ,: want at least one"),
        ("bench collectives --cases allocated,mine", "case 'mine' is unknown; choose among allocated"),
        ("bench collectives --workers 1", "--workers: 1: give a whole number from 2 to"),
        ("bench collectives --netbed 2x2@1furlong", "netbed '2x2@1furlong'"),
        ("bench collectives --netbed 2x2 --workers 2", "not allowed with argument"),
        ("bench collectives --plot a.png --cases barrier", "--plot has nothing to draw, since a barrier has no size"),
        ("bench collectives --plot /no/such/folder/a.png", "there is no folder /no/such/folder"),
        ("bench collectives --turns many", "--turns: many: give a whole number from 1 up"),
        ("bench collectives --beside -1", "--beside: -1: give a whole number from 0 to"),
        ("bench collectives --workers 2,1000000", "--workers: 1000000: give a whole number from 2 to"),
        ("bench step --models digits", "model 'digits' is unknown; choose among small-mlp"),
        ("bench step --models ,", "--models ,: want at least one"),
        ("bench step --variants ours,theirs", "variant 'theirs' is unknown; choose among ours"),
        ("bench step --variants ,", "--variants ,: want at least one"),
        ("bench step --workers two", "--workers: two: give a whole number from 1 to"),
        ("bench step --turns 0", "give a whole number from 1 up"),
        ("bench step --plot a.png --variants ours,torch", 'relative to the variant "alone"'),
        ("bench step --over ours,naive --variants ours,torch", "--over: 'naive' is unknown; choose among ours, torch"),
        ("bench step --optimizer adam", "invalid choice: 'adam'"),
        ("bench step --netbed 2x1 --memory", "--memory measures on this host: leave --netbed out"),
        ("bench step --json /no/such/folder/a.json", "there is no folder /no/such/folder"),
    ],
)
def test_bad_input_is_refused_in_one_line(words: str, message: str, refusal: Refusal) -> None:
    assert message in refusal(*words.split())


def test_an_algorithm_that_needs_several_hosts_is_refused_in_one_line_by_the_ranks(refusal: Refusal) -> None:
    line = refusal("bench", "collectives", "--workers", "2", "--cases", "ring,hierarchical")
    assert "'hierarchical' is not possible here. Choose one of" in line


def test_a_netbed_without_root_or_tools_is_refused_in_one_line(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--netbed needs root" in refusal("bench", "step", "--netbed", "2x1")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "--netbed needs ip, tc, unshare: install iproute2" in refusal("bench", "collectives", "--netbed", "2x1")
