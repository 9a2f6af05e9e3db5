"""Batches for one rank, in the sampler's order: the same samples at any world size and any number of loader workers.

                      this process                                    loader worker (any, or this process)
    TrainSampler -> StepPlan -> micro -> (seed, epoch, indices)  ->  for each index: seed by (seed, epoch, index), fetch
                                      <-        batch           <-  collate

The key of the random numbers travels with the indices, so a transform (torchvision's draw from the process's
generators) gives a sample the same crop wherever it is fetched, while no two samples of an epoch share one. The
generators are put back after each batch: loading leaves no trace in the randomness of the rest of the program.

A data set in memory may offer `batch(indices) -> batch` (deterministic); it is then asked for a micro-batch at once.

torch's DataLoader does the work of processes, prefetching and pinning. Its workers compute with one thread each.
Read before: streams.py, sampler.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, tee
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp.data.sampler import EvaluationSampler, StepPlan, TrainSampler
from ddp.data.streams import augmentation_stream, preserved
from ddp.errors import ConfigError

Collate = Callable[[list[Any]], Any]


class TrainLoader:
    """Step plans and their batches, to the end of the sampler's epoch.

        for plan, micros in loader.epoch():
            for micro, batch in zip(plan.micros, micros, strict=True):
                ...                         # forward, backward
            sampler.commit(plan)

    Args:
        dataset: map-style, as long as the sampler says. With a method `batch(indices) -> batch` and no `collate`, that
            method is called per micro-batch; it must not be random.
        sampler: says which samples, in which order and parts; shared with whoever commits.
        num_workers: loader processes; they stay from epoch to epoch. 0 loads in this process.
        pin_memory: batches in page-locked memory; ignored where there is no accelerator to copy to.
        collate: list of samples to batch; torch's `default_collate` if None.
        prefetch: micro-batches that each loader process keeps ready.

    Raises:
        TypeError: an `IterableDataset`.
        ConfigError: the sampler was made for another length, or a number is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: TrainSampler,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        collate: Collate | None = None,
        prefetch: int = 2,
    ) -> None:
        _check_dataset(dataset)
        if len(dataset) != sampler.length:
            raise ConfigError(
                f"the sampler was made for {sampler.length} samples, the data set has {len(dataset)}: "
                "make the sampler with len(dataset)"
            )
        self.sampler = sampler
        self._requests = _Requests()
        self._loader = _data_loader(
            dataset,
            self._requests,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate=collate,
            prefetch=prefetch,
            persistent=True,
        )

    def epoch(self) -> Iterator[tuple[StepPlan, Iterator[Any]]]:
        """From the sampler's state to the end of its epoch: each plan, with this rank's batches in its order.

        Batches come lazily, one per `plan.micros`; what a step leaves unread is skipped. A new call plans anew from the
        sampler's state, and ends the use of earlier iterators.
        """
        # Two readers of one sequence of plans: the loader, which runs ahead, and the caller's steps.
        plans, ahead = tee(self.sampler.plans())
        seed = self.sampler.state.seed
        self._requests.source = (_Request(seed, plan.epoch, micro.indices) for plan in ahead for micro in plan.micros)
        batches = iter(self._loader)
        for plan in plans:
            micros = islice(batches, len(plan.micros))
            yield plan, micros
            for _ in micros:  # a step that was broken off: keep plans and batches in line
                pass

    def close(self) -> None:
        """Ends the loader processes now; otherwise they end with this object. The loader can be used again."""
        iterator: Any = self._loader._iterator  # DataLoader has no public way to end persistent workers
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class EvaluationLoader:
    """This rank's batches of an exact evaluation: each sample once over all ranks, in order; iterate at will.

    Random transforms, if any are left in an evaluation set, draw the same at every pass (seed 0, epoch 0).

    Args:
        dataset, num_workers, pin_memory, collate: as in `TrainLoader`.
        batch_size: samples in a batch; the last one may be smaller.
        rank, world_size: whose share to read.

    Attributes:
        share: indices of the data set that this rank reads, in order; contiguous.
        num_samples_local: their number, possibly 0.

    Raises:
        TypeError: an `IterableDataset`.
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        collate: Collate | None = None,
    ) -> None:
        _check_dataset(dataset)
        if batch_size < 1:
            raise ConfigError(f"the batch size of an evaluation must be at least 1, got {batch_size}")
        self.share = EvaluationSampler(dataset, num_replicas=world_size, rank=rank).share
        self.num_samples_local = len(self.share)
        runs = [self.share[i : i + batch_size] for i in range(0, len(self.share), batch_size)]
        self._requests = [_Request(0, 0, tuple(run)) for run in runs]
        self._loader = _data_loader(
            dataset,
            self._requests,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate=collate,
            prefetch=2,
            persistent=False,
        )

    def __len__(self) -> int:
        """Number of this rank's batches."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


# ------------------------------------------------------------------------------------------- on DataLoader's side


class _Request(NamedTuple):
    """One batch, as told to whichever process fetches it. Complete: a worker's copy of the data set holds no state."""

    seed: int
    epoch: int
    indices: tuple[int, ...]


class _Requests:
    """DataLoader's `batch_sampler`: a fixed object, for its persistent workers, whose content `epoch()` replaces."""

    def __init__(self) -> None:
        self.source: Iterable[_Request] = ()

    def __iter__(self) -> Iterator[_Request]:
        yield from self.source  # lazily: DataLoader makes an iterator in vain before its first


class _Keyed(Dataset[Any]):
    """The data set as DataLoader sees it: answers requests instead of indices."""

    def __init__(self, dataset: Any, *, at_once: bool) -> None:
        self.dataset, self.at_once = dataset, at_once

    def __getitems__(self, request: _Request) -> Any:
        """A finished batch (`at_once`), or the list of samples to collate."""
        if self.at_once:
            return self.dataset.batch(request.indices)
        with preserved(device="cpu"):
            return [self._fetch(request, index) for index in request.indices]

    def _fetch(self, request: _Request, index: int) -> Any:
        augmentation_stream(request.seed, request.epoch, index)
        return self.dataset[index]


def _finished(batch: Any) -> Any:
    return batch  # a function with a name: worker processes may have to pickle it


def _data_loader(
    dataset: Any,
    requests: Iterable[Any],
    *,
    num_workers: int,
    pin_memory: bool,
    collate: Collate | None,
    prefetch: int,
    persistent: bool,
) -> DataLoader[Any]:
    if num_workers < 0 or prefetch < 1:
        raise ConfigError(f"need num_workers >= 0 and prefetch >= 1, got {num_workers} and {prefetch}")
    at_once = collate is None and callable(getattr(dataset, "batch", None))
    return DataLoader(
        _Keyed(dataset, at_once=at_once),
        batch_sampler=requests,
        collate_fn=_finished if at_once else collate,
        num_workers=num_workers,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        prefetch_factor=prefetch if num_workers else None,
        persistent_workers=persistent and num_workers > 0,
        worker_init_fn=_leave_signals_to_the_trainer,
        generator=torch.Generator(),  # else each pass would draw its workers' seeds from the program's generator
    )


def _leave_signals_to_the_trainer(_worker: int) -> None:
    """Leaves the trainer's process group, which a launcher signals as a whole; the trainer ends its loaders itself."""
    os.setpgid(0, 0)


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{type(dataset).__name__} is an IterableDataset, which has no samples to share by index: give a data set "
            "with __len__ and __getitem__ (for one that fits in memory, list(dataset) is one)"
        )
