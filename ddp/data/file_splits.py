"""Splits made of files: one set of files to train on, and another one that is held out.

    load_tar      images and classes in WebDataset's layout      augmented like a folder's: image_sets.py
    load_lines    JSON lines or CSV: numbers, and a target        float32 [number of inputs], class or number
    load_tokens   flat files of tokens                            windows of `context` tokens

Addresses are what `listing.py` takes: a file, a pattern such as train-{000..099}.tar, or a folder; local, or s3://…

Read before: `tokens.py`. Read next: `synthetic.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ddp.data.cache import OnInput, Transformed
from ddp.data.decoders import ImageAndClass
from ddp.data.file_index import Format
from ddp.data.files import FileSet
from ddp.data.image_sets import folder_transforms
from ddp.data.lines import Csv, JsonLines
from ddp.data.listing import identity_of
from ddp.data.splits import Splits
from ddp.data.storage import Storage
from ddp.data.tar_shards import TarSamples
from ddp.data.tokens import TokenSet
from ddp.errors import ConfigError, UnreadableSample

_NUM_TRIED = 100  # samples, of which one must be readable


@dataclass(frozen=True, kw_only=True)
class Files:
    """Says where the files of a data set are.

    Attributes:
        path, test_path: of the training and the held-out files.
        index_dir: folder with their indexes.
        cache_dir: folder on this host into which remote files are copied; None: they are streamed.
        build: whether missing indexes are made; only one process of a host does so.
    """

    path: str
    test_path: str
    index_dir: str | Path
    cache_dir: str | Path | None = None
    build: bool = True

    def sides(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Returns the addresses of both sides, with the other arguments of `FileSet`."""
        if self.path == self.test_path:
            raise ConfigError(f"path and test_path are both {self.path}: held-out samples must be others")
        options = {"index_dir": self.index_dir, "build": self.build, "storage": Storage(cache_dir=self.cache_dir)}
        return (self.path, options), (self.test_path, options)


def load_tar(files: Files, *, image_size: int, num_classes: int) -> Splits:
    """Returns images and classes from tar files."""
    # A cache keeps what this decodes, before it is augmented.
    decoded = TarSamples(decode=ImageAndClass(transform=np.asarray, num_classes=num_classes))
    splits = _splits(files, decoded, sample_shape=(3, image_size, image_size), num_classes=num_classes)
    train, test = (
        Transformed(samples, OnInput(_Decoded(transform)))
        for samples, transform in zip((splits.train, splits.test), folder_transforms(image_size), strict=True)
    )
    return replace(splits, train=train, test=test)


class _Decoded:
    """Applies a transform of Pillow images to an array [height, width, 3]."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, pixels: NDArray[np.uint8]) -> Any:
        return self.transform(Image.fromarray(pixels))


def load_lines(
    files: Files, *, kind: Literal["jsonl", "csv"], inputs: Sequence[str], target: str, num_classes: int | None
) -> Splits:
    """Returns pairs of numbers and a target from lines; the target is a class if there are classes."""
    dtype = torch.float32 if num_classes is None else torch.int64
    format = (Csv if kind == "csv" else JsonLines)(
        inputs=list(inputs), target=target, target_dtype=dtype, num_classes=num_classes
    )
    return _splits(files, format, sample_shape=None, num_classes=num_classes)


def load_tokens(files: Files, *, context: int, dtype: str, vocab_size: int) -> Splits:
    """Returns windows of tokens."""
    train, test = (
        TokenSet(path, context=context, dtype=dtype, vocab_size=vocab_size, **options)
        for path, options in files.sides()
    )
    _check_apart(files, train, test)
    return Splits(
        train=train, test=test, sample_shape=(context,), num_classes=vocab_size, name=_name(files, train, test)
    )


def _splits(files: Files, format: Format, *, sample_shape: tuple[int, ...] | None, num_classes: int | None) -> Splits:
    train, test = (FileSet(path, format, **options) for path, options in files.sides())
    _check_apart(files, train, test)
    shape = _shape_of(train) if sample_shape is None else sample_shape
    return Splits(train=train, test=test, sample_shape=shape, num_classes=num_classes, name=_name(files, train, test))


def _shape_of(train: FileSet) -> tuple[int, ...]:
    """Returns the shape of the first input that can be read; some that cannot may be left out later."""
    for index in range(min(_NUM_TRIED, len(train)) - 1):
        with suppress(UnreadableSample):
            return tuple(train[index][0].shape)
    return tuple(train[min(_NUM_TRIED, len(train)) - 1][0].shape)


def _check_apart(files: Files, train: FileSet, test: FileSet) -> None:
    """Checks that no file is on both sides, also under another name.

    Raises:
        ConfigError: one is.
    """
    if not files.build:  # the process that builds has compared them
        return
    known = {identity_of(address): address for address in train.addresses}
    for address in test.addresses:
        if (name := known.get(identity_of(address))) is not None:
            also = "" if name == address else f", there as {name}"
            raise ConfigError(
                f"{address} belongs to test_path={files.test_path} and to path={files.path}{also}: held-out samples "
                "must be others"
            )


def _name(files: Files, *sets: FileSet) -> str:
    """Returns the files in words, so that hosts can compare what they have."""
    sizes = [f"{np.sum(each.file_sizes):,} samples in {len(each.addresses):,} files" for each in sets]
    return f"{files.path} ({sizes[0]}), {files.test_path} ({sizes[1]})"
