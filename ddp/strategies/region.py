"""A region: parameters in shared memory at which other jobs of the host may look while they are trained.

    the run        region = Region("mine", …)     begin, end: around each update; close
    another job    look("mine")                   a copy of parameters and buffers, as they were between two updates

Whoever looks writes nothing, and the run never waits for them. A copy never has numbers of two updates, because a
sequence number stands beside them (a seqlock; Boehm, "Can seqlocks get along with programming language memory models?",
MSPC 2012):

    writer    the number becomes odd     all ranks update     it becomes even again
    reader    is it even?                copy                 is it the same? otherwise once more

Note "order". All of this needs that nobody sees a new parameter before the odd number, or the even number before a new
parameter. An x86 core shows its stores in their order, and loads in theirs. One of ARM need not, so that a fence stands
on both sides: a lock is released and taken again. ARM performs all that comes before a release before it, all that
comes after an acquire after it, and does not exchange a release with a later acquire. What other ranks store comes
between the two numbers by the barriers of the host, which are made of the same instructions. The number is eight
aligned bytes, which are stored at once.

Where a region is found:

    /dev/shm/ddp-region-UID-NAME/     only its user can enter; held (`process/files.py`) for as long as it is kept
        region.json                   which process keeps it, where its memory is, and where each tensor lies there

The memory has no name, and is opened as /proc/PID/fd/N, for reading only. The link there has a random part, so that
nothing else is taken for it. A killed process leaves a folder that nobody keeps: the next run of this name takes it.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import mmap
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp.comm.transport.shared_memory import LINE_BYTES, Life, SharedMemory
from ddp.errors import CheckpointError, ConfigError, one_line
from ddp.process.clock import Patience
from ddp.process.files import ANYTHING, hold, read_own, user_name, why_shared, write_whole
from ddp.process.log import log
from ddp.process.records import json_object, to_json
from ddp.setting import check_region
from ddp.units import counted

LONGEST_LOOK_S = 30.0
_ENTRY = "region.json"
_MEMORIES = ("header", "parameters")
_SEQUENCE, _STEP = 0, 1  # words of the header, behind which the buffers stand
_CLOSED = -1  # a sequence number that no other follows
_POLL_S = 50e-6


class _Place(NamedTuple):
    """Says where a tensor lies: in which memory, from which byte on, and in which form."""

    memory: str
    start: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Fence:
    """Keeps what a thread loads and stores before it from what it does afterwards: see the note "order"."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


# --- the run ---------------------------------------------------------------------------------------------------------


