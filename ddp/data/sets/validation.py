"""Sets a share of the training samples apart, which the run evaluates on and never trains on.

    all samples         0 1 2 3 4 5 6 7 8 9
    validation, 0.2           3       7            the first of a random permutation, which the seed names
    training            0 1 2   4 5 6   8 9        the others, in the order of the data set

The choice depends on the number of samples, the share and the seed. So it is the same at any number of workers and in
each start of a run; a run that was trained on others is not resumed.

Both parts are the same data set. So a validation sample has the transforms that it has in training, random ones
included, unless the splits have training samples with test transforms (`Splits.unaugmented`).

Cost: 8 bytes a sample, and a look-up for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from ddp.data.orders.order import Indices, Permutations
from ddp.data.samples import Splits, Transformed, WholeBatches, Wrapped, behind_transforms
from ddp.errors import ConfigError
from ddp.process.streams import stream_seed

_OF_SAMPLES = ("weights", "targets", "lengths")  # attributes with an entry for each sample


class Selection(Wrapped):
    """Some samples of a data set, with their attributes.

    Args:
        samples: map-style.
        numbers: of these samples, rising, [k].
        set_apart: says as text which samples are set apart, for runs that are resumed.
    """

    def __init__(self, samples: Any, numbers: Indices, *, set_apart: str) -> None:
        super().__init__(samples)
        self.numbers, self.set_apart = numbers, set_apart

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        return self.samples[int(self.numbers[index])]

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name in _OF_SAMPLES:
            return _rows(found, self.numbers)
        if name == "file_sizes":
            return np.diff(np.searchsorted(self.numbers, np.cumsum([0, *found])))
        return found


class _SelectionInBatches(Selection, WholeBatches):
    """A selection of a data set that returns whole batches, which returns them, too."""

    def batch(self, indices: Sequence[int]) -> Any:
        """Returns the samples at `indices`."""
        return self.samples.batch(self.numbers[np.asarray(indices, dtype=np.int64)].tolist())


def selection_of(samples: Any, numbers: Indices, *, set_apart: str) -> Any:
    """Returns some samples of a data set; transforms stay outermost, where `behind_transforms` finds them."""
    if isinstance(samples, Transformed):
        return Transformed(selection_of(samples.samples, numbers, set_apart=set_apart), samples.transform)
    kind = _SelectionInBatches if isinstance(samples, WholeBatches) else Selection
    return kind(samples, numbers, set_apart=set_apart)


def selection_in(samples: Any) -> Selection | None:
    """Returns the selection behind transforms; None for a whole data set."""
    inner = behind_transforms(samples)
    return inner if isinstance(inner, Selection) else None


def choose(num_samples: int, share: float, *, seed: int, what: str) -> tuple[Indices, Indices, str]:
    """Returns the numbers of the training and of the validation samples, and the choice as text.

    Args:
        share: of the samples, for validation.
        what: the name of the share's setting, for errors.

    Raises:
        ConfigError: one side would be empty.
    """
    number = round(share * num_samples)
    if not 0 < number < num_samples:
        raise ConfigError(f"{what}={share:g}: of {num_samples} samples that is {number}; each side needs some")
    permutation = Permutations(stream_seed(seed, "validation"), largest=num_samples)
    is_validation = np.zeros(num_samples, dtype=np.bool_)
    is_validation[permutation.places(np.arange(number), size=num_samples)] = True
    words = f"{number:,} of {num_samples:,} samples by seed {seed}"
    return np.flatnonzero(~is_validation), np.flatnonzero(is_validation), words


def with_share(splits: Splits, share: float, *, seed: int) -> Splits:
    """Returns splits with a share of the training samples set apart, and transformed as they are for a test."""
    train, validation, words = choose(len(splits.train), share, seed=seed, what="data.validation")
    tested = splits.train if splits.unaugmented is None else splits.unaugmented
    return replace(
        splits,
        train=selection_of(splits.train, train, set_apart=words),
        validation=selection_of(tested, validation, set_apart=words),
    )


def _rows(values: Any, numbers: Indices) -> Any:
    """Returns the entries of these samples, in the form that all of them have."""
    if isinstance(values, (Tensor, np.ndarray)):
        return values[numbers]
    return [values[number] for number in numbers.tolist()]
