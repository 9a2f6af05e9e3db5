"""Stands in for `dist.ProcessGroupNCCL`, with the calls of it that the package makes.

A communicator has a stream of its own on which its batches lie in order. A batch is done when each of its transfers has
met the peer's; Gloo carries the bytes. What NCCL forbids is an error here, or is counted, or can be found: other data
types, another current device, communicators that are enqueued in another order on another rank.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gpu_standin import cuda
from gpu_standin.build import load
from torch import Tensor

TYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
CARRIED, MET = 0, 1  # Gloo's tags


@dataclass
class Faults:
    """Test switches, for the batches that begin while they are set."""

    delay_s: float = 0.0
    peer_never_comes: bool = False
    error: str = ""  # of NCCL's, told by `Work.exception`; the kernel spins on


FAULTS = Faults()
ENQUEUED: list[str] = []
"""The communicators of this process's batches, by names that their ranks agree on, in the order of the batches."""
COMMUNICATORS: list[ProcessGroupNCCL] = []


def other_order(enqueued: Sequence[list[str]]) -> str | None:
    """Returns where two ranks enqueued the communicators that both have in different orders, which may deadlock.

    Args:
        enqueued: each rank's `ENQUEUED`.
    """
    for (a, one), (b, other) in itertools.combinations(enumerate(enqueued), 2):
        both = set(one) & set(other)
        pairs = zip([each for each in one if each in both], [each for each in other if each in both], strict=False)
        for place, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                return f"batch {place} is {mine}'s on rank {a}, and {theirs}'s on rank {b}"
    return None


@dataclass
class Options:
    """As `dist.ProcessGroupNCCL.Options`."""

    is_high_priority_stream: bool = False
    _timeout: timedelta = timedelta(minutes=10)


