"""LAMB: Adam's update, as long as the tensor's weights allow (You et al., arXiv 1904.00962v5, algorithm 2).

    m ← β₁ m + (1 − β₁) g                    v ← β₂ v + (1 − β₂) g²
    u = (m ÷ (1 − β₁ᵗ)) ÷ (√(v ÷ (1 − β₂ᵗ)) + ε) + λ w
    w ← w − lr · φ(‖w‖) ÷ ‖u‖ · u

The first four versions of the paper differ from the fifth, and implementations differ from all of them. What is in
dispute is an argument (`LambChoices`), and `PRESETS` has the known variants.

A step reads w, g, m, v and writes m, v and u, and then reads w and u and writes w: ten streams, where Adam has seven.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from ddp.errors import ConfigError
from ddp.optim.layerwise import Adapt, Batch, Factor, Layerwise, Ratios, check_range, is_identity, scaled
from ddp.optim.norms import Norms, trust_ratios


class LambChoices(TypedDict, total=False):
    """The choices in which implementations of LAMB differ.

    Attributes:
        betas: decay of the running means of gradients and of squared gradients.
        eps: added to √v. With Adam's 1e-8, layers of tiny gradients take steps of full length on noise.
        weight_decay: λ.
        bias_correction: divide m and v by 1 − βᵗ. Without it, u is too long in the first steps; the ratio hides that,
            except in tensors without a ratio.
        grad_averaging: the new gradient counts 1 − β₁ in m; else it counts 1, as in SGD's momentum. The ratio hides the
            difference, except beside the decay.
        decay_in_ratio: λw is a part of u, and shares its ratio; else w decays by lr · λ, as in AdamW.
        norm_bounds: φ clamps ‖w‖ to these. The paper leaves φ open, and its authors' code uses ‖w‖.
        max_ratio: the largest ratio; 1 makes LAMBC, which can only shorten Adam's step.
        adapt: which tensors have a ratio: "always" all, "with_decay" those of groups with a decay.
        clip_norm: largest norm of the gradient of all parameters together; None for no clipping. Adam's update does
            not depend on the gradient's length, so this only limits what a single large gradient leaves in m and v.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    bias_correction: bool
    grad_averaging: bool
    decay_in_ratio: bool
    norm_bounds: tuple[float, float]
    max_ratio: float
    adapt: Adapt
    clip_norm: float | None


_PAPER: LambChoices = {
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
PRESETS: dict[str, LambChoices] = {
    "paper": _PAPER,  # arXiv 1904.00962v5, algorithm 2; φ(‖w‖) = ‖w‖ as in its experiments
    "tfa": {**_PAPER, "weight_decay": 0.0},  # tensorflow/addons@cbe5e9c, optimizers/lamb.py
    "nvlamb": {**_PAPER, "clip_norm": 1.0},  # NVIDIA/apex@0bfb830, FusedLAMB(use_nvlamb=True)
    "apex": {**_PAPER, "clip_norm": 1.0, "adapt": "with_decay"},  # NVIDIA/apex@0bfb830, csrc/multi_tensor_lamb.cu
    "timm": {**_PAPER, "clip_norm": 1.0, "adapt": "with_decay"},  # huggingface/pytorch-image-models@9a6fcf5, lamb.py
    "mlperf": {**_PAPER, "clip_norm": 1.0},  # mlcommons/training@373dfed, bert/optimization.py
}


class LAMB(Layerwise):
    """LAMB: Adam's update, scaled tensor by tensor (You et al., arXiv 1904.00962v5).

    Args:
        params: parameters, or groups of them; a group may have its own settings, such as adapt="never".
        lr: the learning rate; the ratio makes it the share of a tensor's norm that one step changes.
        preset: where the choices that are not given come from: "paper", "tfa", "nvlamb", "apex", "timm" or "mlperf".
        maximize: go up the gradient.
        choices: see `LambChoices`.

    Raises:
        ConfigError: there is no such preset or choice, or a value is out of its range.
    """

    STATES = ("exp_avg", "exp_avg_sq")
    PRESETS = PRESETS

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

    def _check(self, choices: Mapping[str, Any]) -> None:
        for beta in choices["betas"]:
            check_range("betas", beta, below=1)
        if not choices["max_ratio"] > 0:
            raise ConfigError(f"max_ratio={choices['max_ratio']!r}: must be above 0")

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
