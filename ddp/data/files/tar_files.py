"""Samples in tar files, as WebDataset lays them out: members that follow one another with the same key are a sample.

    train-000.tar     n01/0007.jpg      ┐                        {"__key__": "n01/0007",
                      n01/0007.cls      ┘ one sample       →      "jpg": b"…", "cls": b"3"}
                      n01/0008.jpg      ┐
                      n01/0008.seg.png  │ one sample       →     {…, "jpg": b"…", "seg.png": b"…", "cls": b"0"}
                      n01/0008.cls      ┘

The key is the path up to the first dot of the base name; the rest is the extension, in lower case. So img_0.25.png and
img_0.50.png have one key, and are refused rather than read as one sample. Folders, hidden files, files in hidden
folders, and members such as __meta__ are left out, and symbolic links with a warning. The members of a sample are
contiguous, so it is one read; a hard link, which tar writes for a second name of a file, is one more.

Python's `tarfile` reads the headers, so long names (GNU's and pax) are no special case. Indexing seeks over contents:
about 20 us a member, whatever its size. A tar file ends with blocks of zeros. If they are missing, the file was cut
off. If anything but zeros comes after the last member, `tarfile` has stopped at a damaged header. Both are refused.
So are sparse members, whose size is not the number of their bytes in the file.

`ImageAndClass` makes pairs for training of such samples.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from PIL import Image

from ddp.data.files.file_set import Format, Layout
from ddp.data.files.readers import Reader, ReaderFile, check_not_compressed
from ddp.errors import ConfigError
from ddp.process.files import is_hidden
from ddp.process.terminal import log
from ddp.vision import torchvision

_BLOCK = 512
_MANY = 1 << 20
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_META = re.compile(r"__[a-z]+__")  # of a whole key; a video's number may begin like this
_NUMBER = re.compile(r"\d[^.]*\.|\d+$")  # an extension that continues with a number, as 25.png, unlike 3gp


class TarSamples(Format):
    """Tar files in WebDataset's layout.

    Args:
        decode: makes a sample of a dict of bytes by extension, with the key as "__key__"; such as `ImageAndClass`.
            None: the dict is the sample.
    """

    kind = "tar"
    suffixes = (".tar",)

    def __init__(self, *, decode: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self._decode, self.draws_nothing = decode, decode is None

    def settings(self) -> dict[str, Any]:
        """Returns which members are samples, because older versions left out hard links and names such as __4f1d."""
        return {"members": 2}

    def index(self, reader: Reader) -> Layout:
        """Finds runs of members with the same key."""
        spans: list[list[int]] = []
        seen: dict[str, set[str]] = {}
        linked, passed_over = set[str](), list[str]()
        for key, members in groupby(_members(reader, passed_over), key=itemgetter(0)):
            names: dict[str, str] = {}
            for _, extension, info in members:
                if not names:
                    spans.append([info.offset, info.offset])
                elif extension in names:
                    raise ConfigError(
                        f"{reader.address} has two members {key}.{extension} one after the other: a key belongs to one "
                        "sample, so give each sample its own"
                    )
                spans[-1][1] = info.offset_data + (0 if info.islnk() else _padded(info.size))
                names[extension] = info.name
                linked |= {info.linkname} if info.islnk() else set()
            _check_numbers(reader, key, names)
            _check_together(reader, key, names, seen)
        if passed_over:
            log.warning(
                "%s: members that are symbolic links are left out (%d, the first is %s); write it with tar "
                "--dereference to have them",
                *(reader.address, len(passed_over), passed_over[0]),
            )
        notes = {"links": _found(reader, linked)} if linked else {}
        return Layout(np.array(spans, dtype=np.int64).reshape(-1, 2), notes)

    def completed(self, data: bytes, notes: dict[str, Any], read: Callable[[int, int], bytes]) -> bytes:
        """Replaces hard links by the contents that they lead to."""
        links = notes.get("links")
        if links is None:
            return data
        whole = []
        for info in tarfile.TarFile(fileobj=BytesIO(data)):
            if info.islnk():
                start, size = links[info.linkname]
                info.type, info.linkname, info.size, info.pax_headers = tarfile.REGTYPE, "", size, {}
                whole += [info.tobuf(), read(start, size), bytes(_padded(size) - size)]
            else:
                whole.append(data[info.offset : info.offset_data + _padded(info.size)])
        return b"".join(whole)

    def decode(self, data: bytes, notes: dict[str, Any]) -> Any:
        """Returns the members as a dict of bytes, or the result of `decode` for it."""
        sample: dict[str, Any] = {}
        for info in tarfile.TarFile(fileobj=BytesIO(data)):
            if (name := _key_and_extension(info)) is not None:
                if sample.setdefault("__key__", name[0]) != name[0]:
                    raise ValueError(f"it has members of {sample['__key__']} and of {name[0]}, so delete the index")
                sample[name[1]] = data[info.offset_data : info.offset_data + info.size]
        return sample if self._decode is None else self._decode(sample)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _members(reader: Reader, passed_over: list[str]) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yields key, extension and header of members of samples; names of symbolic links go to `passed_over`."""
    for info in _headers(reader):
        if info.issym() and _NAME.fullmatch(info.name):
            passed_over.append(info.name)
        if (name := _key_and_extension(info)) is not None:
            yield *name, info


