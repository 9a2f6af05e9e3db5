"""A checkpoint on the disk: what its folder holds, how it is found, verified and loaded.

    checkpoints/
        step-00000120/            one checkpoint
            model.pt, ...         parts: torch.save of tensors and plain values (loadable with weights_only=True)
            manifest.json         {schema, step, order, score, parts: {name: {bytes, sha256}}, meta, sha256}
        latest, best              one line each, the folder's name: for people and scripts
        .tmp-step-00000130/       being written
        .old-step-00000120/       being replaced
        .lock                     while a process saves here: which

The last checkpoint is the one that was saved last (`order` counts saves), not the one of the greatest step, because a
run may go back to an earlier checkpoint. If a checkpoint has been moved aside as .old-… and its successor is missing,
the .old-… is taken. Readers write nothing, so they may run beside the writer.

Cost: one pass of SHA-256 over the bytes (about 1 s per 2 GB) on top of reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp.errors import CheckpointError
from ddp.process.files import json_object
from ddp.process.log import log

SCHEMA = 1
MANIFEST = "manifest.json"
_FOLDER_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose files were verified.

    Attributes:
        step: committed steps at the time.
        path: its folder.
        score: the figure that decides which one is the best, if there was one.
        meta: JSON values that were saved beside the parts.
        parts: name to content, tensors on the CPU.
    """

    step: int
    path: Path
    score: float | None
    meta: Mapping[str, Any] = field(repr=False)
    parts: Mapping[str, Any] = field(repr=False)


def load(path: Path | str, *, names: Collection[str] | None = None) -> StoredCheckpoint:
    """Returns one checkpoint, or the last one in a folder of checkpoints whose files are whole.

    In a folder of checkpoints, those that are not whole are skipped with a warning.

    Args:
        names: parts to load; None for all. Every part is verified in any case.

    Raises:
        CheckpointError: there is none, or what is wrong with each.
    """
    path = Path(path)
    if not ((path / MANIFEST).exists() or _FOLDER_NAME.fullmatch(path.name)):
        return _load_last(path, names)
    try:
        return _read(path, names)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {error}; name another checkpoint, "
            f"or the folder {path.parent} to take the last one that is whole"
        ) from error


def _load_last(folder: Path, names: Collection[str] | None) -> StoredCheckpoint:
    saved, unreadable = listed(folder)
    wrong: list[str] = []
    for path in [*unreadable, *(one.path for one in saved)]:  # the unreadable ones, to report them
        try:
            checkpoint = _read(path, names)
        except CheckpointError as error:
            wrong.append(f"{path.name}: {error}")
            continue
        if wrong:
            log.warning("skipped checkpoints that are not whole (%s); took %s", "; ".join(wrong), path)
        return checkpoint
    if wrong:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(wrong)}")
    raise CheckpointError(f"no checkpoint in {folder}: check the path, or start without resuming")


# ------------------------------------------------------------------------------------------------------------- finding


class Saved(NamedTuple):
    """A checkpoint's folder and its manifest. Only reading the parts tells whether they are whole."""

    path: Path
    manifest: dict[str, Any]


class Listed(NamedTuple):
    """The checkpoints in a folder."""

    saved: list[Saved]  # the last saved first
    unreadable: list[Path]  # manifest missing or damaged


def listed(folder: Path) -> Listed:
    """Returns the checkpoints in a folder, without reading their parts."""
    found = Listed([], [])
    for _, path in sorted(_folders(folder).items(), reverse=True):
        try:
            found.saved.append(Saved(path, _read_manifest(path)))
        except CheckpointError:
            found.unreadable.append(path)
    found.saved.sort(key=lambda saved: int(saved.manifest["order"]), reverse=True)
    return found


def steps(folder: Path) -> list[int]:
    """Returns the steps of all checkpoints in a folder, ascending; `load` finds out which ones are whole."""
    return sorted(_folders(folder))


