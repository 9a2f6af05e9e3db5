"""Learning-rate schedules: pure functions of (steps taken, steps of the whole run) to a factor on the base rate.

    constant()                 1
    step(gamma, milestones)    gamma ** (milestones passed)                      milestones: shares of the run
    cosine(final)              final + (1 - final) * (1 + cos(pi t / T)) / 2     arXiv 1608.03983, eq. 5
    with_warmup(f, N)          f(t, T) * min(1, (t + 1) / N)                     arXiv 1706.02677, sec. 2.2

The argument t counts committed optimizer steps from the beginning of the run: 0 for the first update. A schedule
holds no state, so a resumed run needs to know its step only. Warm-up multiplies: milestones and T still count from
the beginning of the run, as in arXiv 1706.02677, and the rate does not jump where warm-up ends.

The rate's dependence on the batch is not a schedule but a property of the run, which `scaled_rate` computes once.

Read before: `tasks/ngram.py`. Read next: `torch_schedule.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from ddp.errors import ConfigError

RateSchedule = Callable[[int, int], float]


def constant() -> RateSchedule:
    """Returns the schedule whose factor is always 1."""
    return lambda num_steps_taken, num_steps: 1.0


def step(*, gamma: float, milestones: Sequence[float]) -> RateSchedule:
    """Returns a schedule that multiplies by `gamma` after each of the `milestones` (shares of the run, ascending)."""

    def factor(num_steps_taken: int, num_steps: int) -> float:
        steps = sorted({round(share * num_steps) for share in milestones})
        return float(gamma ** bisect_right(steps, num_steps_taken))

    return factor


def cosine(*, final_factor: float = 0.0) -> RateSchedule:
    """Returns a schedule from 1 down to `final_factor` in half a cosine wave over the whole run; it stays there."""

    def factor(num_steps_taken: int, num_steps: int) -> float:
        progress = min(1.0, num_steps_taken / num_steps)
        return final_factor + (1.0 - final_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def with_warmup(schedule: RateSchedule, *, num_warmup_steps: int = 0, fraction: float = 0.0) -> RateSchedule:
    """Returns `schedule` with its first N factors reduced to 1/N, 2/N, ... N/N of themselves.

    Args:
        num_warmup_steps, fraction: N, or the share of the run that N is.
    """

    def factor(num_steps_taken: int, num_steps: int) -> float:
        num_warmup = num_warmup_steps or round(fraction * num_steps)
        return schedule(num_steps_taken, num_steps) * min(1.0, (num_steps_taken + 1) / max(1, num_warmup))

    return factor


def set_rate(optimizer: Optimizer, base_rates: Sequence[float], factor: float) -> None:
    """Gives parameter group i the rate `base_rates[i] * factor`.

    The groups of an optimizer that was loaded hold reduced rates, so `base_rates` must not come from them.

    Raises:
        ConfigError: not one base rate per parameter group.
    """
    groups = optimizer.param_groups
    if len(base_rates) != len(groups):
        raise ConfigError(f"{len(base_rates)} base rates for {len(groups)} parameter groups: give one for each")
    if not 0 <= factor < math.inf:
        raise ConfigError(f"the learning-rate schedule returned the factor {factor}: it must be a number from 0 up")
    for group, base_rate in zip(groups, base_rates, strict=True):
        if isinstance(group["lr"], Tensor):  # because the optimizer's captured graph reads this tensor
            group["lr"].fill_(base_rate * factor)
        else:
            group["lr"] = float(base_rate * factor)  # which may be NumPy's


def scaled_rate(
    base_rate: float, *, global_batch: int, base_batch: int, rule: Literal["none", "linear", "sqrt"]
) -> float:
    """Returns the rate for `global_batch`, given one that was tuned for `base_batch`. Both count samples of all ranks.

    none     base_rate
    linear   base_rate * k         k = global_batch / base_batch   arXiv 1706.02677, sec. 2.1
    sqrt     base_rate * sqrt(k)   keeps the variance of a step    arXiv 1404.5997, sec. 3.2
    """
    k = global_batch / base_batch
    return base_rate * {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[rule]
