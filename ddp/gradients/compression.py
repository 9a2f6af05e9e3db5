"""Compression: a replica's use of a hook. It cuts a bucket into parcels, and keeps the hook in step with training.

    begin        commits what the hook remembers of the last step, unless that was rolled back
    reduce       the ranks of a host add up a bucket in memory; then the hook reduces it between hosts
    is_finite    no gradient of this step was NaN or infinite on this rank; a flag, because a hook may hide one
    take_back    rolls the hook back to before the step

Where all ranks share one host's memory, nothing has to travel: buckets are added up there, and the hook does nothing,
unless it changes gradients (momentum).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, SupportsInt

import torch
from torch import Tensor, nn

from ddp.comm.call_queue import Work
from ddp.comm.communicator import Communicator
from ddp.comm.objects import all_gather_object, broadcast_object
from ddp.errors import ConfigError
from ddp.gradients.bucket import Bucket, span
from ddp.gradients.hook import Hook, Memory, Parcel, corrected, wide
from ddp.gradients.reducer import InFlight, Reducer


class Compression(Reducer):
    """A hook at work in one replica.

    Args:
        named: all parameters of the replica, with their names.

    Attributes:
        comm: the ranks that take part, or a stand-in.
        num_steps: committed steps with this hook.
        numels: by name, the number of elements of each parameter.
        sends: what it compresses: "gradients", or "differences" of parameters, which have another magnitude.
        is_owed: a rank holds unsent gradients of a run on other hosts, which must be sent even if nothing else is.

    Raises:
        ConfigError: the hook cannot work as it is, or a parameter is on another device than the communicator.
    """

    may_hide = True

    def __init__(self, hook: Hook, comm: Communicator, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        if not isinstance(hook, Hook):
            raise ConfigError(
                f"hook={hook!r:.60}: give an object of ddp.gradients, such as ddp.gradients.PowerSGD(4); a function of "
                "your own goes to register_comm_hook of ddp.DistributedDataParallel"
            )
        self.comm = comm
        self.numels: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for name, parameter in named:
            if parameter.device != comm.device:
                raise ConfigError(
                    f"{name} is on {parameter.device}: a hook takes gradients on {comm.device} alone; leave it out"
                )
            self.numels[name], self._dtypes[name] = parameter.numel(), parameter.dtype
        self.hook, self.num_steps = corrected(copy.deepcopy(hook)), 0  # its state belongs to this replica
        self.hook.check()
        self.sends = "gradients"
        self._owners = owners(self.numels, comm.host_partition.num_places)
        self._is_pending = self.is_owed = False
        self.is_finite = torch.ones((), dtype=torch.bool, device=comm.device)

    @property
    def name(self) -> str:
        """Returns the name that must agree where a run resumes with the hook's state."""
        return repr(self.hook) if self.sends == "gradients" else f"{self.hook!r} of {self.sends}"

    def change_to(self, sends: str) -> None:
        """Compresses something else from now on. Drops what is not sent yet, because its magnitude differs."""
        if sends != self.sends:
            self.commit()
            self.sends = sends
            for memory in self.hook.memories().values():
                memory.committed.clear()

    def begin(self) -> None:
        """Begins a step, which commits the last one."""
        self.commit()
        for memory in self.hook.memories().values():
            memory.roll_back()  # what was in flight when a step was taken back
        self._is_pending = True
        self.is_finite.fill_(True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None}  # a copy gets another communicator

    def commit(self) -> None:
        """Keeps what the hook remembers of the last step."""
        if self._is_pending:
            self._is_pending = self.is_owed = False
            self.num_steps += 1
            for memory in self.hook.memories().values():
                memory.commit()

    def take_back(self, name: str | None = None) -> None:
        """Rolls the hook back to before the last step, for one parameter or for all.

        A bucket may be in flight: what it writes is not committed.
        """
        if name is None:
            self._is_pending = False
        for memory in self.hook.memories().values():
            memory.roll_back(name)

    def part_of(self, name: str, rank: int | None = None) -> slice:
        """Returns the elements of a parameter that a rank carries; by default, this one."""
        rank, partition = self.comm.rank if rank is None else rank, self.comm.host_partition
        if self.hook.carries_whole:
            return slice(0, self.numels[name] if partition.places[rank] == self._owners[name] else 0)
        return partition.part_of(self.numels[name], rank)

    def reduce(self, bucket: Bucket, *, divide_by: SupportsInt, async_op: bool, label: str) -> InFlight | None:
        """Turns a bucket's gradients into nearly their sum over all ranks, divided. Returns the work if it is in
        flight.

        Args:
            divide_by: divides every rank's gradients, before anything is sent.
        """
        work = self.comm.chain(partial(self._reduce, bucket, divide_by), async_op=async_op, label=label)
        return work if isinstance(work, Work) else None

    def _reduce(self, bucket: Bucket, divide_by: SupportsInt) -> None:
        comm = self.comm
        if comm.host_partition.num_hosts == 1 and not self.hook.momentum and not self.is_owed:
            comm.all_reduce(bucket.flat, divide_by=divide_by)
            return
        comm.sum_in_host(bucket.flat, divide_by=divide_by)
        parcels = list(self._parcels(bucket))
        self.is_finite &= torch.isfinite(torch.stack([parcel.outgoing.sum() for parcel in parcels])).all()
        for parcel in parcels:
            self.hook.enter(parcel)
        if encoded := [parcel for parcel in parcels if not parcel.is_dense]:
            self.hook.reduce(encoded, comm, self.num_steps)
        if dense := [parcel for parcel in parcels if parcel.is_dense]:
            send_dense(dense, comm)
        for parcel in parcels:
            self.hook.leave(parcel)

    def _parcels(self, bucket: Bucket) -> Iterable[Parcel]:
        start, must_travel = 0, self.comm.host_partition.num_hosts > 1
        for slot in bucket.slots:
            numel, shape = slot.parameter.numel(), as_matrix(slot.parameter)
            gradient = bucket.flat[start : start + numel]
            mine = self.part_of(slot.name)
            is_dense = not (must_travel and self.hook.takes(gradient, shape, self.num_steps))
            outgoing = gradient[mine].to(wide(gradient.dtype))
            yield Parcel(slot.name, gradient, shape, mine, outgoing, is_dense)
            start += span(slot.parameter)

    # --- in a checkpoint ---------------------------------------------------------------------------------------------
    #
    #     saved      for each memory ("residual", "velocity", "factor") and each parameter
    #                    [hosts, numel]   what each host has kept, assembled from its ranks' parts
    #                    the factor       if all ranks have the same
    #     resumed    on the same number of hosts each gets its own again; else each gets an equal part of the sum. Only
    #                the sum over hosts counts, so nothing is lost
    #
    # A model's worth of numbers for each host goes to rank 0 alone, one tensor at a time.

    def state_dict(self) -> dict[str, Any]:
        """Returns the hook's state as of the last step, on rank 0; elsewhere its values are undefined. Collective."""
        self.commit()
        memories = self.hook.memories()
        everyone = all_gather_object(self.comm, {kind: list(memory.committed) for kind, memory in memories.items()})
        found: dict[str, dict[str, Tensor]] = {}
        for kind, memory in memories.items():
            names = sorted({name for of_rank in everyone for name in of_rank[kind]})
            tensors = ((name, self._on_rank_zero(memory, name)) for name in names)
            found[kind] = {name: tensor.cpu() for name, tensor in tensors if tensor is not None}
        return {"num_steps": self.num_steps, "memories": found}

    def kept(self) -> dict[str, Any]:
        """Returns this rank's own part of the state, as of the last step. Not collective."""
        memories = self.hook.memories()
        same = {kind: dict(each.committed) for kind, each in memories.items() if each.kind == "same"}
        pieces = {
            kind: {name: (self.part_of(name).start, piece) for name, piece in each.committed.items()}
            for kind, each in memories.items()
            if each.kind != "same"
        }
        return {"num_steps": self.num_steps, "memories": same, "pieces": pieces}

    def take_together(self, pieces: Mapping[str, Mapping[str, tuple[int, Tensor]]]) -> None:
        """Shares out among the hosts what ranks have kept of former ranks' parts. Collective.

        Args:
            pieces: of this rank, from `kept`; what a lost rank had is lost.
        """
        comm, num_hosts = self.comm, self.comm.host_partition.num_hosts
        everyone = all_gather_object(comm, {kind: list(of_kind) for kind, of_kind in pieces.items()})
        for kind, memory in self.hook.memories().items():
            for name in sorted({name for of_rank in everyone for name in of_rank.get(kind, ())} & self.numels.keys()):
                whole = torch.zeros(self.numels[name], dtype=wide(self._dtypes[name]), device=comm.device)
                start, piece = pieces.get(kind, {}).get(name, (0, whole[:0]))
                whole[start : start + len(piece)] = piece
                comm.all_reduce(whole, label=f"what {name} owes")
                if len(mine := whole[self.part_of(name)] / num_hosts):
                    memory.committed[name] = mine
                self.is_owed = True

    def _on_rank_zero(self, memory: Memory, name: str) -> Tensor | None:
        """Returns the tensors of all hosts for a parameter, [hosts, numel], on rank 0."""
        comm, mine = self.comm, memory.committed.get(name)
        if memory.kind == "same":
            return mine if comm.rank == 0 else None
        if mine is None:
            part = self.part_of(name)
            mine = torch.zeros(part.stop - part.start, dtype=wide(self._dtypes[name]), device=comm.device)
        pieces = comm.gather(mine, 0)
        if comm.rank != 0:
            return None
        whole = mine.new_zeros(comm.host_partition.num_hosts, self.numels[name])
        for rank, piece in enumerate(pieces):
            whole[comm.host_partition.hosts[rank], self.part_of(name, rank)] = piece
        return whole

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resumes the hook from a state that rank 0 has. Collective.

        Args:
            state: returned by `state_dict` on rank 0; ignored elsewhere.
        """
        comm, mine = self.comm, state if self.comm.rank == 0 else None
        memories = {} if mine is None else mine["memories"]
        about = mine and (mine["num_steps"], {kind: sorted(tensors) for kind, tensors in memories.items()})
        self.num_steps, names = broadcast_object(comm, about)
        for kind, memory in self.hook.memories().items():
            for name in names.get(kind, ()):
                if name not in self.numels:
                    continue
                tensor = memories[kind][name] if memories else None
                if memory.kind == "same":
                    memory.committed[name] = broadcast_object(comm, tensor).to(comm.device)
                    continue
                piece = comm.scatter(None if tensor is None else self._pieces(tensor, name), 0)
                if len(piece):
                    memory.committed[name] = piece
                self.is_owed = True

    def _pieces(self, stored: Tensor, name: str) -> Sequence[Tensor]:
        """Returns every rank's part of what all hosts have kept, [hosts, numel]."""
        hosts, num_hosts = self.comm.host_partition.hosts, self.comm.host_partition.num_hosts
        if len(stored) != num_hosts:
            stored = (stored.sum(0, keepdim=True) / num_hosts).expand(num_hosts, -1)
        return [
            stored[hosts[rank], self.part_of(name, rank)].to(self.comm.device) for rank in range(self.comm.world_size)
        ]


