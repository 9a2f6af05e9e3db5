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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ddp.errors import ConfigError
from ddp.optim.layerwise import Adapt, Batch, Layerwise, Ratios, check_range
from ddp.optim.norms import Norms, trust_ratios


@dataclass(frozen=True, kw_only=True)
class LarsChoices:
    """The choices in which implementations of LARS differ; by default the paper's.

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

    momentum: float = 0.9
    weight_decay: float = 5e-4
    trust_coefficient: float = 0.001
    eps: float = 0.0
    nesterov: bool = False
    rate_in_momentum: bool = True
    decay_in_ratio: bool = True
    norm_bounds: tuple[float, float] = (0.0, math.inf)
    adapt: Adapt = "always"
    clip_norm: float | None = None


_OUTSIDE = LarsChoices(eps=1e-8, rate_in_momentum=False)
LARS_PRESETS = {
    "paper": LarsChoices(),  # arXiv 1708.03888, algorithm 1 and section 5
    "timm": replace(_OUTSIDE, adapt="with_decay"),  # huggingface/pytorch-image-models@9d8ccd2, lars.py
    "mlperf": LarsChoices(weight_decay=1e-4),  # mlcommons/training@615ad0a, tensorflow2/lars_optimizer.py
}
LARC_PRESETS = {
    "apex": replace(_OUTSIDE, trust_coefficient=0.02),  # NVIDIA/apex@0bfb830, apex/parallel/LARC.py
    "timm": replace(_OUTSIDE, adapt="with_decay"),  # the same file, with trust_clip=True
}


class LARS(Layerwise):
    """LARS; its choices are those of `LarsChoices`."""

    STATES: tuple[str, ...] = ("momentum_buffer",)
    PRESETS = LARS_PRESETS

    def _check(self, choices: Mapping[str, Any]) -> None:
        check_range("momentum", choices["momentum"], least=0, below=1)
        check_range("trust_coefficient", choices["trust_coefficient"], least=0)
        if choices["nesterov"] and not choices["momentum"]:
            raise ConfigError("nesterov=True: needs momentum; take momentum=0.9")

    def _measure(self, batch: Batch, group: Mapping[str, Any], num_steps: int, factor: float) -> None:
        torch._foreach_copy_(batch.updates, batch.gradients)
        if factor != 1.0:
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
        scales = inside * ratios if isinstance(ratios, float) else [inside * ratio for ratio in ratios]
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
    """LARC: LARS whose rate is never above lr."""

    PRESETS = LARC_PRESETS

    def _ratios(self, weight_norms: Norms, update_norms: Norms, group: Mapping[str, Any]) -> Norms:
        ratios, rate = super()._ratios(weight_norms, update_norms, group), float(group["lr"])
        has_ratio = (weight_norms > 0) & (update_norms > 0)
        return np.where(has_ratio & (rate > 0), np.minimum(ratios / (rate or 1.0), 1.0), 1.0)
