"""A `decode` function for `TarSamples`: an image and its class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from PIL import Image

from ddp.vision import torchvision

_IMAGES = ("jpg", "jpeg", "png", "webp")


class ImageAndClass:
    """Makes pairs (image, class).

    Args:
        image: extension of the image; None for the first one that is an image's.
        target: extension of the class, a whole number in decimal.
        transform: from a Pillow image to a tensor, such as torchvision's; None for its `ToTensor`.
        num_classes: the class is one of 0 … num_classes - 1; None: any number.
    """

    def __init__(
        self,
        *,
        image: str | None = None,
        target: str = "cls",
        transform: Callable[[Any], Any] | None = None,
        num_classes: int | None = None,
    ) -> None:
        self.image, self.target, self.num_classes = image, target, num_classes
        self.transform = torchvision().transforms.ToTensor() if transform is None else transform

    def __call__(self, sample: Mapping[str, Any]) -> tuple[Any, int]:
        names = (self.image,) if self.image else _IMAGES
        name = next((each for each in names if each in sample), None)
        if name is None or self.target not in sample:
            found = [each for each in sample if each != "__key__"]
            raise ValueError(f"it has {found}, and not {' or '.join(names)} beside {self.target}")
        label = int(sample[self.target])
        if self.num_classes is not None and not 0 <= label < self.num_classes:
            what = f"num_classes={self.num_classes} has the classes 0 … {self.num_classes - 1}"
            raise ValueError(f"{self.target} is {label}, and {what}")
        with Image.open(BytesIO(sample[name])) as image:
            return self.transform(image.convert("RGB")), label
