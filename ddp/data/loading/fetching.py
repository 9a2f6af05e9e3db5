"""Fetches a batch of samples by index, each with random numbers of its own, in whichever process it is called.

    (seed, epoch, indices)  →  for each: seed by (seed, epoch, index), read  →  seed by (seed, epoch, first), collate

The key of the random numbers travels with the indices. So a transform (torchvision's draw from the process's
generators) gives a sample the same crop in whichever process fetches it, while no two samples of an epoch share one.
Where an epoch has a sample several times, positions take the place of indices in the keys. The generators are restored
after each batch: loading leaves no trace in the randomness of the rest of the program.

Seeding takes 12 us, more than reading a small sample. Data that draw nothing are spared it, if they say so by a true
attribute `may_read_ahead`; lists, TensorDatasets and `WholeBatches` need not. Others cannot be found out, because a
sample may read a generator and leave no trace there, as with `torch.initial_seed()` or `fork_rng()`.

`WholeBatches` hand out a micro-batch at once, unless the samples are to be collated in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import Dataset, TensorDataset, default_collate

from ddp.data.loading.own_generators import Generators
from ddp.data.loading.sending import packed
from ddp.data.samples import Collate, WholeBatches
from ddp.errors import UnreadableSample

UNREADABLE = (UnreadableSample, OSError)
"""Errors of a data set that mean that one sample cannot be read."""


class Request(NamedTuple):
    """A batch to fetch. It is complete, so that loader processes hold no state."""

    seed: int
    epoch: int
    indices: tuple[int, ...]
    keys: Sequence[int]  # of the random numbers of each sample


class Fetched(NamedTuple):
    """A batch, or None, without the samples that could not be read, and why, for each of those."""

    batch: Any
    errors: list[tuple[int, str]]


class KeyedBatches(Dataset[Any]):
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
        self._generators: Generators | None = None  # of this process, once it has begun

    def __getitem__(self, request: Request) -> Any:
        """Returns a finished batch, packed if it is to be sent."""
        if not self.packs:
            return self._finished(request)
        return packed(partial(self._finished, request), ((each, self.dataset[each]) for each in request.indices))

    def _finished(self, request: Request) -> Fetched:
        """Returns a finished batch."""
        if self.at_once:
            with suppress(*self.tolerated):  # else sample by sample, to find out which it is
                return Fetched(self.dataset.batch(request.indices), [])
        if not self.draws:
            return self._fetch(request, Generators())
        if self._generators is None:
            self._generators = Generators(*[self.dataset] * self.samples_draw, *[self.collate] * self.collate_draws)
        with self._generators.preserved():
            return self._fetch(request, self._generators)

    def _fetch(self, request: Request, generators: Generators) -> Fetched:
        samples, errors = [], []
        for index, key in zip(request.indices, request.keys, strict=True):
            if self.samples_draw:
                generators.seed(request.seed, "augmentation", request.epoch, key)
            try:
                samples.append(self.dataset[index])
            except self.tolerated as error:
                errors.append((index, " ".join(str(error).split())))
        if self.collate_draws:
            generators.seed(request.seed, "collation", request.epoch, request.keys[0])
        return Fetched(self.collate(samples) if samples else None, errors)
