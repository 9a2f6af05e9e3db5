"""Tests the benchmark of collectives: its figures, what it does with wrong results, and its shortest run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ddp.__main__ import main
from ddp.lab.bench.collectives import CASES, Case, CollectiveCell, TimedCall, WrongSum, check
from ddp.lab.bench.command import from_json


def test_the_bandwidth_is_the_bus_bandwidth_of_nccl_tests() -> None:
    for world_size, factor in ((2, 1.0), (4, 1.5), (8, 1.75)):
        cell = CollectiveCell(
            place="",
            name="",
            turns_s={"ours": [1e-3]},
            case="ring",
            algorithm="ring",
            nbytes=1000,
            world_size=world_size,
            wire_s=None,
            delay_s=None,
        )
        assert cell.bus_bytes_s == pytest.approx(1e6 * factor)


def test_a_case_is_found_by_its_name_or_made_for_an_algorithm() -> None:
    assert Case.named("transport") is CASES["transport"]
    assert Case.named("ring") == Case("ring", algorithm="ring")
    assert Case.named("shared_memory+ring") == Case("shared_memory+ring", "shared_memory+ring", is_allocated=True)


def wrong_results() -> list[str]:
    """Returns what the check says to all-reduces, of which two are none."""
    dist.init_process_group("gloo")
    comm: Any = dist  # which has a rank and a world size, too
    comm.rank, comm.world_size = dist.get_rank(), dist.get_world_size()
    buffer, theirs = torch.zeros(1024), torch.zeros(1024)

    def all_but_one() -> None:
        last = buffer[-1].clone()
        dist.all_reduce(buffer)
        buffer[-1] = last

    def rounded_apart() -> None:
        dist.all_reduce(buffer)
        buffer[0] *= 1 + comm.rank * torch.finfo(torch.float32).eps

    said = []
    gloo = TimedCall(dist.barrier, lambda: dist.all_reduce(theirs), theirs)
    for call in (lambda: dist.all_reduce(buffer), all_but_one, rounded_apart):
        try:
            check(comm, TimedCall(dist.barrier, call, buffer), gloo, "mine")
            said.append("")
        except WrongSum as error:
            said.append(str(error))
    dist.destroy_process_group()
    return said


def test_a_wrong_sum_and_unequal_bits_are_seen() -> None:
    for right, wrong, unequal in run_ranks(wrong_results, 2):
        assert right == ""
        assert "the sum is not Gloo's" in wrong
        assert "different bits" in unequal


@pytest.mark.slow
def test_the_shortest_run_measures_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "cells.json"
    words = ["--workers", "2", "--sizes", "4KB", "--turns", "1", "--beside", "1", "--json", str(kept)]
    assert main(["bench", "collectives", *words, "--cases", "allocated,ring,barrier"]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks on one host" in printed and "beside 1 process" in printed
    cells = from_json(kept.read_text(), CollectiveCell)
    assert [(cell.case, cell.nbytes) for cell in cells] == [("allocated", 4096), ("ring", 4096), ("barrier", 0)]
    for cell in cells:
        assert cell.world_size == 2
        assert all(len(turns) == 1 and turns[0] > 0 for turns in cell.turns_s.values())
