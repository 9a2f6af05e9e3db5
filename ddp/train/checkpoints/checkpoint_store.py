"""A checkpoint on the disk: the files in its folder; how it is found, verified and loaded, and how it is written.

At the end: the same in memory that the launcher holds (`CheckpointMemory`).

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
the .old-… is taken. Readers write nothing, so they may run at the same time as the writer.

Cost: one pass of SHA-256 over the bytes (about 1 s per 2 GB) on top of reading or
writing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import mmap
import os
import pickle
import re
import shutil
import struct
import weakref
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp.comm.transport.shared_memory import open_memory
from ddp.errors import CheckpointError, ConfigError
from ddp.process import gpu
from ddp.process.files import (
    Hold,
    at_home,
    flush_folder,
    hold,
    make_folder,
    new_file,
    pinned,
    read_own,
    to_read,
    write_whole,
)
from ddp.process.memory import available_bytes
from ddp.process.records import Count, Digest, Name, damage_as_error, json_object, made, to_json
from ddp.process.terminal import log
from ddp.replica.units import form_of
from ddp.units import binary_size

SCHEMA = 1
MANIFEST = "manifest.json"
ANOTHER = "take another checkpoint"
IN_MEMORY = Path("memory")  # the path of a checkpoint that is on no disk
_FOLDER_NAME = re.compile(r"step-(\d{8,16})", re.ASCII)
_MOST_OF_NAME = 4096


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose files were verified.

    Attributes:
        step: committed steps at the time.
        path: its folder.
        score: the figure that decides which one is the best, if there was one.
        meta: JSON values that were saved with the parts.
        parts: name to content, tensors on the CPU.
    """

    step: int
    path: Path
    score: float | None
    meta: Mapping[str, Any] = field(repr=False)
    parts: Mapping[str, Any] = field(repr=False)


def load(path: Path | str, *, names: Wanted = None) -> StoredCheckpoint:
    """Returns one checkpoint, or the last one in a folder of checkpoints whose files are whole.

    In a folder of checkpoints, those that are not whole are skipped with a warning.

    Args:
        names: parts to load, or a function of the manifest that says which; None for all. Every part is verified in
            any case.

    Raises:
        CheckpointError: there is none, or what is wrong with each.
    """
    path = at_home(Path(path))
    if not ((path / MANIFEST).exists() or _FOLDER_NAME.fullmatch(path.name)):
        return _load_last(path, names)
    try:
        return read(path, names)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} cannot be loaded: {error}; name another checkpoint, "
            f"or the folder {path.parent} to take the last one that is whole"
        ) from error


def _load_last(folder: Path, names: Wanted) -> StoredCheckpoint:
    saved, unreadable = listed(folder)
    wrong: list[str] = []
    for path in [*unreadable, *(one.path for one in saved)]:  # the unreadable ones, to report them
        try:
            checkpoint = read(path, names)
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


@dataclass(frozen=True)
class PartEntry:
    """The entry of a part in a manifest."""

    bytes: Count
    sha256: Digest


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    schema: int
    step: Count
    order: Count
    score: float | None
    parts: dict[Name, PartEntry]
    meta: dict[str, Any]
    sha256: Digest

    def weights(self) -> list[str]:
        """Returns the names of the parts that hold the weights that evaluations use."""
        return ["model", *(["callbacks"] if self.meta.get("averages") else [])]  # of `ddp.EMA`


Wanted = Collection[str] | Callable[[Manifest], Collection[str]] | None


class Saved(NamedTuple):
    """A checkpoint's folder and its manifest. Only reading the parts tells whether they are whole."""

    path: Path
    manifest: Manifest


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
    found.saved.sort(key=lambda saved: saved.manifest.order, reverse=True)
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
    path = folder / "best"
    if not path.exists() and not path.is_symlink():
        return None
    with damage_as_error(path, "delete it, or name a checkpoint", CheckpointError):
        name = read_own(path, most=_MOST_OF_NAME, any_owner=True).strip()
    if not _FOLDER_NAME.fullmatch(name):
        raise CheckpointError(f"{path} names no checkpoint ({name!r:.60}): delete it, or name a checkpoint")
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
    with contextlib.suppress(CheckpointError, LookupError, TypeError, ValueError):
        found = _read_manifest(path) if (path / MANIFEST).exists() else listed(path).saved[0].manifest
        return dict[str, Any](found.meta["identity"])
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


