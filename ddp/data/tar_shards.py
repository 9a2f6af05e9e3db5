"""Samples in tar files, as WebDataset lays them out: members that follow one another with the same key are a sample.

    train-000.tar     n01/0007.jpg      ┐                        {"__key__": "n01/0007",
                      n01/0007.cls      ┘ one sample       →      "jpg": b"…", "cls": b"3"}
                      n01/0008.jpg      ┐
                      n01/0008.seg.png  │ one sample       →     {…, "jpg": b"…", "seg.png": b"…", "cls": b"0"}
                      n01/0008.cls      ┘

The key is the path up to the first dot of the base name; the rest is the extension, in lower case. Folders, links,
hidden files and members such as __meta__ are left out. The members of a sample are contiguous, so it is one read.

Python's `tarfile` reads the headers, so long names (GNU's and pax) are no special case. Indexing seeks over contents:
about 20 us a member, whatever its size. A tar file ends with blocks of zeros. If they are missing, the file was cut
off. If anything but zeros comes after the last member, `tarfile` has stopped at a damaged header. Both are refused.
So are sparse members, whose size is not the number of their bytes in the file.

Read before: `files.py`. Read next: `decoders.py`.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from ddp.data.file_index import Format, Layout
from ddp.data.readers import Reader, ReaderFile
from ddp.errors import ConfigError

_BLOCK = 512
_MANY = 1 << 20
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class TarSamples(Format):
    """Tar files in WebDataset's layout.

    Args:
        decode: makes a sample of a dict of bytes by extension, with the key as "__key__"; such as the functions of
            `decoders.py`. None: the dict is the sample.
    """

    kind = "tar"
    suffixes = (".tar",)

    def __init__(self, *, decode: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self._decode, self.draws_nothing = decode, decode is None

    def index(self, reader: Reader) -> Layout:
        """Finds runs of members with the same key."""
        spans: list[list[int]] = []
        key, seen = None, set[str]()
        for member in _members(reader):
            if member.key != key:
                spans.append([member.start, member.end])
                key, seen = member.key, set()
            elif member.extension in seen:
                raise ConfigError(
                    f"{reader.address} has two members {key}.{member.extension} one after the other: a key belongs to "
                    "one sample, so give each sample its own"
                )
            spans[-1][1] = member.end
            seen.add(member.extension)
        return Layout(np.array(spans, dtype=np.int64).reshape(-1, 2), {})

    def decode(self, data: bytes, notes: dict[str, Any]) -> Any:
        """Returns the members as a dict of bytes, or what `decode` makes of it."""
        sample: dict[str, Any] = {}
        for info in tarfile.TarFile(fileobj=BytesIO(data)):
            if (name := _key_and_extension(info)) is not None:
                if sample.setdefault("__key__", name[0]) != name[0]:
                    raise ValueError(f"it has members of {sample['__key__']} and of {name[0]}, so delete the index")
                sample[name[1]] = data[info.offset_data : info.offset_data + info.size]
        return sample if self._decode is None else self._decode(sample)


class SparseMember(ValueError):
    """A member is stored without its zeros, so that its size is not the number of its bytes in the file."""


class _Member(NamedTuple):
    key: str
    extension: str
    start: int  # of its first header
    end: int  # of its last block


def _members(reader: Reader) -> Iterator[_Member]:
    """Yields the members that belong to samples.

    Raises:
        ConfigError: the file is no tar file, or cut off, or has a sparse member.
    """
    try:
        with tarfile.TarFile(fileobj=ReaderFile(reader)) as archive:  # type: ignore[arg-type]
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                if (name := _key_and_extension(info)) is not None:
                    size = -(-info.size // _BLOCK) * _BLOCK
                    yield _Member(*name, info.offset, info.offset_data + size)
            _check_end(reader, archive.offset)
    except SparseMember as error:
        raise ConfigError(f"{reader.address}: {error}") from error
    except tarfile.TarError as error:
        if reader.read(0, min(5, reader.facts.size)).startswith(_COMPRESSED):
            raise ConfigError(f"{reader.address} is compressed, so no sample can be found in it: unpack it") from error
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
                f"{reader.address} goes on after its last member, at byte {end}: a header is damaged, or it is several "
                "tar files in one; write it again"
            )


def _key_and_extension(info: tarfile.TarInfo) -> tuple[str, str] | None:
    """Returns how a member is named as part of a sample; None if it is no part of one.

    Raises:
        SparseMember: the member is one.
    """
    match = _NAME.fullmatch(info.name) if info.isreg() else None
    if match is None or match[1].rpartition("/")[2].startswith("__"):
        return None
    if info.issparse():
        raise SparseMember(f"its member {info.name} is sparse, so parts of it are missing; write it without --sparse")
    return match[1], match[2].lower()
