"""Images: MNIST, CIFAR-10, folders in ImageNet's layout, digits that need no download, and made-up images.

    set        download      files under root                          training images are
    MNIST       12 MB        MNIST/raw/train-images-idx3-ubyte …       as they are, [1, 28, 28]
    CIFAR10    170 MB        cifar-10-batches-py/data_batch_1 …        shifted and mirrored, [3, 32, 32]
    FOLDER     none          train/CLASS/*.jpg, val/CLASS/*.jpg        cut out and mirrored, [3, s, s]
    digits     none          scikit-learn's own                        as they are, [1, 8, 8]
    synthetic  none          none                                      made up, [3, s, s]

The images of a folder are listed once, by the parent, for every process. Hidden folders, such as .ipynb_checkpoints,
are no classes, and hidden files no images.

The user's own augmentation replaces "shifted and mirrored", "cut out and mirrored".

An image from a file becomes float32 and is normalised per channel with the statistics of the training images.
Augmentation draws from torch's global generator, as torchvision's transforms do; `loading/fetching.py` seeds it for
each sample. Images that are not augmented lie in memory as bytes and are read in whole batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ddp.data.files.storage import identity_of, index_place, write_index
from ddp.data.samples import OnInput, Splits, TensorSet, Transformed
from ddp.errors import ConfigError
from ddp.process.files import is_hidden, read_own
from ddp.process.records import damage_as_error
from ddp.vision import torchvision

# --- The images of a folder, listed once: by the parent, for every process -------------------------------------------
#
#     INDEX_DIR/image_folder-4f1d….json      {"classes": ["cat", "dog"], "files": [["cat/1.png", 0], …]}
#
# Without the list each process would read the whole tree, and might find other files than its neighbours if one is
# added meanwhile; sample 17 would be another image on each rank then.


def image_folder(path: Path, *, index_dir: Path, build: bool) -> Any:
    """Returns torchvision's `ImageFolder` of the images that the index lists.

    Args:
        index_dir: folder with the index.
        build: list the images, and write the index. Only one process of a host does so.

    Raises:
        ConfigError: there is no image, or no index.
    """
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]
    index = index_place(index_dir.absolute() / f"image_folder-{digest}.json")
    if build:
        _write(index, path)
    remedy = f"the images under {path} are not known; start the run again, so that the parent lists them"
    with damage_as_error(index, remedy):
        listed = json.loads(read_own(index, most=sys.maxsize))
        classes, files = list(listed["classes"]), [(str(path / name), int(label)) for name, label in listed["files"]]

    class Listed(torchvision().datasets.ImageFolder):  # type: ignore[misc]  # it looks for files in its constructor
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            return classes, {name: label for label, name in enumerate(classes)}

        @staticmethod
        def make_dataset(*_: Any, **__: Any) -> list[tuple[str, int]]:
            return files

        def __reduce__(self) -> Any:  # for loader processes that are not forked: this class has no name that they know
            return partial(image_folder, index_dir=index_dir, build=False), (path,)

    return Listed(path)


def same_file(one: Any, other: Any) -> tuple[str, str] | None:
    """Returns the names of a file that is in both of two folders of images, also by a link; None if there is none.

    Names are compared by the inode numbers that come with listing a folder, without a stat(2) of millions of images.
    """
    names = _numbered(other)
    for number, file in _numbered(one).items():
        if (same := names.get(number)) is not None and identity_of(file) == identity_of(same):
            return file, same
    return None


def _numbered(images: Any) -> dict[tuple[int, int], str]:
    """Returns the name of each image under the numbers of its file system and of the file there."""
    wanted, found = {file for file, _ in images.samples}, {}
    for folder in sorted({file.rpartition(os.sep)[0] for file in wanted}):
        device = Path(folder).stat().st_dev
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.path in wanted:
                    status = entry.stat() if entry.is_symlink() else None
                    number = (device, entry.inode()) if status is None else (status.st_dev, status.st_ino)
                    found[number] = entry.path
    return found


def _write(index: Path, path: Path) -> None:
    """Looks for images, and writes the index if it has changed."""
    folder = torchvision().datasets.folder

    def is_image(file: str) -> bool:
        inside = Path(file).relative_to(path).parts
        return file.lower().endswith(folder.IMG_EXTENSIONS) and not any(map(is_hidden, inside))

    try:
        classes = [name for name in folder.find_classes(path)[0] if not is_hidden(name)]
        numbers = {name: number for number, name in enumerate(classes)}
        found = folder.make_dataset(str(path), numbers, is_valid_file=is_image)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(
            f"no images to use under {path}: {error}. Expected {path}/CLASS/*.jpg (or .png …), one folder per class; "
            "data=digits needs no files"
        ) from error
    text = json.dumps({"classes": classes, "files": [[os.path.relpath(file, path), label] for file, label in found]})
    with suppress(OSError):
        if text == read_own(index, most=sys.maxsize):
            return
    write_index(index, [text.encode()])


_MNIST_STATISTICS = (0.1307,), (0.3081,)
_CIFAR10_STATISTICS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_IMAGENET_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_NETWORK_TIMEOUT_S = 30.0

Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation per channel, of pixels in 0 … 1
Augment = Callable[[Any], Any]
"""The user's own augmentation: turns a Pillow image into another, which is then normalised, or a finished tensor."""


