"""Parts of a user's own: what an address may name, what is wrong in which words, and one run with nothing but such.

Tests: ddp/collectives/catalog.py, ddp/run/assembly/components.py, ddp/run/settings/address.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, random_split

import ddp
from ddp.__main__ import main as ask
from ddp.collectives import Recv, Send, register
from ddp.collectives.catalog import ALL_REDUCE, SCHEDULES, all_reduce_schedules
from ddp.collectives.schedule import Schedule, canonical
from ddp.commands.finished import settings_for
from ddp.commands.same_bits import traced
from ddp.commands.where import Start, samples_of_step, where
from ddp.data.loading.source import whole_splits
from ddp.data.samples import TensorSet
from ddp.data.sets.validation import selection_in
from ddp.errors import ConfigError
from ddp.run.assembly.components import (
    add_own_algorithm,
    check_callbacks,
    check_loss,
    check_transform,
    load_data,
    make_model,
    make_model_without_memory,
    make_task,
)
from ddp.run.launch import torchrun
from ddp.run.launch.command_line import composed, main, translated
from ddp.run.launch.run_folder import continued, prepare, settings_text
from ddp.run.settings.address import check_arrived, check_trust, from_address, own_parts
from ddp.run.settings.checks import resolve
from ddp.run.settings.config import Config, choose
from ddp.run.settings.reader import from_plain
from ddp.train.checkpoints.checkpoint_store import CheckpointStore
from ddp.vision import torchvision

MINE = Path(__file__).parents[2] / "mine.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with `parts.py`. What is imported from it, or added to the catalog, is forgotten at the end."""
    shutil.copy(MINE, tmp_path / "parts.py")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}, {*SCHEDULES}
    yield tmp_path
    for name in [name for name in sys.modules if name not in before[0]]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    for name in {*SCHEDULES} - before[1]:
        del ALL_REDUCE[name], SCHEDULES[name]


def config_of(**plain: Any) -> Config:
    config = from_plain(plain)
    resolve(config)
    return config


# ------------------------------------------------------------------------------------------------------- addresses


def test_an_address_is_searched_for_in_the_folder_last(folder: Path) -> None:
    (folder / "random.py").write_text("raise ArithmeticError")
    (folder / "plain").mkdir()  # a package without __init__.py
    (folder / "plain" / "models.py").write_text("import random\nclass Outer:\n    inner = random.Random\n")
    random = sys.modules["random"]
    sys.path.insert(0, str(folder))  # as `python -m` does it
    assert from_address("plain.models:Outer.inner", key="model", folder=folder) is random.Random  # type: ignore[attr-defined]
    assert sys.path.count(str(folder)) == 1 and sys.path[-1] == str(folder)


@pytest.mark.parametrize(
    ("source", "address", "words"),
    [
        (None, "absent_module:Net", "there is no module absent_module in {folder}"),
        ("", "one:Net", "{folder}/one.py has no Net"),
        ("class Nett: ...", "two:Net", "{folder}/two.py has no Net. Did you mean two:Nett?"),
        ("\n\nx = 1 / 0", "three:Net", "importing three failed: {folder}/three.py, line 3: ZeroDivisionError"),
        ("import not_there", "four:Net", "{folder}/four.py, line 1: ModuleNotFoundError: No module named 'not_there'"),
        ("def :", "five:Net", "importing five failed: {folder}/five.py, line 1: SyntaxError"),
        ("import sys\nsys.exit(3)", "six:Net", "importing six failed: {folder}/six.py, line 2: SystemExit: 3"),
        ("", "seven.deeper:Net", "{folder}/seven.py has no module seven.deeper"),
        (None, "json.deeper:Net", "json/__init__.py has no module json.deeper"),
        (None, "a b:Net", "is no address; write MODULE:NAME"),
        (None, "mine:", "is no address; write MODULE:NAME"),
        (None, "./nets/mine.py:Net", "give the name of the module, and not its file: model=nets.mine:Net"),
    ],
)
def test_what_is_wrong_with_an_address_is_one_sentence(
    source: str | None, address: str, words: str, folder: Path
) -> None:
    if source is not None:
        (folder / f"{address.partition(':')[0].partition('.')[0]}.py").write_text(source)
    with pytest.raises(ConfigError) as error:
        from_address(address, key="model", folder=folder)
    message = str(error.value)
    assert message.startswith(f"model={address}: ") and words.format(folder=folder) in message
    assert "\n" not in message


