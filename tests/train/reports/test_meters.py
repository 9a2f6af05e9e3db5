"""The noise scale: its arithmetic on exact expectations, its words, and whole runs on a problem where it is known."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from flat import grouped
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn

import ddp
from ddp.gradients.reducer import ReduceScatter
from ddp.gradients.totals import Parts, Totals
from ddp.train.reports.meters import FEWEST, Estimate, NoiseScale


def measured(
    scale: NoiseScale, parts: list[int], num_samples: int, *, signal: float, noise: float, unit: float
) -> None:
    """Adds what is expected of parts of these sizes."""
    scale.add(
        unit * sum(size * signal + noise for size in parts),
        part_samples=sum(parts),
        num_parts=len(parts),
        square=unit * (signal + noise / num_samples),
        num_samples=num_samples,
    )


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(0, 50), st.floats(0.1, 100), st.floats(0.5, 1.5)
)
def test_parts_of_any_size_give_the_quotient_whatever_the_unit_is(parts, others, noise_scale, fall):
    scale = NoiseScale()
    for number in range(FEWEST + 1):
        measured(scale, parts, sum(parts) + others, signal=2.0, noise=2.0 * noise_scale, unit=fall**number)
    found = scale.estimate()
    assert found is not None and found.scale == pytest.approx(noise_scale, rel=1e-6)


def test_nothing_is_said_before_anything_is_known():
    scale = NoiseScale()
    for _ in range(50):
        measured(scale, [16], 16, signal=1.0, noise=9.0, unit=1.0)  # the one part is the whole batch
        measured(scale, [], 16, signal=1.0, noise=9.0, unit=1.0)
        scale.add(float("nan"), part_samples=8, num_parts=1, square=1.0, num_samples=16)
    assert scale.estimate() is None
    for _ in range(FEWEST + 1):
        measured(scale, [8, 8], 16, signal=1.0, noise=0.0, unit=1.0)
    assert scale.estimate() is None  # all parts have the same gradient
    for _ in range(FEWEST):
        measured(scale, [8, 8], 16, signal=1.0, noise=9.0, unit=1.0)
        assert scale.estimate() is None
    measured(scale, [8, 8], 16, signal=1.0, noise=9.0, unit=1.0)
    assert scale.estimate() is not None


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_equal_measurements_have_no_error_whatever_their_rounding(signal, noise):
    scale = NoiseScale()
    for _ in range(40):
        measured(scale, [3, 4], 7, signal=signal, noise=noise, unit=1.0)
        scale.estimate()


def test_a_gradient_that_is_all_noise_has_a_lower_bound():
    scale, random = NoiseScale(), torch.Generator().manual_seed(0)
    for _ in range(100):
        halves = torch.randn(2, 1000, generator=random) * 3.0  # each the mean of 8 samples
        whole = float(halves.mean(dim=0).square().sum())
        scale.add(8 * float(halves.square().sum()), part_samples=16, num_parts=2, square=whole, num_samples=16)
    found = scale.estimate()
    assert found is not None and found.scale is found.error is None
    assert found.above is not None and found.above > 50
    assert found.in_words().startswith("critical batch above ")


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (Estimate(912.0, 96.0, None), "critical batch ≈ 910 ± 100: beyond it workers buy less"),
        (Estimate(1234.5, 180.0, None), "critical batch ≈ 1,200 ± 200: beyond it workers buy less"),
        (Estimate(7.7, 0.3, None), "critical batch ≈ 8 ± 1: beyond it workers buy less"),
        (Estimate(None, None, 1470.0), "critical batch above 1,000: up to there more workers pay"),
        (Estimate(None, None, 0.2), "critical batch above 1: up to there more workers pay"),
    ],
)
def test_it_is_said_with_the_digits_that_mean_something(known: Estimate, words: str) -> None:
    assert known.in_words() == words


# ---------------------------------------------------------------------------------------------------- whole runs

WIDTH, BATCH, NUM_STEPS, NOISE_SCALE = 1500, 24, 200, 60.0


class Linear(ddp.Task):
    """The gradient of a sample is the sample itself."""

    main_metric = "loss"

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return model(batch[0]).sum(), len(batch[0])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, tuple[float | Tensor, float]]:
        return {"loss": self.loss(model, batch)}


def noise_scale(every: int, **how: Any) -> dict[str, Any]:
    """Returns what a run finds whose gradient has a signal of length 1 and this noise scale."""
    random = torch.Generator().manual_seed(1)
    noise = torch.randn(NUM_STEPS * BATCH, WIDTH, generator=random) * (NOISE_SCALE / WIDTH) ** 0.5
    signal = torch.full((WIDTH,), WIDTH**-0.5)
    seen = Seen()
    module = nn.Linear(WIDTH, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    data = (signal + noise, torch.zeros(len(noise)))
    ddp.fit(
        module, data, optimizer, **grouped(loss=Linear(), global_batch=BATCH, epochs=1, folder=None, progress=False,
        noise_scale_every=every, callbacks=[seen], **how),
    )  # fmt: skip
    known = seen.scale.estimate()
    assert seen.num_measured == len(range(0, NUM_STEPS, every)) if known else seen.num_measured == 0
    return {} if known is None else known._asdict()


class Seen(ddp.Callback):
    """Meters as `fit` does, and counts."""

    def __init__(self) -> None:
        self.scale, self.num_measured = NoiseScale(), 0

    def step_end(self, state: Any, report: Any) -> None:
        self.num_measured += report.parts is not None
        self.scale.step_end(state, report)


def on_all_ranks() -> tuple[dict[str, Any], list[Any]]:
    comm = ddp.init(abort_s=30)
    found = noise_scale(1, micro_size=None if comm.world_size > 1 else 8)
    parts = [parts_of(comm, **how) for how in WAYS]
    ddp.shutdown()
    return found, parts


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.quick(1)
def test_a_known_noise_scale_is_found_and_parts_are_those_of_the_ranks(world_size: int) -> None:
    for found, parts in run_ranks(on_all_ranks, world_size):
        assert found["scale"] == pytest.approx(NOISE_SCALE, rel=0.1)
        assert 0 < found["error"] < 0.1 * NOISE_SCALE
        for each in parts:
            for ours, expected in each:
                assert ours == pytest.approx(expected, rel=1e-5)


WAYS: list[dict[str, Any]] = [
    {"kind": "bucketed"},
    {"kind": "bucketed", "bucket_cap_mb": 1e-4, "overlap": True},
    {"kind": "bucketed", "dtype": torch.float64, "bucket_cap_mb": 1e-4},
    {"kind": "drop-in", "bucket_cap_mb": 1e-4},
    {"kind": "sharded", "bucket_cap_mb": 1e-4},
]


def parts_of(comm: Any, *, kind: str, dtype: torch.dtype = torch.float32, **how: Any) -> list[tuple[Any, Any]]:
    """Returns pairs of measured parts and what one rank computes for all ranks; some ranks have no samples."""
    pairs = []
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    replicas: dict[str, Any] = {
        "bucketed": ddp.BucketedDataParallel,
        "drop-in": ddp.DistributedDataParallel,
        "sharded": partial(ddp.BucketedDataParallel, reducer=ReduceScatter),
    }
    replica = replicas[kind](module, comm=comm, **how)
    for step in range(3):
        inputs = [torch.randn((rank + step) % 3 * 2, 3, dtype=dtype) for rank in range(comm.world_size)]
        if not any(map(len, inputs)):
            inputs[0] = torch.randn(2, 3, dtype=dtype)
        squares = items = parts = 0.0
        for each in inputs:
            if len(each):
                gradients = torch.autograd.grad(module(each).square().sum(), list(module.parameters()))
                squares += sum(float(g.square().sum()) for g in gradients) / len(each)
                items, parts = items + len(each), parts + 1
        replica.zero_grad(set_to_none=True)
        if len(mine := inputs[comm.rank]):
            loss = replica(mine).square().sum()
            replica.ride_along(Totals(loss.detach(), len(mine), measure=True))
            loss.backward()
        else:
            replica.ride_along(Totals(measure=True))
            replica.reduce_without_backward()
        assert replica.totals.parts is not None and replica.totals.num_items == items
        pairs.append((tuple(replica.totals.parts), (squares, items, parts)))
    loss = replica(torch.ones(2, 3, dtype=dtype)).sum()
    replica.ride_along(Totals(loss.detach(), 2))
    loss.backward()
    assert replica.totals.parts is None  # nobody has asked
    loss = replica(torch.ones(2, 3, dtype=dtype)).sum()
    replica.ride_along(Totals(loss.detach(), 2, parts=Parts(1.5, 4.0, 1.0)))
    loss.backward()
    pairs.append((tuple(replica.totals.parts or ()), tuple(comm.world_size * number for number in (1.5, 4.0, 1.0))))
    return pairs
