"""Says what a profiled step becomes on the ranks that are asked about: what each computes, and how its buckets travel.

    Setup    ranks, hosts, batch, strategy, wire format and cores
    Step     what a rank computes there, and of each bucket when it is ready and what its reduction takes: replay.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ddp.comm.flat_collectives import IN_MEMORY
from ddp.comm.wire_format import wire_format
from ddp.lab.forecast.prices import BARRIER, SMALL, Call, Dispatch, Prices
from ddp.lab.forecast.work import Work, bytes_of
from ddp.setting import Narrow

Strategy = Literal["replicated", "sharded", "central_storage"]
STRATEGIES: Mapping[str, Strategy] = {
    "Replicated": "replicated",
    "Sharded": "sharded",
    "CentralStorage": "central_storage",
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The ranks that are asked about, and what a step is there.

    Attributes:
        prices: of collectives there.
        batch: samples of a step, of all ranks.
        wire: the format in which gradients travel between hosts.
        cores: usable, of each host; threads: of a rank.
        in_background: None: as a run decides it (`comm/plan.py`, `Plan.overlaps`).
    """

    prices: Prices
    batch: float
    strategy: Strategy = "replicated"
    wire: Narrow | None = None
    cores: int = 1
    threads: int = 1
    in_background: bool | None = None

    @property
    def num_ranks(self) -> int:
        return self.prices.num_ranks

    @property
    def per_host(self) -> int:
        """The ranks of the largest host."""
        return max(map(len, self.prices.hosts))

    @property
    def share(self) -> int:
        """The samples of the rank that has the most, for which the others wait. Shares differ by one at most."""
        return math.ceil(self.batch / self.num_ranks)

    @property
    def has_spare_cores(self) -> bool:
        """Returns True if communication threads have cores of their own."""
        return self.cores >= self.per_host * (self.threads + 1)

    @property
    def overlaps(self) -> bool:
        """Returns True if buckets are reduced in the background of backward."""
        if self.in_background is not None:
            return self.in_background
        return self.num_ranks > 1 and (IN_MEMORY not in self.prices.routes or self.has_spare_cores)

    def dispatches(self, work: Work) -> list[Dispatch]:
        """Returns how buckets travel without a hook."""
        return [Dispatch(0.0, self._calls(bytes_of(bucket))) for bucket in work.buckets]

    def _calls(self, nbytes: int) -> tuple[Call, ...]:
        sent = nbytes if self.wire is None else wire_format(self.wire).bytes_of(nbytes // 4)
        if self.strategy == "replicated":
            return (Call("all_reduce", nbytes, 2 * sent, self.wire),)
        calls = (Call("reduce_scatter", nbytes, sent, self.wire),)
        return (*calls, Call("gather_across", nbytes, nbytes)) if self.strategy == "central_storage" else calls


class Timed(NamedTuple):
    """A bucket of the replay: when it is ready, and the seconds of its reduction; those of them that compute."""

    ready_s: float
    seconds: float
    computing_s: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of all ranks, as the replay runs it.

    Attributes:
        before_s, backward_s, update_s, other_s: what a rank computes.
        buckets: in the order of launch.
        opening_s, closing_s, gathering_s: what collectives take that all ranks wait for, before backward, after it, and
            after the update.
        in_background: of backward.
        shares_cores: communication takes time from backward (note "cores").
    """

    before_s: float
    backward_s: float
    update_s: float
    other_s: float
    buckets: tuple[Timed, ...]
    opening_s: float = 0.0
    closing_s: float = 0.0
    gathering_s: float = 0.0
    in_background: bool = False
    shares_cores: bool = False


def step_of(work: Work, setup: Setup, dispatches: Sequence[Dispatch]) -> Step:
    """Returns the step that a rank's work becomes on these ranks.

    Args:
        dispatches: by bucket.
    """
    price, sharded = setup.prices.of, setup.strategy != "replicated"
    # Loss, count and verdicts ride along in wide buckets (`gradients/layout.py`), or else travel by themselves.
    dtypes = {bucket[0].dtype for bucket in (work.buckets[0], work.buckets[-1])}
    has_hook = any(dispatch.encoding_s for dispatch in dispatches)
    rides = not sharded and not has_hook and setup.wire is None and dtypes <= {torch.float32, torch.float64}
    closing: list[Call] = [] if rides else [SMALL]
    gathering, slices = list[Call](), 1
    if setup.strategy == "sharded":
        closing, slices = [SMALL, SMALL], setup.num_ranks  # the second one, for norms
        gathering = [Call("all_gather", nbytes, nbytes) for nbytes in map(bytes_of, work.buckets)]
    elif setup.strategy == "central_storage":
        closing, gathering, slices = [SMALL, BARRIER], [BARRIER], setup.per_host
    timed = []
    for bucket, dispatch in zip(work.buckets, dispatches, strict=True):
        taken_s = setup.prices.taken_s * leaving(dispatch.calls, len(setup.prices.hosts))
        seconds = dispatch.encoding_s + sum(map(price, dispatch.calls))
        timed.append(Timed(bucket[-1].ready_s, seconds, min(seconds, dispatch.encoding_s + taken_s)))
    return Step(
        before_s=work.before_s,
        backward_s=work.backward_s,
        update_s=work.update_s / slices,
        other_s=work.other_s,
        buckets=tuple(timed) if setup.num_ranks > 1 else (),
        opening_s=0.0 if rides else price(SMALL),
        closing_s=sum(map(price, closing)),
        gathering_s=sum(map(price, gathering)),
        in_background=setup.overlaps,
        shares_cores=not setup.has_spare_cores,
    )


def leaving(calls: Sequence[Call], num_hosts: int) -> float:
    """Returns the bytes that leave a host, by the algorithms that send the least."""
    return sum(call.crossing for call in calls) * (num_hosts - 1) / num_hosts
