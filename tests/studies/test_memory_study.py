"""The study of memory: how it is counted, and its shortest run."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
from memory import MeasureMemory, MemoryCell, sampling
from ranks import run_ranks

from ddp.bench.workloads import WORKLOADS

MIB = 1 << 20


def test_an_allocation_is_seen_also_after_its_end() -> None:
    with sampling() as take:
        before = take()
        with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages[:: mmap.PAGESIZE] = b"\1" * (64 * MIB // mmap.PAGESIZE)
            seen = take() - before
        assert 60 * MIB <= seen <= 72 * MIB
        take()  # may begin with a sample from before the end
        assert take() - before <= 8 * MIB


NEIGHBOUR = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
    pages[:: mmap.PAGESIZE] = b"x" * (len(pages) // mmap.PAGESIZE)
    print("mapped", flush=True)
    sys.stdin.read()
"""


def test_a_shared_mapping_is_counted_in_part() -> None:
    with os.fdopen(os.memfd_create("shared"), "w+b") as file, sampling() as take:
        file.truncate(64 * MIB)
        before = take()
        with mmap.mmap(file.fileno(), 0) as pages:
            pages[:: mmap.PAGESIZE] = b"\1" * (64 * MIB // mmap.PAGESIZE)
            assert 48 * MIB <= take() - before <= 72 * MIB  # the kernel may have taken some back
            command = [sys.executable, "-I", "-S", "-c", NEIGHBOUR, f"/proc/{os.getpid()}/fd/{file.fileno()}"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as neighbour:
                assert neighbour.stdout is not None
                assert neighbour.stdout.readline() == b"mapped\n"
                take()  # what came before the neighbour
                assert 20 * MIB <= take() - before <= 40 * MIB
                neighbour.communicate()


def memory_of(variant: str) -> list[MemoryCell]:
    return MeasureMemory("digits-cnn", variant)()


@pytest.mark.parametrize("variant", ["ours", "torch"])
def test_the_memory_of_a_variant_is_that_of_the_highest_rank(variant: str) -> None:
    (cell,), same = run_ranks(memory_of, 2, variant)
    assert [cell] == same
    assert cell.columns().keys() == cell.legend.keys()
    assert (cell.name, cell.variant) == ("digits-cnn", variant)
    num_bytes = 4 * sum(p.numel() for p in WORKLOADS["digits-cnn"].make().parameters())
    assert cell.peak >= 3 * num_bytes  # parameters, gradients, momentum