def checkpoints_of(path: Path) -> Path:
    """Returns the checkpoints of a run, if `path` is its folder, or else `path` itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def best_of(folder: Path) -> Path | None:
    """Returns the checkpoint that a folder's `best` names; None without one.

    Raises:
        CheckpointError: it names something else.
    """
    try:
        name = (folder / "best").read_text().strip()
    except OSError:
        return None
    if not _FOLDER_NAME.fullmatch(name):
        raise CheckpointError(f"{folder / 'best'} names no checkpoint ({name!r:.60}): delete it, or name a checkpoint")
    return folder / name


def resume_from(resume: str, run_dir: Path) -> Path | None:
    """Returns the checkpoint, or folder of checkpoints, to resume from; None for a fresh start.

    Args:
        resume: "auto" for the run in `run_dir`, if it has a checkpoint, or the path of a run or checkpoint.

    Raises:
        CheckpointError: `resume` names a path that does not exist.
    """
    if resume == "auto":
        folder = run_dir / "checkpoints"
        return folder if steps(folder) else None
    path = Path(resume)
    if not path.exists():
        raise CheckpointError(f"resume={path} does not exist; give a run folder, a checkpoint in it, or resume=auto")
    return checkpoints_of(path)


def identity_of(path: Path) -> Mapping[str, Any]:
    """Returns the identity of the run in a checkpoint, or in the last one of a folder; empty if it cannot be read."""
    with contextlib.suppress(CheckpointError, OSError, LookupError, TypeError):
        folder = path if (path / MANIFEST).exists() else listed(path).saved[0].path
        identity: Mapping[str, Any] = _read_manifest(folder)["meta"]["identity"]
        return identity
    return {}


def _folders(folder: Path) -> dict[int, Path]:
    """Returns step → folder of published checkpoints, and of those that a save was about to replace."""
    found: dict[int, Path] = {}
    for prefix in (".old-", ""):  # a published one wins
        for path in folder.glob(f"{prefix}step-*"):
            if match := _FOLDER_NAME.fullmatch(path.name.removeprefix(prefix)):
                found[int(match[1])] = path
    return found


# ----------------------------------------------------------------------------------------------- reading and verifying


def digest(manifest: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the manifest's content, without its own `sha256`."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json_object((folder / MANIFEST).read_text(encoding="utf-8"))
        schema = manifest["schema"]
        whole = manifest["sha256"] == digest(manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error})") from error
    if not whole:
        raise CheckpointError(f"{MANIFEST} has changed since it was written")
    if schema != SCHEMA:
        raise CheckpointError(f"its schema is {schema}, this version of ddp reads {SCHEMA}")
    return manifest


def _read(folder: Path, names: Collection[str] | None) -> StoredCheckpoint:
    """Verifies all parts of a checkpoint and loads those in `names`; CheckpointError says what is wrong with it."""
    manifest = _read_manifest(folder)
    entries: dict[str, Any] = manifest["parts"]
    for name, entry in entries.items():
        _verify(folder / f"{name}.pt", num_bytes=entry["bytes"], sha256=entry["sha256"])
    wanted = list(entries) if names is None else list(names)
    if unknown := [name for name in wanted if name not in entries]:
        raise CheckpointError(f"it has no part {', '.join(unknown)}; its parts are {', '.join(entries)}")
    parts = {name: _load_part(folder / f"{name}.pt") for name in wanted}
    return StoredCheckpoint(manifest["step"], folder, manifest["score"], manifest["meta"], parts)


def _verify(path: Path, *, num_bytes: int, sha256: str) -> None:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != num_bytes:
                raise CheckpointError(f"{path.name} has {size} bytes instead of {num_bytes}")
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise CheckpointError(f"{path.name} has changed since it was written (another SHA-256)")
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from error


def _load_part(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{path.name} cannot be loaded ({cause_of(error)})") from error


def cause_of(error: Exception) -> str:
    """Returns the cause of an error of torch.load in one line, without torch's advice to load with less care."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return text.splitlines()[0].partition(". ")[0]


