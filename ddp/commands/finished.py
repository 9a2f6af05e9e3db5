"""Evaluates a finished run, or predicts with it, on the samples that were held out from it, or on others.

    python -m ddp evaluate runs/mine                       the metrics, over all samples
    python -m ddp predict runs/mine --out scores.csv       what the model makes of each sample: a row each, in order
    … data.test_path=other.csv cluster.workers=4           with settings other than those of the run

    parent        settings, data, checkpoint, and one sample through the model: refuses what cannot work
       │ launch
    every rank    its share of the samples: ddp.evaluate, ddp.predict; rank 0 writes the file, whole or not at all

Of the run's settings only those matter that say what the data are, how the model is built, and what it has learnt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from ddp.data.loading.loader import EvaluationLoader
from ddp.data.loading.source import source_of
from ddp.data.samples import Splits
from ddp.errors import ConfigError
from ddp.process.files import whole_file
from ddp.process.invocation import program
from ddp.run.build import components
from ddp.run.build.load import Trained, load
from ddp.run.build.stages import joined
from ddp.run.launch.command_line import launch
from ddp.run.launch.run_folder import read_settings
from ddp.run.settings.address import own_parts, told
from ddp.run.settings.config import CHOICES, Config
from ddp.run.settings.reader import from_plain, settings_of
from ddp.run.settings.trust import check_trust
from ddp.train.evaluate import evaluate, predict
from ddp.train.report import metric_in_words, words_of
from ddp.train.starts import STARTS
from ddp.train.tasks.task import Task
from ddp.units import counted

OF_THE_RUN = ("data", "model", "loss", "loader", "precision", "device", "backend", "deterministic")
MAY_DIFFER = ("data", "loader", "cluster", "comm", "precision", "device", "backend", "deterministic", "trust")
ENDINGS = (".csv", ".npy")
_OF_TRAINING = ("transform", "sharding", "validation", "validation_path")  # of data, and no matter afterwards
_PATHS = ("root", "path", "test_path", "validation_path", "index_dir", "cache_dir")  # of data, which may be relative
_NO_LIMIT = 1 << 30  # a global batch, because no step is made


def evaluate_run(run: Path, words: Sequence[str]) -> str:
    """Returns, in words, the metrics of a run's best checkpoint, or of the checkpoint that `run` is.

    Args:
        words: settings on top of the run's, as KEY=VALUE.

    Raises:
        ConfigError, CheckpointError: the folder, a setting, or the data cannot be used.
        WorkersFailed: a worker raised or died.
    """
    config, trained, splits = _checked(run, words, is_evaluation=True)
    means: Mapping[str, float] = _launched(config, partial(_evaluate, config, trained.path))
    rows = {words_of(f"test_{name}"): metric_in_words(f"test_{name}", value) for name, value in means.items()}
    width = max(map(len, rows))
    samples = counted(len(splits.test), "sample")
    return "\n".join(
        [f"{trained.path}, on {samples} of data={config.data.name}:"]
        + [f"  {name:>{width}}  {value}" for name, value in rows.items()]
    )


def predict_run(run: Path, words: Sequence[str], out: Path) -> str:
    """Writes what a run's model makes of each sample, and returns in words what was written.

    Args:
        run, words: as in `evaluate_run`.
        out: NAME.csv, with a column for each number of an output; or NAME.npy, [samples, ...].

    Raises:
        ConfigError, CheckpointError: as `evaluate_run`; or `out` cannot be written.
        WorkersFailed: a worker raised or died; `out` is what it was.
    """
    _check_writable(out)
    config, trained, _ = _checked(run, words, is_evaluation=False)
    shape: Sequence[int] = _launched(config, partial(_predict, config, trained.path, out.absolute()))
    form = " × ".join(map(str, shape[1:])) or "1"
    return f"{out}: {counted(shape[0], 'row')}, each with {form} of {trained.path}"


# ------------------------------------------------------------------------------------------------------- the parent


def _launched(config: Config, work: Any) -> Any:
    """Returns what rank 0 has returned."""
    return launch(work, workers=config.cluster.workers, threads_per_worker=config.cluster.threads_per_worker)[0]


def _checked(run: Path, words: Sequence[str], *, is_evaluation: bool) -> tuple[Config, Trained, Splits]:
    """Finds out in one process, before any worker starts, whether the question can be answered."""
    config = settings_for(run, words)
    splits, task = components.load_held_out(config, download=True), components.make_task(config)
    if not len(splits.test):
        raise ConfigError(f"data={config.data.name}: there are no held-out samples; check the path and the split")
    trained = load(run)
    for name, then in trained.facts.items():
        now = getattr(splits, name)
        if None not in (then, now) and then != now:
            raise ConfigError(
                f"data={config.data.name}: their {name} is {now}, and {run} was trained with {then}: take data like "
                "those of the run"
            )
    _try_first(trained, config, splits, task, is_evaluation=is_evaluation)
    return config, trained, splits


def settings_for(run: Path, words: Sequence[str]) -> Config:
    """Returns the settings of a run that matter once it is trained, with `words` on top.

    Raises:
        ConfigError: there is no such run, a word is no setting or cannot be changed, or others may have written which
            code the settings name.
    """
    if not run.exists():
        raise ConfigError(f"{run} does not exist: give the folder of a run, or of one of its checkpoints")
    path = settings_of(run)
    if path is None:
        raise ConfigError(
            f"{run} is no run of {program()} train: a run from Python knows neither its model nor its data; use "
            "ddp.evaluate and ddp.predict there"
        )
    earlier = read_settings(path)
    plain = {key: earlier[key] for key in OF_THE_RUN if key in earlier}
    plain |= {"batch": {"global_size": _NO_LIMIT}, "data": _absolute(plain["data"], path.with_name(STARTS))}
    for key, value in _read(words):
        _put(plain, key, value)
    _leave_out_training(plain["data"])
    code = earlier["run"]["code"]
    plain["run"] = {"code": code if code and Path(code).is_dir() else str(Path.cwd())}
    config, keys = from_plain(plain), [word.partition("=")[0] for word in words]
    if "data.path" in keys and "data.test_path" not in keys and hasattr(config.data, "test_path"):
        raise ConfigError("data.path: the samples that are read are those held out; give them as data.test_path=…")
    parts = own_parts({key: each for key, each in asdict(config).items() if key in OF_THE_RUN})
    check_trust(parts, code=config.run.code, settings=path, trust=config.trust)
    return config


def _read(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields keys and values; choices of a group come first, because the keys of a group are those of its choice."""
    for word in sorted(words, key=lambda word: "." in word.partition("=")[0]):
        key, is_setting, text = word.partition("=")
        if not is_setting or key.partition(".")[0] not in MAY_DIFFER:
            raise ConfigError(f"{word}: give KEY=VALUE, with a key of {', '.join(MAY_DIFFER)}")
        try:
            yield key, yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{word}: cannot be read ({' '.join(str(error).split())})") from error


