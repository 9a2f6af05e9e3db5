"""A region: a name under which other jobs of the host see parameters and buffers while a run trains them.

    the run        region = Region("mine", …)     step_ended: after each update; close
    another job    look("mine")                   parameters and buffers, as they were between two updates

The run makes a snapshot only if a job asks for one, so a run without lookers has no overhead:

    looker      makes the file `asked`, and waits for a new snapshot
    rank 0      finds `asked` at the end of a step, and copies parameters and buffers
    a thread    writes the copy next to the snapshot, renames it to the snapshot, and removes `asked`

One snapshot serves all jobs that ask within EVERY_S of it, and no second one is made before. A snapshot is complete,
because it gets its name once it has been written.

Where a region is found:

    /dev/shm/ddp-region-UID-NAME/     only its user can enter; held (`process/files.py`) for as long as it is kept
        region.json                   which process keeps it, and where the snapshot is
        asked                         a job waits for a snapshot
    region.pt                         the snapshot: in the folder of the run, or in the one above if the run has none

A killed process leaves these files. Since the kernel releases its lock, they are ignored, and the next region of this
name removes them.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp.errors import CheckpointError, ConfigError, one_line
from ddp.process.clock import Patience, now_s
from ddp.process.files import ANYTHING, hold, is_held, new_file, read_own, to_read, user_name, why_shared, write_whole
from ddp.process.records import Count, from_json, json_object, made, to_json
from ddp.process.terminal import log
from ddp.setting import check_region

EVERY_S = 10.0
"""Seconds between two snapshots, which are also the age up to which one serves a look."""
LONGEST_LOOK_S = 30.0
_ENTRY, _ASKED, _SNAPSHOT = "region.json", "asked", "region.pt"
_POLL_S = 0.02


# --- the run ---------------------------------------------------------------------------------------------------------


class Region:
    """Publishes parameters and buffers under a name, until it is closed or the process ends. Used by one thread.

    Args:
        state: returns, by key of the state dict, parameters and buffers as they are now.
        about: plain values for a looker.
        folder: of the run, for the snapshot; None: it has none.

    Raises:
        ConfigError: the name is not allowed, or another run keeps a region of this name.
        OSError: a folder cannot be written.
    """

    def __init__(
        self,
        name: str,
        state: Callable[[], Mapping[str, Tensor]],
        about: Mapping[str, Any],
        *,
        folder: Path | None = None,
    ) -> None:
        self._name, self._state, self._about, self._pid = name, state, to_json(dict(about)), os.getpid()
        self._writer: threading.Thread | None = None
        self._last_s = -EVERY_S
        with contextlib.ExitStack() as until_closed:
            kept = until_closed.enter_context(_kept_folder(name))
            self._asked, self._snapshot = kept / _ASKED, (folder or kept).absolute() / _SNAPSHOT
            self._written = self._snapshot.with_name(f".tmp-{_SNAPSHOT}")
            (kept / _ENTRY).unlink(missing_ok=True)  # first, because a killed process may have left all of them
            for path in (self._asked, self._written, self._snapshot):
                path.unlink(missing_ok=True)
                until_closed.callback(path.unlink, missing_ok=True)
            until_closed.callback(self.wait)
            until_closed.callback((kept / _ENTRY).unlink, missing_ok=True)
            entry = _Entry(self._pid, socket.gethostname(), str(self._snapshot), dict(about))
            write_whole(kept / _ENTRY, to_json(asdict(entry)))
            atexit.register(self.close)
            until_closed.callback(atexit.unregister, self.close)
            self._until_closed = until_closed.pop_all()

    def step_ended(self, step: int) -> None:
        """Copies parameters and buffers if a job has asked for a snapshot. No rank changes them meanwhile.

        Failure to copy is a warning, because an error would be raised on this rank alone.
        """
        is_writing = self._writer is not None and self._writer.is_alive()
        if is_writing or now_s() - self._last_s < EVERY_S or not self._asked.exists():
            return
        self._last_s = now_s()
        try:
            self._writer = threading.Thread(target=self._write, args=(self._snapshot_of(step),), daemon=True)
            self._writer.start()
        except Exception as error:
            self._end_request(error)

    def wait(self) -> None:
        """Waits until a snapshot that is being written is complete."""
        if self._writer is not None and self._writer.ident is not None:
            self._writer.join(LONGEST_LOOK_S)

    def close(self) -> None:
        """Ends the region for all lookers. Does nothing in a forked child of the process that keeps it."""
        if self._pid == os.getpid():
            self._until_closed.close()

    @torch.no_grad()
    def _snapshot_of(self, step: int) -> dict[str, Any]:
        state = self._state()
        copies = {id(each): each.detach().clone() for each in state.values()}  # one of a tensor with two keys
        return {"step": step, "about": self._about, "weights": {key: copies[id(each)] for key, each in state.items()}}

    def _write(self, snapshot: Mapping[str, Any]) -> None:
        try:
            with new_file(self._written, mode=0o600) as file:
                torch.save(snapshot, file)
            self._written.replace(self._snapshot)
        except Exception as error:
            self._end_request(error)
        else:
            self._end_request()

    def _end_request(self, error: Exception | None = None) -> None:
        if error is not None:
            log.warning("region=%s shows nothing new, and the training continues: %s", self._name, one_line(error))
        with contextlib.suppress(OSError):
            self._asked.unlink(missing_ok=True)


# --- another job -----------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """Parameters and buffers at one moment.

    Attributes:
        step: number of the last update before it.
        weights: the state dict, in its own memory.
        about: plain values of the run.
    """

    step: int
    weights: dict[str, Tensor]
    about: dict[str, Any]


def look(name: str) -> Look:
    """Returns a snapshot of a region, which is at most EVERY_S old or made at the end of the next step.

    Raises:
        ConfigError: the name is not allowed.
        CheckpointError: there is no region of this name, it has just ended, or no step ends within LONGEST_LOOK_S.
    """
    folder, entry, patience = _folder(name), _entry(name), Patience(LONGEST_LOOK_S)
    path, asked = Path(entry.snapshot), folder / _ASKED
    found = _version(path)
    is_found = found is not None and 0 <= time.time() - found[1] / 1e9 < EVERY_S
    while not is_found:
        is_asked = asked.exists()  # first, because the snapshot is there before `asked` is removed
        if is_found := _version(path) not in (None, found):
            break
        if why := _why_ended(folder, entry):
            with contextlib.suppress(OSError):  # the run could not remove its folder if a job asked meanwhile
                asked.unlink(missing_ok=True)
                folder.rmdir()
            raise _ended(name, entry, why)
        if not patience.left_s():
            raise _never_shown(name, entry)
        if not is_asked:
            with contextlib.suppress(OSError):
                asked.touch(mode=0o600)
        time.sleep(_POLL_S)
    try:
        with to_read(path) as file:
            snapshot = torch.load(file, map_location="cpu", weights_only=True)
        return Look(snapshot["step"], snapshot["weights"], json_object(snapshot["about"]))
    except FileNotFoundError as error:
        raise _ended(name, entry, "has just ended") from error
    except Exception as error:
        raise CheckpointError(f"region={name}: {path} is damaged ({one_line(error)}): {_instead(entry)}") from error


def _version(snapshot: Path) -> tuple[int, int] | None:
    """Returns the inode of a snapshot and its time of writing in ns, which differ between two; None: no file."""
    with contextlib.suppress(OSError):
        status = snapshot.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _why_ended(folder: Path, entry: _Entry) -> str:
    """Returns how the region has ended; "" if it has not."""
    with contextlib.suppress(OSError, ValueError):
        if _read(folder) == entry:
            return "" if is_held(folder) else "was killed"
    return "has just ended"


# --- where regions are found -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """The content of region.json."""

    pid: Count
    host: str
    snapshot: str
    about: dict[str, Any]


def _regions_folder() -> Path:
    """Returns the folder of all regions of the host: one in memory, so that no file outlives the processes there."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _folder(name: str) -> Path:
    check_region(name)
    return _regions_folder() / f"ddp-region-{os.geteuid()}-{name}"


