"""Buffers of a step by shards: each shard begins with the step's, and the step ends with those of all shards.

    floating-point    the step's, plus the mean over all shards of their changes, summed along the tree over the shards.
                      Only buffers that change travel: a constant table costs nothing
    others            counters of batches, say: each forward begins with the step's, and the step ends with those of the
                      first shard that had a forward. So a counter ticks once, for any number of parts of a batch

Buffers are compared by value, because `buffer.data` has its own version. Large ones that did not change in the first
steps are compared by the version that autograd counts. The ranks remember the names of those that change; a flag next
to the sums reports a new one, and then the ranks exchange names once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ddp.collectives.shards import Stack, TreeSlot, most_nodes
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object
from ddp.errors import ConfigError
from ddp.replica.broadcast import BufferSync

COMPARED_BYTES, COMPARED_STEPS = 1 << 20, 3
Sums = dict[str, Tensor]  # by name, [numel] as float64; without the buffers that have not changed


class ShardBuffers:
    """The buffers of one replica.

    Args:
        buffers: finds them.

    Attributes:
        start: the buffers with which the running step, or the last one, began; empty before the first.
        has_counters: some buffers are not floating-point.
    """

    def __init__(self, comm: Communicator, buffers: BufferSync, num_shards: int) -> None:
        self._comm, self._buffers, self._num_shards = comm, buffers, num_shards
        self.start: dict[str, Tensor] = {}
        self.has_counters = False
        self._versions: dict[str, tuple[int, int]] = {}  # the object, and its version
        self._own: dict[str, Tensor] = {}  # the tensors with which the step has begun
        self._num_steps = 0
        self._known: list[str] = []  # the buffers that change; the same on all ranks
        self._rows: Tensor | None = None

    def begin_step(self) -> None:
        """Records the step's buffers."""
        now, before = self._buffers.named(), self.start
        if not now:
            self.start = {}
            return
        constant = {name for name in before if name not in self._known and self._is_unchanged(name, now)}
        self.start = {name: before[name] if name in constant else each.detach().clone() for name, each in now.items()}
        self._versions = {name: version_of(each) for name, each in now.items()}
        self.has_counters = not all(map(_is_averaged, now.values()))
        self._own, self._num_steps = now, self._num_steps + 1
        self._levels, self._counts = Stack(_added), Stack(Tensor.add_)
        self._bases = dict[tuple[str, ...], Tensor]()
        self._first_shard, self._first = self._num_shards, dict[str, Tensor]()

    @torch.no_grad()
    def before_forward(self) -> None:
        """Gives a forward the step's counters."""
        self._set(name for name, start in self.start.items() if not _is_averaged(start))

    @torch.no_grad()
    def end_shard(self, shard: int, place: TreeSlot, *, has_forward: bool) -> None:
        """Takes the buffers of a shard, and sets them to those of the step.

        Args:
            has_forward: the shard has had a forward.
        """
        now = self._buffers.named()
        if not (now or self.start):
            return
        if made := now.keys() - self.start.keys():
            raise ConfigError(f"the buffer {min(made)} was made inside of the block of a shard: make it beforehand")
        if gone := self.start.keys() - now.keys():
            raise ConfigError(f"the buffer {min(gone)} has gone inside of the block of a shard: let it keep its place")
        changed = [name for name in self.start if not self._is_unchanged(name, now)]
        has_forward |= bool(changed)  # one of `model.module`, say
        for name in changed:
            if now[name].shape != self.start[name].shape:
                before, after = list(self.start[name].shape), list(now[name].shape)
                raise ConfigError(
                    f"the buffer {name} was {before} and is {after} after a forward, so that several shards have no "
                    "mean of it; let it keep its shape, or leave same_bits out"
                )
        names = [name for name in changed if _is_averaged(now[name])]
        averaged = dict(zip(names, self._added_to(names, now), strict=True))
        self._levels.push(averaged, place)
        if has_forward and self._first_shard == self._num_shards:
            self._first_shard = shard
            self._first = {name: now[name].detach().clone() for name in changed if name not in averaged}
        unknown = any(name not in self._known for name in changed)
        device = self._comm.device
        self._counts.push(torch.tensor([has_forward, unknown], dtype=torch.float64, device=device), place)
        self._set(changed)

    @torch.no_grad()
    def end_step(self) -> None:
        """Sets the buffers to those of all shards of all ranks, once each shard was ended. Collective."""
        if not self.start:
            return
        num_forwards, num_unknown, sums = self._added_up()
        if num_unknown:
            nodes = self._levels.nodes
            mine = [name for name in self.start if name in self._first or any(name in each for each in nodes)]
            everyone = all_gather_object(self._comm, mine)
            found = set(self._known).union(*everyone)
            self._known = [name for name in self.start if name in found]
            _, _, sums = self._added_up()
        now = self._buffers.named()
        if sums:
            here = [_real(now[name].data) for name in sums]
            means = self._base(sums) + torch.cat(list(sums.values())) / max(1.0, num_forwards)
            parts = means.split([each.numel() for each in here])
            torch._foreach_copy_(here, [part.view(each.shape) for part, each in zip(parts, here, strict=True)])
        if counters := [name for name in self._known if not _is_averaged(self.start[name])]:
            self._take_first(counters)

    def _added_up(self) -> tuple[float, float, Sums]:
        """Returns the numbers of forwards and of changes of unknown buffers, and the sums of known ones. Collective."""
        names = [name for name in self._known if _is_averaged(self.start[name])]
        sizes = [_real(self.start[name]).numel() for name in names]
        rows = self._memory(sum(sizes) + 2)
        rows.zero_()
        for row, sums, counts in zip(rows, self._levels.nodes, self._counts.nodes, strict=False):
            for name, part in zip(names, row[:-2].split(sizes) if sizes else (), strict=True):
                if name in sums:
                    part.copy_(sums[name])
            row[-2:] = counts
        self._comm.all_reduce(rows, num_shards=self._num_shards, label="buffers of all shards")
        [[num_forwards, num_unknown]] = self._comm.to_host(rows[0, -2:]).read()
        return num_forwards, num_unknown, dict(zip(names, rows[0, :-2].split(sizes) if sizes else (), strict=True))

    def _take_first(self, names: list[str]) -> None:
        """Gives every rank the counters of the first shard that has had a forward. Collective."""
        values = [self._first.get(name, self.start[name]).long().flatten() for name in names]
        mine = torch.cat([torch.tensor([self._first_shard], device=values[0].device), *values])
        everyone = self._comm.all_gather(mine[None])
        first = torch.cat(everyone)
        chosen = first[first[:, 0].argmin()][1:]
        now = self._buffers.named()
        for name, value in zip(names, chosen.split(list(map(len, values))), strict=True):
            now[name].data.copy_(value.view(now[name].shape))

    def _is_unchanged(self, name: str, now: dict[str, Tensor]) -> bool:
        if name not in now or self._versions.get(name) != version_of(now[name]):
            return False
        is_trusted = now[name].nbytes > COMPARED_BYTES and self._num_steps > COMPARED_STEPS and name not in self._known
        return is_trusted or torch.equal(now[name], self.start[name])

    def _base(self, names: Iterable[str]) -> Tensor:
        """Returns the origin of sums: the step's buffers, or 0 where they are not finite; as one vector."""
        key = tuple(names)
        if key not in self._bases:
            start = _vector([self.start[name] for name in key])
            self._bases[key] = start.where(start.isfinite(), 0.0)
        return self._bases[key]

    def _added_to(self, names: Sequence[str], now: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Returns a shard's changes of some buffers, each as a vector, computed in one operation for all."""
        if not names:
            return []
        added = _vector([now[name] for name in names]) - self._base(names)
        parts: Sequence[Tensor] = added.split([_real(now[name]).numel() for name in names])
        return parts

    def _set(self, names: Iterable[str]) -> None:
        """Sets buffers to those of the step, in the model's own tensors, because a module's may be a sample."""
        if not (own := {name: self._own[name] for name in names}):
            return
        for name, each in own.items():
            self._buffers.put(name, each)
            self._versions[name] = version_of(each)
        torch._foreach_copy_([each.data for each in own.values()], [self.start[name] for name in own])

    def _memory(self, numel: int) -> Tensor:
        """Returns rows in which the ranks add up their nodes. Collective if their shape is new."""
        shape = most_nodes(self._comm.world_size, self._num_shards), numel
        if self._rows is None or self._rows.shape != shape:
            memory = self._comm.allocate(shape[0] * shape[1], torch.float64)
            weakref.finalize(self, self._comm.free, memory).atexit = False
            self._rows = memory.view(shape)
        return self._rows


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the identity of a tensor, and its version as autograd counts it."""
    return id(tensor), -1 if tensor.is_inference() else tensor._version


def _added(below: Sums, above: Sums) -> Sums:
    if both := [name for name in above if name in below]:
        torch._foreach_add_([below[name] for name in both], [above[name] for name in both])
    return above | below


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _vector(buffers: Iterable[Tensor]) -> Tensor:
    """Returns the numbers of buffers, one after another, as float64."""
    return torch.cat([_real(each).detach().flatten() for each in buffers]).double()
