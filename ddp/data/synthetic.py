"""Images that are made up, of any size and number: to measure speed without a disk, and to see a model learn something.

    image = pattern[class] + noise          pattern: 4×4 random colours per class, enlarged;  noise: normal, deviation 2

Sample k is a function of (seed, side, k) alone; nothing is stored, so a million images of 224×224 take no memory. The
classes are easy to tell from the patterns: a linear model gets nearly all test images right.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ddp.data.splits import Splits
from ddp.errors import ConfigError

_NOISE = 2.0


class SyntheticImages:
    """`num_samples` pairs (image [channels, image_size, image_size], class).

    Args:
        num_samples: how many.
        patterns: what the images of each class have in common, [num_classes, channels, image_size, image_size].
        seed: chooses classes and noise.
        side: "train" or "test"; the samples of the two have nothing in common but the patterns.
    """

    def __init__(self, *, num_samples: int, patterns: Tensor, seed: int, side: str) -> None:
        self.num_samples = num_samples
        self.patterns = patterns
        self.seed = seed
        self.side = side

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"image {index} of {self.num_samples}")
        random = _generator(self.seed, self.side, index)
        label = int(torch.randint(len(self.patterns), (), generator=random))
        return self.patterns[label] + _NOISE * torch.randn(
            self.patterns.shape[1:], generator=random, device="cpu"
        ), label


def prepare(root: str | Path) -> None:
    """Nothing to do: the images are computed."""


def load(
    root: str | Path,
    *,
    image_size: int = 32,
    channels: int = 3,
    num_classes: int = 10,
    num_train: int = 4096,
    num_test: int = 512,
    seed: int = 0,
) -> Splits:
    """Made-up images; `root` is not used. `seed` belongs to the data, not to the run.

    Raises:
        ConfigError: a number is below 1.
    """
    numbers = (image_size, channels, num_classes, num_train, num_test)
    names = ("image_size", "channels", "num_classes", "num_train", "num_test")
    for name, number in zip(names, numbers, strict=True):
        if number < 1:
            raise ConfigError(f"{name}={number} makes no images; choose 1 or more")
    colours = torch.randn(num_classes, channels, 4, 4, generator=_generator(seed, "patterns", 0), device="cpu")
    patterns = F.interpolate(colours, size=(image_size, image_size), mode="nearest")
    train, test = (
        SyntheticImages(num_samples=number, patterns=patterns, seed=seed, side=side)
        for side, number in (("train", num_train), ("test", num_test))
    )
    return Splits(
        train=train,
        test=test,
        kind="images",
        sample_shape=(channels, image_size, image_size),
        num_classes=num_classes,
        name=f"synthetic images, seed {seed}",
    )


def _generator(seed: int, side: str, index: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {side} {index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
