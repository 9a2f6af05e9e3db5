"""A user's data in any of the usual forms: a data set, tensors, or a DataLoader, which is unpacked.

Dataset, list, …        anything with a length and samples by index                        as it is
(inputs, targets)       a tuple of tensors or arrays of one length                         TensorSet
DataLoader              its parts: each of its arguments is honoured, has nothing to do here, or is refused
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sized
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from ddp.data.loading.fetching import Generators
from ddp.data.loading.processes import data_loader, jax_runs
from ddp.data.orders.distributed_sampler import DistributedSampler
from ddp.data.orders.order import FirstOf, Order, Permutation, Weighted
from ddp.data.samples import Collate, Samples, Splits, TensorSet
from ddp.errors import ConfigError

# --- A DataLoader of torch's, unpacked -------------------------------------------------------------------------------
#
#   dataset                     honoured
#   sampler, shuffle            each sample once an epoch, in the order that fit says: for shuffle, RandomSampler,
#                               SequentialSampler, and DistributedSampler (torch's and ours)
#                               a part of the samples, each of them once: for SubsetRandomSampler, or a list of indices
#                               with replacement, by `orders.Weighted`: for WeightedRandomSampler, and for
#                               RandomSampler(replacement=True); both with their num_samples
#                               other num_samples each epoch, by `orders.FirstOf`: for RandomSampler(num_samples=…)
#                               refused: any other, because the samples that it will choose are unknown
#   batch_sampler               torch's BatchSampler: its sampler and its drop_last; refused: any other
#   batch_size                  not used: a step has global_batch samples; refused: None, where samples are batches
#   drop_last                   honoured, counted in steps of global_batch; refused for streams
#   collate_fn, num_workers     honoured
#   worker_init_fn              honoured; refused for streams, of which each process reads all
#   multiprocessing_context, prefetch_factor        honoured
#   generator                   not used: the seed of fit is that of every random number
#   timeout                     not used: waits have the deadlines of the run
#   pin_memory, pin_memory_device, persistent_workers, in_order       nothing to do: pinned where there is a GPU; loader
#                               processes stay from epoch to epoch; batches keep their order
#   a class with its own __iter__                                     refused
#
# An evaluation takes every sample once. So drawing with or without replacement, and drop_last, are refused there.


_DISTRIBUTED = (TorchDistributedSampler.__iter__, DistributedSampler.__iter__)
_NOT_USED = ("generator", "timeout")
_OF_PROCESSES = ("worker_init_fn", "multiprocessing_context", "prefetch_factor")


class Source(NamedTuple):
    """Samples, and how to read them."""

    samples: Any  # map-style: __len__ and __getitem__
    collate: Collate | None = None  # None: torch's default
    num_workers: int = 0
    ignored: str = ""  # what of the user's DataLoader is not used, as text
    is_stream: bool = False  # an iterable, without length and index
    order: Order | None = None  # the one that the user's DataLoader stands for; None: each sample once
    drop_last: bool = False  # an epoch ends with its last whole step
    processes: Mapping[str, Any] = MappingProxyType({})  # further arguments of torch's DataLoader


def unpack_dataloader(loader: DataLoader[Any], *, what: str, is_stream: bool, evaluates: bool) -> Source:
    """Returns the parts of a user's DataLoader that are honoured.

    Args:
        what: the name of the argument, for errors.
        is_stream: its data set is an iterable.
        evaluates: every sample is wanted once.

    Raises:
        ConfigError: one of its choices cannot be honoured; the message has the remedy.
    """
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"{what} is a {type(loader).__name__}, a DataLoader with its own __iter__, whose work on batches "
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
    return Source(samples, collate, loader.num_workers, ignored, is_stream, order, drop_last, processes)


def _batching(loader: DataLoader[Any], *, what: str) -> tuple[Any, bool, str]:
    """Returns the sampler, whether an incomplete batch is left out, and the batch's size as text."""
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


