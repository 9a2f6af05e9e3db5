"""`ddp.EMA`: an exponential moving average of the weights, which evaluations use.

    average ← decay · average + (1 − decay) · weights        after each step; after the first one: the weights

Averaged weights often do better than the last ones, because the noise of single steps averages out. torch's
`AveragedModel` does the work. Its buffers, such as BatchNorm's statistics, are those of the model. With
precision="bf16_pure" the master weights are averaged.

Cost: a float32 copy of the parameters on every rank, which is read and written in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp.errors import ConfigError
from ddp.train.callbacks import Callback
from ddp.train.state import StepReport, TrainState
from ddp.train.stored_checkpoint import is_extra


class EMA(Callback):
    """Averages the weights over the steps. Evaluations use the averages, and so the best checkpoint is chosen by them.

    `ddp.load(run).weights` are the averages, too; training itself never uses them. A resumed run continues them;
    any other fit begins anew.

    Args:
        decay: share of the average that a step keeps, from 0 up and below 1: it averages over about 1 ÷ (1 − decay)
            steps.

    Attributes:
        averaged: torch's `AveragedModel`, from the first step on; `averaged.module` is the model with averaged weights.

    Raises:
        ConfigError: that is no such share.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigError(f"decay={decay!r}: must be a number from 0 up and below 1, such as 0.999")
        self._average = get_ema_multi_avg_fn(decay)
        self.averaged: AveragedModel | None = None

    def fit_start(self, state: TrainState) -> None:
        try:
            self.averaged = AveragedModel(state.model.module, multi_avg_fn=self._average)
        except (RuntimeError, TypeError) as error:  # of copy.deepcopy
            reason = str(error).partition(". ")[0]
            raise ConfigError(
                f"EMA needs a copy of the model {type(state.model.module).__name__}, which copy.deepcopy cannot make "
                f"({reason}): let it hold no lock, file or computed tensor, and for weight norm take "
                "torch.nn.utils.parametrizations.weight_norm"
            ) from error
        for average, weights in zip(self.averaged.module.parameters(), _weights(state), strict=True):
            average.data = weights.detach().clone()

    def step_end(self, state: TrainState, report: StepReport) -> None:
        assert self.averaged is not None
        self.averaged.update_parameters(cast(nn.Module, _Weights(state)))

    @contextmanager
    def evaluating(self, state: TrainState) -> Iterator[None]:
        assert self.averaged is not None
        if not self.averaged.n_averaged:
            yield
            return
        parameters = list(state.model.module.parameters())
        before = [parameter.detach().clone() for parameter in parameters]
        _copy(parameters, list(self.averaged.module.parameters()))
        try:
            yield
        finally:
            _copy(parameters, before)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.averaged is None else dict(self.averaged.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self.averaged is not None
        self.averaged.load_state_dict(state)


class _Weights:
    """Has the parameters and buffers of a run as `AveragedModel` reads them."""

    def __init__(self, state: TrainState) -> None:
        self.parameters, self.buffers = lambda: _weights(state), state.model.module.buffers


def _weights(state: TrainState) -> Iterator[Tensor]:
    """Yields the parameters, or their masters."""
    return (state.masters.get(parameter, parameter) for parameter in state.model.module.parameters())


@torch.no_grad()
def _copy(into: list[nn.Parameter], values: list[Any]) -> None:
    torch._foreach_copy_(cast(list[Tensor], into), values)


def averages_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns parameters and buffers of the model from what `EMA.state_dict` has returned."""
    prefix = "module."
    named = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {name: value for name, value in named.items() if not is_extra(name)}  # which is the copy's own
