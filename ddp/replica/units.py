"""Units: parts of a model whose parameters are whole on a rank only while it computes with them.

A model that no rank can hold is cut twice: into units, of which a rank has one or two at a time; and each unit's
parameters into slices, of which a rank keeps its own (ZeRO stage 3: Rajbhandari et al., arXiv 1910.02054, section 5.3;
Zhao et al., "PyTorch FSDP", arXiv 2304.11277).

    forward    root ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓    whole until the update
               0    ▓▓▓▓▓▓▓                                 ▓▓▓▓▓▓▓▓▓▓ reduce
               1           ▓▓▓▓▓▓▓                ▓▓▓▓▓▓▓▓▓▓ reduce
               2                  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ reduce               the last of forward is the first of backward

A unit is an element of an outermost `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict`; what is in none of them is the
root unit, and so are weights that a unit shares with others. A unit is a bucket: its gradients are reduced together,
and each rank keeps the mean of its slice.

Note "on demand". A hook gathers a unit before its forward, and autograd gathers it again when it unpacks what forward
has saved: a view of a unit's memory is saved as its place in the unit. At most one unit is whole besides the root and
those whose forward is running: the next one takes its place. Over a network that one is gathered ahead, and is whole,
too. Each gathering has new memory, so what a program has kept by itself, such as a view, stays valid, and costs that
memory.

Released parameters are absent (`flat.py`): they read as NaN. One that takes part in a forward outside of its unit is
found when autograd saves it. All ranks use units in one order (`common_order.py`); `in_slices.py` adds up gradients.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ddp.comm.objects import all_gather_object
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, Slot, strides_in_bucket
from ddp.gradients.reducer import ReduceScatter, slice_bounds
from ddp.process.memory import give_back_large_blocks
from ddp.replica.autograd import uncompiled
from ddp.replica.broadcast import broadcast_state, broadcast_tensors
from ddp.replica.common_order import CommonOrder, Event, Pass
from ddp.replica.flat import Flat
from ddp.units import binary_size, counted

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator
    from ddp.gradients.layout import Layout

# --- Which modules are units -----------------------------------------------------------------------------------------


class Unit:
    """A part of a model that is gathered and released as one.

    Attributes:
        index: its number, in the order of registration; the root's is the last.
        named: its parameters with their names.
        flats: where they are, by dtype, and by whether they need a gradient.
        num_running: forwards of it that are running; it stays whole meanwhile.
    """

    def __init__(self, index: int, name: str, module: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.index, self.name, self.module, self.named = index, name, module, list(named)
        self.flats: list[Flat] = []
        self.num_running = 0

    @property
    def is_whole(self) -> bool:
        """Returns True if all its parameters can be read."""
        return all(flat.is_whole for flat in self.flats)

    @property
    def title(self) -> str:
        """Returns its name for messages."""
        return f"unit {self.name}" if self.name else "the root unit"

    def take_memory(self, device: torch.device) -> None:
        """Gives parameters on the meta device uninitialized memory; an optimizer of them stays valid."""
        for _, parameter in self.named:
            if parameter.is_meta:
                like = torch.empty_like(parameter, device=device)
                torch.utils.swap_tensors(parameter, nn.Parameter(like, requires_grad=parameter.requires_grad))

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of its parameters."""
        return sum(parameter.nbytes for _, parameter in self.named)


CONTAINERS = nn.ModuleList, nn.Sequential, nn.ModuleDict


def unit_modules(module: nn.Module, pattern: str | None = None) -> dict[str, nn.Module]:
    """Returns the modules that are units, by name.

    Args:
        pattern: of their names, with `*` and `?` for letters between dots; None: the elements of outermost containers.

    Raises:
        ConfigError: none has such a name, or one is a list, which has no forward.
    """
    if pattern is None:
        return dict(_elements(module, "", is_inside=False))
    named = list(module.named_modules())
    found = {name: each for name, each in named if name and _fits(name.split("."), pattern.split("."))}
    if not found:
        known = ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name, _ in named if name)) or "none"
        raise ConfigError(f"units={pattern!r}: no module has such a name; there are {known:.300}")
    for name, each in found.items():
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)):
            what = f"{name} is a {type(each).__name__}, which has no forward"
            raise ConfigError(f"units={pattern!r}: {what}; name its elements, {name}.*")
    return found