@contextlib.contextmanager
def _kept_folder(name: str) -> Iterator[Path]:
    """Makes the folder of a region, and holds it until the block ends.

    Raises:
        ConfigError: another process holds it.
    """
    folder, held = _folder(name), None
    while held is None:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        try:
            status = folder.lstat()
        except FileNotFoundError:  # the process that had it has just removed it
            continue
        if why := why_shared(folder, status, rights=ANYTHING):
            raise ConfigError(f"region={name}: {why}, and only you should: take another name")
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"region={name}: {folder} is no folder: remove it, or take another name")
        try:
            held = hold(folder)
        except FileNotFoundError:  # as above
            continue
        except ConfigError as error:
            if is_held(folder):  # and not only asked about by a looker
                raise _kept(name, folder) from error
    try:
        if held.count > 1:
            raise _kept(name, folder)
        yield folder
    finally:
        held.close()
        with contextlib.suppress(OSError):  # another process has it by now
            (folder / _ASKED).unlink(missing_ok=True)
            folder.rmdir()


def refuse_kept(name: str) -> None:
    """Raises ConfigError if another run keeps a region of this name; for a check before a run begins."""
    if _kept_entry(folder := _folder(name)):
        raise _kept(name, folder)


def left_behind() -> list[Path]:
    """Returns the folders of regions whose process was killed; of this user's, as far as this process can see."""
    mine = _regions_folder().glob(f"ddp-region-{os.geteuid()}-*")
    return [folder for folder in mine if (folder / _ENTRY).exists() and not _kept_entry(folder)]


