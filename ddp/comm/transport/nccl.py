"""Transport over torch.distributed's point-to-point operations, by NCCL: GPU tensors, each rank with a GPU of its own.

All transfers of a round go into one `batch_isend_irecv`: posted one by one, "send, then receive" on both sides
deadlocks, since NCCL runs the operations of a pair in launch order (NVIDIA/nccl#479). NCCL orders itself behind the
current stream; waiting makes the current stream wait, and the host only polls, so as to keep the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from ddp.comm.transport.edge import GiveUpCheck, Pending, Transfer, Transport, TransportError
from ddp.process.clock import Patience

POLL_S = 0.0002


class NcclTransport(Transport):
    """Point-to-point over NCCL, on CUDA tensors: one symmetric batch per round.

    Args:
        ranks: this transport's ranks, in the group's numbers.
        hopeless_because: see `Transport.among`.
    """

    has_tags = False

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], hopeless_because: GiveUpCheck) -> None:
        self._group, self._ranks, self._hopeless_because = group, ranks, hopeless_because
        self.rank, self.world_size = ranks.index(group.rank()), len(ranks)

    def post(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        transfers = [(dist.isend, *each) for each in sends] + [(dist.irecv, *each) for each in receives]
        ops = [
            dist.P2POp(operation, data, group=self._group, group_peer=self._ranks[peer])
            for operation, peer, data in transfers
        ]
        peer = (sends or receives)[0].peer
        return _NcclRound(peer, dist.batch_isend_irecv(ops), self._hopeless_because)

    def among(self, ranks: Sequence[int], channel: int, hopeless_because: GiveUpCheck) -> NcclTransport:
        """Makes a process group, because NCCL knows no tags. It ends with torch.distributed."""
        names = [dist.get_global_rank(self._group, self._ranks[rank]) for rank in ranks]
        group = dist.new_group(names, backend="nccl", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        in_order = sorted(names)  # as new_group numbers them
        return NcclTransport(group, [in_order.index(name) for name in names], hopeless_because)


class _NcclRound(NamedTuple):
    peer: int
    works: list[dist.Work]
    hopeless_because: GiveUpCheck

    def wait(self, timeout_s: float) -> None:
        patience = Patience(timeout_s)
        while not all(work.is_completed() for work in self.works):
            if not patience.left_s():
                raise TransportError(self.peer, f"NCCL did not finish within {timeout_s:g} s", timed_out=True)
            if culprit := self.hopeless_because():
                raise TransportError(self.peer, f"rank {culprit[0]}: {culprit[1]}", timed_out=True)
            time.sleep(POLL_S)
        for work in self.works:
            work.wait()
