"""Measures on this machine how long a hook takes to encode gradients, for forecasts. Nothing is sent.

The hook encodes and decodes random gradients of the shapes that the profiled run has, while a stand-in for the
communicator records every collective. So no hook needs its own formula. `forecast --hook` takes those in
`HOOKS`; another one is an argument of `dispatches`.

Bytes are those of the algorithms that send the least: with h hosts, 2 (h − 1) ÷ h of the reduced bytes leave each host,
and (h − 1) ÷ h of the gathered ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ddp.collectives.placed import Hosts
from ddp.comm.call_queue import Work, done
from ddp.comm.flat_collectives import HostPartition
from ddp.comm.plan import timed
from ddp.comm.reduction import WireFormat, widened, wire_format
from ddp.errors import ConfigError
from ddp.gradients import ErrorFeedback, PowerSGD, RandomK, Sign, TopK
from ddp.gradients.bucket import Bucket, Slot
from ddp.gradients.compression import Compression
from ddp.gradients.hook import Hook
from ddp.lab.forecast.prices import Call, Dispatch
from ddp.lab.forecast.work import Gradient, bytes_of
from ddp.process.clock import now_s
from ddp.process.memory import available_bytes
from ddp.setting import Narrow, WireName

LATE = 1 << 30  # steps after which warm-ups are over
NUM_REPETITIONS = 3
ADDED_BYTES = 4 << 20
COPIES = 5  # of a bucket: its parameters, the bucket, the hook's state and message
CPU = torch.device("cpu")

WIRES: tuple[Narrow, ...] = ("bf16", "fp16", "int8", "int8_stochastic")
HOOKS: Mapping[str, Hook] = {
    "sign": ErrorFeedback(Sign()),
    "top_k": ErrorFeedback(TopK()),
    "random_k": ErrorFeedback(RandomK()),
    "powersgd": ErrorFeedback(PowerSGD()),
    "powersgd1": ErrorFeedback(PowerSGD(1)),
}
"""The hooks that a forecast knows; powersgd1 is hook=powersgd hook.rank=1."""


def adding_s() -> dict[Narrow, float]:
    """Returns, by wire format, seconds for each byte that travels: to encode numbers, and to decode and add them."""
    return {wire: _adding_s(wire_format(wire)) for wire in WIRES}


def _adding_s(form: WireFormat) -> float:
    numbers = torch.ones(ADDED_BYTES // 4)
    encoded = torch.zeros(form.length(len(numbers)), dtype=form.dtype)

    def hop() -> None:
        form.encode(numbers, encoded)
        form.add(encoded, numbers)

    return median(timed({"hop": hop}, device=CPU)["hop"]) / encoded.nbytes


def dispatches(
    buckets: Sequence[Sequence[Gradient]], hook: Hook, hosts: Hosts, *, shares_memory: bool
) -> list[Dispatch]:
    """Returns how buckets travel with a hook: the encoding and the messages of rank 0 of these hosts.

    Args:
        shares_memory: the ranks of a host add up in its memory first.

    Raises:
        ConfigError: they need more memory than is free.
    """
    if COPIES * (most := max(map(bytes_of, buckets))) >= available_bytes():
        size = f"{most / 1e9:,.3g} GB"
        raise ConfigError(f"--hook: to try it on a bucket of {size} here takes more memory than is free; leave it out")
    known: dict[Any, Dispatch] = {}
    found = []
    for bucket in buckets:
        layout = tuple((gradient.shape, gradient.dtype) for gradient in bucket)
        if layout not in known:
            known[layout] = _dispatch(bucket, hook, hosts, shares_memory=shares_memory)
        found.append(known[layout])
    return found


def _dispatch(gradients: Sequence[Gradient], hook: Hook, hosts: Hosts, *, shares_memory: bool) -> Dispatch:
    slots = [
        Slot(index, f"{index}", nn.Parameter(torch.zeros(each.shape, dtype=each.dtype)))
        for index, each in enumerate(gradients)
    ]
    bucket, dry_run = Bucket(0, slots), DryRun(hosts, shares_memory=shares_memory)
    bucket.allocate(torch.zeros(bucket.numel, dtype=gradients[0].dtype))
    compression = Compression(hook, dry_run, [(slot.name, slot.parameter) for slot in slots])  # type: ignore[arg-type]
    for _ in range(2):  # the first ones allocate the hook's state, and that of the step before
        dry_run.encoding_s(compression, bucket)
    encoding_s = median(dry_run.encoding_s(compression, bucket) for _ in range(NUM_REPETITIONS))
    return Dispatch(encoding_s, tuple(dry_run.calls))


class DryRun:
    """A stand-in for the communicator of rank 0: sends nothing, and records each message."""

    def __init__(self, hosts: Hosts, *, shares_memory: bool) -> None:
        self.rank, self.world_size, self.device = 0, sum(map(len, hosts)), CPU
        self.slices = list(range(self.world_size))
        if not shares_memory:
            hosts = tuple((rank,) for rank in self.slices)
        seats = {rank: (host, place) for host, ranks in enumerate(hosts) for place, rank in enumerate(ranks)}
        numbers, places = zip(*(seats[rank] for rank in self.slices), strict=True)
        self.host_partition = HostPartition(numbers, places, min(map(len, hosts)))
        self.calls: list[Call] = []
        self._draws = torch.Generator(device=CPU).manual_seed(0)
        self._aside_s = 0.0

    def encoding_s(self, compression: Compression, bucket: Bucket) -> float:
        """Returns the seconds in which a hook encodes and decodes a bucket, whose collectives it records."""
        bucket.flat.normal_(generator=self._draws)
        self.calls.clear()
        compression.begin()
        compression.num_steps = LATE
        self._aside_s, start_s = 0.0, now_s()
        compression.reduce(bucket, divide_by=1, async_op=False, label="")
        return now_s() - start_s - self._aside_s

    def chain(self, function: Any, **how: Any) -> None:
        function()

    def sum_in_host(self, flat: Tensor, **how: Any) -> None:
        self.calls.append(Call("sum_in_host", flat.nbytes))

    def all_reduce(self, flat: Tensor, *, wire: WireName | None = None, **how: Any) -> None:
        wide, narrow = widened(flat, wire)
        crossing = wide.nbytes if narrow is None else wire_format(narrow).bytes_of(wide.numel())
        self.calls.append(Call("all_reduce", wide.nbytes, 2 * crossing, narrow))

    def all_gather_(self, flat: Tensor, bounds: Sequence[int], **how: Any) -> Work:
        """Returns its own message in the place of all others', so that there is as much to decode."""
        start_s, number = now_s(), self.slices[self.rank]
        mine = flat[bounds[number] : bounds[number + 1]].clone()
        for start, stop in pairwise(bounds):
            there = flat[start:stop][: len(mine)]
            there.copy_(mine[: len(there)])
        self.calls.append(Call("all_gather", flat.nbytes, flat.nbytes))
        self._aside_s += now_s() - start_s
        return done(flat)