def _kept(name: str, folder: Path) -> ConfigError:
    try:
        entry = _read(folder)
        run = entry.about.get("run_dir")
        keeper = f"{_keeper(entry)}{f', for the run in {run}' if run else ''}"
    except (OSError, ValueError):
        keeper = "a run that is just beginning"
    return ConfigError(f"region={name} is kept by {keeper}: wait until it has ended, or take another name")


def _entry(name: str) -> _Entry:
    """Returns the content of region.json.

    Raises:
        CheckpointError: no process keeps the region, or others could have written the file.
    """
    folder = _folder(name)
    with contextlib.suppress(OSError):
        if why := why_shared(folder, folder.lstat(), rights=ANYTHING):
            raise CheckpointError(f"region={name}: {why}, and only you should: remove it")
    if (entry := _kept_entry(folder)) is None:
        raise _not_kept(name)
    return entry


def _read(folder: Path) -> _Entry:
    """Returns the content of region.json.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, or others could have written it.
    """
    if why := why_shared(folder, folder.lstat(), rights=ANYTHING):
        raise ValueError(why)
    return made(_Entry, from_json(read_own(folder / _ENTRY)))


def _kept_entry(folder: Path) -> _Entry | None:
    """Returns the content of region.json if a process keeps the region in this folder."""
    with contextlib.suppress(OSError, ValueError):
        entry = _read(folder)
        return entry if is_held(folder) else None
    return None


def _keeper(entry: _Entry) -> str:
    return f"process {entry.pid} on host {entry.host}"


def _instead(entry: _Entry) -> str:
    run = entry.about.get("run_dir")
    return f"load its last checkpoint, ddp.load({run!r}, 'latest')" if run else "start it again"


def _not_kept(name: str) -> CheckpointError:
    """Returns the error for a name that no process of this user keeps."""
    mine, others = [], []
    for folder in _regions_folder().glob("ddp-region-*"):
        with contextlib.suppress(OSError):  # it has just been removed
            uid, _, called = folder.name.removeprefix("ddp-region-").partition("-")
            if uid == str(os.geteuid()):
                mine += [called] if _kept_entry(folder) else []
            elif called == name:
                others.append(user_name(folder.lstat().st_uid))
    if others:
        return CheckpointError(f"region={name} belongs to {others[0]}, and only that user can look at it")
    near = sorted(mine, key=lambda each: difflib.SequenceMatcher(None, name, each).ratio(), reverse=True)
    remedy = f"a run publishes it with strategy=central_storage strategy.region={name} until it ends"
    if near:
        remedy = f"take {'one of those' if len(near) > 1 else 'the only one'} kept, {', '.join(near)}"
    return CheckpointError(f"no run on this host keeps region={name}: {remedy}")


def _ended(name: str, entry: _Entry, how: str) -> CheckpointError:
    return CheckpointError(f"region={name}: {_keeper(entry)} {how}: {_instead(entry)}")


def _never_shown(name: str, entry: _Entry) -> CheckpointError:
    what = f"for {LONGEST_LOOK_S:g} s, {_keeper(entry)} has made no snapshot, as it does at the end of a step"
    return CheckpointError(f"region={name}: {what}: look again; if the run does not continue, {_instead(entry)}")
