"""A user's data in the usual forms, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from ddp.data.source import Source, source_of
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
        assert source.samples is data and source[1:] == (None, 0, "", False)


def test_a_data_loader_is_taken_apart() -> None:
    dataset: Dataset[Any] = TensorDataset(ROWS)
    plain = source_of(DataLoader(dataset, batch_size=3, shuffle=True), what="data")
    assert plain == Source(dataset, None, 0, "batch_size=3")
    weighted = DataLoader(
        dataset,
        batch_size=2,
        num_workers=2,
        collate_fn=list,
        drop_last=True,
        sampler=WeightedRandomSampler([1.0] * 6, 6),
    )
    words = "batch_size=2, WeightedRandomSampler, drop_last"
    assert source_of(weighted, what="data") == Source(dataset, list, 2, words)
    assert source_of(weighted, what="data", collate=tuple, num_workers=0) == Source(dataset, tuple, 0, words)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Stream(), r"^data is Stream, an iterable, .*\(data=list\(dataset\) is one"),
        (DataLoader(Stream()), "^data is Stream, an iterable"),
        (DataLoader(TensorDataset(ROWS), batch_size=None), "^data is a DataLoader with batch_size=None"),
        ((x for x in range(3)), "^data is generator, an iterable, .* give a data set with __len__"),
        ({"x": ROWS}, "^data is a dict: give"),
        ((ROWS, torch.arange(5)), r"^data has inputs \[6, 2\] and targets \[5\]: the first dimension"),
    ],
    ids=["stream", "loader of a stream", "loader of batches", "generator", "dict", "lengths"],
)
def test_refused(data: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        source_of(data, what="data")