def test_addresses_compose_and_round_trip(folder: Path) -> None:
    overrides = ["model=my_package.models:Net", "model.args.width=64", "data=parts:make", "data.args={n: 9}"]
    overrides += ["data.skip_steps=[2,3]", "data.order=weighted"]  # as with what `ddp` ships
    config, _ = composed([*overrides, "loss=parts:my_loss", "comm.algorithm=parts:chain"])
    assert composed([r"model=my_package.models\:Net"])[0].model.name == config.model.name, "a sweep passes on this form"
    assert config.model == choose("model", "my_package.models:Net", args={"width": 64})
    assert config.data == choose("data", "parts:make", args={"n": 9}, order="weighted", skip_steps=[2, 3])
    resolve(config)
    assert config.run.code == str(folder)
    assert from_plain(yaml.safe_load(yaml.safe_dump(asdict(config)))) == config
    config.run.code = str(folder / "moved_away")
    resolve(config)
    assert config.run.code == str(folder)
    plain = Config()
    resolve(plain)
    assert plain.run.code == "", "without an address nothing is imported from the folder"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model=my_package.models.Net", "write a colon before its name: model=my_package.models:Net"),
        ("optim=mine:Net", "unknown choice optim=mine:Net"),
        ("model.args.width=3", "unknown key model.args"),
        ("loss=mse", "loss=mse: unknown; take auto, or MODULE:NAME"),
        ("trackers=[mlfow]", "expected one of tensorboard, csv, mlflow, wandb. Did you mean mlflow?"),
    ],
)
@pytest.mark.quick(1)
def test_what_is_no_address_is_told_apart(override: str, words: str, folder: Path) -> None:
    with pytest.raises(Exception) as error:
        composed([override])
    assert words in str(translated(error.value))


# ---------------------------------------------------------------------------------------------- model, data and loss


def test_own_parts_become_components(folder: Path) -> None:
    config = config_of(
        model={"name": "parts:Net", "args": {"width": 3}},
        data={"name": "parts:make", "args": {"n": 40}},
        loss="parts:my_loss",
    )
    splits, again = load_data(config), load_data(config)
    assert (len(splits.train), len(splits.test), splits.sample_shape, splits.num_classes) == (30, 10, (4,), None)
    assert torch.equal(splits.train[0][0], again.train[0][0]), "drawn at random, and the same in every process"
    model = make_model(config, splits)
    assert all(parameter.is_meta for parameter in make_model_without_memory(config, splits).parameters())
    batch = (torch.ones(2, 4), torch.zeros(2, 1))
    expected = model(batch[0]).square().sum()
    for loss in ("parts:my_loss", "torch.nn.functional:mse_loss", "torch.nn:MSELoss"):
        config.loss = loss
        loss_sum, count = make_task(config).loss(model, batch)
        torch.testing.assert_close(loss_sum, expected)
        assert count == 2
    config.loss = "ddp.train.steps.task:Classification"
    assert make_task(config).main_metric == "accuracy"


def test_a_number_as_target_is_learnt_by_its_squared_error(folder: Path) -> None:
    config = config_of(data={"name": "parts:make", "args": {"n": 40}}, model={"name": "mlp"})
    splits = load_data(config)
    check_loss(config, splits)
    model, batch = make_model(config, splits), splits.train.batch(range(5))  # type: ignore[attr-defined]
    for outputs, targets in ((model, batch[1]), (model, batch[1][:, 0])):  # [5, 1] for [5, 1], and for [5]
        metrics = make_task(config, splits).metrics(outputs, (batch[0], targets))
        expected = {"loss": F.mse_loss, "mae": F.l1_loss}
        for name, (total, count) in metrics.items():
            torch.testing.assert_close(total / count, expected[name](model(batch[0]), batch[1]))
    assert type(make_task(config)) is ddp.Regression and ddp.Regression.main_metric == "loss"
    with pytest.raises(ConfigError, match=r"returned outputs \[5, 1\] for numbers \[4, 1\]; both need one number"):
        ddp.Regression().loss(model, (batch[0], batch[1][:4]))
    without_data = replace(splits, train=(), test=())  # as the model of a run is made
    assert make_model(config, without_data)(batch[0]).shape == (5, 1)
    columns = {"inputs": ["a"], "target": "b", "path": "x", "test_path": "y"}
    for num_classes, task in ((None, ddp.Regression), (3, ddp.Classification)):
        config = config_of(data={"name": "csv", **columns, "num_classes": num_classes}, model={"name": "mlp"})
        assert type(make_task(config)) is task


