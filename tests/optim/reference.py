"""LAMB, LARS and LARC written down again, slowly: one tensor after another, in NumPy, from the formulas.

`lamb` and `lars` take every choice of ours. The functions below them are the arithmetic of the programs that the
presets are named after, in the order and with the names of those programs, and know nothing of our choices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # np.ndarray, of any type


def norm(x: Array) -> Any:
    return np.sqrt(np.sum(np.square(x)))


def clip(gradients: list[Array], clip_norm: float | None) -> list[Array]:
    if clip_norm is None:
        return gradients
    total = norm(np.concatenate([g.reshape(-1) for g in gradients]))
    return [g * type(total)(min(1.0, clip_norm / (total + 1e-6))) for g in gradients]


def has_ratio(adapt: str, decay: float) -> bool:
    return adapt == "always" or (adapt == "with_decay" and decay != 0)


def lamb(weights: list[Array], gradients: list[Array], states: list[dict[str, Any]], t: int, c: dict[str, Any]) -> None:
    """One step, in place. c: lr and every choice; "decay": one weight decay per tensor."""
    beta1, beta2 = c["betas"]
    for w, g, s, decay in zip(weights, clip(gradients, c["clip_norm"]), states, c["decay"], strict=True):
        m, v = s.setdefault("m", np.zeros_like(w)), s.setdefault("v", np.zeros_like(w))
        m[...] = beta1 * m + ((1 - beta1) if c["grad_averaging"] else 1) * g
        v[...] = beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = (m / (1 - beta1**t), v / (1 - beta2**t)) if c["bias_correction"] else (m, v)
        u = m_hat / (np.sqrt(v_hat) + c["eps"])
        inside, outside = (decay, 0.0) if c["decay_in_ratio"] else (0.0, decay)
        u = u + inside * w
        ratio = 1.0
        if has_ratio(c["adapt"], decay) and norm(w) > 0 and norm(u) > 0:
            low, high = c["norm_bounds"]
            ratio = min(min(max(norm(w), low), high) / norm(u), c["max_ratio"])
        w[...] = w - c["lr"] * (ratio * u + outside * w)


def lars(weights: list[Array], gradients: list[Array], states: list[dict[str, Any]], t: int, c: dict[str, Any]) -> None:
    """One step of LARS, or of LARC if c["larc"], in place."""
    lr, mu = c["lr"], c["momentum"]
    for w, g, s, decay in zip(weights, clip(gradients, c["clip_norm"]), states, c["decay"], strict=True):
        m = s.setdefault("m", np.zeros_like(w))
        ratio = 1.0
        if has_ratio(c["adapt"], decay) and norm(w) > 0 and norm(g) > 0:
            low, high = c["norm_bounds"]
            inside = decay if c["decay_in_ratio"] else 0.0
            phi = min(max(norm(w), low), high)
            ratio = c["trust_coefficient"] * phi / (norm(g) + inside * norm(w) + c["eps"])
            if c["larc"]:
                ratio = min(ratio / lr, 1.0)
        u = ratio * (g + decay * w) if c["decay_in_ratio"] else ratio * g + decay * w
        if c["rate_in_momentum"]:
            m[...] = mu * m + lr * u
            w[...] = w - (lr * u + mu * m if c["nesterov"] else m)
        else:
            m[...] = mu * m + u
            w[...] = w - lr * (u + mu * m if c["nesterov"] else m)


# --- the arithmetic of other programs, float32 -----------------------------------------------------------------------


F = np.float32


def tfa_lamb(w: Array, g: Array, s: dict[str, Any], t: int, *, lr: float, wd: float, excluded: bool) -> None:
    """tensorflow/addons, LAMB._resource_apply_dense; mlcommons/training has the same lines."""
    m, v = s.setdefault("m", np.zeros_like(w)), s.setdefault("v", np.zeros_like(w))
    m[...] = m * F(0.9) + g * F(1 - 0.9)
    v[...] = v * F(0.999) + (g * g) * F(1 - 0.999)
    update = (m / F(1 - 0.9**t)) / (np.sqrt(v / F(1 - 0.999**t)) + F(1e-6))
    if not excluded:
        update += F(wd) * w
    ratio = F(1)
    if not excluded and norm(w) > 0 and norm(update) > 0:
        ratio = norm(w) / norm(update)
    w[...] = w - ratio * F(lr) * update


def apex_lamb(
    w: Array, g: Array, s: dict[str, Any], t: int, *, lr: float, wd: float, global_norm: float, use_nvlamb: bool
) -> None:
    """NVIDIA/apex, LAMBStage1Functor and LAMBStage2Functor in MOMENT_MODE_1; timm's Lamb follows it."""
    m, v = s.setdefault("m", np.zeros_like(w)), s.setdefault("v", np.zeros_like(w))
    scaled = g / F(global_norm / 1.0 if global_norm > 1.0 else 1.0)
    m[...] = m * F(0.9) + F(1 - 0.9) * scaled
    v[...] = v * F(0.999) + F(1 - 0.999) * scaled * scaled
    update = (m / F(1 - 0.9**t)) / (np.sqrt(v / F(1 - 0.999**t)) + F(1e-6)) + F(wd) * w
    ratio = F(lr)
    if use_nvlamb or wd != 0:
        w_norm, u_norm = norm(w), norm(update)
        ratio = F(lr) * (w_norm / u_norm) if u_norm != 0 and w_norm != 0 else F(lr)
    w[...] = w - ratio * update


def timm_lars(w: Array, g: Array, s: dict[str, Any], t: int, *, lr: float, wd: float, trust_clip: bool) -> None:
    """huggingface/pytorch-image-models, Lars.step with momentum 0.9."""
    if wd != 0:
        ratio = F(0.001) * norm(w) / (norm(g) + norm(w) * F(wd) + F(1e-8)) if norm(w) > 0 and norm(g) > 0 else F(1)
        if trust_clip:
            ratio = min(ratio / F(lr), F(1))
        g = (g + F(wd) * w) * ratio
    if "m" not in s:
        s["m"] = np.array(g)
    else:
        s["m"][...] = s["m"] * F(0.9) + g
    w[...] = w - F(lr) * s["m"]


def mlperf_lars(w: Array, g: Array, s: dict[str, Any], t: int, *, lr: float, wd: float, skipped: bool) -> None:
    """mlcommons/training, MLPERF_LARSOptimizer._resource_apply_dense with momentum 0.9 and epsilon 0."""
    scaled_lr = F(lr)
    if not skipped:
        w_norm, g_norm = norm(w), norm(g)
        ratio = F(0.001) * w_norm / (g_norm + F(wd) * w_norm) if w_norm > 0 and g_norm > 0 else F(1)
        scaled_lr, g = F(lr) * ratio, g + F(wd) * w
    m = s.setdefault("m", np.zeros_like(w))
    m[...] = m * F(0.9) + g * scaled_lr
    w[...] = w - m


def apex_larc(w: Array, g: Array, s: dict[str, Any], t: int, *, lr: float, wd: float) -> None:
    """NVIDIA/apex, LARC.step around torch's SGD with momentum 0.9."""
    w_norm, g_norm = norm(w), norm(g)
    if w_norm != 0 and g_norm != 0:
        adaptive_lr = F(0.02) * w_norm / (g_norm + w_norm * F(wd) + F(1e-8))
        g = (g + F(wd) * w) * min(adaptive_lr / F(lr), F(1))
    if "m" not in s:
        s["m"] = np.array(g)
    else:
        s["m"][...] = s["m"] * F(0.9) + g
    w[...] = w - F(lr) * s["m"]
