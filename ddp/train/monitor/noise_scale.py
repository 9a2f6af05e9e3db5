"""The gradient noise scale: how large a batch is worth its samples (McCandlish et al., arXiv 1812.06162).

The gradient of n samples is the true gradient G and noise, whose variance is S ÷ n. So squared norms of gradients of
parts of a batch and of all of it tell both apart (the paper's appendix A.1, for parts of any size). For the gradients
gⱼ of P parts of nⱼ samples, and g of all n samples:

    E ‖g‖²          =   ‖G‖²      +  S ÷ n
    E Σ nⱼ ‖gⱼ‖²    =   ‖G‖² Σ nⱼ +  S P

The noise scale is S ÷ ‖G‖². With a batch of this size, training to the same loss takes twice as many steps as with
an endless one, and twice as many samples as with a tiny one: larger batches, and so more workers, buy less and less.

One measurement of ‖G‖² is mostly noise, so means of both are taken over the last measurements, and then divided. Both
fall by orders of magnitude in a run, while their quotient changes slowly. So each measurement is divided by the noise
that the ones before it have shown; otherwise the first ones would outweigh all others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

DECAY = 0.98  # of the weight of a measurement, per measurement: the last 50 count
DECAY_OF_UNIT = 0.8
FEWEST = 10  # measurements before anything is said


class Estimate(NamedTuple):
    """A noise scale in samples.

    Attributes:
        scale, error: the noise scale, and its standard error; None where ‖G‖² does not stand out of the noise.
        above: there, what the noise scale is larger than.
    """

    scale: float | None
    error: float | None
    above: float | None

    def in_words(self) -> str:
        """Returns the hint, with as many digits as mean something."""
        if self.scale is None or self.error is None:
            least = self.above or 0.0
            return f"critical batch above {_rounded(least, to=least):,}: up to there more workers pay"
        scale, error = _rounded(self.scale, to=self.error), _rounded(self.error, to=self.error)
        return f"critical batch ≈ {scale:,} ± {error:,}: beyond it workers buy less"


def _rounded(value: float, *, to: float) -> int:
    """Returns a value without the digits beyond the first one of `to`."""
    unit = int(10 ** math.floor(math.log10(max(to, 1.0))))
    return max(1, round(value / unit)) * unit


class NoiseScale:
    """A running estimate of the noise scale."""

    def __init__(self) -> None:
        self._weight, self._num = 0.0, 0
        self._unit = 0.0  # S, as recent measurements have shown it
        self._sums = np.zeros(2)  # of ‖G‖² and S, in units
        self._products = np.zeros((2, 2))

    def add(
        self, part_squares: float, *, part_samples: float, num_parts: int, square: float, num_samples: float
    ) -> None:
        """Takes in a measurement; parts that are the whole batch tell nothing, and are left out.

        Args:
            part_squares: Σ nⱼ ‖gⱼ‖².
            part_samples: Σ nⱼ.
            square: ‖g‖².
            num_samples: n.
        """
        num_noises = num_parts - part_samples / num_samples
        if num_noises <= 0 or not math.isfinite(part_squares + square):
            return
        noise = (part_squares - part_samples * square) / num_noises
        unit, self._unit = self._unit, DECAY_OF_UNIT * (self._unit or noise) + (1 - DECAY_OF_UNIT) * noise
        if unit <= 0:
            return
        both = np.array([square - noise / num_samples, noise]) / unit
        self._sums, self._products = DECAY * self._sums + both, DECAY * self._products + np.outer(both, both)
        self._weight, self._num = DECAY * self._weight + 1.0, self._num + 1

    def estimate(self) -> Estimate | None:
        """Returns the estimate; None before the first `FEWEST` measurements, or if all parts had equal gradients."""
        if self._num < FEWEST:
            return None
        mean = self._sums / self._weight
        covariance = (self._products / self._weight - np.outer(mean, mean)) / self._num_independent
        (signal, noise), spread = mean.tolist(), math.sqrt(max(0.0, covariance[0, 0]))
        if noise <= 0 or signal + 2 * spread <= 0:
            return None
        if signal <= 2 * spread:
            return Estimate(None, None, above=noise / (signal + 2 * spread))
        slope = np.array([-noise / signal, 1.0]) / signal  # of S ÷ ‖G‖²
        return Estimate(noise / signal, math.sqrt(max(0.0, float(slope @ covariance @ slope))), above=None)

    @property
    def _num_independent(self) -> float:
        """Returns how many measurements of equal weight would leave as much noise in the mean."""
        squares = (1 - DECAY ** (2 * self._num)) / (1 - DECAY**2)
        return max(1.0, self._weight**2 / squares - 1)
