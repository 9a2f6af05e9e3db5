"""The benchmark of training steps: figures, goals, tables and picture, how memory is counted, and its shortest runs."""

from __future__ import annotations

import dataclasses
import io
import json
import mmap
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rich.console import Console

import ddp
from ddp.bench import memory, step
from ddp.bench.memory import MemoryFigures, measure_memory
from ddp.bench.pss import Memory, Sampler
from ddp.bench.step import PAYLOAD, VARIANTS, StepFigures, measure_step
from ddp.bench.step_report import (
    EVERYWHERE,
    GOALS,
    draw_plot,
    goal_of,
    print_memory,
    print_overlap,
    print_report,
    summary,
    to_json,
)
from ddp.bench.workloads import WORKLOADS, TinyLayers
from ddp.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_step"
MIB = 1 << 20


def figures(**changes: Any) -> StepFigures:
    """Two workers, three turns; ours half a time longer than alone, torch's twice as long as ours, in the median."""
    cell = StepFigures(
        workload="mlp-25m",
        world_size=2,
        num_hosts=1,
        num_cores=2,
        num_parameters=10,
        gradient_bytes=100_000_000,
        turns_s={"ours": (0.15, 0.3, 0.12), "torch": (0.3, 0.3, 0.36), "alone": (0.1, 0.2, 0.1)},
    )
    return dataclasses.replace(cell, **changes)


def with_ratios(speedup: float, cost: float, **changes: Any) -> StepFigures:
    return figures(turns_s={"ours": (1 + cost,), "torch": (speedup * (1 + cost),), "alone": (1.0,)}, **changes)


# ------------------------------------------------------------------------------------------------------------- figures


def test_ratios_are_taken_turn_by_turn() -> None:
    cell = figures()
    assert cell.step_s("ours") == 0.15
    assert cell.step_s("naive") is None
    assert cell.speedups == pytest.approx([2.0, 1.0, 3.0])
    assert cell.speedup == pytest.approx(2.0)
    assert cell.cost == pytest.approx(0.5)  # of 0.5, 0.5, 0.2; medians of times would say the same of 0.15 and 0.1
    assert cell.per_parameter_s == pytest.approx(0.005)  # of 0.05, 0.1 and 0.02 seconds


def test_what_was_not_measured_has_no_figure() -> None:
    cell = figures(turns_s={"ours": (0.1,)})
    assert cell.speedups == []
    assert (cell.speedup, cell.cost, cell.per_parameter_s) == (None, None, None)


def test_the_wire_counts_hosts_and_payload() -> None:
    # Two hosts: each sends half of the gradients, twice, whatever stands in them.
    assert figures(num_hosts=2).wire_s(1e9) == pytest.approx(0.8 / PAYLOAD)
    assert figures(num_hosts=4).wire_s(1e9) == pytest.approx(1.2 / PAYLOAD)
    assert figures(num_hosts=1).wire_s(1e9) == 0.0


# --------------------------------------------------------------------------------------------------------------- goals


@pytest.mark.parametrize(("workload", "world_size"), GOALS)
def test_a_goal_is_reached_from_its_figures_on(workload: str, world_size: int) -> None:
    assert workload in WORKLOADS
    goal = GOALS[workload, world_size]
    assert goal.cost is not None
    place = {"workload": workload, "world_size": world_size}
    just, nearly = 1e-9, 0.01
    for speedup, cost, num_missed in (
        (goal.speedup + just, goal.cost - just, 0),
        (goal.speedup - nearly, goal.cost - just, 1),
        (goal.speedup + just, goal.cost + nearly, 1),
        (goal.speedup - nearly, goal.cost + nearly, 2),
    ):
        cell = with_ratios(speedup, cost, **place)
        assert goal_of(cell) == goal
        assert len(goal.misses(cell)) == num_missed


@pytest.mark.parametrize(
    "place",
    [{"world_size": 4}, {"world_size": 2, "num_hosts": 2}, {"workload": "tiny-1000"}],
)
def test_nowhere_may_ours_be_slower_than_torchs(place: dict[str, Any]) -> None:
    assert goal_of(figures(**place)) == EVERYWHERE
    assert not EVERYWHERE.misses(with_ratios(1.0, 5.0, **place))
    assert EVERYWHERE.misses(with_ratios(0.99, 0.0, **place))


