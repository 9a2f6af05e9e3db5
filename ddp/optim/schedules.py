"""Learning-rate schedules: pure functions from the number of steps taken to a factor on the base rate.

    constant()                 1
    step(gamma, every)         gamma ** (t // every), or gamma ** (milestones passed)
    cosine(num_steps, final)   final + (1 - final) * (1 + cos(pi t / num_steps)) / 2      arXiv 1608.03983, eq. 5
    with_warmup(f, N)          f(t) * min(1, (t + 1) / N)                                 arXiv 1706.02677, sec. 2.2

The argument t counts committed optimizer steps from the beginning of the run: 0 for the first update. A schedule
holds no state, so a resumed run continues by knowing its step. Warm-up multiplies: milestones and `num_steps` keep
counting from the beginning of the run, as in arXiv 1706.02677, and the rate has no jump where warm-up ends.

The rate's dependence on the batch is not a schedule but a property of the run, settled once by `scaled_rate`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from ddp.errors import ConfigError

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """Factor 1 at every step."""
    return lambda num_steps_taken: 1.0


def step(*, gamma: float, every: int | None = None, milestones: Sequence[int] | None = None) -> Schedule:
    """Multiplies by `gamma` after each `every` steps, or after each of the `milestones` (in steps, ascending).

    Raises:
        ConfigError: both or neither given, `every` below 1, milestones not ascending.
    """
    if every is not None and milestones is None:
        if every < 1:
            raise ConfigError(f"every must be at least 1 step, got {every}")
        return lambda num_steps_taken: float(gamma ** (num_steps_taken // every))
    if milestones is not None and every is None:
        ascending = tuple(milestones)
        if list(ascending) != sorted(set(ascending)):
            raise ConfigError(f"milestones must ascend, got {list(ascending)}")
        return lambda num_steps_taken: float(gamma ** bisect_right(ascending, num_steps_taken))
    raise ConfigError(f"step() needs exactly one of every= and milestones=, got every={every}, milestones={milestones}")


def cosine(*, num_steps: int, final_factor: float = 0.0) -> Schedule:
    """From 1 down to `final_factor` in half a cosine wave of `num_steps` steps; stays there afterwards.

    Raises:
        ConfigError: `num_steps` below 1.
    """
    if num_steps < 1:
        raise ConfigError(f"cosine() needs num_steps of at least 1, got {num_steps}")

    def factor(num_steps_taken: int) -> float:
        progress = min(1.0, num_steps_taken / num_steps)
        return final_factor + (1.0 - final_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def with_warmup(schedule: Schedule, *, num_warmup_steps: int) -> Schedule:
    """`schedule`, with its first `num_warmup_steps` factors reduced to 1/N, 2/N, ... N/N of themselves.

    Raises:
        ConfigError: a negative number of steps; 0 means no warm-up.
    """
    if num_warmup_steps < 0:
        raise ConfigError(f"num_warmup_steps must be at least 0, got {num_warmup_steps}")
    if num_warmup_steps == 0:
        return schedule
    return lambda num_steps_taken: schedule(num_steps_taken) * min(1.0, (num_steps_taken + 1) / num_warmup_steps)


def set_rate(optimizer: Optimizer, base_rates: Sequence[float], factor: float) -> None:
    """Gives parameter group i the rate `base_rates[i] * factor`.

    Take `base_rates` from the configuration, not from an optimizer that was loaded: its groups hold the reduced rates.

    Raises:
        ConfigError: not one base rate per parameter group.
    """
    groups = optimizer.param_groups
    if len(base_rates) != len(groups):
        raise ConfigError(f"{len(base_rates)} base rates for {len(groups)} parameter groups: give one for each")
    for group, base_rate in zip(groups, base_rates, strict=True):
        if isinstance(group["lr"], Tensor):  # the optimizer's captured graph reads this very tensor
            group["lr"].fill_(base_rate * factor)
        else:
            group["lr"] = base_rate * factor


def scaled_rate(
    base_rate: float, *, global_batch: int, base_batch: int, rule: Literal["none", "linear", "sqrt"]
) -> float:
    """The rate for `global_batch`, given one that was tuned for `base_batch`. Both count samples of all ranks.

        none     base_rate
        linear   base_rate * k         k = global_batch / base_batch   arXiv 1706.02677, sec. 2.1
        sqrt     base_rate * sqrt(k)   keeps the variance of a step    arXiv 1404.5997, sec. 3.2

    Raises:
        ConfigError: another rule, or a batch below 1.
    """
    if min(global_batch, base_batch) < 1:
        raise ConfigError(f"batches must be at least 1, got global_batch={global_batch}, base_batch={base_batch}")
    k = global_batch / base_batch
    factors = {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}
    if rule not in factors:
        raise ConfigError(f"unknown rule {rule!r} for scaling the rate: choose one of {', '.join(factors)}")
    return base_rate * factors[rule]
