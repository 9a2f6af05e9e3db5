"""Batches for one rank, in the sampler's order: the same samples at any world size and any number of loader workers.

                      this process                                    loader worker (any, or this process)
    TrainSampler -> StepPlan -> micro -> (seed, epoch, indices)  ->  for each index: seed by (seed, epoch, index), fetch
                                      <-        batch           <-  seed by (seed, epoch, first index), collate

The key of the random numbers travels with the indices. So a transform (torchvision's draw from the process's
generators) gives a sample the same crop in whichever process fetches it, while no two samples of an epoch share one.
Where an epoch has a sample several times, positions take the place of indices in the keys. The generators are restored
after each batch: loading leaves no trace in the randomness of the rest of the program.

Seeding takes 12 us, more than reading a small sample. Data that draw nothing are spared it, if they say so by a true
attribute `may_read_ahead`; lists, TensorDatasets and `WholeBatches` need not. Others cannot be found out, because a
sample may read a generator and leave no trace there, as with `torch.initial_seed()` or `fork_rng()`.

`WholeBatches` hand out a micro-batch at once, unless the samples are to be collated in another way.

Without loader processes a thread reads ahead (`read_ahead.py`) from data with `may_read_ahead`, and without a `collate`
of the user's own: others may draw from generators that the thread would share with the forward beside it, or be bound
to the thread that has opened them, as SQLite is. Data in memory do not say so, because a thread that never waits would
only take turns with the training, for the interpreter lock. On a GPU the training waits for the GPU instead. So there
the thread reads from all data that draw nothing, and copies their batches, and those of loader processes, to the GPU.

A sample that cannot be read ends the run, unless some may be left out: each of these is counted and warned of once.

torch's DataLoader does the work of processes, prefetching and pinning. Its workers compute with one thread each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from ddp.data.loading.device_copies import DeviceCopies
from ddp.data.loading.loader_watch import Limits, LoaderWatch, follow_the_trainer
from ddp.data.loading.own_generators import OwnGenerators
from ddp.data.loading.read_ahead import ReadAhead
from ddp.data.loading.sending import make_room_for_sockets, packed
from ddp.data.orders.order import Checksum
from ddp.data.orders.sampler import EvaluationSampler, StepPlan, TrainSampler
from ddp.data.samples import Collate, WholeBatches
from ddp.errors import ConfigError, UnreadableSample
from ddp.process.log import log
from ddp.streams import augmentation_stream, collation_stream, preserved
from ddp.units import counted

CPU = torch.device("cpu")
NO_LIMITS = Limits()


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
        device: where batches are needed. To a GPU they are copied ahead (`device_copies.py`); else this process's.
        max_unreadable: most samples that are left out because reading them fails (`UNREADABLE`); one more is an error.
        known_unreadable: samples that a run has left out before it was resumed. They do not count again.
        processes: the user's worker_init_fn, multiprocessing_context and prefetch_factor, as far as given.
        limits: how long loader processes are waited for.

    Attributes:
        unreadable: numbers of the samples that this rank has left out, the known ones included.

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
        device: torch.device = CPU,
        max_unreadable: int = 0,
        known_unreadable: Iterable[int] = (),
        processes: Mapping[str, Any] = MappingProxyType({}),
        limits: Limits = NO_LIMITS,
    ) -> None:
        if len(dataset) != sampler.order.num_samples:
            raise ConfigError(
                f"the sampler was made for {sampler.order.num_samples} samples, the data set has {len(dataset)}: "
                "make the sampler with len(dataset)"
            )
        self.sampler, self.unreadable = sampler, set(known_unreadable)
        self._max_unreadable, self._num_known = max_unreadable, len(self.unreadable)
        self._repeats = sampler.order.checksum() != Checksum.of_range(len(dataset))
        self._requests = _Requests()
        self._keyed = _Keyed(dataset, collate, tolerated=UNREADABLE, packs=num_workers > 0)
        self._copies = DeviceCopies(device) if device.type == "cuda" else None
        self._ahead = ReadAhead()
        self._loader = _data_loader(
            self._keyed,
            self._requests,
            num_workers=num_workers,
            pin_memory=self._copies is not None,
            persistent=True,
            processes=processes,
        )
        self._watch = LoaderWatch(self._loader, limits)
        self._requests.asked = self._watch.asked if num_workers else None

    def epoch(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        """Yields each plan from the sampler's state to the end of its epoch, with an iterator over this rank's batches.

        Batches are fetched lazily, one per micro-batch of the plan; what a step leaves unread is skipped. A batch is
        None if none of its samples can be read, but they may be left out. A new call starts again from the sampler's
        state, and earlier iterators must not be used any more.
        """
        self._ahead.end()  # because data need not bear two readers
        # One sequence of plans has two readers: the loader, which runs ahead, and the caller's steps.
        plans, ahead = _two_readers(self.sampler.plans())
        seed = self.sampler.state.seed
        self._requests.source = (request for plan in ahead for request in self._requests_of(plan, seed))
        batches = self._readable(self._watch.explained(self._on_time(self._watch.batches())))
        for plan in plans:
            micros = islice(batches, len(plan.micros))
            yield plan, micros
            for _ in micros:  # after a step that was broken off, plans and batches must stay in line
                pass

    def _requests_of(self, plan: StepPlan, seed: int) -> Iterator[_Request]:
        """Yields what is to be fetched for a step."""
        places = self.sampler.parts(range(plan.position, plan.position + plan.size)) if self._repeats else plan.micros
        for micro, place in zip(plan.micros, places, strict=True):
            yield _Request(seed, plan.epoch, tuple(micro.indices), place.indices)

    def _on_time(self, fetched: Iterator[_Fetched]) -> Iterator[_Fetched]:
        """Yields batches that are read, and on the device, before they are needed."""
        if self._copies is not None:
            copies = map(self._copies.begin, fetched)
            may_copy = self._loader.num_workers > 0 or not self._keyed.draws
            return map(self._copies.finish, self._ahead.of(copies) if may_copy else copies)
        return self._ahead.of(fetched) if self._keyed.may_read_ahead and not self._loader.num_workers else fetched

    def _readable(self, fetched: Iterator[_Fetched]) -> Iterator[Any]:
        """Yields batches, None for one of which nothing is left, and notes what was left out.

        Raises:
            UnreadableSample: that was too much.
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

    def ended(self, num_ending: int) -> None:
        """Does nothing: data with a length end where the sampler says."""

    def close(self) -> None:
        """Ends the loader processes now; otherwise they end with this object. The loader can be used again."""
        self._ahead.end(wait_s=1.0)
        self._watch.close()


