"""The sharded replica: each rank updates a slice of the parameters, and keeps the optimizer's state of that alone.

    backward        each bucket is reduce-scattered: a rank gets the mean gradient of its slice, and not of the rest
    gradient norm   each rank measures its slice; one small all-reduce
    step            each rank updates its slice; for trust ratios, norms of whole tensors in one small all-reduce
    all-gather      every rank gets the new parameters of all slices

As many bytes travel as in an all-reduce, which is a reduce-scatter and an all-gather, too. Between the two, each of p
ranks does 1 ÷ p of the optimizer's work, and holds 1 ÷ p of its state: ZeRO stage 1 (Rajbhandari et al., arXiv
1910.02054, section 5.1).

Parameters live side by side in memory that is laid out like the buckets of their gradients, so that a slice of a bucket
is a slice of both. Slices begin at tensors, or at blocks of large ones (`optim/norms.py`). So every norm has the same
bits as without sharding, and every rank the same parameters.

A checkpoint holds the whole state, in torch's form: it can be resumed at any world size, sharded or not.

Read before: `bucketed.py`, `optim/update.py`. Read next: `sync_batchnorm.py`.
"""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, SupportsInt

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.comm.work import Work
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.gradients.layout import Layout
from ddp.optim.lamb import LAMB
from ddp.optim.lars import LARC, LARS
from ddp.optim.layerwise import Layerwise, Measured, laid_out_like
from ddp.optim.norms import BLOCK_NUMEL, block_norms, in_memory_order, num_blocks, total_norm, whole_norms, wide
from ddp.optim.update import Update, clipped_step
from ddp.replica.backward import Backward
from ddp.replica.bucketed import BucketedDataParallel

ELEMENTWISE = (SGD, Adam, AdamW, LARS, LARC, LAMB)
"""Optimizers that update each element by itself, but for norms that they ask for; a class derived from one may not."""


class ShardedDataParallel(BucketedDataParallel):
    """Gives each rank the mean gradient of its slice, while backward runs; the rest of `p.grad` is undefined.

    `ShardedUpdate` makes the step.

    Args:
        module: as in `BucketedDataParallel`; all on the communicator's device, none complex.

    Raises:
        ConfigError: a parameter cannot be sharded.
    """

    def __init__(self, module: nn.Module, **how: Any) -> None:
        super().__init__(module, **how)
        for name, parameter in self._replicated_parameters():
            if parameter.is_complex() or parameter.device != self.comm.device:
                raise ConfigError(
                    f"{name} is {parameter.dtype} on {parameter.device}: a sharded update takes real numbers on "
                    f"{self.comm.device}; leave optim.sharded out"
                )

    @property
    def layout(self) -> Layout:
        """The layout of the last step."""
        return self._layouts.current

    def _new_backward(self, former: Backward | None = None) -> Backward:
        return _ShardedBackward(self.comm, overlap=self.overlaps, waited=self.waited, former=former)

    def _make_layout(self) -> Layout:
        return super()._make_layout().with_tails_apart()


