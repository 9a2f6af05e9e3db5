"""Schedules against torch.optim.lr_scheduler."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from ddp.errors import ConfigError
from ddp.optim.schedules import constant, cosine, scaled_rate, set_rate, step, with_warmup


def optimizer(*rates: float | torch.Tensor) -> SGD:
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=0.1)


def warmed(opt, n, then):
    return lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(opt, 1 / n, total_iters=n - 1), then(opt)])


PAIRS = {
    "constant": (constant(), lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    "milestones": (
        step(milestones=(3 / 41, 5 / 41, 20 / 41), gamma=0.1),
        lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 20], 0.1),
    ),
    "cosine": (cosine(), lambda o: lr_scheduler.CosineAnnealingLR(o, 41)),
    "cosine with a floor": (
        cosine(final_factor=0.2),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 41, 0.1),
    ),
    "warm-up": (
        with_warmup(constant(), num_warmup_steps=6),
        lambda o: warmed(o, 6, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    ),
    "warm-up, milestones": (
        with_warmup(step(milestones=(10 / 41, 30 / 41), gamma=0.1), num_warmup_steps=5),
        lambda o: warmed(o, 5, lambda o: lr_scheduler.MultiStepLR(o, [10, 30], 0.1)),
    ),
    "warm-up, cosine": (
        with_warmup(cosine(), num_warmup_steps=9),
        lambda o: warmed(o, 9, lambda o: lr_scheduler.CosineAnnealingLR(o, 41)),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_same_rates_as_torch(name):
    schedule, make = PAIRS[name]
    ours, theirs = optimizer(0.5), optimizer(0.5)
    scheduler = make(theirs)
    for num_steps_taken in range(42):
        set_rate(ours, [0.5], schedule(num_steps_taken, 41))
        assert ours.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
        theirs.step()
        scheduler.step()


def test_landmarks():
    assert cosine(final_factor=0.1)(10, 10) == cosine(final_factor=0.1)(1000, 10) == pytest.approx(0.1)
    assert cosine()(5, 10) == pytest.approx(0.5)
    for ramp in (with_warmup(constant(), num_warmup_steps=4), with_warmup(constant(), fraction=0.4)):
        assert [ramp(t, 10) for t in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert with_warmup(cosine())(3, 10) == cosine()(3, 10)


def test_each_group_keeps_its_proportion_and_tensors_stay_in_place():
    rate = torch.tensor(0.0)
    opt = optimizer(0.1, 0.2)
    opt.param_groups[1]["lr"] = rate
    set_rate(opt, [1.0, 10.0], 0.25)
    assert opt.param_groups[0]["lr"] == 0.25
    assert opt.param_groups[1]["lr"] is rate and rate.item() == 2.5
    with pytest.raises(ConfigError, match="1 base rates for 2 parameter groups"):
        set_rate(opt, [1.0], 1.0)


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.1 * 32), ("sqrt", 0.1 * math.sqrt(32))])
def test_scaled_rate(rule, expected):
    assert scaled_rate(0.1, global_batch=8192, base_batch=256, rule=rule) == pytest.approx(expected, rel=1e-15)
    assert scaled_rate(0.1, global_batch=256, base_batch=256, rule=rule) == 0.1