def _fits(words: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(words) == len(patterns) and all(map(fnmatchcase, words, patterns))


def _elements(module: nn.Module, prefix: str, *, is_inside: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yields elements of outermost containers. One that is a list itself has no forward: its elements are units."""
    for name, child in module.named_children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if is_list or not (is_inside or isinstance(module, CONTAINERS)):
            yield from _elements(child, f"{prefix}{name}.", is_inside=False)
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}", child


def units_of(module: nn.Module, named: Sequence[tuple[str, nn.Parameter]], pattern: str | None) -> list[Unit]:
    """Returns the units of a model with their parameters; the root, which has the rest, is the last."""
    names: dict[nn.Module, str] = {}
    for name, each in unit_modules(module, pattern).items():
        names.setdefault(each, name)  # its list may have two names
    modules = {name: each for each, name in names.items()}
    inside: dict[nn.Module, set[str]] = {}  # the units that a module is in
    for name, unit in modules.items():
        for each in unit.modules():
            inside.setdefault(each, set()).add(name)
    users: dict[int, set[str]] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            users.setdefault(id(parameter), set()).update(inside.get(each, {""}))
    of_unit: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in modules}
    rest: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:
        only, *others = users[id(parameter)]
        (of_unit[only] if only and not others else rest).append((name, parameter))
    parts = [(name, modules[name], of_unit[name]) for name in modules if of_unit[name]] + [("", module, rest)]
    return [Unit(index, *part) for index, part in enumerate(parts)]


def refuse_meta(comm: Communicator, module: nn.Module) -> None:
    """Raises ConfigError, on every rank, if rank 0 has no values for the others, or would not send them. Collective."""
    named = (*module.named_parameters(), *module.named_buffers())
    unsent = (
        f"{prefix}.{name}".lstrip(".")
        for prefix, each in module.named_modules()
        for name, value in vars(each).items()
        if isinstance(value, Tensor) and value.is_meta
    )
    found = all_gather_object(comm, (next((name for name, each in named if each.is_meta), None), next(unsent, None)))
    if name := found[0][0]:
        raise ConfigError(
            f"{name} is on the meta device and has no values on rank 0, which gives all ranks theirs: make the model "
            "in memory there, or call to_empty(device=…) and load weights"
        )
    for rank, (_, name) in enumerate(found):
        if name:
            raise ConfigError(
                f"{name} is on the meta device on rank {rank}, and gets no values, because it is neither a parameter "
                "nor a buffer: register it by register_buffer(…, persistent=False)"
            )


class _Saved(NamedTuple):
    """The place of a tensor that autograd has saved, in a unit's memory."""

    unit: Unit
    flat: Flat
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


class SavedPlaces:
    """Lets autograd save views of units as their places (note "on demand")."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._found: dict[int, tuple[Unit, Flat]] = {}  # by address

    def add(self, unit: Unit, flat: Flat) -> None:
        """Adds the memory of a unit that is whole."""
        assert flat.whole is not None
        self._found[flat.whole.data_ptr()] = unit, flat

    def remove(self, flat: Flat) -> None:
        """Removes a memory that will be given back."""
        if flat.whole is not None:
            self._found.pop(flat.whole.data_ptr(), None)

    @uncompiled
    def saving(self) -> AbstractContextManager[None]:
        """Returns a block in which autograd saves places."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True) or (None, None)  # of the program
        return saved_tensors_hooks(partial(self._pack, outer[0]), partial(self._unpack, outer[1]))

    @uncompiled
    def _pack(self, outer: Callable[[Tensor], Any] | None, tensor: Tensor) -> Any:
        try:
            address, strides = tensor.untyped_storage().data_ptr(), tensor.stride()
        except RuntimeError:  # sparse, or nested: it has no memory of its own
            return tensor if outer is None else outer(tensor)
        found = self._found.get(address)
        if found is None and tensor.dim() and not any(strides):
            self._check_inside(tensor.data_ptr())
        if found is None or tensor.dtype is not found[1].dtype or tensor.is_conj() or tensor.is_neg():
            return tensor if outer is None else outer(tensor)
        return _Saved(*found, tensor.shape, strides, int(tensor.storage_offset()), found[1].version)

    def _check_inside(self, address: int) -> None:
        """Raises ConfigError if a released parameter is at an address, which an operation outside of its unit reads."""
        for unit in self._units.all:
            for name, parameter in unit.named:
                if not unit.is_whole and parameter.data_ptr() == address:
                    raise ConfigError(
                        f"{name} is used outside of the forward of {unit.title}, where it is released: use it "
                        "inside, or choose other units by strategy.units (ddp.Averaging(units=…))"
                    )

    @uncompiled
    def _unpack(self, outer: Callable[[Any], Tensor] | None, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved if outer is None else outer(saved)
        if saved.version != saved.flat.version:
            raise RuntimeError(
                f"{saved.unit.title} has been updated since the forward that this backward goes through, so the "
                "gradients would be wrong: run each backward before the update, or the forward again after it"
            )
        self._units.use(saved.unit)
        assert saved.flat.whole is not None
        return saved.flat.whole.as_strided(saved.shape, saved.stride, saved.offset)


# --- The units of a replica ------------------------------------------------------------------------------------------


class Units:
    """The units of a replica. Collective to make: parameters and buffers become rank 0's, unit by unit.

    Args:
        named: the parameters, with their names.
        collective: reduces the buckets.
        pattern: as in `unit_modules`.
        sending: as in `broadcast_state`.

    Attributes:
        all: the units, and the root.
        strides_of: by a parameter's id, those that it has in its unit's memory.
        is_guarded: copying or saving the module raises an error while units are released.
        is_dissolved: there are no units any more, but a replica may still have this.
    """

    is_fixed = True

    def __init__(
        self,
        comm: Communicator,
        module: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        collective: ReduceScatter,
        *,
        pattern: str | None = None,
        sending: str = "",
    ) -> None:
        self.comm, self._module, self.collective = comm, module, collective
        self.is_guarded, self.is_dissolved = True, False
        self._whole: list[Unit] = []  # besides the root
        self._flat_of: weakref.WeakKeyDictionary[Bucket, Flat] = weakref.WeakKeyDictionary()
        self.places = SavedPlaces(self)
        self.order = CommonOrder(comm, lambda number: self.all[number].title)
        self.layouts: Callable[[], Layout]
        self.all = units_of(module, named, pattern)
        self.root = self.all[-1]
        self._unit_of = {id(parameter): unit for unit in self.all for _, parameter in unit.named}
        self.strides_of = {id(parameter): strides_in_bucket(parameter) for _, parameter in named}
        refuse_meta(comm, module)
        for unit in self.all:
            unit.take_memory(comm.device)
            broadcast_state(comm, unit.named, sending=sending)
            self._cut(unit, [])
            self._release(unit)
        for each in module.modules():
            for name, buffer in each._buffers.items():
                if buffer is not None and buffer.is_meta:
                    each._buffers[name] = torch.empty_like(buffer, device=comm.device)
        give_back_large_blocks()  # else free blocks of many sizes would be kept, and no memory saved
        broadcast_state(comm, module.named_buffers())
        self._handles = [handle for unit in self.all for handle in self._hooks_on(unit)]
        self._handles += [handle for each in module.modules() for handle in self._guards_on(each)]
        _UNITS_OF[module] = self

    def in_words(self) -> str:
        """Returns how many units there are, and what a rank holds of them."""
        *units, root = [unit.num_bytes for unit in self.all]
        total, largest = sum(units) + root, max(units, default=0)
        mine = sum(flat.mine.nbytes for unit in self.all for flat in unit.flats)
        text = (
            f"parameters: {binary_size(total)} in {counted(len(units), 'unit')} and the root; this rank keeps "
            f"{binary_size(mine)}, and {binary_size(root + largest)} more while it computes"
        )
        if len(units) > 1 and root + largest < total / 2:
            return text
        return (
            f"{text}. Little is saved, because the root or one unit has most of them: put the layers into an "
            "nn.ModuleList or nn.Sequential, or name them by units=PATTERN"
        )

    # --- slices ------------------------------------------------------------------------------------------------------

    def groups(self, slots: Iterable[Slot]) -> list[list[Slot]]:
        """Returns the slots of each bucket, one for each unit and dtype, in the expected order of reduction."""
        found: dict[tuple[int, torch.dtype], list[Slot]] = {}
        for slot in sorted(slots, key=lambda slot: slot.index):
            slot.strides = self.strides_of[id(slot.parameter)]  # a released parameter has none
            found.setdefault((self._unit_of[id(slot.parameter)].index, slot.parameter.dtype), []).append(slot)
        root = self.root.index
        return [found[key] for key in sorted(found, key=lambda key: (key[0] == root, -key[0], str(key[1])))]

    def flat_of(self, bucket: Bucket) -> Flat:
        """Returns where the parameters of a bucket are. Collective if they have been frozen or unfrozen."""
        if bucket not in self._flat_of:
            unit = self._unit_of[id(bucket.slots[0].parameter)]
            flat = next((each for each in unit.flats if each.bucket.ids == bucket.ids), None)
            if flat is None:
                self._gather(unit, "frozen or unfrozen")
                self._cut(unit, [each for each in self.layouts().buckets if self._unit_at(each) is unit])
                flat = next(each for each in unit.flats if each.bucket is bucket)
            flat.bucket = bucket
            self._flat_of[bucket] = flat
            self.collective.cut(bucket, list(flat.bounds))
        return self._flat_of[bucket]

    def _unit_at(self, bucket: Bucket) -> Unit:
        return self._unit_of[id(bucket.slots[0].parameter)]

    def _cut(self, unit: Unit, buckets: Sequence[Bucket]) -> None:
        """Cuts a whole unit into slices: each bucket, and the rest by dtype and need of a gradient. Collective."""
        in_buckets = frozenset[int]().union(*(bucket.ids for bucket in buckets))
        rest: dict[tuple[torch.dtype, bool], list[Slot]] = {}
        for name, parameter in unit.named:
            if id(parameter) not in in_buckets:
                key = parameter.dtype, parameter.requires_grad
                rest.setdefault(key, []).append(slot := Slot(0, name, parameter))
                slot.strides = self.strides_of[id(parameter)]
        for bucket in [bucket for bucket, flat in self._flat_of.items() if flat in unit.flats]:
            del self._flat_of[bucket]
        for flat in unit.flats:  # which a running backward may still read
            self.places.remove(flat)
        unit.flats = []
        for bucket in [*buckets, *(Bucket(0, slots) for slots in rest.values())]:
            cuts = [flat.bounds for each in self.all for flat in each.flats]
            held = [sum(bounds[n + 1] - bounds[n] for bounds in cuts) for n in range(self.comm.world_size)]
            unit.flats.append(flat := Flat(self.comm, bucket, slice_bounds(bucket, self.comm.world_size, held)))
            self.places.add(unit, flat)

    # --- gathering ---------------------------------------------------------------------------------------------------

    def forward(self, *, is_training: bool, is_last: bool) -> AbstractContextManager[None]:
        """Returns a block for a forward of the replica; its backward is expected to follow if autograd records it."""
        return _Uncompiled(self._forward(is_training=is_training, is_last=is_last))

    @contextmanager
    def _forward(self, *, is_training: bool, is_last: bool) -> Iterator[None]:
        records = torch.is_grad_enabled()
        self.order.begin(Pass(False, is_training, records))
        try:
            with self.places.saving() if records else nullcontext():
                yield
        except BaseException:
            self.order.cancel()
            raise
        self.order.end()
        if records:
            self._sort()
            self.order.begin(Pass(True, is_training, is_last))

    def transformed(self) -> AbstractContextManager[None]:
        """Returns a block for a forward in a transform of torch.func, which would wrap what is gathered in it.

        Raises:
            ConfigError: a unit would be gathered.
        """
        if not all(unit.is_whole for unit in self.all):
            raise ConfigError("torch.func transforms a model in slices inside of `with model.whole():`, on all ranks")
        return nullcontext()

    def _sort(self) -> None:
        """Reduces buckets in the reverse order of the forward that has ended, the root's last."""
        layout, place = self.layouts(), {index: place for place, index in enumerate(self.order.used_last)}
        place[self.root.index] = len(place)
        in_order = sorted(layout.buckets, key=lambda bucket: place.get(self._unit_at(bucket).index, len(place)))
        if any(a is not b for a, b in zip(in_order, layout.buckets, strict=True)):
            layout.reorder(in_order)

    def use(self, unit: Unit) -> None:
        """Makes a unit whole, in the place of those that nothing runs in. Collective."""
        is_last = unit.is_whole and (unit is self.root or self._whole[-1:] == [unit])
        if is_last and self.order.has_used(unit.index):  # what is whole from before a pass is in its order, too
            return
        self.order.note(Event("use", unit.index))
        self._use(unit)

    def _use(self, unit: Unit) -> None:
        if unit is not self.root:
            for other in [each for each in self._whole if each is not unit and not each.num_running]:
                self._release(other)
            self._whole = [each for each in self._whole if each is not unit] + [unit]
        if not unit.is_whole:
            self._gather(unit, self.order.what_runs)
        if self.comm.plan.overlaps:
            self._gather_next()

    @torch.no_grad()
    def _gather_next(self) -> None:
        """Begins to gather the unit that follows in the known order, while this rank computes with the present one."""
        unit = self.root if (coming := self.order.coming) is None else self.all[coming]
        if unit is not self.root and all(flat.whole is None for flat in unit.flats):
            for flat in unit.flats:
                self.order.began(Event("use", unit.index))
                flat.begin_gathering(f"{self.order.what_runs} of {unit.title}, ahead")
            self._whole.insert(0, unit)  # the next to be released, unless it is used

    @torch.no_grad()
    def _gather(self, unit: Unit, why: str) -> None:
        for flat in unit.flats:
            if flat.whole is None:
                self.order.began(Event("use", unit.index))
            flat.gather(f"{why} of {unit.title}")
            self.places.add(unit, flat)

    def _release(self, unit: Unit) -> None:
        for flat in unit.flats:
            self.places.remove(flat)
            flat.release()
        self._whole = [each for each in self._whole if each is not unit]

    def release(self) -> None:
        """Releases all units in which nothing runs, because their parameters change, or are not needed for long."""
        for unit in self.all:
            if not unit.num_running:
                self._release(unit)

    def release_of(self, bucket: Bucket) -> None:
        """Releases the unit of a bucket, whose gradients are all computed; the root stays."""
        unit = self._unit_at(bucket)
        if unit is not self.root and not unit.num_running:
            self._release(unit)

    # --- a rank without samples ------------------------------------------------------------------------------------

    def follow_forward(self, *, is_training: bool, records: bool) -> None:
        """Takes part in a forward for which this rank has no samples. Collective."""
        self.order.follow(Pass(False, is_training, records), lambda event: self._use(self.all[event.number]))
        if records:
            self._sort()

    def follow_backward(self, reduce: Callable[[int], None], *, is_last: bool) -> None:
        """Takes part in a backward for which this rank has no samples. Collective.

        Args:
            reduce: reduces a bucket to which this rank contributes zeros.
            is_last: of a step.
        """

        def act(event: Event) -> None:
            if event.what == "use":
                self._use(self.all[event.number])
            else:
                reduce(event.number)

        self.order.follow(Pass(True, True, is_last), act)

    # --- all of it ---------------------------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Makes all parameters whole for a block, on all ranks, to read and to write. Collective."""
        for unit in self.all:
            if not unit.is_whole:
                self._gather(unit, "all")
            unit.num_running += 1
        try:
            yield
        finally:
            for unit in self.all:
                unit.num_running -= 1
                for flat in unit.flats:
                    flat.keep()
                if not unit.num_running:
                    self._release(unit)

    def state(self, *, keep: bool) -> dict[str, Tensor]:
        """Returns the module's state on the CPU, if `keep`. Collective; one unit is whole at a time."""
        found: dict[int, Tensor] = {}
        for unit in self.all:
            if not (was_whole := unit.is_whole):
                self._gather(unit, "saving")
            if keep:
                found.update({id(each): each.detach().to("cpu", copy=True) for _, each in unit.named})
            if not was_whole:
                self._release(unit)
        if not keep:
            return {}
        with self.unguarded():
            values = self._module.state_dict(keep_vars=True)
        return {name: found.get(id(value), value) for name, value in values.items()}

    def slices(self) -> list[Tensor]:
        """Returns the parameters that this rank keeps, as flat slices of units."""
        return [flat.mine for unit in self.all for flat in unit.flats]

    def load_slices(self, state: Mapping[str, Tensor], into: Sequence[Tensor]) -> None:
        """Copies this rank's slices of a state that rank 0 has, one unit after another. Collective."""
        flats = (flat for unit in self.all for flat in unit.flats)
        for flat, mine in zip(flats, into, strict=True):
            values = {slot.name: state[slot.name] for slot in flat.bucket.slots}
            mine.copy_(flat.slice_of(values, flat.dtype, what="loading"))

    @contextmanager
    def replaced(self, slices: Sequence[Tensor]) -> Iterator[None]:
        """Computes with other values of `slices` for a block, on all ranks."""
        before = [mine.clone() for mine in self.slices()]
        try:
            self._write(slices)
            yield
        finally:
            self._write(before)

    @torch.no_grad()
    def _write(self, slices: Sequence[Tensor]) -> None:
        self.release()
        for mine, value in zip(self.slices(), slices, strict=True):
            mine.copy_(value)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's slices of a state that rank 0 has, one unit after another, and all buffers. Collective."""
        self.load_slices(state, self.slices())
        self.release()
        buffers = {name: each for name, each in self._module.named_buffers() if name in state}
        if self.comm.rank == 0:
            for name, buffer in buffers.items():
                buffer.copy_(state[name])
        broadcast_tensors(self.comm, list(buffers.values()), label="buffers")

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Lets the code inside copy a module whose units are released."""
        before, self.is_guarded = self.is_guarded, False
        try:
            yield
        finally:
            self.is_guarded = before

    def dissolve(self, *, alone: bool = False) -> None:
        """Leaves the module as it was before there were units. Collective unless `alone`.

        Args:
            alone: other ranks may be lost. The parameters are NaN then, until a checkpoint is loaded into them.
        """
        for unit in self.all:
            if not alone:
                self._gather(unit, "all")
            for flat in unit.flats:
                flat.give_up()
        for handle in self._handles:
            handle.remove()
        _UNITS_OF.pop(self._module, None)
        self.is_dissolved = True

    def check(self) -> None:
        """Raises RuntimeError if the module has no units any more."""
        if self.is_dissolved:
            raise RuntimeError(
                "the module is in another replica since, or an error has ended its training here: call the new "
                "replica, or make one with strategy='fully_sharded'"
            )

    def _hooks_on(self, unit: Unit) -> Iterator[Any]:
        module = unit.module
        # before those of the program, which may compute weights, as torch.nn.utils.prune does
        yield module.register_forward_pre_hook(_Hook(self, unit, "enter"), prepend=True)
        yield module.register_forward_hook(_Hook(self, unit, "leave"), always_call=True)

    def _guards_on(self, module: nn.Module) -> Iterator[Any]:
        """Yields the hooks of a module that refuse to copy its own parameters, which may be a part of a unit."""
        for unit in {self._unit_of[id(each)] for each in module.parameters(recurse=False) if id(each) in self._unit_of}:
            yield module.register_state_dict_pre_hook(_Hook(self, unit, "refuse"))
            yield module.register_load_state_dict_pre_hook(_Hook(self, unit, "refuse"))


_UNITS_OF: weakref.WeakKeyDictionary[nn.Module, Units] = weakref.WeakKeyDictionary()


def dissolve_units(module: nn.Module) -> None:
    """Dissolves the units of earlier replicas that have parameters of a module, but not of those in it. Collective."""
    own, inside = set(map(id, module.parameters())), [getattr(each, "units", None) for each in module.modules()]
    for units in list(_UNITS_OF.values()):
        if not own.isdisjoint(units._unit_of) and not any(units is each for each in inside):
            units.dissolve(alone=units.comm.is_broken)


def form_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's state for names, shapes and types; its parameters may be absent. Not collective."""
    units = _UNITS_OF.get(getattr(module, "module", module)) or _UNITS_OF.get(module)
    with nullcontext() if units is None else units.unguarded():
        return dict(nn.Module.state_dict(module))


class _Uncompiled(AbstractContextManager[None]):
    """A block of which no graph holds the beginning and the end."""

    def __init__(self, block: AbstractContextManager[None]) -> None:
        self._block = block

    @uncompiled
    def __enter__(self) -> None:
        self._block.__enter__()

    @uncompiled
    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)


class _Hook:
    """A hook of a unit. A copy of the module has none, and there is no copy while the unit is released."""

    def __init__(self, units: Units, unit: Unit, what: str) -> None:
        self._units, self._unit, self._what = units, unit, what

    @uncompiled
    def __call__(self, *_: Any) -> None:
        unit = self._unit
        if self._what == "enter":
            self._units.use(unit)
            unit.num_running += 1
        elif self._what == "leave":
            unit.num_running = max(0, unit.num_running - 1)  # a hook of the program may have failed before ours
        else:
            self._refuse()

    def _refuse(self) -> None:
        if self._units.is_guarded and not self._unit.is_whole:
            raise ConfigError(
                f"{self._unit.title} is released: its parameters are in slices, one on each rank. Copy, "
                "save and load the module inside of `with model.whole():`, on all ranks; model.state_dict() gathers"
            )

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        self._refuse()
        return _no_hook

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse()
        return _made_no_hook, ()


def _no_hook(*_: Any) -> None:
    """Does nothing, in the place of a hook."""


def _made_no_hook() -> Callable[..., None]:
    return _no_hook
