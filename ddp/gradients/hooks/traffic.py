"""Traffic: what gradients send with a hook or a wire format, and what that costs, predicted without training.

    dry run       the hook encodes and decodes random gradients, while a stand-in for the communicator sends nothing,
                  and takes notes of every collective. Its time is that of encoding
    prediction    what those collectives take on the links as they were measured (`comm/plan.py`)
    a step        bucket by bucket: each is encoded and sent once it is ready and the one before has arrived

So a hook of anyone's can be predicted, without a formula of its own. Bytes are those of the algorithms that send the
least: with h hosts, 2 (h − 1) ÷ h of what is reduced leave each host, and (h − 1) ÷ h of what is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp import gpu
from ddp.comm.communicator import Communicator
from ddp.comm.plan import Predicted
from ddp.comm.wire_format import widened, wire_format
from ddp.comm.work import Work, done
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.hooks.compression import Compression
from ddp.gradients.hooks.hook import Hook
from ddp.process.clock import now_s
from ddp.setting import Narrow, WireName

LATE = 1 << 30  # steps after which warm-ups are over
FORWARD = 1 / 3  # of the computing time; backward, twice as long, makes the gradients


class Cost(NamedTuple):
    """The cost of one bucket.

    Attributes:
        nbytes: of its gradients.
        link_bytes: what leaves a host.
        encoding_s: of a rank, for encoding and decoding outside of collectives.
        network_s: of its collectives.
    """

    nbytes: int
    link_bytes: float
    encoding_s: float
    network_s: float


@dataclass(frozen=True)
class Traffic:
    """The costs of a step's buckets, in the order in which they are ready."""

    buckets: Sequence[Cost]

    @property
    def link_bytes(self) -> float:
        """Bytes that leave a host in a step."""
        return sum(cost.link_bytes for cost in self.buckets)

    @property
    def encoding_s(self) -> float:
        """Seconds of a rank for encoding and decoding in a step."""
        return sum(cost.encoding_s for cost in self.buckets)

    @property
    def network_s(self) -> float:
        """Seconds of a step's collectives."""
        return sum(cost.network_s for cost in self.buckets)

    def step_s(self, compute_s: float) -> float:
        """Returns the seconds until all gradients have arrived, on cores that have to encode, too.

        Args:
            compute_s: of a forward and backward.
        """
        backward_s, all_bytes = (1 - FORWARD) * compute_s, sum(cost.nbytes for cost in self.buckets)
        made = encoded_s = end_s = 0.0
        for cost in self.buckets:
            made += cost.nbytes
            ready_s = compute_s - backward_s * (1 - made / all_bytes) + encoded_s
            encoded_s += cost.encoding_s
            end_s = max(end_s, ready_s) + cost.encoding_s + cost.network_s
        return max(end_s, compute_s + encoded_s)


def predicted(
    comm: Communicator,
    buckets: Iterable[Sequence[nn.Parameter]],
    *,
    hook: Hook | None = None,
    wire: WireName | None = None,
) -> Traffic:
    """Returns the costs of a step's gradients. Collective; the same on all ranks, but for the time of encoding.

    Args:
        buckets: the parameters of each bucket, of one type, in the order in which buckets are ready. Shapes count.
        hook, wire: as in `ddp.fit`.
    """
    known: dict[Any, Cost] = {}
    costs = []
    for parameters in buckets:
        alike = tuple((parameter.shape, parameter.stride(), parameter.dtype) for parameter in parameters)
        if alike not in known:
            known[alike] = _cost(comm, parameters, hook, wire)
        costs.append(known[alike])
    return Traffic(costs)


def _cost(comm: Communicator, parameters: Sequence[nn.Parameter], hook: Hook | None, wire: WireName | None) -> Cost:
    slots = [Slot(index, f"{index}", parameter) for index, parameter in enumerate(parameters)]
    bucket = Bucket(0, slots)
    bucket.allocate(parameters[0].new_zeros(bucket.numel))
    dry_run, encoding_s = DryRun(comm), 0.0
    if hook is None:
        dry_run.all_reduce(bucket.flat, wire=wire)
    else:
        compression = Compression(hook, comm, [(slot.name, slot.parameter) for slot in slots])
        compression.comm = dry_run  # type: ignore[assignment]
        for _ in range(3):  # the first ones make room for what the hook keeps, and for that of the step before
            encoding_s = dry_run.encoding_s(compression, bucket)
    num_hosts, link_bytes, network_s = comm.host_partition.num_hosts, 0.0, 0.0
    for note in dry_run.notes:
        network_s += comm.plan.predict(note.nbytes, operation=note.operation, wire=note.wire)
        link_bytes += note.crossing * (num_hosts - 1) / num_hosts
    return Cost(bucket.flat.nbytes, link_bytes, encoding_s, network_s)


class Note(NamedTuple):
    """A collective that a hook has called.

    Attributes:
        crossing: its bytes as they travel, once for each time that they cross from host to host.
    """

    operation: Predicted
    nbytes: int
    crossing: int = 0
    wire: Narrow | None = None


class DryRun:
    """Stands for a communicator, sends nothing, and notes what was to be sent."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.world_size, self.device = comm.rank, comm.world_size, comm.device
        self.slices, self.host_partition = comm.slices, comm.host_partition
        self.notes: list[Note] = []
        self._draws = torch.Generator(device=comm.device).manual_seed(0)
        self._aside_s = 0.0

    def encoding_s(self, compression: Compression, bucket: Bucket) -> float:
        """Returns the seconds in which a hook encodes and decodes a bucket, whose collectives it notes."""
        bucket.flat.normal_(generator=self._draws)
        self.notes.clear()
        compression.begin()
        compression.num_steps = LATE
        self._aside_s, start_s = 0.0, self._now_s()
        compression.reduce(bucket, divide_by=1, async_op=False, label="")
        return self._now_s() - start_s - self._aside_s

    def chain(self, function: Any, **how: Any) -> None:
        function()

    def sum_in_host(self, flat: Tensor, **how: Any) -> None:
        self.notes.append(Note("sum_in_host", flat.nbytes))

    def all_reduce(self, flat: Tensor, *, wire: WireName | None = None, **how: Any) -> None:
        wide, narrow = widened(flat, wire)
        crossing = wide.nbytes if narrow is None else wire_format(narrow).bytes_of(wide.numel())
        self.notes.append(Note("all_reduce", wide.nbytes, 2 * crossing, narrow))

    def all_gather_(self, flat: Tensor, bounds: Sequence[int], **how: Any) -> Work:
        """Gives itself in the place of all others what it has to send, so that there is as much to decode."""
        start_s, number = self._now_s(), self.slices[self.rank]
        mine = flat[bounds[number] : bounds[number + 1]].clone()
        for start, stop in pairwise(bounds):
            there = flat[start:stop][: len(mine)]
            there.copy_(mine[: len(there)])
        self.notes.append(Note("all_gather", flat.nbytes, flat.nbytes))
        self._aside_s += self._now_s() - start_s
        return done(flat)

    def _now_s(self) -> float:
        if self.device.type == gpu.KIND:
            gpu.cuda.synchronize(self.device)
        return now_s()
