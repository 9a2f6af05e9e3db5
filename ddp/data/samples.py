"""The form of every data set here: two sets of samples, and the facts needed to build a model for them.

Each module of `data/sets/` has functions `load…`, which return `Splits`. Every worker calls them; only the parent, or
one rank of each host, lets them download. Nothing in them depends on a rank or on the run's seed: train and test are
the same samples in every run.

A sample is a pair (input, target). A data set may also derive from `WholeBatches` and return collated tensors at once:
for data in memory this is one `index_select` instead of a Python loop over samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples, as the `collate_fn` of torch's DataLoader."""


class WholeBatches(ABC):
    """A data set that can hand out a collated batch at once, faster than sample by sample."""

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Any:
        """Returns the samples at `indices` as `default_collate` would collate them. It must not be random."""


class Samples(Protocol):
    """A map-style data set, as `torch.utils.data.DataLoader` takes it.

    It may also have attributes that orders use: `file_sizes` (samples of each file; those of a file have consecutive
    indices), `lengths` (tokens of each sample), `weights`, and `targets` (classes).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Splits:
    """A data set, cut into the samples to train on and those that are held out.

    Attributes:
        train, validation, test: the samples; none is in two of them. Without a validation set, choices (of the best
            checkpoint, say) go by the test set. Images are (image [channels, height, width] float32, class), text is
            (bytes [context], the same bytes one position later [context]), both int64.
        sample_shape: shape of one input; None: unknown.
        num_classes: targets are 0 … num_classes − 1. For text, the size of the vocabulary. None: unknown, or none.
        name: the data as text, with version or digest, so that hosts can compare what they have.
        collate: makes a batch of samples; None for torch's `default_collate`.
        unaugmented: the training samples as test samples are transformed; None: `train` is transformed like that.
    """

    train: Samples
    test: Samples
    sample_shape: tuple[int, ...] | None = None
    num_classes: int | None = None
    name: str = ""
    collate: Collate | None = None
    validation: Samples | None = None
    unaugmented: Samples | None = None


class TensorSet(WholeBatches):
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
            raise ValueError(f"{len(inputs)} inputs, but {len(targets)} targets; a sample is one of each")
        self.inputs = inputs
        self.targets = targets
        self.transform = transform or as_it_is

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.inputs[index]), self.targets[index]

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the samples at `indices`, in that order: (inputs [k, ...], targets [k])."""
        where = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        return self.transform(self.inputs.index_select(0, where)), self.targets.index_select(0, where)


def as_it_is(given: Any) -> Any:
    """Returns its argument: a function with a name, because processes may have to pickle it."""
    return given


class Wrapped:
    """A data set around another one, whose attributes it has, too."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "samples":  # not there yet while it is unpickled
            raise AttributeError(name)
        return getattr(self.samples, name)


class Transformed(Wrapped):
    """A data set whose samples pass through a function, which may be random.

    Args:
        samples: map-style.
        transform: makes a sample of a sample.
    """

    may_read_ahead = False  # the transform may be random, whatever the samples are

    def __init__(self, samples: Any, transform: Callable[[Any], Any]) -> None:
        super().__init__(samples)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.samples[index])


def behind_transforms(samples: Any) -> Any:
    """Returns the data set whose samples are transformed; one without transforms as it is."""
    while isinstance(samples, Transformed):
        samples = samples.samples
    return samples


class OnInput:
    """Applies a function to the input of a pair (input, target)."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, sample: tuple[Any, Any]) -> tuple[Any, Any]:
        return self.function(sample[0]), sample[1]
