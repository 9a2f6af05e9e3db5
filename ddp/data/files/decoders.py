"""`decode` functions for `TarSamples`: the bytes of each member become an object.

    extension          objects(sample)                 ImageAndClass()(sample)
    jpg jpeg png webp  Pillow image, RGB               float32 [3, height, width] in 0 … 1, or what `transform` returns
    cls                int                             int
    json               dict, list, …
    txt                str
    npy                NumPy array (no pickles)
    pth pt             torch.load, weights only
    other              bytes

The last part of an extension counts: `seg.png` is an image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image

from ddp.vision import torchvision

_IMAGES = ("jpg", "jpeg", "png", "webp")


def objects(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sample with its bytes as objects, by their extensions."""
    return {name: value if name == "__key__" else decoded(value, name) for name, value in sample.items()}


def decoded(data: bytes, extension: str) -> Any:
    """Returns the object in `data`; `data` itself if the extension is not known."""
    decoder = _DECODERS.get(extension.rpartition(".")[2])
    return data if decoder is None else decoder(data)


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
        return self.transform(_image(sample[name])), label


def _image(data: bytes) -> Image.Image:
    with Image.open(BytesIO(data)) as image:
        return image.convert("RGB")


def _array(data: bytes) -> Any:
    return np.load(BytesIO(data), allow_pickle=False)


def _saved(data: bytes) -> Any:
    return torch.load(BytesIO(data), map_location="cpu", weights_only=True)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(_IMAGES, _image),
    "cls": int,
    "json": json.loads,
    "txt": bytes.decode,
    "npy": _array,
    "pth": _saved,
    "pt": _saved,
}
