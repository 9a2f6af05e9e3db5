"""The sharded strategy: each rank updates a slice of the parameters, and keeps only the optimizer's state of that
slice.

    backward    each bucket is reduce-scattered: a rank gets the mean gradient of its slice only
    agree       each rank measures its slice; one small all-reduce
    update      each rank updates its slice; for trust ratios, norms of whole tensors in one small all-reduce. Then an
                all-gather: every rank gets the new parameters of all slices

As many bytes travel as in an all-reduce, which is a reduce-scatter and an all-gather, too. Between the two, each of p
ranks does 1 ÷ p of the optimizer's work, and holds 1 ÷ p of its state: ZeRO stage 1 (Rajbhandari et al., arXiv
1910.02054, section 5.1). Where hosts have different numbers of ranks, the two go over the network's edges alone.

A checkpoint holds the whole state, in torch's form: it can be resumed at any world size, sharded or not.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, compress, pairwise, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ddp.comm.communicator import Communicator
from ddp.comm.meeting.membership import lost_member
from ddp.comm.objects import all_gather_object
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.gradients.layout import Layout
from ddp.gradients.reducer import ReduceScatter
from ddp.gradients.totals import Totals
from ddp.optim.layerwise import Layerwise, Measured, clipped_step, laid_out_like
from ddp.optim.norms import BLOCK_NUMEL, block_norms, in_memory_order, num_blocks, total_norm, whole_norms, wide
from ddp.optim.trust_ratio import LAMB, LARC, LARS
from ddp.process import gpu
from ddp.process.terminal import log
from ddp.replica.bucketed import BucketedDataParallel
from ddp.replica.flat import Flat
from ddp.setting import StrategyName
from ddp.strategies.strategy import Replicated
from ddp.units import counted

ELEMENTWISE = (SGD, Adam, AdamW, LARS, LARC, LAMB)
"""Optimizers that update each element by itself, except for norms that they request; a derived class may not."""


class Sharded(Replicated):
    """Updates this rank's slices, and sends them to all ranks. Every method is collective.

    Args:
        model: a module; or a replica with this reducer. Parameters are on the communicator's device, none is complex.
        optimizer: over its parameters. Every step uses its current groups and state. From the first step on, until
            `finish`, it has the state of this rank's parts, by whole parameter.
        how: as in `Replicated`, but not with precision="bf16_pure".

    Raises:
        ConfigError: the optimizer's update of an element may depend on other elements, or the optimizer has hooks; or
            the model or the precision cannot be sharded.
    """

    model: BucketedDataParallel
    word: StrategyName = "sharded"
    reducer: type[ReduceScatter] = ReduceScatter
    needs_buckets = unties = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, **how: Any) -> None:
        name, kind = type(self).__name__, type(optimizer).__name__
        if type(optimizer) not in ELEMENTWISE:
            raise ConfigError(
                f"{name} with {kind}: takes SGD, Adam, AdamW, LARS, LARC and LAMB, which update each element by itself "
                "except for norms; take one of these, or Replicated (strategy='auto')"
            )
        before = optimizer._optimizer_step_pre_hooks
        if optimizer._optimizer_step_post_hooks or set(before.values()) - {refuse_step}:
            raise ConfigError(
                f"{name} with hooks of {kind}: they would see parts; remove them, or take Replicated (strategy='auto')"
            )
        super().__init__(model, optimizer, **how)
        self._comm, collective = self.model.comm, self.model.collective
        assert isinstance(collective, ReduceScatter)
        self._collective: ReduceScatter = collective
        for each, parameter in self.model._replicated_parameters():
            if parameter.is_complex() or parameter.device != self._comm.device:
                raise ConfigError(
                    f"{each} is {parameter.dtype} on {parameter.device}: a sharded update takes real numbers on "
                    f"{self._comm.device}; leave sharding out"
                )
        self._slices: Slices | None = None
        self._of_parts: Optimizer = optimizer  # over the parts, once they are known
        self._places: dict[int, Part] = {}  # by address
        self._groups: list[list[int]] = []  # ids of parameters, by group
        if not before:
            optimizer.register_step_pre_hook(refuse_step)

    def finish(self, *, alone: bool = False) -> None:
        allow_step(self.optimizer)
        if self._slices is not None:
            self.optimizer.state = self._state_without_others() if alone else self._whole_state(keep=True)
            self._slices.give_back()
            self._slices = None
            self._of_parts, self._places = self.optimizer, {}  # frees the parts
        super().finish(alone=alone)

    def kept(self) -> dict[str, Any] | None:
        return super().kept() if self._slices is None else None

    # --- a step ------------------------------------------------------------------------------------------------------

    def _gradient_norm(self) -> Tensor:
        slices = self._prepared()
        parts = [part for part in slices.parts if part.whole.grad is not None]
        for part in parts:
            self._take_gradient(part)
        dtype = wide({parameter.dtype for parameter in slices.layout.parameters})  # also of what others measure
        norms = block_norms((part.gradient for part in parts), dtype)
        everyone = self._zeros(slices.blocks[-1].stop)
        everyone[self._index(part.blocks for part in parts)] = norms.to(everyone)
        self._sum(everyone, "norms of gradients")
        with_gradient = [each.grad is not None for each in slices.layout.parameters]
        if not all(with_gradient):  # zeros in their place would change the order of addition
            everyone = everyone[self._index(compress(slices.blocks, with_gradient))]
        return total_norm(everyone.to(dtype))

    @torch.no_grad()
    def _step(self, norm: Tensor) -> None:
        slices = self._prepared()
        self._take_in()
        for part in slices.parts:
            part.weights.grad = None if part.whole.grad is None else part.gradient
        self._take_settings()
        clipped_step(self._of_parts, [part.weights for part in slices.parts], norm, self._clip_norm)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it
        slices.gather(step=self.model.num_steps)

    @torch.no_grad()
    def _take_gradient(self, part: Part) -> None:
        """Copies a gradient to the bucket, if the program has replaced it since backward."""
        gradient, start_bytes = part.whole.grad, part.start * part.gradient.element_size()
        if gradient is not None and gradient.data_ptr() != part.gradient.data_ptr() - start_bytes:
            part.gradient.copy_(self._share_of(part, gradient))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self._comm.device)

    def _sum(self, found: Tensor, what: str) -> None:
        """Adds up the results of all ranks for their parts."""
        self._comm.all_reduce(found, label=f"step {self.model.num_steps}, {what}")

    def _take_settings(self) -> None:
        """Gives the optimizer of the parts the settings that the groups have now."""
        for mine, given in zip(self._of_parts.param_groups, self.optimizer.param_groups, strict=True):
            mine.update({key: value for key, value in given.items() if key != "params"})

    def _optimizer_state(self) -> dict[str, Any]:
        """Returns the whole state on rank 0; elsewhere the settings alone."""
        if self._slices is None:
            return self.optimizer.state_dict()
        of_parts = self.optimizer.state
        self.optimizer.state = self._whole_state(keep=self._comm.rank == 0, on_cpu=True)
        try:
            return self.optimizer.state_dict()
        finally:
            self.optimizer.state = of_parts

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Resumes from a whole state, which every rank has; each keeps its parts."""
        self.optimizer.load_state_dict(state)  # whole until the next step
        self._slices = None

    # --- parts -------------------------------------------------------------------------------------------------------

    def _prepared(self) -> Slices:
        """Returns the parts for the layout of the last backward, with their optimizer."""
        layout, groups = self.model.layout, [list(map(id, each["params"])) for each in self.optimizer.param_groups]
        if self._slices is not None and self._slices.buckets is layout.buckets and self._groups == groups:
            self._slices.take_in()
            return self._slices
        if layout.sparse:
            raise ConfigError(
                f"{layout.sparse[0].name} has a sparse gradient, which no slice can hold: take Replicated"
            )
        whole = self.optimizer.state if self._slices is None else self._gathered(keep=True)
        self._slices, self._groups = self._slices_of(layout), groups
        self._of_parts = self._optimizer_of(self._slices.parts)
        mine = {part.whole for part in self._slices.parts}
        # Every rank keeps the whole state of parameters that need no gradient now.
        kept = {each: state for each, state in whole.items() if each in mine or id(each) not in layout.slot_of}
        self.optimizer.state = defaultdict(dict, kept)
        self._take_in()
        self._slices.take_in()
        return self._slices

    def _slices_of(self, layout: Layout) -> Slices:
        return WholeUnits(self._comm, layout, self._collective)

    def _take_in(self) -> None:
        """Takes over the optimizer's current state, and cuts values of whole parameters to the parts."""
        assert self._slices is not None
        for part in self._slices.parts:
            state = self.optimizer.state.setdefault(part.whole, {})
            for name, value in state.items():
                if is_large(value, part.whole, name) and value.shape != part.weights.shape:
                    state[name] = self._share_of(part, value).clone()
            self._of_parts.state[part.weights] = state  # the same dict, so that each sees the other's changes

    def _share_of(self, part: Part, value: Tensor) -> Tensor:
        """Returns a part's elements of a value that has the shape of the whole parameter."""
        return share_of(part.start, part.stop, part.whole, value)

    def _optimizer_of(self, parts: Sequence[Part]) -> Optimizer:
        """Returns an optimizer of these parts, without a state."""
        mine = copy_of(self.optimizer)
        by_parameter = {id(part.whole): part for part in parts}
        self._places = {part.weights.data_ptr(): part for part in parts}
        mine.state = defaultdict(dict)
        mine.param_groups = []
        for group in self.optimizer.param_groups:
            held = [by_parameter[id(parameter)] for parameter in group["params"] if id(parameter) in by_parameter]
            mine.param_groups.append({**group, "params": [part.weights for part in held]})
        if isinstance(mine, Layerwise):
            mine.exchange = self._exchange
            mine.is_large = self._is_of_large  # type: ignore[method-assign]
        return mine

    def _is_of_large(self, weights: Tensor) -> bool:
        return Layerwise.is_large(self._places[weights.data_ptr()].whole)

    def _exchange(self, waiting: Sequence[Measured]) -> list[Tensor | None]:
        """Returns the norms of whole tensors, from all ranks' measurements of their parts."""
        assert self._slices is not None
        norms = self._zeros(self._slices.blocks[-1].stop, 2)
        units = [[self._places[weights.data_ptr()] for weights in measured.unit.weights] for measured in waiting]
        for measured, parts in zip(waiting, units, strict=True):
            if measured.norms is not None:
                norms[self._index(part.blocks for part in parts)] = measured.norms.to(norms)
        self._sum(norms, "norms of weights and updates")
        found: list[Tensor | None] = []
        for measured, parts in zip(waiting, units, strict=True):
            if measured.norms is None:
                found.append(None)
                continue
            here = norms[self._index(part.blocks_of_whole for part in parts)].to(measured.norms)
            counts = [len(part.blocks_of_whole) for part in parts]
            columns = here.unbind(1)
            found.append(torch.stack([whole_norms(column, counts) for column in columns], dim=1))
        return found

    def _index(self, blocks: Iterable[range]) -> Tensor:
        """Returns the numbers of blocks as an index into all norms, on their device, without a wait for a GPU."""
        numbers = torch.tensor(list(chain.from_iterable(blocks)), dtype=torch.int64, device="cpu")
        return gpu.sent(numbers, self._comm.device)

    # --- the whole state ---------------------------------------------------------------------------------------------

    def _state_without_others(self) -> defaultdict[Tensor, dict[str, Any]]:
        """Returns the state that is the same on every rank: that of parameters which are not divided among ranks."""
        assert self._slices is not None
        state, cut = self.optimizer.state, self._slices.layout.slot_of
        num_dropped = sum(bool(state[each]) for each in state if id(each) in cut)
        if num_dropped and lost_member() is None:  # else the run goes on, from a checkpoint
            log.warning(
                "the optimizer begins anew for %s, because other ranks hold the rest of their states: resume from the "
                "last checkpoint, or go on without",
                counted(num_dropped, "parameter"),
            )
        return defaultdict(dict, {each: known for each, known in state.items() if id(each) not in cut})

    def _whole_state(self, **how: bool) -> defaultdict[Tensor, dict[str, Any]]:
        """Returns the state as `_gathered` does, in the order in which an optimizer of replicas has it."""
        found = self._gathered(**how)
        in_order = (each for group in self.optimizer.param_groups for each in group["params"] if each in found)
        return defaultdict(dict, {each: found[each] for each in in_order})

    def _gathered(self, *, keep: bool, on_cpu: bool = False) -> defaultdict[Tensor, dict[str, Any]]:
        """Returns the state of whole parameters, on the ranks that keep it. Collective.

        Args:
            on_cpu: large values are on the CPU, because a GPU may lack memory for those of all ranks.
        """
        assert self._slices is not None
        self._take_in()
        layout = self._slices.layout
        mine = {  # small values, and the types of large ones
            layout.slot_of[id(part.whole)].index: {
                name: value.dtype if self._is_cut(part, name, value) else value
                for name, value in self.optimizer.state[part.whole].items()
            }
            for part in self._slices.parts
        }
        about: dict[int, dict[str, Any]] = {slot.index: {} for slot in layout.slots}
        for found in all_gather_object(self._comm, mine):
            about.update(found)
        whole: dict[Tensor, dict[str, Any]] = {
            slot.parameter: dict(about[slot.index]) for slot in layout.slots if about[slot.index]
        }
        self._gather_large(whole, keep=keep, on_cpu=on_cpu)
        for group in self.optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):  # then torch reads step counts on the weights' device
                for parameter in group["params"]:
                    if isinstance(steps := whole.get(parameter, {}).get("step"), Tensor):
                        whole[parameter]["step"] = steps.to(parameter.device)
        frozen = {each: state for each, state in self.optimizer.state.items() if id(each) not in layout.slot_of}
        return defaultdict(dict, {**frozen, **whole} if keep else {})

    def _is_cut(self, part: Part, name: str, value: Any) -> bool:
        """Returns True for a state of which each rank holds its part, so that it is not sent with the small ones."""
        return is_large(value, part.weights, name)

    def _gather_large(self, whole: Mapping[Tensor, dict[str, Any]], *, keep: bool, on_cpu: bool) -> None:
        """Replaces the type of each large state by the state of the whole parameter, on the ranks that keep it."""
        assert self._slices is not None
        for bucket in self._slices.buckets:
            bounds, slots = self._collective.bounds_of(bucket), bucket.slots
            types = {slot.index: dict(whole.get(slot.parameter, {})) for slot in slots}
            kinds = {each for known in types.values() for each in known.items() if isinstance(each[1], torch.dtype)}
            for name, dtype in sorted(kinds, key=str):
                flat = torch.zeros(bounds[-1], dtype=dtype, device=self._comm.device)
                for slot, _, begin, end in parts_in(bucket, *self._collective.slice_of(bucket)):
                    if types[slot.index].get(name) == dtype:
                        flat[begin:end] = self.optimizer.state[slot.parameter][name]
                self._comm.all_gather_(flat, bounds, label=f"{name} of {bucket.label}")
                for slot, view in zip(slots, bucket.views_of(flat), strict=True):
                    if keep and types[slot.index].get(name) == dtype:
                        away = on_cpu and view.device.type != "cpu"
                        whole[slot.parameter][name] = view.cpu() if away else view.clone()


