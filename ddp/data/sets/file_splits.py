"""Splits made of files: one set of files to train on, and another one that is held out.

    load_tar      images and classes in WebDataset's layout      augmented like a folder's: image_sets.py
    load_rows     CSV, JSON lines, Parquet, Arrow: a target       float32 [number of inputs], class or number
    load_tokens   flat files of tokens                            windows of `context` tokens

Addresses are what `files/storage.py` takes: a file, a pattern such as train-{000..099}.tar, or a folder; local, or s3://…
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp.data.files.file_set import AnyFormat, FileSet
from ddp.data.files.rows import Arrow, Csv, JsonLines, Parquet
from ddp.data.files.storage import Storage, identity_of
from ddp.data.files.tar_files import ImageAndClass, TarSamples
from ddp.data.samples import OnInput, Splits, Transformed, as_it_is
from ddp.data.sets.image_sets import Augment, folder_transforms
from ddp.data.sets.text_sets import Tokenizer, TokenSet, Windows
from ddp.errors import ConfigError, UnreadableSample

ROWS: dict[str, Any] = {"csv": Csv, "jsonl": JsonLines, "parquet": Parquet, "arrow": Arrow}
_NUM_TRIED = 100  # samples, of which one must be readable


@dataclass(frozen=True, kw_only=True)
class Files:
    """The places of the files of a data set.

    Attributes:
        path, test_path: of the training and the held-out files; path=None: only those are read.
        validation_path: of the validation files; None: there are none.
        index_dir: folder with their indexes.
        cache_dir: folder on this host into which remote files are copied; None: they are streamed.
        build: whether missing indexes are made; only one process of a host does so.
    """

    path: str | None
    test_path: str
    validation_path: str | None = None
    index_dir: str | Path
    cache_dir: str | Path | None = None
    build: bool = True

    def sides(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Returns the addresses of each side, with the other arguments of `FileSet`: train, test, and validation."""
        given = self.named()
        for (name, path), (other, same) in combinations(given.items(), 2):
            if path == same:
                raise ConfigError(f"{name} and {other} are both {path}: held-out samples must be others")
        options = {"index_dir": self.index_dir, "build": self.build, "storage": Storage(cache_dir=self.cache_dir)}
        return tuple((path, options) for path in given.values())

    def named(self) -> dict[str, str]:
        """Returns the addresses of each side under the name of its setting."""
        given = {"path": self.path, "test_path": self.test_path, "validation_path": self.validation_path}
        return {name: path for name, path in given.items() if path is not None}


def load_tar(files: Files, *, image_size: int, num_classes: int, augment: Augment | None = None) -> Splits:
    """Returns images and classes from tar files; `augment` as for the images of a folder."""
    decoded = TarSamples(decode=ImageAndClass(transform=as_it_is, num_classes=num_classes))
    splits = _splits(files, decoded, shape=(3, image_size, image_size), num_classes=num_classes)
    of_train, of_test = map(OnInput, folder_transforms(image_size, augment))
    return replace(
        splits,
        train=Transformed(splits.train, of_train),
        test=Transformed(splits.test, of_test),
        validation=None if splits.validation is None else Transformed(splits.validation, of_test),
        unaugmented=Transformed(splits.train, of_test),
    )


def load_rows(
    files: Files,
    *,
    kind: str,
    inputs: Sequence[str],
    target: str,
    num_classes: int | None,
    missing: float | None = None,
) -> Splits:
    """Returns pairs of numbers and a target from rows; the target is a class if there are classes."""
    dtype = torch.float32 if num_classes is None else torch.int64
    format = ROWS[kind](
        inputs=list(inputs), target=target, target_dtype=dtype, num_classes=num_classes, missing=missing
    )
    return _splits(files, format, shape=None, num_classes=num_classes)


def load_text(files: Files, *, kind: str, field: str, tokenizer: str, context: int) -> Splits:
    """Returns windows of tokens of the texts in a field of rows."""
    tokens = Tokenizer(tokenizer)
    sides = [FileSet(path, ROWS[kind](text=field), **options) for path, options in files.sides()]
    splits = _of_sides(files, sides, sample_shape=(context,), num_classes=tokens.vocab_size)
    windows: list[Any] = [Windows(tokens.joined(side), context=context) for side in sides]
    return replace(splits, **_by_side(files, windows))


def load_tokens(files: Files, *, context: int, dtype: str, vocab_size: int) -> Splits:
    """Returns windows of tokens."""
    sides = [
        TokenSet(path, context=context, dtype=dtype, vocab_size=vocab_size, **options)
        for path, options in files.sides()
    ]
    return _of_sides(files, sides, sample_shape=(context,), num_classes=vocab_size)


def _splits(files: Files, format: AnyFormat, *, shape: tuple[int, ...] | None, num_classes: int | None) -> Splits:
    sides = [FileSet(path, format, **options) for path, options in files.sides()]
    return _of_sides(files, sides, sample_shape=shape, num_classes=num_classes)


def _of_sides(
    files: Files, sides: Sequence[FileSet], *, sample_shape: tuple[int, ...] | None, num_classes: int | None
) -> Splits:
    """Returns the splits of train, test and, if there is one, validation."""
    _check_apart(files, sides)
    return Splits(
        **{"train": (), **_by_side(files, sides)},
        sample_shape=_shape_of(sides[0]) if sample_shape is None else sample_shape,
        num_classes=num_classes,
        name=_name(files, sides),
    )


def _by_side(files: Files, samples: Sequence[Any]) -> dict[str, Any]:
    """Returns samples of each side, in the order of `Files.named`, under their names in `Splits`."""
    sides = {"path": "train", "test_path": "test", "validation_path": "validation"}
    return {sides[name]: each for name, each in zip(files.named(), samples, strict=True)}


def _shape_of(train: FileSet) -> tuple[int, ...]:
    """Returns the shape of the first input that can be read; some that cannot may be left out later."""
    for index in range(min(_NUM_TRIED, len(train)) - 1):
        with suppress(UnreadableSample):
            return tuple(train[index][0].shape)
    return tuple(train[min(_NUM_TRIED, len(train)) - 1][0].shape)


def _check_apart(files: Files, sides: Sequence[FileSet]) -> None:
    """Checks that no file is on two sides, also under another name.

    Raises:
        ConfigError: one is.
    """
    if not files.build:  # the process that builds has compared them
        return
    known: dict[Any, tuple[str, str]] = {}
    for (name, path), side in zip(files.named().items(), sides, strict=True):
        mine = {identity_of(address): address for address in side.addresses}
        for identity in mine.keys() & known.keys():
            where, other = known[identity]
            also = "" if other == mine[identity] else f", there as {other}"
            raise ConfigError(
                f"{mine[identity]} belongs to {name}={path} and to {where}{also}: held-out samples must be others"
            )
        known |= {identity: (f"{name}={path}", address) for identity, address in mine.items()}


def _name(files: Files, sides: Sequence[FileSet]) -> str:
    """Returns the files as text, so that hosts can compare what they have."""
    sizes = [f"{np.sum(each.file_sizes):,} samples in {len(each.addresses):,} files" for each in sides]
    return ", ".join(f"{path} ({size})" for path, size in zip(files.named().values(), sizes, strict=True))
