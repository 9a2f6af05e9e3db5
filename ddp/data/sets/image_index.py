"""The images of a folder with a folder for each class, listed once: by the parent, for every process.

    INDEX_DIR/image_folder-4f1d….json      {"classes": ["cat", "dog"], "files": [["cat/1.png", 0], …]}

Processes that looked by themselves would each read the whole tree, and might find other files than their neighbours if
one is added meanwhile; sample 17 would be another image on each rank then.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

from ddp.data.files.file_index import index_place
from ddp.data.files.listing import identity_of
from ddp.errors import ConfigError
from ddp.process.files import make_folder, read_own, whole_file
from ddp.vision import torchvision


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
    try:
        text = read_own(index)
    except OSError:
        text = ""
    try:
        listed = json.loads(text)
        classes, files = list(listed["classes"]), [(str(path / name), int(label)) for name, label in listed["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{index} is missing or damaged, so the images under {path} are not known: start the run again, so that "
            "the parent lists them"
        ) from error

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

    Names are compared by the numbers that listing a folder gives for nothing: millions of images are not looked at.
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
    """Looks for images, and writes the index if it is another one than before."""
    try:
        found = torchvision().datasets.ImageFolder(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"no images to use under {path}: {error}. Expected {path}/CLASS/*.jpg (or .png …), one folder per class; "
            "data=digits needs no files"
        ) from error
    files = [[os.path.relpath(file, path), label] for file, label in found.samples]
    text = json.dumps({"classes": found.classes, "files": files}).encode()
    try:
        make_folder(index.parent)
        if index.exists() and read_own(index).encode() == text:
            return
        with whole_file(index) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"index_dir {index.parent} cannot be written ({error.strerror}): give a folder that can be"
        ) from error
