"""Collectives in the memory of one host: no socket, one owner per element, one order of additions.

Three ways of an all-reduce (n ranks, N bytes):

    mailbox     N ≤ SMALL_BYTES. Everyone copies its tensor to its inbox; barrier; everyone adds up all inboxes.
                1 barrier; N copied, nN read.
    zero-copy   tensors from `allocate`, in the same place on all ranks. Barrier; rank r adds up slice r of all tensors
                in that very memory, in blocks that fit the cache, and writes it to slice r of all; barrier.
                2 barriers; N read, N written.
    staged      any other tensor, in pieces that fit the cache. Everyone copies all but its own slice of the piece to
                its inbox; barrier; rank r adds the others' slices r to its own, into the row; barrier; everyone copies
                the row out. Piece k+1 goes in before the barrier that piece k comes out after.
                pieces + 1 barriers; 2N copied, N read.

All three add every element in the order of the canonical binary tree over the ranks, nearest neighbours first:
3 → ((0,1),2), 4 → ((0,1),(2,3)), 5 → (((0,1),(2,3)),4). So the bits depend neither on the way nor on where slices
begin. The mean divides once, after adding.

    reduce-scatter   the first half of an all-reduce, with slices given by the caller
    all-gather       through the row, or straight out of the others' allocated tensors
    broadcast        through the row, or straight out of the root's allocated tensor

Which thread reduces: the one that calls. While another thread is busy in Python, each return from a copy, an addition
or a wait may take the interpreter's switch interval (5 ms): note "busy interpreter".

Source of the idea: Graham and Shipman, "MPI support for multi-core architectures: optimized shared memory collectives"
(EuroPVM/MPI 2008). Read before: `host_memory.py`. Read next: `carrier.py`.
"""

from __future__ import annotations

import functools
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ddp.comm.host_memory import DTYPE_CODES, OP_CODES, PIECE_BYTES, HostMemory, Operation, Record, Region
from ddp.comm.host_memory import NoSharedMemory as NoSharedMemory
from ddp.errors import CollectiveMismatch, ConfigError
from ddp.transport.edge import TransportError
from ddp.transport.shared_memory import (
    KINDS,
    LINE_BYTES,
    Barrier,
    Kind,
    Offer,
    SharedMemory,
    copy_bytes,
    why_unsupported,
)
from ddp.transport.topology import Gather, Hosts, discover

SMALL_BYTES = 32 << 10
BLOCK_BYTES = 1 << 20  # of all ranks' tensors together: half of a usual second-level cache
MAX_PLANS = 512

Method = TypeVar("Method", bound=Callable[..., Any])


# --- additions and their order ---------------------------------------------------------------------------------------


class _Combine(NamedTuple):
    """Adding, or what stands for it: into the first operand, or to a third place."""

    into: Callable[[Tensor, Tensor], Tensor]
    to: Callable[..., Tensor]


_COMBINE = {
    "sum": _Combine(Tensor.add_, torch.add),
    "product": _Combine(Tensor.mul_, torch.mul),
    "min": _Combine(lambda here, other: torch.minimum(here, other, out=here), torch.minimum),
    "max": _Combine(lambda here, other: torch.maximum(here, other, out=here), torch.maximum),
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}  # sums have the same bits


