"""The digits' split against scikit-learn's own arrays."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from ddp.data.samples import TensorSet
from ddp.data.sets import image_sets


def sides() -> tuple[TensorSet, TensorSet]:
    splits = image_sets.load_digits()
    assert isinstance(splits.train, TensorSet)
    assert isinstance(splits.test, TensorSet)
    return splits.train, splits.test


def test_every_image_is_on_exactly_one_side() -> None:
    train, test = sides()
    pixels, classes = load_digits(return_X_y=True)

    def rows(images: np.ndarray, labels: np.ndarray) -> list[tuple[int, ...]]:
        return sorted((*map(int, image), int(label)) for image, label in zip(images, labels, strict=True))

    images = torch.cat([train.inputs, test.inputs]).flatten(1).double() * 6.017 + 4.884
    assert rows(images.round().numpy(), torch.cat([train.targets, test.targets]).numpy()) == rows(pixels, classes)


def test_each_class_is_held_out_by_a_fifth() -> None:
    train, test = sides()
    held_out, rest = torch.bincount(test.targets), torch.bincount(train.targets)
    assert ((held_out / (held_out + rest) - 0.2).abs() < 0.005).all()
    assert (len(train), len(test)) == (1438, 359)


def test_pixels_are_normalised() -> None:
    pixels = torch.cat([side.inputs.flatten() for side in sides()])
    assert abs(pixels.mean()) < 1e-3
    assert abs(pixels.std() - 1) < 1e-3


def test_the_split_is_the_published_one() -> None:
    """Accuracies of different versions of this package are comparable only while this holds."""
    _, test = sides()
    assert test.targets[:12].tolist() == [3, 7, 3, 9, 0, 8, 7, 0, 8, 0, 3, 3]
    assert int((test.inputs.double() * 6.017 + 4.884).round().sum()) == 111_461
