"""Central storage: the ranks of a host share one copy of the parameters and of the optimizer's state, in memory.

    backward    each bucket is added up in slices: a rank gets the mean gradient of its slice
    agree       each rank measures its slice; the ranks of the host add up their results
    update      each rank updates its slice in the memory with which all of them compute; then a barrier

So a host holds parameters and state once, and nothing is gathered. It is `tf.distribute`'s strategy of this name, where
variables lie on the CPU, and the sharded one (`sharded.py`) with a barrier in place of its all-gather. On several hosts
the slices of gradients cross between counterparts, and each host keeps a copy.

Note "in blocks". An update is several passes over its numbers. Each block of them, with its gradient and its states,
goes through all passes while it is in the cache: so in main memory each number is read once and written once, also
where gradients are clipped. torch's optimizers receive blocks as if these were tensors. They are called for a stretch
of blocks at a time, because a call costs 0.1 ms and more. LARS and LAMB have their own stretches, and updates that wait
for trust ratios.

Note "whole". No rank writes before `agree` has ended, which every rank reaches after its backward; and none leaves
`update` before all have written. So no rank computes, evaluates or saves with half an update, unless a program reads
parameters between the two. If a rank dies in an update, the others raise PeerLost, and `state_dict` refuses what may be
half a step.

On one host the bits are those of replicas and of the sharded strategy, as long as gradients are added up in its memory.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.comm.objects import on_rank_zero
from ddp.errors import CommunicatorBroken, ConfigError
from ddp.gradients.layout import Layout
from ddp.gradients.reducer import HostReduceScatter, ReduceScatter
from ddp.optim.layerwise import Layerwise, clipped_step
from ddp.optim.norms import BLOCK_NUMEL
from ddp.process.memory import give_back_free_blocks
from ddp.process.terminal import log
from ddp.setting import Setup, refuse
from ddp.strategies.host_store import PARAMETERS, HostStore
from ddp.strategies.region import Region
from ddp.strategies.sharded import Part, Sharded, Slices, copy_of, is_large, share_of
from ddp.strategies.strategy import Replicated

STRETCH_NUMEL = 16 * BLOCK_NUMEL  # gradients of 8 MB, which a last-level cache holds while they are clipped


class Block(NamedTuple):
    """Elements of a part that go through an update together.

    Attributes:
        start, stop: of the whole parameter, in the order of memory.
        weights, gradient: [stop − start]; of a scalar, [].
    """

    part: Part
    start: int
    stop: int
    weights: nn.Parameter
    gradient: Tensor

    def share_of(self, value: Tensor) -> Tensor:
        """Returns these elements of a value that has the shape of the whole parameter."""
        return share_of(self.start, self.stop, self.part.whole, value)


class Stretch:
    """Blocks that fit a cache together.

    Attributes:
        by_group: the weights of the blocks, by group of the optimizer.
        is_placed: all their large states are in the host's store.
    """

    def __init__(self, num_groups: int) -> None:
        self.blocks: list[Block] = []
        self.by_group: list[list[nn.Parameter]] = [[] for _ in range(num_groups)]
        self.numel, self.is_placed = 0, False


class HostSlices(Slices):
    """The parameters of a layout in the host's store, and the parts that this rank updates.

    Raises:
        ConfigError: a parameter's type or memory format has changed since the store was made.
    """

    def __init__(self, layout: Layout, collective: ReduceScatter, store: HostStore) -> None:
        self._store, self.layout = store, layout
        self.parts = []  # none yet
        self.take_in()
        for slot in layout.slots:
            if slot.strides != slot.parameter.stride():
                raise _refusal_of_conversion(f"the memory format of {slot.name} has changed")
        super().__init__(layout, collective)

    @torch.no_grad()
    def take_in(self) -> None:
        for parameter in self._store.moved_out():
            view = self._store.view(PARAMETERS, parameter)
            if parameter.dtype != view.dtype:
                raise _refusal_of_conversion(f"parameters that were {view.dtype} are {parameter.dtype} now")
            if self._store.is_first and (not self.parts or id(parameter) not in self.layout.slot_of):
                view.copy_(parameter)
            for part in self.parts:
                if part.whole is parameter:
                    part.weights.copy_(share_of(part.start, part.stop, view, parameter))
            parameter.data = view


def _refusal_of_conversion(what: str) -> ConfigError:
    what = what.replace("torch.", "")
    return ConfigError(f"{what} since strategy='central_storage' was made: convert the model first")


class CentralStorage(Sharded):
    """Updates this rank's slices of what all ranks of the host share. Every method is collective.

    Parameters are in the host's memory until `finish`, which gives each rank its own again. So code that changes a
    parameter in place changes it for all ranks of the host: let only one of them run it.

    Args:
        model: a module, or a replica with this reducer, on the CPU.
        optimizer, how: as in `Sharded`. From the first step on, its state has whole tensors in the host's store, of
            those parameters that this rank has a part of. A program that replaces some of them gives them back by
            `optimizer.load_state_dict`, whose state is adopted in the next step.

    Raises:
        ConfigError: as `Sharded`; or the ranks of a host cannot share memory, or tensors are on a GPU.
    """

    word = "central_storage"
    reducer = HostReduceScatter

    def __init__(self, model: nn.Module, optimizer: Optimizer, **how: Any) -> None:
        super().__init__(model, optimizer, **how)
        shares_memory = self._comm.host_partition.num_hosts == len(self._comm.hosts)  # else each rank is a host there
        refuse(Setup(strategy=self.word, device=self._comm.device.type, shared_memory=shares_memory))
        self._store: HostStore | None = None  # until `finish`; a later step makes another
        self._stretches: list[Stretch] = []
        self._settings: list[dict[str, Any]] = []  # of the groups whose states have room in the store
        self._adopted: Mapping[Any, Any] | None = None  # the optimizer's state that the blocks have taken
        self._written = ""  # the write that is running, or that broke off
        self._region: Region | None = None  # on rank 0
        self._is_published = False
        self._opened()

    def _opened(self) -> HostStore:
        if self._store is None:
            self._store = HostStore(self._comm, [parameter for _, parameter in self.model._replicated_parameters()])
        return self._store

    def state_dict(self) -> dict[str, Any]:
        self._refuse_half_a_step()
        return super().state_dict()

    def kept(self) -> dict[str, Any] | None:
        """Returns the state in the host's memory, unless an update was running.

        The count of an optimizer's steps, say, is known to the rank that updates a parameter. Those of others are taken
        from a parameter of the same group.
        """
        if self._written:
            return None
        if self._slices is None or not self._stretches:
            return Replicated.kept(self)
        of_parts, known = self.optimizer.state, {each: dict(state) for each, state in self.optimizer.state.items()}
        for group in self.optimizer.param_groups:
            like = next((known[each] for each in group["params"] if known.get(each)), {})
            for each in group["params"]:
                if id(each) in self._slices.layout.slot_of and not known.get(each):
                    small = {name: value for name, value in like.items() if name not in self._opened().names}
                    known[each] = copy.deepcopy(small) | self._in_store(each, like)
        try:
            self.optimizer.state = defaultdict(dict, known)
            return Replicated.kept(self)
        finally:
            self.optimizer.state = of_parts

    def _refuse_half_a_step(self) -> None:
        if self._written:
            raise CommunicatorBroken(
                f"{self._written} broke off, and some ranks' parts of it may be missing: nothing is saved or trained "
                "on; load the last checkpoint"
            )

    def _load_model(self, state: Mapping[str, Tensor]) -> None:
        self._opened()
        self._host_barrier("all ranks load a state")
        with self._writing("loading a state"):
            super()._load_model(state)

    def publish(self, name: str, about: Mapping[str, Any], *, folder: Path | None = None) -> None:
        """Publishes parameters and buffers to other jobs of this user on rank 0's host, until `finish`.

        Args:
            name: of the region, for `region.look`.
            about: plain values for those jobs.
            folder: of the run, in which snapshots are written; None: they are in memory.

        Raises:
            ConfigError: the name is not allowed, or another run keeps a region of this name.
        """
        if self._is_published:
            raise ConfigError(f"region={name}: this strategy publishes under another name already, until finish()")
        self._opened()
        module = self.model.module

        def state() -> dict[str, Tensor]:
            values = module.state_dict(keep_vars=True)
            return {key: value for key, value in values.items() if isinstance(value, Tensor)}

        def begin() -> None:
            self._region = Region(name, state, about, folder=folder)

        on_rank_zero(self._comm, begin, label=f"publishing region {name}")
        self._is_published = True

    def finish(self, *, alone: bool = False) -> None:
        if self._region is not None:
            self._region.close()
        self._region, self._is_published = None, False
        if self._store is not None and self._written:
            log.warning("the parameters may be those of half a step: resume from the last checkpoint")
        super().finish(alone=alone)
        if self._store is not None:
            self._store.make_private()
            self._store = self._slices = None
            self._of_parts, self._places, self._stretches = self.optimizer, {}, []
            self._settings, self._adopted = [], None

    # --- a step ------------------------------------------------------------------------------------------------------

    def _gradient_norm(self) -> Tensor:
        self._refuse_half_a_step()
        self._prepared()
        self._make_room()
        self._take_in()
        return super()._gradient_norm()

    @torch.no_grad()
    def _step(self, norm: Tensor) -> None:
        optimizer = self._of_parts
        self._take_settings()
        with self._writing(f"the update of step {self.model.num_steps}"):
            for stretch in self._stretches:
                for block in stretch.blocks:
                    block.weights.grad = None if block.part.whole.grad is None else block.gradient
                for group, weights in zip(optimizer.param_groups, stretch.by_group, strict=True):
                    group["params"] = weights
                clipped_step(optimizer, [block.weights for block in stretch.blocks], norm, self._clip_norm)
                if not stretch.is_placed:
                    self._place(stretch.blocks)
                    stretch.is_placed = all(block.weights.grad is not None for block in stretch.blocks)
            self._update_user_state()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers ask for it

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Begins a block in which ranks write to the store. No rank of the host computes with it meanwhile."""
        self._written = what
        yield
        self._host_barrier("all parts are written")
        self._written = ""
        if self._region is not None:
            self._region.step_ended(self.model.num_steps)

    def _sum(self, found: Tensor, what: str) -> None:
        self._comm.sum_in_host(found.view(-1), label=f"step {self.model.num_steps}, {what}")  # every host has the same

    def _host_barrier(self, what: str) -> None:
        """Waits until all ranks of the host have called this."""
        self._sum(torch.zeros(1, device="cpu"), what)

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _slices_of(self, layout: Layout) -> HostSlices:
        give_back_free_blocks()  # a first backward has all gradients outside the buckets; later ones have few
        return HostSlices(layout, self._collective, self._opened())

    def _optimizer_of(self, parts: Sequence[Part]) -> Optimizer:
        mine = super()._optimizer_of(parts)
        groups = self.optimizer.param_groups
        by_group: list[list[Part]] = [[] for _ in groups]
        number = {id(parameter): index for index, group in enumerate(groups) for parameter in group["params"]}
        for part in parts:
            if id(part.whole) in number:
                by_group[number[id(part.whole)]].append(part)
        self._stretches = [Stretch(len(groups))]
        for index, each in enumerate(by_group):
            for block in blocks_of(each, whole=isinstance(mine, Layerwise)):
                stretch = self._stretches[-1]
                if not isinstance(mine, Layerwise) and stretch.numel + block.weights.numel() > STRETCH_NUMEL:
                    self._stretches.append(stretch := Stretch(len(groups)))
                stretch.blocks.append(block)
                stretch.by_group[index].append(block.weights)
                stretch.numel += block.weights.numel()
        return mine

    # --- the state ---------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Adds to the store the states that the groups' settings need now. Collective if these have changed."""
        groups, store = self.optimizer.param_groups, self._opened()
        settings = [{key: group[key] for key in group if key not in ("params", "lr", "initial_lr")} for group in groups]
        if settings != self._settings:
            self._settings = settings
            for name in dict.fromkeys(chain.from_iterable(large_states(self.optimizer, group) for group in groups)):
                if name not in store.names:
                    store.add(name)
            for stretch in self._stretches:
                stretch.is_placed = False

    def _take_in(self) -> None:
        """Adopts a state of whole parameters: each block gets its share of large values, in the store."""
        if self.optimizer.state is self._adopted:  # no program has loaded another one
            return
        self._make_room()
        self._adopted = state = self.optimizer.state
        names = self._opened().names
        for stretch in self._stretches:
            stretch.is_placed = False  # the state may lack tensors, which the optimizer then makes again
        for block in self._blocks():
            self._of_parts.state[block.weights] = {
                name: block.share_of(value) if name in names and isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in state[block.part.whole].items()
            }
        self._place(self._blocks())
        self._update_user_state()

    def _place(self, blocks: Iterable[Block]) -> None:
        """Moves the large states of blocks to the store."""
        for block in blocks:
            state = self._of_parts.state[block.weights]
            for name, view in self._in_store(block.part.whole, state).items():
                place = block.share_of(view)
                if state[name].data_ptr() != place.data_ptr():
                    state[name] = place.copy_(state[name])

    def _update_user_state(self) -> None:
        """Updates the state of the user's optimizer, by whole parameter."""
        for block in self._blocks():
            if block.start == block.part.start:
                whole, state = block.part.whole, self._of_parts.state[block.weights]
                self.optimizer.state[whole].update({**state, **self._in_store(whole, state)})

    def _blocks(self) -> Iterator[Block]:
        return chain.from_iterable(stretch.blocks for stretch in self._stretches)

    def _in_store(self, whole: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns by name the places of a parameter's large states."""
        store = self._opened()
        return {name: store.view(name, whole) for name in store.names if isinstance(state.get(name), Tensor)}

    def _is_cut(self, part: Part, name: str, value: Any) -> bool:
        return value is self._in_store(part.whole, self.optimizer.state[part.whole]).get(name, ...)

    def _gather_large(self, whole: Mapping[Tensor, dict[str, Any]], *, keep: bool, on_cpu: bool) -> None:
        for parameter, state in whole.items():  # which all ranks of the host have in one place
            for name in [name for name, value in state.items() if isinstance(value, torch.dtype)]:
                state[name] = self._opened().view(name, parameter)


def blocks_of(parts: Sequence[Part], *, whole: bool) -> Iterator[Block]:
    """Yields the blocks of parts; if `whole`, each part is one, as a scalar always is."""
    for part in parts:
        if whole or not part.weights.dim():
            yield Block(part, part.start, part.stop, part.weights, part.gradient)
            continue
        for begin in range(0, len(part.weights), BLOCK_NUMEL):
            weights = part.weights.detach()[begin : begin + BLOCK_NUMEL]
            start = part.start + begin
            gradient = part.gradient[begin : begin + BLOCK_NUMEL]
            yield Block(part, start, start + len(weights), nn.Parameter(weights), gradient)


def large_states(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Returns the names of the states that have an element for each element of a parameter.

    A copy of the optimizer makes a step of one small tensor with the settings of the group, which shows its states.
    """
    tried, parameter = copy_of(optimizer), nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.zeros(2, 3)
    tried.state, tried.param_groups = defaultdict(dict), [{**group, "params": [parameter]}]
    tried.step()
    return [name for name, value in tried.state[parameter].items() if is_large(value, parameter, name)]
