"""Steps: where one begins and how many samples it takes is a function of the run's position alone.

The position is the number of samples that all ranks together have trained on since the run began. An epoch ends with a
smaller step if the batch does not divide it. A *batch warm-up* begins with smaller batches: early gradients differ so
little from their mean that large batches would be wasted on them (arXiv 1812.06162). Since nothing but the
position counts, a loader may plan ahead, and a resumed run goes on exactly.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from ddp.errors import ConfigError


class BatchWarmup(NamedTuple):
    """A global batch that grows from `first` to `last` samples, in multiples of `first` but for the last.

    Attributes:
        num_samples: position from which on it is `last`.
    """

    first: int
    last: int
    num_samples: int

    def size_at(self, position: int) -> int:
        """Returns the global batch after `position` samples of the run."""
        if position >= self.num_samples:
            return self.last
        wanted = self.first + (self.last - self.first) * position // self.num_samples
        return wanted // self.first * self.first


class Steps(ABC):
    """The steps of a run.

    Attributes:
        length: positions of an epoch.
    """

    length: int

    @abstractmethod
    def size_at(self, position: int) -> int:
        """Returns the size of the step that begins after `position` samples of the run."""

    @abstractmethod
    def num_steps(self, begin: int, end: int) -> int:
        """Returns the number of steps that lead from one position to another, or just beyond it."""

    @abstractmethod
    def after(self, begin: int, num_steps: int) -> int:
        """Returns the position after some steps."""

    @abstractmethod
    def all(self) -> set[int]:
        """Returns the sizes that the steps of a run may have."""

    @abstractmethod
    def in_words(self) -> str:
        """Returns how large a step is."""

    @property
    @abstractmethod
    def usual(self) -> int:
        """Returns the samples of a step, but for exceptions: the global batch."""

    @property
    def num_steps_per_epoch(self) -> int:
        """Returns the number of steps of a whole epoch, once the batch has grown."""
        return math.ceil(self.length / self.usual)

    @property
    @abstractmethod
    def setting(self) -> Any:
        """Returns what the sizes follow from, as JSON can hold it."""

    def end(self, begin: int, *, epochs: int | None, num_steps: int | None) -> tuple[int, int]:
        """Returns the steps that are left after `begin` samples, and the position after them.

        Args:
            epochs: of the whole run; None for no limit.
            num_steps: most steps from now on; None for no limit.
        """
        limits = [] if num_steps is None else [num_steps]
        if epochs is not None:
            limits.append(self.num_steps(begin, epochs * self.length))
        return min(limits), self.after(begin, max(0, min(limits)))


class BatchSizes(Steps):
    """Steps of a number of samples.

    Args:
        length: positions of an epoch.
        batch: samples of a step, but for the last one of an epoch.

    Raises:
        ConfigError: a batch warm-up that does not grow.
    """

    def __init__(self, length: int, batch: int | BatchWarmup) -> None:
        self.length = length
        if isinstance(batch, BatchWarmup):
            are_whole = all(isinstance(each, int) and not isinstance(each, bool) for each in batch)
            if not are_whole or not (0 < batch.first < batch.last and batch.num_samples > 0):
                raise ConfigError(
                    f"{batch}: takes whole numbers; first must be at least 1 and less than last, num_samples at least 1"
                )
        self.batch = batch if isinstance(batch, BatchWarmup) else BatchWarmup(batch, batch, 0)

    def size_at(self, position: int) -> int:
        """Returns the size of the step that begins after `position` samples of the run."""
        return min(self.batch.size_at(position), self.length - position % self.length)

    @property
    def usual(self) -> int:
        """Returns the global batch, once it has grown."""
        return self.batch.last

    @property
    def setting(self) -> int | list[int]:
        """Returns the global batch, or how it grows."""
        return list(self.batch) if self.batch.num_samples else self.batch.last

    def in_words(self) -> str:
        """Returns the global batch, and how it grows."""
        first, last, num_samples = self.batch
        return f"{last}" if first == last else f"{first}, growing to {last} over {num_samples:,} samples,"

    def num_steps(self, begin: int, end: int) -> int:
        """Returns the number of steps that lead from one position to another, or just beyond it."""
        steps = 0
        while not self._is_steady(begin):
            num_steps, samples, size = self._stretch(begin)
            if begin + samples >= end:
                return steps + max(0, math.ceil((end - begin) / size))
            begin, steps = begin + samples, steps + num_steps
        epochs, rest = divmod(max(0, end - begin), self.length)
        return steps + epochs * math.ceil(self.length / self.batch.last) + math.ceil(rest / self.batch.last)

    def after(self, begin: int, num_steps: int) -> int:
        """Returns the position after some steps."""
        while not self._is_steady(begin):
            steps, samples, size = self._stretch(begin)
            if steps >= num_steps:
                return begin + min(samples, num_steps * size)
            begin, num_steps = begin + samples, num_steps - steps
        epochs, rest = divmod(num_steps, math.ceil(self.length / self.batch.last))
        return begin + epochs * self.length + rest * self.batch.last

    def all(self) -> set[int]:
        """Returns the sizes that the steps of a run may have."""
        found, position = set[int](), 0
        while position < self.batch.num_samples + self.length:
            num_steps, samples, size = self._stretch(position)
            found |= {size} if num_steps > 1 else set()
            found.add(samples - (num_steps - 1) * size)
            position += samples
        return found

    def _is_steady(self, position: int) -> bool:
        """Returns True if this and all further epochs are alike."""
        return position >= self.batch.num_samples and position % self.length == 0

    def _stretch(self, position: int) -> tuple[int, int, int]:
        """Returns (steps, samples, size): of one step while the batch grows, else of all that is left of an epoch."""
        left, size = self.length - position % self.length, self.batch.size_at(position)
        samples = left if position >= self.batch.num_samples else min(left, size)
        return math.ceil(samples / size), samples, size