PARTS = """
import torch
from torch import nn

def by_value():  # cannot be built without memory
    assert torch.ones(2).sum().item() == 2
    return nn.Linear(4, 1)

def number(width=1):
    return width

def divided():
    return 1 / 0

def classes():
    pair = torch.zeros(8, 4), torch.arange(8) % 3
    return pair, pair

def images():
    return torch.utils.data.random_split([(torch.zeros(3, 8, 8), 0)] * 8, [6, 2])

def lazy():
    return nn.LazyLinear(3)

class Unreadable:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        raise OSError("no such image")

def unreadable():
    return Unreadable(), Unreadable()

each = nn.MSELoss(reduction="none")

class HalfATask:
    def loss(self, model, batch): ...

def vectors():
    pair = torch.zeros(8, 4), torch.zeros(8, 2)
    return pair, pair
"""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": {"name": "bits:number"}}, "model=bits:number: returned an object of type int; return a torch.nn"),
        (
            {"model": {"name": "bits:number", "args": {"wdth": 3}}},
            "model.args={'wdth': 3}: got an unexpected keyword argument 'wdth'; bits:number takes (width=1)",
        ),
        ({"model": {"name": "bits:divided"}}, "bits.py, line 13: ZeroDivisionError: division by zero"),
        ({"model": {"name": "bits:PAIR"}}, "bits.py has no PAIR"),
        ({"model": {"name": "bits:__name__"}}, "model=bits:__name__: is 'bits'; give the address of a class or func"),
        ({"data": {"name": "bits:number"}}, "data=bits:number: returned an object of type int; return a pair"),
        ({"model": {"name": "bits:lazy"}}, "model=bits:lazy: weight has no size yet"),
        ({"data": {"name": "bits:unreadable"}}, "bits.py, line 29: OSError: no such image"),
        ({"data": {"name": "bits:classes"}}, "model=cnn: reads samples of [channels, height, width], and those of"),
        ({"data": {"name": "bits:images"}}, "model=cnn: needs the num_classes of data=bits:images; return ddp.Spl"),
        ({"data": {"name": "bits:vectors"}}, "loss=auto: is for classes, and the targets of data=bits:vectors are"),
        ({"loss": "bits:each"}, "loss=bits:each: reduction='none' of MSELoss: take"),
        ({"loss": "os:path"}, "loss=os:path: is <module 'posixpath' (frozen)>; give the address of a function (outp"),
        ({"loss": "os:getcwd"}, "loss=getcwd: takes (), and is called with outputs and targets; give a function of"),
        ({"loss": "bits:HalfATask"}, "HalfATask has a method `loss` but is no task: derive its class"),
    ],
)
def test_a_part_that_cannot_work_is_refused_in_words(settings: dict[str, Any], words: str, folder: Path) -> None:
    (folder / "bits.py").write_text(PARTS)
    config = config_of(**settings)
    with pytest.raises(ConfigError) as error:
        splits = load_data(config)
        check_loss(config, splits)
        make_model_without_memory(config, splits)
    assert words in str(error.value)


AUGMENTS = """
import torch
from ddp.vision import torchvision

T = torchvision().transforms
kinds = []

def whole(image):  # a Pillow image, of which a finished tensor is made
    kinds.append(type(image).__name__)
    return T.ToTensor()(image.resize((8, 8)))

Mirrored = type("Mirrored", (), {"__call__": lambda self, image: T.functional.hflip(image.resize((8, 8)))})

def smaller(image):
    return image[..., :-1] if hasattr(image, "shape") else image.resize((4, 4))

def broken(image):
    return image.nothing

number, pair = 7, lambda image: (image, image)
"""


