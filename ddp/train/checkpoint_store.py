"""The folder of a run's checkpoints, from the side of the writer: whole or absent, and pruned when written.

What a save does, and why a process killed between any two lines leaves a valid checkpoint behind:

    write     parts and manifest into .tmp-..., each flushed to the disk     killed: the next save removes .tmp-...
    publish   rename to step-..., flush the parent                           atomic
    point     replace `latest` and `best`                                    killed: they lag; no code reads them
    prune     remove all but the last k and the best few                     renamed to .tmp-... first, so never half

A checkpoint of the same step that exists already steps aside as .old-... before the new one is published.

One process writes a folder: see `hold`. Cost: one pass of SHA-256 over the bytes (about 1 s per 2 GB) on top of
writing.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

import torch

from ddp.errors import CheckpointError
from ddp.process.files import Hold, flush_folder, hold, make_folder, new_file, write_whole
from ddp.process.log import log
from ddp.train.stored_checkpoint import MANIFEST, SCHEMA, cause_of, digest, listed


class CheckpointStore:
    """Writes the checkpoints of one run.

    Args:
        folder: made at the first save.
        keep_last: how many of the last saved to keep.
        keep_best: how many of those with the best scores to keep.
        best: which score is better; None keeps none for its score.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        best: Literal["max", "min"] | None = "max",
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
                self._write(temporary, step, parts, meta, score)
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
        """Removes what killed saves left, and restores what they were about to replace."""
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
            "order": 1 + max((saved.manifest["order"] for saved in listed(self.folder).saved), default=0),
            "score": float(score) if score is not None and math.isfinite(score) else None,
            "parts": {name: _write_part(folder, name, content) for name, content in parts.items()},
            "meta": dict(meta),
        }
        manifest = json.loads(json.dumps(manifest))  # as a reader will see it
        write_whole(folder / MANIFEST, json.dumps({**manifest, "sha256": digest(manifest)}, indent=1))

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
        scored = [saved for saved in listed(self.folder).saved if saved.manifest["score"] is not None]
        sign = 1.0 if self.best == "max" else -1.0
        scored.sort(key=lambda saved: -sign * float(saved.manifest["score"]))
        return [saved.path for saved in scored[: self.keep_best]]

    def _prune(self, *, keep: Collection[Path]) -> None:
        saved, unreadable = listed(self.folder)
        for path in [*(one.path for one in saved), *unreadable][self.keep_last :]:
            if path not in keep:
                _remove(path)


class _HashingFile(io.RawIOBase):
    """The file that torch.save writes to; counts and hashes on the way.

    It reports no error to torch.save, whose archive writer would answer with a message about positions; it keeps the
    first error for `_write_part` to raise.
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


def _write_part(folder: Path, name: str, content: object) -> dict[str, Any]:
    """Writes name.pt to the disk; returns its entry in the manifest."""
    path = folder / f"{name}.pt"
    with new_file(path) as file:
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
