"""Schedules against torch.optim.lr_scheduler."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from ddp.errors import ConfigError
from ddp.optim.schedules import constant, cosine, polynomial, scaled_rate, set_rate, step, with_warmup, wsd


def optimizer(*rates: float | torch.Tensor) -> SGD:
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=0.1)


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
    "polynomial": (polynomial(power=2.0), lambda o: lr_scheduler.PolynomialLR(o, 41, power=2.0)),
    "a line": (polynomial(), lambda o: lr_scheduler.PolynomialLR(o, 41)),
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
    assert [polynomial(power=2.0, final_factor=0.2)(t, 10) for t in (0, 5, 10, 20)] == pytest.approx([1, 0.4, 0.2, 0.2])
    stable = wsd(decay_fraction=0.5, final_factor=0.2)
    assert [stable(t, 8) for t in (0, 4, 5, 8, 9)] == pytest.approx([1, 1, 0.6, 0.2, 0.2])
    for ramp in (with_warmup(constant(), num_samples=4), with_warmup(constant(), fraction=0.4)):
        assert [ramp(t, 10) for t in (0.5, 1, 2, 4, 5)] == pytest.approx([0.125, 0.25, 0.5, 1.0, 1.0])
    assert with_warmup(cosine(), num_samples=5)(3, 10) == pytest.approx(0.6 * cosine()(3, 10))
    assert with_warmup(cosine())(0, 10) == 1.0


FALLING = [cosine(), polynomial(), polynomial(power=2.0), wsd(), step(gamma=0.1, milestones=[0.5])]


@pytest.mark.parametrize("schedule", FALLING)
def test_steps_of_any_size_add_up_to_the_same_rate_times_samples(schedule):
    of, warmed = 64 * 64, with_warmup(schedule, fraction=0.125)
    area = [sum(size * warmed(t + size / 2, of) for t in range(0, of, size)) for size in (1, 8, 64, 256)]
    assert area == pytest.approx([area[0]] * 4, rel=1e-2)


def test_what_is_no_share_or_power_is_refused():
    for decay_fraction in (0, -0.5, 2, float("nan")):
        with pytest.raises(ConfigError, match=r"decay_fraction=.*: must be a number above 0 and at most 1"):
            wsd(decay_fraction=decay_fraction)
    for power in (0, -1):
        with pytest.raises(ConfigError, match=r"power=.*: must be a number above 0"):
            polynomial(power=power)
    with pytest.raises(ConfigError, match=r"num_samples=5 and fraction=0.5: leave one of them out"):
        with_warmup(constant(), num_samples=5, fraction=0.5)
    for wrong in ({"num_samples": -1}, {"num_samples": float("inf")}, {"fraction": 1}, {"fraction": float("nan")}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}=.*: must be a .*number"):
            with_warmup(constant(), **wrong)
    with pytest.raises(ConfigError, match="schedule returned the factor None: it must be a number"):
        set_rate(optimizer(0.1), [0.1], None)


def test_each_group_keeps_its_proportion_and_tensors_stay_in_place():
    rate = torch.tensor(0.0)
    opt = optimizer(0.1, 0.2)
    opt.param_groups[1]["lr"] = rate
    set_rate(opt, [1.0, 10.0], 0.25)
    assert opt.param_groups[0]["lr"] == 0.25
    assert opt.param_groups[1]["lr"] is rate and rate.item() == 2.5
    with pytest.raises(ConfigError, match="1 base rates for 2 parameter groups"):
        set_rate(opt, [1.0], 1.0)


RULES = [("none", 0.1), ("linear", 0.1 * 32), ("sqrt", 0.1 * math.sqrt(32)), ("legw", 0.1 * math.sqrt(32))]


@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_scaled_rate(rule, expected):
    assert scaled_rate(0.1, global_batch=8192, base_batch=256, rule=rule) == pytest.approx(expected, rel=1e-15)
    assert scaled_rate(0.1, global_batch=256, base_batch=256, rule=rule) == 0.1
