"""Gives back what a fit changes of its process, so that the program around it goes on as if there had been no fit.

    generators       torch's for the CPU and each GPU, Python's and NumPy's: every step seeds them (`data/streams.py`)
    modes            training or evaluation, of each layer
    learning rates   to what they are without the schedule

All else that a fit changes for a while has a block of its own, which gives it back: the handlers of signals
(`stopping.py`), the modes during an evaluation (`evaluate.py`), warnings and compilation during the first look
(`first_look.py`). An evaluation draws nothing itself. What a user's model or task draws there, it draws as in a loop
by hand.

Read before: `stopping.py`. Read next: `progress.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp.data.streams import preserved
from ddp.optim.schedules import base_rates, set_rate

Fit = TypeVar("Fit", bound=Callable[..., Any])


def gives_back(fit: Fit) -> Fit:
    """Returns `fit`, of a `model` and an `optimizer`, so that it gives back what it changes, also when it raises."""
    signature = inspect.signature(fit)

    @wraps(fit)
    def giving_back(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        model, optimizer, schedule = given["model"], given["optimizer"], given.get("schedule")
        with _generators_kept(), modes_kept(model), _schedule_taken_out(optimizer, schedule):
            return fit(*args, **kwargs)

    return cast(Fit, giving_back)


@contextmanager
def _generators_kept() -> Iterator[None]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    with preserved():
        try:
            yield
        finally:
            if on_gpus:
                torch.cuda.set_rng_state_all(on_gpus)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the mode of every layer at the end of the block."""
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, nn.Module) else []
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _schedule_taken_out(optimizer: Optimizer, schedule: Any) -> Iterator[None]:
    """Leaves the rates without the schedule's factor, so that another fit begins with those that its caller sets."""
    if not isinstance(optimizer, Optimizer) or isinstance(schedule, LRScheduler):  # which owns the rates
        yield
        return
    # Those of a scheduler of torch's that is not used here: the rates of now are the ones to train with.
    before = [group.pop("initial_lr", None) for group in optimizer.param_groups]
    try:
        yield
    finally:
        set_rate(optimizer, base_rates(optimizer), 1.0)
        for group in optimizer.param_groups:
            del group["initial_lr"]
        for group, first in zip(optimizer.param_groups, before, strict=False):  # there may be more groups now
            group.update({} if first is None else {"initial_lr": first})
