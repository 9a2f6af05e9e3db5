"""Batches for one rank, in the sampler's order: the same samples at any world size and any number of loader workers.

                      this process                                    loader worker (any, or this process)
    TrainSampler -> StepPlan -> micro -> (seed, epoch, indices)  ->  for each index: seed by (seed, epoch, index), fetch
                                      <-        batch           <-  collate

The key of the random numbers travels with the indices. So a transform (torchvision's draw from the process's
generators) gives a sample the same crop in whichever process fetches it, while no two samples of an epoch share one.
The generators are restored after each batch: loading leaves no trace in the randomness of the rest of the program.

A data set in memory may derive from `WholeBatches`; its `batch` is then called once for each micro-batch, unless the
samples are to be collated in another way.

A sample that cannot be read ends the run, unless some may be left out: these are counted and warned of.

torch's DataLoader does the work of processes, prefetching and pinning. Its workers compute with one thread each.

Read before: `prefetch.py`. Read next: `splits.py`.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from ddp.data.prefetch import ReadAhead
from ddp.data.sampler import EvaluationSampler, StepPlan, TrainSampler
from ddp.data.streams import augmentation_stream, generator_states, preserved
from ddp.errors import ConfigError, UnreadableSample
from ddp.log import log
from ddp.wording import counted

Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples, as the `collate_fn` of torch's DataLoader."""