class Region:
    """Publishes parameters and buffers under a name, until it is closed or the process ends. Used by one thread.

    Args:
        memory: in which the parameters lie. Its path can still be opened.
        tensors: by key of the state dict, what lies there.
        buffers: returns, by key, the buffers of this rank as they are now, which are copied at the end of each update.
        about: plain values for whoever looks.
        step: number of the last update.

    Raises:
        ConfigError: no region can be called so, or another run keeps one of this name.
        OSError: there is not enough memory.
    """

    def __init__(
        self,
        name: str,
        memory: SharedMemory,
        tensors: Mapping[str, Tensor],
        buffers: Callable[[], Mapping[str, Tensor]],
        about: Mapping[str, Any],
        *,
        step: int = 0,
    ) -> None:
        starts, size, first = {}, LINE_BYTES, buffers()
        for key, buffer in first.items():
            starts[key] = size
            size += -(-buffer.nbytes // LINE_BYTES) * LINE_BYTES
        self._name, self._pid, self._fence, self._buffers = name, os.getpid(), _Fence(), buffers
        with contextlib.ExitStack() as until_closed:
            folder = until_closed.enter_context(_kept_folder(name))
            header = SharedMemory.create("memfd", size)
            until_closed.callback(header.forget)
            parameters = os.open(memory.path, os.O_RDONLY | os.O_CLOEXEC)
            until_closed.callback(os.close, parameters)
            self._words = memoryview(header.buffer).cast("q")
            self._copies = {
                key: header.bytes[start : start + first[key].nbytes].view(first[key].dtype).view(first[key].shape)
                for key, start in starts.items()
            }
            self._note(step)
            places = {key: _place("parameters", memory, tensor) for key, tensor in tensors.items()}
            places |= {key: _place("header", header, tensor) for key, tensor in self._copies.items()}
            entry = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "namespace": _pid_namespace(),
                "header": _described(int(Path(header.path).name), size),
                "parameters": _described(parameters, memory.bytes.numel()),
                "tensors": places,
                "about": dict(about),
            }
            until_closed.callback((folder / _ENTRY).unlink, missing_ok=True)
            write_whole(folder / _ENTRY, to_json(entry))
            atexit.register(self.close)
            until_closed.callback(atexit.unregister, self.close)
            self._until_closed = until_closed.pop_all()

    def begin(self) -> None:
        """Tells whoever looks to wait. From its return on, parameters may change."""
        if self._words[_SEQUENCE] != _CLOSED:
            self._words[_SEQUENCE] |= 1  # it is odd already after an update that broke off
            self._fence()

    def end(self, step: int) -> None:
        """Shows the parameters, which no rank changes any more, and copies the buffers.

        Buffers that cannot be copied end the region, not the training: an error would be that of this rank alone.

        Args:
            step: number of this update.
        """
        if self._words[_SEQUENCE] != _CLOSED:
            try:
                self._note(step)
            except Exception as error:
                log.warning("region=%s ends here, and the training goes on: %s", self._name, one_line(error))
                self.close()
            else:
                self._fence()
                self._words[_SEQUENCE] = (self._words[_SEQUENCE] | 1) + 1

    def close(self) -> None:
        """Ends it for whoever looks. In a forked child of the process that keeps it, does nothing."""
        if self._pid == os.getpid():
            self._words[_SEQUENCE] = _CLOSED
            self._until_closed.close()

    @torch.no_grad()
    def _note(self, step: int) -> None:
        for key, buffer in self._buffers().items():
            copy = self._copies[key]
            if (buffer.shape, buffer.dtype) != (copy.shape, copy.dtype):
                raise ValueError(
                    f"the buffer {key} is {_form(buffer)} now, and was {_form(copy)} when the region was made, which "
                    "keeps the place of each"
                )
            copy.copy_(buffer)
        self._words[_STEP] = step


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def _place(name: str, memory: SharedMemory, tensor: Tensor) -> _Place:
    num_bytes = _extent(tensor.shape, tensor.stride()) * tensor.element_size()
    start = tensor.data_ptr() - memory.address if num_bytes else 0
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Place(name, start, num_bytes, dtype, tuple(tensor.shape), tensor.stride())


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns how many elements lie from the first to the last one of a tensor."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0


def _described(descriptor: int, num_bytes: int) -> tuple[int, str, int]:
    """Returns by what another process finds the memory behind a descriptor, and knows it again."""
    return descriptor, _link(os.getpid(), descriptor), num_bytes


def _link(pid: int, descriptor: int) -> str:
    return str(Path(f"/proc/{pid}/fd/{descriptor}").readlink()).removesuffix(" (deleted)")


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