# MNIST: 60,000 + 10,000 scanned digits (LeCun et al. 1998)


def load_mnist(root: str | Path, *, download: bool = False) -> Splits:
    """Returns MNIST from `root`, where it is downloaded to if it is missing and `download`.

    Raises:
        ConfigError: it is missing, and may not or cannot be downloaded.
    """
    files = [file for file, _ in torchvision().datasets.MNIST.resources]
    with _missing_files_explained(root, "MNIST", "MNIST/raw", files):
        train, test = (torchvision().datasets.MNIST(root, train=side, download=download) for side in (True, False))
    normalise = _normalise_bytes(_MNIST_STATISTICS)
    return Splits(
        train=TensorSet(train.data[:, None], train.targets, transform=normalise),
        test=TensorSet(test.data[:, None], test.targets, transform=normalise),
        sample_shape=(1, 28, 28),
        num_classes=10,
        name="MNIST",
    )


# CIFAR-10: 50,000 + 10,000 photographs (Krizhevsky 2009)


def load_cifar10(root: str | Path, *, augment: Augment | None = None, download: bool = False) -> Splits:
    """Returns CIFAR-10 from `root`, where it is downloaded to if it is missing and `download`.

    Training images are shifted by up to four pixels, and every other one is mirrored, unless there is `augment`.

    Raises:
        ConfigError: it is missing, and may not or cannot be downloaded; or a file's checksum is wrong.
    """
    with _missing_files_explained(root, "CIFAR-10", ".", [torchvision().datasets.CIFAR10.filename]):
        train, test = (torchvision().datasets.CIFAR10(root, train=side, download=download) for side in (True, False))
    transforms = torchvision().transforms
    shift_and_mirror = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()])
    normalise = transforms.Compose(_to_normalised(_CIFAR10_STATISTICS))
    pixels = torch.from_numpy(test.data).permute(0, 3, 1, 2).contiguous()  # [n, 3, 32, 32] uint8
    classes = torch.tensor(test.targets, device="cpu")
    return Splits(
        train=Transformed(train, OnInput(Normalised(augment or shift_and_mirror, normalise))),
        test=TensorSet(pixels, classes, transform=_normalise_bytes(_CIFAR10_STATISTICS)),
        sample_shape=(3, 32, 32),
        num_classes=10,
        name="CIFAR-10",
        unaugmented=Transformed(train, OnInput(normalise)),
    )


# Folders: one folder per class, as ImageNet is unpacked


def load_folder(
    root: str | Path,
    *,
    index_dir: str | Path,
    image_size: int = 224,
    augment: Augment | None = None,
    trains: bool = True,
    build: bool = True,
) -> Splits:
    """Returns the images under `root`, decoded when they are used.

    A test image is resized to 8/7 of the size, and its middle is taken.

    Args:
        trains: False: the images under val/ alone, and no training samples.
        index_dir, build: as in `image_folder`.

    Raises:
        ConfigError: a folder is missing or holds no images; train and val have other classes, or an image in common.
    """
    of_train, of_test = folder_transforms(image_size, augment)
    train = image_folder(Path(root) / "train", index_dir=Path(index_dir), build=build) if trains else None
    test = image_folder(Path(root) / "val", index_dir=Path(index_dir), build=build)
    if train is not None:
        _check_sides(root, train, test, build=build)
    return Splits(
        train=() if train is None else Transformed(train, OnInput(of_train)),
        test=Transformed(test, OnInput(of_test)),
        sample_shape=(3, image_size, image_size),
        num_classes=len(test.classes),
        name=f"images under {root}",
        unaugmented=None if train is None else Transformed(train, OnInput(of_test)),
    )