class WholeBatches(ABC):
    """A data set that can hand out a collated batch at once, faster than sample by sample."""

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Any:
        """Returns the samples at `indices` as `default_collate` would collate them. It must not be random."""


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
        num_workers: loader processes; they stay from epoch to epoch. 0 loads in this process.
        pin_memory: batches in page-locked memory; ignored where there is no accelerator to copy to.
        max_unreadable: most samples that are left out because reading them fails (`UNREADABLE`); one more is an error.

    Attributes:
        num_unreadable: samples that this rank has left out.

    Raises:
        ConfigError: the sampler was made for another length.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: TrainSampler,
        *,
        collate: Collate | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        max_unreadable: int = 0,
    ) -> None:
        if len(dataset) != sampler.order.num_samples:
            raise ConfigError(
                f"the sampler was made for {sampler.order.num_samples} samples, the data set has {len(dataset)}: "
                "make the sampler with len(dataset)"
            )
        self.sampler, self.num_unreadable = sampler, 0
        self._max_unreadable = max_unreadable
        self._requests = _Requests()
        self._guarded = _Guarded(dataset, collate)
        self._ahead = ReadAhead(self._may_read_ahead)
        self._loader = _data_loader(
            self._guarded,
            self._requests,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent=True,
        )

    def epoch(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        """Yields each plan from the sampler's state to the end of its epoch, with an iterator over this rank's batches.

        Batches are fetched lazily, one per micro-batch of the plan; what a step leaves unread is skipped. A batch is
        None if none of its samples can be read, but they may be left out. A new call starts again from the sampler's
        state, and earlier iterators must not be used any more.
        """
        # One sequence of plans has two readers: the loader, which runs ahead, and the caller's steps.
        plans, ahead = _two_readers(self.sampler.plans())
        seed = self.sampler.state.seed
        self._requests.source = (
            _Request(seed, plan.epoch, tuple(micro.indices)) for plan in ahead for micro in plan.micros
        )
        fetched = iter(self._loader)
        batches = self._readable(fetched if self._loader.num_workers else self._ahead.of(fetched))
        for plan in plans:
            micros = islice(batches, len(plan.micros))
            yield plan, micros
            for _ in micros:  # after a step that was broken off, plans and batches must stay in line
                pass

    def _may_read_ahead(self) -> bool:
        """Returns True if batches may be fetched in a thread, because nothing is drawn at random for them."""
        self._guarded.is_random = self._guarded.draws_for(self._requests.last)
        if self._guarded.is_random:
            log.info("samples are drawn at random, so no thread reads ahead; loader_workers=1 takes a process for it")
        return not self._guarded.is_random

    def _readable(self, fetched: Iterator[_Fetched]) -> Iterator[Any]:
        """Yields batches, None for one of which nothing is left, and counts what was left out.

        Raises:
            UnreadableSample: that was too much.
        """
        for batch, errors in fetched:
            self.num_unreadable += len(errors)
            if errors and self.num_unreadable > self._max_unreadable:
                what = f"{counted(self.num_unreadable, 'sample')} cannot be read"
                raise UnreadableSample(f"{what}, max_unreadable={self._max_unreadable}: {errors[-1]}")
            for error in errors:
                log.warning("left out, %d of at most %d: %s", self.num_unreadable, self._max_unreadable, error)
            yield batch

    def ended(self, num_ending: int) -> None:
        """Does nothing: data with a length end where the sampler says."""

    def close(self) -> None:
        """Ends the loader processes now; otherwise they end with this object. The loader can be used again."""
        iterator: Any = self._loader._iterator  # DataLoader has no public way to end persistent workers
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


def evaluation_loader(
    dataset: Any,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    collate: Collate | None = None,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """Returns this rank's batches of an exact evaluation: each sample once over all ranks, in order.

    Random transforms, if any are left in an evaluation set, draw the same at every pass (seed 0, epoch 0).

    Args:
        dataset, collate, num_workers: as in `TrainLoader`.
        batch_size: samples in a batch; the last one may be smaller.
        rank, world_size: whose share to read.

    Raises:
        ConfigError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"the batch size of an evaluation must be at least 1, got {batch_size}")
    share = EvaluationSampler(dataset, num_replicas=world_size, rank=rank).share
    runs = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
    requests = [_Request(0, 0, tuple(run)) for run in runs]
    return _data_loader(_Keyed(dataset, collate), requests, num_workers=num_workers, pin_memory=False, persistent=False)


# ------------------------------------------------------------------------------------------- on DataLoader's side


class _Request(NamedTuple):
    """A batch to fetch. It is complete, so that loader processes hold no state."""

    seed: int
    epoch: int
    indices: tuple[int, ...]


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


class _Requests:
    """DataLoader's `batch_sampler`: one object, because its workers persist, whose content `epoch()` replaces."""

    def __init__(self) -> None:
        self.source: Iterable[_Request] = ()
        self.last = _Request(0, 0, ())

    def __iter__(self) -> Iterator[_Request]:
        for request in self.source:  # lazily, because DataLoader makes one iterator more than it uses
            self.last = request
            yield request


_NUM_TRIED = 4  # samples that show whether they are drawn at random

UNREADABLE = (UnreadableSample, OSError)
"""Errors of a data set that mean that one sample cannot be read."""


class _Fetched(NamedTuple):
    """A batch, or None, without the samples that could not be read, and why, for each of those."""

    batch: Any
    errors: list[str]


class _Keyed(Dataset[Any]):
    """The data set as DataLoader sees it: it takes requests instead of indices."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate or default_collate
        self.at_once = isinstance(dataset, WholeBatches) and collate is None

    def finish(self, fetched: Any) -> Any:
        """Makes a batch of what `__getitems__` has returned: DataLoader's `collate_fn`."""
        return fetched if self.at_once else self.collate(fetched)

    def __getitems__(self, request: _Request) -> Any:
        """Returns a finished batch (`at_once`), or the list of samples to collate."""
        if self.at_once:
            return self.dataset.batch(request.indices)
        with preserved():
            return [self._fetch(request, index) for index in request.indices]

    def _fetch(self, request: _Request, index: int) -> Any:
        augmentation_stream(request.seed, request.epoch, index)
        return self.dataset[index]


class _Guarded(_Keyed):
    """Does the same, and reports which samples cannot be read instead of failing.

    Attributes:
        is_random: samples are drawn from the process's generators, which are seeded for each and restored.
    """

    is_random = True

    def __getitems__(self, request: _Request) -> _Fetched:
        """Returns a finished batch."""
        if self.at_once:
            with suppress(*UNREADABLE):  # else sample by sample, to find out which it is
                return _Fetched(self.dataset.batch(request.indices), [])
        samples, errors = [], []
        with preserved() if self.is_random else nullcontext():
            for index in request.indices:
                try:
                    samples.append(self._fetch(request, index) if self.is_random else self.dataset[index])
                except UNREADABLE as error:
                    errors.append(f"sample {index}: {' '.join(str(error).split())}")
        return _Fetched(self.collate(samples) if samples else None, errors)

    def finish(self, fetched: _Fetched) -> _Fetched:
        """Returns it as it is."""
        return fetched

    def draws_for(self, request: _Request) -> bool:
        """Returns True if fetching and collating the first samples of a batch draws from the process's generators."""
        if self.at_once:  # must not be random
            return False
        with preserved():
            before = generator_states()
            with suppress(*UNREADABLE):
                self.collate([self.dataset[index] for index in request.indices[:_NUM_TRIED]])
            return generator_states() != before


def _data_loader(
    keyed: _Keyed, requests: Iterable[Any], *, num_workers: int, pin_memory: bool, persistent: bool
) -> DataLoader[Any]:
    return DataLoader(
        keyed,
        batch_sampler=requests,
        collate_fn=keyed.finish,
        num_workers=num_workers,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        persistent_workers=persistent and num_workers > 0,
        worker_init_fn=leave_signals_to_the_trainer,
        generator=torch.Generator(),  # otherwise each pass would draw its workers' seeds from the program's generator
    )


def leave_signals_to_the_trainer(_worker: int) -> None:
    """Leaves the trainer's process group, which a launcher signals as a whole; the trainer ends its loaders itself."""
    os.setpgid(0, 0)
