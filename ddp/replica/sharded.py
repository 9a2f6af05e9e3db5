"""The sharded replica: each bucket is reduce-scattered, so that a rank gets the mean gradient of its slice alone.

`strategies/sharded.py` updates the slice, and gathers the new parameters. Slices begin at tensors, or at blocks of
large ones (`optim/norms.py`). So every norm has the same bits as without sharding, and every rank the same parameters.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise, starmap
from typing import Any, NamedTuple, SupportsInt
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ddp.comm.call_queue import Work
from ddp.comm.communicator import Communicator
from ddp.comm.verbs import ScatterTerms
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, Slot, span, with_own_storage
from ddp.gradients.layout import Layout
from ddp.gradients.reducer import InFlight, Reducer
from ddp.optim.layerwise import laid_out_like
from ddp.optim.norms import BLOCK_NUMEL, in_memory_order, num_blocks
from ddp.replica.bucketed import BucketedDataParallel
from ddp.setting import WireName

_BOUNDS: WeakKeyDictionary[Bucket, list[int]] = WeakKeyDictionary()


def bounds_of(bucket: Bucket, comm: Communicator) -> list[int]:
    """Returns where each rank's slice of a bucket begins, in the order of slices, and where the last one ends."""
    if bucket not in _BOUNDS:
        _BOUNDS[bucket] = slice_bounds(bucket, comm.world_size)
    return _BOUNDS[bucket]


def slice_bounds(bucket: Bucket, num_slices: int) -> list[int]:
    """Returns where the slices of a bucket begin, about equally long, and where the last one ends."""
    starts = [0, *accumulate(span(slot.parameter) for slot in bucket.slots)]
    blocks = [
        begin
        for slot, start in zip(bucket.slots, starts, strict=False)
        for begin in range(start, start + slot.parameter.numel(), BLOCK_NUMEL)
    ]
    borders, bounds = [*blocks, starts[-1]], [0]
    for number in range(1, num_slices):
        wanted = starts[-1] * number / num_slices
        right = bisect_left(borders, wanted)
        bounds.append(min(borders[right - 1], borders[right], key=lambda border: abs(border - wanted)))
    return [*bounds, starts[-1]]


class ShardedDataParallel(BucketedDataParallel):
    """Gives each rank the mean gradient of its slice, while backward runs; the rest of `p.grad` is undefined.

    Args:
        module: as in `BucketedDataParallel`; all on the communicator's device, none complex.

    Raises:
        ConfigError: a parameter cannot be sharded.
    """

    gradient_as_bucket_view = True

    def __init__(self, module: nn.Module, **how: Any) -> None:
        super().__init__(module, **how)
        for name, parameter in self._replicated_parameters():
            if parameter.is_complex() or parameter.device != self.comm.device:
                raise ConfigError(
                    f"{name} is {parameter.dtype} on {parameter.device}: a sharded update takes real numbers on "
                    f"{self.comm.device}; leave sharding out"
                )

    @property
    def layout(self) -> Layout:
        """The layout of the last step."""
        return self._layouts.current

    def slice_of(self, bucket: Bucket) -> tuple[int, int]:
        """Returns where this rank's slice of a bucket begins, and where it ends."""
        bounds, number = bounds_of(bucket, self.comm), self.comm.slices[self.comm.rank]
        return bounds[number], bounds[number + 1]

    def _plain_reducer(self) -> Reducer:
        return ReduceScatter(self.comm, self.wire, self.num_shards)