def send_dense(parcels: Sequence[Parcel], comm: Communicator) -> None:
    """Adds up the parcels uncompressed."""
    numels = [parcel.gradient.numel() for parcel in parcels]
    flat = parcels[0].gradient.new_zeros(sum(numels))
    sums = list(flat.split(numels))
    mine = [total[parcel.mine] for parcel, total in zip(parcels, sums, strict=True)]
    torch._foreach_copy_(mine, [parcel.outgoing for parcel in parcels])
    comm.all_reduce(flat)
    torch._foreach_copy_([parcel.gradient for parcel in parcels], sums)


def as_matrix(parameter: Tensor) -> tuple[int, int]:
    """Returns rows and columns of a parameter as it lies in memory; one row if it has one dimension."""
    if parameter.dim() < 2 or not parameter.numel():
        return 1, parameter.numel()
    outermost = 0 if parameter.is_contiguous() else max(range(parameter.dim()), key=parameter.stride)
    rows = parameter.shape[outermost]
    return rows, parameter.numel() // rows


def owners(numels: dict[str, int], num_places: int) -> dict[str, int]:
    """Returns the place on a host that carries each whole tensor, so that loads are about equal."""
    loads = [0] * num_places
    found = {}
    for name in sorted(numels, key=lambda name: (-numels[name], name)):
        found[name] = loads.index(min(loads))
        loads[found[name]] += numels[name]
    return found
