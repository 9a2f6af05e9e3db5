"""Evaluates a finished run, or predicts with it: on the samples that were held out from it, or on others.

    python -m ddp evaluate runs/mine                       the metrics, over all samples
    … data.test_path=other.csv cluster.workers=4           with settings that differ from those of the run
    python -m ddp evaluate region=mine                     a running job, with strategy.region=mine, at this moment
    python -m ddp predict runs/mine --out scores.csv       its model's output for each sample, a row each, in order

Two steps, of which the first one refuses what cannot work:

    parent        settings, data, checkpoint, and one sample through the model
       │ launch
    every rank    its share of the samples

Instead of a finished run, region=NAME names a running job (`ddp/strategies/region.py`). The parent reads it once, and
all ranks get this snapshot.

Only those settings of the run matter that define the data, the model, and what it has learnt.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddp.comm.meeting.place import refuse_workers
from ddp.commands.registry import parser_of, respond
from ddp.data.loading.loader import EvaluationLoader
from ddp.data.loading.source import source_of
from ddp.data.samples import Splits
from ddp.errors import ConfigError
from ddp.process.arguments import Parser, program
from ddp.process.files import lines_of, whole_file
from ddp.process.records import DAMAGE, json_object
from ddp.run.assembly import components
from ddp.run.assembly.load import Trained, load
from ddp.run.assembly.stages import joined
from ddp.run.launch.from_python import launch
from ddp.run.settings.address import check_trust, error_line, own_parts
from ddp.run.settings.config import CHOICES, Config
from ddp.run.settings.reader import PATHS, from_plain, read_settings, settings_of, value_of
from ddp.train.evaluate import evaluate, predict
from ddp.train.reports.history import STARTS
from ddp.train.reports.results import metric_in_words, words_of
from ddp.train.steps.task import Task
from ddp.units import counted

OF_THE_RUN = ("data", "model", "loss", "loader", "evaluate", "precision", "device", "backend", "deterministic")
MAY_DIFFER = (
    *("data", "loader", "evaluate", "cluster", "comm"),
    *("precision", "device", "backend", "deterministic", "trust"),
)
_OF_TRAINING = ("transform", "sharding", "validation", "validation_path")  # of data, and not needed afterwards
REGION = "region="
_NO_LIMIT = 1 << 30  # a global batch, because no step is made


def parsed(name: str, words: Sequence[str], *, writes: bool = False) -> tuple[Parser, argparse.Namespace]:
    """Returns the parser and the options of a command about a finished run, to which settings may be given.

    Args:
        writes: it has an option --out.
    """
    usage = f"{program()} {name} RUN {'--out FILE ' if writes else ''}[KEY=VALUE …]"
    known = "data.test_path=other.csv, cluster.workers=4, loader.…, comm.…, device=…, trust=true"
    parser = parser_of(name, usage=usage, epilog=f"KEY=VALUE: {known}")
    about = "the folder of a run, whose best checkpoint is taken, or a checkpoint; or region=NAME of a running job"
    parser.add_argument("run", help=about)
    if writes:
        rows = "NAME.csv or NAME.npy, a row a sample"
        parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=rows)
    return parser, options_of(parser, words)


def options_of(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a command that takes settings, too, as `settings`."""
    options, settings = parser.parse_known_args(words)
    options.settings = settings
    if wrong := [word for word in settings if "=" not in word or word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    return options


def at_all_ranks(config: Config, trained: Trained, work: Callable[..., Any]) -> Any:
    """Calls `work` with model, held-out samples, task, communicator and how to read, at all ranks.

    Returns:
        The result of rank 0.
    """
    given = trained if trained.path is None or trained.region else trained.path
    call = partial(_at_a_rank, config, given, work)
    return launch(call, workers=config.cluster.workers, threads_per_worker=config.cluster.threads_per_worker)[0]


def _at_a_rank(config: Config, given: Path | Trained, work: Callable[..., Any]) -> Any:
    with joined(config) as comm:
        trained = given if isinstance(given, Trained) else load(given)
        splits, model = components.load_held_out(config), trained.built(config).to(comm.device)
        return work(model, splits.test, components.make_task(config, splits), comm=comm, **reading_of(config, splits))


def reading_of(config: Config, splits: Splits) -> dict[str, Any]:
    """Returns how `ddp.evaluate` and `ddp.predict` read samples."""
    loads = {"collate": splits.collate, "batch_size": config.evaluate.batch, "num_workers": config.loader.num_workers}
    return {**loads, "precision": config.precision}


def checked(run: str, words: Sequence[str], *, is_evaluation: bool) -> tuple[Config, Trained, Splits]:
    """Checks in one process, before any worker starts, that the command can work.

    Args:
        run: a folder, or "region=NAME".
    """
    command = f"{program()} {'evaluate' if is_evaluation else 'predict'}"
    refuse_workers(command, instead="start it by itself, with its own workers, as cluster.workers says")
    seen = load(region=run.removeprefix(REGION)) if run.startswith(REGION) else None
    config = settings_for(Path(run) if seen is None else seen.path, words)
    splits = components.load_held_out(config, download=True)
    task = components.make_task(config, splits)
    if not len(splits.test):
        raise ConfigError(f"data={config.data.name}: there are no held-out samples; check the path and the split")
    trained = seen or load(run)
    for name, then in trained.facts.items():
        now = getattr(splits, name)
        if None not in (then, now) and then != now:
            raise ConfigError(
                f"data={config.data.name}: their {name} is {now}, and {run} was trained with {then}: take data like "
                "those of the run"
            )
    _try_first(trained, config, splits, task, is_evaluation=is_evaluation)
    return config, trained, splits


def settings_for(run: Path | None, words: Sequence[str], *, validates: bool = False) -> Config:
    """Returns the settings of a run that matter once it is trained, with `words` on top.

    Args:
        run: its folder, or a checkpoint; None if it has none.
        validates: the samples that the run was validated on matter, too, which may be a share of those to train on.

    Raises:
        ConfigError: there is no such run, a word is no setting or cannot be changed, or others may have written which
            code the settings name.
    """
    if run is not None and not run.exists():
        raise ConfigError(f"{run} does not exist: give the folder of a run, or of one of its checkpoints")
    path = None if run is None else settings_of(run)
    if path is None:
        raise ConfigError(
            f"{run or 'what has no folder'} is no run of {program()} train: a run from Python knows neither its model "
            "nor its data; use ddp.evaluate and ddp.predict there"
        )
    earlier = read_settings(path)
    plain = {key: earlier[key] for key in OF_THE_RUN if key in earlier}
    plain |= {"batch": {"global_size": _NO_LIMIT}, "data": _absolute(plain["data"], path.with_name(STARTS))}
    for key, value in _read(words):
        _put(plain, key, value)
    if validates:
        plain["seed"] = earlier["seed"]  # which has chosen the share
    _leave_out_training(plain["data"], keeps=("validation", "validation_path") if validates else ())
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
        if key.startswith(("cluster.spec", "cluster.task")):
            raise ConfigError(f"{word}: is for training; here all workers are on this host, as cluster.workers says")
        yield key, value_of(key, text)


def _put(plain: dict[str, Any], key: str, value: Any) -> None:
    """Sets a value in a tree of settings; a value for a group replaces its choice."""
    group, _, name = key.partition(".")
    if name:
        inner = dict(plain.get(group) or {})
        plain[group] = {**inner, name: value}
    else:
        plain[group] = {"name": value} if group in CHOICES else value


def _leave_out_training(data: dict[str, Any], *, keeps: Sequence[str]) -> None:
    """Removes the settings of training samples, because their files may be gone and their code is not needed."""
    for name in _OF_TRAINING:
        if name not in keeps:
            data.pop(name, None)
    has_share = any(data.get(name) is not None for name in keeps)
    if not has_share and hasattr(CHOICES["data"].get(str(data.get("name"))), "test_path"):
        data["path"] = data.get("test_path") or ""  # is not read


def _absolute(data: Mapping[str, Any], starts: Path) -> dict[str, Any]:
    """Returns the settings of the data with paths that are meant from the folder in which the run was started."""
    folder = Path()
    with suppress(OSError, *DAMAGE):
        lines = map(json_object, lines_of(starts))
        folder = [Path(line["folder"]) for line in lines if "folder" in line][-1]  # others are of bad steps

    def absolute(value: Any) -> Any:
        return str(folder.absolute() / value) if isinstance(value, str) and "://" not in value else value

    return {key: absolute(value) if key in PATHS else value for key, value in data.items()}


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
            f"data={config.data.name}: the model of {trained} cannot take their first sample ({error_line(error)}): "
            "take data like those of the run"
        ) from error


