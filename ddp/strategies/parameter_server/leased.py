"""The loader of a worker of parameter servers: the batches of the parts of steps that it has leased.

                    this process                                       loader process, or a thread that reads ahead
    put(leases)  →  lease, its part of the step → micro → Request   →  KeyedBatches: read, collate
    steps()      →  lease, part, batches                            ←  batch

What reads ahead asks for one batch after another, and there may be no further lease before those that are held are
computed. Then it gets a request without samples, which is answered at once and thrown away. So nothing waits for a
lease, and as much is read ahead as there are leases.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ddp.data.loading.fetching import Request
from ddp.data.loading.loader import TrainLoader
from ddp.data.orders.sampler import StepPlan, TrainSampler
from ddp.strategies.parameter_server.ledger import Lease

NOTHING = Request(0, 0, (), ())


class _Part:
    """A lease, its part of the step, the requests that were not taken yet, and how many batches are to come."""

    def __init__(self, lease: Lease, plan: StepPlan, requests: deque[Request]) -> None:
        self.lease, self.plan, self.requests, self.num_due = lease, plan, requests, 0


class LeasedLoader:
    """Yields the batches of leases, which the sampler's epochs need not hold in order.

        loader.put(leases)
        for lease, part, batches in loader.steps():
            ...                                 # leave it, if it was taken back; or compute, and put further leases

    Args:
        dataset, sampler, choices: the arguments of a `TrainLoader`, whose order of samples says what a part has.

    Attributes:
        num_ahead: most leases that are worth holding beside the one that is computed.
    """

    def __init__(self, dataset: Any, sampler: TrainSampler, **choices: Any) -> None:
        self._sampler, self._loader = sampler, TrainLoader(dataset, sampler, **choices)
        self.num_ahead = max(3, self._loader.num_prefetched)
        self._lock = threading.Lock()
        self._parts = deque[_Part]()  # in the order of their leases
        self._taken = deque[_Part | None]()  # whose requests were taken; None: without samples
        self._batches: Iterator[Any] | None = None

    def put(self, leases: Sequence[Lease]) -> None:
        """Takes further leases."""
        seed = self._sampler.state.seed
        for lease in leases:
            step = StepPlan(lease.plan.epoch, lease.plan.position, lease.plan.size, ())
            plan = self._sampler.part_of(step, lease.part, lease.num_parts)
            with self._lock:
                self._parts.append(_Part(lease, plan, deque(self._loader.requests_of(plan, seed))))

    def steps(self) -> Iterator[tuple[Lease, StepPlan, Iterator[Any]]]:
        """Yields each lease, its part of the step, and its batches, until none is left; what is not read is skipped."""
        while self._parts:
            part = self._parts[0]
            batches = self._of(part)
            yield part.lease, part.plan, batches
            with self._lock:
                part.requests.clear()
                self._parts.popleft()
            for _ in batches:  # those that were read ahead, so that leases and batches stay in line
                pass

    @property
    def following(self) -> Lease | None:
        """Returns the lease after the one that was yielded last; None if none was put."""
        return self._parts[1].lease if len(self._parts) > 1 else None

    def _of(self, part: _Part) -> Iterator[Any]:
        """Yields the batches of the first lease."""
        while part.num_due or part.requests:
            if self._batches is None:
                self._batches = self._loader.stream(iter(self._request, None))
            batch = next(self._batches)
            if (owner := self._taken.popleft()) is not None:
                assert owner is part
                part.num_due -= 1
                yield batch

    def _request(self) -> Request:
        """Returns the next request, in whichever thread takes it."""
        with self._lock:
            part = next((part for part in self._parts if part.requests), None)
            self._taken.append(part)
            if part is None:
                return NOTHING
            part.num_due += 1
            return part.requests.popleft()

    def close(self) -> None:
        """Drops all leases, and ends what reads ahead. The loader can be used again."""
        self._loader.close()
        self._parts.clear()
        self._taken.clear()
        self._batches = None
