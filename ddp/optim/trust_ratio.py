"""Optimizers with a trust ratio: LARS and LARC are momentum SGD, and LAMB is Adam, whose rate follows each tensor.

    LARS    ratio = η ‖w‖ ÷ (‖g‖ + λ‖w‖ + ε)             You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1
    LARC    ratio = min(that ÷ lr, 1), so that the rate is never above lr            NVIDIA/apex, parallel/LARC.py

    u = ratio · (g + λ w)
    m ← μ m + lr · u,   w ← w − m           the rate inside the momentum (the paper, MLPerf)
    m ← μ m + u,        w ← w − lr · m      outside (torch's SGD, timm, apex)

The two differ while the rate changes: inside, an old gradient keeps the rate of its own step. LAMB follows below.

A step of LARS reads w and g and writes u, and then reads w, u and m and writes m and w: eight streams, where SGD has
five.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from ddp.errors import ConfigError
from ddp.optim.layerwise import Adapt, Batch, Factor, Layerwise, Ratios, is_identity, scaled
from ddp.optim.norms import Norms, functions_for
from ddp.setting import Below1, FromZero, Positive

# --- Trust ratios ----------------------------------------------------------------------------------------------------
#
# A trust ratio scales each tensor's step to its weights. Layers differ by orders of magnitude in ‖w‖ ÷ ‖gradient‖. One
# rate for all of them is limited by the layer in which this quotient is smallest, and a large batch, which can afford
# few steps, needs a large rate. So LARS and LAMB multiply the rate of each tensor by its own ratio:
#
#     LARS    η φ(‖w‖) ÷ (‖g‖ + λ‖w‖ + ε)     arXiv 1708.03888, algorithm 1
#     LAMB    φ(‖w‖) ÷ ‖u‖                    arXiv 1904.00962v5, algorithm 2
#
# Where a norm is zero, the ratio is 1. If it were 0, weights that begin at zero would stay zero forever.


def trust_ratios(
    weight_norms: Norms,
    update_norms: Norms,
    *,
    coefficient: float = 1.0,
    weight_decay: float = 0.0,
    eps: float = 0.0,
    norm_bounds: tuple[float, float] = (0.0, math.inf),
    max_ratio: float = math.inf,
) -> Norms:
    """Returns the trust ratio of each tensor, [num_tensors].

    Args:
        weight_norms: [num_tensors], ‖w‖.
        update_norms: [num_tensors], ‖g‖ (LARS) or ‖u‖ (LAMB).
        coefficient: η.
        weight_decay: λ, if decay is a part of the update that ‖g‖ does not include yet.
        eps: ε.
        norm_bounds: φ clamps ‖w‖ to these.
        max_ratio: the largest ratio.
    """
    xp = functions_for(weight_norms)
    bounded = xp.clip(weight_norms, *norm_bounds)
    has_ratio = (weight_norms > 0) & (update_norms > 0)
    lengths = xp.where(has_ratio, update_norms + weight_decay * weight_norms + eps, 1)
    return xp.where(has_ratio, xp.clip(coefficient * bounded / lengths, None, max_ratio), 1.0)


# --- LARS and LARC: momentum SGD --------------------------------------------------------------------------------------


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

    momentum: Below1
    weight_decay: FromZero
    trust_coefficient: FromZero
    eps: FromZero
    nesterov: bool
    rate_in_momentum: bool
    decay_in_ratio: bool
    norm_bounds: tuple[FromZero, FromZero]
    adapt: Adapt
    clip_norm: Positive | None


_LARS: LarsChoices = {
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
_OUTSIDE: LarsChoices = {**_LARS, "eps": 1e-8, "rate_in_momentum": False}
LARS_PRESETS: dict[str, LarsChoices] = {
    "paper": _LARS,  # arXiv 1708.03888, algorithm 1 and section 5
    "timm": {**_OUTSIDE, "adapt": "with_decay"},  # huggingface/pytorch-image-models@9d8ccd2, lars.py
    "mlperf": {**_LARS, "weight_decay": 1e-4},  # mlcommons/training@615ad0a, tensorflow2/lars_optimizer.py
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
        preset: the source of all choices that are not given: "paper", "timm" or "mlperf".
        maximize: go up the gradient.
        choices: see `LarsChoices`.

    Raises:
        ConfigError: there is no such preset or choice, or a value is out of its range.
    """

    STATES: tuple[str, ...] = ("momentum_buffer",)
    PRESETS, CHOICES = LARS_PRESETS, LarsChoices

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


# --- LAMB: Adam's update, as long as the tensor's weights allow -------------------------------------------------------
#
#     m ← β₁ m + (1 − β₁) g                    v ← β₂ v + (1 − β₂) g²
#     u = (m ÷ (1 − β₁ᵗ)) ÷ (√(v ÷ (1 − β₂ᵗ)) + ε) + λ w
#     w ← w − lr · φ(‖w‖) ÷ ‖u‖ · u          You et al., arXiv 1904.00962v5, algorithm 2
#
# The first four versions of the paper differ from the fifth, and implementations differ from all of them. Each point of
# dispute is an argument (`LambChoices`), and `LAMB_PRESETS` has the known variants.
#
# A step reads w, g, m, v and writes m, v and u, and then reads w and u and writes w: ten streams, where Adam has seven.


