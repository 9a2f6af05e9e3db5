"""Traffic: bytes by each hook's formula, the network by the cost model, a step by its buckets; the hint of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_hooks import HOOKS, each_rank
from torch import nn

from ddp.comm.communicator import Communicator
from ddp.commands.explain import OFFERS, PLAIN, Gradients, table
from ddp.gradients import DenseStart, ErrorFeedback, PowerSGD, RandomK, Sign, TopK
from ddp.gradients.hooks.traffic import Cost, Traffic, predicted
from ddp.train.progress import too_dear, worth_it

ROWS, COLUMNS = 192, 96  # whole rows and blocks, so that no padding blurs a formula
NUMEL = ROWS * COLUMNS
KEPT = math.ceil(0.05 * NUMEL)


def matrix() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(ROWS, COLUMNS))]


FORMULAS: list[tuple[dict[str, Any], float, str]] = [
    ({}, 2 * 4 * NUMEL, "reduced"),
    ({"wire": "bf16"}, 2 * 2 * NUMEL, "reduced"),
    ({"wire": "int8"}, 2 * (NUMEL + 4 * NUMEL // 256), "reduced"),
    ({"hook": ErrorFeedback(Sign())}, NUMEL / 8 + 4 * ROWS, "gathered"),
    ({"hook": ErrorFeedback(TopK(0.05, warmup_steps=9))}, 8 * KEPT, "gathered"),
    ({"hook": RandomK(0.25)}, 2 * 4 * NUMEL / 4, "reduced"),
    ({"hook": DenseStart(ErrorFeedback(PowerSGD(4)), 5)}, 2 * 4 * 4 * (ROWS + COLUMNS), "reduced"),
]


@pytest.mark.parametrize(("how", "nbytes", "kind"), FORMULAS)
@pytest.mark.parametrize("num_hosts", [2, 3])
def test_bytes_are_those_of_the_formula(how: dict[str, Any], nbytes: float, kind: str, num_hosts: int) -> None:
    def program(comm: Communicator) -> Traffic:
        return predicted(comm, [matrix(), matrix()], **how)

    for found in each_rank(num_hosts, program):
        # Of what is gathered, every host sends its own part to all others, or passes others' on: that is as much.
        times = (num_hosts - 1) / num_hosts if kind == "reduced" else num_hosts - 1
        assert found.link_bytes == pytest.approx(2 * times * nbytes, rel=0.01)
        assert found.network_s > 0
        assert (found.encoding_s > 0) == ("hook" in how)


def test_a_dry_run_sends_nothing_and_leaves_the_hook_as_it_was() -> None:
    def program(comm: Communicator) -> tuple[int, dict[str, Any]]:
        comm.plan.predict(4)
        before, hook = comm.num_calls, HOOKS["power"]()
        found = predicted(comm, [matrix()], hook=hook)
        assert len(found.buckets) == 1
        kept = {name: memory.committed | memory.pending for name, memory in hook.memories().items()}
        return comm.num_calls - before, kept

    for num_calls, kept in each_rank(2, program):
        assert num_calls == 3  # questions about a sum in memory and two all-reduces, which are answered without sending
        assert not any(kept.values())


def test_a_step_is_as_long_as_its_last_bucket_takes() -> None:
    plain = Traffic([Cost(100, 100, 0, 0.5), Cost(300, 300, 0, 1.5)])
    assert plain.step_s(0) == pytest.approx(2.0)
    # Computing for 0.9 s: bucket 0 is ready after 0.3 + 0.15 s, and its 0.5 s end behind the second one's 0.9 s.
    assert plain.step_s(0.9) == pytest.approx(0.45 + 2.0)
    encoded = Traffic([Cost(100, 1, 0.1, 0.0), Cost(300, 3, 0.2, 0.0)])
    assert encoded.step_s(0.9) == pytest.approx(0.9 + 0.3)
    assert (plain.link_bytes, encoded.link_bytes, encoded.encoding_s) == (400, 4, pytest.approx(0.3))


@pytest.mark.parametrize(
    ("nbytes", "side", "num"), [(4, 1, 1), (100, 5, 1), (4 << 20, 1024, 1), (100 << 20, 1024, 25), (25 << 20, 1045, 6)]
)
def test_gradients_of_a_size_are_matrices(nbytes: int, side: int, num: int) -> None:
    gradients = Gradients.of(nbytes)
    assert gradients == (side, num)
    assert sum(map(len, gradients.buckets(torch.device("meta")))) == num


def test_the_table_has_a_line_for_every_offer() -> None:
    found = {name: Traffic([Cost(8, 8e6 / (1 + n), n / 1e3, 1 / (1 + n))]) for n, name in enumerate(OFFERS)}
    header, *lines = table(found, compute_s=0.1)
    assert len(lines) == len(OFFERS)
    assert len({len(line) for line in [header, *lines]}) == 1
    assert lines[0].split() == [*PLAIN.split(), "8.00", "MB", "-", "1.00", "s", "1.10", "s", "1.00"]
    assert lines[1].split()[-1] == "1.83"  # 1.1 s ÷ 0.601 s


def test_a_hint_says_what_would_be_saved_or_is_too_dear() -> None:
    slow, quick = Traffic([Cost(8, 104e6, 0, 8.4)]), Traffic([Cost(8, 0.36e6, 0.1, 0.1)])
    assert worth_it(slow, quick, step_s=8.7, wait_s=8.4) == (
        "waiting for gradients takes 97% of a step; with hook=powersgd, in Python "
        "hook=ErrorFeedback(PowerSGD(4, warm_start=True, seed=0)), each host would send 0.36 MB in the place of 104, "
        "and a step would take about 500 ms in the place of 8.70 s"
    )
    assert worth_it(slow, quick, step_s=0.52, wait_s=0.2) == ""
    assert too_dear("wire='int8'", quick, slow, 0.3) == ""
    assert too_dear("wire='int8'", slow, quick, 0.3) == (
        "wire='int8' costs more than it saves here: by the cost model a step takes 8.70 s with it, and 500 ms without"
    )