class Served(Sharded):
    """Updates the slice of one parameter server, with gradients that workers push. Collective among the servers.

    Nothing is reduced: the servers write the gradients into the buckets of their slices (`parameter_server/server.py`).
    """

    word = "parameter_server"

    def parts(self) -> list[tuple[str, Part]]:
        """Returns the parts that this server updates, with the names of their parameters."""
        self._layout = self.model.layout
        self._layout.allocate()
        slices = self._prepared()
        names = {id(slot.parameter): slot.name for slot in slices.layout.slots}
        return [(names[id(part.whole)], part) for part in slices.parts]

    def take_step(self, totals: Totals, *, without: Collection[str]) -> None:
        """Ends the backward of a step whose gradients are in the buckets.

        Args:
            totals: of the step.
            without: names of the parameters that got no gradient from any worker.

        Raises:
            ConfigError: parameters were frozen, unfrozen or converted since the training began.
        """
        self.model.prepare()
        if self.model.layout is not self._layout:
            raise ConfigError(
                "parameters were frozen, unfrozen or converted while workers compute with the others: freeze them "
                "before the training begins, or take strategy=auto"
            )
        for slot in self._layout.slots:
            slot.parameter.grad = None if slot.name in without else slot.view
        self.model.end_step(totals)


def refuse_step(*_: Any) -> None:
    """Refuses the program's own call of `optimizer.step()`, which would update what this rank has no gradients of."""
    raise ConfigError(
        "optimizer.step() while a strategy divides the update among ranks: call ddp.strategies.step(strategy) instead, "
        "or strategy.finish() first"
    )


