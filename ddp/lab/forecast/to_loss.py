"""Tells what reaching a loss takes on other ranks, and why workers stop paying.

With noise scale N, a run at batch B needs S(B) = S_min (1 + N ÷ B) steps to the same loss (McCandlish et al., arXiv
1812.06162, equation 2.7). So workers stop paying for two reasons: at the same batch, a worker's share becomes small
beside what a step costs whatever the share; with a batch that grows along, samples become worth less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

HALF = 0.5  # of what workers cost is lost: no longer worth it


def steps_at(batch: float, *, noise_scale: float, num_steps: float, known_batch: float) -> float:
    """Returns the steps to the loss that a run with another batch reached in `num_steps`."""
    return num_steps * (1 + noise_scale / batch) / (1 + noise_scale / known_batch)


class ToLoss(NamedTuple):
    """Tells what reaching a loss takes."""

    batch: int
    num_steps: float
    seconds: float
    worker_hours: float


def to_loss(
    batch: int, step_s: float, *, num_ranks: int, noise_scale: float, num_steps: float, known_batch: float
) -> ToLoss:
    """Returns what it takes to reach the loss of a known run with another batch, whose steps take `step_s`."""
    steps = steps_at(batch, noise_scale=noise_scale, num_steps=num_steps, known_batch=known_batch)
    return ToLoss(batch, steps, steps * step_s, steps * step_s * num_ranks / 3600)


def batches_for(num_ranks: int, known_batch: int) -> list[int]:
    """Returns batches to try: multiples of the number of ranks, up to 64 times the known one, four to a doubling."""
    wanted = (known_batch * 2 ** (quarter / 4) for quarter in range(-12, 25))
    return sorted({known_batch, *(num_ranks * max(1, round(each / num_ranks)) for each in wanted)} - {0})


def first_reason(
    efficiencies: Mapping[int, float], *, noise_scale: float | None, batch: int
) -> tuple[int | None, int | None]:
    """Returns the number of workers from which on half is lost: at the same batch, and at one that grows along.

    Args:
        efficiencies: by number of workers, at the same batch.

    Returns:
        None for a reason that none of these numbers meets, or that is not known.
    """
    ranks = sorted(efficiencies)
    by_share = next((k for k in ranks if efficiencies[k] < HALF), None)
    if noise_scale is None:
        return by_share, None
    return by_share, next((k for k in ranks if (noise_scale + batch) / (noise_scale + k * batch) < HALF), None)
