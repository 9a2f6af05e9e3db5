"""PowerSGD: a matrix travels as two narrow ones, whose product is near it.

    M   [rows, columns]    the outgoing gradient of this host; Σ: sum over hosts
    P = Σ M Q              [rows, rank], one all-reduce
    P̂ = the orthonormal columns of P
    Q = Σ Mᵀ P̂             [columns, rank], another all-reduce
    result P̂ Qᵀ            kept: M − P̂ (Mᵀ P̂)ᵀ, of this host

That is one step of a power iteration, from the Q of the last step (*warm start*): over the steps, P̂ turns to the
directions in which gradients are largest. All that travels is (rows + columns) × rank numbers, by ordinary all-reduces,
at any number of hosts.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD", arXiv 1905.13727, algorithms 1 and 2; here each host keeps what it lacks
of its own M, and not of the mean: the sum over hosts is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError
from ddp.gradients.hooks.hook import Hook, Memory, Parcel, aligned, is_whole, summing, wide
from ddp.process import gpu
from ddp.process.streams import stream_seed

WORTH_IT = 2  # times fewer numbers, or the gradient goes dense


class PowerSGD(Hook):
    """Sends matrices as products of two narrow ones.

    Args:
        rank: number of columns of the narrow matrices.
        warm_start: begin with the factor of the last step, and not with a new random one.
        seed: of the first factors.
        error_feedback: put `ErrorFeedback` around it; without it accuracy is lost.

    Raises:
        ConfigError: the rank is not positive.
    """

    carries_whole = True

    def __init__(self, rank: int = 4, *, warm_start: bool = True, seed: int = 0, error_feedback: bool = True) -> None:
        if not (is_whole(rank) and rank >= 1):
            raise ConfigError(f"PowerSGD(rank={rank!r}): must be a whole number from 1 up")
        self.rank, self.warm_start, self.seed, self.error_feedback = rank, warm_start, seed, error_feedback
        self._factors = Memory("same")

    def __repr__(self) -> str:
        return f"PowerSGD({self.rank}, warm_start={self.warm_start}, seed={self.seed})"

    def takes(self, gradient: Tensor, shape: tuple[int, int], step: int) -> bool:
        narrow = WORTH_IT * self.rank * sum(shape)
        return super().takes(gradient, shape, step) and self.rank <= min(shape) and narrow <= gradient.numel()

    def reduce(self, parcels: Sequence[Parcel], comm: Communicator, step: int) -> None:
        starts = [self._start(parcel, step) for parcel in parcels]
        carried = [(n, parcel.outgoing.view(parcel.shape)) for n, parcel in enumerate(parcels) if len(parcel.outgoing)]
        summed, left = self._narrow(parcels, side=0)
        for number, matrix in carried:
            torch.mm(starts[number], matrix.T, out=left[number])
        comm.all_reduce(summed)
        torch._foreach_copy_(left, [torch.linalg.qr(p.T).Q.T for p in left])
        summed, right = self._narrow(parcels, side=1)
        for number, matrix in carried:
            torch.mm(left[number], matrix, out=right[number])
            if self.is_corrected:
                matrix.addmm_(left[number].T, right[number], alpha=-1)
        comm.all_reduce(summed)
        for parcel, start, p, q in zip(parcels, starts, left, right, strict=True):
            with summing(parcel.gradient) as total:
                torch.mm(p.T, q, out=total.view(parcel.shape))
            if self.warm_start:
                # A gradient of zeros says nothing about directions, and zeros would be a bad start.
                torch.where(q.any(), q, start, out=self._factors.buffer_for(parcel.name, q, q.dtype))

    def _narrow(self, parcels: Sequence[Parcel], *, side: int) -> tuple[Tensor, list[Tensor]]:
        """Returns zeros, and views of them as a narrow matrix for each parcel, of its rows or of its columns.

        They are [rank, size], because matrices of a few long rows are multiplied faster than those of a few columns.
        """
        sizes = [parcel.shape[side] for parcel in parcels]
        bounds = aligned(self.rank * size for size in sizes)
        flat = parcels[0].gradient.new_zeros(bounds[-1], dtype=wide(parcels[0].gradient.dtype))
        views = [
            flat[start : start + self.rank * size].view(self.rank, size)
            for size, start in zip(sizes, bounds, strict=False)
        ]
        return flat, views

    def _start(self, parcel: Parcel, step: int) -> Tensor:
        """Returns the Qᵀ to begin with, [rank, columns]: the last one, or a random one."""
        like, shape = parcel.outgoing, (self.rank, parcel.shape[1])
        factor = self._factors.committed.get(parcel.name)
        if factor is not None and factor.shape == shape:
            return factor
        keys = ("powersgd", parcel.name) if self.warm_start else ("powersgd", parcel.name, step)
        generator = torch.Generator().manual_seed(stream_seed(self.seed, *keys))
        return gpu.sent(torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu"), like.device)

    def memories(self) -> dict[str, Memory]:
        return {"factor": self._factors} if self.warm_start else {}
