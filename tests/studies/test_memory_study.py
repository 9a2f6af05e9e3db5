"""The study of memory: its shortest run. (`tests/lab/test_bench_counts.py` tests how memory is counted.)"""

from __future__ import annotations

import pytest
from memory import MeasureMemory, MemoryCell
from ranks import run_ranks

from ddp.lab.bench.workloads import WORKLOADS


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