class EvaluationLoader:
    """This rank's batches of an exact evaluation: each sample once over all ranks, in order. It can be read again.

    Random transforms, if any are left in an evaluation set, draw the same at every pass (seed 0, epoch 0).

    Args:
        dataset, collate, num_workers, processes, limits: as in `TrainLoader`.
        batch_size: samples in a batch; the last one may be smaller.
        rank, world_size: whose share to read.

    Raises:
        ConfigError: `batch_size` is below 1.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        collate: Collate | None = None,
        num_workers: int = 0,
        processes: Mapping[str, Any] = MappingProxyType({}),
        limits: Limits = NO_LIMITS,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"the batch size of an evaluation must be at least 1, got {batch_size}")
        share = EvaluationSampler(dataset, num_replicas=world_size, rank=rank).share
        runs = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
        self._all = [_Request(0, 0, tuple(run), run) for run in runs]
        self._keyed = _Keyed(dataset, collate, packs=num_workers > 0)
        self._num_workers, self._processes, self._limits = num_workers, processes, limits

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Any]:
        requests = _Requests(self._all)
        loader = _data_loader(
            self._keyed,
            requests,
            num_workers=self._num_workers,
            pin_memory=False,
            persistent=False,
            processes=self._processes,
        )
        watch = LoaderWatch(loader, self._limits)
        requests.asked = watch.asked if self._num_workers else None
        try:
            for fetched in watch.explained(watch.batches()):
                yield fetched.batch
        finally:
            watch.close()


# ------------------------------------------------------------------------------------------- on DataLoader's side


class _Request(NamedTuple):
    """A batch to fetch. It is complete, so that loader processes hold no state."""

    seed: int
    epoch: int
    indices: tuple[int, ...]
    keys: Sequence[int]  # of the random numbers of each sample


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
    """DataLoader's `batch_sampler`: one object, because its workers persist, whose content `epoch()` replaces.

    Attributes:
        asked: gets the samples of each request that DataLoader takes, if loader processes fetch them.
    """

    def __init__(self, source: Iterable[_Request] = ()) -> None:
        self.source: Iterable[_Request] = source
        self.asked: deque[Sequence[int]] | None = None

    def __iter__(self) -> Iterator[_Request]:
        for request in self.source:  # lazily, because DataLoader makes one iterator more than it uses
            if self.asked is not None:
                self.asked.append(request.indices)
            yield request


UNREADABLE = (UnreadableSample, OSError)
"""Errors of a data set that mean that one sample cannot be read."""


class _Fetched(NamedTuple):
    """A batch, or None, without the samples that could not be read, and why, for each of those."""

    batch: Any
    errors: list[tuple[int, str]]


class _Keyed(Dataset[Any]):
    """The data set as DataLoader sees it: it takes requests instead of indices, and returns finished batches.

    Args:
        dataset, collate: as in `TrainLoader`.
        tolerated: errors for which a sample is left out.
        packs: True for loader processes, which send what they fetch.

    Attributes:
        samples_draw, collate_draws, draws: they, or one of them, may draw from the process's generators, which are
            seeded for each.
        may_read_ahead: a thread may fetch batches beside the training, and it may pay.
    """

    def __init__(
        self, dataset: Any, collate: Collate | None, *, tolerated: tuple[type[Exception], ...] = (), packs: bool
    ) -> None:
        self.dataset, self.collate, self.tolerated = dataset, collate or default_collate, tolerated
        self.packs = packs
        self.at_once = isinstance(dataset, WholeBatches) and collate is None
        says_so, is_in_memory = getattr(dataset, "may_read_ahead", False), type(dataset) in (list, tuple, TensorDataset)
        self.samples_draw = not (says_so or is_in_memory or isinstance(dataset, WholeBatches))
        self.collate_draws = self.collate is not default_collate
        self.draws = self.samples_draw or self.collate_draws
        self.may_read_ahead = says_so and not self.draws
        self._own: OwnGenerators | None = None  # of this process, once it has begun

    def __getitems__(self, request: _Request) -> Any:
        """Returns a finished batch, packed if it is to be sent."""
        if not self.packs:
            return self._finished(request)
        return packed(partial(self._finished, request), ((each, self.dataset[each]) for each in request.indices))

    def _finished(self, request: _Request) -> _Fetched:
        """Returns a finished batch."""
        if self.at_once:
            with suppress(*self.tolerated):  # else sample by sample, to find out which it is
                return _Fetched(self.dataset.batch(request.indices), [])
        if not self.draws:
            return self._fetch(request, None)
        if self._own is None:
            self._own = OwnGenerators(*[self.dataset] * self.samples_draw, *[self.collate] * self.collate_draws)
        with preserved(), self._own.preserved() if self._own else nullcontext():
            return self._fetch(request, self._own or None)

    def _fetch(self, request: _Request, own: OwnGenerators | None) -> _Fetched:
        samples, errors = [], []
        for index, key in zip(request.indices, request.keys, strict=True):
            if self.samples_draw:
                augmentation_stream(request.seed, request.epoch, key)
                if own is not None:
                    own.seed(request.seed, "augmentation", request.epoch, key)
            try:
                samples.append(self.dataset[index])
            except self.tolerated as error:
                errors.append((index, " ".join(str(error).split())))
        if self.collate_draws:
            collation_stream(request.seed, request.epoch, request.keys[0])
            if own is not None:
                own.seed(request.seed, "collation", request.epoch, request.keys[0])
        return _Fetched(self.collate(samples) if samples else None, errors)


def _as_it_is(fetched: Any) -> Any:
    return fetched  # a named function, because worker processes may have to pickle it


def _data_loader(
    keyed: _Keyed,
    requests: Iterable[Any],
    *,
    num_workers: int,
    pin_memory: bool,
    persistent: bool,
    processes: Mapping[str, Any],
) -> DataLoader[Any]:
    if num_workers:
        make_room_for_sockets()
    return DataLoader(
        keyed,
        batch_sampler=requests,
        collate_fn=_as_it_is,  # of what `__getitems__` returns
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=persistent and num_workers > 0,
        **process_options(processes, num_workers=num_workers),
        generator=torch.Generator(),  # otherwise each pass would draw its workers' seeds from the program's generator
    )


def process_options(given: Mapping[str, Any], *, num_workers: int) -> dict[str, Any]:
    """Returns what torch's DataLoader takes for its processes, the user's `worker_init_fn` after our own."""
    if not num_workers:  # then torch refuses the others
        return {}
    return {**given, "worker_init_fn": partial(_begin_process, given.get("worker_init_fn"))}


def _begin_process(users: Callable[[int], None] | None, worker: int) -> None:
    """Begins a loader process; the user's function finds their own data set in `get_worker_info()`."""
    follow_the_trainer(worker)
    if users is not None:
        info: Any = torch_worker._worker_info
        facts = {"num_workers": info.num_workers, "seed": info.seed, "dataset": info.dataset.dataset}
        torch_worker._worker_info = torch_worker.WorkerInfo(id=worker, **facts)
        users(worker)