def image_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes equal images as folders and as tar files; returns the settings of both, and of data in memory."""
    pixels = torch.arange(12 * 12 * 3, dtype=torch.uint8).view(12, 12, 3).numpy()
    for side in ("train", "val"):
        (folder / side / "cat").mkdir(parents=True)
        for number in range(4):
            Image.fromarray(pixels + 3 * number).save(folder / side / "cat" / f"{number}.png")
            (folder / side / "cat" / f"{number}.cls").write_text("0")
        with tarfile.open(folder / f"{side}.tar", "w") as archive:
            for path in sorted((folder / side / "cat").iterdir()):
                archive.add(path, arcname=path.name)
    tar = {"path": str(folder / "train.tar"), "test_path": str(folder / "val.tar"), "num_classes": 2}
    of_files = {"image_folder": {"path": str(folder)}, "tar": tar}
    return {
        "digits": {},
        "synthetic": {"num_samples": 8, "image_size": 8},
        **{name: {**data, "image_size": 8, "index_dir": str(folder / "index")} for name, data in of_files.items()},
    }


@pytest.mark.parametrize("name", ["digits", "synthetic", "image_folder", "tar"])
def test_an_own_transform_is_of_training_images_alone(name: str, folder: Path) -> None:
    (folder / "bits.py").write_text(AUGMENTS)
    data = {"name": name, **image_files(folder)[name]}
    plain = load_data(config_of(data=data), download=True)
    is_file = "path" in data
    config = config_of(data={**data, "transform": "bits:whole" if is_file else "parts:augment", "validation": 0.5})
    assert config.run.code == str(folder), "so that workers find it, and whoever resumes the run"
    splits = load_data(config)
    check_transform(config, splits)
    untouched = plain.unaugmented if is_file else plain.train
    assert untouched is not None and splits.validation is not None
    mine, apart = (int(selection_in(side).numbers[0]) for side in (splits.train, splits.validation))  # type: ignore[union-attr]
    made = [splits.train[0][0] for _ in range(9)]
    if is_file:  # the augmentation that is shipped takes another part of the image each time
        file = Image.open(folder / "train" / "cat" / f"{mine}.png").resize((8, 8))
        assert all(torch.equal(each, torchvision().transforms.ToTensor()(file)) for each in made)
        assert set(sys.modules["bits"].kinds) == {"Image"}
    else:
        shifts = [untouched[mine][0].roll((y, x), dims=(-2, -1)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        assert all(any(torch.equal(each, shift) for shift in shifts) for each in made)
        assert len({each.numpy().tobytes() for each in made}) > 1
    assert torch.equal(splits.validation[0][0], untouched[apart][0]), "as a test image"
    assert torch.equal(splits.test[0][0], plain.test[0][0])


def test_a_pillow_image_that_a_transform_returns_is_normalised(folder: Path) -> None:
    (folder / "bits.py").write_text(AUGMENTS)
    data = image_files(folder)["image_folder"]
    config = config_of(data={"name": "image_folder", **data, "transform": "bits:Mirrored"})
    splits = load_data(config, download=True)
    check_transform(config, splits)
    pixels = torch.from_numpy(np.array(Image.open(folder / "train/cat/0.png").resize((8, 8)))).flip(1).permute(2, 0, 1)
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    torch.testing.assert_close(splits.train[0][0], (pixels / 255 - mean) / deviation)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (
            "bits:smaller",
            r"makes float32 \[1, 8, 7\] of an image, and models take float32 \[1, 8, 8\]: return such a tensor",
        ),
        ("bits:pair", r"makes a tuple of an image, and models take float32 \[1, 8, 8\]"),
        (
            "bits:broken",
            r"calling it failed: .*bits.py, line 18: AttributeError: 'Tensor' object has no attribute 'noth",
        ),
        ("bits:number", "is 7; give the address of a function of an image"),
        ("bits:brocken", ".*bits.py has no brocken. Did you mean bits:broken"),
        ("augment", "is no address; write MODULE:NAME"),
    ],
)
def test_a_transform_that_cannot_work_is_refused_in_words(transform: str, words: str, folder: Path) -> None:
    (folder / "bits.py").write_text(AUGMENTS)
    config = config_of(data={"name": "digits", "transform": transform})
    with pytest.raises(ConfigError, match=rf"^data.transform={transform}: {words}"):
        check_transform(config, load_data(config))
    with pytest.raises(ConfigError, match=r"unknown key data.transform: it belongs to data=digits or"):
        config_of(data={"name": "standard_library", "transform": transform})


def test_shipped_models_take_own_data_and_odd_models_are_built_for_real(folder: Path) -> None:
    (folder / "bits.py").write_text(PARTS)
    config = config_of(model={"name": "mlp"}, data={"name": "bits:classes"})
    assert make_model(config, load_data(config))(torch.zeros(2, 4)).shape == (2, 3)
    config = config_of(model={"name": "bits:by_value"})
    assert not make_model_without_memory(config, load_data(config)).weight.is_meta  # type: ignore[union-attr]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


TENSORS = (torch.zeros(6, 2), torch.arange(6) % 2)


def dropping() -> DataLoader[Any]:
    return DataLoader(TensorSet(*TENSORS), batch_size=4, drop_last=True)  # type: ignore[arg-type]


def drawing() -> DataLoader[Any]:
    return DataLoader(TensorSet(*TENSORS), sampler=WeightedRandomSampler([1.0] * 6, 6))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (3, "return a pair"),
        (TENSORS, "train is a Tensor; give a pair of tensors (inputs, targets)"),
        ((TENSORS, (torch.zeros(3), torch.zeros(2))), "test has inputs [3] and targets [2]"),
        ((TENSORS, Stream()), "test is Stream, an iterable"),
        ((TENSORS, []), "test has no samples"),
        (
            (dropping(), TENSORS),
            "train is a DataLoader with drop_last, which ddp.fit takes: give its data set; the last",
        ),
        (
            (drawing(), TENSORS),
            "train is a DataLoader with its own sampler, which ddp.fit takes: give its data set",
        ),
    ],
)
def test_data_of_another_form_are_refused(found: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        whole_splits(found, name="mine:make")
    assert words in str(error.value)


def test_splits_are_completed_by_what_can_be_seen() -> None:
    pair = whole_splits((TENSORS, TENSORS), name="mine:make")
    assert (pair.sample_shape, pair.num_classes) == ((2,), 2)
    other = (torch.ones(6, 2), TENSORS[1])
    assert pair.name != whole_splits((other, TENSORS), name="mine:make").name, "hosts compare this"
    parts = random_split(TensorSet(*TENSORS), [4, 2])
    told = whole_splits(ddp.Splits(train=parts[0], test=parts[1], num_classes=7, name="x"), name="mine:make")
    assert (told.sample_shape, told.num_classes, told.name) == ((2,), 7, "x")


# -------------------------------------------------------------------------------------------------------- all-reduces


def idle(rank: int, num_ranks: int) -> Iterator[Any]:
    yield from ()


def endless(rank: int, num_ranks: int) -> Iterator[Any]:
    while True:
        yield ()


def without_comma(rank: int, num_ranks: int) -> Iterator[Any]:
    yield Send(1 - rank, range(num_ranks))


def untyped(rank: int, num_ranks: int) -> Iterator[Any]:
    yield Send(1 - rank, 0), Recv(1 - rank, 0, add=True)  # type: ignore[arg-type]


def raising(rank: int, num_ranks: int) -> Iterator[Any]:
    yield ()
    raise ArithmeticError("scripted")


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (idle, "2 ranks, rank 0 at the end: chunk 0 ends as 0: not each contribution once"),
        (endless, "never ends; a schedule must end"),
        (without_comma, "1 ranks, rank 0 in round 1: yields Send(peer=1, chunks=range(0, 1), buffer=0), which is no"),
        (untyped, "where a peer is not a whole number, or chunks are not a range"),
        (raising, "rank 0 in round 2: raises ArithmeticError: scripted"),
    ],
)
def test_a_wrong_schedule_is_not_registered(algorithm: Callable[..., Any], words: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        register("own", algorithm)
    assert str(error.value).startswith("schedule 'own': ") and words in str(error.value)
    assert "own" not in ALL_REDUCE


def test_a_registered_schedule_is_offered_where_it_is_proven(folder: Path) -> None:
    chain = from_address("parts:chain", key="comm.algorithm", folder=folder)
    for taken in ("ring", "auto", "two_dimensional", "hierarchical+tree", "no word"):
        with pytest.raises(ConfigError):
            register(taken, chain)

    def up_to_8(rank: int, num_ranks: int) -> Iterator[Any]:
        return chain(rank, num_ranks) if num_ranks <= 8 else idle(rank, num_ranks)

    register("chain", up_to_8)
    with pytest.raises(ConfigError, match="is taken"):
        register("chain", chain)
    assert all_reduce_schedules([range(3)])["chain"].check(3).expressions == (canonical(3),) * 3
    assert "chain" in all_reduce_schedules([range(8)]) and "chain" not in all_reduce_schedules([range(9)])


def test_an_address_may_hold_a_whole_schedule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bits.py").write_text(
        "from ddp.collectives.catalog import SCHEDULES\nwhole, other = SCHEDULES['tree'], SCHEDULES['tree_reduce']\n"
    )
    config = config_of(comm={"algorithm": "bits:whole"})
    add_own_algorithm(config, check=True)
    assert isinstance(ALL_REDUCE["bits:whole"], Schedule) and ALL_REDUCE["bits:whole"].num_chunks(5) == 1
    config.comm.algorithm = "bits:other"
    with pytest.raises(ConfigError, match=r"comm\.algorithm=bits:other: is not an all-reduce"):
        add_own_algorithm(config, check=True)
    for question in ("draw", "check", "simulate"):
        assert ask([question, "parts:chain", "3"]) == 0
    assert "proven" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ask(["check", "parts:chian", "3"])
    assert "Did you mean parts:chain?" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.slow
def test_a_run_of_own_parts_is_checked_first_trains_and_is_resumed_from_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # `main` sets it; this takes it back
    (folder / "watch.py").write_text(WATCH)
    settings = ["model=parts:Net", "model.args.width=5", "data=parts:make", "loss=parts:my_loss"]
    settings += ["callbacks=[watch:Watches,watch:another]", "trackers=[csv]", "run.group=these"]
    run_dir = folder / "runs" / "mine"

    def train(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    (folder / "bits.py").write_text("def idle(rank, num_ranks):\n    yield ()\n")
    status, _, err = train(*settings, "comm.algorithm=bits:idle", "run.name=mine")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: comm.algorithm=bits:idle: 2 ranks, rank 0 at the end: chunk 0 ends as 0")
    assert not run_dir.exists(), "no worker was started"

    status, out, err = train(*settings, "comm.algorithm=parts:chain", "run.name=mine", "max_steps=3")
    assert (status, err) == (0, "")
    assert "Net with 31 parameters" in out and "all-reduce: parts:chain" in out
    assert f"imported from {folder}: parts" in out
    assert out.count("heard of 3 steps, from 0") == 2 and "finished,,3" in (run_dir / "status.csv").read_text()

    (folder / "elsewhere").mkdir()
    with contextlib.chdir(folder / "elsewhere"):
        status, out, err = train(f"hydra.run.dir={run_dir}", "resume=auto", "max_steps=5")
    assert status == 0 and "the bits" in err, err
    assert "continuing after step 3" in out and "Net with 31 parameters" in out
    assert out.count("heard of 5 steps, from 3") == 2 and "finished,,5" in (run_dir / "status.csv").read_text()
    assert "callbacks=watch:Watches, callbacks.1=watch:another" in caplog.text, "it says whose code runs"


WATCH = """
import ddp

