"""Totals and flags of a step: they travel with the gradients, in the tails of two buckets, and need no message.

    totals     loss_sum   items ÷ 4096   items % 4096   votes to stop
               streams that end                                           in the tail of the first bucket
    flags      unused parameters   undefined gradients   values that are
               not finite   squared norms                                 in the tail of the last bucket

The gradients are sums over samples (or tokens), and the mean is taken once, by the *global* count. So the count travels
first: then every later bucket can be divided as a part of its all-reduce. A float32 holds integers up to 2²⁴ exactly.
The count takes two elements, so that it is exact up to 2³⁶ per step. It need not be whole: of a mean with class weights
it is the sum of the weights, whose fraction is in the second element. Collectives divide by the nearest whole number
then, and the rest of the division is made when the totals are read. The flags (`StepFlags` of
`replica/step_finalizer.py`) are known only when backward has ended, so they travel last. Their tail is divided like the
gradients next to it, so a flag says that some rank has set it, and not how many have.

On request each rank finds the squared norm of its own gradient before it is averaged, for the noise scale
(`train/reports/meters.py`).

Where no bucket can carry a tail (its type is too narrow, or a wire format or a communication hook would round it),
totals and flags travel in their own messages: totals before the first bucket, flags after the last one. A `Rider` does
either. A `Division` (`replica/step_finalizer.py`) divides accordingly: most sums as a part of their all-reduce, by the
world size or by the count; the bucket that has carried the count, afterwards.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ddp.comm.reduction import OnDevice
from ddp.gradients.bucket import Bucket
from ddp.process import gpu

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator

BASE = 4096


class Parts(NamedTuple):
    """Squared norms of the gradients of parts of a batch; a rank without a measurement adds nothing.

    Attributes:
        squares: Σ nⱼ ‖gⱼ‖², where part j has nⱼ items, and gⱼ is the mean of their gradients.
        num_items: Σ nⱼ.
        num_parts: number of parts.
    """

    squares: float | Tensor = 0.0
    num_items: float = 0.0
    num_parts: float = 0.0

    @classmethod
    def of(cls, square: Tensor, num_items: float) -> Parts:
        """Returns the measurement of one part, from the squared norm of the *sum* of its items' gradients."""
        return cls(square / num_items, num_items, 1) if num_items else cls()


