"""LARS and LARC: momentum SGD whose rate follows each tensor's weights and gradient.

    LARS    ratio = η ‖w‖ ÷ (‖g‖ + λ‖w‖ + ε)             You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1
    LARC    ratio = min(that ÷ lr, 1), so that the rate is never above lr            NVIDIA/apex, parallel/LARC.py

    u = ratio · (g + λ w)
    m ← μ m + lr · u,   w ← w − m           the rate inside the momentum (the paper, MLPerf)
    m ← μ m + u,        w ← w − lr · m      outside (torch's SGD, timm, apex)

The two differ while the rate changes: inside, an old gradient keeps the rate of its own step.

A step reads w and g and writes u, and then reads w, u and m and writes m and w: eight streams, where SGD has five.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from ddp.errors import ConfigError
from ddp.optim.layerwise import Adapt, Batch, Factor, Layerwise, Ratios, check_range, is_identity, scaled
from ddp.optim.norms import Norms, functions_for, trust_ratios


class LarsChoices(TypedDict, total=False):
    """The choices in which implementations of LARS differ.

    Attributes:
        momentum: μ.
        weight_decay: λ.
        trust_coefficient: η, the share of ‖w‖ that a step of rate 1 may change.
        eps: ε. Without it, a tensor whose gradient is almost zero takes a step of full length along noise.
        nesterov: step along the gradient that momentum leads to.
        rate_in_momentum: the rate is inside the momentum (above).
        decay_in_ratio: λw is scaled by the ratio, and λ‖w‖ is in its denominator; else λw joins the update without
            it.
        norm_bounds: φ clamps ‖w‖ to these.
        adapt: which tensors have a ratio: "always" all, "with_decay" those of groups with a decay.
        clip_norm: largest norm of the gradient of all parameters together; None for no clipping.
    """

    momentum: float
    weight_decay: float
    trust_coefficient: float
    eps: float
    nesterov: bool
    rate_in_momentum: bool
    decay_in_ratio: bool
    norm_bounds: tuple[float, float]
    adapt: Adapt
    clip_norm: float | None


_PAPER: LarsChoices = {
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "trust_coefficient": 0.001,
    "eps": 0.0,
    "nesterov": False,
    "rate_in_momentum": True,
    "decay_in_ratio": True,
    "norm_bounds": (0.0, math.inf),
    "adapt": "always",
    "clip_norm": None,
}
_OUTSIDE: LarsChoices = {**_PAPER, "eps": 1e-8, "rate_in_momentum": False}
LARS_PRESETS: dict[str, LarsChoices] = {
    "paper": _PAPER,  # arXiv 1708.03888, algorithm 1 and section 5
    "timm": {**_OUTSIDE, "adapt": "with_decay"},  # huggingface/pytorch-image-models@9d8ccd2, lars.py
    "mlperf": {**_PAPER, "weight_decay": 1e-4},  # mlcommons/training@615ad0a, tensorflow2/lars_optimizer.py
}
LARC_PRESETS: dict[str, LarsChoices] = {
    "apex": {**_OUTSIDE, "trust_coefficient": 0.02},  # NVIDIA/apex@0bfb830, apex/parallel/LARC.py
    "timm": {**_OUTSIDE, "adapt": "with_decay"},  # the same file, with trust_clip=True
}


class LARS(Layerwise):
    """LARS: momentum SGD, scaled tensor by tensor (You, Gitman, Ginsburg, arXiv 1708.03888).

    Args:
        params: parameters, or groups of them; a group may have its own settings, such as adapt="never".
        lr: the learning rate, which the ratio multiplies.
        preset: where the choices that are not given come from: "paper", "timm" or "mlperf".
        maximize: go up the gradient.
        choices: see `LarsChoices`.

    Raises:
        ConfigError: there is no such preset or choice, or a value is out of its range.
    """

    STATES: tuple[str, ...] = ("momentum_buffer",)
    PRESETS = LARS_PRESETS

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        preset: str = "paper",
        maximize: bool = False,
        **choices: Unpack[LarsChoices],
    ) -> None:
        super().__init__(params, lr, preset=preset, maximize=maximize, choices=choices)

    def _check(self, choices: Mapping[str, Any]) -> None:
        check_range("momentum", choices["momentum"], below=1)
        check_range("trust_coefficient", choices["trust_coefficient"])
        if choices["nesterov"] and not choices["momentum"]:
            raise ConfigError("nesterov=True: needs momentum; take momentum=0.9")

    def _measure(self, batch: Batch, group: Mapping[str, Any], num_steps: int, factor: Factor) -> None:
        torch._foreach_copy_(batch.updates, batch.gradients)
        if not is_identity(factor):
            torch._foreach_mul_(batch.updates, factor)

    def _ratios(self, weight_norms: Norms, update_norms: Norms, group: Mapping[str, Any]) -> Norms:
        return trust_ratios(
            weight_norms,
            update_norms,
            coefficient=group["trust_coefficient"],
            weight_decay=group["weight_decay"] if group["decay_in_ratio"] else 0.0,
            eps=group["eps"],
            norm_bounds=group["norm_bounds"],
        )

    def _apply(self, batch: Batch, group: Mapping[str, Any], ratios: Ratios) -> None:
        weights, _, (momenta,), updates = batch
        rate, decay, momentum = float(group["lr"]), group["weight_decay"], group["momentum"]
        inside, outside = (rate, 1.0) if group["rate_in_momentum"] else (1.0, rate)
        scales = scaled(ratios, inside)
        if group["decay_in_ratio"]:
            torch._foreach_add_(updates, weights, alpha=decay)
            torch._foreach_mul_(updates, scales)
        else:
            torch._foreach_mul_(updates, scales)
            torch._foreach_add_(updates, weights, alpha=inside * decay)
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, updates)
        if group["nesterov"]:
            torch._foreach_add_(updates, momenta, alpha=momentum)
        else:
            updates = momenta
        torch._foreach_add_(weights, updates, alpha=-outside)


class LARC(LARS):
    """LARC: LARS whose rate is never above lr (NVIDIA/apex, parallel/LARC.py).

    Args:
        params, lr, maximize, choices: as in `LARS`.
        preset: "apex" or "timm".
    """

    PRESETS = LARC_PRESETS

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        preset: str = "apex",
        maximize: bool = False,
        **choices: Unpack[LarsChoices],
    ) -> None:
        super().__init__(params, lr, preset=preset, maximize=maximize, **choices)

    def _ratios(self, weight_norms: Norms, update_norms: Norms, group: Mapping[str, Any]) -> Norms:
        ratios, rate = super()._ratios(weight_norms, update_norms, group), float(group["lr"])
        has_ratio = (weight_norms > 0) & (update_norms > 0)
        xp = functions_for(ratios)
        return xp.where(has_ratio & (rate > 0), xp.clip(ratios / (rate or 1.0), None, 1.0), 1.0)