class Watches(ddp.Callback):
    def fit_start(self, state):
        self.first = state.step

    def finished(self, state, summary):
        print(f"heard of {summary['steps']} steps, from {self.first}", flush=True)

def another():
    return Watches()

class Begins(ddp.Callback):
    def __init__(self):
        raise RuntimeError("a run begins")

class Needs(ddp.Callback):
    def __init__(self, path):
        pass

class Other:
    pass

def number():
    return 3

def leaves():
    raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("watch:Watches", None),
        ("watch:another", None),
        ("watch:Begins", None),  # a class is not called before workers start
        ("watch:Watch", "callbacks=watch:Watch: {folder}/watch.py has no Watch. Did you mean watch:Watches?"),
        ("watch:Other", "callbacks=watch:Other: is no ddp.Callback; derive the class from that"),
        ("watch:number", "callbacks=watch:number: returned an object of type int; return a ddp.Callback"),
        ("watch:leaves", "callbacks=watch:leaves: calling it failed: {folder}/watch.py, line 29: SystemExit: 3"),
        ("watch:Needs", "callbacks=watch:Needs: missing a required argument: 'path'; watch:Needs takes (path)"),
        ("Watches", "callbacks=Watches: is no address; write MODULE:NAME, as my_package.models:Net"),
    ],
)
def test_a_callback_s_address_is_checked_before_workers_start(address: str, words: str | None, folder: Path) -> None:
    (folder / "watch.py").write_text(WATCH)
    config = config_of(callbacks=[address], trackers=["csv"])
    if words is None:
        check_callbacks(config)
        return
    with pytest.raises(ConfigError) as error:
        check_callbacks(config)
    assert str(error.value) == words.format(folder=folder)