def _read_manifest(folder: Path) -> Manifest:
    with damage_as_error(MANIFEST, kind=CheckpointError):
        return _manifest_in(read_own(folder / MANIFEST, any_owner=True))


def _manifest_in(text: str) -> Manifest:
    with damage_as_error(MANIFEST, kind=CheckpointError):
        plain = json_object(text, keeps_nan=True)
        if plain.get("sha256") != digest(plain):
            raise CheckpointError(f"{MANIFEST} has changed since it was written")
        if (schema := plain.get("schema")) != SCHEMA:
            raise CheckpointError(f"its schema is {schema}, this version of ddp reads {SCHEMA}")
        return made(Manifest, plain)


def read(folder: Path, wanted: Wanted = None) -> StoredCheckpoint:
    """Verifies all parts of a checkpoint, and loads those that are wanted; None for all.

    All files are opened before one is read, so it does not matter if they are removed or replaced meanwhile.

    Raises:
        CheckpointError: what is wrong with it.
    """
    manifest, files = _read_manifest(folder), dict[str, IO[bytes]]()
    with contextlib.ExitStack() as until_read:
        for name in manifest.parts:
            with damage_as_error(f"{name}.pt", kind=CheckpointError):
                files[name] = until_read.enter_context(to_read(folder / f"{name}.pt", any_owner=True))
        return _loaded(manifest, files, folder, wanted)


def _loaded(manifest: Manifest, files: Mapping[str, IO[bytes]], path: Path, wanted: Wanted = None) -> StoredCheckpoint:
    """Verifies all parts, each in its file, and loads those that are wanted."""
    for name, entry in manifest.parts.items():
        with damage_as_error(f"{name}.pt", kind=CheckpointError):
            _verify(files[name], f"{name}.pt", entry)
    names = [*(wanted(manifest) if callable(wanted) else manifest.parts if wanted is None else wanted)]
    if unknown := [name for name in names if name not in manifest.parts]:
        raise CheckpointError(f"it has no part {', '.join(unknown)}; its parts are {', '.join(manifest.parts)}")
    parts = {name: _load_part(files[name], f"{name}.pt") for name in names}
    return StoredCheckpoint(manifest.step, path, manifest.score, manifest.meta, parts)


def _verify(file: IO[bytes], name: str, entry: PartEntry) -> None:
    size = file.seek(0, os.SEEK_END)
    if size != entry.bytes:
        raise CheckpointError(f"{name} has {size} bytes instead of {entry.bytes}")
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:  # type: ignore[arg-type]
        raise CheckpointError(f"{name} has changed since it was written (another SHA-256)")


def _load_part(file: IO[bytes], name: str) -> Any:
    try:
        with zipfile.ZipFile(file) as archive:
            num_bytes = sum(each.file_size for each in archive.infolist())
        if num_bytes > file.seek(0, os.SEEK_END):
            raise pickle.UnpicklingError("it is packed, which torch never does")  # terabytes could be in it
        file.seek(0)
        return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{name} cannot be loaded ({cause_of(error)})") from error


