"""The feed of a worker of parameter servers: the batches of the parts of steps that it has leased."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from ddp.data.loading.fetching import KeyedBatches, Request
from ddp.data.loading.loader_watch import Limits
from ddp.data.orders.sampler import StepPlan, TrainSampler
from ddp.data.samples import Collate


class Leased(Protocol):
    """A lease of `strategies/parameter_server/ledger.py`."""

    @property
    def plan(self) -> Any: ...
    @property
    def part(self) -> int: ...
    @property
    def num_parts(self) -> int: ...


Lease = TypeVar("Lease", bound=Leased)


class LeasedLoader(Generic[Lease]):
    """Yields the batches of leases.

    Args:
        dataset, collate: as in `TrainLoader`.
        sampler: says which samples a part has.
    """

    num_ahead = 3

    def __init__(
        self,
        dataset: Any,
        sampler: TrainSampler,
        *,
        collate: Collate | None = None,
        num_workers: int = 0,
        processes: Mapping[str, Any] = MappingProxyType({}),
        limits: Limits | None = None,
    ) -> None:
        self._batches, self._sampler = KeyedBatches(dataset, collate, packs=False), sampler
        self._leases = deque[Lease]()

    def put(self, leases: Sequence[Lease]) -> None:
        """Takes further leases."""
        self._leases.extend(leases)

    def steps(self) -> Iterator[tuple[Lease, StepPlan, Iterator[Any]]]:
        """Yields each lease, its part of the step, and its batches."""
        seed = self._sampler.state.seed
        while self._leases:
            lease = self._leases.popleft()
            whole = StepPlan(lease.plan.epoch, lease.plan.position, lease.plan.size, ())
            plan = self._sampler.part_of(whole, lease.part, lease.num_parts)
            requests = [Request(seed, plan.epoch, tuple(each.indices), each.indices) for each in plan.micros]
            yield lease, plan, (self._batches[request].batch for request in requests)

    def close(self) -> None:
        """Ends what reads ahead."""
