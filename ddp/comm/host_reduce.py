"""Collectives in the memory of one host: no socket, one owner per element, one order of additions.

Three methods of an all-reduce (n ranks, N bytes):

    mailbox     N ≤ SMALL_BYTES. Every rank copies its tensor to its inbox; barrier; every rank adds up all inboxes.
                1 barrier; N copied, nN read.
    zero-copy   tensors from `allocate`, in the same place on all ranks. Barrier; rank r adds up slice r of all tensors
                in that very memory, in blocks that fit the cache, and writes it to slice r of all; barrier.
                2 barriers; N read, N written.
    staged      any other tensor, in pieces that fit the cache. Every rank copies all but its own slice of the piece to
                its inbox; barrier; rank r adds the others' slices r to its own, into its inbox; barrier; every rank
                copies slice r out of inbox r. Piece k+1 is copied in before the barrier after which piece k is copied
                out. pieces + 1 barriers; 2N copied, N read.

All three add every element in the order of the canonical binary tree over the ranks, nearest neighbours first:
3 → ((0,1),2), 4 → ((0,1),(2,3)), 5 → (((0,1),(2,3)),4). So the bits depend neither on the method nor on where slices
begin. The mean divides once, after adding.

Sums over the *shards* of a batch (`collectives/shards.py`) use only the zero-copy method, and add up the rows of all
ranks' tensors, one for each node of a rank.

    reduce-scatter   the first half of an all-reduce, with slices given by the caller
    all-gather       through the inboxes, or straight out of the others' allocated tensors
    broadcast        an all-gather in which one slice is everything

The calling thread reduces. Copies, additions and sleeps release the interpreter lock, and getting it back takes up to
the switch interval (5 ms) while another thread computes in Python. Measured with 2 ranks on two cores, 25 MB on a
background thread: 4 ms while the main thread sleeps, 36 ms while it computes in pure Python; for ordinary tensors 14
and 300 ms. Fewer and larger blocks made no difference.

Source of the idea: Graham and Shipman, "MPI support for multi-core architectures: optimized shared memory collectives"
(EuroPVM/MPI 2008).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ddp.collectives.shards import Addition, additions_between, most_nodes, nodes_by_rank
from ddp.comm.host_memory import Entry, HostMemory, Region, entry
from ddp.comm.host_memory import NoSharedMemory as NoSharedMemory
from ddp.comm.reduction import COMBINE, dtype_name
from ddp.comm.transport.edge import TransportError
from ddp.comm.transport.shared_memory import LINE_BYTES, copy_bytes
from ddp.errors import CollectiveMismatch

SMALL_BYTES = 64 << 10
SMALL_ALLOCATED_BYTES = 8 << 10  # up to this size, allocated memory is copied, too: one barrier is cheaper than two
BLOCK_BYTES = 512 << 10  # of all ranks' tensors: a quarter of a usual second-level cache
MAX_PLANS = 512


# --- additions and their order ---------------------------------------------------------------------------------------


class _Arithmetic:
    """The reduction of a group's tensors: operation, order, and division at the end."""

    def __init__(self, op: str, steps: Iterable[Addition]) -> None:
        self._combine = COMBINE[op]
        self._steps = tuple(steps)

    def in_place(self, leaves: Sequence[Tensor], out: Tensor, divide_by: int = 1) -> None:
        """Adds up the leaves into `out`, which may be one of them. The leaves are overwritten."""
        for here, other in self._steps[:-1]:
            self._combine(leaves[here], leaves[other], out=leaves[here])
        here, other = self._steps[-1]
        self._combine(leaves[here], leaves[other], out=out)
        divide(out, divide_by)

    def out_of_place(self, leaves: Sequence[Tensor], out: Tensor, scratch: Sequence[Tensor], divide_by: int) -> None:
        """Adds up the leaves into `out`, which is not one of them, without changing them.

        Args:
            scratch: [size // 2] tensors like `out`.
        """
        sums: dict[int, Tensor] = {}
        for here, other in self._steps:
            term, total = sums.get(other, leaves[other]), scratch[here // 2] if here else out
            sums[here] = self._combine(sums.get(here, leaves[here]), term, out=total)
        divide(out, divide_by)


def divide(out: Tensor, divide_by: int) -> None:
    """Divides in place."""
    if divide_by.bit_count() != 1 or (out.is_complex() and divide_by != 1):
        out.div_(divide_by)
    elif divide_by != 1:
        out.mul_(1 / divide_by)  # by a power of two: the same bits, in less than half the time


# --- plans: prepared once for many calls
# ----------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """An all-reduce of a certain size, dtype and operation, for a tensor in any memory."""

    call: Entry
    arithmetic: _Arithmetic
    pieces: list[_Piece]  # that go through the inboxes


class _Allocated(NamedTuple):
    """An all-reduce of a tensor in allocated memory."""

    call: Entry
    blocks: list[_Block]  # that this rank adds up in that memory


class _Piece(NamedTuple):
    """A part of a tensor on its way through the inboxes, of which this rank adds up its slice."""

    start: int  # bytes of the tensor
    stop: int
    mine_start: int  # this rank's slice, which is not copied in; empty if every rank adds up everything
    mine_stop: int
    cuts: list[tuple[int, int]]  # by index, the rank's slice, in bytes of the tensor
    workspace: _Workspace


class _Workspace(NamedTuple):
    """The shared memory in which a slice is added up."""

    inboxes: list[list[int]]  # [half][index], addresses
    leaves: list[list[Tensor]]  # [half][index], the slice in all inboxes
    scratch: Sequence[Tensor]  # [size // 2], for partial sums


class _Block(NamedTuple):
    """A part of this rank's slice that fits the cache, in the memory of all ranks."""

    leaves: tuple[Tensor, ...]  # by rank; of rows, by rank and node
    others: Tensor  # [size − 1, numel]: row 0 of all ranks but the first
    mine: Tensor  # the same for this rank


class HostGroup:
    """This rank's end of the collectives of its host. Made by `join`; used by one thread at a time.

    Tensors are flat, contiguous, on the CPU, of one length on all ranks, and of a dtype that torch computes with. All
    collectives may raise:

        CollectiveMismatch   ranks called different collectives; nothing was done, and the group can continue
        TransportError       a rank did not take part, or has gone; the group is out of use

    Args:
        num_processors: the number of processors that the host's ranks may use in all.

    Attributes:
        ranks: the communicator's ranks on this host, ascending.
        index, size: this rank's place among them, and their number.
    """

    def __init__(self, memory: HostMemory, *, num_processors: int) -> None:
        self.ranks, self.index, self.size = memory.ranks, memory.index, memory.size
        self.num_processors = num_processors
        self._memory, self._out_of_use, self._closed = memory, "", False
        self._others = [other for other in range(self.size) if other != self.index]
        self._plan = functools.lru_cache(MAX_PLANS)(self._new_plan)
        self._allocated = functools.lru_cache(MAX_PLANS)(self._new_allocated)
        self._workspace = functools.lru_cache(MAX_PLANS)(self._new_workspace)
        self._blocks = functools.lru_cache(MAX_PLANS)(self._new_blocks)
        self._arithmetic = functools.lru_cache(MAX_PLANS)(self._new_arithmetic)

    def __enter__(self) -> None:
        """Begins a collective, which is all or nothing."""
        if self._out_of_use:
            raise TransportError(self.ranks[self.index], f"this host's group is out of use: {self._out_of_use}")

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Puts the group out of use on all ranks if a collective fails, because its barrier is out of step then."""
        raised_on_all_ranks = CollectiveMismatch, NoSharedMemory  # between two barriers
        if error is not None and not isinstance(error, raised_on_all_ranks):
            self._out_of_use = str(error) or type(error).__name__
            self._memory.give_up()

    # --- collectives -------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns once every rank of the host has called it."""
        with self:
            self._memory.enter(_BARRIER)

    def all_reduce(self, flat: Tensor, op: str, *, divide_by: int = 1) -> None:
        """Reduces `flat` over the ranks of the host, in place.

        Args:
            flat: [numel].
            op: "sum", "product", "min" or "max".
            divide_by: the divisor of the result, for a mean; floating point and complex only.
        """
        with self:
            memory, address, numel, dtype = self._memory, flat.data_ptr(), flat.numel(), flat.dtype
            plan, allocated = self._plan(numel, dtype, op), None
            if numel * dtype.itemsize > SMALL_ALLOCATED_BYTES:
                allocated = self._allocated(address, numel, dtype, op)
            if allocated is None:
                half = self._hand_in(address, plan.pieces[0])
                if memory.enter(plan.call, divide_by):
                    self._add_copies(flat, plan, half, divide_by)
                    return
            elif memory.enter(allocated.call, divide_by):
                for block in allocated.blocks:
                    plan.arithmetic.in_place(block.leaves, block.leaves[0], divide_by)
                    block.others.copy_(block.leaves[0])
                memory.wait()
                return
            else:
                memory.next_half()  # ranks with other memory have copied their tensors in already
            half = self._hand_in(address, plan.pieces[0])  # the tensors lie in different places: all ranks copy
            memory.wait()
            self._add_copies(flat, plan, half, divide_by)

    def reduce_scatter(self, flat: Tensor, bounds: Sequence[int], op: str, *, divide_by: int = 1) -> None:
        """Reduces member i's flat[bounds[i]:bounds[i + 1]] over the host; the rest of `flat` is undefined afterwards.

        Args:
            flat: [numel].
            bounds: size + 1 ascending positions; slices may be empty.
            op, divide_by: as in `all_reduce`.
        """
        with self:
            memory, arithmetic, item = self._memory, self._arithmetic(op, self.size), flat.element_size()
            region = memory.find(flat.data_ptr(), flat.nbytes)
            call = self._entry("reduce_scatter", flat, f"by {op} {_slices(bounds)}", region)
            if memory.enter(call, divide_by) and region is not None:
                mine = bounds[self.index], bounds[self.index + 1]
                for block in self._blocks(flat.data_ptr(), flat.numel(), flat.dtype, self.size, mine):
                    arithmetic.in_place(block.leaves, block.mine, divide_by)
                memory.wait()
                return
            step = memory.piece_bytes // item // self.size
            for runs in _runs(bounds, step):
                boxes = [box.view(flat.dtype) for box in memory.inboxes[memory.next_half()]]
                for other in self._others:
                    first, last = runs[other]
                    boxes[self.index][other * step :][: last - first].copy_(flat[first:last])
                memory.wait()
                first, last = runs[self.index]
                terms = [box[self.index * step :][: last - first] for box in boxes]
                terms[self.index] = flat[first:last]
                arithmetic.in_place(terms, terms[self.index], divide_by)

    def reduce_shards(
        self, rows: Tensor, num_shards: int, bounds: Sequence[int] | None = None, *, divide_by: int = 1
    ) -> bool:
        """Adds up the nodes of all members (`collectives/shards.py`), in place; zeros of the sum are positive.

        Args:
            rows: [largest number of nodes of a member, numel]; the sum replaces row 0, and the other rows are
                undefined.
            num_shards: of the tree.
            bounds: member i gets only the sum of the elements from bounds[i] to bounds[i + 1]; None: all get all.
            divide_by: as in `all_reduce`.

        Returns:
            False if the rows are not allocated memory, in the same place on all members. Then nothing was done.
        """
        with self:
            memory, words = self._memory, "" if bounds is None else _slices(bounds)
            call = entry(f"reduce_shards of {list(rows.shape)} × {dtype_name(rows.dtype)} by {num_shards} {words}")
            if region := memory.find(rows.data_ptr(), rows.nbytes):
                call = entry(call.words, region.number, rows.data_ptr() - region.addresses[self.index])
            if not memory.enter(call, divide_by) or region is None:
                return False
            cuts = _cuts(rows.shape[1], self.size, rows.element_size()) if bounds is None else bounds
            mine = cuts[self.index], cuts[self.index + 1]
            for block in self._blocks(rows.data_ptr(), rows.shape[1], rows.dtype, num_shards, mine):
                total = block.leaves[0] if bounds is None else block.mine
                self._arithmetic("sum", num_shards).in_place(block.leaves, total, divide_by)
                total.add_(0.0)  # −0.0 becomes 0.0, whether or not zeros of shards without a gradient were added
                if bounds is None:
                    block.others.copy_(total)
            memory.wait()
            return True

    def all_gather(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Copies member i's flat[bounds[i]:bounds[i + 1]] to every member, in place.

        Args:
            flat: [numel].
            bounds: size + 1 ascending positions; slices may be empty.
        """
        self._gather("all_gather", flat, bounds, _slices(bounds))

    def broadcast(self, flat: Tensor, root_index: int) -> None:
        """Copies the values of member `root_index` to every member, in place.

        Args:
            flat: [numel].
        """
        bounds = [flat.numel() * (index > root_index) for index in range(self.size + 1)]
        self._gather("broadcast", flat, bounds, f"from the host's member {root_index}")

    # --- memory and the end ------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns [numel] zeros that the collectives reach without a copy. Collective over the host.

        The memory stays until every rank has called `free` or `close`, and has no reference to its tensor.

        Raises:
            NoSharedMemory: there is not enough memory; raised on all ranks.
        """
        with self:
            tensor = self._memory.allocate(numel, dtype)
            self._forget_places()  # an ordinary tensor may have lain there
            return tensor

    def free(self, tensor: Tensor) -> None:
        """Frees memory from `allocate`; waits for no rank. From any thread. The tensor stays, as ordinary memory."""
        if not self._closed:
            self._memory.free(tensor)
            self._forget_places()

    def close(self) -> None:
        """Leaves the group. Tensors from `allocate` stay usable, as ordinary memory."""
        if not self._closed:
            self._closed, self._out_of_use = True, self._out_of_use or "closed"
            self._memory.close()
            del self._memory
            self._forget_places()
            self._plan.cache_clear()
            self._workspace.cache_clear()

    def _forget_places(self) -> None:
        """Clears the caches of tensors by address."""
        self._allocated.cache_clear()
        self._blocks.cache_clear()

    # --- implementation ----------------------------------------------------------------------------------------------

    def _hand_in(self, address: int, piece: _Piece) -> int:
        """Copies all of a piece but this rank's own slice to its inbox. Returns the half that holds it."""
        half = self._memory.next_half()
        inbox = piece.workspace.inboxes[half][self.index] - piece.start
        copy_bytes(inbox + piece.start, address + piece.start, piece.mine_start - piece.start)
        copy_bytes(inbox + piece.mine_stop, address + piece.mine_stop, piece.stop - piece.mine_stop)
        return half

    def _add_copies(self, flat: Tensor, plan: _Plan, half: int, divide_by: int) -> None:
        """Adds up the inboxes: all of a mailbox; else this rank's slice, piece by piece.

        The sum of a slice goes to this rank's slice of its own inbox, where `_hand_in` does not write, because the
        others may still read it. So slices have the same place in all pieces of a tensor.
        """
        add, pieces, address, item = plan.arithmetic.out_of_place, plan.pieces, flat.data_ptr(), flat.element_size()
        if flat.nbytes <= SMALL_BYTES:
            add(pieces[0].workspace.leaves[half], flat, pieces[0].workspace.scratch, divide_by)
            return
        for number, piece in enumerate(pieces, start=1):
            leaves, inboxes = piece.workspace.leaves[half].copy(), piece.workspace.inboxes[half]
            out, leaves[self.index] = leaves[self.index], flat[piece.mine_start // item : piece.mine_stop // item]
            add(leaves, out, piece.workspace.scratch, divide_by)
            if number < len(pieces):
                half = self._hand_in(address, pieces[number])
            self._memory.wait()
            for inbox, (start, stop) in zip(inboxes, piece.cuts, strict=True):
                copy_bytes(address + start, inbox + start - piece.start, stop - start)

    def _gather(self, name: str, flat: Tensor, bounds: Sequence[int], details: str) -> None:
        with self:
            memory, here = self._memory, flat.data_ptr()
            region = memory.find(here, flat.nbytes)
            cuts = [bound * flat.element_size() for bound in bounds]
            if memory.enter(self._entry(name, flat, details, region)) and region is not None:
                for other in self._others:
                    there = here - region.addresses[self.index] + region.addresses[other]
                    copy_bytes(here + cuts[other], there + cuts[other], cuts[other + 1] - cuts[other])
                memory.wait()
                return
            for runs in _runs(cuts, memory.piece_bytes):
                boxes = [box.data_ptr() for box in memory.inboxes[memory.next_half()]]
                start, stop = runs[self.index]
                copy_bytes(boxes[self.index], here + start, stop - start)
                memory.wait()
                for other in self._others:
                    start, stop = runs[other]
                    copy_bytes(here + start, boxes[other], stop - start)

    # --- plans -------------------------------------------------------------------------------------------------------

    def _new_plan(self, numel: int, dtype: torch.dtype, op: str) -> _Plan:
        call = entry(f"all_reduce of {numel} × {dtype_name(dtype)} by {op}")
        return _Plan(call, self._arithmetic(op, self.size), self._pieces(numel, dtype))

    def _new_arithmetic(self, op: str, num_shards: int) -> _Arithmetic:
        return _Arithmetic(op, additions_between(self.size, num_shards))

    def _new_allocated(self, address: int, numel: int, dtype: torch.dtype, op: str) -> _Allocated | None:
        region = self._memory.find(address, numel * dtype.itemsize)
        if region is None:
            return None
        cuts = _cuts(numel, self.size, dtype.itemsize)
        call = entry(self._plan(numel, dtype, op).call.words, region.number, address - region.addresses[self.index])
        mine = cuts[self.index], cuts[self.index + 1]
        return _Allocated(call, self._blocks(address, numel, dtype, self.size, mine))

    def _pieces(self, numel: int, dtype: torch.dtype) -> list[_Piece]:
        item, num_bytes, piece_bytes = dtype.itemsize, numel * dtype.itemsize, self._memory.piece_bytes
        if num_bytes <= SMALL_BYTES:
            return [_Piece(0, num_bytes, 0, 0, [], self._workspace(0, num_bytes, dtype))]
        pieces, slices = [], list(pairwise(_cuts(min(numel, piece_bytes // item), self.size, item)))
        for start in range(0, num_bytes, piece_bytes):
            stop = min(start + piece_bytes, num_bytes)
            cuts = [(min(start + a * item, stop), min(start + b * item, stop)) for a, b in slices]
            first, last = cuts[self.index]
            pieces.append(_Piece(start, stop, first, last, cuts, self._workspace(first - start, last - start, dtype)))
        return pieces

    def _new_workspace(self, start: int, stop: int, dtype: torch.dtype) -> _Workspace:
        """Returns the workspace for the slice from `start` to `stop` bytes of a piece."""
        inboxes = self._memory.inboxes
        with torch.inference_mode(False):
            return _Workspace(
                [[box.data_ptr() for box in half] for half in inboxes],
                [[box[start:stop].view(dtype) for box in half] for half in inboxes],
                torch.empty(self.size // 2, (stop - start) // dtype.itemsize, dtype=dtype, device="cpu").unbind(),
            )

    def _new_blocks(
        self, address: int, numel: int, dtype: torch.dtype, num_shards: int, mine: tuple[int, int]
    ) -> list[_Block]:
        """Returns the blocks of a slice of all members' tensors, which lie in the same place.

        Args:
            num_shards: of the tree whose nodes are the rows of the tensors; as many as members: one row each.
            mine: the start and end of the slice.
        """
        nodes, (start, stop) = nodes_by_rank(self.size, num_shards), mine
        num_rows = most_nodes(self.size, num_shards)
        region = self._memory.find(address, num_rows * numel * dtype.itemsize)
        assert region is not None
        offset, length = address - region.addresses[self.index], BLOCK_BYTES // sum(map(len, nodes)) // dtype.itemsize
        rows = []
        for row in range(num_rows):
            first = offset + (row * numel + start) * dtype.itemsize
            rows.append(region.planes(dtype, first, first + (stop - start) * dtype.itemsize).split(length, dim=1))
        found = []
        for blocks in zip(*rows, strict=True) if stop > start else ():  # for each row, [size, up to length]
            leaves = tuple(blocks[row][rank] for rank, its in enumerate(nodes) for row in range(len(its)))
            found.append(_Block(leaves, blocks[0][1:], blocks[0][self.index]))
        return found

    def _entry(self, name: str, flat: Tensor, details: str, region: Region | None) -> Entry:
        words = f"{name} of {flat.numel()} × {dtype_name(flat.dtype)} {details}"
        if region is None:
            return entry(words)
        return entry(words, region.number, flat.data_ptr() - region.addresses[self.index])


_BARRIER = entry("barrier")


def _slices(bounds: Sequence[int]) -> str:
    return f"with slices {zlib.crc32(repr(tuple(bounds)).encode()):08x}"


def _cuts(numel: int, size: int, itemsize: int) -> list[int]:
    """Returns the bounds of the slices of an all-reduce: on cache lines, of one length except for the last ones."""
    unit = max(1, LINE_BYTES // itemsize)
    step = -(-numel // (size * unit)) * unit
    return [min(index * step, numel) for index in range(size + 1)]


def _runs(bounds: Sequence[int], step: int) -> Iterator[list[tuple[int, int]]]:
    """Yields, piece by piece, the part of each member's slice: (start, stop)."""
    slices = list(pairwise(bounds))
    for done in range(0, max(stop - start for start, stop in slices), step):
        yield [(min(start + done, stop), min(start + done + step, stop)) for start, stop in slices]