def test_a_tracker_that_is_missing_or_given_twice_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp.train.reports.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^trackers=\[mlflow\]: MLflow is not installed: pip install mlflow$"):
        check_callbacks(config_of(trackers=["csv", "mlflow"]))
    with pytest.raises(ConfigError, match="the run would be sent to CSV twice: give that tracker once"):
        check_callbacks(config_of(trackers=["csv", "csv"]))


# ------------------------------------------------------------------------------- whose code a folder's files may name


DEALT = """
from pathlib import Path
import numpy as np, torch
Path("imported").touch()

class Samples:
    file_sizes, weights = [10, 30, 20], torch.arange(60.0)
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return torch.zeros(4), torch.zeros(1)

def make():
    return Samples(), Samples()

def augment(image):
    return image

def odd_and_even(shard, num_shards):
    return np.arange(shard, 60, num_shards)
"""


@pytest.mark.parametrize(
    "data",
    [
        {"name": "dealt:make"},  # by file, because it has as many files as shards
        {"name": "dealt:make", "order": "weighted"},
        {"name": "dealt:make", "sharding": "dealt:odd_and_even"},
        {"name": "digits", "transform": "dealt:augment"},
    ],
)
@pytest.mark.quick(1)
def test_where_answers_without_the_code_of_the_run(data: dict[str, Any], folder: Path) -> None:
    (folder / "dealt.py").write_text(DEALT)
    plain = {"data": data, "model": {"name": "parts:Net"}, "loss": "parts:my_loss", "cluster": {"workers": 2}}
    config = from_plain({**plain, "batch": {"global_size": 6}, "epochs": 2})
    (folder / "run").mkdir()
    prepare(config, folder / "run")
    expected = samples_of_step([Start(config, load_data(config))], 3)
    for name in ("dealt", "parts"):
        (folder / f"{name}.py").write_text(f"raise AssertionError('{name} was imported')")
        del sys.modules[name]
    assert where(folder / "run", step=3, sample=None, epoch=None) == expected
    assert where(folder / "run", step=None, sample=17, epoch=1).startswith("sample 17")

    starts = folder / "run" / "starts.jsonl"
    starts.write_text(starts.read_text().replace('"dealt": {', '"then": {'))  # of a version that noted nothing
    with pytest.raises(ConfigError, match=r"=dealt:\w+: where imports no code of a run, so it cannot answer this$"):
        where(folder / "run", step=3, sample=None, epoch=None)


