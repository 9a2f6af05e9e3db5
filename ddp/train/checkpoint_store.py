"""Checkpoints as files: whole or absent, verified when read, pruned when written. One process writes a folder.

    checkpoints/
        step-00000120/            one checkpoint
            model.pt, ...         parts: torch.save of tensors and plain values (loadable with weights_only=True)
            manifest.json         {schema, step, order, score, parts: {name: {bytes, sha256}}, meta, sha256}
        latest, best              one line each, the folder's name: for people and scripts
        .tmp-step-00000130/       being written
        .old-step-00000120/       being replaced
        .lock                     while a process saves here: who

What a save does, and why a process killed between any two lines leaves a valid checkpoint behind:

    write     parts and manifest into .tmp-..., each flushed to the disk     killed: the next save sweeps .tmp-...
    publish   rename to step-..., flush the parent                           atomic
    point     replace `latest` and `best`                                    killed: they lag; no code relies on them
    prune     remove all but the last k and the best                         renamed to .tmp-... first, so never half

A step that exists already steps aside as .old-... before the new one is published; readers take the .old-... while the
new one is missing. Readers write nothing, so they may run beside the writer.

"Last" means last saved (`order` counts saves), not the greatest step: a run may go back to an earlier checkpoint.

Cost: one pass of SHA-256 over the bytes (about 1 s per 2 GB) on top of writing, the same on top of reading.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import torch

from ddp.errors import CheckpointError, ConfigError
from ddp.files import Hold, flush_folder, hold, json_object, make_folder, write_whole
from ddp.log import log

SCHEMA = 1
_MANIFEST = "manifest.json"
_FOLDER_NAME = re.compile(r"step-(\d{8,})")
_PART_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint whose files were verified.

    Attributes:
        step: committed steps at the time.
        path: its folder.
        score: the figure that decides about `best`, if there was one.
        meta: what was saved beside the parts; JSON values.
        parts: name to content, tensors on the CPU.
    """

    step: int
    path: Path
    score: float | None
    meta: Mapping[str, Any]
    parts: Mapping[str, Any]


class _Saved(NamedTuple):
    path: Path
    manifest: dict[str, Any]


class _Listed(NamedTuple):
    """A folder's checkpoints. Whether the parts are whole, only reading them tells."""

    saved: list[_Saved]  # the last saved first
    unreadable: list[Path]  # manifest missing or damaged


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: made at the first save.
        keep_last: how many of the last saved to keep.
        best: which score is better; None keeps none for its score.

    Raises:
        ConfigError: `keep_last` below 1, or another word for `best`.
    """

    def __init__(self, folder: Path | str, *, keep_last: int = 3, best: Literal["max", "min"] | None = "max") -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last must be at least 1, got {keep_last}")
        if best not in ("max", "min", None):
            raise ConfigError(f"best must be 'max', 'min' or None, got {best!r}")
        self.folder, self.keep_last, self.best = Path(folder), keep_last, best

    # ---------------------------------------------------------------------------------------------------------- save

    def save(
        self, step: int, parts: Mapping[str, object], *, meta: Mapping[str, Any], score: float | None = None
    ) -> Path:
        """Writes a checkpoint, replacing one of the same step, and prunes. Returns its folder.

        Args:
            step: committed steps, at least 0.
            parts: name to content; `name` is stored as name.pt.
            meta: JSON values, readable without the parts.
            score: a score that is not finite counts as none.

        Raises:
            CheckpointError: a name or a value cannot be stored, or the disk refuses (path and reason). What was there
                before is untouched.
            ConfigError: another process saves here (`hold`).
        """
        if step < 0:
            raise CheckpointError(f"cannot save step {step}: steps count from 0")
        path = self.folder / f"step-{step:08d}"
        temporary = self.folder / f".tmp-{path.name}"
        with closing(self.hold()), _explained(path):
            self._sweep()
            try:
                self._write(temporary, step, parts, meta, score)
                self._publish(temporary, path)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            self._point("latest", path)
            if (best := self._best()) is not None:
                self._point("best", best)
            self._prune(keep=best)
        return path

    def hold(self) -> Hold:
        """Keeps other processes from saving here until it is closed; makes the folder.

        Raises:
            ConfigError: another process saves here; says which.
            CheckpointError: the disk refuses.
        """
        with _explained(self.folder):
            make_folder(self.folder)
            return hold(self.folder)

    def _sweep(self) -> None:
        """Removes what killed saves left, and brings back what they were about to replace."""
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
        folder.mkdir()
        manifest = {
            "schema": SCHEMA,
            "step": step,
            "order": 1 + max((saved.manifest["order"] for saved in self._listed().saved), default=0),
            "score": float(score) if score is not None and math.isfinite(score) else None,
            "parts": {name: _write_part(folder, name, content) for name, content in parts.items()},
            "meta": dict(meta),
        }
        try:
            manifest = json.loads(json.dumps(manifest))  # as a reader will see it
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"meta must hold JSON values only: {error}") from error
        text = json.dumps({**manifest, "sha256": _digest(manifest)}, indent=1)
        write_whole(folder / _MANIFEST, text)

    def _publish(self, temporary: Path, path: Path) -> None:
        old = path.with_name(f".old-{path.name}")
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        flush_folder(self.folder)
        if old.exists():
            _remove(old)

    def _point(self, name: str, path: Path) -> None:
        write_whole(self.folder / name, f"{path.name}\n")

    def _best(self) -> Path | None:
        """The folder with the best score, the last saved of equals; None without scores, or if nobody asked."""
        if self.best is None:
            return None
        scored = [saved for saved in self._listed().saved if saved.manifest["score"] is not None]
        sign = 1.0 if self.best == "max" else -1.0
        return max(scored, key=lambda saved: sign * float(saved.manifest["score"])).path if scored else None

    def _prune(self, *, keep: Path | None) -> None:
        saved, unreadable = self._listed()
        for path in [*(one.path for one in saved), *unreadable][self.keep_last :]:
            if path != keep:
                _remove(path)

    # ---------------------------------------------------------------------------------------------------------- load

    def load(self, which: Path | str | None = None, *, names: Collection[str] | None = None) -> StoredCheckpoint:
        """The last saved checkpoint whose files are whole; those that are not are skipped, with a warning.

        Args:
            which: None for this store; another folder of checkpoints; or one checkpoint, which then has to be whole.
            names: parts to load; None for all. Every part is verified in any case.

        Raises:
            CheckpointError: there is none, or what is wrong with each.
        """
        folder = self.folder if which is None else Path(which)
        if _is_checkpoint(folder):
            try:
                return _read(folder, names)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{folder} cannot be loaded: {error}; name another checkpoint, "
                    f"or the folder {folder.parent} to take the last one that is whole"
                ) from error
        store = self if folder == self.folder else CheckpointStore(folder)
        return store._load_newest(names)

    def _load_newest(self, names: Collection[str] | None) -> StoredCheckpoint:
        saved, unreadable = self._listed()
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
            raise CheckpointError(f"no checkpoint in {self.folder} is whole: {'; '.join(wrong)}")
        raise CheckpointError(f"no checkpoint in {self.folder}: check the path, or start without resuming")

    def read_meta(self, which: Path | str | None = None) -> StoredCheckpoint:
        """The checkpoint that `load(which)` would take, verified, with `parts` empty: no tensor is made."""
        return self.load(which, names=())

    def latest_step(self) -> int | None:
        """Step of the last saved checkpoint with a readable manifest; None if there is none."""
        saved = self._listed().saved
        return int(saved[0].manifest["step"]) if saved else None

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending; whether they are whole is seen when one is loaded."""
        return sorted(self._folders())

    def _folders(self) -> dict[int, Path]:
        """Step to folder: published ones, and those that a save was about to replace."""
        found: dict[int, Path] = {}
        for prefix in (".old-", ""):  # a published one wins
            for path in self.folder.glob(f"{prefix}step-*"):
                if match := _FOLDER_NAME.fullmatch(path.name.removeprefix(prefix)):
                    found[int(match[1])] = path
        return found

    def _listed(self) -> _Listed:
        listed = _Listed([], [])
        for _, path in sorted(self._folders().items(), reverse=True):
            try:
                listed.saved.append(_Saved(path, _read_manifest(path)))
            except CheckpointError:
                listed.unreadable.append(path)
        listed.saved.sort(key=lambda saved: int(saved.manifest["order"]), reverse=True)
        return listed