class Totals(NamedTuple):
    """Sums over ranks, or one rank's part of them.

    Attributes:
        loss_sum: sum of the losses of all samples (or tokens) of the step. One rank's part is a scalar tensor, so that
            a GPU need not be waited for; the sum over ranks is a float.
        num_items: number of these samples (or tokens), an int; or the sum of their weights, if that is not whole. One
            rank's part may be a scalar on a GPU.
        num_stopping: number of ranks that want to stop after this step.
        num_ending: number of ranks that have no batch for the next step.
        parts: what was measured; None for nothing.
        measure: the replica measures, with this rank's whole share as a part.
        loss_scale: what losses were multiplied by before backward, though not in `loss_sum`; gradients are divided by
            it. The same on every rank.
    """

    loss_sum: float | Tensor = 0.0
    num_items: float | Tensor = 0
    num_stopping: int = 0
    num_ending: int = 0
    parts: Parts | None = None
    measure: bool = False
    loss_scale: int = 1

    @property
    def mean_loss(self) -> float:
        """The loss as a mean over all samples (or tokens)."""
        return float(self.loss_sum) / (self.items_on_host or 1)

    @property
    def items_on_host(self) -> float:
        """The number of samples (or tokens) on the host, which may wait for it."""
        return count_of(float(self.num_items)) if isinstance(self.num_items, Tensor) else self.num_items

    @property
    def divisor(self) -> int:
        """The whole number, from 1 up, that sums over ranks are divided by on their way."""
        return max(1, round(self.items_on_host))

    @property
    def fraction_correction(self) -> float:
        """The factor on them afterwards: 1.0 if the count is whole, and in a step without samples."""
        return self.divisor / (self.items_on_host or 1)

    def write(self, tail: Tensor) -> None:
        """Writes this rank's part into a tail, [NUM_TOTALS]."""
        tail[0] = self.loss_sum
        votes = self.num_stopping, self.num_ending
        if isinstance(self.num_items, Tensor):
            items = self.num_items.double()
            tail[1:3].copy_(torch.stack([items // BASE, items % BASE]))
            tail[3:].copy_(sent(votes, tail))
        else:
            tail[1:].copy_(sent([self.num_items // BASE, self.num_items % BASE, *votes], tail))

    @classmethod
    def read(cls, tail: Sequence[float]) -> Totals:
        """Reads the sums over ranks from the numbers of a tail, [NUM_TOTALS]."""
        loss_sum, high, low, num_stopping, num_ending = tail
        if not math.isfinite(high + low):  # a count on a GPU that was not checked
            return cls(math.nan, 0, round(num_stopping), round(num_ending))
        return cls(loss_sum, count_of(round(high) * BASE + low), round(num_stopping), round(num_ending))


def sent(numbers: Sequence[float], tail: Tensor) -> Tensor:
    """Returns numbers on the device of a tail, without a wait for a GPU."""
    return gpu.sent(torch.tensor(numbers, dtype=tail.dtype, device="cpu"), tail.device)


def count_of(number: float) -> float:
    """Returns a count as an int if it is whole, so that quotients keep their bits."""
    return int(number) if number == int(number) else number


NUM_TOTALS, NUM_FLAGS = 5, 6


class GlobalCount(OnDevice):
    """The whole divisor of all ranks' sums, times the loss scale, as a value that can be read once totals are complete.

    Collectives that divide by it read it when they run, after the one that carries the totals.

    Args:
        totals: the tail that carries them, [NUM_TOTALS].
        loss_scale: see `Totals`.
    """

    def __init__(self, totals: Tensor, loss_scale: int = 1) -> None:
        self._totals, self._loss_scale = totals, loss_scale

    def __int__(self) -> int:
        return Totals.read(self._totals.tolist()).divisor * self._loss_scale

    @property
    def fraction_correction(self) -> float:
        """The factor on sums that were divided: 1.0 if the count is whole."""
        return Totals.read(self._totals.tolist()).fraction_correction


class CountOnDevice(GlobalCount):
    """A count that stays on a GPU, whose collectives are enqueued: the host does not wait for it.

    The division is by the exact count, whole or not.
    """

    fraction_correction = 1.0

    def on_device(self) -> Tensor:
        """Returns the count as a scalar on the GPU."""
        _, high, low, *_ = self._totals.double().unbind()
        count = high * BASE + low
        return torch.where(count > 0, count, 1.0) * self._loss_scale


def global_count(comm: Communicator, totals: Tensor, loss_scale: int = 1) -> GlobalCount:
    """Returns the global count of samples that a tail of a communicator's ranks will carry."""
    return (CountOnDevice if comm.is_stream_ordered else GlobalCount)(totals, loss_scale)


# --- How they travel -------------------------------------------------------------------------------------------------


class Rider:
    """Numbers that each step adds up over all ranks, in the tail of a bucket or in their own message.

    Args:
        carrier: the bucket; None: the numbers travel in their own message.
        place: of the numbers in its tail.
        shape: of `rows`.
        num_shards: as in `Layout`.

    Attributes:
        rows: [rows of a bucket, numel], from `find` on.
        numbers: [numel], row 0: this rank's numbers, and then the sums.
    """

    rows: Tensor
    numbers: Tensor

    def __init__(
        self, comm: Communicator, carrier: Bucket | None, place: slice, shape: tuple[int, int], num_shards: int | None
    ) -> None:
        self._comm, self.carrier, self._place, self._shape, self._num_shards = comm, carrier, place, shape, num_shards

    def allocate(self) -> None:
        """Allocates the rows of numbers that no bucket carries. Collective if there are shards."""
        if self.carrier is None and self._num_shards is None:
            self._take(torch.zeros(self._shape, dtype=torch.float64, device=self._comm.device))
        elif self.carrier is None:
            memory = self._comm.allocate(math.prod(self._shape), torch.float64)
            weakref.finalize(self, self._comm.free, memory).atexit = False
            self._take(memory.view(self._shape))

    def find(self) -> None:
        """Finds the tail again, because the bucket has new memory."""
        if self.carrier is not None:
            self._take(self.carrier.tail[None, self._place])

    def _take(self, rows: Tensor) -> None:
        self.rows, self.numbers = rows, rows[0]

    def send(self, *, label: str) -> None:
        """Adds the numbers up over all ranks, if no bucket carries them. Collective."""
        if self.carrier is None:
            self._comm.all_reduce(self.rows, num_shards=self._num_shards, label=label)
