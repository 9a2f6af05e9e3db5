"""The communicator: collectives for users, each with a number, a label and a deadline.

    comm.all_reduce(t)                    in place, sum; op="mean" | "min" | "max"
    comm.all_reduce(t, async_op=True)     returns a Work at once
    comm.reduce_scatter(t)                rank r's share of the sum
    comm.all_gather(t)                    everyone's tensor, by rank; first dimensions may differ
    comm.broadcast(t, root=0)             in place
    comm.barrier(), comm.agree_any(flag)

Each verb is a schedule from `ddp/collectives`, run by `execute`. One larger class rather than functions over a smaller
one: every verb needs the same four things (numbering, order, deadline, blame), and they are the class.

All ranks must call the same collectives in the same order. A call is numbered when it is made; the number, its
label and whom it waits for are what the watchdog publishes, and what a `PeerLost` carries. After an error the
communicator refuses further calls: the ranks no longer agree on what came last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ddp.collectives import ring, tree
from ddp.collectives.chunks import offsets
from ddp.collectives.schedule import Round
from ddp.comm.execute import Combine, Scratch, execute
from ddp.comm.watchdog import Watchdog
from ddp.comm.work import Runner, Work
from ddp.errors import CommunicatorBroken, ConfigError, PeerLost
from ddp.transport.edge import Transport, TransportError

Op = Literal["sum", "mean", "min", "max"]

COMBINE: dict[str, Combine] = {
    "sum": Tensor.add_,
    "mean": Tensor.add_,  # the division comes at the end, once
    "min": lambda here, arrived: torch.minimum(here, arrived, out=here),
    "max": lambda here, arrived: torch.maximum(here, arrived, out=here),
}
ALL_REDUCE = {"ring": ring.all_reduce}
SEGMENT_BYTES = 4 << 20


class Communicator:
    """The ranks of one membership and what they can do together. Made by `ddp.init`.

    Attributes:
        rank, world_size: this process's number, and how many there are.
        local_rank: this process's number on its host.
        device: where this rank's tensors live.
        generation: version of the membership.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        watchdog: Watchdog | None = None,
        device: torch.device | str = "cpu",
        local_rank: int = 0,
        generation: int = 0,
        algorithm: str = "ring",
        segment_bytes: int = SEGMENT_BYTES,
        abort_s: float = 60.0,
    ) -> None:
        if algorithm not in ALL_REDUCE:
            raise ConfigError(f"algorithm={algorithm!r} is unknown; choose one of {', '.join(ALL_REDUCE)}")
        self.rank, self.world_size, self.local_rank = transport.rank, transport.world_size, local_rank
        self.device, self.generation, self.algorithm = torch.device(device), generation, algorithm
        self.abort_s = abort_s
        self._transport, self._watchdog, self._segment_bytes = transport, watchdog, segment_bytes
        self._runner = Runner(f"ddp-collectives-{self.rank}", self.device)
        self._scratch = Scratch()
        self._sequence = 0
        self._broken: PeerLost | None = None

    # --- collectives -------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(
        self, tensor: Tensor, op: Op = ..., *, algorithm: str = ..., async_op: Literal[False] = ..., label: str = ...
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, tensor: Tensor, op: Op = ..., *, algorithm: str = ..., async_op: Literal[True], label: str = ...
    ) -> Work: ...
    def all_reduce(
        self, tensor: Tensor, op: Op = "sum", *, algorithm: str = "auto", async_op: bool = False, label: str = ""
    ) -> Any:
        """Combines `tensor` over all ranks, in place; bitwise the same everywhere afterwards.

        Args:
            tensor: any shape, the same on every rank.
            op: "sum", "mean" (floating point only), "min" or "max".
            algorithm: "ring", or "auto" for the communicator's default.
            async_op: return a `Work` at once; leave `tensor` alone until its `wait` has returned.
            label: what this is, for messages.

        Raises:
            PeerLost: a rank did not take part within the deadline.
            CommunicatorBroken: an earlier collective failed.
        """
        schedule = ALL_REDUCE[self.algorithm if algorithm == "auto" else _known(algorithm)]
        combine = _combine(op, tensor)

        def run(flat: Tensor) -> None:
            self._run(schedule, flat, offsets(flat.numel(), self.world_size), sequence, label, combine)
            if op == "mean":
                flat.div_(self.world_size)

        sequence, label = self._number("all_reduce", label, tensor)
        return self._start(partial(_in_place, run, tensor), async_op)

    @overload
    def reduce_scatter(self, tensor: Tensor, op: Op = ..., *, async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def reduce_scatter(self, tensor: Tensor, op: Op = ..., *, async_op: Literal[True]) -> Work: ...
    def reduce_scatter(self, tensor: Tensor, op: Op = "sum", *, async_op: bool = False) -> Any:
        """This rank's chunk of the combined tensor; `tensor` itself is left as it was.

        Returns:
            [numel of chunk], flat: elements r·N//p to (r+1)·N//p of the flattened tensor, for rank r of p.
        """
        sequence, label = self._number("reduce_scatter", "", tensor)
        combine = _combine(op, tensor)

        def run() -> Tensor:
            flat = tensor.detach().reshape(-1).clone()
            bounds = offsets(flat.numel(), self.world_size)
            self._run(ring.reduce_scatter, flat, bounds, sequence, label, combine)
            mine = flat[bounds[self.rank] : bounds[self.rank + 1]].clone()
            return mine.div_(self.world_size) if op == "mean" else mine

        return self._start(run, async_op)

    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Literal[False] = ...) -> list[Tensor]: ...
    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Literal[True]) -> Work: ...
    def all_gather(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Every rank's tensor, by rank. All dimensions but the first must agree.

        Args:
            tensor: [n_r, ...]; n_r may differ by rank and may be 0. A scalar counts as [1].
        """
        tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        sequence, label = self._number("all_gather", "")  # shapes may differ by rank

        def run() -> list[Tensor]:
            rows = torch.zeros(self.world_size, dtype=torch.int64, device=tensor.device)
            rows[self.rank] = len(tensor)
            self._run(ring.all_gather, rows, range(self.world_size + 1), sequence, label)
            row_numel = tensor[:1].numel() if len(tensor) else tensor.new_empty(1, *tensor.shape[1:]).numel()
            bounds = [0, *torch.cumsum(rows * row_numel, 0).tolist()]
            flat = tensor.new_empty(bounds[-1])
            flat[bounds[self.rank] : bounds[self.rank + 1]] = tensor.reshape(-1)
            self._run(ring.all_gather, flat, bounds, sequence, label)
            return [flat[start:stop].view(-1, *tensor.shape[1:]) for start, stop in pairwise(bounds)]

        return self._start(run, async_op)

    @overload
    def broadcast(
        self, tensor: Tensor, root: int = ..., *, async_op: Literal[False] = ..., label: str = ...
    ) -> Tensor: ...
    @overload
    def broadcast(self, tensor: Tensor, root: int = ..., *, async_op: Literal[True], label: str = ...) -> Work: ...
    def broadcast(self, tensor: Tensor, root: int = 0, *, async_op: bool = False, label: str = "") -> Any:
        """Gives every rank the root's values, in place."""
        if not 0 <= root < self.world_size:
            raise ConfigError(f"root={root} is no rank of a world of {self.world_size}")
        sequence, label = self._number("broadcast", label, tensor)

        def run(flat: Tensor) -> None:
            self._run(partial(tree.rotated, root=root), flat, [0, flat.numel()], sequence, label)

        return self._start(partial(_in_place, run, tensor), async_op)

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.all_reduce(torch.zeros(1, dtype=torch.uint8, device=self.device), label="barrier")

    def agree_any(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any."""
        votes = torch.tensor([flag], dtype=torch.uint8, device=self.device)
        return bool(self.all_reduce(votes, "max", label="agree_any").item())

    def wait_for_rank_zero(self, label: str) -> None:
        """Returns once rank 0 has called it too, however long that takes while rank 0 lives.

        Raises:
            PeerLost: rank 0 failed, left, or shows no sign of life.
        """
        sequence, label = self._number("wait_for_rank_zero", label)
        if self._watchdog is not None:
            try:
                self._watchdog.wait_for_rank_zero(sequence, label, silence_s=self.abort_s)
            except PeerLost as lost:
                self._broken = lost
                raise

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] zeros, in the memory that this communicator's collectives reach best."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    # --- the end -----------------------------------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """Tells the other ranks that this one stops because of an error of its own, and waits for nothing.

        A collective may still be in flight, waiting for ranks that will never come; its thread ends with the process.
        """
        if self._watchdog is not None:
            self._watchdog.fail(reason)
            self._watchdog.stop()

    def close(self) -> None:
        """Ends the background threads and says goodbye. The communicator cannot be used afterwards."""
        self._runner.close()
        if self._watchdog is not None:
            self._watchdog.leave()
        self._transport.close()

    # --- how a collective runs ---------------------------------------------------------------------------------------

    def _number(self, operation: str, label: str, tensor: Tensor | None = None) -> tuple[int, str]:
        """Refuses calls after an error; else this call's number, and its label: the same on every rank."""
        if self._broken is not None:
            raise CommunicatorBroken(f"the communicator is out of use since: {self._broken}") from self._broken
        self._sequence += 1
        return self._sequence, label or (operation if tensor is None else f"{operation} of {list(tensor.shape)}")

    def _start(self, collective: Callable[[], Any], async_op: bool) -> Any:
        return self._runner.submit(collective) if async_op else self._runner.run(collective)

    def _run(
        self,
        algorithm: Callable[[int, int], Iterator[Round]],
        flat: Tensor,
        bounds: Sequence[int],
        sequence: int,
        label: str,
        combine: Combine = Tensor.add_,
    ) -> None:
        """Executes one schedule over one flat buffer; a failure becomes a PeerLost with the culprit's name."""
        if self._broken is not None:
            raise CommunicatorBroken(f"the communicator is out of use since: {self._broken}") from self._broken
        if self.world_size == 1:
            return
        watchdog = self._watchdog
        if watchdog:
            watchdog.begin(sequence, label, (self.rank + 1) % self.world_size)  # posting may fail already
        try:
            execute(
                partial(algorithm, self.rank, self.world_size),
                [flat],
                bounds,
                self._transport,
                scratch=self._scratch,
                combine=combine,
                segment_bytes=self._segment_bytes,
                timeout_s=self.abort_s,
                waiting_for=partial(watchdog.begin, sequence, label) if watchdog else _nobody,
            )
        except TransportError as error:
            if watchdog:
                self._broken = watchdog.find_culprit(error.peer)
            else:
                self._broken = PeerLost(error.peer, "unknown", self.generation, sequence, label, str(error))
            raise self._broken from error
        if watchdog:
            watchdog.end()


def _in_place(run: Callable[[Tensor], None], tensor: Tensor) -> Tensor:
    """Runs over the tensor's memory, or over a flat copy that is written back if it is not contiguous."""
    data = tensor.detach()
    if data.is_contiguous():
        run(data.view(-1))
    else:
        flat = data.reshape(-1)
        run(flat)
        data.copy_(flat.view(data.shape))
    return tensor


def _nobody(peer: int) -> None:
    """Stands in for a watchdog."""


def _combine(op: str, tensor: Tensor) -> Combine:
    if op not in COMBINE:
        raise ConfigError(f"op={op!r} is unknown; choose one of {', '.join(COMBINE)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"op='mean' on {tensor.dtype}: use op='sum' and divide, or a floating point tensor")
    return COMBINE[op]


def _known(algorithm: str) -> str:
    if algorithm not in ALL_REDUCE:
        raise ConfigError(f"algorithm={algorithm!r} is unknown; choose one of auto, {', '.join(ALL_REDUCE)}")
    return algorithm
