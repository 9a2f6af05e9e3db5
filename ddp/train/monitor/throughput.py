"""Samples per second, and the shares of a step's time on this rank.

    step   = data (waiting for the next batch) + waiting (for other ranks, at the end of backward) + computing (the
    rest)

Samples are global: those of all ranks together.
"""

from __future__ import annotations


class Throughput:
    """Adds up the samples and times of steps."""

    def __init__(self) -> None:
        self.num_steps = self.num_samples = 0
        self.step_s = self.data_s = self.wait_s = 0.0

    def add(self, num_samples: int, *, step_s: float, data_s: float, wait_s: float) -> None:
        """Counts one step."""
        self.num_steps += 1
        self.num_samples += num_samples
        self.step_s += step_s
        self.data_s += data_s
        self.wait_s += wait_s

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s if self.step_s else 0.0

    @property
    def wait_fraction(self) -> float:
        """Returns the share of the time spent waiting for other ranks, in [0, 1]."""
        return self.wait_s / self.step_s if self.step_s else 0.0

    @property
    def data_fraction(self) -> float:
        """Returns the share of the time spent waiting for data, in [0, 1]."""
        return self.data_s / self.step_s if self.step_s else 0.0

    @property
    def compute_fraction(self) -> float:
        """Returns the rest of the time, in [0, 1]."""
        return max(0.0, 1.0 - self.wait_fraction - self.data_fraction) if self.step_s else 0.0