def allow_step(optimizer: Optimizer) -> None:
    """Lets the program call `optimizer.step()` again."""
    hooks = optimizer._optimizer_step_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is refuse_step]:
        del hooks[number]


def copy_of(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer with the same groups and state, whose steps are allowed."""
    mine = copy.copy(optimizer)
    mine._optimizer_step_pre_hooks = OrderedDict(optimizer._optimizer_step_pre_hooks)
    allow_step(mine)
    return mine


def is_large(value: Any, like: Tensor, name: str) -> bool:
    """Returns True for a state that has an element for each element of its parameter."""
    return isinstance(value, Tensor) and value.shape == like.shape and name != "step"


# --- The slices that a rank updates ----------------------------------------------------------------------------------
#
# Gradients are adjacent in a bucket, and parameters in memory with the same layout. So a slice of a bucket is a slice
# of both, and is gathered without a copy.


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


def parts_of(layout: Layout, collective: ReduceScatter, slices: Mapping[Bucket, Tensor] | None = None) -> list[Part]:
    """Returns the parts that this rank updates, in the order of the layout's parameters, whose memory is dense.

    Args:
        slices: by bucket, the memory of this rank's slice of the parameters, whose gradients are elsewhere in each
            step; None: parameters and gradients are whole.
    """
    numbers = block_numbers(layout)
    parts: dict[int, Part] = {}
    for bucket in layout.buckets:
        first, last = collective.slice_of(bucket)
        for slot, start, begin, end in parts_in(bucket, first, last):
            blocks, skipped = numbers[slot.index], (begin - start) // BLOCK_NUMEL
            shape = [-1] if slot.parameter.dim() else []
            if slices is None:
                weights = share_of(begin - start, end - start, slot.parameter, slot.parameter.detach())
                gradient = bucket.flat[begin:end].view(shape)
            else:
                weights = slices[bucket][begin - first : end - first].view(shape)
                gradient = weights.new_empty(0)
            parts[slot.index] = Part(
                slot.parameter,
                begin - start,
                end - start,
                nn.Parameter(weights),
                gradient,
                blocks[skipped : skipped + num_blocks(end - begin)],
                blocks,
            )
    return [parts[index] for index in sorted(parts)]


def share_of(start: int, stop: int, like: Tensor, value: Tensor) -> Tensor:
    """Returns some elements, [stop − start], of a value that has a parameter's shape, in the order of its memory.

    A scalar stays a scalar, because torch's type promotion treats it differently from a vector.
    """
    return in_memory_order(laid_out_like(like, value))[start:stop] if like.dim() else value


class Slices:
    """The parts of a layout that this rank updates.

    Attributes:
        buckets: those that are cut into slices.
        parts: in the order of the layout's parameters.
        blocks: by parameter of the layout, the numbers of its blocks.
    """

    def __init__(
        self, layout: Layout, collective: ReduceScatter, slices: Mapping[Bucket, Tensor] | None = None
    ) -> None:
        self.layout, self.buckets = layout, layout.buckets
        self.parts = parts_of(layout, collective, slices)
        self.blocks = block_numbers(layout)

    def take_in(self) -> None:
        """Moves parameters that the program has moved out back to the memory of the parts, before these are used."""

    def give_back(self) -> None:
        """Moves each parameter to its own memory, if it shares memory with others."""

    def gather(self, *, step: int) -> None:
        """Gathers the parameters that other ranks have updated, unless memory is shared. Collective.

        Args:
            step: for messages.
        """


class WholeUnits(Slices):
    """The buckets of a layout as units that are never released (`replica/flat.py`). Collective to make."""

    def __init__(self, comm: Communicator, layout: Layout, collective: ReduceScatter) -> None:
        self._flats = []
        for bucket in layout.buckets:
            memory = comm.allocate(len(bucket.gradients), bucket.flat.dtype)
            weakref.finalize(self, comm.free, memory).atexit = False
            self._flats.append(Flat(comm, bucket, collective.bounds_of(bucket), memory))
        super().__init__(layout, collective)

    def take_in(self) -> None:
        for flat in self._flats:
            flat.take_in()

    def give_back(self) -> None:
        for flat in self._flats:
            flat.give_up()

    def gather(self, *, step: int) -> None:
        for flat in self._flats:
            flat.gather(f"step {step}, parameters of {flat.bucket.label}")


def parts_in(bucket: Bucket, first: int, last: int) -> Iterator[tuple[Slot, int, int, int]]:
    """Yields each parameter that a slice has a part of: its slot and start, and where the part begins and ends."""
    start = 0
    for slot in bucket.slots:
        begin, end = max(first, start), min(last, start + slot.parameter.numel())
        if begin < end:
            yield slot, start, begin, end
        start += span(slot.parameter)
