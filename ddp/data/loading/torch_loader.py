"""A DataLoader of torch's, taken apart: each of its arguments is honoured, has nothing to do here, or is refused.

    dataset                     honoured
    sampler, shuffle            each sample once an epoch, in the order that fit says: for shuffle, RandomSampler,
                                SequentialSampler, and DistributedSampler (torch's and ours)
                                a part of the samples, each of them once: for SubsetRandomSampler, or a list of indices
                                with replacement, by `orders.Weighted`: for WeightedRandomSampler, and for
                                RandomSampler(replacement=True); both with their num_samples
                                other num_samples each epoch, by `orders.FirstOf`: for RandomSampler(num_samples=…)
                                refused: any other, because nobody can see which samples it will choose
    batch_sampler               torch's BatchSampler: its sampler and its drop_last; refused: any other
    batch_size                  not used: a step has global_batch samples; refused: None, where samples are batches
    drop_last                   honoured, counted in steps of global_batch; refused for streams
    collate_fn, num_workers     honoured
    worker_init_fn              honoured; refused for streams, of which each process reads all
    multiprocessing_context, prefetch_factor        honoured
    generator                   not used: the seed of fit is that of every random number
    timeout                     not used: waits have the deadlines of the run
    pin_memory, pin_memory_device, persistent_workers, in_order       nothing to do: pinned where there is a GPU; loader
                                processes stay from epoch to epoch; batches keep their order
    a class with its own __iter__                                     refused

An evaluation takes every sample once. So drawing with or without replacement, and drop_last, are refused there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddp.data.orders.distributed_sampler import DistributedSampler
from ddp.data.orders.order import FirstOf, Order, Permutation, Weighted
from ddp.data.samples import Collate
from ddp.errors import ConfigError

_DISTRIBUTED = (TorchDistributedSampler.__iter__, DistributedSampler.__iter__)
_NOT_USED = ("generator", "timeout")
_OF_PROCESSES = ("worker_init_fn", "multiprocessing_context", "prefetch_factor")


class Parts(NamedTuple):
    """The parts of a DataLoader that are honoured, and in words what is not used."""

    samples: Any
    order: Order | None
    drop_last: bool
    collate: Collate | None
    num_workers: int
    processes: Mapping[str, Any]  # arguments of torch's DataLoader
    ignored: str


def taken_apart(loader: DataLoader[Any], *, what: str, is_stream: bool, evaluates: bool) -> Parts:
    """Returns the parts of a user's DataLoader.

    Args:
        what: the name of the argument, for errors.
        is_stream: its data set is an iterable.
        evaluates: every sample is wanted once.

    Raises:
        ConfigError: one of its choices cannot be honoured; the message has the remedy.
    """
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"{what} is a {type(loader).__name__}, a DataLoader with an __iter__ of its own, whose work on batches "
            "would be left out: give its data set, with that work in the data set or in collate=…"
        )
    sampler, drop_last, ignored = _batching(loader, what=what)
    chosen = {name: getattr(loader, name) for name in _OF_PROCESSES}
    defaults = {"prefetch_factor": 2 if loader.num_workers else None}  # torch fills it in
    processes = {name: given for name, given in chosen.items() if given != defaults.get(name)}
    if is_stream:
        _check_stream(loader, what=what)
        samples, order = loader.dataset, None
    else:
        samples, order = _chosen(sampler, loader.dataset, what=what)
    if evaluates and (order is not None or drop_last):
        choice = "drop_last" if order is None else type(sampler).__name__
        raise ConfigError(
            f"{what} is a DataLoader with {choice}, and every sample is taken once here: leave it out, or give the "
            "data set that is meant, such as torch.utils.data.Subset(dataset, indices)"
        )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    ignored += "".join(f", {name}" for name in _NOT_USED if getattr(loader, name))
    return Parts(samples, order, drop_last, collate, loader.num_workers, processes, ignored)


def _batching(loader: DataLoader[Any], *, what: str) -> tuple[Any, bool, str]:
    """Returns what chooses the samples, whether an incomplete batch is left out, and the batch's size in words."""
    batches = loader.batch_sampler
    if batches is None:
        raise ConfigError(f"{what} is a DataLoader with batch_size=None: give its data set, with a sample per index")
    if type(batches).__iter__ is not BatchSampler.__iter__:
        kind = type(batches).__name__
        raise ConfigError(
            f"{what} is a DataLoader with the batch_sampler {kind}, which cannot be shared out: give the data set, and "
            f"to ddp.fit global_batch=…, or ddp.data.TokenBudget(…) for batches of about one length"
        )
    assert isinstance(batches, BatchSampler)
    return batches.sampler, batches.drop_last, f"batch_size={batches.batch_size}"