# --- evaluate --------------------------------------------------------------------------------------------------------


def evaluate_main(words: Sequence[str]) -> int:
    """Prints the metrics of the run that the words name."""
    parser, options = parsed("evaluate", words)
    return respond(parser, options, lambda options: evaluate_run(options.run, options.settings))


def evaluate_run(run: str, words: Sequence[str]) -> str:
    """Returns, as text, the metrics of a run's best checkpoint, or of the checkpoint that `run` is.

    Args:
        run: a folder; or "region=NAME", for the parameters that a run has at this moment.
        words: settings on top of the run's, as KEY=VALUE.

    Raises:
        ConfigError, CheckpointError: the folder, a setting, or the data cannot be used.
        WorkersFailed: a worker raised or died.
    """
    config, trained, splits = checked(run, words, is_evaluation=True)
    means: Mapping[str, float] = at_all_ranks(config, trained, _evaluate)
    rows = {words_of(f"test_{name}"): metric_in_words(f"test_{name}", value) for name, value in means.items()}
    width = max(map(len, rows))
    title = f"{trained}, on {counted(len(splits.test), 'sample')} of data={config.data.name}:"
    return "\n".join([title, *(f"  {name:>{width}}  {value}" for name, value in rows.items())])


def _evaluate(model: Any, samples: Any, task: Task, **reading: Any) -> dict[str, float] | None:
    return evaluate(model, samples, loss=task, **reading)


