"""Sparsification: a few numbers of each tensor are sent, the largest ones (top-k) or random ones (random-k)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError
from ddp.gradients.hooks.hook import Gathering, Hook, Memory, Parcel, aligned, is_number, is_whole, summing, wide
from ddp.process import gpu
from ddp.process.streams import stream_seed

# --- Top-k -----------------------------------------------------------------------------------------------------------
#
# The largest numbers of each tensor, with their positions.
#
#     outgoing       0.9  −0.2   0.1  −0.4        ratio 0.5: the two largest
#     what travels   0.9 at 0,  −0.4 at 3         8 bytes each
#     kept           0.0  −0.2   0.1   0.0        error feedback sends it later
#
# Which are the k largest is found exactly. A sample shows about how large they are; of the few numbers that reach that
# size, the k largest are selected.
#
# Every rank sends its numbers to all others, so the bytes grow with the number of hosts h: of a gradient's,
# 2 ratio (h − 1) arrive on each host.
#
# Note "momentum correction". A number that waits for many steps misses the momentum that an optimizer would have given
# it. With `momentum` the hook keeps the velocity itself, on each rank, and sends that; the optimizer must have none.
# Where a number was sent, its velocity starts anew, so that it does not push in an old direction.
#
# Note "ratio warm-up". At first weights change fast, so the ratio falls from 1/4 to the final one, by the same factor
# in each of `warmup_steps` steps.
#
# Source: Lin et al., "Deep Gradient Compression", arXiv 1712.01887, sections 3.2 and 3.3 and algorithm 4.


FIRST_RATIO = 0.25
NUM_SAMPLED = 1 << 16
STRETCH = 1 << 16  # numbers whose temporary copies fit a cache
INDEX_BYTES = 4
MARGIN = 1.2  # candidates for each number that is wanted


class TopK(Hook):
    """Sends the largest numbers of each tensor.

    Args:
        ratio: share of the numbers that is sent, above 0 and up to 1.
        momentum: of the velocity that is sent in place of the gradient (note "momentum correction"); below 1.
        warmup_steps: steps until the ratio is the final one (note "ratio warm-up").
        error_feedback: put `ErrorFeedback` around it; without it accuracy is lost.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self, ratio: float = 0.01, *, momentum: float = 0.0, warmup_steps: int = 0, error_feedback: bool = True
    ) -> None:
        if not (is_number(ratio) and 0 < ratio <= 1):
            raise ConfigError(f"TopK(ratio={ratio!r}): must be above 0 and at most 1")
        if not (is_number(momentum) and 0 <= momentum < 1):
            raise ConfigError(f"TopK(momentum={momentum!r}): must be at least 0 and below 1")
        if not (is_whole(warmup_steps) and warmup_steps >= 0):
            raise ConfigError(f"TopK(warmup_steps={warmup_steps!r}): must be a number of steps, from 0 up")
        self.ratio, self.momentum, self.warmup_steps = ratio, momentum, warmup_steps
        self.error_feedback = error_feedback
        self._velocity = Memory("summed")

    def __repr__(self) -> str:
        return f"TopK({self.ratio:g}, momentum={self.momentum:g}, warmup_steps={self.warmup_steps})"

    def check(self) -> None:
        if self.momentum and not self.is_corrected:
            raise ConfigError(
                f"the hook {self!r}: momentum needs error feedback; leave error_feedback=False out, or take momentum=0"
            )

    def ratio_at(self, step: int) -> float:
        """Returns the share of the numbers that is sent in this step, counted from 0."""
        if step >= self.warmup_steps or self.ratio >= FIRST_RATIO:
            return self.ratio
        return float(FIRST_RATIO * (self.ratio / FIRST_RATIO) ** (step / self.warmup_steps))

    def enter(self, parcel: Parcel) -> None:
        if self.momentum:
            parcel.outgoing = self._velocity.add_to(parcel.outgoing, parcel.name, factor=self.momentum)

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        host_partition, ratio = comm.host_partition, self.ratio_at(step)
        dtype = wide(parcels[0].gradient.dtype)
        parts = [[host_partition.part_of(p.gradient.numel(), r) for p in parcels] for r in range(comm.world_size)]
        counts = [[math.ceil(ratio * (part.stop - part.start)) for part in mine] for mine in parts]
        each = dtype.itemsize + INDEX_BYTES
        bounds = [aligned(each * count for count in mine) for mine in counts]
        gathering = Gathering([of_rank[-1] for of_rank in bounds], parcels[0].gradient, comm)
        for parcel, count, start in zip(parcels, counts[comm.rank], bounds[comm.rank], strict=False):
            where = largest(parcel.outgoing, count)
            numbers, positions = _views(gathering.mine[start:], count, dtype)
            torch.index_select(parcel.outgoing, 0, where, out=numbers)
            positions.copy_(where)
            parcel.outgoing.index_fill_(0, where, 0.0)
            if self.momentum:
                self._velocity.pending[parcel.name].index_fill_(0, where, 0.0)
        arrived = gathering.start().wait()
        for number, parcel in enumerate(parcels):
            with summing(parcel.gradient) as total:
                for rank, encoded in enumerate(arrived):
                    numbers, positions = _views(encoded[bounds[rank][number] :], counts[rank][number], dtype)
                    total[parts[rank][number]].index_add_(0, positions, numbers)

    def memories(self) -> dict[str, Memory]:
        return {"velocity": self._velocity} if self.momentum else {}