class ReduceScatter(Reducer):
    """Gives every rank the mean of its slice. Since no rank gets a whole bucket, none carries a tail.

    Args:
        wire: the format in which buckets travel between hosts.
        num_shards: as in `AllReduce`.

    Attributes:
        on_hosts: as in `Communicator.reduce_scatter_`.
    """

    on_hosts = False

    def __init__(self, comm: Communicator, wire: WireName | None, num_shards: int | None = None) -> None:
        self._comm, self._wire, self._num_shards = comm, wire, num_shards

    def reduce(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> InFlight | None:
        if self._wire is not None:
            bucket.clear_padding()
        bounds, flat = bounds_of(bucket, self._comm), bucket.flat
        how: ScatterTerms = {"divide_by": divide_by, "wire": self._wire, "on_hosts": self.on_hosts, "label": label}
        if self._num_shards is not None:
            flat, how["wire"], how["num_shards"] = bucket.rows, None, self._num_shards
        work = self._comm.reduce_scatter_(flat, bounds, async_op=async_op, **how)
        return work if isinstance(work, Work) else None


# --- Parameters side by side -----------------------------------------------------------------------------------------
#
# So a slice of a bucket is a slice of both, and is gathered without a copy.


class Part(NamedTuple):
    """The part of a parameter that a rank updates.

    Attributes:
        whole: the parameter.
        start, stop: the elements of it, in the order of memory.
        weights: [stop − start], a view of the parameter; of a scalar, [].
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


def block_numbers(layout: Layout) -> list[range]:
    """Returns, by parameter of a layout, the numbers of its blocks among those of all parameters."""
    starts = [0, *accumulate(num_blocks(parameter.numel()) for parameter in layout.parameters)]
    return list(starmap(range, pairwise(starts)))


def parts_of(model: ShardedDataParallel, layout: Layout) -> list[Part]:
    """Returns the parts that this rank updates, in the order of the layout's parameters, whose memory is dense."""
    numbers = block_numbers(layout)
    parts: dict[int, Part] = {}
    for bucket in layout.buckets:
        for slot, start, begin, end in parts_in(bucket, *model.slice_of(bucket)):
            blocks, skipped = numbers[slot.index], (begin - start) // BLOCK_NUMEL
            parts[slot.index] = Part(
                slot.parameter,
                begin - start,
                end - start,
                nn.Parameter(share_of(begin - start, end - start, slot.parameter, slot.parameter.detach())),
                bucket.flat[begin:end].view([] if not slot.parameter.dim() else -1),
                blocks[skipped : skipped + num_blocks(end - begin)],
                blocks,
            )
    return [parts[index] for index in sorted(parts)]


def share_of(start: int, stop: int, like: Tensor, value: Tensor) -> Tensor:
    """Returns some elements, [stop − start], of a value that has a parameter's shape, in the order of its memory.

    A scalar stays one, because torch computes with scalars in a wider type where another number has that.
    """
    return in_memory_order(laid_out_like(like, value))[start:stop] if like.dim() else value


class Slices:
    """The parts of a layout that this rank updates.

    Attributes:
        buckets: those that are cut into slices.
        parts: in the order of the layout's parameters.
        blocks: by parameter of the layout, the numbers of its blocks.
    """

    def __init__(self, model: ShardedDataParallel, layout: Layout) -> None:
        self.layout, self.buckets = layout, layout.buckets
        self.parts = parts_of(model, layout)
        self.blocks = block_numbers(layout)

    def take_in(self) -> None:
        """Moves parameters that somebody has moved out back to where the parts are."""

    def give_back(self) -> None:
        """Moves each parameter into memory of its own, if others lie beside it."""

    def gather(self, *, step: int) -> None:
        """Gives every rank the parameters that the others have updated, if it does not have them. Collective.

        Args:
            step: for messages.
        """


class ParameterSlices(Slices):
    """The parameters of a layout side by side, so that they can be gathered. Collective to make."""

    def __init__(self, model: ShardedDataParallel, layout: Layout) -> None:
        self._comm, self.buckets = model.comm, layout.buckets
        self._flats = [self._comm.allocate(len(bucket.gradients), bucket.flat.dtype) for bucket in layout.buckets]
        for flat in self._flats:
            weakref.finalize(self, self._comm.free, flat).atexit = False
        self.take_in()
        super().__init__(model, layout)

    @torch.no_grad()
    def take_in(self) -> None:
        for bucket, flat in self._of_buckets():
            for slot, view in zip(bucket.slots, bucket.views_of(flat), strict=True):
                if slot.parameter.data_ptr() != view.data_ptr() or slot.parameter.stride() != view.stride():
                    view.copy_(slot.parameter)
                    slot.parameter.data = with_own_storage(view)

    @torch.no_grad()
    def give_back(self) -> None:
        for slot in self.layout.slots:
            slot.parameter.data = slot.parameter.detach().clone()

    def gather(self, *, step: int) -> None:
        for bucket, flat in self._of_buckets():
            bounds = bounds_of(bucket, self._comm)
            self._comm.all_gather_(flat, bounds, label=f"step {step}, parameters of {bucket.label}")

    def _of_buckets(self) -> Iterator[tuple[Bucket, Tensor]]:
        """Yields each bucket, and the memory of its parameters."""
        return zip(self.buckets, self._flats, strict=True)


def parts_in(bucket: Bucket, first: int, last: int) -> Iterator[tuple[Slot, int, int, int]]:
    """Yields each parameter that a slice has a part of: its slot and start, and where the part begins and ends."""
    start = 0
    for slot in bucket.slots:
        begin, end = max(first, start), min(last, start + slot.parameter.numel())
        if begin < end:
            yield slot, start, begin, end
        start += span(slot.parameter)
