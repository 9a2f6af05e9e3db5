"""Scanned handwritten digits, which come with scikit-learn: 1,797 images of 8×8 grey pixels. Nothing to download.

    0 … 16 per pixel  →  (pixel − mean) / deviation  →  [1, 8, 8] float32, class 0 … 9

A fifth of *each class* is held out, chosen once and for all: the choice depends on no run's seed, so accuracies of
different runs are about the same 359 images. Source: UCI, "Optical Recognition of Handwritten Digits" (test part).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ddp.data.samples import Splits, TensorSet

_HELD_OUT_SHARE = 0.2
_MEAN, _DEVIATION = 4.884, 6.017  # of all pixels


def load_digits() -> Splits:
    """Returns 1,438 images to train on and 359 held out."""
    table = np.loadtxt(_file(), delimiter=",")  # [1797, 65]: pixels, and the class
    pixels, classes = table[:, :-1], table[:, -1].astype(np.int64)
    images = torch.as_tensor((pixels - _MEAN) / _DEVIATION, dtype=torch.float32, device="cpu").view(-1, 1, 8, 8)
    labels = torch.as_tensor(classes, dtype=torch.int64, device="cpu")
    is_test = torch.as_tensor(_held_out(classes), device="cpu")
    return Splits(
        train=TensorSet(images[~is_test], labels[~is_test]),
        test=TensorSet(images[is_test], labels[is_test]),
        sample_shape=(1, 8, 8),
        num_classes=10,
        name="digits (scikit-learn)",
    )


def _file() -> Path:
    """Finds the file without importing scikit-learn, which imports scipy.stats: a second for each process."""
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None  # it is one of our dependencies
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _held_out(classes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Marks a fifth of each class."""
    random = np.random.RandomState(0)  # numpy promises never to change its stream; of newer generators it does not
    chosen = np.zeros(len(classes), dtype=np.bool_)
    for digit in np.unique(classes):
        members = random.permutation(np.flatnonzero(classes == digit))
        chosen[members[: round(_HELD_OUT_SHARE * len(members))]] = True
    return chosen
