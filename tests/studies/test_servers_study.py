"""The study of parameter servers: what it takes for a sample that counted once, and for updates that were said."""

from __future__ import annotations

import pytest
import torch
from servers import EPOCHS, INTERVAL, SAMPLES, STEP, Ended, each_counted_once, is_said


def test_a_sample_that_counts_twice_or_never_is_noticed() -> None:
    order, weight = torch.arange(SAMPLES), torch.zeros(SAMPLES, dtype=torch.float64)
    for epoch in range(EPOCHS):
        for part in order.roll(7 * epoch).split(STEP):
            weight[part] -= 1 / len(part)
    assert each_counted_once(weight)
    first, second = torch.eye(SAMPLES, dtype=torch.float64)[:2]
    assert not each_counted_once(weight - first / STEP)
    assert not each_counted_once(weight - (first - second) / STEP)  # one twice, and another never


@pytest.mark.parametrize(
    ("num_gone", "num_said", "is_good"),
    [(0, 0, True), (3, 3, True), (3, 2, True), (1, 0, True), (3, 1, False), (2, 3, False), (INTERVAL + 1, 5, False)],
)
def test_updates_that_are_gone_are_few_and_said(num_gone: int, num_said: int, is_good: bool) -> None:
    assert is_said(Ended(torch.zeros(0), num_gone, num_said)) == is_good
