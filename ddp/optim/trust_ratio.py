"""The trust ratio: each tensor's step is made as long as its weights allow.

Layers differ by orders of magnitude in ‖w‖ ÷ ‖gradient‖. One rate for all of them is limited by the layer in which this
quotient is smallest, and a large batch, which can afford few steps, needs a large rate. So LARS and LAMB multiply the
rate of each tensor by its own ratio:

    LARS    η φ(‖w‖) ÷ (‖g‖ + λ‖w‖ + ε)     arXiv 1708.03888, algorithm 1
    LAMB    φ(‖w‖) ÷ ‖u‖                    arXiv 1904.00962v5, algorithm 2

Where a norm is zero, the ratio is 1. With 0 there, weights that begin at zero would stay zero for ever.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Norms = NDArray[np.floating]


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
        weight_decay: λ, where decay is a part of the update and ‖g‖ does not hold it yet.
        eps: ε.
        norm_bounds: φ clamps ‖w‖ to these.
        max_ratio: the largest ratio.
    """
    least, most = norm_bounds
    bounded = np.minimum(np.maximum(weight_norms, least), most)
    has_ratio = (weight_norms > 0) & (update_norms > 0)
    lengths = np.where(has_ratio, update_norms + weight_decay * weight_norms + eps, 1)
    return np.where(has_ratio, np.minimum(coefficient * bounded / lengths, max_ratio), 1.0)