def test_the_summary_counts_goals_and_names_who_disturbed() -> None:
    cells = [
        with_ratios(1.5, 0.2),
        with_ratios(1.2, 0.1, workload="digits-cnn"),
        with_ratios(0.9, 0.1, workload="tiny-1000", world_size=4),
        figures(turns_s={"naive": (1.0,)}),
        figures(turns_s={"ours": (1.0,), "alone": (1.0,)}, others_cores=0.5, greediest="python (7)"),
    ]
    assert summary(cells) == [
        "goals reached: 2 of 4; missed: mlp-25m (2 workers) +20.0% of +12%; tiny-1000 (4 workers) 0.90 of 1×",
        "! 1 of 5 cells were disturbed; at worst others took 0.5 of a core, most of it python (7)",
    ]


# --------------------------------------------------------------------------------------------------------------- shown


def test_json_holds_what_was_measured_and_what_follows() -> None:
    (kept,) = json.loads(to_json([figures()]))
    assert kept["turns_s"] == {name: list(turns) for name, turns in figures().turns_s.items()}
    assert (kept["speedup"], kept["speedup_min"], kept["speedup_max"]) == pytest.approx((2.0, 1.0, 3.0))
    assert (kept["wanted_speedup"], kept["wanted_cost"], kept["is_reached"]) == (1.4, 0.12, False)
    (nothing,) = json.loads(to_json([figures(turns_s={"naive": (1.0,)})]))
    assert (nothing["speedup"], nothing["speedup_min"], nothing["is_reached"]) == (None, None, None)


def test_tables_show_what_there_is() -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    alone = figures(turns_s={"alone": (1.0,)}, world_size=4)
    print_report([figures(), alone], console)
    turns_s = {**figures().turns_s, "reduce": (0.1, 0.1, 0.1)}
    print_overlap([figures(num_hosts=2, turns_s=turns_s, wait_s=0.04)], console, rate_bit_s=1e9)
    print_memory([memory_figures()], console)
    text = console.export_text()
    for expected in (
        "2 workers on 2 cores",
        "4 workers",
        "1.00 – 3.00",
        "+50.0%",
        "1.4×, +12% ✗",
        "5000",
        "837",
        "0.40",
    ):
        assert expected in text


def memory_figures() -> MemoryFigures:
    building, training = Memory(3 * MIB, 2 * MIB, MIB, 0), Memory(5 * MIB, 2 * MIB, MIB, 2 * MIB)
    return MemoryFigures(
        workload="mlp-25m",
        variant="ours",
        world_size=2,
        building=building,
        training=training,
        num_samples=10,
        interval_s=0.005,
        longest_gap_s=0.01,
    )


