"""Makes replicas equal: parameters and buffers at the start, buffers before forwards; and compares them on request.

At the start every rank gets rank 0's parameters and buffers.

All that a bucket depends on is compared first. A broadcast into a tensor of another size is at best a hang, at worst a
wrong model, and so are buckets in which ranks lay out the same gradient differently. The comparison names the first
tensor that differs, and the ranks.

Tensors travel packed by dtype, one message per `PACK_BYTES` or so rather than one per tensor.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ddp.comm.objects import all_gather_object
from ddp.errors import CollectiveMismatch, ConfigError, ReplicaMismatch

if TYPE_CHECKING:
    from ddp.comm.communicator import Communicator


PACK_BYTES = 32 << 20


def check_trainable(
    named: list[tuple[str, nn.Parameter]], *, has_inner: bool = False, in_slices: bool = False
) -> None:
    """Raises ConfigError if no parameter needs a gradient, or if one has no shape or value, or is split among ranks.

    Args:
        has_inner: an inner replica keeps other parameters of the module equal, and those need one.
        in_slices: parameters may be on the meta device, because rank 0's values come unit by unit; and may all be
            frozen, because a replica saves memory then, too.
    """
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} of a lazy module has no shape yet: run one forward before making the replica")
        if hasattr(parameter, "placements") or hasattr(parameter, "_st_info"):  # as parallelize_module leaves them
            raise ConfigError(
                f"{name} is one part of a parameter: a replica does not go above tensor parallelism, which makes new "
                "parameters in each forward; leave parallelize_module out, or keep torch's DistributedDataParallel"
            )
        if parameter.is_meta and not in_slices:
            raise ConfigError(f"{name} is on the meta device and has no values: call to_empty(device=…) first")
    if not has_inner and not in_slices and not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError("no parameter of the module needs a gradient: there is nothing to average; use it as it is")


def sending(wire: str | None, hook: object | None, num_shards: int | None = None) -> str:
    """Returns a text for how gradients are sent and added up, which all ranks can compare."""
    choices = ("wire", wire), ("hook", hook), ("num_shards", num_shards)
    return ", ".join(f"{key}={value!r}" for key, value in choices if value is not None) or "none of these"


def check_same_layout(comm: Communicator, named_tensors: Iterable[tuple[str, Tensor]], sending: str = "") -> None:
    """Raises ReplicaMismatch, on every rank, unless all ranks have the same tensors in one order (see `_described`).

    Args:
        sending: how gradients are sent; the same on every rank, too.
    """
    named = list(named_tensors)
    tied = in_memory_of(named)  # torch updates tied memory once for each name
    mine = [
        _described(name, tensor) + (f" in the memory of {tied[name]}" if name in tied else "") for name, tensor in named
    ]
    (reference, first), *others = all_gather_object(comm, (mine, sending))
    for rank, (theirs, theirs_sending) in enumerate(others, start=1):
        if theirs_sending != first:
            raise ReplicaMismatch(
                f"rank 0 was given {first}, and rank {rank} {theirs_sending}: give every rank the same"
            )
        if theirs != reference:
            raise ReplicaMismatch(
                f"the models of rank 0 and rank {rank} differ: {_difference(reference, theirs, rank)}"
            )


def broadcast_tensors(comm: Communicator, tensors: Sequence[Tensor], *, root: int = 0, label: str = "") -> None:
    """Overwrites `tensors` with the root's, on every rank, in place."""
    if comm.world_size == 1:
        return
    with torch.no_grad():
        for pack in _packs(tensors):
            sizes = [tensor.numel() for tensor in pack]
            if comm.rank == root:
                flat = torch.cat([tensor.reshape(-1) for tensor in pack])
                comm.broadcast(flat.to(comm.device), root, label=label)  # a copy only in a model on several devices
            else:
                flat = pack[0].new_empty(sum(sizes), device=comm.device)
                parts = comm.broadcast(flat, root, label=label).to(pack[0].device).split(sizes)
                values = [part.view(tensor.shape) for part, tensor in zip(parts, pack, strict=True)]
                torch._foreach_copy_(pack, values)


