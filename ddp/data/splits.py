"""The form of every data set here: two sets of samples, and the facts that a model needs to be built for them.

Each module that follows has functions `load…`, which return `Splits`. Every worker calls them; only the parent, or one
rank of each host, lets them download. Nothing in them depends on a rank or on the run's seed: train and test are the
same samples in every run. A function of the user's own returns `Splits`, too, or a pair; `whole_splits` completes it.

A sample is a pair (input, target). A data set may also offer `batch(indices)`, which returns the collated tensors at
once: for data in memory this is one `index_select` instead of a Python loop over samples.

Read before: `loader.py`. Read next: `digits.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ddp.errors import ConfigError


class Samples(Protocol):
    """A map-style data set, as `torch.utils.data.DataLoader` takes it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Splits:
    """A data set, cut into the samples to train on and those that are held out.

    Attributes:
        train, test: the samples; no sample is in both. Images come as (image [channels, height, width] float32, class),
            text as (bytes [context], the same bytes one position later [context]), both int64.
        sample_shape: shape of one input; None: unknown.
        num_classes: targets are 0 … num_classes − 1. For text, the size of the vocabulary. None: unknown, or none.
        name: the data in words, with version or digest, so that hosts can compare what they have.
    """

    train: Samples
    test: Samples
    sample_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    name: str = ""


class TensorSet:
    """Samples that lie in memory as two tensors, with a fast path for whole batches.

    Args:
        inputs: [n, ...]
        targets: [n]
        transform: applied to one input, or to a batch of them, when it is read. So images may lie in memory as bytes
            and become normalised floats, four times as large, only when they are used. It must not be random.

    Raises:
        ValueError: the two lengths differ.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, *, transform: Callable[[Tensor], Tensor] | None = None) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs beside {len(targets)} targets; a sample is one of each")
        self.inputs = inputs
        self.targets = targets
        self.transform = transform or _as_it_is

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.inputs[index]), self.targets[index]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the samples at `indices`, in that order: (inputs [k, ...], targets [k])."""
        where = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        return self.transform(self.inputs.index_select(0, where)), self.targets.index_select(0, where)


def whole_splits(found: Any, *, name: str) -> Splits:
    """Returns what a function of the user's own has returned as `Splits`, with the facts that can be seen in it.

    Args:
        found: `Splits`, or a pair (train, test); each is a map-style data set, or a pair of tensors (inputs, targets).
        name: the data in words, unless `found` has some.

    Raises:
        ConfigError: it is something else; says what to return.
    """
    if isinstance(found, tuple | list) and len(found) == 2:
        found = Splits(train=found[0], test=found[1])
    if not isinstance(found, Splits):
        raise ConfigError(f"returned {_kind(found)}; return a pair (train, test), or ddp.Splits(train=…, test=…)")
    train, test = _samples(found.train, "train"), _samples(found.test, "test")
    return Splits(
        train=train,
        test=test,
        sample_shape=found.sample_shape if found.sample_shape is not None else _shape_of(train),
        num_classes=found.num_classes if found.num_classes is not None else _num_classes(train, test),
        name=found.name or f"{name}{_digest(train, test)}",
    )


def _samples(part: Any, side: str) -> Samples:
    """Returns one side of the user's own data as a data set."""
    is_pair = isinstance(part, tuple | list) and len(part) == 2
    if is_pair and all(isinstance(each, Tensor) for each in part):
        if len(part[0]) != len(part[1]):
            raise ConfigError(f"{side} is {len(part[0])} inputs beside {len(part[1])} targets; a sample is one of each")
        part = TensorSet(*part)
    if isinstance(part, IterableDataset):
        raise ConfigError(
            f"{side} is an IterableDataset, whose samples have no numbers; give it __len__ and __getitem__ instead"
        )
    if not hasattr(part, "__len__") or not hasattr(part, "__getitem__") or isinstance(part, Tensor | dict):
        raise ConfigError(f"{side} is {_kind(part)}; take a map-style data set, or a pair of tensors (inputs, targets)")
    if not len(part):
        raise ConfigError(f"{side} has no samples")
    first = part[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise ConfigError(f"{side}[0] is {_kind(first)}; a sample is a pair (input, target)")
    return cast(Samples, part)


def _shape_of(data: Samples) -> tuple[int, ...] | None:
    shape = getattr(data[0][0], "shape", None)
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


def _kind(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"an object of type {type(value).__name__}"


def _as_it_is(inputs: Tensor) -> Tensor:
    return inputs
