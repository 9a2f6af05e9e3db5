"""How sums over the ranks become means: what a bucket is divided by, and when that is known.

    a plain step         by the number of ranks, on its way (under `join`, perhaps of those that still have inputs)
    totals ride along    by the global count of samples or tokens. The first bucket carries it, and is divided once it
                         is through; all later ones on their way
    a hook               has taken means over the ranks; they are turned into means over the global count at the end

Read before: `gradients/totals.py`, `arrangement.py`. Read next: `reducer.py`, which says when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import SupportsInt

from ddp.comm.communicator import Communicator
from ddp.comm.work import Work, done
from ddp.gradients.bucket import Bucket
from ddp.gradients.totals import StepTotals
from ddp.replica.arrangement import Arrangement


@dataclass
class Later:
    """A number that is read once it is known."""

    read: Callable[[], int]

    def __int__(self) -> int:
        return self.read()


class Mean:
    """Takes the means of one replica's buckets.

    Attributes:
        divide_by: what sums over ranks are divided by, unless totals ride along.
        totals: what all ranks' totals added up to in the last step.
    """

    def __init__(self, comm: Communicator, arrangement: Arrangement) -> None:
        self._comm, self._arrangement = comm, arrangement
        self.divide_by = comm.world_size
        self.totals = StepTotals()
        self._mine: StepTotals | None = None

    def ride_along(self, totals: StepTotals) -> None:
        """Sends this rank's part of the step's totals with the gradients."""
        self._mine = totals

    def write_totals(self) -> None:
        """Puts them where the first bucket carries them."""
        (self._mine or StepTotals()).write(self._arrangement.totals)

    def all_reduce(self, bucket: Bucket, *, async_op: bool, label: str) -> Work:
        """Sums a bucket over the ranks and divides it on its way. The first one carries what totals divide by."""
        flat = bucket.flat
        divide_by: SupportsInt = Later(self.divisor) if self._mine is None or bucket.index else 1
        if flat.device == self._comm.device:
            if async_op:
                return self._comm.all_reduce(flat, divide_by=divide_by, async_op=True, label=label)  # type: ignore[no-any-return]
            return done(self._comm.all_reduce(flat, divide_by=divide_by, label=label))
        staged = flat.to(self._comm.device)  # a model on several devices
        flat.copy_(self._comm.all_reduce(staged, divide_by=divide_by, label=label))
        return done()

    def settle(self, *, by_hook: bool) -> None:
        """All buckets are through: reads the totals, and divides what could not be divided before."""
        if self._mine is None:
            return
        self.totals = StepTotals.read(self._arrangement.totals)
        for bucket in self._arrangement.buckets:
            if by_hook:
                bucket.gradients.mul_(self._comm.world_size / self.divisor())
            elif bucket.index == 0:
                bucket.gradients.div_(self.divisor())

    def divisor(self) -> int:
        """Returns what sums over ranks are divided by: the world size, or the global count after bucket 0."""
        if self._mine is None:
            return self.divide_by
        return max(1, StepTotals.read(self._arrangement.totals).num_items)

    def forget(self) -> None:
        """The step is over."""
        self._mine = None

    def take_over(self, former: Mean) -> None:
        """Goes on in another one's place."""
        self._mine, self.divide_by, self.totals = former._mine, former.divide_by, former.totals