# --- Weights to start from -------------------------------------------------------------------------------------------
#
# Starting from given weights: at step 0, with a fresh optimizer, unlike a run that is resumed.
#
# A file's keys may be renamed by their prefixes, and parts of the model may keep their fresh values. So a model can
# take over a trained body and learn a new head.


def load_initial_weights(
    path: Path, module: nn.Module, *, strict: bool, rename: Mapping[str, str], skip: list[str]
) -> None:
    """Gives a fresh module weights from a file or a checkpoint.

    Args:
        path: a checkpoint of a run, a folder of them, or a file of `torch.save(module.state_dict())`.
        strict: every tensor of the module that is not skipped must be found, and every key of the file be used.
        rename: prefix of a key in the file → prefix in the module.
        skip: prefixes (in the module) that keep their fresh values, such as a new head.

    Raises:
        CheckpointError: nothing there, or, if strict, the first tensor that does not fit.
    """
    weights: dict[str, Any] = {_renamed(key, rename): value for key, value in _read_weights(path).items()}
    weights = {key: value for key, value in weights.items() if not key.startswith(tuple(skip))}
    own = {key: value for key, value in module.state_dict().items() if not key.startswith(tuple(skip))}
    if strict:
        kept = {key: value for key, value in module.state_dict().items() if key not in own}
        check_fits({**weights, **kept}, module, source=path)
    fitting = {
        key: value
        for key, value in weights.items()
        if key in own and (is_extra(key) or _shape(value) == _shape(own[key]))
    }
    if not any(isinstance(value, Tensor) for value in fitting.values()):
        raise CheckpointError(f"{path} has no tensor that fits the model; see init_from.rename and init_from.skip")
    module.load_state_dict(fitting, strict=False)


def check_fits(weights: Mapping[str, Any], module: nn.Module, *, source: Path | str) -> None:
    """Raises CheckpointError, naming the first difference, unless `weights` has the module's keys and shapes.

    What a layer's `get_extra_state` has returned may be anything, and only the layer can judge it.
    """
    own = module.state_dict()
    for name, value in own.items():
        if name not in weights:
            raise CheckpointError(f"{source} is of another model: it has no {name} {_shape(value)}")
        if not is_extra(name) and _shape(weights[name]) != _shape(value):
            shapes = f"{name} is {_shape(weights[name])} there and {_shape(value)} here"
            raise CheckpointError(f"{source} is of another model: {shapes}")
    for name in weights:
        if name not in own:
            raise CheckpointError(f"{source} is of another model: it has {name}, which this model does not have")


def is_extra(name: str) -> bool:
    """Returns True for a name that torch gives to what a layer's `get_extra_state` returns."""
    return name.endswith("_extra_state")


def _shape(value: Any) -> list[int] | str:
    """Returns a tensor's shape, or what another value is."""
    return list(value.shape) if isinstance(value, Tensor) else f"({type(value).__name__})"


def _read_weights(path: Path) -> dict[str, Any]:
    """Returns plain keys and their values from a checkpoint, or from a file of a state dict."""
    if path.is_dir():
        return dict(load(path, names=["model"]).parts["model"])
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; init_from.path takes a checkpoint folder or a file of weights")
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as weights ({cause_of(error)}); init_from.path takes a file of "
            "torch.save(model.state_dict(), PATH), or a checkpoint folder"
        ) from error
    if not isinstance(weights, Mapping) or any(
        not isinstance(value, Tensor) and not is_extra(name) for name, value in weights.items()
    ):
        raise CheckpointError(f"{path} holds no state dict; save it with torch.save(model.state_dict(), PATH)")
    return {str(key).removeprefix("module."): value for key, value in weights.items()}


def _renamed(key: str, rename: Mapping[str, str]) -> str:
    for old, new in rename.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key