@dataclass(eq=False)
class Work:
    """A batch. The tensors live at least until someone waits for it, as with the real one."""

    communicator: ProcessGroupNCCL
    transfers: list[tuple[str, Tensor, int]] = field(default_factory=list)
    number: int = -1
    ended: bool = False
    error: Exception | None = None

    @property
    def device(self) -> int:
        index: int = self.transfers[0][1].device.index
        return index

    def is_completed(self) -> bool:
        load().count(b"nccl polls")
        return self.ended or self.exception() is not None

    def exception(self) -> Exception | None:
        return self.error or self.communicator.error  # every batch asks its communicator

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait; an error is none of its business."""
        load().wait_batch(self.number, self.device)
        return True

    synchronize = wait

    def end(self, error: Exception | None = None) -> None:
        self.error = self.error or error
        if not self.ended:
            self.ended = True
            load().end_batch(self.number)

    def __del__(self) -> None:
        if self.number >= 0:
            load().forget_batch(self.number)


class ProcessGroupNCCL:
    """A communicator of all ranks of a store."""

    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options | None = None) -> None:
        self.options, self.name = options or Options(), ""
        self._store, self._rank, self._size = store, rank, size
        self._gloo: Any = None
        self._streams: dict[int, int] = {}
        self._batch: Work | None = None
        self.error: Exception | None = None
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._in_flight: list[Work] = []
        self._lock, self._aborted = threading.Lock(), threading.Event()
        COMMUNICATORS.append(self)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Blocks until every rank has come."""
        assert device.type == cuda.KIND and device.index is not None, device
        if not self.name:
            if self._rank == 0:
                self._store.set("name", uuid.uuid4().hex[:6])
            self.name = self._store.get("name").decode()
            if self._size > 1:
                beside = dist.PrefixStore("standin", self._store)
                self._gloo = dist.ProcessGroupGloo(beside, self._rank, self._size, timedelta(hours=1))
            threading.Thread(target=self._run, name=f"nccl-{self.name}", daemon=True).start()

    def _start_coalescing(self) -> None:
        if self._batch is not None:
            raise RuntimeError("a batch has begun already")
        self._batch = Work(self)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._add("send", tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._add("recv", tensors, peer)

    def _end_coalescing(self) -> Work:
        batch, self._batch = self._batch, None
        if batch is None or not batch.transfers:
            raise RuntimeError("there is no batch to end, or nothing in it")
        return self._enqueue(batch)

    def abort(self) -> None:
        """Ends all batches, wherever they are, with an error."""
        with self._lock:
            self._aborted.set()
            for work in self._in_flight:
                work.end(RuntimeError("NCCL communicator was aborted"))
        self._queue.put(None)

    shutdown = abort  # which aborts what is in flight, too

    def _add(self, kind: str, tensors: list[Tensor], peer: int) -> Work:
        (tensor,) = tensors
        if tensor.device.type != cuda.KIND:
            raise ValueError(f"NCCL got a tensor on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError("NCCL got a tensor that is not contiguous")
        if tensor.dtype not in TYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        if not 0 <= peer < self._size:
            raise ValueError(f"NCCL got peer {peer} of {self._size} ranks")
        if cuda.current_device() != tensor.device.index:
            load().count(b"NCCL called with another current device")
        batch = self._batch or Work(self)
        batch.transfers.append((kind, tensor, peer))
        if batch.device != tensor.device.index:
            raise ValueError("NCCL got a batch on two devices")
        return batch if batch is self._batch else self._enqueue(batch)

    def _enqueue(self, work: Work) -> Work:
        self.eager_connect_single_device(work.transfers[0][1].device)
        count = len(work.transfers)
        begins = (ctypes.c_size_t * count)(*[tensor.data_ptr() for _, tensor, _ in work.transfers])
        sizes = (ctypes.c_int64 * count)(*[tensor.nbytes for _, tensor, _ in work.transfers])
        writes = (ctypes.c_int * count)(*[kind == "recv" for kind, _, _ in work.transfers])
        with self._lock:  # so that batches lie on the stream in the order in which they run
            if self._aborted.is_set():
                raise RuntimeError("NCCL communicator was aborted")
            if (stream := self._streams.get(work.device)) is None:
                stream = self._streams[work.device] = load().new_stream()
            work.number = load().batch(work.device, stream, b"nccl batch", count, begins, sizes, writes)
            ENQUEUED.append(self.name)
            self._in_flight.append(work)
            self._queue.put(work)
        return work

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            load().before_batch(work.number)
            time.sleep(FAULTS.delay_s)
            if FAULTS.error:
                self.error = RuntimeError(FAULTS.error)
            try:
                if FAULTS.peer_never_comes or FAULTS.error:
                    raise ConnectionError("a test wants it")
                arrived = self._carry(work.transfers)
            except Exception as error:
                if isinstance(error, AssertionError):
                    work.error = error
                self._aborted.wait()  # the kernel spins: it does not learn of a peer's end
                return
            with self._lock:
                if self._aborted.is_set():
                    return
                for memory, data in arrived:
                    memory.copy_(data)
                work.end()
                self._in_flight.remove(work)
            del work

    def _carry(self, transfers: list[tuple[str, Tensor, int]]) -> list[tuple[Tensor, Tensor]]:
        """Returns what to write where, once all transfers have met their partners."""
        to_itself: list[Tensor] = []
        sent, arriving, arrived = [], [], []
        for kind, tensor, peer in sorted(transfers, key=lambda each: each[0] == "recv"):  # sends first
            memory = bytes_of(tensor)
            if peer == self._rank and kind == "send":
                to_itself.append(memory.clone())
            elif peer == self._rank:
                arrived.append((memory, to_itself.pop(0)))
            elif kind == "send":
                size, met = torch.tensor([len(memory)]), torch.empty(1, dtype=torch.uint8)
                sent += [(each, self._gloo.send([each], peer, CARRIED)) for each in (size, memory)]
                sent.append((met, self._gloo.recv([met], peer, MET)))
        for kind, tensor, peer in transfers:
            if kind == "recv" and peer != self._rank:
                memory, size = bytes_of(tensor), torch.empty(1, dtype=torch.int64)
                self._gloo.recv([size], peer, CARRIED).wait()
                assert size == len(memory), f"rank {peer} sent {size.item()} bytes, and {len(memory)} were expected"
                arrived.append((memory, torch.empty_like(memory)))
                arriving.append((peer, self._gloo.recv([arrived[-1][1]], peer, CARRIED)))
        for peer, data in arriving:
            data.wait()
            met = torch.ones(1, dtype=torch.uint8)
            sent.append((met, self._gloo.send([met], peer, MET)))
        for _, each in sent:
            each.wait()
        return arrived


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a tensor on the stand-in as the host's bytes. They live no longer than the tensor."""
    if not tensor.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()), dtype=torch.uint8)
