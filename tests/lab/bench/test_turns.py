"""Tests what the benchmarks count: memory of processes at its peak, and bytes of tensors on a host."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import torch
from ranks import run_ranks

import ddp
from ddp.comm.objects import all_gather_object
from ddp.lab.bench.turns import bytes_in, sampling, spans_of
from ddp.strategies.host_store import shared_by_host

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
                with sampling(os.getpid(), neighbour.pid) as take_both:
                    assert 48 * MIB <= take_both() - before <= 96 * MIB, "once, and what the neighbour has of its own"
                neighbour.communicate()


def held() -> list[int]:
    """Bytes on this host of: memory that all ranks share; a part of it, too; memory of each rank's own; both."""
    comm = ddp.init(abort_s=30)
    shared = shared_by_host(comm, 3 * mmap.PAGESIZE)
    part = shared[mmap.PAGESIZE * comm.rank :][: mmap.PAGESIZE]
    own, mine = torch.zeros(100), torch.zeros(10, 4)
    plane = comm.allocate(50, torch.float64)
    cases = [[shared], [shared, part], [part], [own], [own, own[50:], mine, mine.T], [plane], [plane, own, shared]]
    found = [all_gather_object(comm, spans_of(tensors)) for tensors in cases]
    ddp.shutdown()
    return [bytes_in(span for spans in case for span in spans) for case in found]


def test_memory_that_ranks_share_is_held_once() -> None:
    whole = 3 * mmap.PAGESIZE
    expected = [whole, whole, 2 * mmap.PAGESIZE, 800, 800 + 320, 800, 800 + 800 + whole]
    assert run_ranks(held, 2) == [expected, expected]