def broadcast_state(
    comm: Communicator, named_tensors: Iterable[tuple[str, Tensor]], *, root: int = 0, sending: str = ""
) -> None:
    """Makes a model the same on every rank: its parameters and buffers become the root's. Collective.

    Args:
        sending: as in `check_same_layout`.
    """
    named = list(named_tensors)
    check_same_layout(comm, named, sending)
    broadcast_tensors(comm, [tensor.detach() for _, tensor in named], root=root, label="parameters and buffers")


def _described(name: str, tensor: Tensor) -> str:
    """Returns all that must agree between ranks: "0.weight [8, 3, 3, 3] float32 with strides (27, 1, 9, 3)"."""
    words = [name, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch.")]
    if not tensor.is_contiguous():
        words.append(f"with strides {tensor.stride()}")
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        words.append("frozen")
    return " ".join(words)


def _difference(ours: list[str], theirs: list[str], rank: int) -> str:
    for here, there in zip(ours, theirs, strict=False):
        if here != there:
            return f"{here} on rank 0, {there} on rank {rank}. Build the same model on every rank"
    return f"{len(ours)} tensors on rank 0, {len(theirs)} on rank {rank}. Build the same model on every rank"


def _packs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields packs of tensors of one dtype and device; each has at least `PACK_BYTES`, but for the last of a kind."""
    packs: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        pack = packs.setdefault(kind, [])
        pack.append(tensor)
        if sum(each.nbytes for each in pack) >= PACK_BYTES:
            yield packs.pop(kind)
    yield from packs.values()


# --- Comparison of replicas ------------------------------------------------------------------------------------------
#
# Replicas are compared by a hash of every tensor on every rank. The error names the first tensor that differs.


def tensor_hash(tensor: Tensor) -> str:
    """Returns a hash of the tensor's bits: 0.0 and -0.0 differ, equal NaNs do not."""
    return hashlib.blake2b(_bytes_of(tensor), digest_size=16).hexdigest()


def checksum(tensor: Tensor) -> int:
    """Returns the CRC-32 of a tensor's bits, several times faster than `tensor_hash`: against faults, not attacks."""
    return zlib.crc32(_bytes_of(tensor))


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def verify_replicas(comm: Communicator, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ReplicaMismatch, on every rank, unless all tensors are bitwise equal on all ranks.

    The message names the first tensor that differs and the ranks in the minority.
    """
    mine = {name: tensor_hash(tensor) for name, tensor in named_tensors}
    everyone = all_gather_object(comm, mine)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        hashes = [theirs.get(name, "missing") for theirs in everyone]
        majority, votes = Counter(hashes).most_common(1)[0]
        if votes < comm.world_size:
            minority = [rank for rank, value in enumerate(hashes) if value != majority]
            raise ReplicaMismatch(
                f"{name} is not the same on all ranks: rank(s) {minority} differ from the other {votes}. "
                "Something changed it outside the optimizer step, or a random number depended on the rank"
            )


# --- Buffers ---------------------------------------------------------------------------------------------------------
#
#     "broadcast"   every rank gets the values of one rank: rank 0, or under `join` the highest one that still has
#     inputs
#     "mean"        floating-point buffers become the mean over ranks; all others are broadcast
#     "none"        every rank keeps its own
#
# Buffers are synchronised when torch's class does it. A forward that synchronises gradients changes buffers, so the
# next forward synchronises the buffers first, whatever its mode. A forward without gradients, or inside `no_sync`, does
# so only if it is that next one (`require_forward_param_sync` of the replica). So the first forward of an evaluation
# takes rank 0's statistics on every rank. A rank that evaluates alone would wait for the others there; let it call
# `replica.module`, or choose buffers="none". Under `join`, only forwards that synchronise gradients synchronise
# buffers, because a rank without inputs takes part in no others.


Mode = Literal["broadcast", "mean", "none"]
BEFORE_FORWARD = "buffers before a forward; a rank that evaluates alone calls model.module, or passes buffers='none'"


class BufferSync:
    """Keeps one replica's buffers equal.

    Args:
        ignored: names of buffers that are left alone.

    Attributes:
        in_flight: what a user's hook keeps equal meanwhile (`drop_in/in_backward.py`).
    """

    in_flight: Sequence[Any] = ()

    def __init__(self, comm: Communicator, module: nn.Module, mode: Mode, ignored: Collection[str] = ()) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"buffers={mode!r}: choose one of {', '.join(get_args(Mode))}")
        self.comm, self.module, self.mode, self.ignored = comm, module, mode, ignored
        self.refresh()

    def refresh(self) -> None:
        """Finds the buffers again, because modules were added or removed."""
        modules = self.module.named_modules()
        self._tables = {f"{name}." if name else "": each._buffers for name, each in modules}  # also empty ones
        self._shapes = {name: buffer.shape for name, buffer in self._found()}

    def named(self) -> dict[str, Tensor]:
        """Returns the buffers as they are now: a module may have replaced some."""
        return dict(self._found())

    def put(self, name: str, buffer: Tensor) -> None:
        """Restores a buffer that a module has replaced by another tensor."""
        end = name.rfind(".") + 1
        self._tables[name[:end]][name[end:]] = buffer

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, table in self._tables.items():
            for name, buffer in table.items():
                if buffer is not None and prefix + name not in self.ignored:
                    yield prefix + name, buffer

    @property
    def is_active(self) -> bool:
        """Returns True if there are buffers, and they are to be kept equal."""
        return self.mode != "none" and any(True for _ in self._found())

    def before_forward(self, root: int) -> None:
        """Makes the buffers equal. Collective.

        Args:
            root: the rank whose buffers are right.
        """
        if self.mode == "mean":
            self._average(root)
        else:
            self.broadcast(root, label=BEFORE_FORWARD)

    def after_forward(self) -> None:
        """Does nothing; a user's hook may keep buffers equal here (`drop_in/in_backward.py`)."""

    def finish(self) -> None:
        """Waits for what is in flight."""

    def broadcast(self, root: int = 0, *, label: str = "buffers") -> None:
        """Gives every rank the root's buffers."""
        with self._naming_changed(label):
            self._broadcast(list(self.named().values()), root, label)

    @contextmanager
    def _naming_changed(self, label: str) -> Iterator[None]:
        """Adds to a CollectiveMismatch the buffers that have another shape than at the start."""
        try:
            yield
        except CollectiveMismatch as mismatch:
            now = ((name, self._shapes.get(name), buffer.shape) for name, buffer in self._found())
            changed = ", ".join(
                f"{name} was {list(before or ())} at the start and is {list(shape)} on rank {self.comm.rank}"
                for name, before, shape in now
                if shape != before
            )
            remedy = "keep a buffer that follows a rank's own samples as a plain attribute, without register_buffer"
            raise CollectiveMismatch(f"{label}: {changed and f'{changed}: {remedy}; '}{mismatch}") from mismatch

    def _average(self, root: int) -> None:
        """Gives every rank the mean of floating-point buffers, and the root's others."""
        buffers = [buffer.data for buffer in self.named().values()]
        real = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        others = [buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())]
        with self._naming_changed(BEFORE_FORWARD):
            if real:
                self.comm.all_reduce(real, "mean", label=BEFORE_FORWARD)
            self._broadcast(others, root, BEFORE_FORWARD)

    def _broadcast(self, buffers: list[Tensor], root: int, label: str) -> None:
        # `.data` has its own version counter: a graph that saved the buffer in an earlier forward stays valid
        broadcast_tensors(self.comm, [buffer.data for buffer in buffers], root=root, label=label)


class BufferSnapshot:
    """The buffers of a module at one moment.

    Args:
        former: a snapshot that is needed no longer, whose memory this one takes.

    Attributes:
        values: by name.
    """

    def __init__(self, module: nn.Module, former: BufferSnapshot | None = None) -> None:
        self._tables = [(each._buffers, dict(each._buffers)) for each in module.modules() if each._buffers]
        self._buffers = dict(module.named_buffers())
        kept: dict[str, Tensor] = {} if former is None else former.values
        self.values: dict[str, Tensor] = {
            name: _memory_for(each, kept.get(name)) for name, each in self._buffers.items()
        }
        _copy_each(self.values.values(), self._buffers.values())

    def restore(self) -> None:
        """Restores these buffers in the module, also those that it has replaced by other tensors."""
        for table, before in self._tables:
            table.update(before)
        _copy_each((each.data for each in self._buffers.values()), self.values.values())


def _memory_for(buffer: Tensor, former: Tensor | None) -> Tensor:
    """Returns the memory of a former copy if it fits the buffer; else new memory."""
    here = buffer.shape, buffer.dtype, buffer.device
    if former is not None and (former.shape, former.dtype, former.device) == here:
        return former
    with torch.inference_mode(False):
        return torch.empty_like(buffer, requires_grad=False)


@torch.no_grad()
def _copy_each(into: Iterable[Tensor], of: Iterable[Tensor]) -> None:
    """Copies tensors, those of one type and device together: then it is one kernel on a GPU."""
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for here, there in zip(into, of, strict=True):
        heres, theres = groups.setdefault((here.dtype, here.device), ([], []))
        heres.append(here)
        theres.append(there)
    for heres, theres in groups.values():
        torch._foreach_copy_(heres, theres)


# --- Tied tensors ----------------------------------------------------------------------------------------------------
#
# Tensors may share memory, as after `b.weight.data = a.weight.data`. torch updates such memory once for each parameter
# in it, and so does a strategy that leaves parameters in place. A strategy that moves them would untie them, and one
# that adds up differences would count each twice: both refuse the model. A parameter that is registered under several
# names is one parameter everywhere.


def check_untied(module: nn.Module, what: str, *, instead: str, buffers_alone: bool = False) -> None:
    """Raises ConfigError if a parameter of a module lies in the memory of another one, or a buffer in that of one.

    Args:
        what: the choice that would untie them.
        instead: the choice that keeps them tied.
        buffers_alone: parameters may be tied to parameters.
    """
    parameters, buffers = dict(module.named_parameters()), module.named_buffers()
    num_most = 1 if buffers_alone else 2
    for name, earlier in in_memory_of([*parameters.items(), *buffers]).items():
        if 1 <= (name in parameters) + (earlier in parameters) <= num_most:
            raise ConfigError(
                f"{what}: {name} lies in the memory of {earlier}, and would no longer follow it. Register one "
                f"nn.Parameter under both names, or clone() one of them; or take {instead}"
            )


def move(module: nn.Module, device: torch.device) -> nn.Module:
    """Returns a module that was moved to a device in place, so that an optimizer's parameters are still the module's.

    Raises:
        ConfigError: torch moves each tensor by itself, and some share memory.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):  # the replica gives them memory, or refuses them
        return module
    if any(tensor.device != device for tensor in tensors):
        check_untied(module, f"a model that moves to {device}", instead=f"a model that is on {device} already")
    return module.to(device)


def in_memory_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns, by the name of each tensor that has bytes in common with an earlier one, the name of that one.

    Addresses decide, because tensors of one storage may lie side by side, and two storages in one memory. An object
    that occurs twice counts once.
    """
    objects = {id(tensor): (name, tensor) for name, tensor in reversed(list(named)) if _has_address(tensor)}
    names, tensors = zip(*reversed(objects.values()), strict=True) if objects else ((), ())
    places = [_place(tensor) for tensor in tensors]
    found, reaching = dict[int, int](), list[int]()  # tensors that may overlap the next one
    for number in sorted(range(len(places)), key=lambda number: tensors[number].data_ptr()):
        reaching = [each for each in reaching if np.may_share_memory(places[each], places[number])]
        for other in reaching:
            if tensors[other].device == tensors[number].device and np.shares_memory(places[other], places[number]):
                first, later = sorted((other, number))
                found[later] = min(first, found.get(later, first))
        reaching.append(number)
    return {names[later]: names[first] for later, first in sorted(found.items())}


def _has_address(tensor: Tensor) -> bool:
    is_lazy = isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))
    return tensor.layout is torch.strided and not tensor.is_meta and not is_lazy and tensor.numel() > 0


def _place(tensor: Tensor) -> Any:
    """Returns an array over the tensor's memory; NumPy compares its addresses, and reads nothing."""
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    interface = {"version": 3, "data": (tensor.data_ptr(), True), "shape": tuple(tensor.shape), "strides": strides}
    return np.asarray(SimpleNamespace(__array_interface__={**interface, "typestr": f"|V{size}"}))