# --- another job -----------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """Parameters and buffers at one moment.

    Attributes:
        step: number of the last update before it.
        weights: the state dict, in memory of its own.
        about: what the run has told.
    """

    step: int
    weights: dict[str, Tensor]
    about: dict[str, Any]


def look(name: str) -> Look:
    """Returns a copy of what a region has now.

    Raises:
        ConfigError: no region can be called so.
        CheckpointError: there is none of this name, it cannot be opened, or it has just ended.
    """
    entry = _entry(name)
    pid: int = entry["pid"]
    with contextlib.closing(Life(pid)) as life:
        try:
            mapped = {each: np.frombuffer(_mapped(pid, *entry[each]), np.uint8) for each in _MEMORIES}
        except OSError as error:
            raise _unreachable(name, entry, error, has_ended=not life.goes_on()) from error
        form = {key: _place_in(each) for key, each in entry["tensors"].items()}
        copies = {place: torch.empty(place.num_bytes, dtype=torch.uint8, device="cpu") for place in form.values()}
        pairs = [
            (copy.numpy(), mapped[place.memory][place.start : place.start + place.num_bytes])
            for place, copy in copies.items()
        ]
        words, fence = mapped["header"][:LINE_BYTES].view(np.int64), _Fence()
        patience, num_torn = Patience(LONGEST_LOOK_S), 0
        while True:
            before = int(words[_SEQUENCE])
            if before % 2 == 0:
                fence()
                for mine, theirs in pairs:
                    np.copyto(mine, theirs)
                step = int(words[_STEP])
                fence()
                if words[_SEQUENCE] == before:
                    break
                num_torn += 1
            elif before == _CLOSED or not life.goes_on():
                raise _ended(name, entry, by_itself=before == _CLOSED)
            else:
                time.sleep(_POLL_S)
            if not patience.left_s():
                raise _never_whole(name, entry, num_torn)
    weights = {
        key: copies[place].view(getattr(torch, place.dtype)).as_strided(place.shape, place.stride)
        for key, place in form.items()
    }
    return Look(step, weights, entry["about"])


def _place_in(entry: Sequence[Any]) -> _Place:
    memory, start, num_bytes, dtype, shape, stride = entry
    return _Place(memory, start, num_bytes, dtype, tuple(shape), tuple(stride))


def _mapped(pid: int, descriptor: int, link: str, num_bytes: int) -> mmap.mmap:
    """Maps memory of another process, to be read.

    Raises:
        OSError: it cannot be reached from here, or is there no more.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    if _link(pid, descriptor) != link:
        raise FileNotFoundError(errno.ENOENT, f"is no longer {link}", path)
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size < num_bytes:
            raise FileNotFoundError(errno.ENOENT, f"has no {num_bytes} bytes", path)
        return mmap.mmap(opened, num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(opened)


# --- where regions are found -----------------------------------------------------------------------------------------


def _home() -> Path:
    """Returns the folder of all regions of the host: one in memory, so that no file outlives the processes there."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _folder(name: str) -> Path:
    check_region(name)
    return _home() / f"ddp-region-{os.geteuid()}-{name}"


@contextlib.contextmanager
def _kept_folder(name: str) -> Iterator[Path]:
    """Makes the folder of a region, which no other process has until the block ends.

    Raises:
        ConfigError: another process has it.
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
            raise _kept(name, folder) from error
    try:
        if held.count > 1:
            raise _kept(name, folder)
        yield folder
    finally:
        held.close()
        with contextlib.suppress(OSError):  # another process has it by now
            folder.rmdir()


def refuse_kept(name: str) -> None:
    """Raises ConfigError if another run keeps a region of this name, before a run begins that would find out later."""
    if _is_kept(folder := _folder(name)):
        raise _kept(name, folder)


def left_behind() -> list[Path]:
    """Returns the folders of regions whose process was killed; of this user's, as far as this process can see."""
    mine = _home().glob(f"ddp-region-{os.geteuid()}-*")
    return [folder for folder in mine if (folder / _ENTRY).exists() and not _is_kept(folder)]


def _kept(name: str, folder: Path) -> ConfigError:
    try:
        entry = _read(folder)
        run = entry["about"].get("run_dir")
        keeper = f"{_keeper(entry)}{f', for the run in {run}' if run else ''}"
    except (OSError, _Damaged):
        keeper = "a run that is just beginning"
    return ConfigError(f"region={name} is kept by {keeper}: wait until it has ended, or take another name")


def _entry(name: str) -> dict[str, Any]:
    """Returns the content of region.json.

    Raises:
        CheckpointError: there is none, or others could have written it.
    """
    folder = _folder(name)
    try:
        if why := why_shared(folder, folder.lstat(), rights=ANYTHING):
            raise CheckpointError(f"region={name}: {why}, and only you should: remove it")
        return _read(folder)
    except (OSError, _Damaged) as error:
        raise _nobody(name) from error


class _Damaged(Exception):
    """A region.json is not as `Region` writes it."""


def _read(folder: Path) -> dict[str, Any]:
    """Returns the content of region.json, of which each part has the type and the range that it needs.

    Raises:
        OSError: there is none.
        _Damaged: it is not so, or others could have written it.
    """
    if why_shared(folder, folder.lstat(), rights=ANYTHING):
        raise _Damaged
    try:
        entry = json_object(read_own(folder / _ENTRY))
        sizes = {each: entry[each][2] for each in _MEMORIES}
        words = [entry["host"], entry["namespace"], *(entry[each][1] for each in _MEMORIES)]
        is_sound = (
            _are_counts([entry["pid"], *sizes.values(), *(entry[each][0] for each in _MEMORIES)])
            and 0 < entry["pid"] < 1 << 31
            and sizes["header"] >= LINE_BYTES
            and all(isinstance(word, str) for word in words)
            and isinstance(entry["about"], dict)
            and all(_lies_in(sizes, _place_in(each)) for each in entry["tensors"].values())
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _Damaged from error
    if not is_sound:
        raise _Damaged
    return entry


def _lies_in(sizes: Mapping[str, int], place: _Place) -> bool:
    """Returns True if the bytes of a tensor are those of its form, and are in the memory that it names."""
    return (
        _are_counts([place.start, place.num_bytes, *place.shape, *place.stride])
        and place.num_bytes == _extent(place.shape, place.stride) * getattr(torch, place.dtype).itemsize
        and place.start + place.num_bytes <= sizes[place.memory]
    )


def _are_counts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and value >= 0 for value in values)


def _is_kept(folder: Path) -> bool:
    """Returns True if a process keeps the region in this folder, as far as this process can see."""
    try:
        entry = _read(folder)
        return all(_link(entry["pid"], entry[each][0]) == entry[each][1] for each in _MEMORIES)
    except (OSError, _Damaged):
        return False


def _keeper(entry: Mapping[str, Any]) -> str:
    return f"process {entry['pid']} on host {entry['host']}"


def _instead(entry: Mapping[str, Any]) -> str:
    run = entry["about"].get("run_dir")
    return f"load its last checkpoint, ddp.load({run!r}, 'latest')" if run else "start it again"


def _nobody(name: str) -> CheckpointError:
    """Returns the error for a name that no process of this user keeps."""
    mine, others = [], []
    for folder in _home().glob("ddp-region-*"):
        with contextlib.suppress(OSError):  # it has just been removed
            uid, _, called = folder.name.removeprefix("ddp-region-").partition("-")
            if uid == str(os.geteuid()):
                mine += [called] if _is_kept(folder) else []
            elif called == name:
                others.append(user_name(folder.lstat().st_uid))
    if others:
        return CheckpointError(f"region={name} is that of {others[0]}, and only its own user can look at it")
    near = sorted(mine, key=lambda each: difflib.SequenceMatcher(None, name, each).ratio(), reverse=True)
    remedy = f"a run publishes it with strategy=central_storage strategy.region={name} until it ends"
    if near:
        remedy = f"take {'one of those' if len(near) > 1 else 'the only one'} kept, {', '.join(near)}"
    return CheckpointError(f"nobody on this host keeps region={name}: {remedy}")


def _unreachable(name: str, entry: Mapping[str, Any], error: OSError, *, has_ended: bool) -> CheckpointError:
    """Returns the error for memory that cannot be opened."""
    if entry["namespace"] == _pid_namespace() and (isinstance(error, FileNotFoundError) or has_ended):
        return _nobody(name)
    where = f"the memory of {_keeper(entry)} cannot be opened from here ({error.strerror})"
    return CheckpointError(f"region={name}: {where}: look from the same container")


def _ended(name: str, entry: Mapping[str, Any], *, by_itself: bool) -> CheckpointError:
    how = "has just ended" if by_itself else "was killed in the midst of an update"
    return CheckpointError(f"region={name}: {_keeper(entry)} {how}: {_instead(entry)}")


def _never_whole(name: str, entry: Mapping[str, Any], num_torn: int) -> CheckpointError:
    what = f"{_keeper(entry)} has been in the midst of an update: if it does not go on"
    if num_torn:
        what = f"an update has overtaken {counted(num_torn, 'look')}: leave a core to whoever looks; failing that"
    return CheckpointError(f"region={name}: for {LONGEST_LOOK_S:g} s, {what}, {_instead(entry)}")