def cause_of(error: Exception) -> str:
    """Returns the cause of an error of torch.load in one line, without torch's advice to load with less care."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip() or type(error).__name__
    return text.splitlines()[0].partition(". ")[0]


def refusal_of(value: Any) -> str:
    """Returns why a checkpoint cannot hold a value; "" if it can. Tensors are left out of the attempt."""
    light = apply_to_collection(value, Tensor, lambda _: torch.empty(0))
    try:
        torch.save(light, file := io.BytesIO())
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        return cause_of(error)
    return ""


def check_fits(weights: Mapping[str, Any], module: nn.Module, *, source: Path | str) -> None:
    """Raises CheckpointError, naming the first difference, unless `weights` has the module's keys and shapes.

    A value that a layer's `get_extra_state` has returned may be anything, and only the layer can check it.
    """
    own = form_of(module)
    for name, value in own.items():
        if name not in weights:
            raise CheckpointError(f"{source} is of another model: it has no {name} {shape_or_type(value)}")
        if not is_extra(name) and shape_or_type(weights[name]) != shape_or_type(value):
            shapes = f"{name} is {shape_or_type(weights[name])} there and {shape_or_type(value)} here"
            raise CheckpointError(f"{source} is of another model: {shapes}")
    for name in weights:
        if name not in own:
            raise CheckpointError(f"{source} is of another model: it has {name}, which this model does not have")


def is_extra(name: str) -> bool:
    """Returns True for the name under which torch saves the value of a layer's `get_extra_state`."""
    return name.endswith("_extra_state")


def shape_or_type(value: Any) -> list[int] | str:
    """Returns a tensor's shape, or the type of another value."""
    return list(value.shape) if isinstance(value, Tensor) else f"({type(value).__name__})"


# ------------------------------------------------------------------------ writing: whole or absent, pruned when written
#
# The steps of a save, and why a process that is killed between any two of them leaves a valid checkpoint behind:
#
#     write     parts and manifest into .tmp-..., each flushed to the disk     killed: the next save removes .tmp-...
#     publish   rename to step-..., flush the parent                           atomic
#     point     replace `latest` and `best`                                    killed: they lag; no code reads them
#     prune     remove all but the last k and the best few                     renamed to .tmp-... first, so never half
#
# A checkpoint of the same step that exists already steps aside as .old-... before the new one is published.
#
# One process writes a folder: see `hold`.


