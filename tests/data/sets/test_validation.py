"""A share set apart: never trained on, the same in each start, and every attribute follows its samples."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from ddp.data.orders.order import Weighted
from ddp.data.orders.sampler import sampler_of
from ddp.data.samples import Splits, TensorSet, Transformed, WholeBatches
from ddp.data.sets.validation import choose, selection_in, with_share
from ddp.errors import ConfigError

INPUTS, CLASSES = torch.arange(40.0), torch.arange(40) % 3


class Files(list[Any]):
    file_sizes = (10, 0, 16, 14)
    weights = np.arange(40.0)
    targets = tuple(range(40))
    lengths = torch.arange(1, 41)
    addresses = ("a", "b", "c", "d")


def apart(train: Any, share: float = 0.2, seed: int = 0, **others: Any) -> Splits:
    return with_share(Splits(train=train, test=[], **others), share, seed=seed)


def test_each_sample_is_on_one_side_and_the_seed_says_on_which() -> None:
    chosen = [choose(1000, 0.1, seed=seed, what="data.validation") for seed in (0, 0, 1)]
    for train, validation, _ in chosen:
        assert sorted([*train, *validation]) == list(range(1000)) and len(validation) == 100
        assert (np.diff(train) > 0).all() and 30 < np.count_nonzero(validation < 500) < 70
    first, again, other = (validation.tolist() for _, validation, _ in chosen)
    assert first == again != other
    for share, number in ((0.001, 0), (0.99, 10)):
        with pytest.raises(ConfigError, match=f"^data.validation={share}: of 10 samples that is {number}; each side"):
            choose(10, share, seed=0, what="data.validation")


def test_what_the_data_say_follows_the_samples() -> None:
    splits = apart(Files(range(40)))
    for part in (splits.train, splits.validation):
        numbers = [part[index] for index in range(len(part))]
        ends = np.cumsum(part.file_sizes)
        for file, (begin, end) in {"a": (0, 10), "b": (10, 10), "c": (10, 26), "d": (26, 40)}.items():
            place = part.addresses.index(file)
            assert numbers[ends[place] - part.file_sizes[place] : ends[place]] == [
                number for number in numbers if begin <= number < end
            ]
        assert part.weights.tolist() == part.targets == numbers
        assert isinstance(part.lengths, torch.Tensor) and part.lengths.tolist() == [number + 1 for number in numbers]
        assert not hasattr(part, "classes")
        assert pickle.loads(pickle.dumps(part))[0] == numbers[0]
    sampler, _ = sampler_of(
        splits.train, order=Weighted(splits.train.weights), sharding="auto", num_shards=2, global_batch=8, rank=0,
        world_size=1,
    )  # fmt: skip
    assert sampler.length == 32 and sampler.num_steps_per_epoch == 4


def test_whole_batches_and_transforms_keep_their_places() -> None:
    splits = apart(TensorSet(INPUTS, CLASSES))
    assert isinstance(splits.train, WholeBatches)
    inputs, classes = splits.train.batch([3, 0])
    assert [splits.train[3], splits.train[0]] == list(zip(inputs, classes, strict=True))
    doubled = apart(Transformed(list(range(40)), lambda sample: 2 * sample), unaugmented=range(100, 140))
    assert isinstance(doubled.train, Transformed) and (part := selection_in(doubled.train)) is not None
    assert doubled.train[5] == 2 * int(part.numbers[5])
    assert doubled.validation is not None and 100 <= doubled.validation[0] < 140  # as test samples are transformed


def test_a_run_does_not_go_on_with_others_set_apart() -> None:
    how: dict[str, Any] = {"order": None, "sharding": "auto", "num_shards": 1, "global_batch": 8, "rank": 0}

    def sampler(data: Any) -> Any:
        return sampler_of(data, world_size=1, **how)[0]

    data = list(range(40))
    state, whole = sampler(apart(data).train).state_dict(), sampler(data).state_dict()
    sampler(apart(data).train).load_state_dict(state)
    for other in (apart(data, seed=1), apart(data, 0.3), apart([*data, 40])):
        with pytest.raises(
            ConfigError, match=r"^the run has set apart 8 of 40 samples by seed 0 for validation, and now"
        ):
            sampler(other.train).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"^the run has set apart no samples for validation"):
        sampler(apart(data).train).load_state_dict(whole)
    with pytest.raises(ConfigError, match=r"now that would be none, so that it would train on those: give the same"):
        sampler(data).load_state_dict(state)
