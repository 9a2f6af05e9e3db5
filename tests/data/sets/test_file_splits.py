"""Splits of files: what the settings of the command line make of tar files, lines and tokens."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import Table
from pyarrow.feather import write_feather
from pyarrow.parquet import write_table

from ddp.data.orders.sampler import sampler_of
from ddp.errors import ConfigError, UnreadableSample
from ddp.run.assembly.components import load_data, make_task
from ddp.run.settings.checks import validate
from ddp.run.settings.config import Config, choose


def written(folder: Path) -> Path:
    for side, num_files in (("train", 4), ("test", 2)):
        for file in range(num_files):
            with tarfile.open(folder / f"{side}-{file}.tar", "w") as archive:
                for number in range(3):
                    image = io.BytesIO()
                    Image.new("RGB", (20, 20), (40 * file, 80, 0)).save(image, "PNG")
                    for extension, data in (("png", image.getvalue()), ("cls", str(number).encode())):
                        member = tarfile.TarInfo(f"{file}-{number}.{extension}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
            rows = [{"x": file, "y": number, "label": number % 2} for number in range(5)]
            (folder / f"{side}-{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            lines = ["x,y,label", *(f"{row['x']},{row['y']},{row['label']}" for row in rows)]
            (folder / f"{side}-{file}.csv").write_text("\n".join(lines))
            write_table(table := Table.from_pylist(rows), folder / f"{side}-{file}.parquet")
            write_feather(table, folder / f"{side}-{file}.feather")
            np.arange(100 * file, 100 * file + 41, dtype=np.uint16).tofile(folder / f"{side}-{file}.bin")
    return folder


def config_of(folder: Path, name: str, suffix: str, **data: Any) -> Config:
    places = {"path": f"{folder}/train-{{0..3}}.{suffix}", "test_path": f"{folder}/test-*.{suffix}"}
    config = Config(data=choose("data", name, index_dir=str(folder / "index"), **places, **data))
    config.model = choose("model", "gpt" if name == "tokens" else "mlp")
    validate(config)
    return config


COLUMNS: dict[str, Any] = {"inputs": ["x", "y"], "target": "label", "num_classes": 2}
CASES: list[tuple[str, str, dict[str, Any], tuple[int, ...], int, list[int]]] = [
    ("tar", "tar", {"image_size": 8, "num_classes": 3}, (3, 8, 8), 3, [3] * 4),
    ("jsonl", "jsonl", COLUMNS, (2,), 2, [5] * 4),
    ("csv", "csv", COLUMNS, (2,), 2, [5] * 4),
    ("parquet", "parquet", COLUMNS, (2,), 2, [5] * 4),
    ("arrow", "feather", COLUMNS, (2,), 2, [5] * 4),
    ("tokens", "bin", {"context": 8, "vocab_size": 500}, (8,), 500, [5] * 4),
]


@pytest.mark.parametrize(("name", "suffix", "settings", "shape", "num_classes", "sizes"), CASES)
def test_the_parent_indexes_and_workers_read(name, suffix, settings, shape, num_classes, sizes, tmp_path) -> None:
    config = config_of(written(tmp_path), name, suffix, **settings)
    with pytest.raises(ConfigError, match="index"):
        load_data(config)  # a worker, before the parent
    by_parent, by_worker = load_data(config, download=True), load_data(config)
    assert by_parent.name == by_worker.name and f"{sum(sizes)} samples in 4 files" in by_parent.name
    for splits in (by_parent, by_worker):
        assert splits.sample_shape == shape and splits.num_classes == num_classes
        assert splits.train.file_sizes.tolist() == sizes and len(splits.test) == sum(sizes) // 2
        inputs, target = splits.test[1]
        assert tuple(inputs.shape) == shape and 0 <= int(torch.as_tensor(target).max()) < num_classes
    shares = {"global_batch": 4, "rank": 0, "world_size": 2, "num_shards": 4}
    _, note = sampler_of(by_worker.train, order=None, sharding="auto", **shares)
    assert "4 files are dealt to 4 shards" in note


def test_text_in_lines_is_packed_into_windows(tmp_path: Path) -> None:
    for side, texts in (("train", ["to be", "or not"]), ("test", ["that is"])):
        (tmp_path / f"{side}-0.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    config = Config(data=choose("data", "jsonl", text="text", context=4, index_dir=str(tmp_path / "index")))
    config.data.path, config.data.test_path = f"{tmp_path}/train-*.jsonl", f"{tmp_path}/test-*.jsonl"  # type: ignore[attr-defined]
    config.model = choose("model", "gpt")
    validate(config)
    splits = load_data(config, download=True)
    windows = [bytes(sample[0].tolist()) for sample in (splits.train[0], splits.train[1], splits.train[2])]
    assert windows == [b"to b", b"e\nor", b" not"] and len(splits.train) == 3 and splits.num_classes == 256
    assert bytes(splits.test[0][1].tolist()) == b"hat " and make_task(config).main_metric == "bits_per_byte"
    config.data.text = "words"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"train-0.jsonl, line 1: words is empty: fill it in"):
        load_data(config, download=True)
    config.model = choose("model", "mlp")
    with pytest.raises(ConfigError, match="does not read the text of data=jsonl; take model=gpt"):
        validate(config)


def test_tokens_are_not_called_bytes(tmp_path: Path) -> None:
    config = config_of(written(tmp_path), "tokens", "bin", context=8, vocab_size=500)
    assert make_task(config).main_metric == "bits_per_token"
    assert make_task(config).finish({"loss": 0.6931471805599453}) == {"loss": 0.6931471805599453, "bits_per_token": 1.0}


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("tar", {"path": None}, "^data.path=null: names no files"),
        ("tar", {"test_path": None}, "^data.test_path=null: names no files"),
        ("csv", {**COLUMNS, "inputs": []}, r"^data.inputs=\[\]: names no columns"),
        ("csv", {**COLUMNS, "target": None}, "^data.target=null: names no column;"),
    ],
)
def test_settings_that_cannot_work(name, settings, words) -> None:
    config = Config(
        data=choose("data", name, **{"path": "a", "test_path": "b", **settings}), model=choose("model", "mlp")
    )
    with pytest.raises(ConfigError, match=words):
        validate(config)


def test_a_validation_set_is_a_side_of_its_own(tmp_path: Path) -> None:
    config = config_of(written(tmp_path), "tar", "tar", image_size=8, num_classes=3)
    config.data.path = f"{tmp_path}/train-{{0..2}}.tar"  # type: ignore[attr-defined]
    config.data.validation_path = f"{tmp_path}/train-3.tar"  # type: ignore[attr-defined]
    splits = load_data(config, download=True)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [9, 3, 6]  # type: ignore[arg-type]
    for path in (config.data.path, config.data.test_path):  # type: ignore[attr-defined]
        config.data.validation_path = path  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"path and validation_path are both .* held-out samples must be others"):
            load_data(config)
    config.data.validation_path = f"{tmp_path}/train-1.tar"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"train-1.tar belongs to validation_path=.* and to path="):
        load_data(config, download=True)
    config.data.validation_path, config.data.validation = None, 0.25  # type: ignore[attr-defined]
    share = load_data(config, download=True)
    assert [len(share.train), len(share.validation), len(share.test)] == [7, 2, 6]  # type: ignore[arg-type]
    assert torch.equal(share.validation[0][0], share.validation[0][0])  # type: ignore[index]  # as test images are
    config.data.validation_path = "other.tar"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"data.validation=0.25: contradicts data.validation_path=other.tar"):
        validate(config)


def test_held_out_files_are_others(tmp_path: Path) -> None:
    config = config_of(written(tmp_path), "csv", "csv", **COLUMNS)
    config.data.test_path = config.data.path  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="held-out samples must be others"):
        load_data(config, download=True)


@pytest.mark.parametrize(("name", "suffix", "settings"), [case[:3] for case in CASES])
def test_no_file_is_on_both_sides(name: str, suffix: str, settings: Any, tmp_path: Path) -> None:
    (written(tmp_path) / "held-out").symlink_to(tmp_path)
    (tmp_path / f"hard.{suffix}").hardlink_to(tmp_path / f"train-3.{suffix}")
    for path, also in (
        (f"train-3.{suffix}", ""),
        (f"held-out/train-3.{suffix}", ", there as .*/train-3"),
        (f"hard.{suffix}", ", there as .*/train-3"),
    ):
        config = config_of(tmp_path, name, suffix, **settings)
        config.data.test_path = f"{tmp_path}/{path}"  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=rf"{path} belongs to test_path=.* and to path=\S+{also}.*must be others"):
            load_data(config, download=True)


@pytest.mark.parametrize(
    ("name", "suffix", "settings", "words"),
    [
        ("tar", "tar", {"image_size": 8, "num_classes": 2}, "cls is 2, and num_classes=2"),
        ("tokens", "bin", {"context": 8, "vocab_size": 20}, "the token 24, and vocab_size=20"),
    ],
)
def test_targets_that_no_model_can_have_are_named(name, suffix, settings, words, tmp_path) -> None:
    train = load_data(config_of(written(tmp_path), name, suffix, **settings), download=True).train
    with pytest.raises(UnreadableSample, match=words):
        train[2]


def test_rows_that_do_not_fit_are_named_before_workers_start(tmp_path: Path) -> None:
    config = config_of(written(tmp_path), "csv", "csv", **{**COLUMNS, "target": "y"})
    with pytest.raises(ConfigError, match=r"train-0.csv, line 4: y is 2, and num_classes=2 has the classes 0 … 1"):
        load_data(config, download=True)
    (tmp_path / "train-1.csv").write_text("x,y,label\n1,2,0\n1,,1\n")
    config = config_of(tmp_path, "csv", "csv", **COLUMNS)
    with pytest.raises(ConfigError, match=r"train-1.csv, line 3: y is empty: .*data.missing=0"):
        load_data(config, download=True)
    config = config_of(tmp_path, "csv", "csv", **COLUMNS, missing=0.5)
    assert load_data(config, download=True).train[6][0].tolist() == [1, 0.5]
