"""From settings to what changes the weights: the optimizer, its rate, the global batch, and their schedules.

What one setting makes of another, as a batch does of the rate, is said here once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from torch import nn
from torch.optim import Optimizer

from ddp.data.orders.steps import BatchWarmup, Steps, StepsLeft
from ddp.data.orders.token_budget import TokenBudget
from ddp.data.samples import Samples
from ddp.errors import ConfigError
from ddp.optim import schedules
from ddp.optim.layerwise import parameter_groups
from ddp.rules import refuse
from ddp.run.settings.checks import setup_of
from ddp.run.settings.config import Config
from ddp.units import counted


def learning_rate(config: Config) -> float:
    """Returns the configured learning rate, scaled for the global batch."""
    optim, size = config.optim, config.batch.global_size
    return schedules.scaled_rate(optim.lr, global_batch=size, base_batch=optim.base_batch, rule=optim.lr_scaling)


def make_optimizer(config: Config, module: nn.Module) -> Optimizer:
    """Returns an optimizer over all parameters; biases and norms have neither weight decay nor a trust ratio.

    Raises:
        ConfigError: a preset, a choice or a name to be excluded does not exist.
    """
    groups = partial(parameter_groups, module, exclude=config.optim.exclude)
    optimizer: Optimizer = config.optim.make(groups, lr=learning_rate(config))
    clips_at = getattr(optimizer, "clip_norm", None)
    refuse(setup_of(config, own_clip_norm=clips_at))
    return optimizer


@contextmanager
def without_compiler() -> Iterator[None]:
    """Lets optimizers be made in a block without torch's compiler, which each imports for a second and none needs."""
    asks = Optimizer.add_param_group
    Optimizer.add_param_group = getattr(asks, "__wrapped__", asks)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = asks  # type: ignore[method-assign]


def batch_of(config: Config, train: Samples) -> int | BatchWarmup | TokenBudget:
    """Returns the global batch, or how it grows over a data set, or its budget of tokens.

    Raises:
        ConfigError: the data do not say how long samples are, or one is longer than the budget.
    """
    first, last = config.batch.warmup_size, config.batch.global_size
    if config.batch.tokens is not None:
        return _budget(config, train)
    if first is None:
        return last
    samples = config.batch.warmup_samples or math.ceil((config.batch.warmup_epochs or 0) * len(train))
    return BatchWarmup(first, last, samples)


def _budget(config: Config, train: Samples) -> TokenBudget:
    if (lengths := getattr(train, "lengths", None)) is None:
        raise ConfigError(
            f"batch.tokens={config.batch.tokens}: data={config.data.name} do not say how long samples are; give the "
            "data set an attribute `lengths`, one number for each sample, or leave it out"
        )
    try:
        return TokenBudget(cast(int, config.batch.tokens), lengths)
    except ConfigError as error:
        raise ConfigError(f"batch.{error}") from error


def warmup_samples(config: Config, sizes: Steps) -> float:
    """Returns in how many samples of all workers the learning rate rises."""
    schedule, optim = config.schedule, config.optim
    if schedule.warmup_steps is not None:
        return sizes.after(0, schedule.warmup_steps)
    times = config.batch.global_size / optim.base_batch if optim.lr_scaling == "legw" else 1
    if schedule.warmup_samples is not None:
        return times * schedule.warmup_samples
    if schedule.warmup_epochs is not None:
        return times * schedule.warmup_epochs * sizes.length
    return times * (schedule.warmup_fraction or 0) * _samples_of_run(config, sizes)


def _samples_of_run(config: Config, sizes: Steps) -> int:
    _, num_samples = StepsLeft(sizes).end(0, epochs=config.epochs, num_steps=config.max_steps)
    return num_samples


def derived(config: Config, sizes: Steps) -> list[str]:
    """Returns the rate and the warm-up that the rules for large batches give, a line each."""
    rate, given, rise = learning_rate(config), config.optim.lr, warmup_samples(config, sizes)
    notes = [] if rate == given else [f"learning rate {rate:g}: {given:g} × {rate / given:g} for this batch"]
    if rise:
        steps = counted(sizes.num_steps(0, math.ceil(rise)), "step")
        is_too_long = ": longer than the run" if rise > _samples_of_run(config, sizes) else ""
        notes.append(f"the learning rate rises over {math.ceil(rise):,} samples ({steps}){is_too_long}")
    return notes


def make_schedule(config: Config, sizes: Steps) -> schedules.RateSchedule:
    """Returns the learning-rate schedule for the steps of a run."""
    return schedules.with_warmup(config.schedule.make(), num_samples=warmup_samples(config, sizes))