def test_code_that_a_stranger_s_file_names_is_refused_before_it_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "dealt.py").write_text(DEALT + "Net = torch.nn.Identity\n")
    run_dir = folder / "run"
    CheckpointStore(run_dir / "checkpoints").save(1, {"model": {}}, meta={"identity": {}})
    settings = {"model": {"name": "dealt:Net"}, "run": {"code": str(folder)}, "trust": True}  # it cannot say so itself
    settings["data"] = {"name": "digits", "transform": "dealt:augment"}
    transform = "data.transform=dealt:augment, "
    (run_dir / "config.yaml").write_text(yaml.safe_dump(asdict(from_plain(settings))))

    def resumed(trust: bool) -> Config:
        return continued(from_plain({"resume": "auto", "trust": trust}), [], run_dir)

    code, dealt, (folder_of_run, config) = folder, folder / "dealt.py", (run_dir, run_dir / "config.yaml")
    hands = [(path, mode) for path, mode in zip((folder_of_run, config, code, dealt), (0o777, 0o666) * 2, strict=True)]
    hands += [(config, None), (dealt, None)] if os.geteuid() == 0 else []
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    for path, mode in hands:
        os.chown(path, 65534, -1) if mode is None else path.chmod(mode)
        for read, more in ((lambda: resumed(trust=False), transform), (lambda: ddp.load(run_dir).model(), "")):
            with pytest.raises(ConfigError) as error:
                read()
            assert str(path) in str(error.value)
            assert f"code of {folder} as you: {more}model=dealt:Net" in str(error.value)
            assert "say trust=true (in Python trust=True)" in str(error.value)
        assert not caplog.records and "dealt" not in sys.modules
        os.chown(path, os.geteuid(), -1)
        path.chmod(0o700)
    dealt.chmod(0o666)
    assert asdict(resumed(trust=True))["data"]["transform"] == "dealt:augment", "as in the run"
    assert ddp.load(run_dir).model(trust=True) is not None
    assert [record.message for record in caplog.records] == [
        f"running code of {folder}, as {run_dir / 'config.yaml'} says: {more}model=dealt:Net"
        for more in (transform, "")
    ]


