"""Steps that are left out: ranges of a run's steps whose samples nobody trains on, at any number of workers.

    steps        1  2  3  4  5 …       skip_steps=(3, 4)
    positions    0  8 16 ──→ 32 …      a range of steps is a range of positions, and all other steps stay as they are

The settings name one range, which lies ahead of where a run begins or goes on. Those of earlier starts lie behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ddp.data.orders.steps import Steps
from ddp.errors import ConfigError


class Skipped(NamedTuple):
    """A range of steps that is left out, as steps and as positions of the run."""

    first: int  # steps, counted from 1
    last: int
    start: int  # positions
    stop: int


class Skips(NamedTuple):
    """The steps of a run without those that are left out.

    Attributes:
        sizes: of all steps.
        ranges: in rising order; at most the last one lies ahead.
    """

    sizes: Steps
    ranges: Sequence[Skipped]

    def with_range(self, steps: tuple[int, int], *, num_steps: int, position: int) -> Skips:
        """Returns these and another range, unless it is one of these.

        Args:
            num_steps, position: steps that the run has made, and where it goes on.

        Raises:
            ConfigError: the range has begun already.
        """
        if steps in [each[:2] for each in self.ranges]:
            return self
        first, last = steps
        if first <= num_steps:
            raise ConfigError(
                f"skip_steps=[{first},{last}]: the run goes on after step {num_steps}, so that it is too late for "
                f"step {first}; name later steps, or go back to a checkpoint before them"
            )
        start, stop = (self.sizes.after(position, step - num_steps) for step in (first - 1, last))
        return self._replace(ranges=[*self.ranges, Skipped(first, last, start, stop)])

    def before(self, position: int) -> list[Skipped]:
        """Returns the ranges that end at a position or before it."""
        return [each for each in self.ranges if each.stop <= position]

    def past(self, position: int) -> int:
        """Returns where the next step begins."""
        for each in self.ranges:
            position = each.stop if each.start <= position < each.stop else position
        return position

    def within(self, begin: int, end: int) -> Iterator[range]:
        """Yields the positions that are left out, range by range."""
        for each in self.ranges:
            yield range(max(begin, each.start), min(end, each.stop))

    def num_steps(self, begin: int, end: int) -> int:
        """Returns the number of steps that lead from one position to another, or just beyond it."""
        left_out = [each for each in self.ranges if begin <= each.start and each.stop < end]
        return self.sizes.num_steps(begin, end) - sum(self.sizes.num_steps(each.start, each.stop) for each in left_out)

    def end(self, begin: int, *, epochs: int | None, num_steps: int | None) -> tuple[int, int]:
        """Returns the steps that are left after `begin` samples, and the position after them; as `Steps.end`."""
        left, end = self.sizes.end(begin, epochs=epochs, num_steps=num_steps)
        ahead = self.ranges[-1] if self.ranges else Skipped(0, 0, 0, 0)
        before = self.sizes.num_steps(begin, ahead.start)
        if begin >= ahead.stop or left <= before:
            return left, end
        rest = None if num_steps is None else num_steps - before
        left, end = self.sizes.end(ahead.stop, epochs=epochs, num_steps=rest)
        return before + left, end


def checked_range(steps: Any) -> tuple[int, int]:
    """Returns the first and the last of a range of steps.

    Raises:
        ConfigError: it is none.
    """
    try:
        first, last = (operator.index(step) for step in steps)
        is_range = 1 <= first <= last
    except (TypeError, ValueError):
        is_range = False
    if not is_range:
        raise ConfigError(f"skip_steps={steps!r}: takes the first and the last step, counted from 1, as (4700, 4710)")
    return first, last
