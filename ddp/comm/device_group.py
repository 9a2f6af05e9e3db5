"""Collectives in the memory of one host's GPUs, each of which reaches the others': no messages, and no host wait.

The counterpart of `host_reduce.py`, for tensors that `allocate` has given on GPUs, by the same plan (n ranks, N bytes):

    all-reduce       barrier; rank r adds up slice r of all tensors, and writes it to slice r of all; barrier.
                     n − 1 additions and n − 1 copies; N read, N written
    reduce-scatter   the first half of an all-reduce, with slices given by the caller
    all-gather       barrier; everyone writes its slice to all tensors; barrier
    broadcast        an all-gather in which one slice is everything

Elements are added up in the order of the canonical binary tree, so sums have the bits that the host's memory gives.

Memory and barriers are torch's symmetric memory, which other versions may offer otherwise: where it does not work on
every rank, the ranks go on without. Ranks may share a GPU, too. Unlike in the host's memory, nobody compares what the
ranks call: a tensor must lie at the same place of the same allocation on all of them.

Note "barrier". It is a command: the GPU spins until all ranks have come to theirs, and NCCL's abort does not end that.
What a rank waits for are numbers, its *signals*: 1 from each peer, which it takes back to 0, and 0 where it puts a 1
for a peer. So whoever gives up a peer writes them itself (`release`), again and again until the GPU is through
everything that was enqueued; what it has added up then means nothing. The last resort is torch's own deadline, after
which a GPU ends the barrier by a trap, and the process cannot use the GPU any more.

Note "not run". No real GPU has run this yet; the tests have a stand-in. It is assumed that a small write from another
stream gets through to a GPU that spins, that the order of memory accesses which torch's barrier promises holds for the
commands around it, and that freeing memory while peers still have it mapped is safe. So it is taken only where
`algorithm="shared_memory"` asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddp import gpu
from ddp.collectives.schedule import offsets
from ddp.collectives.shards import additions_between
from ddp.comm.device import uuid_of
from ddp.comm.flat import dtype_name
from ddp.comm.host_links import HostLinks
from ddp.comm.host_memory import NoSharedMemory
from ddp.comm.host_reduce import divide
from ddp.comm.reduction import COMBINE
from ddp.comm.transport.edge import GiveUpCheck, TransportError, gathered
from ddp.comm.transport.shared_memory import LINE_BYTES
from ddp.errors import ConfigError, first_line
from ddp.process.clock import Patience
from ddp.process.environment import variable_set
from ddp.process.helper_thread import within

Made = TypeVar("Made")

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # without, each rank needs a GPU of another number
TRIAL_S = 10.0  # longest wait for the first all-reduce
POLL_S = 0.0002


class Region(NamedTuple):
    """Allocated memory: a plane per rank.

    Attributes:
        address: where this rank's begins.
        planes: by rank, [bytes].
        handle: keeps the others' mapped.
    """

    address: int
    planes: Sequence[Tensor]
    handle: Any


class DeviceGroup:
    """This rank's end of the collectives of one host's GPUs. Made collectively; used by one thread at a time.

    Tensors are flat, contiguous, and of one length on all ranks; `find` has found them. Each method enqueues commands
    on the current stream, and returns.

    Args:
        links: connect the same ranks by other means.
        device: this rank's.
        timeout_s: longest wait for a rank that lives.
        is_watched: somebody else keeps the deadlines, and calls `release`; if not, the host waits in each collective.

    Raises:
        NoSharedMemory: it does not work on some rank; raised on all of them.
    """

    def __init__(
        self,
        links: HostLinks,
        device: torch.device,
        *,
        timeout_s: float,
        hopeless_because: GiveUpCheck,
        is_watched: bool,
    ) -> None:
        self.index, self.size = links.rank, links.world_size
        self._links, self._device, self._timeout_s = links, device, timeout_s
        self._hopeless_because, self._is_watched = hopeless_because, is_watched
        self._others = [(self.index + distance) % self.size for distance in range(1, self.size)]
        self._regions: dict[int, Region] = {}  # by the address of this rank's plane
        self._is_closed = False
        self._agree(self._obstacle())
        first = self.allocate(self.size, torch.int64)
        self._barrier = self._regions[first.data_ptr()].handle
        self._beside = gpu.cuda.Stream(device)
        signals = partial(self._barrier.get_signal_pad, dtype=torch.int32)  # of channel 0: one of each rank
        self._mine = signals(self.index, (self.size,))
        self._theirs = [signals(other, (1,), storage_offset=self.index) for other in self._others]
        self._agree(_tried(partial(self._try_out, first))[1])

    # --- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, op: str, *, divide_by: int | Tensor = 1, sequence: int = 0) -> None:
        """Combines `flat` over the ranks, in place; see `HostGroup.all_reduce`."""
        bounds = offsets(flat.numel(), self.size, max(1, LINE_BYTES // flat.element_size()))
        planes = self._planes(flat)
        with self._between_barriers():
            self._reduce(planes, bounds, op, divide_by)
            self._hand_out(planes, bounds)

    def reduce_scatter(
        self, flat: Tensor, bounds: Sequence[int], op: str, *, divide_by: int | Tensor = 1, sequence: int = 0
    ) -> None:
        """Combines rank i's flat[bounds[i]:bounds[i + 1]]; see `HostGroup.reduce_scatter`."""
        with self._between_barriers():
            self._reduce(self._planes(flat), bounds, op, divide_by)

    def all_gather(self, flat: Tensor, bounds: Sequence[int], *, sequence: int = 0) -> None:
        """Gives everyone rank i's flat[bounds[i]:bounds[i + 1]], in place."""
        with self._between_barriers():
            self._hand_out(self._planes(flat), bounds)

    def broadcast(self, flat: Tensor, root_index: int, *, sequence: int = 0) -> None:
        """Gives everyone the values of rank `root_index`, in place."""
        self.all_gather(flat, [flat.numel() * (index > root_index) for index in range(self.size + 1)])

    def release(self) -> None:
        """Lets the GPU out of barriers to which others do not come (note "barrier"). From any thread."""
        with gpu.cuda.device(self._device), gpu.cuda.stream(self._beside):
            self._mine.fill_(1)
            for signal in self._theirs:
                signal.zero_()

    # --- memory and the end ------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, *, sequence: int = 0) -> Tensor:
        """Returns [numel] zeros that the collectives reach. Collective; the host waits.

        Raises:
            NoSharedMemory: a rank could not; raised on all ranks.
        """
        with torch.inference_mode(False):
            if not numel:
                return torch.zeros(0, dtype=dtype, device=self._device)
            tensor, problem = _tried(partial(_new, numel, dtype, self._device))
            self._agree(problem and f"{numel} {dtype_name(dtype)}: {problem}")
            assert tensor is not None
            region, problem = _tried(lambda: within(self._timeout_s / 2, partial(self._region, tensor)))
            self._agree(problem)
        assert region is not None
        self._regions[region.address] = region
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Gives back what `allocate` gave, once the GPU is through all that was enqueued. From any thread."""
        region = self._regions.pop(tensor.untyped_storage().data_ptr(), None)
        if region is None and tensor.numel() and not self._is_closed:
            raise ConfigError("free takes a tensor that allocate has given, once")

    def find(self, flat: Tensor) -> Region | None:
        """Returns the region that a tensor lies in."""
        start, stop = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        for region in list(self._regions.values()):  # a copy, since a finalizer may call `free` at any moment
            if region.address <= start < stop <= region.address + len(region.planes[0]):
                return region
        return None

    def close(self) -> None:
        """Ends this rank's part. Tensors from `allocate` stay usable, as ordinary memory."""
        self._is_closed = True
        self._regions.clear()

    # --- how they are done -------------------------------------------------------------------------------------------

    @contextmanager
    def _between_barriers(self) -> Iterator[None]:
        self._barrier.barrier(channel=0, timeout_ms=self._trap_ms)
        yield
        self._barrier.barrier(channel=0, timeout_ms=self._trap_ms)
        if not self._is_watched:
            self._wait(self._timeout_s)

    @property
    def _trap_ms(self) -> int:
        return int(2000 * self._timeout_s)  # later than any deadline of ours

    def _planes(self, flat: Tensor) -> list[Tensor]:
        """Returns every rank's tensor, by rank."""
        region = self.find(flat)
        assert region is not None
        start = flat.data_ptr() - region.address
        return [plane[start : start + flat.nbytes].view(flat.dtype) for plane in region.planes]

    def _reduce(self, planes: Sequence[Tensor], bounds: Sequence[int], op: str, divide_by: int | Tensor) -> None:
        """Adds up this rank's slice of all planes into its own plane. Partial sums stay in this GPU's memory."""
        combine, (start, stop) = COMBINE[op], bounds[self.index : self.index + 2]
        if start == stop:
            return
        terms = [plane[start:stop] for plane in planes]
        mine = terms[self.index]
        *steps, (here, other) = additions_between(self.size, self.size)
        for into, term in steps:
            terms[into] = combine(terms[into], terms[term], out=torch.empty_like(mine))
        divide(combine(terms[here], terms[other], out=mine), divide_by)

    def _hand_out(self, planes: Sequence[Tensor], bounds: Sequence[int]) -> None:
        """Writes this rank's slice of its plane to all others."""
        start, stop = bounds[self.index : self.index + 2]
        if start < stop:
            for other in self._others:
                planes[other][start:stop].copy_(planes[self.index][start:stop])

    def _wait(self, timeout_s: float) -> None:
        """Returns once the GPU has come as far as the current stream. Raises TransportError if it does not."""
        over, patience = gpu.cuda.current_stream(self._device).record_event(), Patience(timeout_s)
        while not over.query():
            if culprit := self._hopeless_because():
                why = f"rank {culprit[0]}: {culprit[1]}"
            elif not patience.left_s():
                why = f"the GPU has waited for {timeout_s:g} s"
            else:
                time.sleep(POLL_S)
                continue
            patience = Patience(1.0)
            while not over.query() and patience.left_s():
                self.release()
                time.sleep(POLL_S)
            raise TransportError(self._others[0], why, timed_out=True)

    # --- the beginning -----------------------------------------------------------------------------------------------

    def _agree(self, problem: str) -> None:
        """Raises NoSharedMemory if any rank has a problem. Collective."""
        problems = gathered(self._links.gather_bytes, problem)
        if said := [f"rank {rank}: {each}" for rank, each in enumerate(problems) if each]:
            raise NoSharedMemory("; ".join(said))

    def _obstacle(self) -> str:
        """Returns why torch's symmetric memory cannot work here; "" if it may. Collective."""
        names = gathered(self._links.gather_bytes, uuid_of(self._device))
        if dist.get_rank() != self.index:
            return "torch.distributed counts these ranks otherwise"
        here = {uuid_of(torch.device(gpu.KIND, number)): number for number in range(gpu.cuda.device_count())}
        for rank, name in enumerate(names):
            number = here.get(name)  # None: a launcher shows each rank its own GPU alone
            if number not in (None, self._device.index) and not gpu.cuda.can_device_access_peer(self._device, number):
                return f"its GPU cannot reach that of rank {rank}"
        kind, problem = _tried(lambda: _torch_s()._SymmetricMemory.get_backend(self._device))
        return problem if problem or kind == "CUDA" else f"torch's symmetric memory is {kind}, and not CUDA"

    def _region(self, tensor: Tensor) -> Region:
        """Maps the others' memory. Collective."""
        with gpu.cuda.device(self._device), variable_set(OVERLAPPING, "1"):
            handle = _torch_s().rendezvous(tensor, dist.group.WORLD)
        planes = [handle.get_buffer(rank, (tensor.nbytes,), torch.uint8) for rank in range(self.size)]
        return Region(tensor.data_ptr(), planes, handle)

    def _try_out(self, numbers: Tensor) -> None:
        """Makes an all-reduce. Raises an error if it does not end, or comes out wrong."""
        numbers.fill_(self.index + 1)
        self.all_reduce(numbers, "sum")
        self._wait(min(TRIAL_S, self._timeout_s / 2))
        if numbers.tolist() != [self.size * (self.size + 1) // 2] * self.size:
            raise RuntimeError("an all-reduce in the others' memory comes out wrong")


def _torch_s() -> Any:
    import torch.distributed._symmetric_memory as symmetric  # of some builds only

    return symmetric


def _new(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    found: Tensor = _torch_s()._SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, device)
    return found.zero_()


def _tried(make: Callable[[], Made]) -> tuple[Made | None, str]:
    """Returns the result of `make`, or what went wrong in torch."""
    try:
        return make(), ""
    except (RuntimeError, OSError, ImportError, AttributeError, TypeError) as error:
        return None, first_line(error)