def tree_steps(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The canonical binary tree over start … stop−1, as additions (into, other) in order; the sum ends at `start`."""
    if stop - start > 1:
        middle = start + (1 << ((stop - start - 1).bit_length() - 1))
        yield from tree_steps(start, middle)
        yield from tree_steps(middle, stop)
        yield start, middle


class _Arithmetic:
    """How this group adds up: operation, order, and the division at the end."""

    def __init__(self, op: str, divide_by: int, size: int) -> None:
        self._combine, self._divide_by = _COMBINE[op], divide_by
        self._steps = tuple(tree_steps(0, size))

    def in_place(self, leaves: Sequence[Tensor], out: Tensor) -> None:
        """Adds up the leaves, using them up, to `out`, which may be one of them."""
        into, to = self._combine
        for here, other in self._steps[:-1]:
            into(leaves[here], leaves[other])
        here, other = self._steps[-1]
        if leaves[here] is out:
            into(out, leaves[other])
        else:
            to(leaves[here], leaves[other], out=out)
        if self._divide_by != 1:
            out.div_(self._divide_by)

    def beside(self, leaves: Sequence[Tensor], out: Tensor) -> None:
        """Adds up the leaves to `out`, which is none of them, and leaves them as they are."""
        into, to = self._combine
        sums: dict[int, Tensor] = {}
        for here, other in self._steps:
            term = sums.pop(other, leaves[other])
            if here in sums:
                into(sums[here], term)
            elif here == 0:
                sums[0] = to(leaves[0], term, out=out)
            else:
                sums[here] = to(leaves[here], term)
        if self._divide_by != 1:
            out.div_(self._divide_by)


def _computable(flat: Tensor, op: str, divide_by: int) -> Tensor:
    """The tensor as something that torch computes with."""
    if op not in _COMBINE:
        raise ConfigError(f"op={op!r} is unknown; choose one of {', '.join(_COMBINE)}")
    if divide_by != 1 and not (flat.is_floating_point() or flat.is_complex()):
        raise ConfigError(f"a mean of {flat.dtype} is not a {flat.dtype}; convert to floating point, or sum and divide")
    if op in ("min", "max") and (flat.is_complex() or flat.dtype in _SIGNED):
        raise ConfigError(f"torch has no {op} of {flat.dtype}; convert to another type")
    return flat.view(_SIGNED[flat.dtype]) if flat.dtype in _SIGNED else flat


# --- plans: what can be prepared once for many calls -------------------------------------------------------------------


class _Mailbox(NamedTuple):
    """A small all-reduce."""

    record: bytes
    arithmetic: _Arithmetic
    boxes: list[list[Tensor]]  # [half][index] of [numel]
    addresses: list[int]  # [half], where this rank's box is


class _Planes(NamedTuple):
    """An all-reduce in allocated memory: this rank's slice of all tensors, whole and in blocks."""

    record: bytes
    arithmetic: _Arithmetic
    slices: Tensor  # [size, numel of the slice]
    blocks: list[tuple[Tensor, ...]]  # by block, by rank
    others: list[Tensor]  # by block: [size − 1, numel of the block], ranks 1 … size−1
    block_numel: int


class _Piece(NamedTuple):
    """One piece of a staged all-reduce: where its slices are cut, in bytes, and what of the shared memory it uses."""

    cuts: list[int]
    own_box: list[int]  # [half], address
    leaves: list[list[Tensor]]  # [half][index]: this rank's slice in the others' boxes
    row: list[Tensor]  # [half]: this rank's slice of the row
    row_address: list[int]  # [half]


def _all_or_nothing(method: Method) -> Method:
    """What breaks off a collective half-way leaves the barrier out of step: then the group is out of use, for all."""

    @functools.wraps(method)
    def collective(self: HostGroup, *args: Any, **kwargs: Any) -> Any:
        if self._out_of_use:
            raise TransportError(self.ranks[self.index], f"this host's group is out of use: {self._out_of_use}")
        try:
            return method(self, *args, **kwargs)
        except (CollectiveMismatch, ConfigError, NoSharedMemory):  # raised on all ranks alike, between two barriers
            raise
        except BaseException as error:
            self._out_of_use = str(error) or type(error).__name__
            self._memory.barrier.give_up()
            raise

    return collective  # type: ignore[return-value]


class HostGroup:
    """This rank's end of the collectives of its host. Made by `meet`; used by one thread at a time.

    Every collective names the call by `sequence`, the same on all ranks, and waits at most `timeout_s` seconds for the
    others. Tensors are flat, contiguous, on the CPU, and of one length and dtype on all ranks. All may raise:

        CollectiveMismatch   ranks called different things; nothing was done, the group can go on
        TransportError       a rank did not come, or is gone; the group is out of use

    Attributes:
        ranks: the communicator's ranks on this host, ascending.
        index, size: this rank's place among them, and how many they are.
        kind: which memory they share.
    """

    def __init__(self, memory: HostMemory, kind: Kind) -> None:
        self.ranks, self.index, self.size, self.kind = memory.ranks, memory.index, memory.size, kind
        self._memory, self._out_of_use = memory, ""
        self._others = [other for other in range(self.size) if other != self.index]
        self._mailboxes: dict[tuple[int, torch.dtype, str, int], _Mailbox] = {}
        self._plans: dict[tuple[int, int, torch.dtype, str, int], _Planes] = {}
        self._pieces: dict[tuple[int, torch.dtype], _Piece] = {}

    # --- collectives -------------------------------------------------------------------------------------------------

    @_all_or_nothing
    def barrier(self, *, sequence: int, timeout_s: float) -> None:
        """Returns once every rank of the host has called it."""
        self._memory.enter(_BARRIER, sequence, time.monotonic() + timeout_s)

    @_all_or_nothing
    def all_reduce(self, flat: Tensor, op: str, *, divide_by: int = 1, sequence: int, timeout_s: float) -> None:
        """Combines `flat` over the ranks of the host, in place.

        Args:
            flat: [numel].
            op: "sum", "product", "min" or "max".
            divide_by: what the result is divided by, for a mean; floating point and complex only.
        """
        deadline_s = time.monotonic() + timeout_s
        flat = _computable(flat, op, divide_by)
        if flat.nbytes <= SMALL_BYTES:
            self._through_mailboxes(flat, op, divide_by, sequence, deadline_s)
            return
        planes = self._planes(flat, op, divide_by)
        if planes is None:
            record = self._record(Operation.ALL_REDUCE, flat, op=op, divide_by=divide_by)
            self._staged(flat, op, divide_by, record, sequence, deadline_s)
        elif self._memory.enter(planes.record, sequence, deadline_s):
            self._add_up(planes)
            self._memory.barrier.meet(deadline_s)
        else:
            self._memory.next_half()  # as those have done that did not know they would have to begin again
            self._staged(flat, op, divide_by, None, sequence, deadline_s)

    @_all_or_nothing
    def reduce_scatter(
        self, flat: Tensor, bounds: Sequence[int], op: str, *, divide_by: int = 1, sequence: int, timeout_s: float
    ) -> None:
        """Afterwards member i's flat[bounds[i]:bounds[i + 1]] is combined over the host; the rest of it is undefined.

        Args:
            flat: [numel].
            bounds: size + 1 ascending positions; slices may be empty.
            op, divide_by: as in `all_reduce`.
        """
        deadline_s = time.monotonic() + timeout_s
        flat = _computable(flat, op, divide_by)
        record, place = self._record_of_slices(Operation.REDUCE_SCATTER, flat, bounds, op=op, divide_by=divide_by)
        arithmetic = _Arithmetic(op, divide_by, self.size)
        start, stop = bounds[self.index], bounds[self.index + 1]
        agreed = self._memory.enter(record, sequence, deadline_s)
        if agreed and place is not None:
            item, offset = flat.element_size(), flat.data_ptr() - place.addresses[self.index]
            slices = place.planes(flat.dtype, offset + start * item, offset + stop * item)
            for leaves in _blocks(slices, self._block_numel(flat.dtype)):
                arithmetic.in_place(leaves, leaves[self.index])
            self._memory.barrier.meet(deadline_s)
            return
        memory, step = self._memory, _piece_numel(flat.dtype) // self.size
        for runs in _runs(bounds, step):
            half = memory.next_half()
            boxes = [box.view(flat.dtype) for box in memory.inboxes[half]]
            for other in self._others:
                first, last = runs[other]
                boxes[self.index][other * step :][: last - first].copy_(flat[first:last])
            memory.barrier.meet(deadline_s)
            first, last = runs[self.index]
            terms = [box[self.index * step :][: last - first] for box in boxes]
            terms[self.index] = mine = flat[first:last]
            arithmetic.in_place(terms, mine)

    @_all_or_nothing
    def all_gather(self, flat: Tensor, bounds: Sequence[int], *, sequence: int, timeout_s: float) -> None:
        """Gives everyone member i's flat[bounds[i]:bounds[i + 1]], in place.

        Args:
            flat: [numel].
            bounds: size + 1 ascending positions; slices may be empty.
        """
        deadline_s = time.monotonic() + timeout_s
        record, place = self._record_of_slices(Operation.ALL_GATHER, flat, bounds)
        agreed = self._memory.enter(record, sequence, deadline_s)
        item, here = flat.element_size(), flat.data_ptr()
        cuts = [bound * item for bound in bounds]
        if agreed and place is not None:
            for other in self._others:
                there = here - place.addresses[self.index] + place.addresses[other]
                copy_bytes(here + cuts[other], there + cuts[other], cuts[other + 1] - cuts[other])
            self._memory.barrier.meet(deadline_s)
            return
        memory, step = self._memory, PIECE_BYTES // self.size
        for runs in _runs(cuts, step):
            row = memory.rows[memory.next_half()].data_ptr()
            start, stop = runs[self.index]
            copy_bytes(row + self.index * step, here + start, stop - start)
            memory.barrier.meet(deadline_s)
            for other in self._others:
                start, stop = runs[other]
                copy_bytes(here + start, row + other * step, stop - start)

    @_all_or_nothing
    def broadcast(self, flat: Tensor, root_index: int, *, sequence: int, timeout_s: float) -> None:
        """Gives everyone the values of member `root_index`, in place.

        Args:
            flat: [numel].
        """
        deadline_s = time.monotonic() + timeout_s
        record, place = self._record_of_slices(Operation.BROADCAST, flat, (), detail=root_index)
        agreed = self._memory.enter(record, sequence, deadline_s)
        here = flat.data_ptr()
        if agreed and place is not None:
            if self.index != root_index:
                copy_bytes(here, here - place.addresses[self.index] + place.addresses[root_index], flat.nbytes)
            self._memory.barrier.meet(deadline_s)
            return
        memory = self._memory
        for start in range(0, flat.nbytes, PIECE_BYTES):
            num_bytes = min(PIECE_BYTES, flat.nbytes - start)
            row = memory.rows[memory.next_half()].data_ptr()
            if self.index == root_index:
                copy_bytes(row, here + start, num_bytes)
            memory.barrier.meet(deadline_s)
            if self.index != root_index:
                copy_bytes(here + start, row, num_bytes)

    # --- memory and the end ------------------------------------------------------------------------------------------

    @_all_or_nothing
    def allocate(self, numel: int, dtype: torch.dtype, *, timeout_s: float) -> Tensor:
        """[numel] zeros that the collectives reach without a copy. Collective: every rank of the host calls it.

        The memory stays until every rank has called `free`, or `close`, and let go of its tensor.

        Raises:
            NoSharedMemory: there is not so much; on all ranks alike.
        """
        return self._memory.allocate(numel, dtype, time.monotonic() + timeout_s)

    def free(self, tensor: Tensor) -> None:
        """Gives back what `allocate` gave; waits for nobody. The tensor stays usable, as ordinary memory."""
        self._memory.free(tensor)
        self._plans.clear()

    def close(self) -> None:
        """Ends this rank's part. Tensors from `allocate` stay usable, as ordinary memory."""
        self._out_of_use = self._out_of_use or "closed"
        self._plans.clear()
        self._mailboxes.clear()
        self._pieces.clear()
        self._memory.close()

    # --- the three ways of an all-reduce -----------------------------------------------------------------------------

    def _through_mailboxes(self, flat: Tensor, op: str, divide_by: int, sequence: int, deadline_s: float) -> None:
        numel = flat.numel()
        key = (numel, flat.dtype, op, divide_by)
        plan = self._mailboxes.get(key) or _remember(self._mailboxes, key, self._plan_mailbox(flat, op, divide_by))
        half = self._memory.next_half()
        copy_bytes(plan.addresses[half], flat.data_ptr(), flat.nbytes)
        self._memory.enter(plan.record, sequence, deadline_s)
        if numel:
            plan.arithmetic.beside(plan.boxes[half], flat)

    def _plan_mailbox(self, flat: Tensor, op: str, divide_by: int) -> _Mailbox:
        record = Record(
            Operation.ALL_REDUCE, OP_CODES[op], DTYPE_CODES[flat.dtype], divide_by, flat.numel()
        )  # no place: the mailbox serves tensors of all kinds
        inboxes = self._memory.inboxes
        boxes = [[box[: flat.nbytes].view(flat.dtype) for box in half] for half in inboxes]
        addresses = [half[self.index].data_ptr() for half in inboxes]
        return _Mailbox(record.packed(), _Arithmetic(op, divide_by, self.size), boxes, addresses)

    def _planes(self, flat: Tensor, op: str, divide_by: int) -> _Planes | None:
        address = flat.data_ptr()
        key = (address, flat.numel(), flat.dtype, op, divide_by)
        if (known := self._plans.get(key)) is not None:
            return known
        region = self._memory.find(address, flat.nbytes)
        if region is None:
            return None
        offset, item = address - region.addresses[self.index], flat.element_size()
        cuts = _cuts(flat.numel(), self.size, item)
        start, stop = cuts[self.index], cuts[self.index + 1]
        slices = region.planes(flat.dtype, offset + start * item, offset + stop * item)
        block_numel = self._block_numel(flat.dtype)
        plan = _Planes(
            self._record(Operation.ALL_REDUCE, flat, op=op, divide_by=divide_by),
            _Arithmetic(op, divide_by, self.size),
            slices,
            list(_blocks(slices, block_numel)),
            list(slices[1:].split(block_numel, dim=1)) if stop > start else [],
            block_numel,
        )
        return _remember(self._plans, key, plan)

    def _add_up(self, plan: _Planes) -> None:
        """Note "busy interpreter". Adding up a block takes some 0.1 ms; but while another thread computes in Python, each
        operation then waits for the interpreter lock, up to 5 ms. So once a block has taken that long, all that is left
        becomes one block: slower by cache misses, faster by hundreds of waits."""
        patience_s = sys.getswitchinterval() / 2
        before_s = time.perf_counter()
        for number, (leaves, others) in enumerate(zip(plan.blocks, plan.others, strict=True), start=1):
            plan.arithmetic.in_place(leaves, leaves[0])
            others.copy_(leaves[0])
            now_s = time.perf_counter()
            if now_s - before_s > patience_s and number < len(plan.blocks):
                rest = plan.slices[:, number * plan.block_numel :]
                leaves = rest.unbind()
                plan.arithmetic.in_place(leaves, leaves[0])
                rest[1:].copy_(leaves[0])
                return
            before_s = now_s

    def _staged(
        self, flat: Tensor, op: str, divide_by: int, record: bytes | None, sequence: int, deadline_s: float
    ) -> None:
        """Args:
        record: what to enter with; None if that has been done.
        """
        arithmetic, barrier = _Arithmetic(op, divide_by, self.size), self._memory.barrier
        pieces = flat.split(_piece_numel(flat.dtype))
        half = self._stage(pieces[0])
        if record is None:
            barrier.meet(deadline_s)
        elif not self._memory.enter(record, sequence, deadline_s):
            self._staged(flat, op, divide_by, None, sequence, deadline_s)
            return
        for number, piece in enumerate(pieces):
            plan = self._piece(piece)
            item = piece.element_size()
            start, stop = plan.cuts[self.index] // item, plan.cuts[self.index + 1] // item
            if stop > start:
                leaves = list(plan.leaves[half])
                leaves[self.index] = piece[start:stop]
                arithmetic.in_place(leaves, plan.row[half])
            this_half = half
            if number + 1 < len(pieces):
                half = self._stage(pieces[number + 1])
            barrier.meet(deadline_s)
            copy_bytes(piece.data_ptr(), plan.row_address[this_half], piece.nbytes)

    def _stage(self, piece: Tensor) -> int:
        """Copies all but the own slice to this rank's inbox; the half that it is in."""
        plan, half = self._piece(piece), self._memory.next_half()
        start, stop = plan.cuts[self.index], plan.cuts[self.index + 1]
        source, box = piece.data_ptr(), plan.own_box[half]
        copy_bytes(box, source, start)
        copy_bytes(box + stop, source + stop, piece.nbytes - stop)
        return half

    def _piece(self, piece: Tensor) -> _Piece:
        key = (piece.numel(), piece.dtype)
        if (known := self._pieces.get(key)) is not None:
            return known
        cuts = [cut * piece.element_size() for cut in _cuts(piece.numel(), self.size, piece.element_size())]
        mine, dtype, memory = slice(cuts[self.index], cuts[self.index + 1]), piece.dtype, self._memory
        plan = _Piece(
            cuts,
            [half[self.index].data_ptr() for half in memory.inboxes],
            [[box[mine].view(dtype) for box in half] for half in memory.inboxes],
            [row[mine].view(dtype) for row in memory.rows],
            [row.data_ptr() for row in memory.rows],
        )
        return _remember(self._pieces, key, plan)

    # --- records -----------------------------------------------------------------------------------------------------

    def _record(
        self, operation: Operation, flat: Tensor, *, op: str = "", divide_by: int = 1, detail: int = 0
    ) -> bytes:
        address = flat.data_ptr()
        region = self._memory.find(address, flat.nbytes)
        number, offset = (region.number, address - region.addresses[self.index]) if region is not None else (0, 0)
        codes = OP_CODES.get(op, 0), DTYPE_CODES[flat.dtype]
        return Record(operation, *codes, divide_by, flat.numel(), detail, number, offset).packed()

    def _record_of_slices(
        self,
        operation: Operation,
        flat: Tensor,
        bounds: Sequence[int],
        *,
        op: str = "",
        divide_by: int = 1,
        detail: int = 0,
    ) -> tuple[bytes, Region | None]:
        detail = detail or (zlib.crc32(repr(tuple(bounds)).encode()) if bounds else 0)
        record = self._record(operation, flat, op=op, divide_by=divide_by, detail=detail)
        return record, self._memory.find(flat.data_ptr(), flat.nbytes)

    def _block_numel(self, dtype: torch.dtype) -> int:
        return BLOCK_BYTES // self.size // dtype.itemsize


Key = TypeVar("Key")
Plan = TypeVar("Plan")


def _remember(plans: dict[Key, Plan], key: Key, plan: Plan) -> Plan:
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


_BARRIER = Record(Operation.BARRIER).packed()


def _blocks(slices: Tensor, block_numel: int) -> Iterator[tuple[Tensor, ...]]:
    """[size, numel] cut into blocks; of each, every rank's part."""
    if slices.shape[1]:
        for block in slices.split(block_numel, dim=1):
            yield block.unbind()


def _cuts(numel: int, size: int, itemsize: int) -> list[int]:
    """Where the slices of an all-reduce begin: on cache lines, and of one length but for the last ones."""
    unit = max(1, LINE_BYTES // itemsize)
    step = -(-numel // (size * unit)) * unit
    return [min(index * step, numel) for index in range(size + 1)]


def _piece_numel(dtype: torch.dtype) -> int:
    return PIECE_BYTES // dtype.itemsize


def _runs(bounds: Sequence[int], step: int) -> Iterator[list[tuple[int, int]]]:
    """Piece by piece, what it has of each member's slice: (start, stop)."""
    slices = list(pairwise(bounds))
    for done in range(0, max(stop - start for start, stop in slices), step):
        yield [(min(start + done, stop), min(start + done + step, stop)) for start, stop in slices]


# --- how a group begins ----------------------------------------------------------------------------------------------


def meet(
    rank: int, gather: Gather, *, timeout_s: float, kinds: Sequence[Kind] = KINDS
) -> tuple[Hosts, HostGroup | None, str]:
    """Finds out which ranks share a host and joins those that share this one. Collective over all ranks of `gather`.

    Args:
        gather: all-gather of bytes; keeps a deadline of its own.
        timeout_s: longest wait for a rank of this host.
        kinds: which memory to try, in order of preference; the same on every rank.

    Returns:
        The ranks of each host; this host's group, None where this rank is alone or the ranks cannot share memory; and
        why they cannot.

    Raises:
        TransportError: a rank of this host did not come.
    """
    layout = discover(rank, gather, kinds=kinds)
    ranks, kind = layout.host_of(rank)
    memory, problem = None, why_unsupported()
    num_bytes = HostMemory.num_bytes(len(ranks))
    if kind is not None and rank == ranks[0] and not problem:
        memory, problem = _first(kind, num_bytes, len(ranks))
    offers = gather((memory.offer.path if memory is not None else "").encode())
    if kind is not None and rank != ranks[0] and not problem and (path := offers[ranks[0]].decode()):
        try:
            memory = SharedMemory.attach(Offer(path, num_bytes))
        except OSError as error:
            problem = str(error)
    told = [text.decode().partition("\n") for text in gather(f"{socket.gethostname()}\n{problem}".encode())]
    problems = [each for _, _, each in told]
    if memory is not None:
        memory.forget()
    if kind is None:
        return layout.hosts, None, "; ".join(sorted(set(layout.reasons.values())))
    if memory is None or any(problems[other] for other in ranks):
        return layout.hosts, None, "; ".join(f"rank {r}: {problems[r]}" for r in ranks if problems[r])
    index = ranks.index(rank)
    barrier = Barrier(memory, 0, index=index, ranks=ranks, pids=[layout.pids[other] for other in ranks])
    names = [told[other][0] for other in ranks]
    shared = HostMemory(memory, barrier, kind=kind, ranks=ranks, index=index, hosts=names)
    group = HostGroup(shared, kind)
    barrier.meet(time.monotonic() + timeout_s)
    return layout.hosts, group, ""


def _first(kind: Kind, num_bytes: int, size: int) -> tuple[SharedMemory | None, str]:
    """The memory, made by the first rank of a host."""
    try:
        memory = SharedMemory.create(kind, num_bytes, name=f"ddp-{secrets.token_hex(8)}")
        Barrier.create(memory, 0, size=size)
    except OSError as error:
        return None, str(error)
    return memory, ""
