"""Batches for one rank, in the sampler's order: the same samples at any world size and any number of loader processes.

                      this process                               loader process (any, or this process)
    TrainSampler → StepPlan → micro → (seed, epoch, indices)  →  KeyedBatches: read, collate
                                   ←           batch          ←

Without loader processes a thread reads ahead (`fetching.py`) from data with `may_read_ahead`, if the user has no own
`collate`: others may draw from generators that the thread would share with the forward, or be bound to the thread that
has opened them, as SQLite is. Data in memory do not have the attribute, because a thread that never waits would only
compete with the training for the interpreter lock. On a GPU the training waits for the GPU instead. So there the
thread reads from all data that draw nothing, and copies their batches, and those of loader processes, to the GPU.

A sample that cannot be read ends the run, unless some may be left out: each of these is counted and warned of once.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from ddp.data.loading.fetching import UNREADABLE, Fetched, KeyedBatches, ReadAhead, Request, copies_to
from ddp.data.loading.processes import WatchedLoader
from ddp.data.orders.distributed_sampler import EvaluationSampler
from ddp.data.orders.order import Checksum
from ddp.data.orders.sampler import Micro, StepPlan, TrainSampler
from ddp.data.samples import Collate
from ddp.errors import ConfigError, UnreadableSample
from ddp.process import gpu
from ddp.process.terminal import log
from ddp.units import counted


class TrainLoader:
    """Yields step plans and their batches, to the end of the sampler's epoch.

        for plan, micros in loader.epoch():
            for micro, batch in zip(plan.micros, micros, strict=True):
                ...                         # forward, backward
            sampler.commit(plan)

    Args:
        dataset: map-style, as long as the sampler says.
        sampler: says which samples, in which order and parts; the caller commits its plans.
        collate: makes a batch of samples; None for torch's `default_collate`.
        max_unreadable: most samples that are left out because reading them fails (`UNREADABLE`); one more is an error.
        known_unreadable: samples that a run has left out before it was resumed. They do not count again.
        how: num_workers, device, processes and limits, as in `WatchedLoader`. To a GPU batches are copied ahead
            (`fetching.py`).

    Attributes:
        unreadable: numbers of the samples that this rank has left out, the known ones included.
        num_prefetched: as in `WatchedLoader`.

    Raises:
        ConfigError: the sampler was made for another length.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: TrainSampler,
        *,
        collate: Collate | None = None,
        max_unreadable: int = 0,
        known_unreadable: Iterable[int] = (),
        **how: Any,
    ) -> None:
        if len(dataset) != sampler.order.num_samples:
            raise ConfigError(
                f"the sampler was made for {sampler.order.num_samples} samples, the data set has {len(dataset)}: "
                "make the sampler with len(dataset)"
            )
        self.sampler, self.unreadable = sampler, set(known_unreadable)
        self._max_unreadable, self._num_known = max_unreadable, len(self.unreadable)
        self._repeats = sampler.order.checksum() != Checksum.of_range(len(dataset))
        self._batches = KeyedBatches(dataset, collate, tolerated=UNREADABLE)
        self._watched = watched = WatchedLoader(self._batches, **how)
        self.num_prefetched, self._copies = watched.num_prefetched, copies_to(watched.device)
        self._ahead, has_processes, batches = ReadAhead(), watched.num_workers > 0, self._batches
        self._reads_ahead = batches.may_read_ahead and not has_processes
        if watched.device.type == gpu.KIND:
            self._reads_ahead = has_processes or not batches.draws

    def epoch(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        """Yields each plan from the sampler's state to the end of its epoch, with an iterator over this rank's batches.

        Batches are fetched lazily, one per micro-batch of the plan; batches left unread by a step are skipped. A batch
        is None if none of its samples can be read, but they may be left out. A new call starts again from the sampler's
        state, and earlier iterators must not be used any more.
        """
        # One sequence of plans has two readers: the loader, which runs ahead, and the caller's steps.
        plans, ahead = _two_readers(self.sampler.plans())
        seed = self.sampler.state.seed
        batches = self.stream(request for plan in ahead for request in self.requests_of(plan, seed))
        for plan in plans:
            micros = islice(batches, len(plan.micros))
            yield plan, micros
            for _ in micros:  # after a step that was broken off, plans and batches must stay in line
                pass

    def stream(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Returns an iterator over the batches of requests, which are taken ahead. Earlier ones must not be used."""
        self._ahead.end()  # because data need not support two readers
        return self._readable(self._watched.batches(requests, self._on_time))

    def read(self, plan: StepPlan, micro: Micro) -> Any:
        """Returns a batch of a step once more, outside the stream; None if none of its samples can be read."""
        micros = plan._replace(micros=(micro,))
        [request] = self.requests_of(micros, self.sampler.state.seed)
        return self._ahead.between(lambda: self._batches[request]).batch

    def requests_of(self, plan: StepPlan, seed: int) -> Iterator[Request]:
        """Yields the requests of a step's batches."""
        for micro in plan.micros:
            keys = micro.positions if self._repeats else micro.indices
            yield Request(seed, plan.epoch, tuple(micro.indices), keys)

    def _on_time(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        """Yields batches that are read, and on the device, before they are needed."""
        copies = map(self._copies.begin, fetched)
        return map(self._copies.finish, self._ahead.of(copies) if self._reads_ahead else copies)

    def _readable(self, fetched: Iterator[Fetched]) -> Iterator[Any]:
        """Yields batches, None for one without readable samples, and records the samples left out.

        Raises:
            UnreadableSample: more samples than `max_unreadable` were left out.
        """
        for batch, errors in fetched:
            for sample, why in errors:
                if sample not in self.unreadable:
                    self._leave_out(sample, why)
            yield batch

    def _leave_out(self, sample: int, why: str) -> None:
        self.unreadable.add(sample)
        number = len(self.unreadable) - self._num_known
        if number > self._max_unreadable:
            what = f"{counted(number, 'sample')} cannot be read"
            raise UnreadableSample(f"{what}, max_unreadable={self._max_unreadable}: sample {sample}: {why}")
        log.warning("left out, %d of at most %d: sample %d: %s", number, self._max_unreadable, sample, why)

    def close(self) -> None:
        """Ends the loader processes now; otherwise they end with this object. The loader can be used again."""
        self._ahead.end(wait_s=1.0)
        self._watched.close()


class EvaluationLoader:
    """This rank's batches of an exact evaluation: each sample once over all ranks, in order. It can be read again.

    A batch has samples of one part of the data (`evaluation_parts`), so batches do not depend on the world size.
    Random transforms, if any are left in an evaluation set, draw the same at every pass (seed 0, epoch 0).

    Args:
        dataset, collate, how: as in `TrainLoader`.
        batch_size: samples in a batch; the last one of a part may be smaller.
        rank, world_size: whose parts to read.
        num_shards: parts that the data are cut into; None: one per rank.

    Attributes:
        parts: the number of each batch's part.

    Raises:
        ConfigError: `batch_size` or `num_shards` is below 1.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        num_shards: int | None = None,
        collate: Collate | None = None,
        **how: Any,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"the batch size of an evaluation must be at least 1, got {batch_size}")
        mine = evaluation_parts(len(dataset), rank=rank, world_size=world_size, num_shards=num_shards)
        runs = [
            (part, share[start : start + batch_size])
            for part, share in mine.items()
            for start in range(0, len(share), batch_size)
        ]
        self.parts = [part for part, _ in runs]
        self._all = [Request(0, 0, tuple(run), run) for _, run in runs]
        self._batches, self._how = KeyedBatches(dataset, collate), how

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        watched = WatchedLoader(self._batches, **self._how)
        copies = copies_to(watched.device)
        try:
            for fetched in watched.batches(self._all):
                yield copies.finish(copies.begin(fetched.batch))
        finally:
            watched.close()


def evaluation_parts(
    num_samples: int, *, rank: int, world_size: int, num_shards: int | None = None
) -> dict[int, range]:
    """Returns the samples of each part that a rank evaluates, in order; some parts may be empty, or there may be none.

    Of V parts, part v has samples [v*n//V, (v+1)*n//V), and rank r of W has parts [r*V//W, (r+1)*V//W).

    Args:
        num_shards: V; None: one part per rank.

    Raises:
        ConfigError: `num_shards` is below 1.
    """
    num_parts = world_size if num_shards is None else num_shards
    if num_parts < 1:
        raise ConfigError(
            f"num_shards={num_parts}: an evaluation needs at least one part; raise it to 1 or more, or leave it out: "
            "then each worker has one"
        )
    mine = EvaluationSampler(num_parts, num_replicas=world_size, rank=rank).share
    return {part: EvaluationSampler(num_samples, num_replicas=num_parts, rank=part).share for part in mine}


def num_evaluation_batches(
    num_samples: int, *, batch_size: int, world_size: int, num_shards: int | None = None
) -> list[int]:
    """Returns each rank's number of batches, as `EvaluationLoader` makes them."""
    by_rank = [
        evaluation_parts(num_samples, rank=rank, world_size=world_size, num_shards=num_shards).values()
        for rank in range(world_size)
    ]
    return [sum(math.ceil(len(share) / batch_size) for share in shares) for shares in by_rank]


# ------------------------------------------------------------------------------------------ plans and requests


def _two_readers(plans: Iterator[StepPlan]) -> tuple[Iterator[StepPlan], Iterator[StepPlan]]:
    """Returns two iterators over the same plans for two threads, which `itertools.tee` is not made for."""
    lock, waiting = threading.Lock(), (deque[StepPlan](), deque[StepPlan]())

    def reader(mine: deque[StepPlan]) -> Iterator[StepPlan]:
        while True:
            with lock:
                if not mine and (plan := next(plans, None)) is not None:
                    for each in waiting:
                        each.append(plan)
                if not mine:
                    return
                plan = mine.popleft()
            yield plan

    return reader(waiting[0]), reader(waiting[1])