def _put(plain: dict[str, Any], key: str, value: Any) -> None:
    """Sets a value in a tree of settings; one for a group chooses anew."""
    group, _, name = key.partition(".")
    if name:
        inner = dict(plain.get(group) or {})
        plain[group] = {**inner, name: value}
    else:
        plain[group] = {"name": value} if group in CHOICES else value


def _leave_out_training(data: dict[str, Any]) -> None:
    """Removes what says which samples are trained on, and how: these files may be gone, and this code has no part."""
    for name in _OF_TRAINING:
        data.pop(name, None)
    if hasattr(CHOICES["data"].get(str(data.get("name"))), "test_path"):
        data["path"] = data.get("test_path") or ""  # is not read


def _absolute(data: Mapping[str, Any], starts: Path) -> dict[str, Any]:
    """Returns the settings of the data with paths that are meant from the folder in which the run was started."""
    folder = Path()
    with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        if starts.is_file():  # and no pipe, at which reading would wait for ever
            folder = Path(json.loads(starts.read_text(encoding="utf-8").splitlines()[-1])["folder"])

    def absolute(value: Any) -> Any:
        return str(folder.absolute() / value) if isinstance(value, str) and "://" not in value else value

    return {key: absolute(value) if key in _PATHS else value for key, value in data.items()}


def _check_writable(out: Path) -> None:
    if out.suffix not in ENDINGS:
        raise ConfigError(f"--out {out}: its name must end with {' or '.join(ENDINGS)}")
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise ConfigError(f"--out {out}: {'is a folder' if out.is_dir() else f'there is no folder {folder}'}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: {folder} cannot be written; take another folder")


def _try_first(trained: Trained, config: Config, splits: Splits, task: Task, *, is_evaluation: bool) -> None:
    """Raises ConfigError if the model cannot take the first sample."""
    model, source = trained.built(config), source_of(splits.test, what="data", collate=splits.collate)
    try:
        batches = EvaluationLoader(source.samples, batch_size=1, rank=0, world_size=1, collate=source.collate)
        with torch.no_grad():
            (task.metrics if is_evaluation else task.outputs)(model, next(iter(batches)))
    except ConfigError:
        raise
    except Exception as error:  # of the model, the data set, or the task
        raise ConfigError(
            f"data={config.data.name}: the model of {trained.path} cannot take their first sample ({told(error)}): "
            "take data like those of the run"
        ) from error


# ------------------------------------------------------------------------------------------------------- every rank


def _evaluate(config: Config, checkpoint: Path) -> dict[str, float] | None:
    with joined(config) as comm:
        splits, model = components.load_held_out(config), load(checkpoint).built(config).to(comm.device)
        return evaluate(model, splits.test, loss=components.make_task(config), comm=comm, **_reading(config, splits))


def _reading(config: Config, splits: Splits) -> dict[str, Any]:
    """Returns how samples are read and computed, as arguments of `evaluate` and `predict`."""
    return {
        "collate": splits.collate,
        "batch_size": config.loader.evaluation_batch,
        "num_workers": config.loader.num_workers,
        "precision": config.precision,
    }


def _predict(config: Config, checkpoint: Path, out: Path) -> list[int]:
    with joined(config) as comm:
        splits, model = components.load_held_out(config), load(checkpoint).built(config).to(comm.device)
        outputs = predict(model, splits.test, task=components.make_task(config), comm=comm, **_reading(config, splits))
        if comm.rank == 0:
            plain = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
            write_out(out, plain.cpu().numpy())
        return list(outputs.shape)


def write_out(out: Path, rows: NDArray[Any]) -> None:
    """Writes rows to a file, whole or not at all.

    Raises:
        ConfigError: the disk refuses, as a full one does.
    """
    try:
        with whole_file(out) as file:
            write_rows(file, rows, is_csv=out.suffix == ".csv")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}; make room there, or take another folder") from error


def write_rows(file: IO[bytes], rows: NDArray[Any], *, is_csv: bool) -> None:
    """Writes rows [n, ...] as they are, or as CSV, with the fewest digits that are read back as the same numbers."""
    if not is_csv:
        np.save(file, rows)
        return
    flat = rows.reshape(len(rows), -1)
    names = [f"output_{column}" for column in range(flat.shape[1])] if rows.ndim > 1 else ["output"]
    file.write(f"{','.join(names)}\n".encode())
    for row in flat:
        file.write(f"{','.join(map(str, row))}\n".encode())
