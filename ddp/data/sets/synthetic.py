"""Made-up images of any size and number: to measure speed without a disk, and to see a model learn something.

    image = pattern[class] + noise          pattern: 4×4 random colours per class, enlarged;  noise: normal, deviation 2

Sample k is a function of (side, k) alone. Nothing is stored, so a million images of 224×224 take no memory. The
classes are easy to tell apart by their patterns: a linear model gets nearly all test images right.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F

from ddp.data.samples import Splits

_SEED = 0  # of the data, not of the run
_NOISE = 2.0


class SyntheticImages:
    """A data set of `num_samples` pairs (image [3, image_size, image_size], class).

    Args:
        patterns: by class, [num_classes, 3, image_size, image_size].
        side: "train" or "test"; the samples of the two have nothing in common but the patterns.
    """

    def __init__(self, *, num_samples: int, patterns: Tensor, side: str) -> None:
        self.num_samples = num_samples
        self.patterns = patterns
        self.side = side

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"image {index} of {self.num_samples}")
        random = _generator(self.side, index)
        label = int(torch.randint(len(self.patterns), (), generator=random))
        return self.patterns[label] + _NOISE * torch.randn(
            self.patterns.shape[1:], generator=random, device="cpu"
        ), label


def load_synthetic(
    *, image_size: int = 32, num_classes: int = 10, num_train: int = 4096, num_test: int = 512
) -> Splits:
    """Returns made-up images in colour."""
    colours = torch.randn(num_classes, 3, 4, 4, generator=_generator("patterns", 0), device="cpu")
    patterns = F.interpolate(colours, size=(image_size, image_size), mode="nearest")
    return Splits(
        train=SyntheticImages(num_samples=num_train, patterns=patterns, side="train"),
        test=SyntheticImages(num_samples=num_test, patterns=patterns, side="test"),
        sample_shape=(3, image_size, image_size),
        num_classes=num_classes,
        name=f"synthetic images, seed {_SEED}",
    )


def _generator(side: str, index: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{_SEED} {side} {index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
