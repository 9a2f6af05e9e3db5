"""Learning-rate schedules: pure functions of (samples trained on, samples of the whole run) to a factor on the rate.

    constant()                 1
    step(gamma, milestones)    gamma ** (milestones passed)                      milestones: shares of the run
    cosine(final)              final + (1 - final) (1 + cos(pi t / T)) / 2       arXiv 1608.03983, eq. 5
    polynomial(power, final)   final + (1 - final) (1 - t / T) ** power          arXiv 1708.03888: power 2
    wsd(decay, final)          1; then final + (1 - final) (1 - sqrt(share))     arXiv 2405.18392
    with_warmup(f, N)          f(t, T) * min(1, t / N)                           arXiv 1706.02677, sec. 2.2

They count *samples*, so that the curves of different batch sizes coincide. A step takes the factor in the middle of its
samples: then the sum of rate times samples hardly depends on the batch, and no step has the rate 0. A schedule holds no
state, so a resumed run needs only its position. Warm-up multiplies: milestones and T still count from the beginning of
the run, as in arXiv 1706.02677, and the rate does not jump where warm-up ends.

The rate's dependence on the batch is not a schedule but a property of the run, which `scaled_rate` computes once.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp.errors import CheckpointError, ConfigError
from ddp.setting import Below1, FromZero, Positive, Scaling, UpTo1, checked

RateSchedule = Callable[[float, float], float]


def constant() -> RateSchedule:
    """Returns the schedule whose factor is always 1."""
    return lambda done, of: 1.0


def step(*, gamma: float, milestones: Sequence[float]) -> RateSchedule:
    """Returns a schedule that multiplies by `gamma` after each of the `milestones` (shares of the run, ascending)."""
    return lambda done, of: float(gamma ** bisect_right([share * of for share in milestones], done))


def cosine(*, final_factor: float = 0.0) -> RateSchedule:
    """Returns a schedule from 1 down to `final_factor` in half a cosine wave over the whole run; it stays there."""
    return _down_to(final_factor, lambda done, of: 0.5 * (1.0 + math.cos(math.pi * min(1.0, done / of))))


@checked
def polynomial(*, power: Positive = 1.0, final_factor: float = 0.0) -> RateSchedule:
    """Returns a schedule from 1 down to `final_factor` along a power of what is left of the run; it stays there.

    Raises:
        ConfigError: the power is not above 0.
    """
    return _down_to(final_factor, lambda done, of: max(0.0, 1.0 - done / of) ** power)


@checked
def wsd(*, decay_fraction: UpTo1 = 0.2, final_factor: float = 0.0) -> RateSchedule:
    """Returns a schedule that is 1 until the last share of the run, and then falls: warm-up, stable, decay.

    A run can be prolonged from any checkpoint of its stable part, whatever length it was planned for.

    Args:
        decay_fraction: the last share, above 0.

    Raises:
        ConfigError: the fraction is no share of a run.
    """

    def factor(done: float, of: float) -> float:
        share = (done - (1.0 - decay_fraction) * of) / (decay_fraction * of)
        return 1.0 - math.sqrt(min(1.0, max(0.0, share)))

    return _down_to(final_factor, factor)


def _down_to(final_factor: float, schedule: RateSchedule) -> RateSchedule:
    return lambda done, of: final_factor + (1.0 - final_factor) * schedule(done, of)


@checked
def with_warmup(schedule: RateSchedule, *, num_samples: FromZero = 0, fraction: Below1 = 0.0) -> RateSchedule:
    """Returns `schedule` with a factor that rises evenly from 0 to 1 in the first N samples.

    Args:
        num_samples, fraction: N, or the share of the run that N is.

    Raises:
        ConfigError: both are given, or one is out of its range.
    """
    if num_samples and fraction:
        raise ConfigError(f"num_samples={num_samples:g} and fraction={fraction:g}: leave one of them out")

    def factor(done: float, of: float) -> float:
        ramp = num_samples or fraction * of
        return schedule(done, of) * (min(1.0, done / ramp) if ramp else 1.0)

    return factor


class Rates:
    """The rates of an optimizer's groups, which a schedule multiplies by its factor.

    If other code has set a rate meanwhile, that rate holds: its base rate changes in proportion, or becomes that rate
    if no schedule had changed it, or if it was 0. Only "lr" is written to the groups, because other code (a torch
    scheduler that a callback steps) keeps its own numbers there.

    Attributes:
        base: by group, the rate without a schedule; last: by group, the rate that was set here last.

    Args:
        base: of a resumed run; None: the current rates.
    """

    def __init__(self, optimizer: Optimizer, base: Sequence[float] | None = None) -> None:
        self._optimizer, self.last = optimizer, _rates_of(optimizer)
        self.base = self.last if base is None else list(base)

    def adopted(self) -> list[float]:
        """Returns the base rates, adapted to rates that other code has set; a new group has its own."""
        known = zip(self.base, self.last, strict=True)
        return [self._adopted(now, *next(known, (now, now))) for now in _rates_of(self._optimizer)]

    @staticmethod
    def _adopted(now: float, base: float, last: float) -> float:
        if now == last:
            return base
        return now if last in (0.0, base) else base * (now / last)

    def set(self, factor: float) -> None:
        """Multiplies the base rates by a schedule's factor."""
        self.base = self.adopted()
        set_rate(self._optimizer, self.base, factor)
        self.last = _rates_of(self._optimizer)

    def take_schedule_out(self) -> None:
        """Removes a schedule's factor from the rates, so that another fit begins with those that were set."""
        set_rate(self._optimizer, self.adopted(), 1.0)


