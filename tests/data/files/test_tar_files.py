"""Tar samples against Python's tarfile, read member by member; images, arrays and damaged files."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from file_systems import EveryFifthFails
from PIL import Image
from torch.utils.data import DataLoader

from ddp.data.files.file_set import FileSet
from ddp.data.files.readers import Retries
from ddp.data.files.storage import Storage
from ddp.data.files.tar_files import ImageAndClass, TarSamples
from ddp.errors import ConfigError, UnreadableSample
from ddp.vision import torchvision

Members = list[tuple[str, bytes]]


def write_tar(path: Path, members: Members, *, format: int = tarfile.DEFAULT_FORMAT) -> None:
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def samples_in(path: Path) -> list[dict[str, Any]]:
    """Oracle: WebDataset's rule, member by member."""
    samples: list[dict[str, Any]] = []
    with tarfile.open(path) as archive:
        for info in archive:
            folder, base = os.path.split(info.name)
            stem, dot, extension = base.partition(".")
            if not (info.isfile() and stem and dot and extension) or stem.startswith("__"):
                continue
            key = f"{folder}/{stem}" if folder else stem
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            file = archive.extractfile(info)
            assert file is not None
            samples[-1][extension.lower()] = file.read()
    return samples


def members(num_samples: int, *, seed: int = 0) -> Members:
    draw = random.Random(seed)
    return [
        (f"n{i % 3}/{i:04d}.{extension}", draw.randbytes(draw.choice([0, 1, 511, 512, 513, 3000])))
        for i in range(num_samples)
        for extension in ["jpg", "cls", "seg.PNG"][: draw.randint(1, 3)]
    ]


def open_tar(folder: Path, **settings: Any) -> FileSet:
    return FileSet(folder, TarSamples(**settings), index_dir=folder / "index")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_are_those_of_tarfile(format: int, tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", members(20, seed=number), format=format)
    shards = open_tar(tmp_path)
    expected = [sample for number in range(3) for sample in samples_in(tmp_path / f"{number}.tar")]
    assert list(shards) == expected  # type: ignore[call-overload]
    assert shards.file_sizes.tolist() == [20, 20, 20]
    order = random.Random(5).sample(range(60), 60)
    assert [shards[i] for i in order] == [expected[i] for i in order]
    loader = DataLoader(shards, batch_size=None, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type,var-annotated]
    assert list(loader) == expected


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_names_of_any_language(format: int, tmp_path: Path) -> None:
    long = "d" * 90 + "/" + "k" * 150
    write_tar(
        tmp_path / "a.tar",
        [("a.jpg", b"0"), (f"{long}.jpg", b"1"), (f"{long}.cls", b"2"), ("é猫.jpg", b"3"), ("z.jpg", b"4")],
        format=format,
    )
    shards = open_tar(tmp_path)
    assert list(shards) == samples_in(tmp_path / "a.tar")  # type: ignore[call-overload]
    assert shards[1] == {"__key__": long, "jpg": b"1", "cls": b"2"}
    assert shards[2]["__key__"] == "é猫"


def test_a_hard_link_is_its_target_s_content(tmp_path: Path) -> None:
    """As GNU tar packs a folder in which several names are one file. A link may lead to a link, and out of a sample."""
    source = tmp_path / "source"
    source.mkdir()
    for name, content in [("0.png", b"p" * 700), ("0.cls", b"1"), (".hidden", b"h")]:
        (source / name).write_bytes(content)
    for name, target in [("1.png", "0.png"), ("1.cls", "0.cls"), ("2.png", "0.png"), ("2.txt", ".hidden")]:
        (source / name).hardlink_to(source / target)
    (source / "2.cls").write_bytes(b"2")
    subprocess.run(["tar", "--sort=name", "-cf", tmp_path / "a.tar", "."], cwd=source, check=True)
    shards = open_tar(tmp_path)
    assert list(shards) == [  # type: ignore[call-overload]
        {"__key__": "./0", "png": b"p" * 700, "cls": b"1"},
        {"__key__": "./1", "png": b"p" * 700, "cls": b"1"},
        {"__key__": "./2", "png": b"p" * 700, "cls": b"2", "txt": b"h"},
    ]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("1.png")
        info.type, info.linkname = tarfile.LNKTYPE, "0.png"
        archive.addfile(info)
    with pytest.raises(ConfigError, match=r"its member 1.png is a hard link to 0.png, which does not stand before it"):
        open_tar(tmp_path)


def test_numbers_with_a_dot_are_not_merged(tmp_path: Path) -> None:
    """A key ends at the first dot. What can only be several samples is refused; what may be one is one."""

    def opened(*names: str) -> list[str]:
        write_tar(tmp_path / "a.tar", [(name, b"1") for name in names])
        return [sample["__key__"] for sample in open_tar(tmp_path)]  # type: ignore[attr-defined]

    for first, second, *others in (
        ["img_0.25.cls", "img_0.50.cls", "img_0.25.png", "img_0.50.png"],
        ["img_0.25.png", "img_0.50.png"],
        ["1 Track 2.0 (Clean).mp3", "1 Track 2.1 (Clean).mp3"],
        ["x/7.25", "x/7.50"],
    ):
        for names in ([first, second, *others], [*reversed(others), first, second]):
            with pytest.raises(ConfigError, match=r"one sample, .*, because a key ends at the first dot") as error:
                opened(*names)
            assert sum(name in str(error.value) for name in names) == 2
    assert opened("7.0.jpg", "7.1.jpg", "7.json", "8.0.jpg", "8.1.jpg", "8.json") == ["7", "8"]  # frames with a label
    assert opened("7.left.jpg", "7.left.json", "7.right.jpg", "8.3gp", "8.7z") == ["7", "8"]
    assert opened("img_0.25.png", "img_0.25.cls", "img_1.25.png") == ["img_0", "img_1"]
    assert opened("clip.0.jpg", "clip.1.jpg") == ["clip"]


def test_a_name_may_begin_with_underscores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tar(tmp_path / "a.tar", [("__A1b-2c3D4e.mp4", b"1"), ("x/__9.cls", b"2"), ("__meta__.json", b"")])
    shards = open_tar(tmp_path)
    assert [sample["__key__"] for sample in shards] == ["__A1b-2c3D4e", "x/__9"]  # type: ignore[attr-defined]
    assert not caplog.records


def test_what_is_no_sample_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in [
            ("folder.d", tarfile.DIRTYPE),
            (".hidden.jpg", tarfile.REGTYPE),
            ("__meta__.json", tarfile.REGTYPE),
            ("README", tarfile.REGTYPE),
            ("a.b/one.jpg", tarfile.REGTYPE),
            ("link.jpg", tarfile.SYMTYPE),
            ("a.b/one.cls", tarfile.REGTYPE),
            ("two.jpg", tarfile.REGTYPE),
        ]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "two.jpg" if kind == tarfile.SYMTYPE else ""
            archive.addfile(info)
    expected = [{"__key__": "a.b/one", "jpg": b"", "cls": b""}, {"__key__": "two", "jpg": b""}]
    assert list(open_tar(tmp_path)) == expected == samples_in(tmp_path / "a.tar")  # type: ignore[call-overload]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        f"{tmp_path}/a.tar: members that are symbolic links are left out (1, the first is link.jpg); write it with tar "
        "--dereference to have them"
    ]


