"""A user's data in the usual forms, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp.data.loading.source import Source, fingerprint, source_of
from ddp.data.orders.sampler import sampler_of
from ddp.errors import ConfigError

ROWS = torch.arange(12.0).view(6, 2)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_tensors_and_arrays_become_samples() -> None:
    for pair in ((ROWS, torch.arange(6)), (ROWS.numpy(), np.arange(6))):
        source = source_of(pair, what="data")
        inputs, target = source.samples[4]
        assert (inputs.tolist(), int(target), len(source.samples)) == ([8.0, 9.0], 4, 6)
    assert source_of(source, what="data") is source


def test_what_has_length_and_index_is_taken_as_it_is() -> None:
    for data in (TensorDataset(ROWS), [(1, 2)] * 3, ROWS, range(4), [ROWS, ROWS]):
        source = source_of(data, what="data")
        assert source == Source(data)


class Lazy:
    """Opens its file at the first sample, as data sets of h5py do for loader processes."""

    file: Any = None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        self.file = self.file or Path(__file__).open("rb", buffering=0)  # noqa: SIM115
        self.file.seek(index)
        return int(self.file.read(1)[0])


def test_a_look_at_samples_opens_no_file_that_loader_processes_would_share() -> None:
    lazy = Lazy()
    found = fingerprint(source_of(DataLoader(lazy, num_workers=2), what="data"))  # type: ignore[arg-type]
    assert lazy.file is None, "processes that are forked from here would have one offset for all"
    assert found == fingerprint(source_of(list(Path(__file__).read_bytes()[:3]), what="data")) is not None


def test_a_data_loader_is_taken_apart() -> None:
    dataset: Dataset[Any] = TensorDataset(ROWS)
    plain = source_of(DataLoader(dataset, batch_size=3, shuffle=True), what="data")
    assert plain == Source(dataset, None, 0, "batch_size=3")
    whole = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=list, timeout=3, worker_init_fn=print)
    processes: dict[str, Any] = {"worker_init_fn": print}  # torch's own prefetch_factor is nobody's choice
    found = Source(dataset, list, 2, "batch_size=2, timeout", processes=processes)
    assert source_of(whole, what="data") == found
    deep = DataLoader(dataset, num_workers=1, prefetch_factor=4)
    assert source_of(deep, what="data").processes == {"prefetch_factor": 4}
    assert source_of(whole, what="data", collate=tuple, num_workers=0) == found._replace(collate=tuple, num_workers=0)


class Own(Sampler[int]):
    def __iter__(self) -> Any:
        return iter([0, 1])


class Batches(BatchSampler):
    def __iter__(self) -> Any:
        return iter([[0, 1], [2, 3]])


SIX = TensorDataset(ROWS)


def trained_on(loader: DataLoader[Any], epoch: int = 0) -> list[int]:
    """The samples of an epoch of two ranks in steps of four, by the first number of each."""
    source, found = source_of(loader, what="data", trains=True), []
    for rank in range(2):
        options: dict[str, Any] = {"global_batch": 4, "num_shards": 2, "world_size": 2, "drop_last": source.drop_last}
        sampler, _ = sampler_of(source.samples, order=source.order, sharding="auto", rank=rank, **options)
        for _ in range(epoch):
            for plan in sampler.plans():
                sampler.commit(plan)
        plans = list(sampler.plans())
        found += [index for plan in plans for micro in plan.micros for index in micro.indices]
    return sorted(int(source.samples[index][0][0]) // 2 for index in found)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(SIX, batch_size=2), [0, 1, 2, 3, 4, 5]),
        (DataLoader(SIX, sampler=SubsetRandomSampler(torch.tensor([1, 3, 4]))), [1, 3, 4]),
        (DataLoader(SIX, sampler=[5, 0, 0]), [0, 0, 5]),
        (DataLoader(SIX, sampler=WeightedRandomSampler([0, 0, 1.0, 0, 0, 0], 9)), [2] * 9),
        (DataLoader(SIX, batch_sampler=BatchSampler(SubsetRandomSampler(range(3)), 2, drop_last=False)), [0, 1, 2]),
        (DataLoader(SIX, batch_sampler=BatchSampler(WeightedRandomSampler([0, 1.0, 0, 0, 0, 0], 9), 2, True)), [1] * 8),
        (DataLoader(SIX, sampler=torch.utils.data.DistributedSampler(SIX, 2, 0)), [0, 1, 2, 3, 4, 5]),
    ],
    ids=["plain", "subset", "list", "weighted", "batches of a subset", "whole batches", "distributed"],
)
def test_exactly_the_samples_that_a_data_loader_chooses_are_trained_on(loader: Any, expected: list[int]) -> None:
    assert trained_on(loader) == expected


def test_a_data_loader_s_random_choice_is_another_one_in_each_epoch() -> None:
    for loader, number, repeats in (
        (DataLoader(SIX, sampler=RandomSampler(SIX, num_samples=3)), 3, False),
        (DataLoader(SIX, batch_size=3, shuffle=True, drop_last=True), 4, False),
        (DataLoader(SIX, sampler=RandomSampler(SIX, replacement=True, num_samples=30)), 30, True),
    ):
        epochs = [trained_on(loader, epoch) for epoch in range(8)]
        assert {len(found) for found in epochs} == {number} and len(set(map(tuple, epochs))) > 1
        assert {index for found in epochs for index in found} == set(range(6))
        assert any(len(set(found)) < number for found in epochs) == repeats


class Scales(DataLoader[Any]):
    """Changes batches where only its own loop would see it."""

    def __iter__(self) -> Any:
        return (100 * batch for batch in super().__iter__())


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (Scales(SIX, batch_size=2), "^data is a Scales, a DataLoader with its own __iter__"),
        (Scales(Stream()), "with its own __iter__, whose work on batches would be left out: give its data set"),
        (DataLoader(SIX, sampler=Own()), "^data is a DataLoader whose Own chooses them in a way .* order=…"),
        (DataLoader(SIX, batch_sampler=Batches(Own(), 2, False)), "with the batch_sampler Batches, .*TokenBudget"),
        (DataLoader(SIX, batch_sampler=BatchSampler(Own(), 2, False)), "whose Own chooses them"),
        (DataLoader(SIX, sampler=WeightedRandomSampler([1.0] * 6, 3, False)), "replacement=False.*ddp.data.Weighted"),
        (
            DataLoader(SIX, sampler=WeightedRandomSampler([1.0] * 5, 3)),
            "was made for 5 samples, and its data set has 6",
        ),
        (DataLoader(SIX, sampler=RandomSampler(range(5))), "RandomSampler was made for 5 samples"),
        (DataLoader(SIX, sampler=RandomSampler(SIX, num_samples=7)), r"num_samples=7\) over 6 samples"),
        (DataLoader(SIX, sampler=[0, 6]), "has the index 6, of 6 samples"),
        (DataLoader(Stream(), drop_last=True), "of a stream with drop_last"),
        (DataLoader(Stream(), num_workers=1, worker_init_fn=print), "of a stream with worker_init_fn"),
    ],
)
def test_a_choice_of_samples_that_cannot_be_honoured_is_refused(loader: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        source_of(loader, what="data", trains=True)


def test_an_evaluation_takes_every_sample_once() -> None:
    for loader in (DataLoader(SIX, shuffle=True), DataLoader(SIX, sampler=[3, 1])):
        assert source_of(loader, what="test_data").order is None
    for choice, options in {
        "drop_last": {"drop_last": True},
        "WeightedRandomSampler": {"sampler": WeightedRandomSampler([1.0] * 6, 6)},
        "RandomSampler": {"sampler": RandomSampler(SIX, replacement=True)},
    }.items():
        with pytest.raises(ConfigError, match=f"^test_data is a DataLoader with {choice}, and every sample is taken"):
            source_of(DataLoader(SIX, **options), what="test_data")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Stream(), r"^data is Stream, an iterable, .*\(data=list\(dataset\) is one"),
        (DataLoader(Stream()), "^data is Stream, an iterable"),
        (DataLoader(TensorDataset(ROWS), batch_size=None), "^data is a DataLoader with batch_size=None"),
        ((x for x in range(3)), "^data is generator, an iterable, .* give a data set with __len__"),
        ({"x": ROWS}, "^data is a dict: give"),
        ("path/of/data", "^data is a str: give a data set"),
        (torch.tensor(0.1), "^data is a Tensor: give a data set"),
        ((ROWS, torch.arange(5)), r"^data has inputs \[6, 2\] and targets \[5\]: the first dimension"),
    ],
    ids=["stream", "loader of a stream", "loader of batches", "generator", "dict", "path", "number", "lengths"],
)
def test_refused(data: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        source_of(data, what="data")
