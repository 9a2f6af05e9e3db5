"""Transport over torch.distributed's point-to-point operations: Gloo for CPU tensors, NCCL for CUDA tensors.

Both use a process group of their own, so that their messages never mix with those of the application.

Gloo    Every transfer is an `isend` or `irecv` of its own; messages between two ranks match in order of posting. Gloo
        knows no CUDA tensors: those are staged through pinned host memory.
NCCL    All transfers of a round go into one `batch_isend_irecv`: posted one by one, "send, then receive" on both sides
        deadlocks, since NCCL runs the operations of a pair in launch order (NVIDIA/nccl#479). NCCL orders itself behind
        the current stream; waiting makes the current stream wait, and the host only polls, so as to keep the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.clock import now_s
from ddp.transport.edge import Pending, Transfer, TransportError

POLL_S = 0.0002


class GlooTransport:
    """Point-to-point over Gloo, on CPU tensors.

    Args:
        backend: Gloo's own object: past torch's dispatcher, which costs half of a `dist.isend`.
        ranks: the group's ranks, in the backend's numbers.
        rank: this one's place among them.
        channel: tag of this group's messages; those of other groups over the same connections have others.
    """

    def __init__(self, backend: Any, ranks: Sequence[int], rank: int, *, channel: int = 0) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self._backend, self._ranks, self._channel = backend, ranks, channel

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Receives first: a Gloo send starts moving when its receiver has announced where the bytes go."""
        works = [(peer, self._posted(self._backend.recv, data, peer)) for peer, data in receives]
        works += [(peer, self._posted(self._backend.send, data, peer)) for peer, data in sends]
        return _GlooRound(works)

    def among(self, ranks: Sequence[int], channel: int) -> GlooTransport | None:
        """The same connections under another tag."""
        if self.rank not in ranks:
            return None
        names = [self._ranks[rank] for rank in ranks]
        return type(self)(self._backend, names, list(ranks).index(self.rank), channel=channel)

    def close(self) -> None:
        """The group ends with torch.distributed."""

    def _posted(self, operation: Callable[[list[Tensor], int, int], dist.Work], data: Tensor, peer: int) -> dist.Work:
        """Posting fails too, where the peer's connection has broken since the last round."""
        try:
            return operation([data], self._ranks[peer], self._channel)
        except RuntimeError as error:
            raise TransportError(peer, str(error).splitlines()[0]) from error


class _GlooRound:
    def __init__(self, works: list[tuple[int, dist.Work]]) -> None:
        self._works = works

    def wait(self, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        for peer, work in self._works:
            start_s = now_s()
            try:
                work.wait(timeout)
            except RuntimeError as error:
                timed_out = now_s() - start_s >= 0.9 * timeout_s
                raise TransportError(peer, str(error).splitlines()[0], timed_out) from error


class StagedGlooTransport(GlooTransport):
    """Gloo for CUDA tensors: out through pinned memory before a send, back in after a receive."""

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        outgoing = [Transfer(peer, _pinned(data).copy_(data, non_blocking=True)) for peer, data in sends]
        incoming = [Transfer(peer, _pinned(data)) for peer, data in receives]
        if sends:
            torch.cuda.current_stream(sends[0].data.device).synchronize()  # Gloo reads the bytes from the host
        targets = [data for _, data in receives]
        return _StagedRound(super().post(outgoing, incoming), incoming, targets)


class _StagedRound:
    def __init__(self, inner: Pending, staged: list[Transfer], targets: list[Tensor]) -> None:
        self._inner, self._staged, self._targets = inner, staged, targets

    def wait(self, timeout_s: float) -> None:
        self._inner.wait(timeout_s)
        for transfer, target in zip(self._staged, self._targets, strict=True):
            target.copy_(transfer.data, non_blocking=True)  # the pinned block is not reused before this copy is done


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


class NcclTransport:
    """Point-to-point over NCCL, on CUDA tensors: one symmetric batch per round.

    Args:
        ranks: this transport's ranks, in the group's numbers; all in order unless given.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        self._group, self._ranks = group, list(range(group.size()) if ranks is None else ranks)
        self.rank, self.world_size = self._ranks.index(group.rank()), group.size()

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        ops = [dist.P2POp(dist.isend, data, group=self._group, group_peer=self._ranks[peer]) for peer, data in sends]
        ops += [
            dist.P2POp(dist.irecv, data, group=self._group, group_peer=self._ranks[peer]) for peer, data in receives
        ]
        peer = (sends or receives)[0].peer
        return _NcclRound(peer, dist.batch_isend_irecv(ops))

    def among(self, ranks: Sequence[int], channel: int) -> NcclTransport | None:
        """NCCL knows no tags: a process group of its own."""
        if self.rank not in ranks:
            return None
        names = [dist.get_global_rank(self._group, self._ranks[rank]) for rank in ranks]
        group = dist.new_group(names, backend="nccl", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        in_order = sorted(names)  # as new_group numbers them
        return NcclTransport(group, [in_order.index(name) for name in names])

    def close(self) -> None:
        """The group ends with torch.distributed."""


class _NcclRound:
    def __init__(self, peer: int, works: list[dist.Work]) -> None:
        self._peer, self._works = peer, works

    def wait(self, timeout_s: float) -> None:
        deadline_s = now_s() + timeout_s
        while not all(work.is_completed() for work in self._works):
            if now_s() > deadline_s:
                raise TransportError(self._peer, f"NCCL did not finish within {timeout_s:g} s", timed_out=True)
            time.sleep(POLL_S)
        for work in self._works:
            work.wait()


def process_group_transport(
    device: torch.device, backend: str, *, timeout_s: float, ranks: list[int] | None = None
) -> GlooTransport | NcclTransport:
    """The transport for tensors of `device`. Collective over the ranks.

    Args:
        timeout_s: longest wait for the others' connections.
        ranks: of torch.distributed; None for all.
    """
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(ranks, backend=backend, timeout=timeout, use_local_synchronization=ranks is not None)
    assert isinstance(group, dist.ProcessGroup)
    if backend == "nccl":
        return NcclTransport(group)
    kind = StagedGlooTransport if device.type == "cuda" else GlooTransport
    return kind(group._get_backend(torch.device("cpu")), range(group.size()), group.rank())
