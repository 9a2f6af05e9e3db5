"""Parameters side by side in memory that is laid out like the buckets of their gradients.

So a slice of a bucket is a slice of both, and is gathered without a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp.comm.communicator import Communicator
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.optim.norms import BLOCK_NUMEL, num_blocks
from ddp.replica.sharded import ShardedLayout


class Part(NamedTuple):
    """Holds what a rank updates of a parameter.

    Attributes:
        whole: the parameter.
        start, stop: the elements of it, in the order of memory.
        weights: [stop − start], a view of the parameter.
        gradient: the same elements of its gradient.
        blocks: the numbers of its blocks among those of all parameters.
        blocks_of_whole: those of the whole parameter.
    """

    whole: nn.Parameter
    start: int
    stop: int
    weights: nn.Parameter
    gradient: Tensor
    blocks: range
    blocks_of_whole: range


class ParameterSlices:
    """The parameters of a layout side by side, and the parts that this rank updates. Collective to make.

    Attributes:
        parts: in the order of the layout's parameters.
        num_blocks: of all parameters.
    """

    def __init__(self, comm: Communicator, layout: ShardedLayout) -> None:
        self._comm, self.layout = comm, layout
        counts = [num_blocks(parameter.numel()) for parameter in layout.parameters]
        starts = [0, *accumulate(counts)]
        self.num_blocks = starts[-1]
        self._flats = [
            comm.allocate(bounds[-1], bucket.flat.dtype)
            for bucket, bounds in zip(layout.buckets, layout.bounds, strict=True)
        ]
        self._release = weakref.finalize(self, _free, comm, self._flats)
        self._release.atexit = False
        parts: dict[int, Part] = {}
        for bucket, bounds, flat in self._of_buckets():
            for slot, start, begin, end in slice_of(bucket, bounds, comm.slices[comm.rank]):
                blocks = range(starts[slot.index], starts[slot.index + 1])
                skipped = (begin - start) // BLOCK_NUMEL
                parts[slot.index] = Part(
                    slot.parameter,
                    begin - start,
                    end - start,
                    nn.Parameter(flat[begin:end]),
                    bucket.flat[begin:end],
                    blocks[skipped : skipped + num_blocks(end - begin)],
                    blocks,
                )
        self.parts = [parts[index] for index in sorted(parts)]
        self.take_in()

    @torch.no_grad()
    def take_in(self) -> None:
        """Moves parameters into the flat memory; also those that somebody has moved out since."""
        for bucket, _, flat in self._of_buckets():
            for slot, view in zip(bucket.slots, bucket.views_of(flat), strict=True):
                if slot.parameter.data_ptr() != view.data_ptr() or slot.parameter.stride() != view.stride():
                    view.copy_(slot.parameter)
                    slot.parameter.data = view

    @torch.no_grad()
    def give_back(self) -> None:
        """Moves each parameter into memory of its own: who saves one would save all that lie beside it."""
        for slot in self.layout.slots:
            slot.parameter.data = slot.parameter.detach().clone()

    def gather(self, *, step: int) -> None:
        """Gives every rank the parameters that the others have updated. Collective.

        Args:
            step: for messages.
        """
        for bucket, bounds, flat in self._of_buckets():
            self._comm.all_gather_(flat, bounds, label=f"step {step}, parameters of {bucket.label}")

    def _of_buckets(self) -> Iterator[tuple[Bucket, list[int], Tensor]]:
        """Yields each bucket, the bounds of its slices, and the memory of its parameters."""
        return zip(self.layout.buckets, self.layout.bounds, self._flats, strict=True)


def _free(comm: Communicator, flats: Sequence[Tensor]) -> None:
    for flat in flats:
        comm.free(flat)


def slice_of(bucket: Bucket, bounds: Sequence[int], number: int) -> Iterator[tuple[Slot, int, int, int]]:
    """Yields each parameter that a slice has a part of: its slot and start, and where the part begins and ends."""
    start = 0
    for slot in bucket.slots:
        begin, end = max(bounds[number], start), min(bounds[number + 1], start + slot.parameter.numel())
        if begin < end:
            yield slot, start, begin, end
        start += span(slot.parameter)
