"""Image files in the published formats, made here with a few images; without network; digits and synthetic images.

Tests: ddp/data/samples.py.
"""

import gzip
import hashlib
import pickle
import shutil
import socket
import struct
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import default_collate

from ddp.data.samples import Samples, TensorSet, Transformed
from ddp.data.sets import image_sets
from ddp.data.sets.image_sets import (
    load_cifar10,
    load_folder,
    load_mnist,
    load_synthetic,
)
from ddp.errors import ConfigError
from ddp.vision import torchvision

RANDOM = np.random.RandomState(0)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Every connection fails at once; returns the timeouts that were in force."""
    timeouts: list[float | None] = []

    def refuse(*_: object, **__: object) -> None:
        timeouts.append(socket.getdefaulttimeout())
        raise urllib.request.URLError("no route to host")  # type: ignore[attr-defined]

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return timeouts


# MNIST's idx format


def write_mnist(root: Path, *, compressed: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Both sides, as distributed (.gz) or as unpacked; returns their pixels and classes."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    sides = {}
    for side, n in (("train", 7), ("t10k", 4)):
        pixels = RANDOM.randint(0, 256, (n, 28, 28)).astype(np.uint8)
        classes = RANDOM.randint(0, 10, n).astype(np.uint8)
        sides[side] = pixels, classes
        for name, header, array in (
            (f"{side}-images-idx3-ubyte", struct.pack(">4i", 2051, n, 28, 28), pixels),
            (f"{side}-labels-idx1-ubyte", struct.pack(">2i", 2049, n), classes),
        ):
            content = header + array.tobytes()
            path = raw / (name + ".gz" if compressed else name)
            path.write_bytes(gzip.compress(content) if compressed else content)
    return sides


def test_mnist_is_what_the_files_hold(tmp_path: Path) -> None:
    sides = write_mnist(tmp_path, compressed=False)
    splits = load_mnist(tmp_path)
    assert (splits.sample_shape, splits.num_classes) == ((1, 28, 28), 10)
    for samples, (pixels, classes) in ((splits.train, sides["train"]), (splits.test, sides["t10k"])):
        images, labels = default_collate([samples[i] for i in range(len(samples))])
        expected = (torch.from_numpy(pixels)[:, None].double() / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(images.double(), expected, rtol=1e-5, atol=1e-5)
        assert labels.tolist() == classes.tolist()
        batch = samples.batch(range(len(samples)))  # type: ignore[attr-defined]
        assert torch.equal(batch[0], images)


@pytest.mark.parametrize("num_bytes", [0, 3, 6, 500])
def test_a_file_that_was_cut_off_is_advice(num_bytes: int, tmp_path: Path) -> None:
    write_mnist(tmp_path, compressed=False)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"^MNIST is not whole under .*train-images-idx3-ubyte.gz, .* The cause: .+$"):
        load_mnist(tmp_path)


def test_a_download_unpacks_what_a_user_has_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[float | None]
) -> None:
    """The archives' checksums are MNIST's in real life; here they are those of the made-up ones."""
    write_mnist(tmp_path, compressed=True)
    mnist = torchvision().datasets.MNIST
    checksums = [
        (file, hashlib.md5((tmp_path / "MNIST/raw" / file).read_bytes()).hexdigest()) for file, _ in mnist.resources
    ]
    monkeypatch.setattr(mnist, "resources", checksums)
    load_mnist(tmp_path, download=True)
    assert len(load_mnist(tmp_path).train) == 7
    load_mnist(tmp_path, download=True)
    assert not no_network  # nobody asked for it


def test_an_archive_with_a_wrong_checksum_is_not_taken(tmp_path: Path, no_network: list[float | None]) -> None:
    write_mnist(tmp_path, compressed=True)
    with pytest.raises(ConfigError, match="MNIST"):
        load_mnist(tmp_path, download=True)
    assert no_network  # it tried to fetch the real one


# CIFAR's pickles


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, np.ndarray]:
    """Five training files of two images and a test file of three; returns the root and all pixels, [13, 3072]."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    pixels = RANDOM.randint(0, 256, (13, 3072)).astype(np.uint8)

    def write(name: str, content: dict[str, Any]) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    cifar10 = torchvision().datasets.CIFAR10
    rows = iter(range(13))

    def write_batch(name: str, n: int) -> list[str]:
        mine = [next(rows) for _ in range(n)]
        return [name, write(name, {"data": pixels[mine], "labels": [row % 10 for row in mine]})]

    monkeypatch.setattr(cifar10, "train_list", [write_batch(f"data_batch_{i}", 2) for i in range(1, 6)])
    monkeypatch.setattr(cifar10, "test_list", [write_batch("test_batch", 3)])
    meta = write("batches.meta", {"label_names": [f"class {i}" for i in range(10)]})
    monkeypatch.setattr(cifar10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta})
    return tmp_path, pixels