class CheckpointStore:
    """Writes the checkpoints of one run.

    Args:
        folder: made at the first save.
        keep_last: how many of the last saved to keep.
        keep_best: how many of those with the best scores to keep.
        best: which score is better; None keeps none for its score.
    """

    def __init__(
        self, folder: Path | str, *, keep_last: int = 3, keep_best: int = 1, best: Literal["max", "min"] | None = "max"
    ) -> None:
        self.folder, self.keep_last, self.keep_best, self.best = Path(folder), keep_last, keep_best, best

    def save(
        self, step: int, parts: Mapping[str, object], *, meta: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Writes a checkpoint, replacing one of the same step, and prunes. Returns its folder.

        Args:
            step: committed steps.
            parts: name to content; `name` is stored as name.pt.
            meta: JSON values, readable without the parts.
            score: a score that is not finite counts as none.

        Raises:
            CheckpointError: a value cannot be stored, or the disk refuses (path and reason). The checkpoints that were
                there before are untouched.
            ConfigError: another process saves here (`hold`).
        """
        path = self.folder / f"step-{step:08d}"
        temporary = self.folder / f".tmp-{path.name}"
        with closing(self.hold()), _explained(path):
            self._sweep()
            try:
                temporary.mkdir()
                with pinned(temporary) as inside:
                    self._write(inside, step, parts, meta, score)
                self._publish(temporary, path)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            write_whole(self.folder / "latest", f"{path.name}\n")
            if best := self._best():
                write_whole(self.folder / "best", f"{best[0].name}\n")
            self._prune(keep=best)
        return path

    def hold(self) -> Hold:
        """Keeps other processes from saving here until it is closed; makes the folder.

        Raises:
            ConfigError: another process saves here; the message says which.
            CheckpointError: the disk refuses.
        """
        with _explained(self.folder):
            make_folder(self.folder)
            return hold(self.folder)

    def _sweep(self) -> None:
        """Removes the files of killed saves, and restores the checkpoints that they were replacing."""
        for leftover in self.folder.glob(".tmp-*"):
            _remove(leftover)
        for old in self.folder.glob(".old-*"):
            path = self.folder / old.name.removeprefix(".old-")
            if path.exists():
                _remove(old)
            else:
                old.rename(path)

    def _write(
        self, folder: Path, step: int, parts: Mapping[str, object], meta: Mapping[str, Any], score: float | None
    ) -> None:
        order = 1 + max((saved.manifest.order for saved in listed(self.folder).saved), default=0)
        entries = {name: _write_part(folder, name, content) for name, content in parts.items()}
        write_whole(folder / MANIFEST, to_json(_manifest_of(step, order, score, entries, meta), indent=1))

    def _publish(self, temporary: Path, path: Path) -> None:
        old = path.with_name(f".old-{path.name}")
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        flush_folder(self.folder)
        if old.exists():
            _remove(old)

    def _best(self) -> list[Path]:
        """Returns the checkpoints with the best scores, the best first, the last saved of equals first."""
        if self.best is None:
            return []
        scored = [saved for saved in listed(self.folder).saved if saved.manifest.score is not None]
        sign = 1.0 if self.best == "max" else -1.0
        scored.sort(key=lambda saved: -sign * (saved.manifest.score or 0.0))
        return [saved.path for saved in scored[: self.keep_best]]

    def _prune(self, *, keep: Collection[Path]) -> None:
        saved, unreadable = listed(self.folder)
        for path in [*(one.path for one in saved), *unreadable][self.keep_last :]:
            if path not in keep:
                _remove(path)


def _manifest_of(
    step: int, order: int, score: float | None, entries: Mapping[str, Any], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of a manifest, as a reader will see it."""
    score = float(score) if score is not None and math.isfinite(score) else None
    found = {"schema": SCHEMA, "step": step, "order": order, "score": score, "parts": entries, "meta": dict(meta)}
    manifest = json_object(to_json(found))
    manifest["sha256"] = digest(manifest)
    made(Manifest, manifest)  # which refuses a manifest that no reader would accept
    return manifest


class _HashingFile(io.RawIOBase):
    """The file that torch.save writes to; counts and hashes on the way.

    It reports no error to torch.save, whose archive writer would answer with a message about positions; it keeps the
    first error for `_written` to raise.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.num_bytes, self.sha256 = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int:
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        if self.error is None:
            try:
                self.sha256.update(data)
                self.file.write(data)
            except OSError as error:
                self.error = error
        return num_bytes


class _OnCPU:
    """Stands for the module `pickle` in torch.save, so that a checkpoint holds tensors of the CPU alone."""

    class Pickler(pickle.Pickler):
        """Moves a GPU's tensors on their way."""

        def reducer_override(self, each: Any, /) -> Any:
            """Returns the written form of an object."""
            return gpu.reduced(each)


def _write_part(folder: Path, name: str, content: object) -> dict[str, Any]:
    """Writes name.pt to the disk; returns its entry in the manifest."""
    path = folder / f"{name}.pt"
    with new_file(path) as file:
        entry = _written(file, name, content)
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")  # reads no tensor: a few ms
    except Exception as error:
        raise CheckpointError(
            f"part {name!r} could be written but not read back: it must hold tensors and plain values only "
            f"({cause_of(error)})"
        ) from error
    return entry


def _written(file: IO[bytes], name: str, content: object) -> dict[str, Any]:
    """Writes a part into a file; returns its entry in the manifest."""
    hashing = _HashingFile(file)
    try:
        torch.save(content, cast(IO[bytes], hashing), pickle_module=_OnCPU)
    except Exception as error:
        raise CheckpointError(f"part {name!r} cannot be written: {error}") from error
    if hashing.error is not None:
        raise hashing.error
    return {"bytes": hashing.num_bytes, "sha256": hashing.sha256.hexdigest()}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an error of the file system into one that names the part that was being saved."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"cannot save {path}: {error}") from error
    except OSError as error:
        reason = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        raise CheckpointError(
            f"cannot save {path}: {reason}; free some space or choose a folder that can be written"
        ) from error


def _remove(path: Path) -> None:
    """Removes a folder or file, now or at the next save. If it is killed half-way, no half checkpoint is left."""
    try:
        if not path.name.startswith(".tmp-"):
            path = path.rename(path.with_name(f".tmp-removed-{path.name}"))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:  # for example, a reader on a network file system still holds a file
        log.warning("could not remove %s (%s); trying again at the next save", path, error.strerror)


# --------------------------------------------------------------- in memory, which outlives the ranks, but not a launch
#
#     slot 0    head │ model.pt │ optimizer.pt │ … │ manifest      a whole checkpoint
#     slot 1    head │ model.pt │ optimi                           the next one, which is being written
#
# The launcher holds the slots (`comm/meeting/secret.py`), so they survive the death of any rank, and of all. A save
# clears the head of the older slot first, and writes it last. So a process that is killed at any moment leaves the
# other slot whole. A head says where the manifest is, and which step the run has committed last.
#
# A launch may run several fits. So each checkpoint names its own, and no other fit takes it.


_HEAD = struct.Struct("<QQQ")  # start and size of the manifest, in bytes, 0 if nothing is whole; the last step


class _InSlot(NamedTuple):
    """A checkpoint in a slot. Only reading the parts tells whether they are whole."""

    slot: int
    manifest: Manifest
    last_step: int


class CheckpointMemory:
    """Keeps the last two checkpoints of a run in memory that the launcher holds. One process at a time writes there.

    Cost: as that of a folder, without the disk; 24 bytes are written in each step.

    Args:
        paths: of the two slots, which are opened at the first use.
        fit: the number of the fit in the program, which is the same after a restart.

    Attributes:
        last_step: the last step that was committed, as `newest` has found it; None: it has found none.

    Raises:
        ConfigError: from each method: there is no such memory, or it cannot be opened from here.
    """

    def __init__(self, paths: Sequence[str], *, fit: int) -> None:
        self._paths, self._fit = paths, fit
        self.last_step: int | None = None
        self._latest: int | None = None  # the slot of the last whole checkpoint
        self._has_warned = False

    def save(
        self, step: int, parts: Mapping[str, object], *, meta: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Writes a checkpoint in place of the older one, as `CheckpointStore.save`. Returns the slot's path.

        If it needs more memory than there is, it is left out with a warning.

        Raises:
            CheckpointError: a value cannot be stored. What was there before is untouched.
            ConfigError: as for the warning, before this fit has saved two; the message has both numbers.
        """
        saved = self._saved()
        orders = {each.slot: each.manifest.order for each in saved}
        number = min(range(len(self._slots)), key=lambda slot: orders.get(slot, 0))
        slot, start, entries = self._slots[number], _HEAD.size, dict[str, Any]()
        meta = {**meta, "fit": self._fit}
        path = Path(self._paths[number])
        with _explained(path):
            for name, content in parts.items():
                if why := refusal_of(content):
                    raise CheckpointError(f"part {name!r} must hold tensors and plain values only ({why})")
            try:
                self._reserve(_num_bytes(parts))
                self._clear(number)
                for name, content in parts.items():
                    entries[name] = _written(cast(IO[bytes], _End(slot, start)), name, content)
                    start += entries[name]["bytes"]
                manifest = _manifest_of(step, 1 + max(orders.values(), default=0), score, entries, meta)
                size = _End(slot, start).write(to_json(manifest).encode())
            except OSError as error:
                if sum(self._is_mine(each) for each in saved) < 2:
                    raise ConfigError(
                        f"memory_steps: {error.strerror}; leave it out, and save to the disk more often (every_steps)"
                    ) from error
                if not self._has_warned:
                    log.warning("no checkpoint of step %d in memory: %s; the older one stays", step, error.strerror)
                self._has_warned = True
                return path
            os.pwrite(slot, _HEAD.pack(start, size, step), 0)
            self._latest = number
        return path

    def _reserve(self, num_bytes: int) -> None:
        """Takes the memory for two checkpoints of this size, or raises OSError. What is there stays."""
        missing, free = sum(max(0, num_bytes - os.fstat(slot).st_size) for slot in self._slots), available_bytes()
        if missing > free:  # else the kernel may kill a process for it
            need = f"two checkpoints need {binary_size(missing)} more memory, and {binary_size(free)} are free here"
            raise OSError(errno.ENOMEM, need)
        for slot in self._slots:
            os.posix_fallocate(slot, 0, num_bytes)  # which leaves a larger one as it is

    def _is_mine(self, saved: _InSlot) -> bool:
        return saved.manifest.meta.get("fit") == self._fit

    def note(self, step: int) -> None:
        """Records the last step that was committed, next to the last checkpoint."""
        if self._latest is not None:
            os.pwrite(self._slots[self._latest], step.to_bytes(8, "little"), _HEAD.size - 8)

    def clear(self) -> None:
        """Forgets both checkpoints, because the run continues from an earlier one."""
        for number in range(len(self._slots)):
            self._clear(number)
        self._latest = None

    def newest(self) -> StoredCheckpoint | None:
        """Returns the newest whole checkpoint of this fit; None without one. Drops a damaged one, with a warning."""
        mine = list(filter(self._is_mine, self._saved()))
        self.last_step = max((each.last_step for each in mine), default=None)
        for each in mine:
            try:
                found, self._latest = self._read(each), each.slot
                return found
            except CheckpointError as error:
                log.warning("dropped the checkpoint of step %d in memory: %s", each.manifest.step, error)
                self._clear(each.slot)  # so that the next save does not take the place of a whole one
        return None

    @cached_property
    def _slots(self) -> list[int]:
        """Returns the descriptors."""
        slots: list[int] = []
        with contextlib.suppress(OSError):  # of a launcher in another container, say
            slots = [open_memory(path) for path in self._paths]
        if not slots:
            raise ConfigError(
                "memory_steps: no launcher of this package on rank 0's host holds memory; start the run by ddp.launch "
                "or scripts/ddp train, or leave it out, and save to the disk more often (every_steps)"
            )
        for slot in slots:
            weakref.finalize(self, os.close, slot)
        return slots

    def _saved(self) -> list[_InSlot]:
        """Returns the checkpoints of all fits, the last saved first, without reading their parts."""
        found = []
        for number, slot in enumerate(self._slots):
            start, size, last_step = _HEAD.unpack(os.pread(slot, _HEAD.size, 0) or bytes(_HEAD.size))
            if size:
                most = os.fstat(slot).st_size  # of a damaged head, too
                text = os.pread(slot, min(size, most), min(start, most)).decode(errors="replace")
                try:
                    found.append(_InSlot(number, _manifest_in(text), last_step))
                except CheckpointError as error:
                    log.warning("dropped a checkpoint in memory: %s", error)
                    self._clear(number)
        return sorted(found, key=lambda each: -each.manifest.order)

    def _read(self, saved: _InSlot) -> StoredCheckpoint:
        start, files = _HEAD.size, dict[str, IO[bytes]]()
        with mmap.mmap(self._slots[saved.slot], 0, prot=mmap.PROT_READ) as slot:
            for name, entry in saved.manifest.parts.items():
                files[name] = io.BytesIO(slot[start : start + entry.bytes])
                start += entry.bytes
        return _loaded(saved.manifest, files, IN_MEMORY)

    def _clear(self, number: int) -> None:
        os.pwrite(self._slots[number], bytes(_HEAD.size), 0)


def _num_bytes(parts: Mapping[str, object]) -> int:
    """Returns about as many bytes as a checkpoint has; a later one has little more, because histories grow."""
    values = tree_leaves(dict(parts))
    return int(1.01 * sum(each.nbytes if isinstance(each, Tensor) else 1000 for each in values)) + (1 << 20)


class _End(io.RawIOBase):
    """The end of a file from `start` on, to be written; it grows if there is memory."""

    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._position = descriptor, start

    def write(self, data: Any, /) -> int:
        rest, end = (view := memoryview(data).cast("B")), self._position + len(view)
        if end > os.fstat(self._descriptor).st_size and len(view) > available_bytes():
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        while rest:  # a call writes 2 GB at most
            rest = rest[os.pwrite(self._descriptor, rest, end - len(rest)) :]
        self._position = end
        return len(view)