def test_what_tools_and_systems_leave_is_no_sample(tmp_path: Path) -> None:
    left = ["./.ipynb_checkpoints/one-checkpoint.jpg", "__MACOSX/one.jpg", "a/@eaDir/one.jpg", "a/._one.jpg"]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in [*left, "./a/one.jpg"]:
            archive.addfile(tarfile.TarInfo(name))
    assert list(open_tar(tmp_path)) == [{"__key__": "./a/one", "jpg": b""}]  # type: ignore[call-overload]


@pytest.mark.parametrize("cut", [1, 300, 512, 513, 1500, 3071, 3072, 3584, 4000, 4096])
def test_a_cut_off_file_is_named_wherever_it_ends(cut: int, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.jpg", bytes(2000)), ("b.jpg", b"1"), ("c.cls", b"")])
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"^\S+/a.tar is cut off") as failure:
        open_tar(tmp_path)
    assert "\n" not in str(failure.value)


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    def refused(content: bytes, message: str) -> None:
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^\S+/a.tar {message}"):
            open_tar(tmp_path)

    write_tar(tmp_path / "a.tar", [("a.jpg", bytes(700)), ("b.jpg", b"1"), ("c.jpg", b"1")])
    whole = (tmp_path / "a.tar").read_bytes()
    refused(gzip.compress(whole), "is compressed, .*: unpack it")
    refused(b"text " * 1000, "is cut off or no tar file")
    refused(
        whole[:1536] + b"x" * 512 + whole[2048:], r"continues after its last member, at byte 1536: a header is damaged"
    )
    refused(whole + whole, "continues after its last member")
    write_tar(tmp_path / "a.tar", [("README", b"x")])
    refused((tmp_path / "a.tar").read_bytes(), "holds no sample")
    write_tar(tmp_path / "a.tar", [("a.jpg", b"x"), ("a.cls", b"x"), ("a.JPG", b"x")])
    refused((tmp_path / "a.tar").read_bytes(), "has two members a.jpg one after the other")