def normalised(pixels: np.ndarray) -> torch.Tensor:
    mean, deviation = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]).double()[:, :, None, None]
    return (torch.from_numpy(pixels).view(-1, 3, 32, 32).double() / 255 - mean) / deviation


def test_cifar_is_what_the_files_hold(cifar: tuple[Path, np.ndarray], no_network: list[float | None]) -> None:
    root, pixels = cifar
    load_cifar10(root, download=True)
    assert not no_network
    splits = load_cifar10(root)
    test, classes = splits.test.batch(range(2))  # type: ignore[attr-defined]
    torch.testing.assert_close(test.double(), normalised(pixels[10:12]), rtol=1e-5, atol=1e-5)
    assert classes.tolist() == [0, 1]
    image, label = splits.test[2]
    torch.testing.assert_close(image.double(), normalised(pixels[12:])[0], rtol=1e-5, atol=1e-5)
    assert (int(label), splits.sample_shape) == (2, (3, 32, 32))


def test_cifar_augmentation_is_a_shift_and_a_mirror_by_the_global_generator(cifar: tuple[Path, np.ndarray]) -> None:
    root, pixels = cifar
    train = load_cifar10(root).train
    assert not hasattr(train, "batch")  # the loader must seed each sample
    assert isinstance(train, Transformed)  # a cache finds the images before it
    original = torch.from_numpy(pixels[4]).view(3, 32, 32)
    padded = torch.nn.functional.pad(original, (4, 4, 4, 4))
    possible = {
        (dy, dx, mirrored): (crop.flip(-1) if mirrored else crop)
        for dy in range(9)
        for dx in range(9)
        for crop in [padded[:, dy : dy + 32, dx : dx + 32]]
        for mirrored in (False, True)
    }
    seen = []
    for seed in (0, 1, 2, 3, 0):
        torch.manual_seed(seed)
        image, label = train[4]
        assert (image.shape, image.dtype, label) == ((3, 32, 32), torch.float32, 4)
        matches = [
            key
            for key, crop in possible.items()
            if torch.allclose(image.double(), normalised(crop.numpy())[0], atol=1e-4)
        ]
        assert len(matches) == 1
        seen += matches
    assert seen[0] == seen[4]
    assert len(set(seen)) > 2


def test_a_damaged_cifar_file_is_noticed(cifar: tuple[Path, np.ndarray]) -> None:
    root, _ = cifar
    with (root / "cifar-10-batches-py" / "data_batch_3").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ConfigError, match="corrupted"):
        load_cifar10(root)


# Folders


def make_folder(root: Path, side: str, classes: list[str], *, num_images: int = 2) -> None:
    for label in classes:
        (root / side / label).mkdir(parents=True)
        for i in range(num_images):
            pixels = RANDOM.randint(0, 256, (20, 30, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / side / label / f"{i}.png")


def test_folder_layout(tmp_path: Path) -> None:
    make_folder(tmp_path, "train", ["cat", "dog"])
    make_folder(tmp_path, "val", ["cat", "dog"], num_images=1)
    splits = load_folder(tmp_path, image_size=14, index_dir=tmp_path / "index")
    assert (len(splits.train), len(splits.test), splits.num_classes) == (4, 2, 2)
    assert [label for _, label in splits.train] == [0, 0, 1, 1]  # type: ignore[attr-defined]
    torch.manual_seed(0)
    first, second = splits.train[0][0], splits.train[0][0]
    assert first.shape == splits.sample_shape == (3, 14, 14)
    assert not torch.equal(first, second)  # cut out anew
    torch.manual_seed(0)
    assert torch.equal(splits.train[0][0], first)

    # Oracle for a test image: 20×30 resized to 16×24 and the middle 14×14 of it, by PIL and arithmetic.
    resized = Image.open(tmp_path / "val/dog/0.png").resize((24, 16), Image.Resampling.BILINEAR)
    middle = torch.from_numpy(np.array(resized)[1:15, 5:19]).permute(2, 0, 1).double() / 255
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).double()[:, :, None, None]
    torch.testing.assert_close(splits.test[1][0].double(), (middle - mean) / deviation, rtol=1e-4, atol=1e-4)