def _rates_of(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rate(optimizer: Optimizer, base_rates: Sequence[float], factor: float) -> None:
    """Gives parameter group i the rate `base_rates[i] * factor`.

    The groups of an optimizer that was loaded hold reduced rates, so `base_rates` must not come from them.

    Raises:
        ConfigError: the numbers of base rates and parameter groups differ.
    """
    groups = optimizer.param_groups
    if len(base_rates) != len(groups):
        raise ConfigError(f"{len(base_rates)} base rates for {len(groups)} parameter groups: give one for each")
    if not isinstance(factor, Real) or not 0 <= factor < math.inf:
        raise ConfigError(f"the learning-rate schedule returned the factor {factor}: it must be a number from 0 up")
    for group, base_rate in zip(groups, base_rates, strict=True):
        if isinstance(group["lr"], Tensor):  # because the optimizer's captured graph reads this tensor
            group["lr"].fill_(base_rate * factor)
        else:
            group["lr"] = float(base_rate * factor)  # which may be NumPy's


def scaled_rate(base_rate: float, *, global_batch: int, base_batch: int, rule: Scaling) -> float:
    """Returns the rate for `global_batch`, given one that was tuned for `base_batch`. Both count samples of all ranks.

    none     base_rate
    linear   base_rate * k         k = global_batch / base_batch        arXiv 1706.02677, sec. 2.1
    sqrt     base_rate * sqrt(k)   keeps the variance of a step         arXiv 1404.5997, sec. 3.2
    legw     base_rate * sqrt(k)   and the warm-up takes k times more samples, as many steps   arXiv 1901.08256
    """
    k = global_batch / base_batch
    return base_rate * {"none": 1.0, "linear": k, "sqrt": math.sqrt(k), "legw": math.sqrt(k)}[rule]


# --- Schedulers of torch's -------------------------------------------------------------------------------------------
#
# torch's schedulers count calls of `step()`, and hold state. Only the user knows if a call stands for a step or an
# epoch: StepLR(30) is meant in epochs, OneCycleLR in steps. So `every` names it. ReduceLROnPlateau reads a metric, so
# it is stepped after evaluations.


class TorchSchedule:
    """Steps a scheduler after each step, epoch or evaluation.

    Attributes:
        name: the scheduler's class; every: the moment at which it steps.
        needs_metric: the scheduler reads a metric; mode: "min" or "max", the better direction of that metric.
        begun: the scheduler's state when this object was made, which includes its settings.

    Args:
        scheduler: made for `optimizer`.
        every: the moment that one call of `scheduler.step()` stands for: "step" or "epoch".

    Raises:
        ConfigError: `every` is missing, or does not go with the scheduler.
    """

    def __init__(self, scheduler: LRScheduler, *, every: str | None = None) -> None:
        self.name = name = type(scheduler).__name__
        self.needs_metric = needs_metric = isinstance(scheduler, ReduceLROnPlateau)
        if every is None and needs_metric:
            every = "evaluation"
        if every not in (("evaluation",) if needs_metric else ("step", "epoch")):
            say = 'say ddp.optim.TorchSchedule(scheduler, every="step") or "epoch"'
            remedy = "leave it out" if needs_metric else say
            what = f"schedule={name} with every={every!r}"
            raise ConfigError(f"{what}: torch's schedulers count calls of step(); {remedy}")
        self._scheduler, self.every, self.begun = scheduler, every, copy.deepcopy(scheduler.state_dict())
        self.mode = getattr(scheduler, "mode", "")

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ConfigError if the scheduler was made for another optimizer."""
        if getattr(self._scheduler, "optimizer", None) is not optimizer:
            raise ConfigError(
                f"schedule={self.name} was made for another optimizer: make it with the one given to ddp.fit"
            )

    def stepped(self, *, is_epoch_end: bool) -> None:
        """Counts an optimizer step."""
        if self.every == "step" or (self.every == "epoch" and is_epoch_end):
            self._scheduler.step()

    def evaluated(self, metric: float) -> None:
        """Counts an evaluation."""
        if self.every == "evaluation":
            self._scheduler.step(metric)  # type: ignore[arg-type]  # torch declares the epoch of other schedulers

    def state_dict(self) -> dict[str, Any]:
        """Returns the scheduler's class and state, now and as it was made."""
        return {"class": self.name, "state": self._scheduler.state_dict(), "begun": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a scheduler's state and settings. The rates that it had set are in the optimizer's state.

        Raises:
            CheckpointError: it is the state of another class.
        """
        if state["class"] != self.name:
            raise CheckpointError(
                f"the checkpoint was taken with the scheduler {state['class']}, this run uses {self.name}, whose state "
                "it does not hold; take the same scheduler, or start fresh from its weights"
            )
        self._scheduler.load_state_dict(state["state"])