def test_a_sparse_member_is_named(tmp_path: Path) -> None:
    """Its size is that of the whole content, of which the file has but a part: its neighbours would be read with it."""
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, headers in (("README", True), ("a.cls", False), ("b.npy", True), ("c.cls", False)):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = 512, {"GNU.sparse.map": "0,512", "GNU.sparse.size": "4096"} if headers else {}
            archive.addfile(info, io.BytesIO(bytes(512)))
    with pytest.raises(ConfigError, match=r"^\S+/a.tar: its member b.npy is sparse, .* without --sparse") as failure:
        open_tar(tmp_path)
    assert "\n" not in str(failure.value)


def test_members_of_two_samples_are_not_one(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.jpg", b"1"), ("b.cls", b"2")])
    with pytest.raises(ValueError, match="it has members of a and of b"):
        TarSamples().decode((tmp_path / "a.tar").read_bytes(), {})


def test_a_streamed_tar_is_the_same(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", members(30))
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/a.tar", (tmp_path / "a.tar").read_bytes())
    EveryFifthFails.num_reads = 0
    shards = FileSet("fifth://a.tar", TarSamples(), index_dir=tmp_path, storage=Storage(Retries(first_pause_s=0.0)))
    assert list(shards) == samples_in(tmp_path / "a.tar")  # type: ignore[call-overload]
    assert EveryFifthFails.num_reads == 2  # one block to index it, the same one to read all samples
    memory.rm("/a.tar")


# Decoding


def encoded(kind: str, pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def test_images_and_classes(tmp_path: Path) -> None:
    random_pixels = np.random.RandomState(0).randint(0, 256, (3, 5, 7, 3)).astype(np.uint8)
    write_tar(
        tmp_path / "a.tar",
        [
            (f"{i}.{e}", d)
            for i, p in enumerate(random_pixels)
            for e, d in (("png", encoded("PNG", p)), ("cls", b"%d" % i))
        ],
    )
    for i, (image, label) in enumerate(open_tar(tmp_path, decode=ImageAndClass())):  # type: ignore[arg-type]
        assert label == i
        assert torch.equal(image, torch.from_numpy(random_pixels[i]).permute(2, 0, 1).float() / 255)
    resize = torchvision().transforms.Compose(
        [torchvision().transforms.CenterCrop(4), torchvision().transforms.ToTensor()]
    )
    assert open_tar(tmp_path, decode=ImageAndClass(image="png", transform=resize))[0][0].shape == (3, 4, 4)


def test_samples_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar",
        [
            *[("a.jpg", b"no image"), ("a.cls", b"1"), ("b.txt", b"x")],
            *[("d.png", encoded("PNG", np.zeros((2, 2, 3), dtype=np.uint8))), ("d.cls", b"2")],
        ],
    )
    with pytest.raises(
        UnreadableSample, match=r"/a.tar, sample 0, at byte 0 cannot be decoded \(UnidentifiedImageError"
    ):
        open_tar(tmp_path, decode=ImageAndClass())[0]
    with pytest.raises(UnreadableSample, match=r"sample 1, at byte 2048 .*\['txt'\], and not jpg or .* next to cls"):
        open_tar(tmp_path, decode=ImageAndClass())[1]
    with pytest.raises(UnreadableSample, match=r"sample 2, .* cls is 2, and num_classes=2 has the classes 0 … 1\)"):
        open_tar(tmp_path, decode=ImageAndClass(num_classes=2))[2]
    assert open_tar(tmp_path, decode=ImageAndClass(num_classes=3))[2][1] == 2


def test_members_of_a_sample_that_do_not_stand_side_by_side_are_told(tmp_path: Path) -> None:
    """As `tar cf a.tar images labels` writes them; and a key may come again as a whole sample."""
    write_tar(tmp_path / "a.tar", [("0.jpg", b"0"), ("1.jpg", b"1"), ("0.cls", b"0"), ("1.cls", b"1")])
    with pytest.raises(ConfigError, match=r"a.tar: 0\.jpg and 0\.cls do not stand side by side.*--sort=name"):
        open_tar(tmp_path)
    write_tar(tmp_path / "a.tar", [("0.jpg", b"0"), ("0.cls", b"0"), ("1.jpg", b"1"), ("0.jpg", b"2"), ("0.cls", b"1")])
    assert len(open_tar(tmp_path)) == 3