class _ShardedBackward(Backward):
    """A backward whose buckets are reduce-scattered."""

    def _combine(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> Work | None:
        with self._waited.running():
            bounds = slice_bounds(bucket, self.comm.world_size)
            found = self.comm.reduce_scatter_(bucket.flat, bounds, divide_by=divide_by, async_op=async_op, label=label)
        return found if async_op else None


def slice_bounds(bucket: Bucket, num_slices: int) -> list[int]:
    """Returns where the slices of a bucket begin, about equally long, and where the last one ends."""
    starts = [0, *accumulate(span(slot.parameter) for slot in bucket.slots)]
    borders = [
        border
        for slot, start in zip(bucket.slots, starts, strict=False)
        for border in range(start, start + max(1, slot.parameter.numel()), BLOCK_NUMEL)
    ]
    borders.append(starts[-1])
    bounds = [0]
    for number in range(1, num_slices):
        wanted = starts[-1] * number / num_slices
        right = min(bisect_left(borders, wanted), len(borders) - 1)
        near = min(borders[max(0, right - 1)], borders[right], key=lambda border: abs(border - wanted))
        bounds.append(max(bounds[-1], near))
    return [*bounds, starts[-1]]


def slice_of(bucket: Bucket, bounds: Sequence[int], number: int) -> Iterator[tuple[Slot, int, int, int]]:
    """Yields each parameter that a slice has a part of: its slot and start, and where the part begins and ends."""
    start = 0
    for slot in bucket.slots:
        begin, end = max(bounds[number], start), min(bounds[number + 1], start + slot.parameter.numel())
        if begin < end:
            yield slot, start, begin, end
        start += span(slot.parameter)


class Part(NamedTuple):
    """Holds what a rank updates of a parameter.

    Attributes:
        whole: the parameter.
        start, stop: the elements of it, in the order of memory.
        weights: [stop − start], a view of the parameter.
        gradient: the same elements of its gradient.
        blocks: the numbers of its blocks among those of all parameters.
        of_whole: those of the whole parameter.
    """

    whole: nn.Parameter
    start: int
    stop: int
    weights: nn.Parameter
    gradient: Tensor
    blocks: range
    of_whole: range


class Shards:
    """The parameters of a layout side by side, and the parts that this rank updates. Collective to make.

    Attributes:
        parts: in the order of the layout's parameters.
        num_blocks: of all parameters.
    """

    def __init__(self, comm: Communicator, layout: Layout) -> None:
        self._comm, self.layout = comm, layout
        counts = [num_blocks(parameter.numel()) for parameter in layout.parameters]
        starts = [0, *accumulate(counts)]
        self.num_blocks = starts[-1]
        self._bounds = [slice_bounds(bucket, comm.world_size) for bucket in layout.buckets]
        self._flats = [comm.allocate(bounds[-1], bucket.flat.dtype) for bucket, bounds in self.of_buckets()]
        self._release = weakref.finalize(self, _free, comm, self._flats)
        self._release.atexit = False
        parts: dict[int, Part] = {}
        for (bucket, bounds), flat in zip(self.of_buckets(), self._flats, strict=True):
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

    def of_buckets(self) -> list[tuple[Bucket, list[int]]]:
        """Returns each bucket with the bounds of its slices."""
        return list(zip(self.layout.buckets, self._bounds, strict=True))

    @torch.no_grad()
    def take_in(self) -> None:
        """Moves parameters into the flat memory; also those that somebody has moved out since."""
        for bucket, flat in zip(self.layout.buckets, self._flats, strict=True):
            for slot, view in zip(bucket.slots, bucket.views_of(flat), strict=True):
                if slot.parameter.data_ptr() != view.data_ptr() or slot.parameter.stride() != view.stride():
                    view.copy_(slot.parameter)
                    slot.parameter.data = view

    @torch.no_grad()
    def give_back(self) -> None:
        """Moves each parameter into memory of its own: who saves one would save all that lie beside it."""
        for slot in self.layout.slots:
            slot.parameter.data = slot.parameter.detach().clone()

    def gather(self) -> None:
        """Gives every rank the parameters that the others have updated. Collective."""
        for (bucket, bounds), flat in zip(self.of_buckets(), self._flats, strict=True):
            self._comm.all_gather_(flat, bounds, label=f"parameters of {bucket.label}")


def _free(comm: Communicator, flats: Sequence[Tensor]) -> None:
    for flat in flats:
        comm.free(flat)


class ShardedUpdate(Update):
    """Updates this rank's slices, and gives them to all ranks. Every method is collective.

    Args:
        replica: has reduced the gradients.
        optimizer: over the replica's parameters. Its groups hold in every step. From the first step on its state is
            elsewhere, until `finish`.

    Raises:
        ConfigError: the optimizer's update of an element may depend on other elements, or the optimizer has hooks.
    """

    def __init__(self, replica: ShardedDataParallel, optimizer: Optimizer) -> None:
        if type(optimizer) not in ELEMENTWISE:
            raise ConfigError(
                f"optim.sharded=true with {type(optimizer).__name__}: takes SGD, Adam, AdamW, LARS, LARC and LAMB, "
                "which update each element by itself but for norms; leave it out, or take one of these"
            )
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise ConfigError(
                f"optim.sharded=true with hooks of {type(optimizer).__name__}: they would see parts; remove "
                "them, or leave it out"
            )
        super().__init__(replica, optimizer)
        self._comm, self._replica = replica.comm, replica
        self._shards: Shards | None = None
        self._mine: Optimizer = optimizer  # over the parts, once they are known
        self._places: dict[int, Part] = {}  # by address
        self._frozen: dict[Tensor, dict[str, Any]] = {}  # the whole state of parameters that need no gradient now
        self._groups: list[list[int]] = []  # ids of parameters, by group

    def gradient_norm(self) -> Tensor:
        shards = self._prepared()
        parts = [part for part in shards.parts if part.whole.grad is not None]
        dtype = wide({parameter.dtype for parameter in shards.layout.parameters})  # also of what others measure
        norms = block_norms((part.gradient for part in parts), dtype)
        everyone = torch.zeros(shards.num_blocks, dtype=torch.float64, device=self._comm.device)
        everyone[[block for part in parts for block in part.blocks]] = norms.to(everyone)
        self._comm.all_reduce(everyone, label="norms of gradients")
        return total_norm(everyone.to(dtype))

    @torch.no_grad()
    def step(self, norm: Tensor, clip_norm: float | None) -> None:
        shards = self._prepared()
        for part in shards.parts:
            part.weights.grad = None if part.whole.grad is None else part.gradient
        for mine, given in zip(self._mine.param_groups, self.optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in given.items() if key != "params"})
        clipped_step(self._mine, [part.weights for part in shards.parts], norm, clip_norm)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
        shards.gather()

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state on rank 0; elsewhere the settings alone."""
        if self._shards is None:
            return self.optimizer.state_dict()
        self.optimizer.state.update(self._gathered(keep=self._comm.rank == 0))
        try:
            return self.optimizer.state_dict()
        finally:
            self.optimizer.state = defaultdict(dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a whole state, which every rank has; each keeps its parts."""
        self.optimizer.load_state_dict(state)  # whole until the next step
        self._shards, self._frozen = None, {}

    def finish(self) -> None:
        if self._shards is not None:
            self.optimizer.state.update(self._gathered(keep=True))
            self._shards.give_back()
            self._shards, self._frozen = None, {}

    # --- parts -------------------------------------------------------------------------------------------------------

    def _prepared(self) -> Shards:
        """Returns the parts for the layout of the last backward, with their optimizer."""
        layout, groups = self._replica.layout, [list(map(id, each["params"])) for each in self.optimizer.param_groups]
        if self._shards is not None and self._shards.layout is layout and self._groups == groups:
            self._shards.take_in()
            return self._shards
        whole = dict(self.optimizer.state) if self._shards is None else self._gathered(keep=True)
        self.optimizer.state = defaultdict(dict)
        self._shards, self._groups = Shards(self._comm, layout), groups
        self._frozen = {each: state for each, state in whole.items() if id(each) not in layout.slot_of}
        self._mine = self._optimizer_of(self._shards.parts, whole)
        return self._shards

    def _optimizer_of(self, parts: Sequence[Part], whole_state: Mapping[Tensor, dict[str, Any]]) -> Optimizer:
        """Returns the optimizer of these parts, with their part of the whole state."""
        mine = copy.copy(self.optimizer)
        by_parameter = {id(part.whole): part for part in parts}
        self._places = {part.weights.data_ptr(): part for part in parts}
        mine.state = defaultdict(dict)
        mine.param_groups = []
        for group in self.optimizer.param_groups:
            held = [by_parameter[id(parameter)] for parameter in group["params"] if id(parameter) in by_parameter]
            mine.param_groups.append({**group, "params": [part.weights for part in held]})
            for part in held:
                whole = whole_state.get(part.whole, {})
                mine.state[part.weights] = {name: _cut(value, part, name) for name, value in whole.items()}
        if isinstance(mine, Layerwise):
            mine.exchange = self._exchange
            mine.is_large = self._is_of_large  # type: ignore[method-assign]
        return mine

    def _is_of_large(self, weights: Tensor) -> bool:
        return Layerwise.is_large(self._places[weights.data_ptr()].whole)

    def _exchange(self, waiting: Sequence[Measured]) -> list[Tensor | None]:
        """Returns the norms of whole tensors, of which each rank has measured its parts."""
        assert self._shards is not None
        norms = torch.zeros(self._shards.num_blocks, 2, dtype=torch.float64, device=self._comm.device)
        units = [[self._places[weights.data_ptr()] for weights in measured.unit.whole.weights] for measured in waiting]
        for measured, parts in zip(waiting, units, strict=True):
            if measured.norms is not None:
                norms[[block for part in parts for block in part.blocks]] = measured.norms.to(norms)
        self._comm.all_reduce(norms, label="norms of weights and updates")
        found: list[Tensor | None] = []
        for measured, parts in zip(waiting, units, strict=True):
            if measured.norms is None:
                found.append(None)
                continue
            here = norms[[block for part in parts for block in part.of_whole]].to(measured.norms)
            counts = [len(part.of_whole) for part in parts]
            columns = here.unbind(1)
            found.append(torch.stack([whole_norms(column, counts) for column in columns], dim=1))
        return found

    # --- the whole state ---------------------------------------------------------------------------------------------

    def _gathered(self, *, keep: bool) -> dict[Tensor, dict[str, Any]]:
        """Returns the state of whole parameters, on the ranks that keep it. Collective."""
        assert self._shards is not None
        layout, state = self._shards.layout, self._mine.state
        slots = {id(slot.parameter): slot for slot in layout.slots}
        mine = {  # small values, and the types of large ones
            slots[id(part.whole)].index: {
                name: value.dtype if _is_large(value, part.weights, name) else value
                for name, value in state.get(part.weights, {}).items()
            }
            for part in self._shards.parts
        }
        about = {index: each for found in all_gather_object(self._comm, mine) for index, each in found.items()}
        whole: dict[Tensor, dict[str, Any]] = {
            slot.parameter: dict(about[slot.index]) for slot in layout.slots if about.get(slot.index)
        }
        weights_of = {id(part.whole): part.weights for part in self._shards.parts}
        for bucket, bounds in self._shards.of_buckets():
            kinds = {
                (name, value)
                for slot in bucket.slots
                for name, value in about.get(slot.index, {}).items()
                if isinstance(value, torch.dtype)
            }
            for name, dtype in sorted(kinds, key=str):
                flat = torch.zeros(bounds[-1], dtype=dtype, device=self._comm.device)
                for slot, _, begin, end in slice_of(bucket, bounds, self._comm.slices[self._comm.rank]):
                    if about.get(slot.index, {}).get(name) == dtype:
                        flat[begin:end] = state[weights_of[id(slot.parameter)]][name]
                self._comm.all_gather_(flat, bounds, label=f"{name} of {bucket.label}")
                for slot, view in zip(bucket.slots, bucket.views_of(flat), strict=True):
                    if keep and about.get(slot.index, {}).get(name) == dtype:
                        whole[slot.parameter][name] = view.clone()
        return {**self._frozen, **whole} if keep else {}


def _is_large(value: Any, like: Tensor, name: str) -> bool:
    """Returns True for a state that has an element for each element of its parameter."""
    return isinstance(value, Tensor) and value.shape == like.shape and name != "step"


def _cut(value: Any, part: Part, name: str) -> Any:
    """Returns a part's share of a whole parameter's state."""
    if not _is_large(value, part.whole, name):
        return copy.deepcopy(value)
    return in_memory_order(laid_out_like(part.whole, value))[part.start : part.stop].clone()
