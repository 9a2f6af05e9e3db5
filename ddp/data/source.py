"""A user's data in any of the usual forms: a data set, tensors, or a DataLoader, which is taken apart.

    Dataset, list, …        anything with a length and samples by index                        as it is
    (inputs, targets)       tensors or arrays of one length                                    TensorSet
    DataLoader              its data set, its number of workers and its collate function are used; the order and the
                            size of batches are the sampler's

Read before: `loader.py`. Read next: `splits.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from ddp.data.loader import Collate
from ddp.data.splits import TensorSet
from ddp.errors import ConfigError


class Source(NamedTuple):
    """Samples, and how to read them."""

    samples: Any  # map-style: __len__ and __getitem__
    collate: Collate | None = None  # None: torch's default
    num_workers: int = 0
    ignored: str = ""  # what of the user's DataLoader is not used, in words


def source_of(data: Any, *, what: str, collate: Collate | None = None, num_workers: int | None = None) -> Source:
    """Returns the samples of a user's data; of a `Source`, itself.

    Args:
        what: the name of the argument, for errors.
        collate, num_workers: in place of those of a DataLoader; None for its own, or torch's default and 0.

    Raises:
        ConfigError: samples cannot be had by index; the message has the remedy.
    """
    if isinstance(data, Source):
        return data
    ignored = ""
    if isinstance(data, DataLoader):
        loader, data = data, data.dataset
        ignored = _ignored(loader, what=what)
        num_workers = loader.num_workers if num_workers is None else num_workers
        if collate is None and loader.collate_fn is not default_collate:
            collate = loader.collate_fn
    if _is_pair_of_arrays(data):
        data = _tensor_set(*map(torch.as_tensor, data), what=what)
    kind = type(data).__name__
    if isinstance(data, IterableDataset):
        raise ConfigError(
            f"{what} is {kind}, an IterableDataset, whose samples cannot be shared by index: give a data set with "
            f"__len__ and __getitem__ ({what}=list(dataset) is one, if it fits in memory)"
        )
    is_table = isinstance(data, Mapping) or hasattr(data, "iloc")  # such as pandas', whose [] takes columns
    if is_table or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise ConfigError(
            f"{what} is a {kind}: give a data set with __len__ and __getitem__, a pair of tensors (inputs, targets), "
            "or a DataLoader"
        )
    return Source(data, collate, num_workers or 0, ignored)


def _is_pair_of_arrays(data: Any) -> bool:
    return isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(x, (Tensor, np.ndarray)) for x in data)


def _tensor_set(inputs: Tensor, targets: Tensor, *, what: str) -> TensorSet:
    if not inputs.dim() or not targets.dim() or len(inputs) != len(targets):
        raise ConfigError(
            f"{what} has inputs {list(inputs.shape)} and targets {list(targets.shape)}: the first dimension of both "
            "counts samples and must be equal"
        )
    return TensorSet(inputs, targets)


def _ignored(loader: DataLoader[Any], *, what: str) -> str:
    """Returns which of a DataLoader's choices are not used, in words."""
    if loader.batch_size is not None:
        parts = [f"batch_size={loader.batch_size}"]
    elif loader.batch_sampler is not None:
        parts = [type(loader.batch_sampler).__name__]
    else:
        raise ConfigError(f"{what} is a DataLoader with batch_size=None: give its data set, with a sample per index")
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        parts.append(type(loader.sampler).__name__)
    parts += [name for name in ("drop_last", "worker_init_fn") if getattr(loader, name)]
    return ", ".join(parts)