def _found(reader: Reader, names: set[str]) -> dict[str, tuple[int, int]]:
    """Returns where the contents of members lie that hard links lead to: first byte and size.

    Raises:
        ConfigError: the file does not have one of them.
    """
    found: dict[str, tuple[int, int]] = {}
    for info in _headers(reader):
        if info.isreg() and info.name in names:
            found[info.name] = info.offset_data, info.size
        elif info.islnk() and info.linkname in found:
            found[info.name] = found[info.linkname]
        elif info.islnk() and info.linkname in names:
            raise ConfigError(
                f"{reader.address}: its member {info.name} is a hard link to {info.linkname}, which does not stand "
                "before it in this file: write the file again with tar --hard-dereference"
            )
    return {name: found[name] for name in names}


def _check_numbers(reader: Reader, key: str, names: dict[str, str]) -> None:
    """Refuses a run of members whose names differ in a number around the dot at which their key ends.

    Args:
        names: extension → name of the members.
    """
    if not key[-1].isdigit() or not all(map(_NUMBER.match, names)):
        return
    numbers = {extension.rpartition(".")[0] or extension: name for extension, name in names.items()}
    if len(numbers) > 1:
        one, other = list(numbers.values())[:2]
        raise ConfigError(
            f"{reader.address}: {one} and {other} would be one sample, {key}, because a key ends at the first dot of a "
            "name: write another sign in place of this dot, or, if they are one, a letter behind it"
        )


def _check_together(reader: Reader, key: str, names: dict[str, str], seen: dict[str, set[str]]) -> None:
    """Refuses a sample whose members stand in two places of the file, which would be two halves of a sample.

    Args:
        seen: key → extensions of the samples before.
    """
    before = seen.setdefault(key, names.keys() | set())
    if before.isdisjoint(names):
        one, other = sorted(before)[0], next(iter(names))
        raise ConfigError(
            f"{reader.address}: {key}.{one} and {key}.{other} do not stand side by side, and the members of a sample "
            "must: write the file with its names sorted, as tar --sort=name"
        )


def _headers(reader: Reader) -> Iterator[tarfile.TarInfo]:
    """Yields the headers of the file's members.

    Raises:
        ConfigError: the file is no tar file, or cut off, or has a sparse member.
    """
    try:
        with tarfile.TarFile(fileobj=ReaderFile(reader)) as archive:
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                _check_whole(reader, info)
                yield info
            _check_end(reader, archive.offset)
    except tarfile.TarError as error:
        check_not_compressed(reader)
        raise ConfigError(
            f"{reader.address} is cut off or no tar file ({error}): copy it again, or leave it out of the list"
        ) from error


def _check_end(reader: Reader, end: int) -> None:
    """Checks that `tarfile` has seen everything: it stops silently at a damaged header."""
    size = reader.facts.size
    if end + _BLOCK > size:
        raise ConfigError(
            f"{reader.address} is cut off: it has {size} bytes and not the blocks of zeros that end a tar file; write "
            "it again (and close the writer), or leave it out of the list"
        )
    for start in range(end, size, _MANY):
        if any(reader.read(start, min(_MANY, size - start))):
            raise ConfigError(
                f"{reader.address} continues after its last member, at byte {end}: a header is damaged, or it is "
                "several tar files in one; write it again"
            )


def _key_and_extension(info: tarfile.TarInfo) -> tuple[str, str] | None:
    """Returns key and extension of a member of a sample; None for any other member."""
    match = _NAME.fullmatch(info.name) if info.isreg() or info.islnk() else None
    if match is None or _META.fullmatch(match[1].rpartition("/")[2]) or any(map(is_hidden, info.name.split("/"))):
        return None
    return match[1], match[2].lower()


def _check_whole(reader: Reader, info: tarfile.TarInfo) -> None:
    """Raises ConfigError for part of a sample that is sparse: its size is not the number of its bytes in the file."""
    if info.issparse() and _key_and_extension(info) is not None:
        raise ConfigError(
            f"{reader.address}: its member {info.name} is sparse, so parts of it are missing; write it without --sparse"
        )


# --- A sample that is an image and its class -------------------------------------------------------------------------


_IMAGES = ("jpg", "jpeg", "png", "webp")


class ImageAndClass:
    """A function from a sample's members to a pair (image, class).

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
            raise ValueError(f"it has {found}, and not {' or '.join(names)} next to {self.target}")
        label = int(sample[self.target])
        if self.num_classes is not None and not 0 <= label < self.num_classes:
            what = f"num_classes={self.num_classes} has the classes 0 … {self.num_classes - 1}"
            raise ValueError(f"{self.target} is {label}, and {what}")
        with Image.open(BytesIO(sample[name])) as image:
            return self.transform(image.convert("RGB")), label