@pytest.mark.parametrize("mine", ["pkg", "pkg/__init__.py", "pkg/sub", "pkg/sub/mod.py", "pkg/sub/__pycache__"])
def test_what_an_import_reads_on_its_way_is_looked_at(mine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pkg" / "sub" / "__pycache__").mkdir(parents=True)  # `sub` has no __init__.py
    (folder / "elsewhere").mkdir()
    for name in ("pkg/__init__.py", "pkg/sub/mod.py"):
        (folder / name).write_text("raise AssertionError('imported')")
    settings = folder / "elsewhere" / "config.yaml"
    settings.write_text("")

    def check() -> None:
        check_trust({"model": "pkg.sub.mod:Net"}, code=str(folder), settings=settings, trust=False)

    (folder / mine).chmod(0o777)
    check()  # here the user has given the command, as for a new run
    monkeypatch.chdir(folder / "elsewhere")
    with pytest.raises(
        ConfigError, match=rf"^others may write {folder / mine}, and {settings} would run code of {folder} as"
    ):
        check()


UNPACKED = {  # the address of a model, run.code, and the current folder; {} is the folder that was unpacked into
    "in the run": ("theirnet:Net", "{}/run/src", "{}"),
    "in the run, which is the current folder": ("src.theirnet:Net", "{}/run", "{}/run"),
    "in the run, from the folder around it": ("run.src.theirnet:Net", "{}", "{}"),
    "in the run, by a link": ("linked:Net", "{}", "{}"),
    "beside the run, by a guess": ("beside:Net", "src", "{}"),
    "of Python": ("subprocess:check_output", "{}", "{}"),
}


@pytest.mark.parametrize("name", UNPACKED)
@pytest.mark.quick(1)
def test_code_that_came_with_the_settings_is_not_the_user_s_whoever_owns_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive that was unpacked: all files are this user's."""
    address, code, here = UNPACKED[name]
    for folder in ("run/src", "src"):
        (tmp_path / folder).mkdir(parents=True)
    for path in ("run/src/theirnet.py", "src/beside.py"):
        (tmp_path / path).write_text("raise AssertionError('imported')")
    (tmp_path / "linked.py").symlink_to("run/src/theirnet.py")
    monkeypatch.chdir(here.format(tmp_path))
    plain = {"model": {"name": address, "args": {"args": "touch ran", "shell": True}}, "trust": True}
    config = from_plain({**plain, "run": {"code": code.format(tmp_path)}})
    CheckpointStore(tmp_path / "run/checkpoints").save(1, {"model": {}}, meta={"identity": {}})
    (tmp_path / "run/config.yaml").write_text(settings_text(config))
    for read in (
        lambda: settings_for(tmp_path / "run", []),
        lambda: ddp.load(tmp_path / "run").model(),
        lambda: continued(from_plain({"resume": str(tmp_path / "run")}), [], tmp_path / "new"),
        lambda: traced(tmp_path / "run", tmp_path, last_step=1, trust=False),
    ):
        with pytest.raises(ConfigError, match=r"would run code of .* as you: .*model=.*; look at .* say trust=true"):
            read()
    settings_for(tmp_path / "run", ["trust=true"])


def test_a_run_without_parts_of_one_s_own_needs_no_trust(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_trust({}, code="", settings=tmp_path / "config.yaml", trust=False)
    assert own_parts(asdict(Config())) == {} and not caplog.records


ARRIVED = {"model": {"name": "dealt:Net"}, "data": {"name": "digits", "transform": "dealt:augment"}}
TYPED = ["model=dealt:Net", "data.transform=dealt:augment"]


def test_code_that_arriving_settings_name_is_imported_on_one_s_own_word_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "dealt.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n{DEALT}Net = torch.nn.Identity\n")
    settings = asdict(from_plain({**ARRIVED, "run": {"code": str(folder)}, "trust": True}))  # it cannot say so itself
    sent = {"config": settings, "run_dir": str(folder / "run")}
    for words in ([], ["trust=false"], TYPED[:1], ["model=dealt:Network", TYPED[1]]):
        with pytest.raises(ConfigError, match=rf"^the settings that have arrived would run code of {folder} as you: "):
            check_arrived(settings, words)
        monkeypatch.setattr(sys, "argv", ["ddp train", *words])
        assert torchrun.prepare_host(sent)["error"].endswith("and say trust=true to this process")
        with pytest.raises(ConfigError, match=r"^the settings that have arrived"):
            torchrun._restarted(sent, workers=2)  # which is what an earlier attempt has left in the store
    assert "dealt" not in sys.modules and not (folder / "ran").exists() and not caplog.records
    check_arrived(settings, TYPED)  # as below a launcher, which gives all ranks one command line
    check_arrived(asdict(from_plain({})), [])
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    with pytest.raises(ConfigError, match="anyone who reaches the port can have sent them: give all"):
        check_arrived(settings, TYPED)
    check_arrived(settings, ["+trust=True"])
    assert [record.message for record in caplog.records] == [
        f"running code of {folder}, as settings say that have arrived: data.transform=dealt:augment, model=dealt:Net"
    ]
    monkeypatch.setenv("DDP_SECRET", "s" * 16)  # with which the store is sealed
    check_arrived(settings, [])
    monkeypatch.setattr(sys, "argv", ["ddp train", "trust=true", "seed=1"])
    assert torchrun.typed() == ["seed=1"]
