"""What all data sets promise, for every one that needs no download; and the set in memory.

Tests: ddp/data/samples.py.
"""

import socket
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.utils.data import default_collate

from ddp.data.samples import Splits, TensorSet
from ddp.data.sets import image_sets, text_sets
from ddp.errors import ConfigError
from ddp.run.assembly import stages as build
from ddp.run.settings.config import Config

MEMBERS: dict[str, Callable[[], Splits]] = {
    "digits": lambda: image_sets.load_digits(),
    "standard library": lambda: text_sets.load_standard_library(context=64),
    "synthetic": lambda: image_sets.load_synthetic(image_size=12, num_classes=3, num_train=20, num_test=10),
}


@pytest.fixture(params=MEMBERS, ids=str, scope="module")
def member(request: pytest.FixtureRequest) -> Splits:
    return MEMBERS[request.param]()


def test_samples_are_what_the_splits_say(member: Splits) -> None:
    for side in (member.train, member.test):
        for index in (0, 1, len(side) - 1):
            sample, target = side[index]
            target = torch.as_tensor(target)
            assert tuple(sample.shape) == member.sample_shape
            assert sample.dtype == (torch.float32 if len(member.sample_shape) == 3 else torch.int64)
            assert target.dtype == torch.int64
            assert target.shape == (() if len(member.sample_shape) == 3 else sample.shape)
            assert 0 <= int(target.min()) <= int(target.max()) < member.num_classes
        with pytest.raises(IndexError):
            side[len(side)]


@pytest.mark.parametrize("name", ["digits", "standard library"])
def test_a_batch_is_its_samples_collated(name: str) -> None:
    side: Any = MEMBERS[name]().train
    indices = [3, 0, 17, 3]
    expected = default_collate([side[index] for index in indices])
    for batch, collated in zip(side.batch(indices), expected, strict=True):
        assert torch.equal(batch, collated)
        assert batch.dtype == collated.dtype


def test_no_random_number_is_drawn(member: Splits, request: pytest.FixtureRequest) -> None:
    """So the split cannot depend on the run's seed, and loading does not disturb the run's random numbers."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again = MEMBERS[request.node.callspec.params["member"]]()
    assert torch.equal(torch.get_rng_state(), before)
    assert again.name == member.name
    for old, new in ((member.train, again.train), (member.test, again.test)):
        assert len(old) == len(new)
        for index in (0, 7, len(old) - 1):
            for a, b in zip(old[index], new[index], strict=True):
                assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_tensor_set_transforms_batches_as_it_does_samples() -> None:
    pixels = torch.randint(256, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = TensorSet(pixels, torch.arange(6), transform=lambda x: x.float() / 255)
    images, classes = samples.batch(range(5, -1, -1))
    assert torch.equal(images, pixels.flip(0).float() / 255)
    assert classes.tolist() == [5, 4, 3, 2, 1, 0]
    assert torch.equal(samples[2][0], images[3])


def test_tensor_set_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="3 inputs, but 2 targets"):
        TensorSet(torch.zeros(3, 1), torch.zeros(2))


def test_workers_that_load_different_data_are_told_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(num_samples: int) -> Splits:
        samples = TensorSet(torch.zeros(num_samples, 2), torch.zeros(num_samples))
        return Splits(train=samples, test=samples, sample_shape=(2,), num_classes=3, name="mine")

    told: list[Any] = []
    monkeypatch.setattr(build, "all_gather_object", lambda _, mine: told.append(mine) or told)
    for host in ("a", "a", "b"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        build._check_data(Config(), split(5), cast(Any, None))
    monkeypatch.setattr(socket, "gethostname", lambda: "c")
    words = r"\(on a, b: mine: 5 \+ 5 samples of \(2,\), 3 classes; on c: mine: 4 \+ 4 samples .*\); copy"
    with pytest.raises(ConfigError, match=f"^data=digits is not the same on all hosts {words}"):
        build._check_data(Config(), split(4), cast(Any, None))
