"""An edge: the messages of one server and one worker, over their own communicator. The server is its rank 0.

    worker                              server
    send_values  {"what": …}   ──▶      receive_values            plain values: a request,
    receive_values             ◀──      send_values  {…}          and its reply
    push         gradients     ──▶      receive_gradients         [numel], by wire or hook, if there is one
    pull         [numel]       ◀──      load, pull                parameters, after the reply that promises them

Inside a host all of it goes through shared memory. A push through a wire format or a hook is an all-reduce of the two,
to which the server contributes zeros; so formats and hooks work as between any ranks.

If one of the two is lost, the other's next call raises PeerLost, and no other edge notices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from ddp.comm.communicator import Communicator
from ddp.comm.host_links import CPU
from ddp.comm.meeting.private_store import part_of
from ddp.comm.meeting.rendezvous import ask_store
from ddp.comm.meeting.role import Job, Role
from ddp.comm.objects import broadcast_object, error_of, error_values, packed, unpacked
from ddp.comm.opening import open_communicator
from ddp.errors import CommunicatorBroken, PeerLost, with_causes
from ddp.gradients.bucket import Bucket, Slot, span
from ddp.gradients.compression import Compression
from ddp.gradients.hook import Hook
from ddp.optim.layerwise import laid_out_like
from ddp.optim.norms import in_memory_order
from ddp.setting import WireName

SERVER, WORKER = 0, 1
LOST = (PeerLost, CommunicatorBroken)
"""The errors of a call if the other end is lost."""


class Piece(NamedTuple):
    """Elements of a parameter that one server holds, in the order of memory."""

    name: str
    start: int
    stop: int


def connected(
    run_store: Store, comm: Communicator, rank: int, *, incarnation: int, server: int, number: int, warn_s: float
) -> Communicator:
    """Returns the communicator of an edge. Collective.

    Args:
        run_store: the part of the store in which servers and workers meet.
        comm: of this process, whose settings are those of the edge.
        rank: of this end.
        incarnation: of the servers.
        server: its index.
        number: which the servers gave the worker.

    Raises:
        PeerLost: the other end does not connect.
    """
    # A separate connection, because the wait for a peer that does not connect must not block other edges.
    own: Store = ask_store(run_store.clone, within_s=comm.abort_s)  # type: ignore[attr-defined]
    store = part_of(own, f"{incarnation}/edge/{server}/{number}")
    settings = replace(comm.settings, device=CPU, backend="auto", algorithm="auto")
    return open_communicator(store, rank, 2, replace(settings, generation=incarnation, warn_s=warn_s))


class Edge:
    """One end of an edge. Collective to make.

    Args:
        comm: of the two.
        parameters: of this process's model, by name.
        pieces: the parts that the server holds; the same at both ends.
        wire: format of the gradients between hosts.
        hook: sends a part of the gradients; then the pieces are whole parameters.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Mapping[str, nn.Parameter],
        pieces: Sequence[Piece],
        *,
        wire: WireName | None,
        hook: Hook | None,
    ) -> None:
        self.comm, self._wire = comm, wire
        named = [(piece.name, parameters[piece.name]) for piece in pieces]
        self._compression = None if hook is None else Compression(hook, comm, named)
        self._is_reduced = hook is not None or (wire is not None and len(comm.hosts) > 1)
        dtypes = sorted({parameter.dtype for _, parameter in named}, key=str)
        self._packs = [_Pack(comm, parameters, pieces, dtype) for dtype in dtypes]

    # --- plain values ------------------------------------------------------------------------------------------------

    def send_values(self, values: dict[str, Any]) -> None:
        """Sends plain values to the other end, which calls `receive_values`: a request, or the reply to it."""
        broadcast_object(self.comm, values, self.comm.rank)

    def receive_values(self) -> dict[str, Any]:
        """Receives one message from the other end."""
        values: dict[str, Any] = broadcast_object(self.comm, None, 1 - self.comm.rank)
        return values

    # --- gradients ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, label: str) -> None:
        """Sends the gradients of the worker's parameters; zeros for those without a gradient. At the worker."""
        for pack in self._packs:
            if self._is_reduced:
                pack.flat.zero_()  # including the padding, where a wire format may have left values
            for view, parameter, piece in pack.places(pack.flat):
                if parameter.grad is not None:
                    view.copy_(in_memory_order(laid_out_like(parameter, parameter.grad))[piece.start : piece.stop])
                else:
                    view.zero_()
        self._send(label)

    @torch.no_grad()
    def receive_gradients(self, label: str) -> dict[Piece, Tensor]:
        """Returns the worker's gradient of each piece, [numel]. At the server."""
        for pack in self._packs:
            if self._is_reduced:
                pack.flat.zero_()
        self._send(label)
        found = dict[Piece, Tensor]()
        for pack in self._packs:
            copy = pack.flat.clone()  # because the edge may be lost before it is used
            found |= {piece: view for view, _, piece in pack.places(copy)}
        return found

    def _send(self, label: str) -> None:
        if self._compression is not None:
            self._compression.begin()
        for pack in self._packs:
            if self._compression is not None:
                self._compression.reduce(pack.bucket(), divide_by=1, async_op=False, label=label)
            elif self._is_reduced:
                self.comm.all_reduce(pack.flat, wire=self._wire, label=label)
            else:
                self.comm.broadcast(pack.flat, WORKER, label=label)

    def take_back(self) -> None:
        """Rolls the hook back to before the last push, because the push does not count. At both ends."""
        if self._compression is not None:
            self._compression.take_back()

    # --- parameters --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self) -> None:
        """Copies the server's parameters to the memory that `pull` sends. At the server."""
        for pack in self._packs:
            for view, parameter, piece in pack.places(pack.flat):
                view.copy_(in_memory_order(parameter)[piece.start : piece.stop])

    @torch.no_grad()
    def pull(self, label: str) -> None:
        """Sends the parameters from the server to the worker. At both ends."""
        for pack in self._packs:
            self.comm.broadcast(pack.flat, SERVER, label=label)
            if self.comm.rank == WORKER:
                for view, parameter, piece in pack.places(pack.flat):
                    in_memory_order(parameter)[piece.start : piece.stop] = view