def test_what_tools_and_systems_leave_is_no_class_and_no_image(tmp_path: Path) -> None:
    """Checkpoints of notebooks, thumbnails of a NAS, and what unpacking a Mac's archive leaves."""
    for side in ("train", "val"):
        left = [".ipynb_checkpoints", "@eaDir", "__MACOSX/cat", "cat/@eaDir", "dog/.thumbs"]
        make_folder(tmp_path, side, ["cat", "dog", *left])
        (tmp_path / side / ".DS_Store").write_text("")
        shutil.copy(tmp_path / side / "cat/0.png", tmp_path / side / "cat/._0.png")
    splits = load_folder(tmp_path, image_size=14, index_dir=tmp_path / "index")
    assert (len(splits.train), len(splits.test), splits.num_classes) == (4, 4, 2)
    assert splits.train.classes == ["cat", "dog"] and splits.train.targets == [0, 0, 1, 1]  # type: ignore[attr-defined]
    shutil.rmtree(tmp_path / "train/cat"), shutil.rmtree(tmp_path / "train/dog")
    with pytest.raises(ConfigError, match="no images to use under"):
        load_folder(tmp_path, image_size=14, index_dir=tmp_path / "index")


def test_a_folder_is_listed_once_and_all_processes_have_that_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in ("train", "val"):
        make_folder(tmp_path, side, ["cat", "dog"])
    choices = {"image_size": 14, "index_dir": tmp_path / "index"}
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file.*: the images under .*train are not known"):
        load_folder(tmp_path, **choices, build=False)
    parent = load_folder(tmp_path, **choices)
    shutil.copy(tmp_path / "train/cat/0.png", tmp_path / "train/cat/00.png")  # one is added meanwhile
    worker = load_folder(tmp_path, **choices, build=False)
    assert worker.train.samples.samples == parent.train.samples.samples and len(worker.train) == 4
    assert pickle.loads(pickle.dumps(worker.train.samples)).samples == worker.train.samples.samples
    assert worker.train.classes == ["cat", "dog"] and worker.train.targets == [0, 0, 1, 1]
    assert len(load_folder(tmp_path, **choices).train) == 5  # the next run
    [index, _] = sorted((tmp_path / "index").iterdir())
    index.write_text(index.read_text()[:40])
    with pytest.raises(ConfigError, match=r"is damaged \("):
        load_folder(tmp_path, **choices, build=False)

    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # a team's folder: others could write another list
    (tmp_path / "index").chmod(0o777)
    assert len(load_folder(tmp_path, **choices).train) == len(load_folder(tmp_path, **choices, build=False).train) == 5
    assert index.stat().st_size == 40


@pytest.mark.parametrize("link", ["hardlink_to", "symlink_to"])
def test_no_image_of_a_folder_is_on_both_sides(link: str, tmp_path: Path) -> None:
    for side in ("train", "val"):
        make_folder(tmp_path, side, ["cat", "dog"])
    load_folder(tmp_path, index_dir=tmp_path / "index")
    image = tmp_path / "train" / "dog" / "7.png"
    getattr(image, link)(tmp_path / "val" / "dog" / "1.png")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"train/dog/7.png and .*/val/dog/1.png are the same file: held-out samp"):
            load_folder(tmp_path, index_dir=tmp_path / "index")
    image.unlink()
    shutil.rmtree(tmp_path / "train" / "dog")
    (tmp_path / "train" / "dog").symlink_to(tmp_path / "val" / "dog")
    with pytest.raises(ConfigError, match=r"train/dog/0.png and .*/val/dog/0.png are the same file"):
        load_folder(tmp_path, index_dir=tmp_path / "index")


def test_the_held_out_images_of_a_folder_need_no_others(tmp_path: Path) -> None:
    make_folder(tmp_path, "val", ["cat", "dog"])
    splits = load_folder(tmp_path, image_size=14, index_dir=tmp_path / "index", trains=False)
    assert (len(splits.train), len(splits.test), splits.num_classes) == (0, 4, 2) and splits.unaugmented is None