def source_of(
    data: Any, *, what: str, collate: Collate | None = None, num_workers: int | None = None, trains: bool = False
) -> Source:
    """Returns the samples of a user's data; of a `Source`, itself.

    Args:
        what: the name of the argument, for errors.
        collate, num_workers: in place of those of a DataLoader; None for its own, or torch's default and 0.
        trains: the samples are trained on, so that an iterable will do, and a choice of samples in each epoch.

    Raises:
        ConfigError: samples cannot be had by index; the message has the remedy.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, DataLoader):
        if is_stream(data.dataset) and not trains:
            return source_of(data.dataset, what=what)  # which raises the error
        parts = unpack_dataloader(data, what=what, is_stream=is_stream(data.dataset), evaluates=not trains)
        return parts._replace(
            samples=source_of(parts.samples, what=what, trains=trains).samples,
            collate=parts.collate if collate is None else collate,
            num_workers=parts.num_workers if num_workers is None else num_workers,
        )
    if _is_pair_of_arrays(data):
        data = _tensor_set(*map(torch.as_tensor, data), what=what)
    if isinstance(data, tuple) and any(isinstance(each, Tensor) for each in data):
        raise ConfigError(
            f"{what} is a tuple of {len(data)}: give a pair (inputs, targets), or torch.utils.data.TensorDataset(…)"
        )
    kind = type(data).__name__
    is_table = isinstance(data, Mapping) or hasattr(data, "iloc")  # such as pandas', whose [] takes columns
    if is_stream(data) and trains:
        return Source(data, collate, num_workers or 0, is_stream=True)
    if is_stream(data):
        raise ConfigError(
            f"{what} is {kind}, an iterable, whose samples cannot be shared by index: give a data set with __len__ and "
            f"__getitem__ ({what}=list(dataset) is one, if it fits in memory); only what ddp.fit trains on may be a "
            "stream"
        )
    is_plain = isinstance(data, (str, bytes)) or getattr(data, "ndim", 1) == 0  # a path, or one number
    if is_table or is_plain or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ConfigError(
            f"{what} is a {kind}: give a data set with __len__ and __getitem__, a pair of tensors (inputs, targets), "
            "or a DataLoader"
        )
    return Source(data, collate, num_workers or 0)


def is_stream(data: Any) -> bool:
    """Returns True for data that can only be read from front to end."""
    has_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    is_table = isinstance(data, (Mapping, set, frozenset)) or hasattr(data, "iloc")
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not has_index and not is_table)


UNKEYED = "a sample is another one when it is read again"


def fingerprint(source: Source) -> str | None:
    """Returns a hash of the first sample, the middle one and the last one; None if they cannot be read like this.

    Their random transforms draw from the same streams in every process, so equal samples have equal hashes. Samples
    of loader processes are read by one: what a data set opens at its first sample, they would have in common.

    Returns:
        `UNKEYED` if a sample is not the same when it is read again: it draws from a generator that was not found.
    """
    samples, there = source.samples, {"multiprocessing_context": "forkserver" if jax_runs() else "fork"}
    try:
        prints = _Prints(samples)
        if source.num_workers:
            return next(iter(data_loader(prints, num_workers=1, pin_memory=False, processes=there)))  # type: ignore
        return prints[0]
    except Exception:  # the loader raises the sample's error
        return None


class _Prints:
    """Holds one item: the fingerprint of samples."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> str | None:
        samples, generators = self._samples, Generators(self._samples)

        def read(index: int) -> Any:
            generators.seed(0, "augmentation", 0, index)
            return samples[index]

        with generators.preserved():
            first, *others = (read(index) for index in sorted({0, len(samples) // 2, len(samples) - 1}))
            is_keyed = digest_of(first) == digest_of(read(0))
        return digest_of([first, *others]) if is_keyed else UNKEYED


def digest_of(values: Any) -> str | None:
    """Returns a hash of tensors, arrays, images, numbers and texts in any nested form; None of anything else."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            if leaf.layout != torch.strided or leaf.is_meta or leaf.is_nested:
                return None
            plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
        elif hasattr(leaf, "__array_interface__") and (array := np.asarray(leaf)).dtype != object:
            digest.update(np.ascontiguousarray(array).tobytes())
        elif leaf is None or isinstance(leaf, (int, float, str, bytes)):
            digest.update(repr(leaf).encode())
        else:
            return None
    return digest.hexdigest()


def _is_pair_of_arrays(data: Any) -> bool:
    return isinstance(data, tuple) and len(data) == 2 and all(isinstance(x, (Tensor, np.ndarray)) for x in data)


def _tensor_set(inputs: Tensor, targets: Tensor, *, what: str) -> TensorSet:
    if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
        raise ConfigError(
            f"{what} has inputs {list(inputs.shape)} and targets {list(targets.shape)}: the first dimension of both "
            "counts samples and must be equal"
        )
    return TensorSet(inputs, targets)


# ------------------------------------------------------------------------------------ data that a function returns


def whole_splits(found: Any, *, name: str) -> Splits:
    """Returns the data of a user's function as `Splits`, with the facts that can be derived from them.

    Args:
        found: `Splits`, or a pair (train, test), each in any form that `source_of` takes.
        name: the data as text, unless `found` has some.

    Raises:
        ConfigError: it is something else; says what to return.
    """
    if isinstance(found, (tuple, list)) and len(found) == 2:
        found = Splits(train=found[0], test=found[1])
    if not isinstance(found, Splits):
        raise ConfigError(
            f"returned an object of type {type(found).__name__}; return a pair (train, test), or "
            "ddp.Splits(train=…, test=…)"
        )
    parts = {"train": found.train, "test": found.test, "validation": found.validation}
    if isinstance(found.train, DataLoader) and not is_stream(found.train.dataset):
        _refuse_choice(source_of(found.train, what="train", trains=True))
    sides = {side: source_of(data, what=side) for side, data in parts.items() if data is not None}
    train, test, validation = sides["train"], sides["test"], sides.get("validation")
    for side, source in sides.items():
        if isinstance(source.samples, Tensor):  # such as the inputs of (inputs, targets)
            raise ConfigError(f"{side} is a Tensor; give a pair of tensors (inputs, targets), or a data set")
        if not len(source.samples):
            raise ConfigError(f"{side} has no samples")
        if source.processes:
            given = ", ".join(source.processes)
            raise ConfigError(f"{side} is a DataLoader with {given}, which are for ddp.fit only: give its data set")
    if found.collate is None and len({source.collate for source in sides.values()}) > 1:
        names = " and ".join(sides)
        raise ConfigError(f"{names} have different collate functions; give both in ddp.Splits(…, collate=…)")
    return Splits(
        train=train.samples,
        test=test.samples,
        sample_shape=found.sample_shape if found.sample_shape is not None else _shape_of(train.samples),
        num_classes=found.num_classes if found.num_classes is not None else _num_classes(train.samples, test.samples),
        name=found.name or f"{name}{_digest(train.samples, test.samples)}",
        collate=found.collate or train.collate,
        validation=None if validation is None else validation.samples,
        unaugmented=found.unaugmented,
    )


def _refuse_choice(train: Source) -> None:
    """Raises ConfigError if a DataLoader chooses among the training samples, which settings do instead."""
    for choice, is_made, instead in (
        ("drop_last", train.drop_last, "the last step of an epoch may be smaller than the others"),
        ("its own sampler", train.order is not None, "data.order says how they are drawn, such as weighted"),
    ):
        if is_made:
            raise ConfigError(f"train is a DataLoader with {choice}, which ddp.fit takes: give its data set; {instead}")


def _shape_of(data: Samples) -> tuple[int, ...] | None:
    """Returns the shape of the first input, if samples are pairs of tensors."""
    first = data[0]
    shape = getattr(first[0], "shape", None) if isinstance(first, (tuple, list)) else None
    return None if shape is None else tuple(shape)


def _num_classes(train: Samples, test: Samples) -> int | None:
    """Returns the number of classes, from tensors of classes in memory, or from a list of names as torchvision's."""
    if isinstance(train, TensorSet) and isinstance(test, TensorSet):
        targets = (train.targets, test.targets)
        is_class = all(not each.is_floating_point() and not each.is_complex() for each in targets)
        return max(int(each.max()) for each in targets) + 1 if is_class else None
    classes = getattr(train, "classes", None)
    return len(classes) if isinstance(classes, tuple | list) else None


def _digest(train: Samples, test: Samples) -> str:
    """Returns a few letters that tell tensors in memory apart, so that ranks can compare what they have."""
    if not isinstance(train, TensorSet) or not isinstance(test, TensorSet):
        return ""  # their first samples may be changed at random
    first = [each[:64] for each in (train.inputs, train.targets, test.inputs, test.targets)]
    return f" {str(digest_of(first))[:8]}"
