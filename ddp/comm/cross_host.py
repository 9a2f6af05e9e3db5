"""An all-reduce over several hosts: in the memory of each host, across between the hosts, and in memory again.

    host 0    ranks 0 1        add up in memory    rank 0 ── slice 0 ── rank 2        hand the slices
    host 1    ranks 2 3        on each host        rank 1 ── slice 1 ── rank 3        out in memory

Ranks in the same place on every host are *counterparts*; each group of counterparts carries its own slice across, by
any algorithm of the catalog. Where hosts differ in size, the smallest one sets how many ranks of each host carry one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from ddp.collectives.catalog import SCHEDULES
from ddp.collectives.placed import Hosts
from ddp.collectives.schedule import Schedule, offsets
from ddp.comm.host_links import HostLinks, by_size
from ddp.comm.host_reduce import HostGroup
from ddp.comm.reduction import SUM, Reduction
from ddp.comm.work import Runner, Work, done

CROSSING_BYTES = 2 << 20  # the part of a buffer that crosses between hosts while the next part is added up inside them


class CrossHost:
    """This rank's part between its host and the others.

    Args:
        wire: edges to all ranks.
        group: this host's memory; None where the rank is alone.
        channel: a channel of the transport that nobody uses.

    Attributes:
        slices: by rank, the number of its slice in `reduce_scatter` and `all_gather`; None where hosts differ in size.
            Counterparts have slices side by side, because those of a host add up their slices' terms in one piece.
        runner: runs the crossings of a long buffer.
    """

    def __init__(self, links: HostLinks, hosts: Hosts, group: HostGroup | None, *, channel: int) -> None:
        self._group, self._hosts = group, hosts
        self._place = group.index if group is not None else 0
        self._num_slices = min(map(len, hosts))
        self.slices: list[int] | None = None
        if self._num_slices == max(map(len, hosts)):
            order = [rank for counterparts in zip(*hosts, strict=True) for rank in counterparts]
            self.slices = [order.index(rank) for rank in range(len(order))]
        self._counterparts = None  # where this rank carries nothing
        if self._place < self._num_slices:
            self._counterparts = links.among([host[self._place] for host in hosts], channel)
        self.runner = Runner(f"ddp-crossings-{links.rank}", torch.device("cpu"))

    def all_reduce(self, flat: Tensor, schedule: Schedule, reduction: Reduction, *, sequence: int) -> None:
        """Combines `flat` over all ranks, piece by piece, so that work in memory overlaps with the transfers.

        While piece k crosses, on a thread of its own, this thread hands out piece k−1 and then adds up piece k+1.

        Args:
            flat: [numel].
            schedule: of the crossing.
        """
        crossing: deque[tuple[Tensor, list[int], Work[None]]] = deque()
        bounds = offsets(flat.numel(), num_pieces(flat.nbytes))
        for start, stop in pairwise(bounds):
            piece = flat[start:stop]
            slices = offsets(len(piece), self._num_slices)
            if self._group is not None:
                slices += [len(piece)] * (self._group.size + 1 - len(slices))  # the others have nothing to carry
                self._group.reduce_scatter(piece, slices, reduction.op, sequence=sequence)
            cross = partial(self._cross, piece, slices, schedule, reduction)
            crossing.append((piece, slices, self.runner.submit(cross) if len(bounds) > 2 else done(cross())))
            if len(crossing) == 2:
                self._hand_out(*crossing.popleft(), sequence=sequence)
        self._hand_out(*crossing.popleft(), sequence=sequence)

    def reduce_scatter(self, flat: Tensor, bounds: Sequence[int], reduction: Reduction, *, sequence: int) -> None:
        """Combines each rank's slice of `flat` over all ranks, in place; the rest of `flat` is undefined then.

        Args:
            bounds: where the slices begin, in the order of `slices`, and where the last one ends.
        """
        num_hosts = len(self._hosts)
        if self._group is not None:
            self._group.reduce_scatter(flat, bounds[::num_hosts], reduction.op, sequence=sequence)
        self._run("reduce_scatter", flat, bounds, reduction)

    def all_gather(self, flat: Tensor, bounds: Sequence[int], *, sequence: int) -> None:
        """Gives everyone each rank's slice of `flat`, in place.

        Args:
            bounds: as in `reduce_scatter`.
        """
        self.gather_across(flat, bounds)
        if self._group is not None:
            self._group.all_gather(flat, bounds[:: len(self._hosts)], sequence=sequence)

    def gather_across(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Gives each rank the slices of its counterparts, which lie beside its own, in place.

        Args:
            bounds: as in `reduce_scatter`.
        """
        self._run("all_gather", flat, bounds, SUM)

    def barrier(self, *, sequence: int) -> None:
        """Returns once every rank has called it."""
        if self._group is not None:
            self._group.barrier(sequence=sequence)  # all of this host are here
        if self._place == 0 and self._counterparts is not None:
            flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._counterparts.run(SCHEDULES["recursive_doubling"], flag, reduction=Reduction("max"))
        if self._group is not None:
            self._group.barrier(sequence=sequence)  # and all of the others

    def close(self) -> None:
        """Ends the thread."""
        self.runner.close()

    def _run(self, operation: str, flat: Tensor, bounds: Sequence[int], reduction: Reduction) -> None:
        """Runs a schedule among the counterparts, on what their slices have in common."""
        assert self._counterparts is not None
        first = self._place * len(self._hosts)
        mine = bounds[first : first + len(self._hosts) + 1]
        part = flat[mine[0] : mine[-1]]
        schedule = by_size(operation, part.nbytes, len(self._hosts))
        self._counterparts.run(schedule, part, [bound - mine[0] for bound in mine], reduction)

    def _cross(self, piece: Tensor, slices: Sequence[int], schedule: Schedule, reduction: Reduction) -> None:
        """Combines this rank's slice with its counterparts', if it carries one."""
        if self._counterparts is not None:
            mine = piece[slices[self._place] : slices[self._place + 1]]
            self._counterparts.run(schedule, mine, reduction=reduction)

    def _hand_out(self, piece: Tensor, slices: Sequence[int], crossed: Work[None], *, sequence: int) -> None:
        crossed.wait()
        if self._group is not None:
            self._group.all_gather(piece, slices, sequence=sequence)


def num_pieces(nbytes: int) -> int:
    """Returns the number of pieces in which a buffer of this size crosses between hosts."""
    return max(1, nbytes // CROSSING_BYTES)