def test_a_plot_is_drawn_for_every_number_of_workers(tmp_path: Path) -> None:
    cells = [figures(workload=name, world_size=n) for n in (2, 4) for name in ("mlp-25m", "tiny-1000")]
    cut = figures(turns_s={"ours": (9.0,), "alone": (1.0,)})
    draw_plot([*cells, cut], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_plot([figures(turns_s={"ours": (1.0,)})], tmp_path / "none.png")


# -------------------------------------------------------------------------------------------------------------- memory


def grown(sampler: Sampler, before: Memory) -> Memory:
    return sampler.take().by_process[0] - before


def test_an_allocation_is_seen_also_after_its_end() -> None:
    with Sampler([os.getpid()]) as sampler:
        before = sampler.take().by_process[0]
        with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages[:: mmap.PAGESIZE] = b"\1" * (64 * MIB // mmap.PAGESIZE)
            seen = grown(sampler, before)
        assert 60 * MIB <= seen.pss <= 72 * MIB
        assert 60 * MIB <= seen.anonymous <= 72 * MIB
        after = sampler.take()  # may begin with a sample from before the end
        assert grown(sampler, before).pss <= 8 * MIB
        assert after.num_samples >= 1
        assert 0 < after.interval_s <= after.longest_gap_s


NEIGHBOUR = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
    pages[:: mmap.PAGESIZE] = b"x" * (len(pages) // mmap.PAGESIZE)
    print("mapped", flush=True)
    sys.stdin.read()
"""


def test_a_shared_mapping_is_counted_in_part(tmp_path: Path) -> None:
    with (tmp_path / "shared").open("w+b") as file, Sampler([os.getpid()]) as sampler:
        file.truncate(64 * MIB)
        before = sampler.take().by_process[0]
        with mmap.mmap(file.fileno(), 0) as pages:
            pages[:: mmap.PAGESIZE] = b"\1" * (64 * MIB // mmap.PAGESIZE)
            assert 48 * MIB <= grown(sampler, before).pss <= 72 * MIB  # the kernel may have taken some back
            command = [sys.executable, "-I", "-S", "-c", NEIGHBOUR, file.name]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
                assert neighbour.stdout is not None
                assert neighbour.stdout.readline() == b"mapped\n"
                sampler.take()  # what came before the neighbour
                assert 20 * MIB <= grown(sampler, before).pss <= 40 * MIB
                neighbour.communicate()


def test_who_cannot_be_looked_into_is_an_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(OSError, match=f"/proc/{ended.pid}/smaps_rollup"):
        Sampler([ended.pid])


# ----------------------------------------------------------------------------------------------------------- workloads


def test_models_have_as_many_parameters_as_their_names_say() -> None:
    with torch.device("meta"):
        sizes = {name: [p.numel() for p in workload.make().parameters()] for name, workload in WORKLOADS.items()}
    assert round(sum(sizes["mlp-25m"]) / 1e6) == 25
    assert round(sum(sizes["gpt-10m"]) / 1e6) in (10, 11)
    assert sizes["gpt-10m"] == sizes["gpt-10m-b1"]
    assert len(sizes["tiny-1000"]) == 1000
    stem, small_stem = sizes["resnet18-32px"][0], sizes["resnet18-small-stem"][0]
    assert (stem, small_stem) == (64 * 3 * 7 * 7, 64 * 3 * 3 * 3)


def test_the_deep_model_of_tiny_layers_has_gradients_everywhere() -> None:
    model, x = TinyLayers(500), torch.randn(8, 4)
    model(x).square().sum().backward()
    norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    assert len(norms) == 1000
    assert norms.isfinite().all()
    assert norms.min() > 0


# ---------------------------------------------------------------------------------------------------------------- runs


def test_the_shortest_run_has_every_figure_and_the_same_on_all_ranks() -> None:
    cell, same = ddp.launch(
        measure_step,
        "digits-cnn",
        variants=VARIANTS,
        num_turns=1,
        steps_per_turn=1,
        broadcast_buffers=False,
        workers=2,
        threads_per_worker=1,
        timeout_s=60,
    )
    assert cell == same
    assert cell.turns_s.keys() == set(VARIANTS)
    assert all(len(turns) == 1 and turns[0] > 0 for turns in cell.turns_s.values())
    assert (cell.world_size, cell.num_hosts, cell.num_parameters) == (2, 1, 8)
    assert cell.gradient_bytes == 4 * sum(p.numel() for p in WORKLOADS["digits-cnn"].make().parameters())
    assert cell.wait_s is not None and cell.wait_s > 0


def memory_of(variant: str) -> MemoryFigures:
    return measure_memory("digits-cnn", variant, num_steps=2)


@pytest.mark.parametrize("variant", ["ours", "torch"])
def test_the_memory_of_a_variant_is_that_of_the_highest_rank(variant: str) -> None:
    kept, same = run_ranks(memory_of, 2, variant)
    assert kept == same
    assert (kept.variant, kept.world_size) == (variant, 2)
    num_bytes = 4 * sum(p.numel() for p in WORKLOADS["digits-cnn"].make().parameters())
    assert kept.peak_bytes >= 3 * num_bytes  # parameters, gradients, momentum
    assert kept.num_samples > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--models", "digits"), "model 'digits' is unknown; choose among digits-cnn"),
        (("--variants", "ours,theirs"), "variant 'theirs' is unknown; choose among ours"),
        (("--variants", ","), "no variant"),
        (("--variants", "reduce"), 'takes its buckets from "ours"'),
        (("--variants", "ours,reduce", "--memory"), "variant 'reduce' is unknown"),
        (("--workers", "two"), "--workers two: want numbers from 1 up"),
        (("--turns", "0"), "must be above 0"),
        (("--plot", "a.png", "--memory"), "--plot draws step times"),
        (("--plot", "a.png", "--variants", "ours,torch"), 'relative to the variant "alone"'),
        (("--json", "/no/such/folder/a.json"), "there is no folder /no/such/folder"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert len(said) == 1
    assert message in said[0]


def test_the_measuring_functions_refuse_what_they_do_not_know() -> None:
    for call in (
        lambda: step.measure_step("digits"),
        lambda: step.measure_step("digits-cnn", variants=["theirs"]),
        lambda: step.measure_step("digits-cnn", variants=["reduce"]),
        lambda: memory.measure_memory("digits-cnn", "reduce"),
    ):
        with pytest.raises(ConfigError):
            call()