# --- predict: rank 0 writes the file, whole or not at all ------------------------------------------------------------

ENDINGS = (".csv", ".npy")


def predict_main(words: Sequence[str]) -> int:
    """Writes the output for each sample of the run that the words name."""
    parser, options = parsed("predict", words, writes=True)
    return respond(parser, options, lambda options: predict_run(options.run, options.settings, options.out))


def predict_run(run: str, words: Sequence[str], out: Path) -> str:
    """Writes the output of a run's model for each sample, and returns a text on the file.

    Args:
        run, words: as in `evaluate_run`.
        out: NAME.csv, with a column for each number of an output; or NAME.npy, [samples, ...].

    Raises:
        ConfigError, CheckpointError: as `evaluate_run`; or `out` cannot be written.
        WorkersFailed: a worker raised or died; `out` is what it was.
    """
    _check_writable(out)
    config, trained, _ = checked(run, words, is_evaluation=False)
    shape: Sequence[int] = at_all_ranks(config, trained, partial(_predict, out.absolute()))
    form = " × ".join(map(str, shape[1:])) or "1"
    return f"{out}: {counted(shape[0], 'row')}, each with {form} of {trained}"


def _check_writable(out: Path) -> None:
    if out.suffix not in ENDINGS:
        raise ConfigError(f"--out {out}: its name must end with {' or '.join(ENDINGS)}")
    folder = out.absolute().parent
    if out.is_dir() or not folder.is_dir():
        raise ConfigError(f"--out {out}: {'is a folder' if out.is_dir() else f'there is no folder {folder}'}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: {folder} cannot be written; take another folder")


def _predict(out: Path, model: Any, samples: Any, task: Task, **reading: Any) -> list[int]:
    outputs = predict(model, samples, task=task, **reading)
    if not isinstance(outputs, torch.Tensor):
        what = "several tensors" if isinstance(outputs, (tuple, dict)) else "tensors of several shapes"
        raise ConfigError(f"the outputs are {what}, and a file has one table: write those of ddp.predict yourself")
    if reading["comm"].rank == 0:
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
