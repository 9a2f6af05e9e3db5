"""What a step must agree on: it rides in the tails of the first and the last bucket, and so costs no message.

    tail of the first bucket   loss_sum   items ÷ 4096   items % 4096   ranks that want to stop
    tail of the last bucket    ranks with unused parameters   ranks with undefined gradients

The gradients are sums over samples (or tokens); the mean is taken once, by the *global* count. The count travels first,
so that every later bucket can be divided on its way. A float32 holds integers up to 2²⁴ exactly; the count takes two
lanes, so that it is exact up to 2³⁶ per step. What is known only when backward has ended travels last; the last tail is
divided like the gradients beside it, so all that it tells is which of its two numbers are above zero.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NUM_LANES = 4  # of the first bucket's tail
NUM_UNUSED = 2  # of the last bucket's
BASE = 4096


class StepTotals(NamedTuple):
    """Sums over ranks, or one rank's part of them.

    Attributes:
        loss_sum: sum of the losses of all samples (or tokens) of the step; a scalar tensor on its way in, so that a
            GPU need not be waited for, a float on its way out.
        num_items: how many samples (or tokens) they are.
        num_stopping: ranks that want to stop after this step.
    """

    loss_sum: float | Tensor = 0.0
    num_items: int = 0
    num_stopping: int = 0

    def write(self, tail: Tensor) -> None:
        """Into a tail, [NUM_LANES]."""
        counts = [self.num_items // BASE, self.num_items % BASE, self.num_stopping]
        tail[1:].copy_(tail.new_tensor(counts))
        tail[0] = self.loss_sum

    @classmethod
    def read(cls, tail: Tensor) -> StepTotals:
        """From a tail, [NUM_LANES]."""
        loss_sum, high, low, num_stopping = tail.tolist()
        return cls(loss_sum, round(high) * BASE + round(low), round(num_stopping))
