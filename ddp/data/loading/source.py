"""A user's data in any of the usual forms: a data set, tensors, or a DataLoader, which is taken apart.

Dataset, list, …        anything with a length and samples by index                        as it is
(inputs, targets)       a tuple of tensors or arrays of one length                         TensorSet
DataLoader              its parts: `torch_loader.py` says what becomes of each
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from ddp.data.loading.fetching import Generators
from ddp.data.loading.torch_loader import taken_apart
from ddp.data.orders.order import Order
from ddp.data.samples import Collate, Samples, Splits, TensorSet
from ddp.errors import ConfigError


class Source(NamedTuple):
    """Samples, and how to read them."""

    samples: Any  # map-style: __len__ and __getitem__
    collate: Collate | None = None  # None: torch's default
    num_workers: int = 0
    ignored: str = ""  # what of the user's DataLoader is not used, in words
    is_stream: bool = False  # an iterable, without length and index
    order: Order | None = None  # the one that the user's DataLoader stands for; None: each sample once
    drop_last: bool = False  # an epoch ends with its last whole step
    processes: Mapping[str, Any] = MappingProxyType({})  # further arguments of torch's DataLoader


def source_of(
    data: Any,
    *,
    what: str,
    collate: Collate | None = None,
    num_workers: int | None = None,
    trains: bool = False,
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
            return source_of(data.dataset, what=what)  # which says what is wrong with it
        parts = taken_apart(data, what=what, is_stream=is_stream(data.dataset), evaluates=not trains)
        plain = source_of(
            parts.samples,
            what=what,
            collate=parts.collate if collate is None else collate,
            num_workers=parts.num_workers if num_workers is None else num_workers,
            trains=trains,
        )
        return plain._replace(**{name: getattr(parts, name) for name in ("order", "drop_last", "processes", "ignored")})
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
    """Returns True for what can only be read from front to end."""
    has_index = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    is_table = isinstance(data, (Mapping, set, frozenset)) or hasattr(data, "iloc")
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not has_index and not is_table)


UNKEYED = "a sample is another one when it is read again"


def fingerprint(source: Source) -> str | None:
    """Returns a hash of the first sample, the middle one and the last one; None if they cannot be read like this.

    Their random transforms draw from the same streams in every process, so equal samples have equal hashes.

    Returns:
        `UNKEYED` if a sample is not the same when it is read again: it draws from a generator that was not found.
    """
    samples, generators = source.samples, Generators(source.samples)

    def read(index: int) -> Any:
        generators.seed(0, "augmentation", 0, index)
        return samples[index]

    try:
        with generators.preserved():
            first, *others = (read(index) for index in sorted({0, len(samples) // 2, len(samples) - 1}))
            is_keyed = digest_of(first) == digest_of(read(0))
        return digest_of([first, *others]) if is_keyed else UNKEYED
    except Exception:  # the loader says what is wrong with a sample
        return None


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


# ---------------------------------------------------------------------------------- what a user's function returns


def whole_splits(found: Any, *, name: str) -> Splits:
    """Returns what a function of the user's own has returned as `Splits`, with the facts that can be seen in it.

    Args:
        found: `Splits`, or a pair (train, test), each in any form that `source_of` takes.
        name: the data in words, unless `found` has some.

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
        ("a sampler of its own", train.order is not None, "data.order says how they are drawn, such as weighted"),
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
    digest = hashlib.sha256()
    for each in (train.inputs, train.targets, test.inputs, test.targets):
        digest.update(each[:64].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f" {digest.hexdigest()[:8]}"
