"""Transport over NCCL: GPU tensors, each rank with a GPU of its own.

The communicator is made from torch's own object, past torch's groups: with those, one timeout holds for every
operation, waited for or not, and torch ends the process; and groups that overlap may get each other's names.

A round is one coalesced batch: posted one by one, "send, then receive" on both sides deadlocks, since NCCL runs the
operations of a pair in launch order (NVIDIA/nccl#479). The batch begins when the current stream has reached it, and
`wait` makes the current stream wait for its end. The host waits for neither, so `comm/stream_queue.py` watches what is
on its way. Everything travels as bytes, because NCCL lacks some of torch's types.

Note "errors". torch calls a batch complete once there is an error, and its `wait` is silent: only `exception` tells.
By itself, torch's thread would end the process then; `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` leaves it to us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ddp.comm.meeting.private_store import for_torch, part_of
from ddp.comm.transport.edge import NO_DEADLINE, GiveUpCheck, Pending, Transfer, Transport, TransportError
from ddp.errors import first_line
from ddp.process import gpu
from ddp.process.memory import variable_set

ProcessGroupNCCL: Any = getattr(dist, "ProcessGroupNCCL", None)  # None: a build of torch without NCCL
ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # note "errors"
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"  # with which the host would wait


class NcclTransport(Transport):
    """Point-to-point over NCCL, on GPU tensors: one batch per round. Collective to make; the host waits meanwhile.

    Args:
        store: of these ranks alone, and of this transport.
        device: this rank's.

    Raises:
        RuntimeError: NCCL could not connect the ranks.
    """

    has_tags = False

    def __init__(self, store: Store, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._store, self._last = store, None
        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = NO_DEADLINE
        with variable_set(ERRORS, "0"), variable_set(BLOCKING, "0"), gpu.cuda.device(device):
            self._backend = ProcessGroupNCCL(for_torch(store), rank, world_size, options)
            self._backend.eager_connect_single_device(device)
            self._meet_all()

    def _meet_all(self) -> None:
        """Exchanges a byte with every rank, because the first exchange of a pair connects it, and blocks the host."""
        mine, theirs = torch.zeros(2, dtype=torch.uint8, device=self.device).split(1)
        for distance in range(1, self.world_size):
            ahead, behind = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            self.post([Transfer(ahead, mine)], [Transfer(behind, theirs)]).wait(0)
        gpu.cuda.current_stream(self.device).synchronize()

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        backend = self._backend
        transfers = [(backend.recv, *each) for each in receives] + [(backend.send, *each) for each in sends]
        transfers = [each for each in transfers if each[-1].numel()]  # the peer has no bytes either
        if not transfers:
            return _Batch(None)
        try:
            backend._start_coalescing()
            for operation, peer, data in transfers:
                operation([data.view(torch.uint8)], peer, 0)
            self._last = backend._end_coalescing()
        except RuntimeError as error:
            raise TransportError(transfers[0][1], first_line(error)) from error
        return _Batch(self._last)

    def among(self, ranks: Sequence[int], channel: int, hopeless_because: GiveUpCheck) -> NcclTransport:
        """Makes a communicator of NCCL's own, because NCCL knows no tags. Collective over these ranks.

        All ranks must enqueue what they do on both in one order.
        """
        store = part_of(self._store, f"channel {channel}")
        return NcclTransport(store, list(ranks).index(self.rank), len(ranks), self.device)

    def failure(self) -> str:
        """Returns the error that NCCL has met, as text; "" without one (note "errors")."""
        if self._last is None or not self._last.is_completed():
            return ""
        try:
            error = self._last.exception()
        except RuntimeError as raised:
            error = raised
        return "" if error is None else first_line(error)

    def abort(self) -> None:
        """Ends whatever is on its way, here; other ranks wait in vain."""
        self._backend.abort()

    def close(self) -> None:
        """Gives the connections back. Nothing may be on its way."""
        self._backend.shutdown()


class _Batch:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        """Makes the current stream wait; the host continues."""
        if self._work is not None:
            self._work.wait()
