"""Made-up images: independent of order and of the other side, and learnable by a closed formula."""

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ddp.data.samples import Samples
from ddp.data.sets.image_sets import load_synthetic


def stacked(side: Samples) -> tuple[Tensor, Tensor]:
    images, classes = default_collate([side[i] for i in range(len(side))])
    return images, classes


def test_the_rule_can_be_learned() -> None:
    """The class whose mean training image is nearest: the textbook's answer for patterns in white noise."""
    splits = load_synthetic(image_size=16, num_train=400, num_test=200)
    images, classes = stacked(splits.train)
    means = torch.stack([images[classes == label].mean(0) for label in range(10)])
    test_images, test_classes = stacked(splits.test)
    nearest = torch.cdist(test_images.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == test_classes).float().mean() > 0.95
    assert torch.bincount(classes, minlength=10).min() > 15


def test_a_sample_does_not_depend_on_what_was_read_before() -> None:
    side = load_synthetic(num_train=8).train
    forwards = [side[i][0] for i in range(8)]
    backwards = [side[i][0] for i in reversed(range(8))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not torch.equal(forwards[0], forwards[1])


def test_sides_differ() -> None:
    splits = load_synthetic()
    assert not torch.equal(splits.train[0][0], splits.test[0][0])


@pytest.mark.parametrize("size", [1, 3, 224])
def test_any_size(size: int) -> None:
    image, _ = load_synthetic(image_size=size).train[4095]
    assert image.shape == (3, size, size)
