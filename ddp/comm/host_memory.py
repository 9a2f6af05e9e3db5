"""What the ranks of one host have in common: a barrier, records of what each is calling, and memory to work in.

    barrier     semaphores                             `transport/shared_memory.py`
    records     2 × n            what each rank is calling, compared at the first barrier of every collective
    notes       n                a line of text per rank, for the rare exchange of one
    rows        2 × a piece      what one rank has for all others: results, what is broadcast
    inboxes     2 × n × a piece  what each rank contributes, for all others to read
    regions     allocated memory: n planes, one per rank, in one mapping

Everybody maps all of it, and touches it once at the beginning.

Note "turns". Rows and inboxes are used in turns: piece t stands in half t mod 2. A rank writes piece t+2 only after a
barrier that comes later than the one at which piece t was handed over, and whoever comes to a barrier has read all that
was handed over at earlier ones. So two halves are enough, within a collective and from one to the next, and no
collective of this kind needs a barrier at its end. Records take turns for the same reason.

Note "mismatch". Everybody writes its record before the first barrier of a collective and compares it with the others'
after it; that costs a copy of 44 bytes, and a comparison for each neighbour. All records are the same for all ranks, so
all of them raise, at the same place, and none is left waiting.

Read next: `host_reduce.py`.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ddp.errors import CollectiveMismatch, ConfigError
from ddp.transport.shared_memory import LINE_BYTES, Barrier, Kind, Offer, SharedMemory

Op = Literal["sum", "product", "min", "max"]
OPS: tuple[Op, ...] = ("sum", "product", "min", "max")

SLICE_BYTES, PIECE_BYTES = 256 << 10, 1 << 20  # of a rank's part of a piece, and of a piece, at most
NOTE_BYTES = 256


class NoSharedMemory(MemoryError):
    """The ranks of a host could not allocate memory together. Raised on all of them; says which could not, and why."""


# --- what a rank is calling ------------------------------------------------------------------------------------------


class Operation(IntEnum):
    """The collectives of a host."""

    BARRIER = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALLOCATE = 5


_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
OP_CODES: dict[str, int] = {op: code for code, op in enumerate(OPS, start=1)}


class Record(NamedTuple):
    """A call in numbers. On all ranks the same, but for where their tensors lie."""

    operation: int
    op: int = 0
    dtype: int = 0
    divide_by: int = 1
    numel: int = 0
    detail: int = 0  # checksum of the bounds, or the root
    region: int = 0  # allocated memory's number, 0 for any other memory
    offset: int = 0  # bytes from its beginning

    def packed(self, divide_by: int = 1) -> bytes:
        """All of it in a fixed number of bytes, with what this call divides by."""
        return _RECORD.pack(*self[:3], divide_by, *self[4:])

    def describe(self, sequence: int) -> str:
        """In words."""
        operation = Operation(self.operation)
        words = [f"#{sequence} {operation.name.lower()}"]
        if operation is not Operation.BARRIER:
            words += [f"of {self.numel} × {str(_DTYPES[self.dtype]).removeprefix('torch.')}"]
        if self.op:
            words += [f"by {OPS[self.op - 1]}"]
        if self.divide_by != 1:
            words += [f"divided by {self.divide_by}"]
        if operation is Operation.BROADCAST:
            words += [f"from the host's member {self.detail}"]
        elif self.detail:
            words += [f"with slices {self.detail:08x}"]
        return " ".join(words)


_RECORD = struct.Struct("<BBBxqqIiq")
_SEQUENCE = struct.Struct("<q")
_RECORD_BYTES = _SEQUENCE.size + _RECORD.size
_WHERE = slice(6, 8)  # region and offset of a record, which may differ


# --- the memory ------------------------------------------------------------------------------------------------------


class _Places(NamedTuple):
    """Where the parts begin."""

    records: int
    notes: int
    rows: int
    inboxes: int
    end: int


def _places(size: int) -> _Places:
    records = Barrier.num_bytes(size)
    notes = records + 2 * size * LINE_BYTES
    rows = _whole_pages(notes + size * NOTE_BYTES)
    inboxes = rows + 2 * _piece_bytes(size)
    return _Places(records, notes, rows, inboxes, inboxes + 2 * size * _piece_bytes(size))


def _piece_bytes(size: int) -> int:
    """A tensor goes through inboxes in pieces of so many bytes: small enough for the caches, and worth a barrier."""
    return min(size * SLICE_BYTES, PIECE_BYTES)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Region:
    """Allocated memory: a plane per rank, one behind the other.

    Attributes:
        number: counts the allocations; the same on every rank.
        addresses: by rank, where its plane begins in this process.
    """

    def __init__(self, memory: SharedMemory, number: int, *, size: int) -> None:
        self.number, self._memory, self._size = number, memory, size
        self.plane_bytes = memory.offer.num_bytes // size
        self.addresses = [memory.address + index * self.plane_bytes for index in range(size)]

    def tensor(self, index: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A rank's plane, with a storage of its own."""
        with torch.inference_mode(False):
            return torch.frombuffer(self._memory.buffer, dtype=dtype, count=numel, offset=index * self.plane_bytes)

    def planes(self, dtype: torch.dtype, start_bytes: int, stop_bytes: int) -> Tensor:
        """[size, numel]: the same range of all planes."""
        with torch.inference_mode(False):
            planes = self._memory.bytes.view(self._size, self.plane_bytes).view(dtype)
            return planes[:, start_bytes // dtype.itemsize : stop_bytes // dtype.itemsize]


class HostMemory:
    """This rank's end of the memory.

    Args:
        memory: `num_bytes(size)`, in which `create` has made the semaphores.
        barrier: stands at its beginning.
        hosts: by rank of the host, the name that its container has for it.

    Attributes:
        ranks: the communicator's ranks on this host, ascending.
        index: this rank's place among them.
        barrier: where they wait for each other.
        piece_bytes: so much of a tensor goes through rows and inboxes at a time.
        rows: [half][piece_bytes].
        inboxes: [half][index][piece_bytes].
    """

    def __init__(
        self,
        memory: SharedMemory,
        barrier: Barrier,
        *,
        kind: Kind,
        ranks: tuple[int, ...],
        index: int,
        hosts: Sequence[str],
    ) -> None:
        self.ranks, self.index, self.size, self.barrier = ranks, index, len(ranks), barrier
        self._memory, self._kind, self._hosts = memory, kind, hosts
        places, members = _places(self.size), range(self.size)
        self._records = [
            [_slice(places.records + (half * self.size + i) * LINE_BYTES, _RECORD_BYTES) for i in members]
            for half in (0, 1)
        ]
        self._notes = [_slice(places.notes + i * NOTE_BYTES, NOTE_BYTES) for i in members]
        self.piece_bytes = piece = _piece_bytes(self.size)
        self.rows = [memory.bytes[_slice(places.rows + half * piece, piece)] for half in (0, 1)]
        self.inboxes = [
            [memory.bytes[_slice(places.inboxes + (half * self.size + i) * piece, piece)] for i in members]
            for half in (0, 1)
        ]
        self._half_of_records = self._half = 0
        self._regions: list[Region] = []  # in the order of their addresses
        self._addresses: list[int] = []  # where this rank's plane of each begins
        self._num_allocations = 0

    @staticmethod
    def num_bytes(size: int) -> int:
        """Memory that `size` ranks work in, besides what they allocate."""
        return _places(size).end

    def enter(self, record: bytes, sequence: int, timeout_s: float) -> bool:
        """The first barrier of a collective.

        Args:
            record: a `Record`, packed.

        Returns:
            True if the records agree in everything; False if tensors lie in different places. The same on all ranks.

        Raises:
            CollectiveMismatch: the ranks are calling different things.
            TransportError: a rank did not come.
        """
        self._half_of_records ^= 1
        slots, buffer = self._records[self._half_of_records], self._memory.buffer
        mine = _SEQUENCE.pack(sequence) + record
        buffer[slots[self.index]] = mine
        self.barrier.meet(timeout_s)
        for slot in slots:
            if buffer[slot] != mine:
                self._refuse_mismatch([buffer[slot] for slot in slots])
                return False
        return True

    def next_half(self) -> int:
        """The half of rows and inboxes whose turn it is. All ranks call it equally often."""
        self._half ^= 1
        return self._half

    def find(self, address: int, num_bytes: int) -> Region | None:
        """The region that this range lies in, in this rank's plane."""
        place = bisect_right(self._addresses, address) - 1
        if place >= 0 and address + num_bytes <= self._addresses[place] + self._regions[place].plane_bytes:
            return self._regions[place]
        return None

    def allocate(self, numel: int, dtype: torch.dtype, timeout_s: float) -> Tensor:
        """[numel] zeros in a new region. Collective.

        The first rank makes the memory and writes a note of where it is; the others map it; each notes what went wrong,
        if anything; and from the same notes all come to the same end.

        Raises:
            NoSharedMemory: on all ranks alike.
        """
        self._num_allocations += 1
        num_bytes = _whole_pages(numel * dtype.itemsize) * self.size
        memory, problem = self._make(num_bytes) if self.index == 0 and num_bytes else (None, "")
        record = Record(Operation.ALLOCATE, dtype=DTYPE_CODES[dtype], numel=numel)
        try:
            self._write_note(memory.offer.path if memory is not None else "")
            self.enter(record.packed(), self._num_allocations, timeout_s)
            if not num_bytes:
                return torch.empty(0, dtype=dtype, device="cpu")
            if self.index != 0 and (path := self._note(0)):
                memory, problem = _attached(Offer(path, num_bytes))
            if memory is not None:
                problem = self._prefault_own(memory, num_bytes // self.size)
            self.barrier.meet(timeout_s)  # all have read the path
            self._write_note(problem)
            self.barrier.meet(timeout_s)
            notes = [self._note(index) for index in range(self.size)]
            self.barrier.meet(timeout_s)  # all have read the notes
        finally:
            if memory is not None:
                memory.forget()
        if memory is None or any(notes):
            problems = [f"rank {rank}: {note}" for rank, note in zip(self.ranks, notes, strict=True) if note]
            raise NoSharedMemory(f"{num_bytes} bytes for the {self.size} ranks of this host: {'; '.join(problems)}")
        memory.prefault(0, num_bytes)
        return self._add_region(memory).tensor(self.index, numel, dtype)

    def free(self, tensor: Tensor) -> None:
        """Forgets an allocated tensor's region. Its memory ends when all ranks have, and nobody holds a tensor in it.

        Raises:
            ConfigError: the tensor is none of `allocate`'s, or is freed already.
        """
        if tensor.numel():
            address = tensor.untyped_storage().data_ptr()
            if address not in self._addresses:
                raise ConfigError("free takes a tensor that allocate has given, once")
            place = self._addresses.index(address)
            del self._regions[place], self._addresses[place]

    def close(self) -> None:
        """Tells the others that this rank comes no more. The mapping ends with this object."""
        self.barrier.leave()
        self._regions.clear()
        self._addresses.clear()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _refuse_mismatch(self, found: list[bytes]) -> None:
        calls = [(_SEQUENCE.unpack_from(each)[0], Record(*_RECORD.unpack_from(each, _SEQUENCE.size))) for each in found]
        what = [(sequence, record[: _WHERE.start]) for sequence, record in calls]
        other = next((index for index in range(self.size) if what[index] != what[self.index]), None)
        if other is not None:
            self._half = 0  # some have taken a turn, some not; but all have done with what was handed in before
            lines = [
                f"  rank {self.ranks[index]} on host {self._hosts[index]}: {calls[index][1].describe(calls[index][0])}"
                for index in sorted((self.index, other))
            ]
            raise CollectiveMismatch(
                "two ranks called different collectives; all must call the same ones in the same order:\n"
                + "\n".join(lines)
            )

    def _make(self, num_bytes: int) -> tuple[SharedMemory | None, str]:
        try:
            return SharedMemory.create(self._kind, num_bytes), ""
        except OSError as error:
            return None, str(error)

    def _prefault_own(self, memory: SharedMemory, plane_bytes: int) -> str:
        """Each rank its own plane first: pages belong to the memory node of whoever touches them first."""
        try:
            memory.prefault(self.index * plane_bytes, (self.index + 1) * plane_bytes)
        except OSError as error:
            return str(error)
        return ""

    def _add_region(self, memory: SharedMemory) -> Region:
        region = Region(memory, self._num_allocations, size=self.size)
        place = bisect_right(self._addresses, region.addresses[self.index])
        self._regions.insert(place, region)
        self._addresses.insert(place, region.addresses[self.index])
        return region

    def _write_note(self, text: str) -> None:
        self._memory.buffer[self._notes[self.index]] = text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")

    def _note(self, index: int) -> str:
        return self._memory.buffer[self._notes[index]].rstrip(b"\0").decode(errors="replace")


def _slice(start: int, length: int) -> slice:
    return slice(start, start + length)


def _attached(offer: Offer) -> tuple[SharedMemory | None, str]:
    try:
        return SharedMemory.attach(offer), ""
    except OSError as error:
        return None, str(error)