def test_folder_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train/CLASS/\*\.jpg.*data=digits"):
        load_folder(tmp_path, index_dir=tmp_path / "index")
    make_folder(tmp_path, "train", ["cat", "dog"])
    with pytest.raises(ConfigError, match=r"val/CLASS/\*\.jpg"):
        load_folder(tmp_path, index_dir=tmp_path / "index")
    make_folder(tmp_path, "val", ["cat", "mouse"])
    with pytest.raises(ConfigError, match=r"\['dog', 'mouse'\]"):
        load_folder(tmp_path, index_dir=tmp_path / "index")
    shutil.rmtree(tmp_path / "val")
    make_folder(tmp_path, "val", ["cat", "dog"], num_images=0)
    with pytest.raises(ConfigError, match="no images"):
        load_folder(tmp_path, index_dir=tmp_path / "index")


# Without a network


@pytest.mark.parametrize(
    ("load", "file", "place"),
    [
        (load_mnist, "train-images-idx3-ubyte.gz", "MNIST/raw"),
        (load_cifar10, "cifar-10-python.tar.gz", ""),
    ],
)
def test_a_missing_download_says_what_to_put_where(
    load: Any, file: str, place: str, tmp_path: Path, no_network: list[float | None]
) -> None:
    with pytest.raises(ConfigError) as failure:
        load(tmp_path)
    assert not no_network  # loading never downloads
    with pytest.raises(ConfigError) as prepared:
        load(tmp_path, download=True)
    for error in (failure, prepared):
        message = str(error.value)
        assert file in message
        assert f"{tmp_path / place} " in message
        assert "data=digits" in message
    assert "no route to host" in str(prepared.value)
    assert set(no_network) == {30.0}  # a network that says nothing ends the wait
    assert socket.getdefaulttimeout() is None


# The digits' split, against scikit-learn's own arrays


def sides() -> tuple[TensorSet, TensorSet]:
    splits = image_sets.load_digits()
    assert isinstance(splits.train, TensorSet)
    assert isinstance(splits.test, TensorSet)
    return splits.train, splits.test


def test_every_image_is_on_exactly_one_side() -> None:
    train, test = sides()
    pixels, classes = load_digits(return_X_y=True)

    def rows(images: np.ndarray, labels: np.ndarray) -> list[tuple[int, ...]]:
        return sorted((*map(int, image), int(label)) for image, label in zip(images, labels, strict=True))

    images = torch.cat([train.inputs, test.inputs]).flatten(1).double() * 6.017 + 4.884
    assert rows(images.round().numpy(), torch.cat([train.targets, test.targets]).numpy()) == rows(pixels, classes)


def test_each_class_is_held_out_by_a_fifth() -> None:
    train, test = sides()
    held_out, rest = torch.bincount(test.targets), torch.bincount(train.targets)
    assert ((held_out / (held_out + rest) - 0.2).abs() < 0.005).all()
    assert (len(train), len(test)) == (1438, 359)


def test_pixels_are_normalised() -> None:
    pixels = torch.cat([side.inputs.flatten() for side in sides()])
    assert abs(pixels.mean()) < 1e-3
    assert abs(pixels.std() - 1) < 1e-3


def test_the_split_is_the_published_one() -> None:
    """Accuracies of different versions of this package are comparable only while this holds."""
    _, test = sides()
    assert test.targets[:12].tolist() == [3, 7, 3, 9, 0, 8, 7, 0, 8, 0, 3, 3]
    assert int((test.inputs.double() * 6.017 + 4.884).round().sum()) == 111_461


# Synthetic images


def stacked(side: Samples) -> tuple[Tensor, Tensor]:
    images, classes = default_collate([side[i] for i in range(len(side))])
    return images, classes


def test_the_rule_can_be_learned() -> None:
    """The class whose mean training image is nearest: the textbook's answer for patterns in white noise."""
    splits = load_synthetic(image_size=16, num_train=400, num_test=200)
    images, classes = stacked(splits.train)
    means = torch.stack([images[classes == label].mean(0) for label in range(10)])
    test_images, test_classes = stacked(splits.test)
    nearest = torch.cdist(test_images.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == test_classes).float().mean() > 0.95
    assert torch.bincount(classes, minlength=10).min() > 15


def test_a_sample_does_not_depend_on_what_was_read_before() -> None:
    side = load_synthetic(num_train=8).train
    forwards = [side[i][0] for i in range(8)]
    backwards = [side[i][0] for i in reversed(range(8))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not torch.equal(forwards[0], forwards[1])


def test_sides_differ() -> None:
    splits = load_synthetic()
    assert not torch.equal(splits.train[0][0], splits.test[0][0])


@pytest.mark.parametrize("size", [1, 3, 224])
def test_any_size(size: int) -> None:
    image, _ = load_synthetic(image_size=size).train[4095]
    assert image.shape == (3, size, size)