class LambChoices(TypedDict, total=False):
    """The choices in which implementations of LAMB differ.

    Attributes:
        betas: decay of the running means of gradients and of squared gradients.
        eps: added to √v. With Adam's 1e-8, layers of tiny gradients take steps of full length on noise.
        weight_decay: λ.
        bias_correction: divide m and v by 1 − βᵗ. Without it, u is too long in the first steps; the ratio hides that,
            except in tensors without a ratio.
        grad_averaging: the new gradient counts 1 − β₁ in m; else it counts 1, as in SGD's momentum. The ratio hides the
            difference, except relative to the decay.
        decay_in_ratio: λw is a part of u, and shares its ratio; else w decays by lr · λ, as in AdamW.
        norm_bounds: φ clamps ‖w‖ to these. The paper leaves φ open, and its authors' code uses ‖w‖.
        max_ratio: the largest ratio; 1 makes LAMBC, which can only shorten Adam's step.
        adapt: which tensors have a ratio: "always" all, "with_decay" those of groups with a decay.
        clip_norm: largest norm of the gradient of all parameters together; None for no clipping. Adam's update does
            not depend on the gradient's length, so this only limits what a single large gradient leaves in m and v.
    """

    betas: tuple[Below1, Below1]
    eps: FromZero
    weight_decay: FromZero
    bias_correction: bool
    grad_averaging: bool
    decay_in_ratio: bool
    norm_bounds: tuple[FromZero, FromZero]
    max_ratio: Positive
    adapt: Adapt
    clip_norm: Positive | None


_LAMB: LambChoices = {
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "bias_correction": True,
    "grad_averaging": True,
    "decay_in_ratio": True,
    "norm_bounds": (0.0, math.inf),
    "max_ratio": math.inf,
    "adapt": "always",
    "clip_norm": None,
}
LAMB_PRESETS: dict[str, LambChoices] = {
    "paper": _LAMB,  # arXiv 1904.00962v5, algorithm 2; φ(‖w‖) = ‖w‖ as in its experiments
    "tfa": {**_LAMB, "weight_decay": 0.0},  # tensorflow/addons@cbe5e9c, optimizers/lamb.py
    "nvlamb": {**_LAMB, "clip_norm": 1.0},  # NVIDIA/apex@0bfb830, FusedLAMB(use_nvlamb=True)
    "apex": {**_LAMB, "clip_norm": 1.0, "adapt": "with_decay"},  # NVIDIA/apex@0bfb830, csrc/multi_tensor_lamb.cu
    "timm": {**_LAMB, "clip_norm": 1.0, "adapt": "with_decay"},  # huggingface/pytorch-image-models@9a6fcf5, lamb.py
    "mlperf": {**_LAMB, "clip_norm": 1.0},  # mlcommons/training@373dfed, bert/optimization.py
}


class LAMB(Layerwise):
    """LAMB: Adam's update, scaled tensor by tensor (You et al., arXiv 1904.00962v5).

    Args:
        params: parameters, or groups of them; a group may have its own settings, such as adapt="never".
        lr: the learning rate; through the ratio, the share of a tensor's norm that one step changes.
        preset: the source of all choices that are not given: "paper", "tfa", "nvlamb", "apex", "timm" or "mlperf".
        maximize: go up the gradient.
        choices: see `LambChoices`.

    Raises:
        ConfigError: there is no such preset or choice, or a value is out of its range.
    """

    STATES = ("exp_avg", "exp_avg_sq")
    PRESETS, CHOICES = LAMB_PRESETS, LambChoices

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        preset: str = "paper",
        maximize: bool = False,
        **choices: Unpack[LambChoices],
    ) -> None:
        super().__init__(params, lr, preset=preset, maximize=maximize, choices=choices)

    def _measure(self, batch: Batch, group: Mapping[str, Any], num_steps: int, factor: Factor) -> None:
        weights, gradients, (means, squares), updates = batch
        beta1, beta2 = group["betas"]
        if not is_identity(factor):
            gradients = list(torch._foreach_mul(gradients, factor))
        torch._foreach_zero_(updates)
        step = _counter(float(num_steps) if group["bias_correction"] else math.inf, weights[0].device)
        torch._fused_adam_(  # a step of −1 from zero: updates ← m̂ ÷ (√v̂ + ε)
            updates,
            gradients,
            means,
            squares,
            [],
            [step] * len(weights),
            lr=-1.0 if group["grad_averaging"] else -1.0 / (1 - beta1),  # m is kept as a mean in both cases
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
        if group["decay_in_ratio"] and group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])

    def _ratios(self, weight_norms: Norms, update_norms: Norms, group: Mapping[str, Any]) -> Norms:
        bounds, most = group["norm_bounds"], group["max_ratio"]
        return trust_ratios(weight_norms, update_norms, norm_bounds=bounds, max_ratio=most)

    def _apply(self, batch: Batch, group: Mapping[str, Any], ratios: Ratios) -> None:
        weights, updates, rate = batch.weights, batch.updates, float(group["lr"])
        if not group["decay_in_ratio"] and group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        if isinstance(ratios, float):
            torch._foreach_add_(weights, updates, alpha=-rate * ratios)
        else:
            torch._foreach_mul_(updates, scaled(ratios, -rate))
            torch._foreach_add_(weights, updates)


@lru_cache(maxsize=8)  # one for all units of a step
def _counter(num_steps: float, device: torch.device) -> Tensor:
    return torch.full((), num_steps, device=device)