# ------------------------------------------------------------------------------------------------- writing to the disk


class _HashingFile(io.RawIOBase):
    """What torch.save writes to: counts and hashes on the way to the file.

    It reports no error to torch.save, whose archive writer answers one with a message about positions; the first error
    is kept for `_write_part` to raise.
    """

    def __init__(self, file: io.BufferedWriter) -> None:
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


def _write_part(folder: Path, name: str, content: object) -> dict[str, Any]:
    """Writes name.pt to the disk; returns its entry in the manifest."""
    if not _PART_NAME.fullmatch(name):
        raise CheckpointError(f"{name!r} cannot name a part: use letters, digits, '_', '-' and '.'")
    path = folder / f"{name}.pt"
    with path.open("wb") as file:
        hashing = _HashingFile(file)
        try:
            torch.save(content, cast(IO[bytes], hashing))
        except Exception as error:
            raise CheckpointError(f"part {name!r} cannot be written: {error}") from error
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")  # reads no tensor: a few ms
    except Exception as error:
        raise CheckpointError(
            f"part {name!r} could be written but not read back: it must hold tensors and plain values only "
            f"({cause_of(error)})"
        ) from error
    return {"bytes": hashing.num_bytes, "sha256": hashing.sha256.hexdigest()}


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns a refusal of the file system into an error that names what was being saved."""
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
    """Removes a folder or file, now or at the next sweep; being killed half-way leaves no half checkpoint."""
    try:
        if not path.name.startswith(".tmp-"):
            path = path.rename(path.with_name(f".tmp-removed-{path.name}"))
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:  # say, a reader on a network file system still holds a file
        log.warning("could not remove %s (%s); trying again at the next save", path, error.strerror)


# ------------------------------------------------------------------------------------------------ reading and verifying


def _is_checkpoint(folder: Path) -> bool:
    return (folder / _MANIFEST).exists() or _FOLDER_NAME.fullmatch(folder.name) is not None


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the manifest's content, its own `sha256` left out."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json_object((folder / _MANIFEST).read_text(encoding="utf-8"))
        schema = manifest["schema"]
        whole = manifest["sha256"] == _digest(manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"it has no {_MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{_MANIFEST} cannot be read ({error})") from error
    if not whole:
        raise CheckpointError(f"{_MANIFEST} has changed since it was written")
    if schema != SCHEMA:
        raise CheckpointError(f"its schema is {schema}, this version of ddp reads {SCHEMA}")
    return manifest


def _read(folder: Path, names: Collection[str] | None) -> StoredCheckpoint:
    """One checkpoint, all parts verified, those in `names` loaded; CheckpointError says what is wrong with it."""
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
