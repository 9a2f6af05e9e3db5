"""The memory that the ranks of one host share: a barrier, an entry for each rank's current call, and working memory.

    barrier     semaphores                             `comm/transport/shared_memory.py`
    entries     2 × n            each rank's current call, compared at the first barrier of every collective
    notes       n                a line of text per rank, for rare messages
    inboxes     2 × n × a piece  each rank's contribution, for all others to read
    regions                      allocated memory: n planes, one per rank, in one mapping

Every rank maps all of it, and touches it once at the beginning.

Note "turns". The halves of the inboxes alternate: piece t is in half t mod 2. A rank writes piece t+2 only after a
barrier that follows the one at which piece t was handed over, and a rank that reaches a barrier has read everything
that was handed over at earlier ones. So two halves are enough, within a collective and between collectives, and no
collective of this kind needs a barrier at its end. Entries alternate for the same reason.

Note "mismatch". Every rank writes an entry before the first barrier of a collective and compares it with the others'
after it. That costs a copy of 40 bytes, and a comparison for each neighbour. All ranks read the same entries, so all of
them raise at the same place, and none is left waiting. Only then do they exchange their calls as text.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ddp.comm.reduction import dtype_name
from ddp.comm.transport.edge import GiveUpCheck
from ddp.comm.transport.shared_memory import LINE_BYTES, Barrier, Kind, SharedMemory
from ddp.errors import CollectiveMismatch, ConfigError

SLICE_BYTES, PIECE_BYTES = 256 << 10, 1 << 20  # of a rank's part of a piece, and of a piece, at most
NOTE_BYTES = 256

Made = TypeVar("Made")


class NoSharedMemory(MemoryError):
    """The ranks of a host could not allocate shared memory. Raised on all of them; says which could not, and why."""


# --- what a rank is calling ------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A call of a host's collective. The same on all its ranks, except for the place of their tensors."""

    words: str
    digest: bytes  # of the words
    region: int  # number of the allocated region, 0 for any other memory
    offset: int  # in bytes


@lru_cache(maxsize=512)
def entry(words: str, region: int = 0, offset: int = 0) -> Entry:
    """Returns the entry of a call with this description."""
    return Entry(words, hashlib.blake2b(words.encode(), digest_size=8).digest(), region, offset)


_ENTRY = struct.Struct("<qq8sqq")  # number of the call, divisor, digest, region, offset
_WHAT = slice(0, 24)  # the part that must agree


# --- the memory ------------------------------------------------------------------------------------------------------