class _Pack:
    """The pieces of one dtype, which travel together, one after another.

    Attributes:
        flat: [numel], gradients or parameters, with padding between them.
    """

    def __init__(
        self, comm: Communicator, parameters: Mapping[str, nn.Parameter], pieces: Sequence[Piece], dtype: torch.dtype
    ) -> None:
        self._parameters = parameters
        self._pieces = [piece for piece in pieces if parameters[piece.name].dtype == dtype]
        sizes = (torch.empty(piece.stop - piece.start, dtype=dtype, device="meta") for piece in self._pieces)
        *self._starts, numel = [0, *accumulate(map(span, sizes))]
        self.flat = comm.allocate(numel, dtype)
        self._bucket: Bucket | None = None

    def places(self, flat: Tensor) -> Iterator[tuple[Tensor, nn.Parameter, Piece]]:
        """Yields each piece's place in the flat memory or a copy of it, with its parameter."""
        for start, piece in zip(self._starts, self._pieces, strict=True):
            yield flat[start : start + piece.stop - piece.start], self._parameters[piece.name], piece

    def bucket(self) -> Bucket:
        """Returns the flat memory as a bucket of whole parameters, for a hook."""
        if self._bucket is None:
            slots = [Slot(k, piece.name, self._parameters[piece.name]) for k, piece in enumerate(self._pieces)]
            self._bucket = Bucket(0, slots)
            self._bucket.allocate(self.flat)
        return self._bucket


@contextmanager
def failure_reported(run_store: Store, part: Role | None) -> Iterator[None]:
    """Publishes an error of the block to the processes that wait for this one, unless it has lost them."""
    try:
        yield
    except Exception as error:
        if part is not None and not any(isinstance(each, LOST) for each in with_causes(error)):
            with suppress(DistError):
                run_store.set(f"failed/{part.job}", packed(error_values(error)).numpy().tobytes())  # type: ignore[arg-type]
        raise


def failure_of(run_store: Store, job: Job) -> Exception | None:
    """Returns the error that ended the fit of a process with that job; None if there is none."""
    if not run_store.check([f"failed/{job}"]):
        return None
    data = torch.frombuffer(bytearray(run_store.get(f"failed/{job}")), dtype=torch.uint8)
    error = error_of(*unpacked(data), where=f"a {job}")
    error.__cause__ = PeerLost(SERVER if job == "server" else WORKER, "unknown", 0, 0, "its fit", "it has failed")
    return error
