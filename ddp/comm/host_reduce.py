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

Which thread reduces: the one that calls. Copies, additions and sleeps release the interpreter lock, and while another
thread computes in Python it takes up to the switch interval (5 ms) to get it back. Measured with 2 ranks on two cores,
25 MB on a background thread: 4 ms while the main thread sleeps, 36 ms while it computes in pure Python; for ordinary
tensors 14 and 300 ms. Fewer and larger blocks changed nothing in that.

Source of the idea: Graham and Shipman, "MPI support for multi-core architectures: optimized shared memory collectives"
(EuroPVM/MPI 2008). Read before: `host_memory.py`. Read next: `carrier.py`.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ddp.comm.arithmetic import COMBINE, SIGNED
from ddp.comm.host_memory import DTYPE_CODES, OP_CODES, HostMemory, Operation, Record, Region
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

SMALL_BYTES = 64 << 10
SMALL_ALLOCATED_BYTES = 8 << 10  # up to here allocated memory is copied, too: one barrier is cheaper than two
BLOCK_BYTES = 512 << 10  # of all ranks' tensors together: a quarter of a usual second-level cache
MAX_PLANS = 512

Method = TypeVar("Method", bound=Callable[..., Any])


# --- additions and their order ---------------------------------------------------------------------------------------


def tree_steps(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The canonical binary tree over start … stop−1, as additions (into, other) in order; the sum ends at `start`."""
    if stop - start > 1:
        middle = start + (1 << ((stop - start - 1).bit_length() - 1))
        yield from tree_steps(start, middle)
        yield from tree_steps(middle, stop)
        yield start, middle


class _Arithmetic:
    """How this group adds up: operation, order, and the division at the end."""

    def __init__(self, op: str, size: int) -> None:
        self._combine = COMBINE[op]
        self._steps = tuple(tree_steps(0, size))

    def in_place(self, leaves: Sequence[Tensor], out: Tensor, divide_by: int) -> None:
        """Adds up the leaves, using them up, to `out`, which may be one of them."""
        into, to = self._combine
        for here, other in self._steps[:-1]:
            into(leaves[here], leaves[other])
        here, other = self._steps[-1]
        if leaves[here] is out:
            into(out, leaves[other])
        else:
            to(leaves[here], leaves[other], out=out)
        _divide(out, divide_by)

    def beside(self, leaves: Sequence[Tensor], out: Tensor, scratch: Sequence[Tensor], divide_by: int) -> None:
        """Adds up the leaves to `out`, which is none of them, and leaves them as they are.

        Args:
            scratch: [size // 2] tensors like `out`.
        """
        into, to = self._combine
        sums: dict[int, Tensor] = {}
        for here, other in self._steps:
            term = sums.get(other, leaves[other])
            if here in sums:
                into(sums[here], term)
            else:
                sums[here] = to(leaves[here], term, out=scratch[here // 2] if here else out)
        _divide(out, divide_by)


def _divide(out: Tensor, divide_by: int) -> None:
    if divide_by == 1:
        return
    if divide_by.bit_count() == 1 and not out.is_complex():
        out.mul_(1 / divide_by)  # a power of two: the same bits, in less than half the time
    else:
        out.div_(divide_by)


def _computable(flat: Tensor, op: str, divide_by: int) -> Tensor:
    """The tensor as something that torch computes with."""
    if op not in COMBINE:
        raise ConfigError(f"op={op!r} is unknown; choose one of {', '.join(COMBINE)}")
    if divide_by != 1 and not (flat.is_floating_point() or flat.is_complex()):
        raise ConfigError(f"a mean of {flat.dtype} is not a {flat.dtype}; convert to floating point, or sum and divide")
    if op in ("min", "max") and (flat.is_complex() or flat.dtype in SIGNED):
        raise ConfigError(f"torch has no {op} of {flat.dtype}; convert to another type")
    return flat.view(SIGNED[flat.dtype]) if flat.dtype in SIGNED else flat


# --- plans: what can be prepared once for many calls -----------------------------------------------------------------


class _Call(NamedTuple):
    """An all-reduce of a certain size, dtype and operation."""

    record: Record  # for tensors in no particular place
    arithmetic: _Arithmetic
    pieces: list[_Piece]  # what goes through inboxes and rows


class _Piece(NamedTuple):
    """A part of a tensor on its way through the inboxes, of which this rank adds up its slice."""

    start: int  # bytes of the tensor
    stop: int
    mine_start: int  # what is not handed in: this rank's slice; nothing if every rank adds up everything
    mine_stop: int
    mine: slice  # elements
    bench: _Bench


class _Bench(NamedTuple):
    """The place in the shared memory where a slice is worked on."""

    inbox: list[int]  # [half], address of this rank's inbox
    row: list[int]  # [half], address
    leaves: list[list[Tensor]]  # [half][index], the slice in everyone's inboxes
    out: list[Tensor]  # [half], the slice in the row
    scratch: Sequence[Tensor]  # [size // 2], for partial sums


class _Planes(NamedTuple):
    """An all-reduce in allocated memory: the blocks of this rank's slice."""

    record: Record
    blocks: list[tuple[Tensor, ...]]  # by block, by rank
    others: list[Tensor]  # by block: [size − 1, numel of the block], ranks 1 … size−1


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
        pids: by rank of this host, its process, where that can be known here.
        num_processors: what the host's ranks may run on, all together.
        is_crowded: there are more ranks than that on the host.
    """

    def __init__(
        self,
        memory: HostMemory,
        kind: Kind,
        *,
        pids: Sequence[int | None],
        num_processors: int,
        is_crowded: bool,
    ) -> None:
        self.ranks, self.index, self.size, self.kind = memory.ranks, memory.index, memory.size, kind
        self.pids = dict(zip(self.ranks, pids, strict=True))
        self.num_processors, self.is_crowded = num_processors, is_crowded
        self._memory, self._out_of_use, self._closed = memory, "", False
        self._others = [other for other in range(self.size) if other != self.index]
        self._calls: dict[tuple[int, torch.dtype, str], _Call] = {}
        self._planes: dict[tuple[int, int, torch.dtype, str], _Planes] = {}

    # --- collectives -------------------------------------------------------------------------------------------------

    @_all_or_nothing
    def barrier(self, *, sequence: int, timeout_s: float) -> None:
        """Returns once every rank of the host has called it."""
        self._memory.enter(_BARRIER, sequence, timeout_s)

    @_all_or_nothing
    def all_reduce(self, flat: Tensor, op: str, *, divide_by: int = 1, sequence: int, timeout_s: float) -> None:
        """Combines `flat` over the ranks of the host, in place.

        Args:
            flat: [numel].
            op: "sum", "product", "min" or "max".
            divide_by: what the result is divided by, for a mean; floating point and complex only.
        """
        flat = _computable(flat, op, divide_by)
        numel, dtype = flat.numel(), flat.dtype
        call = self._calls.get((numel, dtype, op)) or self._plan_call(numel, dtype, op)
        if numel * dtype.itemsize > SMALL_ALLOCATED_BYTES:
            planes = self._planes.get((flat.data_ptr(), numel, dtype, op)) or self._plan_planes(flat, op)
            if planes is not None:
                if self._memory.enter(planes.record.packed(divide_by), sequence, timeout_s):
                    self._add_up(planes, call.arithmetic, divide_by)
                    self._memory.barrier.meet(timeout_s)
                    return
                self._memory.next_half()  # those with other memory have handed theirs in already: all begin again
                self._by_copying(flat, call, None, divide_by, sequence, timeout_s)
                return
        self._by_copying(flat, call, call.record.packed(divide_by), divide_by, sequence, timeout_s)

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
        flat = _computable(flat, op, divide_by)
        record, place = self._record_of_slices(Operation.REDUCE_SCATTER, flat, bounds, op=op, divide_by=divide_by)
        arithmetic = _Arithmetic(op, self.size)
        start, stop = bounds[self.index], bounds[self.index + 1]
        agreed = self._memory.enter(record, sequence, timeout_s)
        if agreed and place is not None:
            item, offset = flat.element_size(), flat.data_ptr() - place.addresses[self.index]
            slices = place.planes(flat.dtype, offset + start * item, offset + stop * item)
            for leaves in _blocks(slices, self._block_numel(flat.dtype)):
                arithmetic.in_place(leaves, leaves[self.index], divide_by)
            self._memory.barrier.meet(timeout_s)
            return
        memory, step = self._memory, self._memory.piece_bytes // flat.element_size() // self.size
        for runs in _runs(bounds, step):
            half = memory.next_half()
            boxes = [box.view(flat.dtype) for box in memory.inboxes[half]]
            for other in self._others:
                first, last = runs[other]
                boxes[self.index][other * step :][: last - first].copy_(flat[first:last])
            memory.barrier.meet(timeout_s)
            first, last = runs[self.index]
            terms = [box[self.index * step :][: last - first] for box in boxes]
            terms[self.index] = mine = flat[first:last]
            arithmetic.in_place(terms, mine, divide_by)

    @_all_or_nothing
    def all_gather(self, flat: Tensor, bounds: Sequence[int], *, sequence: int, timeout_s: float) -> None:
        """Gives everyone member i's flat[bounds[i]:bounds[i + 1]], in place.

        Args:
            flat: [numel].
            bounds: size + 1 ascending positions; slices may be empty.
        """
        record, place = self._record_of_slices(Operation.ALL_GATHER, flat, bounds)
        agreed = self._memory.enter(record, sequence, timeout_s)
        item, here = flat.element_size(), flat.data_ptr()
        cuts = [bound * item for bound in bounds]
        if agreed and place is not None:
            for other in self._others:
                there = here - place.addresses[self.index] + place.addresses[other]
                copy_bytes(here + cuts[other], there + cuts[other], cuts[other + 1] - cuts[other])
            self._memory.barrier.meet(timeout_s)
            return
        memory, step = self._memory, self._memory.piece_bytes // self.size
        for runs in _runs(cuts, step):
            row = memory.rows[memory.next_half()].data_ptr()
            start, stop = runs[self.index]
            copy_bytes(row + self.index * step, here + start, stop - start)
            memory.barrier.meet(timeout_s)
            for other in self._others:
                start, stop = runs[other]
                copy_bytes(here + start, row + other * step, stop - start)

    @_all_or_nothing
    def broadcast(self, flat: Tensor, root_index: int, *, sequence: int, timeout_s: float) -> None:
        """Gives everyone the values of member `root_index`, in place.

        Args:
            flat: [numel].
        """
        record, place = self._record_of_slices(Operation.BROADCAST, flat, (), detail=root_index)
        agreed = self._memory.enter(record, sequence, timeout_s)
        here = flat.data_ptr()
        if agreed and place is not None:
            if self.index != root_index:
                copy_bytes(here, here - place.addresses[self.index] + place.addresses[root_index], flat.nbytes)
            self._memory.barrier.meet(timeout_s)
            return
        memory = self._memory
        for start in range(0, flat.nbytes, memory.piece_bytes):
            num_bytes = min(memory.piece_bytes, flat.nbytes - start)
            row = memory.rows[memory.next_half()].data_ptr()
            if self.index == root_index:
                copy_bytes(row, here + start, num_bytes)
            memory.barrier.meet(timeout_s)
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
        return self._memory.allocate(numel, dtype, timeout_s)

    def free(self, tensor: Tensor) -> None:
        """Gives back what `allocate` gave; waits for nobody. The tensor stays usable, as ordinary memory."""
        if not self._closed:
            self._memory.free(tensor)
            self._planes.clear()

    def interrupt(self, culprit: int) -> None:
        """Ends this process's wait for the others, because that rank will not come. From any thread."""
        if not self._closed:
            self._memory.barrier.give_up(self.ranks.index(culprit) if culprit in self.ranks else None)

    def close(self) -> None:
        """Ends this rank's part. Tensors from `allocate` stay usable, as ordinary memory."""
        if not self._closed:
            self._closed, self._out_of_use = True, self._out_of_use or "closed"
            self._memory.close()
            del self._memory
            self._planes.clear()
            self._calls.clear()

    # --- the ways of an all-reduce -----------------------------------------------------------------------------------

    def _by_copying(
        self, flat: Tensor, call: _Call, record: bytes | None, divide_by: int, sequence: int, timeout_s: float
    ) -> None:
        """Through mailboxes, or staged.

        Args:
            record: what to enter with; None if that has been done, and the ranks' tensors lie in different places.
        """
        memory, here, pieces = self._memory, flat.data_ptr(), call.pieces
        half = self._hand_in(here, pieces[0])
        if record is None:
            memory.barrier.meet(timeout_s)
        elif not memory.enter(record, sequence, timeout_s):
            self._by_copying(flat, call, None, divide_by, sequence, timeout_s)
            return
        if flat.nbytes <= SMALL_BYTES:
            if flat.numel():
                bench = pieces[0].bench
                call.arithmetic.beside(bench.leaves[half], flat, bench.scratch, divide_by)
            return
        for number, piece in enumerate(pieces, start=1):
            bench = piece.bench
            leaves, out, row = bench.leaves[half].copy(), bench.out[half], bench.row[half]
            leaves[self.index] = flat[piece.mine]
            call.arithmetic.beside(leaves, out, bench.scratch, divide_by)
            if number < len(pieces):
                half = self._hand_in(here, pieces[number])
            memory.barrier.meet(timeout_s)
            copy_bytes(here + piece.start, row, piece.stop - piece.start)

    def _hand_in(self, address: int, piece: _Piece) -> int:
        """Copies all of a piece but this rank's own slice to its inbox; the half that it is in."""
        half = self._memory.next_half()
        inbox = piece.bench.inbox[half] - piece.start
        copy_bytes(inbox + piece.start, address + piece.start, piece.mine_start - piece.start)
        copy_bytes(inbox + piece.mine_stop, address + piece.mine_stop, piece.stop - piece.mine_stop)
        return half

    def _add_up(self, plan: _Planes, arithmetic: _Arithmetic, divide_by: int) -> None:
        """This rank's slice of all tensors, block by block, in the allocated memory itself."""
        for leaves, others in zip(plan.blocks, plan.others, strict=True):
            arithmetic.in_place(leaves, leaves[0], divide_by)
            others.copy_(leaves[0])

    # --- plans -------------------------------------------------------------------------------------------------------

    def _plan_call(self, numel: int, dtype: torch.dtype, op: str) -> _Call:
        record = Record(Operation.ALL_REDUCE, OP_CODES[op], DTYPE_CODES[dtype], numel=numel)
        item, pieces = dtype.itemsize, []
        if numel * item <= SMALL_BYTES:
            pieces = [_Piece(0, numel * item, 0, 0, slice(0, numel), self._bench(0, numel * item, dtype))]
        else:
            piece_bytes = self._memory.piece_bytes
            for start in range(0, numel * item, piece_bytes):
                stop = min(start + piece_bytes, numel * item)
                cuts = [cut * item for cut in _cuts((stop - start) // item, self.size, item)]
                first, last = cuts[self.index], cuts[self.index + 1]
                mine = slice((start + first) // item, (start + last) // item)
                bench = pieces[0].bench if pieces and stop - start == piece_bytes else self._bench(first, last, dtype)
                pieces.append(_Piece(start, stop, start + first, start + last, mine, bench))
        call = _Call(record, _Arithmetic(op, self.size), pieces)
        return _remember(self._calls, (numel, dtype, op), call)

    def _bench(self, start: int, stop: int, dtype: torch.dtype) -> _Bench:
        """For the slice from `start` to `stop` bytes of a piece."""
        memory = self._memory
        with torch.inference_mode(False):
            return _Bench(
                [half[self.index].data_ptr() for half in memory.inboxes],
                [row.data_ptr() for row in memory.rows],
                [[box[start:stop].view(dtype) for box in half] for half in memory.inboxes],
                [row[start:stop].view(dtype) for row in memory.rows],
                torch.empty(self.size // 2, (stop - start) // dtype.itemsize, dtype=dtype, device="cpu").unbind(),
            )

    def _plan_planes(self, flat: Tensor, op: str) -> _Planes | None:
        address = flat.data_ptr()
        region = self._memory.find(address, flat.nbytes)
        if region is None:
            return None
        offset, item = address - region.addresses[self.index], flat.element_size()
        cuts = _cuts(flat.numel(), self.size, item)
        start, stop = cuts[self.index], cuts[self.index + 1]
        slices = region.planes(flat.dtype, offset + start * item, offset + stop * item)
        block_numel = self._block_numel(flat.dtype)
        plan = _Planes(
            self._record(Operation.ALL_REDUCE, flat, op=op),
            list(_blocks(slices, block_numel)),
            list(slices[1:].split(block_numel, dim=1)) if stop > start else [],
        )
        return _remember(self._planes, (address, flat.numel(), flat.dtype, op), plan)

    # --- records -----------------------------------------------------------------------------------------------------

    def _record(self, operation: Operation, flat: Tensor, *, op: str = "", detail: int = 0) -> Record:
        address = flat.data_ptr()
        region = self._memory.find(address, flat.nbytes)
        number, offset = (region.number, address - region.addresses[self.index]) if region is not None else (0, 0)
        codes = OP_CODES.get(op, 0), DTYPE_CODES[flat.dtype]
        return Record(operation, *codes, 1, flat.numel(), detail, number, offset)

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
        record = self._record(operation, flat, op=op, detail=detail).packed(divide_by)
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
    """Returns where the slices of an all-reduce begin: on cache lines, of one length but for the last ones."""
    unit = max(1, LINE_BYTES // itemsize)
    step = -(-numel // (size * unit)) * unit
    return [min(index * step, numel) for index in range(size + 1)]


def _runs(bounds: Sequence[int], step: int) -> Iterator[list[tuple[int, int]]]:
    """Piece by piece, what it has of each member's slice: (start, stop)."""
    slices = list(pairwise(bounds))
    for done in range(0, max(stop - start for start, stop in slices), step):
        yield [(min(start + done, stop), min(start + done + step, stop)) for start, stop in slices]


# --- how a group begins ----------------------------------------------------------------------------------------------


def meet(
    rank: int, gather: Gather, *, timeout_s: float, kinds: Sequence[Kind] = KINDS, crowded: bool = False
) -> tuple[Hosts, HostGroup | None, str]:
    """Finds out which ranks share a host and joins those that share this one. Collective over all ranks of `gather`.

    Args:
        gather: all-gather of bytes; keeps a deadline of its own.
        timeout_s: longest wait for a rank of this host.
        kinds: which memory to try, in order of preference; the same on every rank.
        crowded: with ranks that are not in `gather`, there are more of them on the host than processors.

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
    try:
        offers = gather((memory.offer.path if memory is not None else "").encode())
        if kind is not None and rank != ranks[0] and not problem and (path := offers[ranks[0]].decode()):
            try:
                memory = SharedMemory.attach(Offer(path, num_bytes))
                memory.prefault(0, num_bytes)
            except OSError as error:
                problem = str(error)
        about = [socket.gethostname(), problem, _processors()]
        told = [json.loads(text) for text in gather(json.dumps(about).encode())]
    finally:
        if memory is not None:
            memory.forget()
    problems = [each for _, each, _ in told]
    if kind is None:
        return layout.hosts, None, "; ".join(sorted(set(layout.reasons.values())))
    if memory is None or any(problems[other] for other in ranks):
        return layout.hosts, None, "; ".join(f"rank {r}: {problems[r]}" for r in ranks if problems[r])
    index = ranks.index(rank)
    processors = set().union(*(told[other][2] for other in ranks))
    pids = [layout.pids[other] for other in ranks]
    crowded = crowded or len(ranks) > len(processors)
    barrier = Barrier(memory, 0, index=index, ranks=ranks, pids=pids, crowded=crowded)
    names = [told[other][0] for other in ranks]
    shared = HostMemory(memory, barrier, kind=kind, ranks=ranks, index=index, hosts=names)
    group = HostGroup(shared, kind, pids=pids, num_processors=len(processors), is_crowded=crowded)
    barrier.meet(timeout_s)
    return layout.hosts, group, ""


def _processors() -> list[int]:
    """Those that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _first(kind: Kind, num_bytes: int, size: int) -> tuple[SharedMemory | None, str]:
    """The memory, made by the first rank of a host."""
    memory = None
    try:
        memory = SharedMemory.create(kind, num_bytes)
        memory.prefault(0, num_bytes)
        Barrier.create(memory, 0, size=size)
    except OSError as error:
        if memory is not None:
            memory.forget()
        return None, str(error)
    return memory, ""
