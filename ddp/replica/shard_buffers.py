"""Buffers of a step by shards: each shard begins with those of the step, and the step ends with those of all shards.

    floating-point       the mean over all shards that have had a forward, added up as the tree over the shards
    others               as counters of batches: each forward begins with the step's; the largest of all shards. So a
                         counter ticks once a step, in however many parts the batch is computed
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from ddp.collectives.shards import most_nodes
from ddp.comm.communicator import Communicator
from ddp.errors import ConfigError
from ddp.replica.broadcast import BufferSync
from ddp.replica.shard_tree import Place, Stack


class ShardBuffers:
    """The buffers of one replica.

    Args:
        named: finds them.

    Attributes:
        start: those with which the running step has begun, or the last one; empty before the first.
    """

    def __init__(self, comm: Communicator, named: BufferSync, num_shards: int) -> None:
        self._comm, self._named, self._num_shards = comm, named, num_shards
        self.start: dict[str, Tensor] = {}
        self._sums, self._largest = Stack(), dict[str, Tensor]()
        self._rows: Tensor | None = None

    def begin_step(self) -> None:
        """Takes note of the step's buffers."""
        self.start = {name: buffer.detach().clone() for name, buffer in self._named.named().items()}
        self._sums, self._largest = Stack(), {}

    @torch.no_grad()
    def before_forward(self) -> None:
        """Gives a forward the step's counters."""
        self._note_largest()
        self._set(name for name, start in self.start.items() if not _is_averaged(start))

    @torch.no_grad()
    def end_shard(self, place: Place, *, has_forward: bool) -> None:
        """Takes the buffers of a shard, and sets them to those of the step.

        Args:
            has_forward: the shard has had one.
        """
        if not self.start:
            return
        now, device = self._named.named(), self._comm.device
        vectors = [_vector(self._same_shape(name, now[name])) for name in self._averaged()]
        vector = torch.cat([*vectors, torch.ones(1, dtype=torch.float64, device=device)])
        self._sums.push(vector if has_forward else vector.zero_(), place)
        self._note_largest()
        self._set(self.start)

    @torch.no_grad()
    def end_step(self) -> None:
        """Makes buffers those of all shards of all ranks, once each shard was ended. Collective."""
        if not self.start:
            return
        rows = self._rows_like(self._sums.nodes[0])
        for row, node in zip(rows, self._sums.nodes, strict=False):
            row.copy_(node)
        self._comm.all_reduce(rows, num_shards=self._num_shards, label="buffers of all shards")
        *sums, count = rows[0].split([*(_vector(self.start[name]).numel() for name in self._averaged()), 1])
        now = self._named.named()
        for name, total in zip(self._averaged(), sums, strict=True):
            mean = torch.where(count > 0, total / count, _vector(self.start[name]))  # no shard has had a forward
            real = torch.view_as_real(now[name].data) if now[name].is_complex() else now[name].data
            real.copy_(mean.view(real.shape))
        if counters := [name for name in self.start if name not in set(self._averaged())]:
            largest = [self._largest.get(name, self.start[name]).long().flatten() for name in counters]
            flat = self._comm.all_reduce(torch.cat(largest), "max", label="counters of all shards")
            for name, values in zip(counters, flat.split(list(map(len, largest))), strict=True):
                now[name].data.copy_(values.view(now[name].shape))

    def _averaged(self) -> list[str]:
        return [name for name, start in self.start.items() if _is_averaged(start)]

    def _note_largest(self) -> None:
        now = self._named.named()
        for name, start in self.start.items():
            if not _is_averaged(start):
                values = self._same_shape(name, now[name])
                self._largest[name] = torch.maximum(self._largest.get(name, start), values)

    def _set(self, names: Iterable[str]) -> None:
        """Sets buffers to those of the step."""
        now = self._named.named()
        for name in names:
            now[name].data.copy_(self.start[name])

    def _same_shape(self, name: str, buffer: Tensor) -> Tensor:
        if buffer.shape != self.start[name].shape:
            before, after = list(self.start[name].shape), list(buffer.shape)
            raise ConfigError(
                f"the buffer {name} was {before} and is {after} after a forward, so that several shards have no mean "
                "of it; let it keep its shape, or leave same_bits out"
            )
        return buffer

    def _rows_like(self, vector: Tensor) -> Tensor:
        """Returns memory in which the ranks add up their nodes. Collective at first."""
        shape = most_nodes(self._comm.world_size, self._num_shards), len(vector)
        if self._rows is None or self._rows.shape != shape:
            memory = self._comm.allocate(shape[0] * shape[1], torch.float64)
            weakref.finalize(self, self._comm.free, memory).atexit = False
            self._rows = memory.view(shape)
        return self._rows


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _vector(buffer: Tensor) -> Tensor:
    """Returns the numbers of a buffer, [numel], as float64."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return real.detach().flatten().double()