def _check_stream(loader: DataLoader[Any], *, what: str) -> None:
    """Raises ConfigError for what would change which samples of a stream are read."""
    if loader.drop_last:
        raise ConfigError(
            f"{what} is a DataLoader of a stream with drop_last, which would need to know where it ends: leave it out, "
            "or let the iterable end after a multiple of global_batch"
        )
    if loader.worker_init_fn is not None:
        raise ConfigError(
            f"{what} is a DataLoader of a stream with worker_init_fn, and each process reads all of it here: leave it "
            "out; data that share themselves out do so in __iter__, by get_worker_info(), with sharding='off'"
        )


def _chosen(sampler: Any, dataset: Any, *, what: str) -> tuple[Any, Order | None]:
    """Returns the samples that a sampler chooses from, and the order that it stands for; None: each once, at random."""
    number = len(dataset)
    if isinstance(sampler, (list, tuple, range, np.ndarray, Tensor)):
        return Subset(dataset, _checked(sampler, number, what=what)), None
    how = type(sampler).__iter__
    if isinstance(sampler, SubsetRandomSampler) and how is SubsetRandomSampler.__iter__:
        return Subset(dataset, _checked(sampler.indices, number, what=what)), None
    if isinstance(sampler, WeightedRandomSampler) and how is WeightedRandomSampler.__iter__:
        if not sampler.replacement:
            raise ConfigError(
                f"{what} is a DataLoader with WeightedRandomSampler(replacement=False): ddp.data.Weighted draws with "
                "replacement; take replacement=True, or an order of your own (ddp.data.Order)"
            )
        _check_length(sampler, len(sampler.weights), number, what=what)
        return dataset, Weighted(sampler.weights, length=sampler.num_samples)
    if isinstance(sampler, RandomSampler) and how is RandomSampler.__iter__:
        _check_length(sampler, len(sampler.data_source), number, what=what)
        return dataset, _order_of(sampler, number, what=what)
    if isinstance(sampler, SequentialSampler) and how is SequentialSampler.__iter__:
        _check_length(sampler, len(sampler.data_source), number, what=what)
        return dataset, None
    if how in _DISTRIBUTED:
        _check_length(sampler, len(sampler.dataset), number, what=what)
        return dataset, None
    size = f"takes {len(sampler)} of {number} samples, and " if isinstance(sampler, Sized) else ""
    raise ConfigError(
        f"{what} is a DataLoader whose {type(sampler).__name__} {size}chooses them in a way that cannot be seen: give "
        "the data set, or a torch.utils.data.Subset of it, and what the sampler does as order=…, such as "
        "ddp.data.Weighted(weights), ddp.data.Stratified(classes), or a class derived from ddp.data.Order"
    )


def _order_of(sampler: RandomSampler, number: int, *, what: str) -> Order | None:
    """Returns the order of torch's random choice; None: each sample once."""
    if sampler.replacement:
        return Weighted(np.ones(number), length=sampler.num_samples)
    if sampler.num_samples > number:
        raise ConfigError(
            f"{what} is a DataLoader with RandomSampler(num_samples={sampler.num_samples}) over {number} samples: "
            "leave num_samples out, and take more epochs; or take replacement=True"
        )
    return None if sampler.num_samples == number else FirstOf(Permutation(number), sampler.num_samples)


def _checked(found: Iterable[Any], number: int, *, what: str) -> list[int]:
    """Returns indices as Python has them."""
    numbers = [int(index) for index in found]
    if not all(-number <= index < number for index in numbers):
        wrong = next(index for index in numbers if not -number <= index < number)
        raise ConfigError(
            f"{what} is a DataLoader whose sampler has the index {wrong}, of {number} samples: leave it out"
        )
    return numbers


def _check_length(sampler: Any, length: int, number: int, *, what: str) -> None:
    """Raises ConfigError if a sampler was made for another data set."""
    if length != number:
        raise ConfigError(
            f"{what} is a DataLoader whose {type(sampler).__name__} was made for {length} samples, and its data set "
            f"has {number}: give the data set that is meant, such as torch.utils.data.Subset(dataset, indices)"
        )