def _check_sides(root: str | Path, train: Any, test: Any, *, build: bool) -> None:
    """Checks that both sides have the same classes and, in the process that builds, no image in common.

    Raises:
        ConfigError: they do not.
    """
    if train.classes != test.classes:
        differing = sorted(set(train.classes) ^ set(test.classes))
        raise ConfigError(
            f"{root}: train/ and val/ must have the same class folders, but only one of them has {differing[:5]}"
        )
    if build and (same := same_file(train, test)) is not None:
        raise ConfigError(f"{same[0]} and {same[1]} are the same file: held-out samples must be others")


def folder_transforms(
    image_size: int, augment: Augment | None = None
) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
    """Returns two functions from a Pillow image to a normalised tensor, to train on and to test on.

    Args:
        augment: replaces a random part of the image, mirrored at random.
    """
    transforms = torchvision().transforms
    cut_out = transforms.Compose([transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()])
    middle = [transforms.Resize(round(image_size * 8 / 7)), transforms.CenterCrop(image_size)]
    to_normalised = _to_normalised(_IMAGENET_STATISTICS)
    of_train = Normalised(augment or cut_out, transforms.Compose(to_normalised))
    return of_train, transforms.Compose([*middle, *to_normalised])


def augmented(splits: Splits, augment: Augment | None) -> Splits:
    """Returns splits of images that are tensors, whose training images pass through the user's own augmentation."""
    if augment is None:
        return splits
    return replace(splits, train=Transformed(splits.train, OnInput(augment)), unaugmented=splits.train)


class Normalised:
    """An augmentation of Pillow images, whose result is normalised unless it is a tensor already."""

    def __init__(self, augment: Augment, normalise: Callable[[Any], Tensor]) -> None:
        self.augment, self.normalise = augment, normalise

    def __call__(self, image: Any) -> Tensor:
        augmented = self.augment(image)
        return augmented if isinstance(augmented, Tensor) else self.normalise(augmented)


# Shared steps


def _normalise_bytes(statistics: Statistics) -> Callable[[Tensor], Tensor]:
    """Returns a function from uint8 [..., channels, h, w] to normalised float32."""
    transforms = torchvision().transforms
    normalise: Callable[[Tensor], Tensor] = transforms.Compose(
        [transforms.ConvertImageDtype(torch.float32), transforms.Normalize(*statistics)]
    )
    return normalise


def _to_normalised(statistics: Statistics) -> list[Any]:
    """Returns the transforms from a decoded image to normalised float32 [channels, h, w]."""
    transforms = torchvision().transforms
    return [transforms.ToTensor(), transforms.Normalize(*statistics)]


@contextmanager
def _missing_files_explained(root: str | Path, name: str, folder: str, files: list[str]) -> Iterator[None]:
    """Turns torchvision's errors for missing or damaged files into advice; a network that is silent is given up."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT_S)  # because urllib would wait forever
    try:
        yield
    except (RuntimeError, OSError, ValueError, AssertionError) as error:  # the last two: a file was cut off
        raise ConfigError(
            f"{name} is not whole under {root} and could not be fetched. Wanted: {', '.join(files)}; put them into "
            f"{Path(root) / folder} (the program unpacks them), or use data=digits, which needs no download. "
            f"The cause: {' '.join(str(error).split()) or 'a file is damaged'}"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


# --- Made-up images of any size and number ----------------------------------------------------------------------------
#
# They are there to measure speed without a disk, and to see a model learn something.
#
#     image = pattern[class] + noise       pattern: 4×4 random colours per class, enlarged;  noise: normal, deviation 2
#
# Sample k is a function of (side, k) alone. Nothing is stored, so a million images of 224×224 take no memory. The
# classes are easy to tell apart by their patterns: a linear model gets nearly all test images right.


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


# --- Digits: 1,797 scanned ones of 8×8 grey pixels, which come with scikit-learn --------------------------------------
#
#     0 … 16 per pixel  →  (pixel − mean) / deviation  →  [1, 8, 8] float32, class 0 … 9
#
# A fifth of *each class* is held out, chosen once and for all: the choice depends on no run's seed, so accuracies of
# different runs are about the same 359 images. Source: UCI, "Optical Recognition of Handwritten Digits" (test part).


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