def largest(numbers: Tensor, count: int) -> Tensor:
    """Returns the positions of the `count` numbers of the largest absolute values, in any order."""
    numel = len(numbers)
    if numbers.device.type == "cpu" and numel > 4 * max(NUM_SAMPLED, count):
        # not on a GPU, which would have to tell the host how many reach that size
        sample = numbers[:: numel // NUM_SAMPLED].abs()
        rank = math.ceil(MARGIN * count / numel * len(sample)) + 8  # among the sample, from the largest on
        least = sample.kthvalue(max(1, len(sample) - rank)).values
        starts = range(0, numel, STRETCH)
        found = [torch.nonzero(numbers[start : start + STRETCH].abs() >= least) + start for start in starts]
        candidates = torch.cat(found).squeeze(1)
        if len(candidates) >= count:
            return candidates[numbers[candidates].abs().topk(count, sorted=False).indices]
    return numbers.abs().topk(count, sorted=False).indices


def _views(encoded: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the numbers and the positions in the bytes of a parcel."""
    middle = dtype.itemsize * count
    return encoded[:middle].view(dtype), encoded[middle : middle + INDEX_BYTES * count].view(torch.int32)


# --- Random-k --------------------------------------------------------------------------------------------------------
#
#     step 1      0.9  ·  ·  │  ·  ·  0.3  │  …      ratio 1/3: one number of every three
#     step 2       ·  0.1 ·  │ 0.5 ·   ·   │  …
#
# All ranks draw from the same keyed stream, so positions need not travel, and the numbers are added up by an ordinary
# all-reduce: the bytes are `ratio` times those of the gradient, at any number of hosts. Each number has the same
# chance. Without error feedback, what is sent is multiplied by the length of its run, so that the mean over many steps
# is right.
#
# Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", arXiv 1809.07599, definition 2.2; here one number is
# drawn from each run of neighbours, which costs k draws.


class RandomK(Hook):
    """Sends one number out of every 1 ÷ ratio.

    Args:
        ratio: share of the numbers that is sent, above 0 and up to 1; 1 ÷ ratio is rounded to a whole number.
        seed: of the draws.
        error_feedback: put `ErrorFeedback` around it.

    Raises:
        ConfigError: the ratio is out of range.
    """

    def __init__(self, ratio: float = 0.1, *, seed: int = 0, error_feedback: bool = True) -> None:
        if not (is_number(ratio) and 0 < ratio <= 1):
            raise ConfigError(f"RandomK(ratio={ratio!r}): must be above 0 and at most 1")
        self.ratio, self.seed, self._stride, self.error_feedback = ratio, seed, round(1 / ratio), error_feedback

    def __repr__(self) -> str:
        return f"RandomK({self.ratio:g}, seed={self.seed})"

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        on_host = [self._draw(parcel, step) for parcel in parcels]  # where their number is known without waiting
        lengths = list(map(len, on_host))
        bounds = aligned(lengths)
        drawn = gpu.sent(torch.cat(on_host), parcels[0].gradient.device).split(lengths)
        numbers = parcels[0].gradient.new_zeros(bounds[-1], dtype=wide(parcels[0].gradient.dtype))
        for parcel, where, known, start in zip(parcels, drawn, on_host, bounds, strict=False):
            first, last = torch.searchsorted(known, known.new_tensor([parcel.mine.start, parcel.mine.stop])).tolist()
            here = where[first:last] - parcel.mine.start
            torch.index_select(parcel.outgoing, 0, here, out=numbers[start + first : start + last])
            parcel.outgoing.index_fill_(0, here, 0.0)
            if not self.is_corrected:
                runs, last_run = numbers[start : start + len(where)].split([len(where) - 1, 1])
                runs.mul_(self._stride)
                last_run.mul_(parcel.gradient.numel() - self._stride * (len(where) - 1))
        comm.all_reduce(numbers)
        torch._foreach_zero_([parcel.gradient for parcel in parcels])
        for parcel, where, start in zip(parcels, drawn, bounds, strict=False):
            parcel.gradient[where] = numbers[start : start + len(where)].to(parcel.gradient.dtype)

    def _draw(self, parcel: Parcel, step: int) -> Tensor:
        """Returns the positions of this step, rising, on the CPU."""
        numel = parcel.gradient.numel()
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "random_k", step, parcel.name))
        starts = torch.arange(0, numel, self._stride, device="cpu")
        lengths = (numel - starts).clamp_(max=self._stride)
        draws = torch.randint(1 << 40, lengths.shape, generator=generator, device="cpu")
        return starts + draws % lengths
