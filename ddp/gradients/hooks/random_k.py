"""Random-k: one number out of every few, drawn anew in each step; the same ones on every rank.

    step 1      0.9  ·  ·  │  ·  ·  0.3  │  …      ratio 1/3: one number of every three
    step 2       ·  0.1 ·  │ 0.5 ·   ·   │  …

All ranks draw from the same keyed stream, so positions need not travel, and the numbers are added up by an ordinary
all-reduce: the bytes are `ratio` times those of the gradient, at any number of hosts. Each number has the same chance.
Without error feedback, what is sent is multiplied by the length of its run, so that the mean over many steps is right.

Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", arXiv 1809.07599, definition 2.2; here one number is
drawn from each run of neighbours, which costs k draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError
from ddp.gradients.hooks.hook import Hook, Parcel, aligned, is_number, wide
from ddp.streams import stream_seed


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
        drawn, weights = zip(*(self._draw(parcel, step) for parcel in parcels), strict=True)
        bounds = aligned(map(len, drawn))
        numbers = parcels[0].gradient.new_zeros(bounds[-1], dtype=wide(parcels[0].gradient.dtype))
        for parcel, where, weight, start in zip(parcels, drawn, weights, bounds, strict=False):
            first, last = torch.searchsorted(where, where.new_tensor([parcel.mine.start, parcel.mine.stop])).tolist()
            here = where[first:last] - parcel.mine.start
            numbers[start + first : start + last] = parcel.outgoing[here]
            parcel.outgoing.index_fill_(0, here, 0.0)
            if not self.is_corrected:
                numbers[start : start + len(where)].mul_(weight)
        comm.all_reduce(numbers)
        for parcel, where, start in zip(parcels, drawn, bounds, strict=False):
            parcel.gradient.zero_()
            parcel.gradient[where] = numbers[start : start + len(where)].to(parcel.gradient.dtype)

    def _draw(self, parcel: Parcel, step: int) -> tuple[Tensor, Tensor]:
        """Returns the positions of this step, rising, and the number of those of which each was drawn."""
        numel = parcel.gradient.numel()
        generator = torch.Generator().manual_seed(stream_seed(self.seed, "random_k", step, parcel.name))
        starts = torch.arange(0, numel, self._stride, device="cpu")
        lengths = (numel - starts).clamp_(max=self._stride)
        draws = torch.randint(1 << 40, lengths.shape, generator=generator, device="cpu")
        return (starts + draws % lengths).to(parcel.gradient.device), lengths.to(parcel.gradient.device)