class Region:
    """Allocated memory: a plane per rank, one after another.

    Attributes:
        number: counts the allocations; the same on every rank.
        addresses: by rank, the address of its plane in this process.
    """

    def __init__(self, memory: SharedMemory, number: int, *, size: int) -> None:
        self.number, self._memory, self._size = number, memory, size
        self.plane_bytes = len(memory.buffer) // size
        self.addresses = [memory.address + index * self.plane_bytes for index in range(size)]

    def tensor(self, index: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a rank's plane, with its own storage."""
        with torch.inference_mode(False):
            return torch.frombuffer(self._memory.buffer, dtype=dtype, count=numel, offset=index * self.plane_bytes)

    def planes(self, dtype: torch.dtype, start_bytes: int, stop_bytes: int) -> Tensor:
        """Returns [size, numel]: the same range of all planes."""
        with torch.inference_mode(False):
            planes = self._memory.bytes.view(self._size, self.plane_bytes).view(dtype)
            return planes[:, start_bytes // dtype.itemsize : stop_bytes // dtype.itemsize]


class HostMemory:
    """This rank's end of the memory.

    Args:
        memory: of `num_bytes(size)`, beginning with a barrier from `Barrier.create`.
        names: by rank of the host, the host's name in its container.
        pids, hopeless_because: see `Barrier`.
        timeout_s: longest wait for the others.

    Attributes:
        ranks: the communicator's ranks on this host, ascending.
        index, size: this rank's place among them, and their number.
        call_number: returns the number of the running call, the same on all ranks.
        call_label: returns what this rank makes it for, for messages.
        wait: returns once every rank has called it; raises TransportError if one does not.
        give_up: ends the others' waits for this rank.
        piece_bytes: the bytes of a tensor that go through inboxes at a time.
        inboxes: [half][index][piece_bytes].
    """

    def __init__(
        self,
        memory: SharedMemory,
        *,
        kind: Kind,
        ranks: tuple[int, ...],
        index: int,
        names: Sequence[str],
        pids: Sequence[int | None],
        timeout_s: float,
        hopeless_because: GiveUpCheck,
        call_number: Callable[[], int],
        call_label: Callable[[], str] = str,
    ) -> None:
        self.ranks, self.index, self.size, self.call_number = ranks, index, len(ranks), call_number
        self.call_label = call_label
        self._memory, self._kind, self._names = memory, kind, names
        self._barrier = Barrier(memory, index=index, ranks=ranks, pids=pids, hopeless_because=hopeless_because)
        self.wait, self.give_up = partial(self._barrier.wait, timeout_s), self._barrier.give_up
        members = range(self.size)
        entries = Barrier.num_bytes(self.size)
        notes = entries + 2 * self.size * LINE_BYTES
        self._entries = [
            [_slice(entries + (half * self.size + i) * LINE_BYTES, _ENTRY.size) for i in members] for half in (0, 1)
        ]
        self._notes = [_slice(notes + i * NOTE_BYTES, NOTE_BYTES) for i in members]
        self.piece_bytes = piece = _piece_bytes(self.size)
        inboxes = _inboxes_at(self.size)
        self.inboxes = [
            [memory.bytes[_slice(inboxes + (half * self.size + i) * piece, piece)] for i in members] for half in (0, 1)
        ]
        self._half_of_entries = self._half = 0
        self._regions: dict[int, Region] = {}  # by the address of this rank's plane
        self._num_allocations = 0

    @staticmethod
    def num_bytes(size: int) -> int:
        """Returns the size of the memory that `size` ranks work in, without allocated regions."""
        return _inboxes_at(size) + 2 * size * _piece_bytes(size)

    def enter(self, call: Entry, divide_by: int = 1) -> bool:
        """Waits at the first barrier of a collective, and compares the calls.

        Returns:
            True if the entries are identical; False if tensors lie in different places. The same on all ranks.

        Raises:
            CollectiveMismatch: the ranks are calling different things.
            TransportError: a rank did not take part.
        """
        self._half_of_entries ^= 1
        places, buffer, sequence = self._entries[self._half_of_entries], self._memory.buffer, self.call_number()
        mine = _ENTRY.pack(sequence, divide_by, *call[1:])
        buffer[places[self.index]] = mine
        self.wait()
        for place in places:
            if buffer[place] != mine:
                found = [buffer[place][_WHAT] for place in places]
                if len(set(found)) > 1:
                    divided = f" divided by {divide_by}" if divide_by != 1 else ""
                    label = f" [{name}]" if (name := self.call_label()) else ""
                    self._refuse_mismatch(found, f"#{sequence} {call.words}{divided}{label}")
                return False
        return True

    def next_half(self) -> int:
        """Returns the half of the inboxes to use next. All ranks call it equally often."""
        self._half ^= 1
        return self._half

    def find(self, address: int, num_bytes: int) -> Region | None:
        """Returns the region whose plane on this rank contains this range; None: no region does."""
        for start in list(self._regions):  # a copy, because a finalizer may call `free` at any moment
            region = self._regions.get(start)
            if region is not None and start <= address and address + num_bytes <= start + region.plane_bytes:
                return region
        return None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns [numel] zeros in a new region. Collective.

        The first rank creates the memory and sends the others its path; they map it. Each sends its error, if any, and
        all derive the same result from the same notes.

        Raises:
            NoSharedMemory: on all ranks.
        """
        num_bytes = _whole_pages(numel * dtype.itemsize) * self.size
        plane_bytes = num_bytes // self.size
        memory, problem = None, ""
        if self.index == 0 and num_bytes:
            memory, problem = tried(lambda: SharedMemory.create(self._kind, num_bytes))
        try:
            self.enter(entry(f"allocate of {numel} × {dtype_name(dtype)}"))
            if not num_bytes:
                return torch.empty(0, dtype=dtype, device="cpu")
            path, *_ = self._exchange(memory.path if memory is not None else "")
            if self.index != 0 and path:
                memory, problem = tried(lambda: SharedMemory.attach(path, num_bytes))
            if memory is not None:  # its own plane first: a page belongs to the node of the first rank to touch it
                _, problem = tried(partial(memory.prefault, self.index * plane_bytes, (self.index + 1) * plane_bytes))
            problems = self._exchange(problem)
        finally:
            if memory is not None:
                memory.forget()
        if memory is None or any(problems):
            texts = [f"rank {rank}: {problem}" for rank, problem in zip(self.ranks, problems, strict=True) if problem]
            raise NoSharedMemory(f"{num_bytes} bytes for the {self.size} ranks of this host: {'; '.join(texts)}")
        memory.prefault(0, num_bytes)
        self._num_allocations += 1
        region = Region(memory, self._num_allocations, size=self.size)
        self._regions[region.addresses[self.index]] = region
        return region.tensor(self.index, numel, dtype)

    def free(self, tensor: Tensor) -> None:
        """Forgets an allocated tensor's region. Its memory ends once all ranks have done so, and no tensor refers to
        it.

        Any thread may call it at any time: finalizers do.

        Raises:
            ConfigError: the tensor is not from `allocate`, or was freed before.
        """
        if tensor.numel() and self._regions.pop(tensor.untyped_storage().data_ptr(), None) is None:
            raise ConfigError("free takes a tensor from allocate, once")

    def close(self) -> None:
        """Ends the others' waits for this rank. The mapping ends with this object."""
        self._barrier.leave()
        self._regions.clear()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _refuse_mismatch(self, found: Sequence[bytes], mine: str) -> None:
        self._half = 0  # the ranks may differ in it here; all have read what was handed over before
        texts = self._exchange(mine)
        other = next(index for index in range(self.size) if found[index] != found[self.index])
        lines = [
            f"  rank {self.ranks[index]} on host {self._names[index]}: {texts[index]}"
            for index in sorted((self.index, other))
        ]
        raise CollectiveMismatch(
            "two ranks called different collectives; all must call the same ones in the same order:\n"
            + "\n".join(lines)
        )

    def _exchange(self, text: str) -> list[str]:
        """Returns every rank's text, by index. Collective."""
        buffer = self._memory.buffer
        buffer[self._notes[self.index]] = text.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")
        self.wait()
        texts = [buffer[note].rstrip(b"\0").decode(errors="replace") for note in self._notes]
        self.wait()  # until all have read them
        return texts


def tried(make: Callable[[], Made]) -> tuple[Made | None, str]:
    """Returns the result of `make`, or None and the system's reason."""
    try:
        return make(), ""
    except OSError as error:
        return None, str(error)


def _inboxes_at(size: int) -> int:
    return _whole_pages(Barrier.num_bytes(size) + size * (2 * LINE_BYTES + NOTE_BYTES))


def _piece_bytes(size: int) -> int:
    """Returns the size of the pieces that go through inboxes: they fit in the caches, and are worth a barrier."""
    return min(size * SLICE_BYTES, PIECE_BYTES)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _slice(start: int, length: int) -> slice:
    return slice(start, start + length)
